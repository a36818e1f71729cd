"""Times the GEMMs of an FFN against the dense ones they stand for, alone.

    uv run --extra cuda experiments/bench/gemm.py
    uv run --extra cuda experiments/bench/gemm.py --tune
    uv run --extra cuda experiments/bench/gemm.py --shapes 4096,2048,8192 --gemms 2 4
    uv run --extra cuda experiments/bench/gemm.py --case experts
    uv run --extra cuda experiments/bench/gemm.py --case experts \\
        --shapes 16384,4096,16384,8 --share-of-first 0.9
    uv run --extra cuda experiments/bench/gemm.py --case squares
    uv run --extra cuda experiments/bench/gemm.py --case energies
    uv run --extra cuda experiments/bench/gemm.py --case grouped
    uv run --extra cuda experiments/bench/gemm.py --case grouped \\
        --shapes 16384,2048,8192,8 16384,4096,16384,8

A case of `gemm_cases` says what is compared. "matrix": GEMMs with a 2:4 operand, and
packing that operand against a copy. GEMMs 1 and 3 are one problem there: `X W1` and `dY
W2^T` both multiply (T, d) by a weight that is 2:4 along d and give (T, F); the others
are listed in `ffn_gemms`. "experts": the same over E experts, one for each token (V:2:M
with M = 4 E). "grouped": dense GEMMs over unequal groups of rows, 1 to 4 (rows @
weights of the row's expert, in each order of W1 and W2) and 5 (summed over the rows),
by `jax.lax.ragged_dot`, by the `xla` backend and, on a Hopper GPU, by the kernels of
V:4:M, GEMM 5 also with an equal share of the rows in one part and in two. Their
executed TFLOP/s are those of the tokens' own experts. "squares": GEMMs 1 and 3 of a
dense FFN (E = 1) or by expert, whose kernel applies the squared ReLU, or its gradient,
before it writes, against a dense GEMM and the pass after it. The kernel of GEMMs 1 to 4
by expert, and of "squares", has its default config, and in a row of its own the fastest
of those that are tried: where that is the default one, the two rows say how far apart
one program can be, up to 5 % on H200s. "energies": the energies of experts from 8-bit
floats, by which the router activation_energy_fp8 chooses, against GEMM 1 of all
neurons, which activation_energy needs.

Operands are random bfloat16; every result is compared with an independent one before
anything is timed; all that is compared runs in turn, calls following each other as in a
training step. With `--tune` every shape's configs are searched first and the fastest is
kept in your cache folder (--shipped: in `pallas_kernels/tuned/`, as developers do).
Without it "matrix" has the config that an FFN would look up, "experts" the fastest of
those that the search tries. Where PyTorch has cuSPARSELt, `--peer` times its best
algorithm in turn with the rest.

One H200: 24 shapes of "matrix" with --tune --peer --rounds 3 about 7 minutes, less than
a minute for one number of experts, about 1 minute for GEMMs 2 and 5 of "grouped".
Expected there: "matrix" for T of 4096 and more 1.45 to 1.65 times as fast as cuBLAS,
held down by the power limit; "experts", one of four, 5.1 to 5.4 times; "grouped" at the
first shape `ragged_dot` below 0.9, since XLA expands it into one dense GEMM over all
experts, `xla` 1.2 to 1.4, the kernel of GEMM 5 3. With eight experts the kernels of
GEMMs 1 to 5 are 5.7 to 7.2 times as fast at both shapes of the last command (H100).
"""

import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import jax
import tyro

from experiments.bench.gemm_cases.cases import CASES, CaseName, size_of
from experiments.bench.gemm_cases.comparison import Comparison, Number, Setting, Size
from experiments.bench.gemm_cases.two_four import PACK, PACK_AND_SPARSE, SCALED_COPY
from experiments.bench.power import PowerSampler
from experiments.bench.references import cusparselt
from experiments.bench.rows import append_rows
from pallas_kernels import tuning
from sparsejax.ops import grouped_loops
from sparsejax.ops.backend import current_device
from sparsejax.reports.provenance import commit
from sparsejax.tuning.timing import Span, Timing, time_queued
from sparsejax.tuning.tune import measured

