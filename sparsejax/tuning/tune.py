"""The tuning of a run: its 2:4 GEMMs that nobody has timed are timed on its own GPU.

Which config of a kernel is fastest, and whether that is faster than a dense GEMM, is
looked up by `pallas_kernels.tuning`. What is not known of this very GPU at a run's own
sizes is measured here: every config is compared with float32, then timed in turn with
the dense GEMM, and packing by itself. The user's cache keeps it for the next run.

A process that has run a sparse kernel has a lower clock from then on (H200): where the
dense steps before a run's sparse phase are many, tune in a process before it.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import tuning, tuning_cache
from pallas_kernels.device import Device
from pallas_kernels.tuned_gemm import TunedGemm
from sparsejax.config import TrainConfig
from sparsejax.config.schedule import phases
from sparsejax.distributed.processes import Exchange
from sparsejax.feed_forward.tiles import FEATURE_TILE, dense_feature_count
from sparsejax.ops.backend import current_device
from sparsejax.ops.gemm_spec import GemmSpec
from sparsejax.ops.kernels import registry
from sparsejax.ops.kernels.tunable import Config, tunable_kernels_of
from sparsejax.reports.metrics import ffn_spec
from sparsejax.routing.dispatch import dispatch
from sparsejax.sparsity.packed import in_blocks
from sparsejax.tuning import expert_gemms, ffn_gemms
from sparsejax.tuning.ffn_gemms import Gemm
from sparsejax.tuning.timing import time_queued

WAIT_SECONDS = 1800
"""The seconds that other processes wait for the one that tunes."""

FINALISTS = 3
"""The number of configs of a GEMM that are timed with care, after a short look at
all."""

EXPERTS_ERROR = 3e-3
"""The largest relative error of a right product of bfloat16 that is rounded to
bfloat16: half of its last bit is 2e-3."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One GEMM on random operands, compiled to functions without arguments."""

    gemm: TunedGemm
    sparse: Mapping[Config, Callable[[], Any]]
    """The kernel alone, as one function per config."""
    dense: Callable[[], Any]
    """The dense GEMM that the kernel stands for."""
    pack: Callable[[], Any]
    """Makes the sparse operand."""
    gemms_packed: int
    """The number of GEMMs that read what one call of `pack` makes."""
    is_correct: Callable[[Callable[[], Any]], bool]
    """Returns whether one of the functions in `sparse` computes the GEMM."""


def gemms_of_run(config: TrainConfig) -> list[GemmSpec]:
    """Returns the FFN GEMMs of a run's sparse phases, for one micro-batch on one of the
    devices here; none where a backend is named that is no set of kernels. Raises
    ValueError where the mesh does not fit the devices."""
    if config.backend not in (None, *registry.names()):
        return []
    mesh = config.mesh.resolve(jax.device_count())
    micro_batch = config.batch_size // config.micro_batches_on(mesh)
    tokens = micro_batch * config.data.sequence_length
    sparsities = dict.fromkeys(
        of for phase in phases(config) for of in phase.sparsities
    )
    return [
        gemm
        for sparsity in sparsities
        if not sparsity.is_dense
        for gemm in ffn_spec(config.model, sparsity, tokens, mesh=mesh).gemms()
    ]


def runnable(specs: Iterable[GemmSpec]) -> dict[TunedGemm, GemmSpec]:
    """Returns the GEMMs that the kernels of their device could run with a 2:4 operand,
    one for each entry of the tables."""
    found: dict[TunedGemm, GemmSpec] = {}
    for spec in specs:
        kernels = tunable_kernels_of(spec.device)
        if kernels is None or spec.dtype != "bfloat16":
            continue
        if kernels.why_unsupported(spec) is None:
            found.setdefault(kernels.tuned_gemm(spec), spec)
    return found


def missing(specs: Iterable[GemmSpec], device: Device) -> dict[TunedGemm, GemmSpec]:
    """Returns the `runnable` GEMMs that nobody has measured on `device` near their
    number of tokens, as the tables name them."""
    return {
        gemm: spec
        for gemm, spec in runnable(specs).items()
        if tuning.nearest(device, gemm) is None
    }


