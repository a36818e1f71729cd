"""Times the 2:4 GEMMs of a run on the GPU here, before any run.

What nobody has timed on this kind of GPU at the run's sizes is measured, some seconds a
GEMM, and kept in $SPARSEJAX_CACHE or ~/.cache/sparsejax for every later run and plan.
`sparsejax train` does the same before its first step:

    sparsejax tune --preset llama-1b --recipe paper
"""

from collections.abc import Sequence

from sparsejax.launch.options import RunOptions, parse
from sparsejax.ops.backend import current_device
from sparsejax.ops.kernels import registry
from sparsejax.ops.kernels.tunable import tunable_kernels_of
from sparsejax.terminal import console


def run(arguments: Sequence[str]) -> None:
    """Times the GEMMs of the run that the arguments describe, and says what was found.

    Raises:
      ValueError: no kernels run on this device whose configs could be timed, or no
        config of a kernel computes right.
    """
    options = parse(RunOptions, arguments, command="tune", description=__doc__)
    device = current_device()
    if tunable_kernels_of(device) is None:
        reason = "its kernels have no configs"
        if registry.kernels_of(device) is None:
            reason = registry.why_none(device)
        raise ValueError(
            f"there is nothing to tune on {device.kind}: {reason}; run this on the GPU "
            f"that trains"
        )
    # It loads all kernels, which a process on a CPU has no use for.
    from sparsejax.tuning import tune

    gemms = tune.gemms_of_run(options.config)
    if not tune.runnable(gemms):
        console.say("the run has no GEMM that the 2:4 kernels of this GPU could run")
    elif not tune.tune_missing(gemms, report=console.say):
        console.say("every GEMM of the run is timed on this GPU already")
