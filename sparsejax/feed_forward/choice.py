"""The choice of what runs the GEMMs of an FFN, made for all of them together.

A GEMM's kernel alone can be faster than the dense GEMM and still lose: what it reads
has to be packed, unless the kernel of the GEMM before writes it packed, and activations
are packed for all GEMMs that read them or for none.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations

from sparsejax.ops import dense_matmul, fp8_matmul, grouped_matmul, sparse_matmul
from sparsejax.ops.backend import (
    FIRST,
    Backend,
    Decision,
    Implementations,
    choose_backend,
)
from sparsejax.ops.gemm_spec import GemmSpec
from sparsejax.ops.kernels import registry

type Epilogues = Callable[[Sequence[Decision]], tuple[Decision, ...]]
"""A function that takes decisions and returns them, adding to the path of each GEMM
whose kernel does more than multiply."""


class SlowerThanDense(UserWarning):
    """A sparse FFN that runs on a GPU or TPU and is no faster there than a dense
    one."""


def decide(
    gemms: Sequence[GemmSpec], backend: Backend | None, with_epilogues: Epilogues
) -> tuple[Decision, ...]:
    """Returns what runs each of the GEMMs, and why. A named backend that has no dense
    GEMM runs the sparse GEMMs, of those by expert that are dense the ones that it can,
    and, a set of kernels, those that a squared ReLU follows; tokamax runs those by
    expert. XLA runs the others.

    The activations are packed for all GEMMs that read them token by token, and from
    that for the weight gradients, or for none of them. Unasked, the kernels are taken
    whose GEMMs, packing included, take the least time together, by what was measured or
    estimated. GEMMs by expert take their kernel, or tokamax, wherever it can run them.
    Where neither runs any of them, XLA's loop over the experts does if it is expected
    to take less time than the dense GEMM of all neurons, and else that one.

    Raises:
      NotImplementedError: the named backend cannot run one of the sparse GEMMs, or runs
        no GEMM at all though some are by expert; says why.
    """
    decisions = with_epilogues(_one_by_one(gemms, backend))
    if backend is not None:
        _check_runs_some(backend, decisions)
        return decisions
    decisions = _fastest_together(gemms, decisions, with_epilogues)
    if any(decision.on_kernels for decision in decisions):
        return decisions
    return _dense_where_loops_lose(decisions)


def why_slower_than_dense(decisions: Sequence[Decision]) -> str | None:
    """Returns why a sparse FFN is no faster than a dense one by what is known of its
    GEMMs, or None where it is faster. The cost of routing and of masks, and the clock
    of the GPU, are not part of what is known."""
    sparse = [of for of in decisions if _stands_for_sparse(of.spec)]
    if not sparse:
        return None
    device = sparse[0].spec.device.kind
    if all(not of.on_kernels and of.executed_share >= 1 for of in sparse):
        reasons = "; ".join(dict.fromkeys(of.reason for of in sparse))
        return (
            f"none of its sparse GEMMs runs on sparse tensor cores of {device}, none "
            f"skips an expert, and masks cost a little time ({reasons})"
        )
    known = [of for of in decisions if of.on_kernels and of.times is not None]
    us = sum(map(_us_on_kernel, known))
    dense_us = sum(of.times.dense_us for of in known if of.times is not None)
    if us < dense_us or not known:
        return None
    return (
        f"its GEMMs on sparse tensor cores take {us:,.0f} us on {device}, packing and "
        f"what an estimate may be wrong by included, and dense ones {dense_us:,.0f} us"
    )


def warn_if_slower(decisions: Sequence[Decision]) -> None:
    """Warns, once for each reason, that a sparse FFN runs on a GPU or TPU and is no
    faster than a dense one would be."""
    if decisions[0].spec.device.platform == "cpu":
        return
    why = why_slower_than_dense(decisions)
    if why is not None:
        _warn_once(why)


@cache
def _warn_once(why: str) -> None:
    warnings.warn(
        f"this sparse FFN is no faster than a dense one: {why}. FFNSpec.explain says "
        f"it GEMM by GEMM; make the FFN dense, or ignore SlowerThanDense where only "
        f"its loss matters",
        SlowerThanDense,
        # Of the caller of `ffn`: this, warn_if_slower, call_ffn and ffn lie between.
        stacklevel=5,
    )


def _one_by_one(gemms: Sequence[GemmSpec], backend: Backend | None) -> list[Decision]:
    """Returns the decision for each GEMM by itself, except that GEMMs whose operands
    are packed together are decided alike."""
    decisions = tuple(_choose(gemm, backend) for gemm in gemms)
    packed = [decision.on_kernels for decision in decisions]
    why = "sparse tensor cores run GEMMs 2 and 4 together, and 5 and 6 after them"
    by_token, over_tokens = _packed_by_token(gemms), _packed_over_tokens(gemms)
    reasons: dict[int, str] = {}
    for group in filter(None, (by_token, over_tokens)):
        slower = None
        by_expert = any(gemms[i].experts for i in group)
        unasked = backend is None and not by_expert
        if unasked and all(packed[i] for i in group):
            slower = _why_slower_together([decisions[i] for i in group])
        tokenwise = all(packed[i] and i not in reasons for i in by_token)
        if slower is not None:
            reasons |= dict.fromkeys(group, slower)
        elif len({packed[i] for i in group}) > 1 or (
            group is over_tokens and packed[group[0]] and not tokenwise
        ):
            reasons |= dict.fromkeys(group, why)
    changed = [
        replace(gemm, why_not_packed=reasons[i]) if i in reasons else gemm
        for i, gemm in enumerate(gemms)
    ]
    return [_choose(gemm, backend) for gemm in changed]


def _fastest_together(
    gemms: Sequence[GemmSpec],
    decisions: tuple[Decision, ...],
    with_epilogues: Epilogues,
) -> tuple[Decision, ...]:
    """Returns the decisions whose GEMMs take the least time together: those given, or,
    where all times are known, faster ones. GEMMs by expert stay as they are."""
    groups = _free_groups(gemms)
    free = {i: _on_kernels(gemms[i]).times for group in groups for i in group}
    if not free or None in free.values():
        return decisions
    dense_us = {i: times.dense_us for i, times in free.items() if times is not None}

    def known_us(decisions: Sequence[Decision]) -> float:
        """Returns the time in microseconds of the GEMMs that are free to run either
        way; the time of all others is the same in any case."""
        of_kernels = [decisions[i] for i in free if decisions[i].on_kernels]
        others = [us for i, us in dense_us.items() if not decisions[i].on_kernels]
        return sum(map(_us_on_kernel, of_kernels)) + sum(others)

    by_token, over_tokens = _packed_by_token(gemms), _packed_over_tokens(gemms)
    best = decisions
    for count in range(len(groups) + 1):
        for taken in combinations(groups, count):
            on_kernels = {i for group in taken for i in group}
            if on_kernels & set(over_tokens) and not on_kernels.issuperset(by_token):
                continue
            other = with_epilogues(_as_given(gemms, decisions, free, on_kernels))
            if known_us(other) < known_us(best):
                best = other
    return best


def _us_on_kernel(decision: Decision) -> float:
    """Returns the microseconds that a GEMM takes on its kernel, raised by what an
    estimate may be wrong by. Packing an activation counts; a weight is packed once for
    many calls, so packing it does not."""
    times = decision.times
    if times is None:
        return 0.0
    packing = 0.0 if decision.spec.sparse_weight else times.packing_us
    return (times.kernel_us + packing) * times.least_gain


def _dense_where_loops_lose(decisions: tuple[Decision, ...]) -> tuple[Decision, ...]:
    """Returns the decisions, with a dense GEMM of all neurons in the place of each GEMM
    by expert that XLA would run no faster. Of the weight gradients all go the same way,
    and those that are 2:4 along an expert's rows stay by expert."""
    reasons = {
        i: grouped_matmul.why_slower_than_dense(of.spec)
        for i, of in enumerate(decisions)
        if of.spec.experts and of.backend == "xla"
    }
    over_tokens = [i for i, of in enumerate(decisions) if of.spec.is_weight_gradient]
    if any(decisions[i].spec.pattern or not reasons.get(i) for i in over_tokens):
        reasons |= dict.fromkeys(over_tokens)
    told = list(decisions)
    for i, reason in reasons.items():
        if reason is not None:
            of_all = replace(
                decisions[i].spec,
                experts=None,
                experts_per_token=1,
                expert_features=0,
                group_tile=0,
                why_not_by_expert=reason,
            )
            refused = decisions[i].reason.removeprefix(FIRST)
            told[i] = replace(
                _choose(of_all, "xla"), reason=f"dense: {reason}{refused}"
            )
    return tuple(told)


