"""Times the 2:4 GEMMs of a run on its own GPU, where nobody has yet.

Which config of a kernel is fastest, and whether that is faster than a dense GEMM, is
looked up by `pallas_kernels.tuning`. What is not known of this very GPU at a run's own
sizes is measured here: every config is compared with float32, then timed in turn with
the dense GEMM, and packing by itself. The user's cache keeps it for the next run.

A process that has run a sparse kernel has a lower clock from then on (H200): where the
dense steps before a run's sparse phase are many, tune in a process before it.
"""

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
from pallas_kernels.sparse_matmul_configs import Config, Shape
from sparsejax import expert_gemms, ffn_gemms
from sparsejax.config import TrainConfig
from sparsejax.metrics import ffn_spec
from sparsejax.ops import sparse_matmul
from sparsejax.ops.backend import GemmSpec, current_device
from sparsejax.ops.ffn_spec import FEATURE_TILE
from sparsejax.processes import Exchange
from sparsejax.recipe import phases
from sparsejax.router import dispatch
from sparsejax.timing import time_queued

WAIT_SECONDS = 1800
"""How long other processes wait for the one that tunes."""

EXPERTS_ERROR = 3e-3
"""Relative, of a product of bfloat16 rounded to it: half of its last bit is 2e-3."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One GEMM on random operands, compiled: functions without arguments."""

    shape: Shape
    sparse: Mapping[Config, Callable[[], Any]]
    """The kernel alone, by config."""
    dense: Callable[[], Any]
    """What it stands for."""
    pack: Callable[[], Any]
    """Makes the sparse operand."""
    gemms_packed: int
    """How many GEMMs read what one `pack` makes."""
    is_correct: Callable[[Callable[[], Any]], bool]
    """Whether one of `sparse` computes the GEMM."""


def gemms_of_run(config: TrainConfig) -> list[GemmSpec]:
    """The FFN GEMMs of a run's sparse phases, of one micro-batch on one of the devices
    here; none where a backend without these kernels is named. Raises ValueError where
    the mesh does not fit the devices."""
    if config.backend not in (None, "mosaic_sm90"):
        return []
    mesh = config.mesh.resolve(jax.device_count())
    micro_batch = config.batch_size // config.micro_batches_on(mesh)
    tokens = micro_batch * config.data.sequence_length
    sparsities = dict.fromkeys(phase.sparsity for phase in phases(config))
    return [
        gemm
        for sparsity in sparsities
        if not sparsity.is_dense
        for gemm in ffn_spec(config.model, sparsity, tokens, mesh=mesh).gemms()
    ]


def missing(specs: Iterable[GemmSpec], device: Device) -> dict[Shape, GemmSpec]:
    """Finds the GEMMs that `device`'s kernels could run with a 2:4 operand, and that
    nobody has measured on it near their number of tokens."""
    found: dict[Shape, GemmSpec] = {}
    for spec in specs:
        why = sparse_matmul.IMPLEMENTATIONS["mosaic_sm90"].why_unsupported(spec)
        if why is not None or spec.dtype != "bfloat16":
            continue
        shape = sparse_matmul.shape_on_sm90(spec)
        if tuning.nearest(device, shape) is None:
            found.setdefault(shape, spec)
    return found


