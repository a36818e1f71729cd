"""The choice of the implementation that runs a GEMM, and the reasons for it.

Every implementation of an operation answers `why_unsupported(spec)`. Without a request
the first supported one in the order of `preference` is taken; a named backend runs or
raises with its reason. The answer is data (`Decision`), printed by `explain`.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import jax

from pallas_kernels.device import Device
from sparsejax.ops.gemm_spec import GemmSpec, Times
from sparsejax.ops.kernels import registry
from sparsejax.ops.kernels.base import KernelSet
from sparsejax.ops.kernels.registry import KernelSetName, Registered

Backend = Literal["reference", "xla", "tokamax", KernelSetName]


FIRST = "the first that can run it"
"""The reason of a choice without a request; the refusals of others follow it."""


def preference() -> tuple[Backend, ...]:
    """Returns the names of all backends, the one to be preferred first."""
    return (*registry.names(), "tokamax", "xla", "reference")


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """One way to run an operation."""

    run: Callable[..., jax.Array]
    why_unsupported: Callable[[GemmSpec], str | None]
    describe: Callable[[GemmSpec], tuple[str, float]]
    """Returns what runs a GEMM, in words, and the share of the dense GEMM's FLOPs that
    it executes."""
    why_slower: Callable[[GemmSpec], str | None] = lambda spec: None
    """Returns why the implementation would not be faster than dense, so that it is not
    chosen unasked; None where it may be."""
    times: Callable[[GemmSpec], Times | None] = lambda spec: None
    """Returns how long a GEMM takes, measured for it or for a similar one; None where
    neither was measured."""


def of_kernels(
    registered: Registered,
    run: Callable[..., jax.Array],
    *,
    why_unsupported: Callable[[KernelSet, GemmSpec], str | None],
) -> Implementation:
    """Returns a set of kernels as an implementation of an operation whose sparse
    operand is 2:4. The set is loaded only once it is asked about a device that can run
    it.

    Args:
      run: takes the set for the device that is traced for, then the operands.
      why_unsupported: takes the set as well.
    """

    def why_not(spec: GemmSpec) -> str | None:
        unavailable = registered.why_unavailable(spec.device)
        return unavailable or why_unsupported(registered.load(spec.device), spec)

    return Implementation(
        run=lambda *operands: run(registered.load(current_device()), *operands),
        why_unsupported=why_not,
        describe=lambda spec: registered.load(spec.device).describe(spec),
        why_slower=lambda spec: registered.load(spec.device).why_slower(spec),
        times=lambda spec: registered.load(spec.device).times(spec),
    )


def dense_of_each_set(
    run: Callable[..., jax.Array],
    *,
    why_unsupported: Callable[[KernelSet, GemmSpec], str | None],
    describe: Callable[[GemmSpec], tuple[str, float]],
    why_slower: Callable[[GemmSpec], str | None] = lambda spec: None,
) -> dict[Backend, Implementation]:
    """Returns every registered set of kernels as an implementation of an operation
    whose operands are both dense, by backend. The times that a set knows are those of
    GEMMs with a 2:4 operand, so none is given.

    Args:
      run: takes the set for the device that is traced for, then the operands.
      why_unsupported: takes the set as well.
    """
    return {
        each.name: replace(
            of_kernels(each, run, why_unsupported=why_unsupported),
            describe=describe,
            why_slower=why_slower,
            times=lambda spec: None,
        )
        for each in registry.REGISTERED
    }


type Implementations = Mapping[Backend, Implementation]
"""The implementations of one operation, by the name of their backend."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The backend chosen for one GEMM, and everything the choice rests on."""

    spec: GemmSpec
    backend: Backend
    path: str
    """A description of what runs the GEMM, in words."""
    executed_share: float
    """The FLOPs that are executed over those of the dense GEMM; rows that only pad to V
    are not counted."""
    reason: str
    times: Times | None = None
    """The times of the GEMM, sparse and dense; None where nothing was measured that
    tells."""

    @property
    def on_kernels(self) -> bool:
        """Whether a set of kernels runs the GEMM."""
        return self.backend in registry.names()

    @property
    def squares(self) -> bool:
        """Whether the GEMM writes its result with the squared ReLU, or the gradient of
        it, that follows: see `GemmSpec.squares`."""
        return self.spec.squares and self.on_kernels

    @property
    def kernels(self) -> KernelSet | None:
        """The set of kernels that runs the GEMM; None where no set does."""
        if not self.on_kernels:
            return None
        return registry.kernels_of(self.spec.device, self.backend)

    @property
    def on_sparse_cores(self) -> bool:
        """Whether a set of kernels runs the GEMM with a packed operand, by sparse
        instructions."""
        packed = self.spec.pattern is not None and self.spec.why_not_packed is None
        return self.on_kernels and packed


