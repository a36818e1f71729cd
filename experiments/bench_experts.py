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
from typing import Any

import jax
import numpy as np
import tyro

from experiments.bench_matmul import saver
from experiments.expert_shares import expert_shares
from experiments.provenance import commit
from experiments.rows import append_rows
from pallas_kernels import tuning
from pallas_kernels.sparse_matmul_configs import (
    default_config,
    why_invalid,
)
from sparsejax import expert_gemms
from sparsejax.expert_gemms import Problem
from sparsejax.ffn_gemms import Gemm
from sparsejax.ops.backend import current_device
from sparsejax.router import Dispatch, dispatch
from sparsejax.timing import time_queued
from sparsejax.tune import EXPERTS_ERROR


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
            problem = expert_gemms.make_problem(
                gemm,
                config.tokens,
                config.d_model,
                config.d_hidden,
                _routed(config, experts),
            )
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
        run = partial(problem.sparse, kernel)
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
    error = expert_gemms.error(problem, call)
    assert error < EXPERTS_ERROR, f"{problem.shape}: relative error {error}"
    return error


def _routed(config: Config, experts: int) -> Dispatch:
    """Tokens of each expert as `share_of_first` says, in random order."""
    shares = np.full(experts, 1 / experts)
    if config.share_of_first is not None:
        shares = expert_shares(experts, config.share_of_first)
    ends = np.round(np.cumsum(shares) * config.tokens)
    expert = np.searchsorted(ends, np.arange(config.tokens), side="right")
    expert = np.random.default_rng(0).permutation(expert).astype(np.int32)
    return jax.jit(dispatch, static_argnums=(1, 2))(expert[:, None], experts, config.v)


if __name__ == "__main__":
    main(tyro.cli(Config))