DENSE = "dense"


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the benchmark: which case, shapes and GEMMs, and where the rows are
    written."""

    case: CaseName = "matrix"
    shapes: tuple[str, ...] | None = None
    """Sizes T,d,F of each comparison, with experts T,d,F,E; None: those of the case."""
    gemms: tuple[Number, ...] | None = None
    """Numbers of the GEMMs' equations; 1, with the weights 2:4, stands for 3 as well.
    None: those of the case."""
    v: int = 128
    """Rows of a V:N:M block, where there are experts."""
    share_of_first: float | None = None
    """Share of the tokens in the first expert. None: "experts" has equally many in
    each, "grouped" unequal shares that are drawn."""
    chunk_rows: int = grouped_loops.CHUNK_ROWS
    """Rows per GEMM of the `xla` backend's loop on GPU, in "grouped"."""
    tune: bool = False
    """Whether the configs of every shape are searched first, and the fastest is
    kept."""
    shipped: bool = False
    """Whether --tune keeps it in the table of this package, not in your cache
    folder."""
    peer: bool = False
    """Whether cuSPARSELt is timed through PyTorch, too, for GEMMs 1 and 3 of
    "matrix"."""
    rounds: int = 5
    results: Path | None = Path("runs/bench_gemm.jsonl")
    """File to which one JSON line per row is appended; None writes nothing. Rows that
    are to stay: experiments/results/bench_gemm.jsonl."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One implementation of one GEMM. Times are medians in microseconds per call; a
    field that the case does not measure is None."""

    case: CaseName
    name: str
    gemm: Number
    implementation: str
    shape: dict[str, int]
    """The sizes T, d and F, and with experts E and V."""
    share_of_first: float | None
    dense_us: float
    time_us: float
    """The median time of the implementation alone, its operands packed, in
    microseconds."""
    time_us_range: list[float]
    speedup: float
    """The speed over dense: the median of the ratios in one round."""
    spread: list[float]
    """The smallest and the largest of these ratios."""
    rounds: int
    error: float
    """The relative error against the result that `gemm_cases` compares with."""
    dense_error: float | None
    config: dict | None = None
    """The config of the kernel with a 2:4 operand; None where another one runs."""
    pack_us: float | None = None
    """The median time of packing the sparse operand, in microseconds; half of it where
    it serves two GEMMs."""
    copy_us: float | None = None
    """The median time of a scaled copy of the array that is packed, in microseconds."""
    pack_and_sparse_us: float | None = None
    speedup_with_pack: float | None = None
    peer_us: float | None = None
    """The median time of cuSPARSELt with its output transposed, as training needs it,
    in microseconds."""
    peer_as_is_us: float | None = None
    speedup_vs_peer: float | None = None
    speedup_vs_peer_as_is: float | None = None
    executed_tflops: float | None = None
    """The TFLOP/s of `Comparison.executed_flops`."""
    chunk_rows: int | None = None
    dense_clock_mhz: float | None = None
    dense_watts: float | None = None
    clock_mhz: float | None = None
    watts: float | None = None
    device: str
    jax: str
    commit: str | None
    date: str


def main(config: Config) -> list[dict]:
    """Checks, times, prints and records every GEMM; returns the rows.

    Raises:
      ValueError: flags that do not fit together or the case, or a size that no kernel
        runs; says which.
      AssertionError: a result is wrong.
    """
    case = CASES[config.case]
    gemms = case.gemms if config.gemms is None else config.gemms
    shapes = case.shapes if config.shapes is None else config.shapes
    _check_flags(config, gemms)
    save = saver(tune=config.tune, shipped=config.shipped)
    grouped_loops.CHUNK_ROWS = config.chunk_rows
    rows: list[dict] = []
    with PowerSampler() as power:
        sizes = [size_of(config.case, text) for text in shapes]
        for size, gemm in itertools.product(sizes, gemms):
            setting = Setting(
                v=config.v, share_of_first=config.share_of_first, peer=config.peer
            )
            if config.tune:
                assert case.trial is not None
                entry = measured(case.trial(gemm, size, setting))
                save(current_device().kind, [replace(entry, commit=commit())])
                setting = replace(setting, config=entry.config)
            comparison = case.compare(gemm, size, setting)
            found = [
                asdict(row) for row in _rows(config, gemm, size, comparison, power)
            ]
            for row in found:
                print(_line(row), flush=True)
            append_rows(found, config.results)
            rows += found
    return rows


def _check_flags(config: Config, gemms: tuple[Number, ...]) -> None:
    case = CASES[config.case]
    if unknown := [gemm for gemm in gemms if gemm not in case.known_gemms]:
        raise ValueError(
            f"case {config.case!r} has no GEMM {unknown[0]}; choose from "
            f"{', '.join(case.known_gemms)}"
        )
    if config.tune and case.trial is None:
        raise ValueError(f"case {config.case!r} has no configs to search; omit --tune")
    if config.share_of_first is None:
        return
    if not case.has_experts:
        raise ValueError(
            f"share_of_first={config.share_of_first} is about experts, and case "
            f"{config.case!r} has none; leave it out"
        )
    if config.tune:
        raise ValueError(
            f"tune=True keeps what FFNs look up, and share_of_first="
            f"{config.share_of_first} is not usual; leave one of them out"
        )


def saver(*, tune: bool, shipped: bool) -> Callable[[str, list[tuning.Entry]], None]:
    """Returns the function that keeps the entries that were found for a kind of GPU.
    Raises ValueError for `shipped` where nothing is searched."""
    if shipped and not tune:
        raise ValueError("--shipped says where to keep what --tune finds; add --tune")
    return tuning.save_shipped if shipped else tuning.save


