"""The part of the printed plan that says what runs the GEMMs of a run's FFNs."""

import statistics
from collections.abc import Sequence
from dataclasses import replace

from pallas_kernels.device import Device
from sparsejax import cost_model
from sparsejax.config import ModelConfig, TrainConfig
from sparsejax.config.schedule import Phase
from sparsejax.dtypes import Precision
from sparsejax.feed_forward.sparsity import FFNSparsity
from sparsejax.ops.backend import Decision
from sparsejax.ops.fp8_matmul import why_no_tensor_cores
from sparsejax.ops.kernels import registry
from sparsejax.terminal.console import say


def say_gemms(
    config: TrainConfig,
    name: str,
    sparsity: FFNSparsity,
    decisions: tuple[Decision, ...],
    micro_batches: int,
) -> None:
    """Prints what runs each GEMM of an FFN, why, how long it takes, and what that can
    mean for a step.

    Args:
      config: the settings of the run.
      name: the name of the phase.
      sparsity: the sparsity of the FFN.
      decisions: the decision for each GEMM, for one micro-batch on one device.
      micro_batches: how many micro-batches a step has.
    """
    executed = statistics.fmean(decision.executed_share for decision in decisions)
    of_router = advice = ""
    if sparsity.chooses_in_fp8:
        of_router = ", and for the router as many as GEMM 1 has, in 8-bit floats"
        device = decisions[0].spec.device
        if device.platform == "gpu" and (why := why_no_tensor_cores(device)):
            advice = (
                f"  which take as long as others here, for {why}; --phases.router "
                f"activation_energy --phases.no-skip-blocks chooses by GEMM 1 itself"
            )
    say(f"FFN, {name} phase: {executed:.0%} of the dense FLOPs executed{of_router}")
    if advice:
        say(advice)
    _say_paths(decisions)
    if any(decision.times is not None for decision in decisions):
        flops = cost_model.flops_per_token(config.model, config.data.sequence_length)
        _say_expected(decisions, micro_batches, flops.ffn_share())
    _say_reasons(decisions)
    if not sparsity.is_dense and executed == 1.0:
        say(
            "  this device has no sparse path for these patterns: quality is that of "
            "the sparse phase, speed a little below dense"
        )


def names_of(planned: Sequence[Phase]) -> dict[FFNSparsity, str]:
    """Returns a name for every sparsity of the run: that of the first phase that has
    it, and "dense" for dense steps, whatever phase they are in."""
    names: dict[FFNSparsity, str] = {}
    for phase in planned:
        for when, sparsity in zip(("", ", between"), phase.sparsities, strict=False):
            name = "dense" if sparsity.is_dense else f"{phase.kind}{when}"
            names.setdefault(sparsity, name)
    return names


def ways_to_compute(
    planned: Sequence[Phase], model: ModelConfig
) -> dict[tuple[ModelConfig, FFNSparsity], str]:
    """Returns a name for every way in which an FFN of the run's size computes, its
    precision and its sparsity: that of the first phase with it. The name of dense steps
    is "dense", and their precision where there are several."""
    names: dict[tuple[ModelConfig, FFNSparsity], str] = {}
    several = len({phase.precision or model.precision for phase in planned}) > 1
    for phase in planned:
        of_phase = replace(model, precision=phase.precision or model.precision)
        for sparsity, name in names_of([phase]).items():
            if several:
                name = f"{name}, precision {of_phase.precision}"
            names.setdefault((of_phase, sparsity), name)
    return names


def say_attention(planned: Sequence[Phase], model: ModelConfig, device: Device) -> None:
    """Prints what the GEMMs with attention's weights multiply, where that is not the
    compute dtype in all phases."""
    kinds: dict[Precision, list[str]] = {}
    for phase in planned:
        kinds.setdefault(phase.precision or model.precision, []).append(phase.kind)
    if list(kinds) == ["dtype"]:
        return
    for precision, phases in kinds.items():
        of_weights = "8-bit floats" if precision == "fp8_all" else model.dtype
        what = f"{model.dtype}"
        if precision != "dtype":
            what = (
                f"8-bit floats in the forward and for the gradients of inputs, "
                f"{of_weights} for those of weights"
            )
        say(f"attention's four weights, {' and '.join(phases)} phase: GEMMs of {what}")
    why = why_no_tensor_cores(device)
    if why is not None:
        say(f"  operands are rounded to 8-bit floats and no time is saved: {why}")


