"""Which config runs a GEMM fastest, and by how much: searched once, then looked up.

`tuned/<gpu>.json` holds one entry per shape, with the dense time of the same run. A
GEMM of another shape is estimated from the largest one that is nowhere larger: what
sparsity gains, packing included, grows with every size.
"""

import dataclasses
import json
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

from pallas_kernels.device import Device
from pallas_kernels.sparse_matmul_configs import (
    Config,
    Shape,
    default_config,
    why_invalid,
)

FOLDER = Path(__file__).parent / "tuned"

NEIGHBOUR = 2.0
"""An entry also speaks for numbers of tokens up to this factor away from its own."""

ESTIMATED_GAIN = 1.1
"""How many times as fast as dense a GEMM must be by estimate to be chosen unasked: more
than any estimate of a shipped entry, made from the others, is above its measurement."""

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


@dataclass(frozen=True, kw_only=True)
class Times:
    """How long a GEMM takes, in proportion to what an entry took, us."""

    sparse_us: float
    dense_us: float
    pack_us: float
    entry: Entry
    estimated: bool
    """Whether no entry was near, and this one is of a smaller GEMM."""

    @property
    def least_gain(self) -> float:
        """How many times as fast as dense it must be to be chosen unasked."""
        return ESTIMATED_GAIN if self.estimated else 1.0


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


def nearest(device: Device, shape: Shape) -> Entry | None:
    """The entry for `shape`, or for the closest number of tokens within `NEIGHBOUR`,
    everything else being equal."""

    def distance(entry: Entry) -> float:
        return abs(math.log(tokens(entry.shape) / tokens(shape)))

    alike = [
        entry
        for entry in entries(device.kind).values()
        if with_tokens(entry.shape, tokens(shape)) == shape
    ]
    best = min(alike, key=distance, default=None)
    if best is None or distance(best) > math.log(NEIGHBOUR):
        return None
    return best


def largest_inside(device: Device, shape: Shape) -> Entry | None:
    """The entry with most work of those that `shape` is nowhere smaller than: widths,
    experts, and, within `NEIGHBOUR`, the tokens of each of them."""

    def is_inside(entry: Entry) -> bool:
        small, count = entry.shape, tokens(entry.shape)
        return (
            replace(small, m=shape.m, n=shape.n, k=shape.k, experts=shape.experts)
            == shape
            and all(map(operator.le, widths(small), widths(shape)))
            and small.experts <= shape.experts
            and count * shape.experts <= NEIGHBOUR * tokens(shape) * small.experts
        )

    inside = filter(is_inside, entries(device.kind).values())
    return max(inside, key=lambda entry: _work(entry.shape), default=None)


def widths(shape: Shape) -> tuple[int, int]:
    """The two sizes of an FFN's GEMM that do not count tokens."""
    first, second = (axis for axis in "mnk" if axis != tokens_axis(shape))
    return getattr(shape, first), getattr(shape, second)


def times(device: Device, shape: Shape, rows_of_token: int = 1) -> Times | None:
    """Those of the nearest entry, or of the largest inside; None where there is none.

    Args:
      rows_of_token: how many of the shape's rows stand for one of the dense GEMM: a
        token may have several experts. Entries are of one.
    """
    near = nearest(device, shape)
    entry = near or largest_inside(device, shape)
    if entry is None:
        return None
    dense = _dense_work(shape) / _dense_work(entry.shape) / rows_of_token
    return Times(
        sparse_us=entry.sparse_us * _work(shape) / _work(entry.shape),
        dense_us=entry.dense_us * dense,
        pack_us=entry.pack_us * _packed(shape) / _packed(entry.shape),
        entry=entry,
        estimated=near is None,
    )


def _work(shape: Shape) -> int:
    """Multiplications, those with zeros included: a row meets one expert."""
    return shape.m * shape.n * shape.k


def _dense_work(shape: Shape) -> int:
    """Of the dense GEMM, where a row meets all experts and none fills a tile."""
    rows = tokens(shape) - (shape.experts - 1) * shape.group_tile
    first, second = widths(shape)
    return max(rows, shape.group_tile) * first * second * shape.experts


def _packed(shape: Shape) -> int:
    """Numbers of the sparse operand: of a weight, those of all experts."""
    return shape.m * shape.k * (shape.experts if tokens_axis(shape) == "n" else 1)


def config_for(device: Device, shape: Shape) -> Config:
    """Of the entry that `times` takes, or the heuristic's. A GEMM whose result is
    packed takes that of the same GEMM without."""
    known = times(device, replace(shape, packed_out=False))
    if known is not None and why_invalid(known.entry.config, shape) is None:
        return known.entry.config
    return default_config(shape, device.count_multiprocessors())


def why_slower(device: Device, shape: Shape) -> str | None:
    """Why not to choose the sparse GEMM unasked, or None."""
    known = times(device, shape)
    if known is None:
        if 2 * _work(shape) >= LEAST_FLOPS:
            return None
        sizes = (shape.m, shape.n, shape.k)
        return f"too small to gain without a measurement (m, n, k) = {sizes}"
    if known.sparse_us * known.least_gain < known.dense_us:
        return None
    if known.estimated:
        return (
            f"estimated slower, or faster by less than the estimate's error: "
            f"{known.sparse_us:.1f} us, dense {known.dense_us:.1f} us"
        )
    entry = known.entry
    return (
        f"measured slower: {entry.sparse_us:.1f} us, dense {entry.dense_us:.1f} us, at "
        f"{tokens(entry.shape)} tokens"
    )


def candidates(shape: Shape, multiprocessors: int) -> list[Config]:
    """What the search tries: the valid ones of a small grid, and the heuristic's.

    What lost on every shape is not in it: see `experiments/LOG.md`.
    """
    heuristic = default_config(shape, multiprocessors)
    grid = [
        heuristic,
        Config(),
        replace(heuristic, columns_first=True),
        Config(width=16),
        Config(columns_first=True),
        Config(row_blocks=1, tile_n=256),
        Config(tile_n=128),
    ]
    unique = dict.fromkeys(grid)
    return [config for config in unique if why_invalid(config, shape) is None]


def search(
    shape: Shape,
    multiprocessors: int,
    is_correct: Callable[[Config], bool],
    time_us: Callable[[list[Config]], Mapping[Config, float]],
) -> tuple[Config, float]:
    """The fastest correct config and its time.

    Args:
      multiprocessors: of the GPU.
      is_correct: whether a config computes the GEMM; asked before anything is timed.
      time_us: times configs against each other.
    Raises:
      ValueError: no config can run the shape, or none is correct.
    """
    correct = [
        config for config in candidates(shape, multiprocessors) if is_correct(config)
    ]
    if not correct:
        raise ValueError(
            f"no config computes {shape} correctly; do not use the kernel for it, and "
            f"report the shape, the GPU and the versions"
        )
    times = time_us(correct)
    best = min(correct, key=lambda config: times[config])
    return best, times[best]
