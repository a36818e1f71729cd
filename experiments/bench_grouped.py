"""Times the grouped GEMMs over experts against the dense ones they stand for.

    uv run --extra cuda experiments/bench_grouped.py
    uv run --extra cuda experiments/bench_grouped.py --share-of-first 0.9

Unequal groups, random bfloat16 operands. For GEMM 2's form (rows @ weights of the
row's expert) and for GEMM 5's (the ragged reduction over rows): the dense GEMM over all
F neurons, `jax.lax.ragged_dot`, the `xla` backend, and of GEMM 5 on a Hopper GPU the
kernel. The grouped results are compared with ragged_dot's before they are timed.

One H200: about 1 minute. Expected there: ragged_dot above 1.1 of dense, since XLA
expands it into one dense GEMM over all experts; `xla` 0.7 to 0.8 of dense at the first
shape, the kernel 0.3.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax import lax

from experiments.expert_shares import expert_shares
from experiments.rows import append_rows
from sparsejax.ops import grouped_matmul
from sparsejax.ops.backend import Backend, current_device
from sparsejax.router import dispatch, gather_rows
from sparsejax.timing import time_interleaved

CONTRACT_ROWS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """What is timed, and where the rows go."""

    shapes: tuple[tuple[int, int, int, int], ...] = (
        (16384, 4096, 16384, 4),
        (8192, 2048, 8192, 4),
        (16384, 2048, 8192, 8),
    )
    """(T, d, F, E) of each comparison."""
    v: int = 128
    """Rows of a V:N:M block."""
    share_of_first: float | None = None
    """Of the tokens, in the first expert; None: shares are drawn."""
    chunk_rows: int = grouped_matmul.CHUNK_ROWS
    """Rows per GEMM of the `xla` backend's loop on GPU."""
    rounds: int = 15
    repeats: int = 8
    """Calls per timed round: launches overlap, as they do in a training step."""
    results: Path | None = Path("runs/bench_grouped.jsonl")
    """One JSON line per row is appended; None writes nothing. Rows that are to stay:
    experiments/results/bench_grouped.jsonl."""


def main(config: Config) -> list[dict]:
    """Checks, times, prints and records every shape; returns the rows."""
    grouped_matmul.CHUNK_ROWS = config.chunk_rows
    rows = []
    for shape in config.shapes:
        for form, calls in _calls(config, *shape).items():
            ragged = np.asarray(calls["ragged_dot"](), np.float32)
            for name in calls.keys() - {"dense", "ragged_dot"}:
                # bfloat16 results rounded from float32 sums in two orders
                ours = np.asarray(calls[name](), np.float32)
                error = np.linalg.norm(ours - ragged) / np.linalg.norm(ragged)
                assert error < 4e-3, f"{name} at {shape}: relative error {error}"
            repeated = {
                n: partial(_repeat, c, config.repeats) for n, c in calls.items()
            }
            for timing in time_interleaved(
                repeated, baseline="dense", rounds=config.rounds
            ):
                row = {
                    "form": form,
                    "shape": dict(zip("TdFE", shape, strict=True)),
                    "share_of_first": config.share_of_first,
                    "chunk_rows": config.chunk_rows,
                    "calls_per_time": config.repeats,
                    **asdict(timing),
                    "device": jax.devices()[0].device_kind,
                    "jax": jax.__version__,
                }
                rows.append(row)
                print(
                    f"{form} {shape} {timing.name}: "
                    f"{timing.time_ms / config.repeats:.3f} ms, {timing.ratio:.2f} "
                    f"of dense ({timing.ratio_min:.2f}-{timing.ratio_max:.2f})"
                )
    append_rows(rows, config.results)
    return rows


def _repeat(call: Callable[[], jax.Array], times: int) -> list[jax.Array]:
    return [call() for _ in range(times)]


def _calls(
    config: Config, tokens: int, d_model: int, d_hidden: int, experts: int
) -> dict[str, dict[str, Callable[[], jax.Array]]]:
    """By form and name, all compiled, on one set of operands."""
    rng = np.random.default_rng(0)
    shares = rng.dirichlet([4] * experts)
    if config.share_of_first is not None:
        shares = expert_shares(experts, config.share_of_first)
    chosen = rng.choice(experts, tokens, p=shares)
    routed = dispatch(jnp.asarray(chosen[:, None], jnp.int32), experts, config.v)
    used = jnp.sum(-(-routed.group_sizes // config.v))
    own = d_hidden // experts
    sizes = -(-routed.group_sizes // config.v) * config.v
    keys = jax.random.split(jax.random.key(0), 5)
    normal = partial(jax.random.normal, dtype=jnp.bfloat16)
    x, w = normal(keys[0], (tokens, d_model)), normal(keys[1], (d_model, d_hidden))
    weights = normal(keys[2], (experts, d_model, own))
    x_rows = gather_rows(x, routed)
    g, g_rows = normal(keys[3], (tokens, d_hidden)), normal(keys[4], (len(x_rows), own))
    tiles = (routed.tile_expert, used)

    def ragged(rows: jax.Array, weights: jax.Array) -> jax.Array:
        out = lax.ragged_dot(rows, weights, sizes, preferred_element_type=jnp.float32)
        return out.astype(rows.dtype)

    def ragged_outer(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return lax.ragged_dot_general(
            lhs, rhs, sizes, CONTRACT_ROWS, preferred_element_type=jnp.float32
        )

    def ours(rows: jax.Array, weights: jax.Array) -> jax.Array:
        return grouped_matmul.grouped_matmul(rows, weights, *tiles, backend="xla")

    def ours_outer(backend: Backend, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return grouped_matmul.grouped_outer(lhs, rhs, *tiles, experts, backend=backend)

    outer: list[Backend] = ["xla"]
    if current_device().is_hopper:
        outer.append("mosaic_sm90")

    def dense_outer(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return jnp.matmul(lhs.T, rhs, preferred_element_type=jnp.float32)

    return {
        "rows @ weights": {
            "dense": partial(jax.jit(jnp.matmul), x, w),
            "ragged_dot": partial(jax.jit(ragged), x_rows, weights),
            "xla": partial(jax.jit(ours), x_rows, weights),
        },
        "rows^T @ rows": {
            "dense": partial(jax.jit(dense_outer), x, g),
            "ragged_dot": partial(jax.jit(ragged_outer), x_rows, g_rows),
            **{
                backend: partial(jax.jit(partial(ours_outer, backend)), x_rows, g_rows)
                for backend in outer
            },
        },
    }


if __name__ == "__main__":
    main(tyro.cli(Config))
