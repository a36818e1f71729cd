"""The fastest config of each GEMM, and its gain over dense: searched once, then looked
up.

`tuned/<gpu>.json` holds one entry per `TunedGemm`, with the dense time of the same run;
the user's cache holds those of his own GPU (`tuning_cache`). A GEMM of another size is
estimated from the largest one that is nowhere larger: what sparsity gains, packing
included, grows with every size. On a Hopper GPU that has an entry for neither it is
estimated from what was measured on another one.
"""

import dataclasses
import hashlib
import json
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from pallas_kernels import tuning_cache
from pallas_kernels.device import KNOWN, Device
from pallas_kernels.sm90.sparse_matmul_configs import (
    Config,
    Shape,
    default_config,
    why_invalid,
)
from pallas_kernels.tuned_gemm import TunedGemm

FOLDER = Path(__file__).parent / "tuned"

NEIGHBOUR = 2.0
"""The factor up to which an entry also speaks for smaller or larger numbers of
tokens."""

ESTIMATED_GAIN = 1.16
"""The gain over dense that an estimated GEMM must have to be chosen unasked: more
than any estimate of a shipped entry, made from the other entries of its GPU, is above
its measurement."""

GAIN_ELSEWHERE = 1.25
"""The gain over dense that a GEMM must have to be chosen unasked where it is
estimated from another GPU. Of 75 shapes that were measured on an H100 and on an H200,
the gain on one was at most 1.22 times that on the other."""

LEAST_FLOPS = 2**34
"""The FLOPs below which a GEMM that nobody measured is left to the dense library: the
cost of a launch is no longer small beside what sparsity saves."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The fastest config of one GEMM, its times, and where they come from."""

    gemm: TunedGemm
    config: Config
    sparse_us: float
    """The median time of the kernel alone, in microseconds."""
    dense_us: float
    """The median time of the dense library's GEMM of the same sizes, in microseconds,
    interleaved in the same run."""
    pack_us: float
    """The median time of packing A, in microseconds: a weight is packed once per
    optimiser step, an activation at every call."""
    jax: str
    date: str
    commit: str | None


@dataclass(frozen=True, kw_only=True)
class Times:
    """The times of a GEMM in microseconds, in proportion to those of an entry."""

    sparse_us: float
    dense_us: float
    pack_us: float
    entry: Entry
    smaller: bool
    """Whether no entry was near, so that `entry` is of a smaller GEMM."""
    measured_on: str | None = None
    """The kind of GPU that the entry was measured on, where it is not this one; else
    None."""

    @property
    def estimated(self) -> bool:
        """Whether the times are an estimate, since nobody measured this GEMM on this
        GPU."""
        return self.smaller or self.measured_on is not None

    @property
    def least_gain(self) -> float:
        """The gain over dense that the GEMM must have to be chosen unasked."""
        if self.measured_on is not None:
            return GAIN_ELSEWHERE
        return ESTIMATED_GAIN if self.smaller else 1.0


def file_of(kind: str) -> Path:
    """Returns the file of the table that this package ships for a GPU; `kind` is as in
    `Device`."""
    return FOLDER / f"{kind.lower().replace(' ', '_')}.json"


_SIZES = ("tokens", "d_in", "d_out", "experts")
"""The fields of a `TunedGemm` in which an estimate may differ from its entry."""

_given: dict[str, Mapping[TunedGemm, Entry]] = {}
"""The user's entries by kind of GPU, where the cache does not hold them: another
process has given them, or this one has found them and could not write them."""


@lru_cache
def entries(kind: str) -> Mapping[TunedGemm, Entry]:
    """Returns all entries of a GPU by GEMM, none where it was never tuned: those that
    this package ships, and the user's own, which win where both have a GEMM."""
    return {**shipped(kind), **own(kind)}


def forget() -> None:
    """Forgets all files that were read, so that they are read anew when they are next
    asked for."""
    entries.cache_clear()
    shipped.cache_clear()


@lru_cache
def shipped(kind: str) -> Mapping[TunedGemm, Entry]:
    """Returns the entries of a GPU that came with this package, by GEMM."""
    file = file_of(kind)
    return _by_gemm(_read(file.read_text())) if file.exists() else {}


def own(kind: str) -> Mapping[TunedGemm, Entry]:
    """Returns the entries that the user of a GPU has measured with the installed
    versions, by GEMM. A file that cannot be read is left out, with a warning that
    names it."""
    if kind in _given:
        return _given[kind]
    found: list[Entry] = []
    for file in tuning_cache.files(kind):
        try:
            (entry,) = _read(file.read_text())
            found.append(entry)
        except (OSError, ValueError, TypeError, KeyError) as error:
            warnings.warn(
                f"{file} cannot be read ({error}) and is not used; delete it, and what "
                f"it was about is measured again",
                stacklevel=2,
            )
    return _by_gemm(found)