def say_decisions(decisions: tuple[Decision, ...]) -> None:
    """Prints what runs each GEMM of a single call of an FFN, how long it takes, and
    why."""
    executed = statistics.fmean(decision.executed_share for decision in decisions)
    say(f"{executed:.0%} of the dense FLOPs executed")
    _say_paths(decisions)
    _say_reasons(decisions)


def _say_paths(decisions: tuple[Decision, ...]) -> None:
    """Prints a line for each GEMM, and where its times come from."""
    for decision in decisions:
        say(
            f"  {decision.spec.name:<18} {decision.backend}: {decision.path} "
            f"({decision.executed_share:.0%}){_times(decision)}"
        )
    known = [decision.times for decision in decisions if decision.times is not None]
    if any(times.estimated_from is None for times in known):
        say("  measured: each GEMM alone, at the nearest tokens timed, in proportion")
    if any(times.estimated_from and not times.measured_on for times in known):
        say("  estimated: in proportion to a GEMM that is nowhere larger (m x n x k)")
    here = decisions[0].spec.device.kind
    for elsewhere in sorted({of.measured_on for of in known if of.measured_on}):
        say(
            f"  estimated: in proportion to what was measured on {elsewhere}, not on "
            f"{here}: a guess until it is timed there"
        )


def _say_reasons(decisions: tuple[Decision, ...]) -> None:
    """Prints what may make the GEMMs slow, and why each of them runs as it does."""
    if any(map(_untimed_by_expert, decisions)):
        say(
            "  GEMMs by expert that nobody timed at this size on this device: "
            "experiments/bench/ffn.py tells whether they are faster than dense"
        )
    gemms: dict[str, list[str]] = {}
    for decision in decisions:
        number = decision.spec.name.partition(" ")[0]
        gemms.setdefault(f"{decision.backend}: {decision.reason}", []).append(number)
    for reason, numbers in gemms.items():
        which = f" ({', '.join(numbers)})" if len(gemms) > 1 else ""
        say(f"  why{which}: {reason}")


def _untimed_by_expert(decision: Decision) -> bool:
    """Returns whether the GEMM runs by expert on an accelerator and nobody has compared
    it with a dense GEMM at its size there. Dense weight gradients on kernels, of which
    no times are kept, are not meant."""
    spec = decision.spec
    of_kernels = spec.is_weight_gradient and spec.pattern is None
    not_meant = (of_kernels and decision.on_kernels) or spec.device.platform == "cpu"
    return bool(spec.experts) and decision.times is None and not not_meant


def _say_expected(
    decisions: tuple[Decision, ...], micro_batches: int, ffn_share: float
) -> None:
    """Prints whether the sparse GEMMs whose times are known are faster, with their
    packing, and what that can mean for a step."""
    sparse_us = dense_us = 0.0
    speedups = []
    for decision in decisions:
        times = decision.times
        if times is None or not decision.on_kernels:
            speedups.append(1.0)
            continue
        # A weight is packed once per step, an activation in every micro-batch.
        shared = micro_batches if decision.spec.sparse_weight else 1
        with_packing = times.kernel_us + times.packing_us / shared
        sparse_us += with_packing
        dense_us += times.dense_us
        speedups.append(times.dense_us / with_packing)
    if not dense_us:
        return
    say(
        f"  the sparse ones with packing: {sparse_us:,.0f} us a layer and micro-batch, "
        f"dense {dense_us:,.0f} us ({dense_us / sparse_us:.2f} times as fast)"
    )
    lost = cost_model.LOWER_CLOCK * (1 - ffn_share)
    step = cost_model.predicted_speedup(ffn_share, speedups, overhead=lost)
    say(
        f"  so a step of this model about {step:.2f} times, by FLOPs: "
        f"{1 - ffn_share:.0%} of them are elsewhere, and take "
        f"{cost_model.LOWER_CLOCK:.0%} longer once sparse kernels have run "
        f"(the GPU's clock stays lower)"
    )
    if step <= 1:
        say(
            "  no faster than dense at this size: take more tokens per micro-batch, "
            "more micro-batches per step, or --recipe dense"
        )


def _times(decision: Decision) -> str:
    """Returns the times that a choice rests on, in words, without the chosen backend's
    name; "" where there are none."""
    times = decision.times
    if times is None:
        return ""
    whose = "" if decision.on_kernels else f"{registry.name_for(decision.spec.device)} "
    each = (
        f"{whose}{times.kernel_us:,.0f} us, dense {times.dense_us:,.0f} us, packing "
        f"{times.packing_us:,.0f} us"
    )
    if times.estimated_from is None:
        return f"; measured {each}"
    return f"; estimated {each} from {times.estimated_from}"
