"""Times the 2:4 GEMMs of training against the dense ones, and packing against a copy.

    uv run --extra cuda experiments/bench_matmul.py
    uv run --extra cuda experiments/bench_matmul.py --tune
    uv run --extra cuda experiments/bench_matmul.py --shapes 4096,2048,8192 --gemms 2 4

GEMMs 1 and 3 are one problem: `X W1` and `dY W2^T` both multiply (T, d) by a weight
that is 2:4 along d and give (T, F); the others are listed in `ffn_gemms`. Operands are
random bfloat16; the result is compared with float32 before anything is timed; sparse
and dense run in turn. Packing a weight is its soft threshold, read once. With `--tune`
every shape's configs are searched first and the fastest is kept in your cache folder
(--shipped: in `pallas_kernels/tuned/`, as developers do). Where PyTorch has cuSPARSELt,
`--peer` times its best algorithm in turn with the rest.

One H200, 24 shapes with --tune --peer --rounds 3: about 7 minutes. Expected there for
T of 4096 and more: the kernel alone 1.45 to 1.65 times as fast as cuBLAS, held down by
the power limit.
"""

import importlib
import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from experiments.power import PowerSampler
from experiments.provenance import commit
from experiments.rows import append_rows
from pallas_kernels import tuning
from pallas_kernels.sparse_matmul_configs import Shape
from sparsejax.ffn_gemms import Gemm, Problem, errors, make_problem
from sparsejax.ops.backend import current_device
from sparsejax.timing import time_queued
from sparsejax.tune import compile_all, measured, trial_of_problem

WIDTHS = (
    (2048, 8192),
    (2048, 8448),
    (4096, 14336),
    (4096, 16384),
    (5120, 13824),
    (8192, 28672),
)
TOKENS = (1024, 4096, 16384, 32768)


@dataclass(frozen=True, kw_only=True)
class Config:
    """What is timed, and where the rows go."""

    shapes: tuple[str, ...] = tuple(
        f"{tokens},{d},{f}" for d, f in WIDTHS for tokens in TOKENS
    )
    """T,d,F of each comparison."""
    gemms: tuple[Gemm, ...] = ("1",)
    """By the number of their equation; 1 stands for 3 as well."""
    tune: bool = False
    """Search the configs of every shape first, and keep the fastest."""
    shipped: bool = False
    """With --tune: keep it in the table of this package, not in your cache folder."""
    peer: bool = False
    """Also time cuSPARSELt through PyTorch, for GEMMs 1 and 3."""
    rounds: int = 5
    results: Path | None = Path("runs/bench_matmul.jsonl")
    """One JSON line per row is appended; None writes nothing. Rows that are to stay:
    experiments/results/bench_matmul.jsonl."""


def main(config: Config) -> list[dict]:
    """Checks, times, prints and records every shape; returns the rows."""
    device = current_device().kind
    save = saver(tune=config.tune, shipped=config.shipped)
    rows = []
    with PowerSampler() as power:
        sizes = [_sizes(text) for text in config.shapes]
        for gemm, size in itertools.product(config.gemms, sizes):
            problem = make_problem(gemm, *size)
            if config.tune:
                entry = measured(trial_of_problem(problem))
                save(device, [replace(entry, commit=commit())])
            row = _row(config, problem, power) | {
                "device": device,
                "jax": jax.__version__,
                "commit": commit(),
                "date": f"{datetime.now(UTC):%Y-%m-%d}",
            }
            rows.append(row)
            print(_line(row), flush=True)
            append_rows([row], config.results)
    return rows


def saver(*, tune: bool, shipped: bool) -> Callable[[str, list[tuning.Entry]], None]:
    """Where what was found of a kind of GPU is kept. Raises ValueError for `shipped`
    where nothing is to be found."""
    if shipped and not tune:
        raise ValueError("--shipped says where to keep what --tune finds; add --tune")
    return tuning.save_shipped if shipped else tuning.save


def _sizes(text: str) -> tuple[int, int, int]:
    try:
        tokens, d_model, d_hidden = (int(size) for size in text.split(","))
    except ValueError as error:
        raise ValueError(
            f"shape {text!r} is not T,d,F; give for example 4096,2048,8192"
        ) from error
    return tokens, d_model, d_hidden


def _check(problem: Problem, candidate: jax.Array) -> tuple[float, float]:
    """Relative errors against float32 of the candidate, which is right, and of the
    dense GEMM."""
    ours, bound, dense = errors(problem, candidate)
    assert ours <= bound, f"{problem.shape}: error {ours}, dense {dense}"
    return ours, dense