def _rows(
    config: Config,
    gemm: Number,
    size: Size,
    comparison: Comparison,
    power: PowerSampler,
) -> Iterator[Row]:
    """Yields the rows of a comparison, whose every result is checked before it is
    timed."""
    calls = {DENSE: comparison.dense, **comparison.beside}
    errors = {}
    for name, kernels in comparison.kernels.items():
        for kernel, call in kernels.items():
            calls[f"{name} {kernel}"] = call
            errors[f"{name} {kernel}"] = comparison.check(name, call)
    timings, spans = time_queued(calls, baseline=DENSE, rounds=config.rounds)
    timing = {t.name: t for t in timings}
    if comparison.moving:
        first = next(iter(comparison.moving))
        moved, _ = time_queued(comparison.moving, baseline=first, rounds=config.rounds)
        timing |= {t.name: t for t in moved}
    us = {name: round(1e3 * t.time_ms, 2) for name, t in timing.items()}
    packed = timing.get(PACK_AND_SPARSE)
    shape = {"T": size.tokens, "d": size.d_model, "F": size.d_hidden}
    if size.experts is not None:
        shape |= {"E": size.experts, "V": config.v}
    dense_clock, dense_watts = _draw(power, spans[DENSE])
    for name, kernels in comparison.kernels.items():
        of_kernel = {f"{name} {kernel}": kernel for kernel in kernels}
        best = timing[min(of_kernel, key=lambda call: timing[call].time_ms)]
        kernel, clock_and_watts = of_kernel[best.name], _draw(power, spans[best.name])
        yield Row(
            case=config.case,
            name=_name(gemm, size),
            gemm=gemm,
            implementation=name,
            shape=shape,
            share_of_first=config.share_of_first,
            dense_us=us[DENSE],
            time_us=us[best.name],
            time_us_range=[
                round(1e3 * ms, 2) for ms in (best.time_ms_min, best.time_ms_max)
            ],
            speedup=round(1 / best.ratio, 4),
            spread=[round(1 / best.ratio_max, 4), round(1 / best.ratio_min, 4)],
            rounds=best.rounds,
            error=errors[best.name].ours,
            dense_error=errors[best.name].dense,
            config=None if kernel is None else asdict(kernel),
            pack_us=_pack_us(timing.get(PACK), comparison),
            copy_us=us.get(SCALED_COPY),
            pack_and_sparse_us=us.get(PACK_AND_SPARSE),
            speedup_with_pack=None if packed is None else round(1 / packed.ratio, 4),
            peer_us=us.get(cusparselt.TRANSPOSED),
            peer_as_is_us=us.get(cusparselt.AS_IS),
            speedup_vs_peer=_ratio(us.get(cusparselt.TRANSPOSED), us[best.name]),
            speedup_vs_peer_as_is=_ratio(us.get(cusparselt.AS_IS), us[best.name]),
            executed_tflops=_tflops(comparison.executed_flops, us[best.name]),
            chunk_rows=config.chunk_rows if config.case == "grouped" else None,
            dense_clock_mhz=dense_clock,
            dense_watts=dense_watts,
            clock_mhz=clock_and_watts[0],
            watts=clock_and_watts[1],
            device=current_device().kind,
            jax=jax.__version__,
            commit=commit(),
            date=f"{datetime.now(UTC):%Y-%m-%d}",
        )


def _name(gemm: Number, size: Size) -> str:
    if size.experts is not None:
        return f"GEMM {gemm} of {size.experts} experts"
    return "GEMM 1 or 3" if gemm == "1" else f"GEMM {gemm}"


def _pack_us(packing: Timing | None, comparison: Comparison) -> float | None:
    if packing is None:
        return None
    return round(1e3 * packing.time_ms / comparison.gemms_packed, 2)


def _tflops(flops: int | None, us: float) -> float | None:
    return None if flops is None else round(flops / us / 1e6, 1)


def _ratio(other: float | None, own: float) -> float | None:
    return None if other is None else round(other / own, 4)


def _draw(
    power: PowerSampler, spans: list[Span]
) -> tuple[float, float] | tuple[None, None]:
    """Returns the median clock in MHz and power in W over some spans of time; None
    where nothing was read."""
    draws = [draw for span in spans if (draw := power.between(*span))]
    if not draws:
        return None, None
    clock_mhz = statistics.median(draw.clock_mhz for draw in draws)
    return clock_mhz, round(statistics.median(draw.watts for draw in draws), 1)


def _line(row: dict) -> str:
    shape = ", ".join(f"{name} {size}" for name, size in row["shape"].items())
    more = {
        "with pack": row["speedup_with_pack"],
        "pack": row["pack_us"],
        "copy": row["copy_us"],
        "peer": row["peer_us"],
        "peer as is": row["peer_as_is_us"],
        "TFLOP/s": row["executed_tflops"],
        "MHz": row["clock_mhz"],
        "W": row["watts"],
    }
    return (
        f"{row['name']}, {shape}: dense {row['dense_us']:.1f} us, "
        f"{row['implementation']} {row['time_us']:.1f}, {row['speedup']:.2f}x "
        f"({row['spread'][0]:.2f}-{row['spread'][1]:.2f})"
        + "".join(f"; {name} {x}" for name, x in more.items() if x is not None)
    )


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
