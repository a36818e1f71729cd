"""Says what runs the six GEMMs of an FFN on a GPU, how long they take, and why.

The GPU need not be here; the times come from tables, and from your own cache:

    sparsejax explain --tokens 16384 --d-model 4096 --d-hidden 16384 \\
        --sparsity.weights 2:4 --sparsity.activations 128:2:32 \\
        --device 'NVIDIA H100 80GB HBM3'
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import tyro

from pallas_kernels.device import Device
from sparsejax.config.ranges import Count, check_intervals
from sparsejax.feed_forward.choice import why_slower_than_dense
from sparsejax.feed_forward.gated_ffn import GatedFFNSpec
from sparsejax.feed_forward.sparsity import FFNSparsity
from sparsejax.feed_forward.spec import FFNSpec
from sparsejax.launch.flags import REGISTRY
from sparsejax.ops.backend import Backend, current_device
from sparsejax.terminal import console
from sparsejax.terminal.printed_gemms import say_decisions


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `sparsejax explain`: a call of an FFN, and where it runs."""

    tokens: Count
    """Tokens of one call on one device: a micro-batch."""
    d_model: Count
    """Width of the model."""
    d_hidden: Count
    """Neurons of the FFN."""
    activation: Literal["relu2", "swiglu", "reglu2"] = "relu2"
    """relu2: relu(X W1)^2 W2. swiglu and reglu2 have a gate."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """What the FFN computes in. The kernels are for bfloat16."""
    sparsity: FFNSparsity = field(default_factory=FFNSparsity)
    backend: Backend | None = None
    """The backend that runs the sparse GEMMs. None: the fastest that can, for each."""
    device: str | None = None
    """Name of the GPU, as "NVIDIA H100 80GB HBM3". Default: the device here."""

    def __post_init__(self) -> None:
        check_intervals(self)


def run(arguments: Sequence[str]) -> None:
    """Prints a line for each GEMM, and why.

    Raises:
      ValueError: the sizes and the sparsity do not fit, or the GPU is not known.
      NotImplementedError: the named backend cannot run one of the GEMMs.
    """
    options = tyro.cli(
        Options,
        args=arguments,
        description=__doc__,
        prog="sparsejax explain",
        registry=REGISTRY,
    )
    device = (
        current_device() if options.device is None else Device.named(options.device)
    )
    kind = FFNSpec
    if options.activation != "relu2":
        kind = partial(GatedFFNSpec, activation=options.activation)
    spec = kind(
        tokens=options.tokens,
        d_model=options.d_model,
        d_hidden=options.d_hidden,
        dtype=options.dtype,
        sparsity=options.sparsity,
        device=device,
    )
    decisions = spec.explain(options.backend)
    console.say(
        f"FFN of {options.tokens:,} tokens x {options.d_model:,} x "
        f"{options.d_hidden:,}, {options.activation}, {options.dtype}, on {device.kind}"
    )
    say_decisions(decisions)
    if options.sparsity.is_dense:
        return
    slower = why_slower_than_dense(decisions)
    if slower is None and any(of.times is not None for of in decisions):
        console.say("faster than dense by what is known of its GEMMs")
    elif slower is None:
        console.say("fewer FLOPs than dense; no times of its GEMMs are known")
    else:
        console.say(f"no faster than dense: {slower}", style="yellow")