def _row(config: Config, problem: Problem, power: PowerSampler) -> dict:
    kernel_config = tuning.config_for(current_device(), problem.shape)
    source, b = problem.source, problem.b
    multiplying = compile_all(
        {
            "dense": (problem.dense, (problem.masked_once, b)),
            "sparse": (partial(problem.sparse, kernel_config), (problem.packed, b)),
            "pack and sparse": (problem.pack_and_multiply, (source, b)),
        }
    )
    two = jnp.asarray(2, problem.copied.dtype)
    moving = compile_all(
        {
            "scaled copy": (jnp.multiply, (problem.copied, two)),
            "pack": (problem.pack, (source,)),
        }
    )
    once, again = (problem.whole(multiplying["sparse"]()) for _ in range(2))
    np.testing.assert_array_equal(once, again)
    error, dense_error = _check(problem, once)
    peers = _peers(problem.shape) if config.peer and problem.gemm == "1" else {}
    timings, spans = time_queued(
        {**multiplying, **peers}, baseline="dense", rounds=config.rounds
    )
    # By themselves: in the same rounds, what only moves bytes would let the chip rest.
    moved, _ = time_queued(moving, baseline="scaled copy", rounds=config.rounds)
    timing = {t.name: t for t in (*timings, *moved)}
    us = {name: round(1e3 * t.time_ms, 2) for name, t in timing.items()}
    ratio = timing["sparse"]
    return {
        "name": "GEMM 1 or 3" if problem.gemm == "1" else f"GEMM {problem.gemm}",
        "shape": {"T": problem.tokens, "d": problem.d_model, "F": problem.d_hidden},
        "backend": "mosaic_sm90",
        "dense_us": us["dense"],
        "sparse_us": us["sparse"],
        "pack_us": us["pack"],
        "copy_us": us["scaled copy"],
        "pack_and_sparse_us": us["pack and sparse"],
        "peer_us": us.get("peer, transposed"),
        "peer_as_is_us": us.get("peer, as is"),
        "speedup": round(1 / ratio.ratio, 4),
        "spread": [round(1 / ratio.ratio_max, 4), round(1 / ratio.ratio_min, 4)],
        "speedup_with_pack": round(1 / timing["pack and sparse"].ratio, 4),
        "speedup_vs_peer": _ratio(us.get("peer, transposed"), us["sparse"]),
        "speedup_vs_peer_as_is": _ratio(us.get("peer, as is"), us["sparse"]),
        "error": error,
        "dense_error": dense_error,
        **_draw(power, spans, "dense"),
        **_draw(power, spans, "sparse"),
    }


def _draw(power: PowerSampler, spans: dict, name: str) -> dict:
    draws = [draw for span in spans[name] if (draw := power.between(*span))]
    if not draws:
        return {}
    return {
        f"{name}_clock_mhz": statistics.median(d.clock_mhz for d in draws),
        f"{name}_watts": round(statistics.median(d.watts for d in draws), 1),
    }


def _ratio(other: float | None, own: float) -> float | None:
    return None if other is None else round(other / own, 4)


def _line(row: dict) -> str:
    shape = row["shape"]
    return (
        f"{row['name']:<11} T {shape['T']:5} d {shape['d']:4} F {shape['F']:5}: dense "
        f"{row['dense_us']:8.1f} us, sparse {row['sparse_us']:8.1f}, "
        f"{row['speedup']:.2f}x ({row['spread'][0]:.2f}-{row['spread'][1]:.2f}), with "
        f"pack {row['speedup_with_pack']:.2f}x; pack {row['pack_us']:.1f}, copy "
        f"{row['copy_us']:.1f}; peer {row['peer_us']}, as is {row['peer_as_is_us']}; "
        f"{row.get('sparse_clock_mhz')} MHz {row.get('sparse_watts')} W"
    )


def _peers(shape: Shape) -> dict[str, Callable[[], Any]]:
    """cuSPARSELt's fastest algorithm, its output as it comes (F, T), and transposed as
    training needs it; empty where PyTorch has none."""
    try:
        # Not one of our dependencies.
        torch = importlib.import_module("torch")
        compress, multiply = torch._cslt_compress, torch._cslt_sparse_mm
        device = torch.device("cuda")
    except (ImportError, AttributeError) as error:
        print(f"no cuSPARSELt: {error}")
        return {}

    class Replay:
        """A product recorded once and launched as a graph: prepared from Python at
        every call it would take 0.4 ms, whatever its size."""

        def __init__(self, transpose: bool, algorithm: int) -> None:
            run = partial(
                multiply, packed, b, alg_id=algorithm, transpose_result=transpose
            )
            run()  # raises RuntimeError where there is no such algorithm
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            # XLA's threads may allocate meanwhile.
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.out = run()

        def __call__(self) -> "Replay":
            self.graph.replay()
            return self

        def block_until_ready(self) -> None:
            """What `jax.block_until_ready` waits for."""
            torch.cuda.synchronize()

    like = {"device": device, "dtype": torch.bfloat16}
    a = torch.randn(shape.m, shape.k // 4, 4, **like)
    kept = a.abs().topk(2, -1).indices
    a *= torch.zeros_like(a).scatter_(-1, kept, 1)
    packed = compress(a.view(shape.m, shape.k))
    b = torch.randn(shape.n, shape.k, **like).t()

    peers = {}
    for name, transpose in (("peer, as is", False), ("peer, transposed", True)):
        algorithms = {}
        for algorithm in range(64):
            try:
                algorithms[str(algorithm)] = Replay(transpose, algorithm)
            except RuntimeError:
                break
        timings, _ = time_queued(
            algorithms, baseline="0", rounds=1, seconds=0.02, settle_seconds=0.02
        )
        peers[name] = algorithms[min(timings, key=lambda t: t.time_ms).name]
    return peers


if __name__ == "__main__":
    main(tyro.cli(Config))