def current_device() -> Device:
    """Returns the device that an operation traced now will run on."""
    device = jax.config.jax_default_device
    if device is None or isinstance(device, str):
        # One of this process: what others have, a backend may not tell.
        device = jax.local_devices(backend=device)[0]
    return Device.of(device)


def choose_backend(
    spec: GemmSpec,
    requested: Backend | None,
    implementations: Implementations,
    *,
    kernels: Collection[Backend] | None = None,
) -> Decision:
    """Returns the decision for `spec`: the named backend, or the first in the order of
    `preference` that can run the GEMM and is not known to be slower than dense. Of the
    sets of kernels only those in `kernels` are taken unasked; None stands for all.

    Raises:
      ValueError: `requested` is no backend at all.
      NotImplementedError: the requested backend cannot run this GEMM; says why.
    """
    if requested is not None and requested not in preference():
        names = ", ".join(map(repr, reversed(preference())))
        raise ValueError(f"backend={requested!r} must be one of {names} or None")
    refusals: dict[Backend, str] = {}
    # Kernels for a device say why they do not run a GEMM; a library that has nothing to
    # do with its kind does not.
    sets = registry.names() if kernels is None else kernels
    offered = {
        *sets,
        *(name for name in implementations if name not in registry.names()),
    }
    unasked = [backend for backend in preference() if backend in offered]
    for backend in unasked if requested is None else (requested,):
        why = _why_unsupported(spec, backend, implementations)
        if why is None and requested is None:
            why = implementations[backend].why_slower(spec)
        if why is None:
            path, share = implementations[backend].describe(spec)
            refused = "; ".join(f"{name}: {text}" for name, text in refusals.items())
            reason = "as requested"
            if requested is None:
                reason = FIRST + (f"; {refused}" * bool(refused))
            times = _times(spec, implementations)
            if times is not None and times.measured_on is not None:
                reason += (
                    f"; its times are estimates, from {times.measured_on}: nobody "
                    f"measured it on {spec.device.kind}"
                )
            return Decision(
                spec=spec,
                backend=backend,
                path=path,
                executed_share=share,
                reason=reason,
                times=times,
            )
        refusals[backend] = why
    reasons = "; ".join(f"{name}: {why}" for name, why in refusals.items())
    if requested is None:
        raise NotImplementedError(f"no backend runs GEMM {spec.in_words}: {reasons}")
    raise NotImplementedError(
        f"the backend that is named cannot run GEMM {spec.in_words}: {reasons}; leave "
        f"backend=None to take one that can"
    )


def _times(spec: GemmSpec, implementations: Implementations) -> Times | None:
    """Returns the times that are known to the first backend that can run the GEMM and
    was measured, whether it is chosen or not; None where no backend was measured."""
    for backend in preference():
        if _why_unsupported(spec, backend, implementations) is None:
            times = implementations[backend].times(spec)
            if times is not None:
                return times
    return None


def _why_unsupported(
    spec: GemmSpec,
    backend: Backend,
    implementations: Implementations,
) -> str | None:
    if backend not in implementations:
        kind = "grouped" if spec.experts else str(spec.pattern or "dense")
        return f"has no kernel for a {kind} GEMM"
    return implementations[backend].why_unsupported(spec)
