"""Times the 2:4 GEMMs of experts (V:2:M) against the dense GEMMs they stand for.

    uv run --extra cuda experiments/bench_experts.py
    uv run --extra cuda experiments/bench_experts.py --experts 8 --share-of-first 0.9

One token in one of E experts, M = 4 E. The dense GEMM is over all neurons, as cuBLAS
runs it. Random bfloat16 operands, as they lie in memory in a training step, with second
rows for the features that stay whole in GEMMs 5 and 6; every result is compared with
float32 on some of its rows before anything is timed, with every config that the search
of `bench_matmul` would try, and the fastest is kept. `--tune` writes it where an FFN
looks it up, with the time of packing the sparse operand; `--shipped` as there.

One H200: less than a minute for one number of experts.
"""

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

from experiments.bench_matmul import saver
from experiments.expert_shares import expert_shares
from experiments.provenance import commit
from experiments.rows import append_rows
from experiments.timing import time_queued
from pallas_kernels import grouped_matmul_sm90 as grouped
from pallas_kernels import tuning
from pallas_kernels.sparse_matmul_configs import (
    Shape,
    default_config,
    why_invalid,
)
from sparsejax.formats import compress, decompress
from sparsejax.ops.backend import current_device
from sparsejax.ops.ffn_spec import FFNSparsity, dense_feature_count
from sparsejax.ops.packed_rows import (
    keep_rows,
    row_gradient,
    row_gradient_over_tokens,
    row_groups,
    used_tiles,
)
from sparsejax.ops.sparse_matmul import pack_weight
from sparsejax.packing import Packed, in_blocks, pack, unpack
from sparsejax.pruning import magnitude_mask
from sparsejax.router import Dispatch, dispatch

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
    tune: bool = False
    """Keep the fastest config of every shape, and the times."""
    shipped: bool = False
    """With --tune: keep it in the table of this package, not in your cache folder."""
    rounds: int = 5
    results: Path | None = Path("runs/bench_experts.jsonl")
    """One JSON line per GEMM is appended; None writes nothing. Rows that are to stay:
    experiments/results/bench_experts.jsonl."""


class Problem(NamedTuple):
    """One GEMM of E experts and its operands."""

    shape: Shape
    sparse: Callable[..., Any]
    """Of the operands, and of `config_for`."""
    operands: tuple
    dense: Callable[[jax.Array, jax.Array], jax.Array]
    of_dense: tuple[jax.Array, jax.Array]
    pack: Callable[..., Any]
    """Makes the sparse operand of `source`; of 5 and 6 those of both."""
    source: tuple
    expected: Callable[[], tuple[Callable[[Any], jax.Array], np.ndarray]]
    """Takes some of the result, and what that is in float32."""


def main(config: Config) -> list[dict]:
    """Checks, times, prints and records every GEMM; returns the rows."""
    if config.tune and config.share_of_first is not None:
        raise ValueError(
            f"tune=True keeps what FFNs look up, and share_of_first="
            f"{config.share_of_first} is not usual; leave one of them out"
        )
    save = saver(tune=config.tune, shipped=config.shipped)
    rows: list[dict] = []
    for experts in config.experts:
        for gemm in config.gemms:
            problem = make_problem(config, gemm, experts)
            times, entry = _times(config, problem)
            if config.tune:
                save(current_device().kind, [entry])
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
                **times,
                "device": current_device().kind,
                "jax": entry.jax,
                "commit": entry.commit,
                "date": entry.date,
            }
            rows.append(row)
            print(
                f"{row['name']}: dense {row['dense_us']:.0f} us, sparse "
                f"{row['sparse_us']:.0f}, {row['speedup']:.2f}x "
                f"({row['spread'][0]:.2f}-{row['spread'][1]:.2f}), "
                f"pack {row['pack_us']:.0f}",
                flush=True,
            )
            append_rows([row], config.results)
    return rows


def _times(config: Config, problem: Problem) -> tuple[dict, tuning.Entry]:
    multiprocessors = current_device().count_multiprocessors()
    configs = tuning.candidates(problem.shape, multiprocessors)
    if not configs:
        heuristic = default_config(problem.shape, multiprocessors)
        reason = why_invalid(heuristic, problem.shape)
        raise ValueError(
            f"v={config.v}, T={config.tokens}, d={config.d_model}, F={config.d_hidden} "
            f"have no grouped 2:4 kernel: {reason}"
        )

    def compiled(kernel) -> Callable:
        run = partial(
            problem.sparse,
            config_for=lambda _: kernel,
            multiprocessors=multiprocessors,
        )
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
    pack = jax.jit(problem.pack).lower(*problem.source).compile()
    packing = {"pack": partial(pack, *problem.source)}
    (packed,), _ = time_queued(packing, baseline="pack", rounds=config.rounds)
    entry = tuning.Entry(
        shape=problem.shape,
        config=names[best.name],
        sparse_us=round(1e3 * best.time_ms, 2),
        dense_us=round(1e3 * by_name["dense"].time_ms, 2),
        # GEMMs 5 and 6 share one pass.
        pack_us=round(1e3 * packed.time_ms / (1 + problem.shape.sums_over_tokens), 2),
        jax=jax.__version__,
        date=f"{datetime.now(UTC):%Y-%m-%d}",
        commit=commit(),
    )
    return {
        "dense_us": entry.dense_us,
        "sparse_us": entry.sparse_us,
        "pack_us": entry.pack_us,
        "speedup": round(1 / best.ratio, 4),
        "spread": [round(1 / best.ratio_max, 4), round(1 / best.ratio_min, 4)],
        "error": error,
        "config": asdict(entry.config),
    }, entry