def save(kind: str, found: Iterable[Entry]) -> None:
    """Keeps entries that the user of a GPU has measured, in place of earlier ones of
    the same GEMMs. Where the cache folder cannot be written a warning says so, and the
    entries are known to this process alone."""
    found = list(found)
    known = {**own(kind), **_by_gemm(found)}
    try:
        for entry in found:
            tuning_cache.write(kind, _name_of(entry.gemm), _text([entry]))
    except (OSError, RuntimeError) as error:
        warnings.warn(
            f"what was measured cannot be kept ({error}), and the next run measures it "
            f"again; make the folder writable, or name another in "
            f"{tuning_cache.VARIABLE}",
            stacklevel=2,
        )
        _given[kind] = known
    if kind in _given:
        _given[kind] = known
    forget()


def save_shipped(kind: str, found: Iterable[Entry]) -> None:
    """Adds entries to the table that this package ships for a GPU, one JSON object per
    line, in place of earlier ones of the same GEMMs. It is for the developers of the
    package."""
    known = {**shipped(kind), **_by_gemm(found)}
    FOLDER.mkdir(exist_ok=True)
    in_order = sorted(known, key=dataclasses.astuple)
    file_of(kind).write_text(_text(known[gemm] for gemm in in_order))
    forget()


def own_as_text(kind: str) -> str:
    """Returns the user's entries of a GPU, for `take_own` in other processes."""
    return _text(own(kind).values())


def take_own(kind: str, text: str) -> None:
    """Takes the user's entries of another process, as `own_as_text` returned them
    there, in place of those in this process's cache."""
    _given[kind] = _by_gemm(_read(text))
    forget()


def _text(found: Iterable[Entry]) -> str:
    return "".join(f"{json.dumps(dataclasses.asdict(entry))}\n" for entry in found)


def _read(text: str) -> list[Entry]:
    """Returns the entries that `_text` wrote. Raises ValueError, TypeError or KeyError
    for other text."""
    found = []
    for line in text.splitlines():
        row = json.loads(line)
        gemm, config = TunedGemm(**row["gemm"]), Config(**row["config"])
        entry = Entry(**row | {"gemm": gemm, "config": config})
        for time_us in (entry.sparse_us, entry.dense_us, entry.pack_us):
            if not 0 < time_us < math.inf:
                raise ValueError(f"a time of {time_us} us")
        found.append(entry)
    return found


def _by_gemm(found: Iterable[Entry]) -> dict[TunedGemm, Entry]:
    return {entry.gemm: entry for entry in found}


