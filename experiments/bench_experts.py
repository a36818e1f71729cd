"""Times the 2:4 GEMMs of experts (V:2:M) against the dense GEMMs they stand for.

    uv run --extra cuda experiments/bench_experts.py
    uv run --extra cuda experiments/bench_experts.py --experts 8 --share-of-first 0.9

One token in one of E experts, M = 4 E. The dense GEMM is over all neurons, as cuBLAS
runs it. Random bfloat16 operands, as they lie in memory in a training step; every
result is compared with float32 on some of its rows before anything is timed; with every
config that the search of `bench_matmul` would try, and the fastest is kept.

One H200: less than a minute for one number of experts.
"""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from experiments.provenance import commit
from experiments.timing import time_queued
from pallas_kernels import grouped_matmul_sm90 as grouped
from pallas_kernels import tuning
from pallas_kernels.sparse_matmul_configs import (
    Shape,
    default_config,
    why_invalid,
)
from sparsejax.formats import compress, decompress
from sparsejax.packing import Packed, pack, unpack
from sparsejax.pruning import magnitude_mask

Gemm = Literal["1", "2", "4", "5", "6"]


@dataclass(frozen=True, kw_only=True)
class Config:
    """What is timed, and where the rows go."""

    tokens: int = 16384
    d_model: int = 4096
    d_hidden: int = 16384
    experts: tuple[int, ...] = (2, 4, 8)
    v: int = 128
    """Rows of a V:2:M block."""
    gemms: tuple[Gemm, ...] = ("1", "2", "4", "5", "6")
    """By the number of their equation; 1, with the weights 2:4, stands for 3 too."""
    share_of_first: float | None = None
    """Of the tokens, in the first expert; None: equally many in each."""
    rounds: int = 5
    results: Path | None = Path("experiments/results/bench_experts.jsonl")
    """One JSON line per GEMM is appended; None writes nothing."""


class Problem(NamedTuple):
    """One GEMM of E experts and its operands."""

    shape: Shape
    sparse: Callable[..., Any]
    """Of the operands, and of `config_for`."""
    operands: tuple
    dense: Callable[[jax.Array, jax.Array], jax.Array]
    of_dense: tuple[jax.Array, jax.Array]
    expected: Callable[[], tuple[Any, np.ndarray]]
    """An index of the result, and what is there in float32."""


def main(config: Config) -> list[dict]:
    """Checks, times, prints and records every GEMM; returns the rows."""
    rows: list[dict] = []
    for experts in config.experts:
        for gemm in config.gemms:
            problem = make_problem(config, gemm, experts)
            row: dict = {
                "name": f"GEMM {gemm} of {experts} experts",
                "shape": {
                    "T": config.tokens,
                    "d": config.d_model,
                    "F": config.d_hidden,
                    "E": experts,
                    "V": config.v,
                },
                "share_of_first": config.share_of_first,
                **_times(config, problem),
                "device": jax.devices()[0].device_kind,
                "jax": jax.__version__,
                "commit": commit(),
                "date": f"{datetime.now(UTC):%Y-%m-%d}",
            }
            rows.append(row)
            print(
                f"{row['name']}: dense {row['dense_us']:.0f} us, sparse "
                f"{row['sparse_us']:.0f}, {row['speedup']:.2f}x "
                f"({row['spread'][0]:.2f}-{row['spread'][1]:.2f})",
                flush=True,
            )
            if config.results is not None:
                with config.results.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    return rows


def _times(config: Config, problem: Problem) -> dict:
    configs = tuning.candidates(problem.shape)
    if not configs:
        reason = why_invalid(default_config(problem.shape), problem.shape)
        raise ValueError(
            f"v={config.v}, T={config.tokens}, d={config.d_model}, F={config.d_hidden} "
            f"have no grouped 2:4 kernel: {reason}"
        )

    def compiled(kernel) -> Callable:
        run = partial(problem.sparse, config_for=lambda _: kernel)
        program = jax.jit(run).lower(*problem.operands).compile()
        return partial(program, *problem.operands)

    with ThreadPoolExecutor(8) as pool:
        programs = pool.map(compiled, configs)
        calls = dict(zip(map(str, configs), programs, strict=True))
    error = _check(problem, calls[str(configs[0])])
    dense = jax.jit(problem.dense).lower(*problem.of_dense).compile()
    calls["dense"] = partial(dense, *problem.of_dense)
    timings, _ = time_queued(calls, baseline="dense", rounds=config.rounds)
    by_name = {timing.name: timing for timing in timings}
    names = {str(kernel): kernel for kernel in configs}
    best = by_name[min(names, key=lambda name: by_name[name].time_ms)]
    return {
        "dense_us": round(1e3 * by_name["dense"].time_ms, 2),
        "sparse_us": round(1e3 * best.time_ms, 2),
        "speedup": round(1 / best.ratio, 4),
        "spread": [round(1 / best.ratio_max, 4), round(1 / best.ratio_min, 4)],
        "error": error,
        "config": asdict(names[best.name]),
    }