def tune_missing(
    specs: Iterable[GemmSpec],
    *,
    report: Callable[[str], None],
    measure: Callable[[Trial], tuning.Entry] | None = None,
) -> list[tuning.Entry]:
    """Measures the GEMMs that `missing` finds, keeps them in the user's cache, and
    returns them. Nothing is done on a device whose kernels have no configs, or that has
    none.

    Args:
      specs: the GEMMs of a run.
      report: takes a line about each GEMM, and one about all.
      measure: the function that times a GEMM; None for `measured`.
    Raises:
      ValueError: no config of a kernel computes right on this GPU.
    """
    device = current_device()
    if tunable_kernels_of(device) is None:
        return []
    todo = missing(specs, device)
    if not todo:
        return []
    report(f"tuning {len(todo)} GEMMs that nobody has timed on this {device.kind}")
    found: list[tuning.Entry] = []
    start = time.perf_counter()
    for number, (gemm, spec) in enumerate(todo.items(), 1):
        before = time.perf_counter()
        sizes = f"{spec.tokens} x {spec.d_in} x {spec.d_out}"
        name = f"  {number} of {len(todo)}: {spec.name}, {sizes}"
        try:
            entry = (measure or measured)(trial_of(spec))
        except jax.errors.JaxRuntimeError as error:
            # Its operands may need more memory than a step's: it stays an estimate.
            reason = next(iter(str(error).splitlines()), "")
            report(f"{name}: could not be timed ({reason})")
            continue
        assert entry.gemm == gemm, f"{spec} was timed as {entry.gemm}"
        tuning.save(device.kind, [entry])
        found.append(entry)
        report(
            f"{name}: 2:4 {entry.sparse_us:,.0f} us, dense {entry.dense_us:,.0f} us, "
            f"packing {entry.pack_us:,.0f} us ({time.perf_counter() - before:.1f} s)"
        )
    report(
        f"tuned {len(found)} GEMMs in {time.perf_counter() - start:.1f} s, for this "
        f"run and later ones: {tuning_cache.root()}"
    )
    return found


def tune_for_all(
    specs: Sequence[GemmSpec], *, tune: bool, report: Callable[[str], None]
) -> None:
    """Tunes before a run is planned, on every process: process 0 tunes, if `tune`, and
    all others take its user's entries instead of their own. With different ones they
    would choose, and compile, different programs.

    Raises:
      ValueError: as `tune_missing`.
      TimeoutError: see `processes.Exchange`.
    """
    first = jax.process_index() == 0
    if first and tune:
        tune_missing(specs, report=report)
    if jax.process_count() == 1:
        return
    kind = current_device().kind
    given = tuning.own_as_text(kind) if first else ""
    texts = Exchange("tuning").gather("entries", given, timeout_seconds=WAIT_SECONDS)
    if not first:
        tuning.take_own(kind, texts[0])


def measured(trial: Trial) -> tuning.Entry:
    """Returns the times of a GEMM: its correct configs are timed in turn with the dense
    one, and packing by itself.

    Raises:
      ValueError: no config is correct.
    """
    times: dict[str, float] = {}

    def time_us(correct: list[Config]) -> dict[Config, float]:
        calls = {str(config): trial.sparse[config] for config in _fastest(correct)}
        timings, _ = time_queued(
            {"dense": trial.dense, **calls}, baseline="dense", rounds=3
        )
        times.update({timing.name: 1e3 * timing.time_ms for timing in timings})
        return {config: times.get(str(config), math.inf) for config in correct}

    def _fastest(correct: list[Config]) -> list[Config]:
        """Returns the configs that a short look does not rule out."""
        if len(correct) <= FINALISTS:
            return correct
        calls = {str(config): trial.sparse[config] for config in correct}
        timings, _ = time_queued(
            calls, baseline=str(correct[0]), rounds=1, seconds=0.02, settle_seconds=0.02
        )
        short = {timing.name: timing.time_ms for timing in timings}
        return sorted(correct, key=lambda config: short[str(config)])[:FINALISTS]

    best, sparse_us = tuning.search(
        trial.gemm.shape(),
        list(trial.sparse),
        lambda config: trial.is_correct(trial.sparse[config]),
        time_us,
    )
    (pack,), _ = time_queued({"pack": trial.pack}, baseline="pack", rounds=3)
    return tuning.Entry(
        gemm=trial.gemm,
        config=best,
        sparse_us=round(sparse_us, 2),
        dense_us=round(times["dense"], 2),
        pack_us=round(1e3 * pack.time_ms / trial.gemms_packed, 2),
        jax=jax.__version__,
        date=f"{datetime.now(UTC):%Y-%m-%d}",
        commit=None,
    )


def trial_of(spec: GemmSpec) -> Trial:
    """Returns the trial of a GEMM that `missing` has found."""
    gemm: Gemm
    if spec.is_weight_gradient:
        gemm = "5" if spec.sparse_operand == "gradient" else "6"
    elif spec.sparse_weight:
        gemm = "1"
    else:
        gemm = "4" if spec.weight_transposed else "2"
    neurons_out = spec.sparse_operand in ("weight", "gradient")
    d_model, neurons = (
        (spec.d_in, spec.d_out) if neurons_out else (spec.d_out, spec.d_in)
    )
    sizes = spec.tokens, d_model, neurons
    if spec.experts is None:
        share = _share(spec.dense_features, sizes[2])
        problem = ffn_gemms.make_problem(
            gemm, *sizes, dense_share=share, float32_out=spec.float32_out
        )
        return trial_of_problem(problem)
    tokens, d_model, neurons = sizes
    return _trial_of_experts(
        gemm,
        # A row is a token's expert: several of them are as many tokens.
        tokens * spec.experts_per_token,
        d_model,
        neurons,
        # A device has as many of the experts as it has neurons for.
        experts=neurons // spec.expert_features,
        group_tile=spec.group_tile,
        dense_share=_share(spec.dense_features, spec.expert_features),
    )