def _name_of(gemm: TunedGemm) -> str:
    """Returns a name for a GEMM's file: its sizes, and a hash that tells apart GEMMs
    with the same sizes."""
    text = json.dumps(dataclasses.asdict(gemm), sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return f"{gemm.tokens}x{gemm.d_in}x{gemm.d_out}_{digest}"


def nearest(device: Device, gemm: TunedGemm) -> Entry | None:
    """Returns the entry for `gemm`, or for the closest number of tokens within
    `NEIGHBOUR` with everything else equal; None where there is none."""

    def distance(entry: Entry) -> float:
        return abs(math.log(entry.gemm.tokens / gemm.tokens))

    alike = [
        entry
        for entry in entries(device.kind).values()
        if replace(entry.gemm, tokens=gemm.tokens) == gemm
    ]
    best = min(alike, key=distance, default=None)
    if best is None or distance(best) > math.log(NEIGHBOUR):
        return None
    return best


def largest_inside(device: Device, gemm: TunedGemm) -> Entry | None:
    """Returns the entry with most work of those that `gemm` is nowhere smaller than:
    in its widths, its experts, and, within `NEIGHBOUR`, the tokens of each of them;
    None where there is none."""

    def is_inside(entry: Entry) -> bool:
        small = entry.gemm
        sizes = {name: getattr(gemm, name) for name in _SIZES}
        return (
            replace(small, **sizes) == gemm
            and small.d_in <= gemm.d_in
            and small.d_out <= gemm.d_out
            and small.experts <= gemm.experts
            and small.tokens * gemm.experts <= NEIGHBOUR * gemm.tokens * small.experts
        )

    inside = filter(is_inside, entries(device.kind).values())
    return max(inside, key=lambda entry: entry.gemm.multiplications, default=None)


def nearest_tuned(device: Device) -> Device | None:
    """Returns the other GPU whose shipped entries speak for `device` where it has none:
    of the Hoppers that have any, the one whose number of multiprocessors is closest.
    None where `device` is no Hopper or no other GPU has entries."""
    if device.why_not_hopper() is not None:
        return None
    count = device.count_multiprocessors()
    others = [
        other
        for other in KNOWN.values()
        if other.is_hopper and other.kind != device.kind and shipped(other.kind)
    ]
    return min(
        others,
        key=lambda other: abs(other.count_multiprocessors() - count),
        default=None,
    )


def times(device: Device, gemm: TunedGemm, rows_of_token: int = 1) -> Times | None:
    """Returns the times of a GEMM in proportion to the nearest entry, or to the largest
    inside; else to those of the nearest tuned GPU, longer by as much as this one has
    fewer multiprocessors. None where there is no entry.

    Args:
      device: the GPU that will run the GEMM.
      gemm: the GEMM.
      rows_of_token: how many of the GEMM's rows stand for one row of the dense GEMM,
        since a token may have several experts. Entries are of one.
    """
    for source in filter(None, (device, nearest_tuned(device))):
        near = nearest(source, gemm)
        entry = near or largest_inside(source, gemm)
        if entry is not None:
            break
    else:
        return None
    measured_on, slower = None, 1.0
    if source.kind != device.kind:
        measured_on = source.kind
        slower = source.count_multiprocessors() / device.count_multiprocessors()
    known = entry.gemm
    sparse = gemm.multiplications / known.multiplications
    dense = gemm.dense_multiplications / known.dense_multiplications / rows_of_token
    packed = gemm.numbers_to_pack / known.numbers_to_pack
    return Times(
        sparse_us=slower * entry.sparse_us * sparse,
        dense_us=slower * entry.dense_us * dense,
        pack_us=slower * entry.pack_us * packed,
        entry=entry,
        smaller=near is None,
        measured_on=measured_on,
    )


def config_for(device: Device, shape: Shape) -> Config:
    """Returns the config of the entry that `times` takes, or else the heuristic's. A
    GEMM whose result is packed takes the config of the same GEMM without packing."""
    gemm = TunedGemm.of(shape)
    known = None if gemm is None else times(device, gemm)
    if known is not None and why_invalid(known.entry.config, shape) is None:
        return known.entry.config
    return default_config(shape, device.count_multiprocessors())


def why_slower(device: Device, gemm: TunedGemm) -> str | None:
    """Returns why not to choose the sparse GEMM unasked, or None where it may be
    chosen."""
    known = times(device, gemm)
    if known is None:
        if 2 * gemm.multiplications >= LEAST_FLOPS:
            return None
        return (
            f"too small to gain without a measurement: {gemm.tokens} tokens x "
            f"{gemm.d_in} x {gemm.d_out}"
        )
    if known.sparse_us * known.least_gain < known.dense_us:
        return None
    if known.estimated:
        where = f", measured on {known.measured_on}" if known.measured_on else ""
        return (
            f"estimated slower, or faster by less than the estimate's error: "
            f"{known.sparse_us:.1f} us, dense {known.dense_us:.1f} us{where}"
        )
    entry = known.entry
    return (
        f"measured slower: {entry.sparse_us:.1f} us, dense {entry.dense_us:.1f} us, at "
        f"{entry.gemm.tokens} tokens"
    )


def candidates(shape: Shape, multiprocessors: int) -> list[Config]:
    """Returns the configs that the search tries: the valid ones of a small grid, and
    the heuristic's.

    Configs that lost on every shape are not in the grid: see `experiments/LOG.md`.
    """
    heuristic = default_config(shape, multiprocessors)
    grid = [
        heuristic,
        Config(),
        replace(heuristic, grid_minor_dim="n"),
        Config(grid_tile_width=16),
        Config(grid_minor_dim="n"),
        Config(row_blocks=1, tile_n=256),
        Config(tile_n=128),
    ]
    unique = dict.fromkeys(grid)
    return [config for config in unique if why_invalid(config, shape) is None]


def search(
    shape: Shape,
    configs: Iterable[Config],
    is_correct: Callable[[Config], bool],
    time_us: Callable[[list[Config]], Mapping[Config, float]],
) -> tuple[Config, float]:
    """Returns the fastest correct config, and its time in microseconds.

    Args:
      shape: the GEMM.
      configs: the configs to try, such as `candidates`.
      is_correct: whether a config computes the GEMM; asked before anything is timed.
      time_us: times configs against each other.
    Raises:
      ValueError: no config can run the shape, or none is correct.
    """
    correct = [config for config in configs if is_correct(config)]
    if not correct:
        raise ValueError(
            f"no config computes {shape} correctly; do not use the kernel for it, and "
            f"report the shape, the GPU and the versions"
        )
    times = time_us(correct)
    best = min(correct, key=lambda config: times[config])
    return best, times[best]