def tune_missing(
    specs: Iterable[GemmSpec],
    *,
    report: Callable[[str], None],
    measure: Callable[[Trial], tuning.Entry] | None = None,
) -> list[tuning.Entry]:
    """Measures the GEMMs that `missing` finds and keeps them in the user's cache. On
    anything but a Hopper GPU nothing is done.

    Args:
      report: takes a line about each GEMM, and one about all.
      measure: what times a GEMM; None for `measured`.
    Raises:
      ValueError: a kernel computes none of its configs correctly on this GPU.
    """
    device = current_device()
    if device.why_not_hopper() is not None:
        return []
    todo = missing(specs, device)
    if not todo:
        return []
    report(f"tuning {len(todo)} GEMMs that nobody has timed on this {device.kind}")
    found: list[tuning.Entry] = []
    start = time.perf_counter()
    for number, (shape, spec) in enumerate(todo.items(), 1):
        before = time.perf_counter()
        name = f"  {number} of {len(todo)}: {spec.name}, {spec.m} x {spec.k} x {spec.n}"
        try:
            entry = (measure or measured)(trial_of(spec))
        except jax.errors.JaxRuntimeError as error:
            # Its operands may need more memory than a step's: it stays an estimate.
            reason = next(iter(str(error).splitlines()), "")
            report(f"{name}: could not be timed ({reason})")
            continue
        assert entry.shape == shape, f"{spec} was timed as {entry.shape}"
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
    """What a run does before it is planned, on every process: process 0 tunes, if
    `tune`, and all others take its user's entries instead of their own. With different
    ones they would choose, and compile, different programs.

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
    """Times a GEMM: its correct configs in turn with the dense one, and packing.

    Raises:
      ValueError: no config is correct.
    """
    times: dict[str, float] = {}

    def time_us(correct: list[Config]) -> dict[Config, float]:
        calls = {str(config): trial.sparse[config] for config in correct}
        timings, _ = time_queued(
            {"dense": trial.dense, **calls}, baseline="dense", rounds=3
        )
        times.update({timing.name: 1e3 * timing.time_ms for timing in timings})
        return {config: times[str(config)] for config in correct}

    best, sparse_us = tuning.search(
        trial.shape,
        list(trial.sparse),
        lambda config: trial.is_correct(trial.sparse[config]),
        time_us,
    )
    (pack,), _ = time_queued({"pack": trial.pack}, baseline="pack", rounds=3)
    return tuning.Entry(
        shape=trial.shape,
        config=best,
        sparse_us=round(sparse_us, 2),
        dense_us=round(times["dense"], 2),
        pack_us=round(1e3 * pack.time_ms / trial.gemms_packed, 2),
        jax=jax.__version__,
        date=f"{datetime.now(UTC):%Y-%m-%d}",
        commit=None,
    )


def trial_of(spec: GemmSpec) -> Trial:
    """The operands of a GEMM that `missing` has found, and its programs."""
    if spec.over_tokens:
        gemm = "5" if spec.sparse_operand == "rhs" else "6"
        features, d_model = spec.m, spec.n
        if gemm == "5":
            features, d_model = d_model, features
        sizes = spec.k, d_model, features
    elif spec.sparse_weight:
        gemm, sizes = "1", (spec.m, spec.k, spec.n)
    else:
        gemm, sizes = ("4" if spec.rhs_transposed else "2"), (spec.m, spec.n, spec.k)
    if spec.experts is None:
        share = _share(spec.whole_features, sizes[2])
        problem = ffn_gemms.make_problem(
            gemm, *sizes, whole_share=share, float32_out=spec.float32_out
        )
        return trial_of_problem(problem)
    tokens, d_model, neurons = sizes
    # A device has as many of the experts as it has neurons for.
    experts = neurons // spec.expert_features
    # A row is a token's expert: several of them are as many tokens.
    tokens *= spec.experts_per_token
    expert = np.random.default_rng(0).permutation(np.arange(tokens) % experts)
    expert = jnp.asarray(expert[:, None], jnp.int32)
    routed = jax.jit(dispatch, static_argnums=(1, 2))(expert, experts, spec.group_tile)
    share = _share(spec.whole_features, spec.expert_features)
    problem = expert_gemms.make_problem(
        gemm, tokens, d_model, neurons, routed, whole_share=share
    )
    return trial_of_experts(problem)


def _share(whole: int, features: int) -> float:
    """The share of the features that `dense_feature_count` rounds up to `whole`: half a
    tile less, whichever way the division is rounded."""
    return max(0.0, (whole - FEATURE_TILE / 2) / features)


def trial_of_problem(problem: ffn_gemms.Problem) -> Trial:
    """The programs of one GEMM of all neurons."""
    configs = _candidates(problem.shape)
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
        shape=problem.shape,
        sparse={config: calls[config] for config in configs},
        dense=calls["dense"],
        pack=calls["pack"],
        gemms_packed=1,
        is_correct=is_correct,
    )


def trial_of_experts(problem: expert_gemms.Problem) -> Trial:
    """The programs of one GEMM of experts."""
    count = current_device().count_multiprocessors()

    def sparse(config: Config) -> Callable[..., Any]:
        return partial(
            problem.sparse, config_for=lambda _: config, multiprocessors=count
        )

    configs = _candidates(problem.shape)
    calls = compile_all(
        {config: (sparse(config), problem.operands) for config in configs}
        | {
            "dense": (problem.dense, problem.of_dense),
            "pack": (problem.pack, problem.source),
        }
    )
    return Trial(
        shape=problem.shape,
        sparse={config: calls[config] for config in configs},
        dense=calls["dense"],
        pack=calls["pack"],
        # One pass makes the operands of both weight gradients.
        gemms_packed=1 + problem.shape.sums_over_tokens,
        is_correct=lambda call: expert_gemms.error(problem, call) < EXPERTS_ERROR,
    )


def _candidates(shape: Shape) -> list[Config]:
    return tuning.candidates(shape, current_device().count_multiprocessors())


def compile_all(jobs: Mapping[Any, tuple[Callable[..., Any], tuple]]) -> dict:
    """Functions with their arguments, compiled side by side: every config is a program
    of its own."""

    def one(job: tuple[Callable[..., Any], tuple]) -> Callable[[], Any]:
        function, arguments = job
        return partial(jax.jit(function).lower(*arguments).compile(), *arguments)

    with ThreadPoolExecutor(8) as pool:
        return dict(zip(jobs, pool.map(one, jobs.values()), strict=True))
