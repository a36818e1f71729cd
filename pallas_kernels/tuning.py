"""Which config runs a GEMM fastest, and by how much: searched once, then looked up.

`tuned/<gpu>.json` holds one entry per shape, with the dense time of the same run.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

from pallas_kernels.sparse_matmul_configs import (
    Config,
    Shape,
    default_config,
    why_invalid,
)

FOLDER = Path(__file__).parent / "tuned"

NEIGHBOUR = 2.0
"""An entry also speaks for numbers of tokens up to this factor away from its own."""

LEAST_FLOPS = 2**34
"""Smaller GEMMs that nobody measured are left to the dense library: what a launch costs
is no longer small beside what sparsity saves."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The fastest config of one shape, and where the times come from."""

    shape: Shape
    config: Config
    sparse_us: float
    """Median time of the kernel alone."""
    dense_us: float
    """Of the dense library's GEMM of the same shape, interleaved in the same run."""
    pack_us: float
    """Of making A: of a weight once per optimiser step, of an activation at every
    call."""
    jax: str
    date: str
    commit: str | None


def file_of(device_kind: str) -> Path:
    """Where the entries of a GPU are, `device_kind` as in `jax.Device`."""
    return FOLDER / f"{device_kind.lower().replace(' ', '_')}.json"


@lru_cache
def entries(device_kind: str) -> Mapping[Shape, Entry]:
    """All entries of a GPU; none where it was never tuned."""
    file = file_of(device_kind)
    if not file.exists():
        return {}
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    known = {}
    for row in rows:
        shape, config = Shape(**row["shape"]), Config(**row["config"])
        known[shape] = Entry(**row | {"shape": shape, "config": config})
    return known


def save(device_kind: str, found: Iterable[Entry]) -> None:
    """Adds entries to a GPU's file, one JSON object per line; those of the same shape
    are replaced."""
    known = {**entries(device_kind), **{entry.shape: entry for entry in found}}
    lines = [
        json.dumps(dataclasses.asdict(known[shape]))
        for shape in sorted(known, key=dataclasses.astuple)
    ]
    FOLDER.mkdir(exist_ok=True)
    file_of(device_kind).write_text("".join(f"{line}\n" for line in lines))
    entries.cache_clear()


def tokens_axis(shape: Shape) -> Literal["m", "n", "k"]:
    """Which size of an FFN's GEMM counts tokens: it alone changes from run to run.

    A weight gradient, in float32, is summed over them, both operands a row per token; a
    product with a weight as its sparse operand is written transposed, a row per token
    of B; else they are A's rows.
    """
    if shape.sums_over_tokens:
        return "k"
    return "n" if shape.transpose_out else "m"


def tokens(shape: Shape) -> int:
    """How many tokens an FFN's GEMM has."""
    return {"m": shape.m, "n": shape.n, "k": shape.k}[tokens_axis(shape)]


def with_tokens(shape: Shape, count: int) -> Shape:
    """The GEMM with another number of tokens."""
    match tokens_axis(shape):
        case "m":
            return replace(shape, m=count)
        case "n":
            return replace(shape, n=count)
        case "k":
            return replace(shape, k=count)


def nearest(device_kind: str, shape: Shape) -> Entry | None:
    """The entry for `shape`, or for the closest number of tokens within `NEIGHBOUR`,
    everything else being equal."""

    def distance(entry: Entry) -> float:
        return abs(math.log(tokens(entry.shape) / tokens(shape)))

    alike = [
        entry
        for entry in entries(device_kind).values()
        if with_tokens(entry.shape, tokens(shape)) == shape
    ]
    best = min(alike, key=distance, default=None)
    if best is None or distance(best) > math.log(NEIGHBOUR):
        return None
    return best


def config_for(device_kind: str, shape: Shape) -> Config:
    """Of the nearest entry, or the heuristic's. A GEMM whose result is packed takes
    that of the same GEMM without."""
    entry = nearest(device_kind, replace(shape, packed_out=False))
    if entry is not None and why_invalid(entry.config, shape) is None:
        return entry.config
    return default_config(shape)


def why_slower(device_kind: str, shape: Shape, rows_of_token: int = 1) -> str | None:
    """Why not to choose the sparse GEMM unasked, or None.

    Args:
      rows_of_token: how many of the shape's rows stand for one of the dense GEMM: a
        token may have several experts. Entries are of one.
    """
    entry = nearest(device_kind, shape)
    if entry is not None and entry.sparse_us >= entry.dense_us / rows_of_token:
        return (
            f"measured slower: {entry.sparse_us:.1f} us, dense "
            f"{entry.dense_us / rows_of_token:.1f} us, at "
            f"{tokens(entry.shape) // rows_of_token} tokens"
        )
    if entry is None and 2 * shape.m * shape.n * shape.k < LEAST_FLOPS:
        sizes = (shape.m, shape.n, shape.k)
        return f"too small to gain without a measurement (m, n, k) = {sizes}"
    return None


def candidates(shape: Shape) -> list[Config]:
    """What the search tries: the valid ones of a small grid, and the heuristic's.

    What lost on every shape is not in it: see `experiments/LOG.md`.
    """
    grid = [
        default_config(shape),
        Config(),
        replace(default_config(shape), columns_first=True),
        Config(width=16),
        Config(columns_first=True),
        Config(row_blocks=1, tile_n=256),
        Config(tile_n=128),
    ]
    unique = dict.fromkeys(grid)
    return [config for config in unique if why_invalid(config, shape) is None]


def search(
    shape: Shape,
    is_correct: Callable[[Config], bool],
    time_us: Callable[[list[Config]], Mapping[Config, float]],
) -> tuple[Config, float]:
    """The fastest correct config and its time.

    Args:
      is_correct: whether a config computes the GEMM; asked before anything is timed.
      time_us: times configs against each other.
    Raises:
      ValueError: no config can run the shape, or none is correct.
    """
    correct = [config for config in candidates(shape) if is_correct(config)]
    if not correct:
        raise ValueError(
            f"no config computes {shape} correctly; do not use the kernel for it, and "
            f"report the shape, the GPU and the versions"
        )
    times = time_us(correct)
    best = min(correct, key=lambda config: times[config])
    return best, times[best]