def _check(problem: Problem, call: Callable[[], jax.Array]) -> float:
    index, expected = problem.expected()
    got = np.asarray(call()[index], np.float32)
    error = float(np.linalg.norm(got - expected) / np.linalg.norm(expected))
    assert error < 3e-3, f"{problem.shape}: relative error {error}"
    return error


def make_problem(config: Config, gemm: Gemm, experts: int) -> Problem:
    """Random operands of a size."""
    sizes = _group_tiles(config, experts)
    expert = np.repeat(np.arange(experts), sizes).astype(np.int32)
    rows, own = expert.size * config.v, config.d_hidden // experts
    d, keys = config.d_model, jax.random.split(jax.random.key(0), 4)
    normal = partial(jax.random.normal, dtype=jnp.bfloat16)
    tokens_by_d = normal(keys[0], (config.tokens, d))
    tokens_by_f = normal(keys[1], (config.tokens, config.d_hidden))
    lookup = jnp.asarray(expert), jnp.int32(expert.size)
    grouped_shape = partial(Shape, experts=experts, group_tile=config.v)
    tile = int(np.flatnonzero(expert == expert[-1])[0])
    some = slice(tile * config.v, tile * config.v + 64)
    last = int(expert[-1])
    if gemm == "1":
        packed = _sparse(keys[2], (config.d_hidden, d))
        x = normal(keys[3], (rows, d))
        weight = normal(keys[2], (d, config.d_hidden))

        def expected():
            a = _dense(packed)[last * own : (last + 1) * own]
            return (some,), np.asarray(x[some], np.float32) @ a.T

        return Problem(
            grouped_shape(m=own, n=rows, k=d),
            partial(grouped.sparse_weights, experts=experts),
            (packed.values, packed.metadata, x, *lookup),
            jnp.matmul,
            (tokens_by_d, weight),
            expected,
        )
    if gemm in ("2", "4"):
        packed = _sparse(keys[2], (rows, own))
        k_major = gemm == "4"
        stored = (d, experts, own) if k_major else (experts, own, d)
        b = normal(keys[3], stored)

        def expected():
            of_last = b[:, last].T if k_major else b[last]
            return (some,), _dense(packed)[some] @ np.asarray(of_last, np.float32)

        weight = b.reshape(d, -1) if k_major else b.reshape(-1, d)
        return Problem(
            grouped_shape(m=rows, n=d, k=own, b_k_major=k_major, transpose_out=False),
            partial(grouped.sparse_rows, b_k_major=k_major),
            (packed.values, packed.metadata, b, *lookup),
            (lambda a, w: a @ w.T) if k_major else jnp.matmul,
            (tokens_by_f, weight),
            expected,
        )
    packed = _sparse(keys[2], (own, rows))
    b, up = normal(keys[3], (rows, d)), gemm == "5"
    ends = jnp.asarray(np.cumsum(sizes), jnp.int32)
    range_of_last = slice(tile * config.v, rows)

    def expected():
        a = _dense(packed)[:64, range_of_last]
        product = a @ np.asarray(b[range_of_last], np.float32)
        if up:
            return (slice(None), last, slice(64)), product.T
        return (last, slice(64)), product

    shape = grouped_shape(
        m=own, n=d, k=rows, b_k_major=False, transpose_out=up, float32_out=True
    )

    def dense(lhs, rhs):
        return jnp.matmul(lhs.T, rhs, preferred_element_type=jnp.float32)

    return Problem(
        shape,
        partial(grouped.sparse_over_rows, group_tile=config.v, transpose_out=up),
        (packed.values, packed.metadata, b, ends),
        dense,
        (tokens_by_d, tokens_by_f) if up else (tokens_by_f, tokens_by_d),
        expected,
    )


def _group_tiles(config: Config, experts: int) -> list[int]:
    """Of each expert."""
    share = config.share_of_first
    shares = [1 / experts] * experts
    if share is not None:
        if not 0 < share < 1 or experts == 1:
            raise ValueError(
                f"share_of_first={share} of {experts} experts: give a share between 0 "
                f"and 1, and two experts or more"
            )
        shares = [share] + [(1 - share) / (experts - 1)] * (experts - 1)
    return [-(-round(s * config.tokens) // config.v) for s in shares]


def _sparse(key: jax.Array, shape: tuple[int, int]) -> Packed:
    @jax.jit
    def make(key):
        x = jax.random.normal(key, shape, jnp.bfloat16)
        return pack(compress(x, mask=magnitude_mask(x)))

    return make(key)


def _dense(packed: Packed) -> np.ndarray:
    return np.asarray(jax.jit(lambda p: decompress(unpack(p)))(packed), np.float32)


if __name__ == "__main__":
    main(tyro.cli(Config))