def _check(problem: Problem, call: Callable[[], Any]) -> float:
    some, expected = problem.expected()
    got = np.asarray(some(call()), np.float32)
    error = float(np.linalg.norm(got - expected) / np.linalg.norm(expected))
    assert error < 3e-3, f"{problem.shape}: relative error {error}"
    return error


def make_problem(config: Config, gemm: Gemm, experts: int) -> Problem:
    """Random operands of a size."""
    routed = _routed(config, experts)
    used = int(used_tiles(routed))
    expert = np.asarray(routed.tile_expert)[:used]
    rows, own = routed.row_token.size, config.d_hidden // experts
    d, keys = config.d_model, jax.random.split(jax.random.key(0), 4)
    normal = partial(jax.random.normal, dtype=jnp.bfloat16)
    tokens_by_d = normal(keys[0], (config.tokens, d))
    tokens_by_f = normal(keys[1], (config.tokens, config.d_hidden))
    lookup = routed.tile_expert, used_tiles(routed)
    grouped_shape = partial(Shape, experts=experts, group_tile=config.v)
    # The last expert's first tile.
    last, tile = int(expert[-1]), int(np.flatnonzero(expert == expert[-1])[0])
    some = slice(tile * config.v, tile * config.v + 64)
    if gemm == "1":
        packed = _sparse(keys[2], (config.d_hidden, d))
        x = normal(keys[3], (rows, d))

        def expected():
            a = _dense(packed)[last * own : (last + 1) * own]
            return (lambda out: out[some]), np.asarray(x[some], np.float32) @ a.T

        scale = jnp.full((1, 1), 1.483)
        return Problem(
            grouped_shape(m=own, n=rows, k=d),
            partial(grouped.sparse_weights, experts=experts),
            (packed.values, packed.metadata, x, *lookup),
            jnp.matmul,
            (tokens_by_d, normal(keys[2], (d, config.d_hidden))),
            partial(pack_weight, axis=-2, dtype=jnp.dtype(jnp.bfloat16)),
            (jax.random.normal(keys[2], (d, config.d_hidden)), scale),
            expected,
        )
    keep = partial(keep_rows, by_token=True)
    kept = jax.jit(keep)(tokens_by_f, routed)
    if gemm in ("2", "4"):
        packed = _sparse(keys[2], (rows, own))
        k_major = gemm == "4"
        stored = (d, experts, own) if k_major else (experts, own, d)
        b = normal(keys[3], stored)

        def expected():
            of_last = b[:, last].T if k_major else b[last]
            product = _dense(packed)[some] @ np.asarray(of_last, np.float32)
            return (lambda out: out[some]), product

        weight = b.reshape(d, -1) if k_major else b.reshape(-1, d)
        gradient = partial(row_gradient, by_token=True)
        return Problem(
            grouped_shape(m=rows, n=d, k=own, b_k_major=k_major, transpose_out=False),
            partial(grouped.sparse_rows, b_k_major=k_major),
            (packed.values, packed.metadata, b, *lookup),
            (lambda a, w: a @ w.T) if k_major else jnp.matmul,
            (tokens_by_f, weight),
            gradient if k_major else keep,
            (tokens_by_f, kept if k_major else routed),
            expected,
        )
    whole = FFNSparsity().dense_features
    twice = in_blocks(dense_feature_count(own, whole))
    packed = _sparse(keys[2], (own + twice, rows))
    b, up = normal(keys[3], (rows, d)), gemm == "5"
    ends = jnp.cumsum(-(-routed.group_sizes // config.v), dtype=jnp.int32)
    range_of_last = slice(tile * config.v, used * config.v)

    def of_last(results):
        first, second = (r[:, last].T if up else r[last] for r in results)
        return jnp.concatenate([first[:64], second[-64:]])

    def expected():
        a = np.concatenate([_dense(packed)[:64], _dense(packed)[-64:]])
        product = a[:, range_of_last] @ np.asarray(b[range_of_last], np.float32)
        return of_last, product

    shape = grouped_shape(
        m=own + twice, n=d, k=rows, b_k_major=False, transpose_out=up, float32_out=True
    )
    options = {"group_tile": config.v, "transpose_out": up, "rows_apart": twice}

    def dense(lhs, rhs):
        return jnp.matmul(lhs.T, rhs, preferred_element_type=jnp.float32)

    def pack_over_rows(da, kept):
        groups = row_groups(FFNSparsity(dense_features=whole), config.tokens, kept)
        return row_gradient_over_tokens(groups, da, kept, by_token=True)

    return Problem(
        shape,
        partial(grouped.sparse_over_rows, **options),
        (packed.values, packed.metadata, b, ends),
        dense,
        (tokens_by_d, tokens_by_f) if up else (tokens_by_f, tokens_by_d),
        pack_over_rows,
        (tokens_by_f, kept),
        expected,
    )


def _routed(config: Config, experts: int) -> Dispatch:
    """Tokens of each expert as `share_of_first` says, in random order."""
    shares = np.full(experts, 1 / experts)
    if config.share_of_first is not None:
        shares = expert_shares(experts, config.share_of_first)
    ends = np.round(np.cumsum(shares) * config.tokens)
    expert = np.searchsorted(ends, np.arange(config.tokens), side="right")
    expert = np.random.default_rng(0).permutation(expert).astype(np.int32)
    return jax.jit(dispatch, static_argnums=(1, 2))(expert[:, None], experts, config.v)


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