def _stands_for_sparse(gemm: GemmSpec) -> bool:
    """Returns whether the GEMM is one that kernels could run in less time than the
    dense GEMM: it has a sparse operand, or tokens use the neurons of some experts."""
    skips = gemm.experts is not None or gemm.why_not_by_expert is not None
    return gemm.pattern is not None or skips


def _free_groups(gemms: Sequence[GemmSpec]) -> list[tuple[int, ...]]:
    """Returns the indices of the GEMMs that a kernel can run and a dense GEMM could, in
    groups that are packed together."""
    weights = [(i,) for i, gemm in enumerate(gemms) if gemm.sparse_weight]
    together = [tuple(_packed_by_token(gemms)), tuple(_packed_over_tokens(gemms))]
    return [
        group
        for group in (*weights, *together)
        if group and all(_can_go_either_way(gemms[i]) for i in group)
    ]


def _can_go_either_way(gemm: GemmSpec) -> bool:
    if gemm.experts is not None or gemm.pattern is None:
        return False
    name = registry.name_for(gemm.device)
    if name is None:
        return False
    return _implementations_of(gemm)[name].why_unsupported(gemm) is None


def _as_given(
    gemms: Sequence[GemmSpec],
    decisions: Sequence[Decision],
    free: Iterable[int],
    on_kernels: set[int],
) -> list[Decision]:
    """Returns the decisions with exactly the free GEMMs in `on_kernels` on their
    kernels."""
    given = list(decisions)
    for i in free:
        if i in on_kernels:
            chosen = _on_kernels(gemms[i])
            why = "the FFN's GEMMs take the least time together with it"
            told = chosen.reason.replace("as requested", why)
            given[i] = replace(chosen, reason=told)
        elif decisions[i].on_kernels:
            why = "the FFN's GEMMs take less time together without it"
            given[i] = _choose(replace(gemms[i], why_not_packed=why), None)
    return given