def trial_of_entry(gemm: TunedGemm) -> Trial:
    """Returns the operands and programs of a GEMM that the table of another GPU has. As
    many features stay dense as by default."""
    number, tokens, d_model, neurons = sizes_of(gemm)
    share = expert_gemms.DENSE_SHARE
    if not gemm.group_tile:
        problem = ffn_gemms.make_problem(
            number,
            tokens,
            d_model,
            neurons,
            dense_share=share,
            float32_out=gemm.float32_out,
        )
        return trial_of_problem(problem)
    return _trial_of_experts(
        number,
        tokens,
        d_model,
        neurons * gemm.experts,
        experts=gemm.experts,
        group_tile=gemm.group_tile,
        dense_share=share,
    )


def sizes_of(gemm: TunedGemm) -> tuple[Gemm, int, int, int]:
    """Returns the number of an FFN's GEMM, its tokens, d_model, and its neurons: of one
    expert, where it has experts, and without residual rows."""
    tokens = gemm.tokens - (gemm.experts - 1) * gemm.group_tile
    neurons_in = gemm.sparse_operand == "input"
    d_model, neurons = (
        (gemm.d_out, gemm.d_in) if neurons_in else (gemm.d_in, gemm.d_out)
    )
    if gemm.is_weight_gradient:
        share, rows = expert_gemms.DENSE_SHARE, neurons
        neurons = next(
            neurons
            for neurons in range(rows, 0, -FEATURE_TILE)
            if neurons + in_blocks(dense_feature_count(neurons, share)) == rows
        )
        return ("6" if neurons_in else "5"), tokens, d_model, neurons
    if gemm.sparse_operand == "weight":
        return "1", tokens, d_model, neurons
    return ("4" if gemm.weight_transposed else "2"), tokens, d_model, neurons


def _trial_of_experts(
    gemm: Gemm,
    tokens: int,
    d_model: int,
    neurons: int,
    *,
    experts: int,
    group_tile: int,
    dense_share: float,
) -> Trial:
    expert = np.random.default_rng(0).permutation(np.arange(tokens) % experts)
    expert = jnp.asarray(expert[:, None], jnp.int32)
    routed = jax.jit(dispatch, static_argnums=(1, 2))(expert, experts, group_tile)
    problem = expert_gemms.make_problem(
        gemm, tokens, d_model, neurons, routed, dense_share=dense_share
    )
    return trial_of_experts(problem)


def _share(whole: int, features: int) -> float:
    """Returns the share of the features that `dense_feature_count` rounds up to
    `whole`: half a tile less, so that it does not matter how the division is
    rounded."""
    return max(0.0, (whole - FEATURE_TILE / 2) / features)


def trial_of_problem(problem: ffn_gemms.Problem) -> Trial:
    """Returns the trial of one GEMM over all neurons."""
    configs = ffn_gemms.kernels_here().configs(problem.tuned)
    operands = problem.packed, problem.b
    calls = compile_all(
        {config: (partial(problem.sparse, config), operands) for config in configs}
        | {
            "dense": (problem.dense, (problem.masked_once, problem.b)),
            "pack": (problem.pack, (problem.source,)),
        }
    )
    first: list[jax.Array] = []

    def is_correct(call: Callable[[], Any]) -> bool:
        product = problem.whole(call())
        if not first:
            ours, bound, _ = ffn_gemms.errors(problem, product)
            if ours <= bound:
                first.append(product)
            return ours <= bound
        # The order of the sums, and so every bit, does not depend on the config.
        return bool(jnp.array_equal(product, first[0]))

    return Trial(
        gemm=problem.tuned,
        sparse={config: calls[config] for config in configs},
        dense=calls["dense"],
        pack=calls["pack"],
        gemms_packed=1,
        is_correct=is_correct,
    )


def trial_of_experts(problem: expert_gemms.Problem) -> Trial:
    """Returns the trial of one GEMM of experts."""
    configs = ffn_gemms.kernels_here().configs(problem.tuned)
    operands = problem.operands
    calls = compile_all(
        {config: (partial(problem.sparse, config), operands) for config in configs}
        | {
            "dense": (problem.dense, problem.of_dense),
            "pack": (problem.pack, problem.source),
        }
    )
    return Trial(
        gemm=problem.tuned,
        sparse={config: calls[config] for config in configs},
        dense=calls["dense"],
        pack=calls["pack"],
        # One pass makes the operands of both weight gradients.
        gemms_packed=1 + problem.tuned.is_weight_gradient,
        is_correct=lambda call: expert_gemms.error(problem, call) < EXPERTS_ERROR,
    )


def compile_all(jobs: Mapping[Any, tuple[Callable[..., Any], tuple]]) -> dict:
    """Returns functions compiled with their arguments, side by side: every config is a
    program of its own."""

    def one(job: tuple[Callable[..., Any], tuple]) -> Callable[[], Any]:
        function, arguments = job
        return partial(jax.jit(function).lower(*arguments).compile(), *arguments)

    with ThreadPoolExecutor(8) as pool:
        return dict(zip(jobs, pool.map(one, jobs.values()), strict=True))