def _packed_by_token(gemms: Sequence[GemmSpec]) -> list[int]:
    return [i for i, gemm in enumerate(gemms) if gemm.reads_activations]


def _packed_over_tokens(gemms: Sequence[GemmSpec]) -> list[int]:
    return [i for i, gemm in enumerate(gemms) if _is_two_four_over_tokens(gemm)]


def _why_slower_together(decisions: Sequence[Decision]) -> str | None:
    """Returns why GEMMs that share the packing of their operands are slower than dense
    ones, by their known times; None where they are faster, or where a time is not
    known."""
    times = [decision.times for decision in decisions if decision.times is not None]
    if len(times) < len(decisions):
        return None
    sparse = sum(of.kernel_us for of in times)
    packing = sum(of.packing_us for of in times)
    dense = sum(of.dense_us for of in times)
    least_gain = max(of.least_gain for of in times)
    if (sparse + packing) * least_gain < dense:
        return None
    known = "measured slower together"
    if least_gain > 1:
        known = "together estimated slower, or faster by less than the estimate's error"
    elsewhere = sorted({of.measured_on for of in times if of.measured_on})
    where = f", measured on {' and '.join(elsewhere)}" if elsewhere else ""
    return (
        f"{known}: {sparse:.0f} us and {packing:.0f} of packing, dense {dense:.0f}"
        f"{where}"
    )


def _check_runs_some(backend: Backend, decisions: Sequence[Decision]) -> None:
    """Raises NotImplementedError where a named set of kernels runs no GEMM of an FFN
    whose GEMMs by expert are dense."""
    if backend in registry.names() and not any(of.on_kernels for of in decisions):
        for of in decisions:
            if of.spec.experts is not None:
                choose_backend(of.spec, backend, _implementations_of(of.spec))


def _choose(gemm: GemmSpec, backend: Backend | None) -> Decision:
    implementations = _implementations_of(gemm)
    kernels = registry.names()
    if gemm.squares and backend in kernels:
        of_named = implementations[backend]
        if of_named.why_unsupported(gemm) is None:
            return choose_backend(gemm, backend, implementations)
    if gemm.pattern is None and backend in kernels:
        # No other set: it would not read what this one has packed.
        backend, kernels = None, (backend,)
    if gemm.experts is None and backend == "tokamax":
        # Not None: where tokamax is named no kernel of ours runs beside it.
        backend = "xla"
    return choose_backend(gemm, backend, implementations, kernels=kernels)


def _on_kernels(gemm: GemmSpec) -> Decision:
    """Returns the decision for the kernels of the GEMM's device, which can run this
    GEMM."""
    return _choose(gemm, registry.name_for(gemm.device))


def _is_two_four_over_tokens(gemm: GemmSpec) -> bool:
    """Returns whether the GEMM is a weight gradient that sparse tensor cores could run.
    Where nothing packs its 2:4 operand it is not: it is then a dense GEMM of the masked
    operand."""
    two_four = gemm.pattern is not None and gemm.why_not_packed is None
    return gemm.is_weight_gradient and two_four


def _implementations_of(gemm: GemmSpec) -> Implementations:
    """Returns the implementations of the operation that `gemm` is a call of."""
    if gemm.experts is not None and gemm.is_weight_gradient:
        if _is_two_four_over_tokens(gemm):
            return grouped_matmul.sparse_outer_implementations()
        return grouped_matmul.outer_implementations()
    if gemm.experts is not None:
        if gemm.pattern is None:
            return grouped_matmul.implementations()
        return grouped_matmul.sparse_implementations()
    if gemm.pattern is not None:
        return sparse_matmul.implementations()
    if gemm.squares:
        return dense_matmul.fused_implementations()
    return (fp8_matmul if gemm.fp8 else dense_matmul).implementations()
