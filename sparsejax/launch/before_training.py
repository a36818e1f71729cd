"""Questions to a GPU or TPU before a run: which one it is, and how long the run's steps
take.

Both are asked in processes of their own. A process that has asked JAX for its devices
holds most of their memory, and in one that has run a kernel on sparse tensor cores the
driver keeps the clock lower: neither must be the one that trains.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import jax

from pallas_kernels import tuning_cache
from sparsejax.checkpoints.checkpoint_folder import latest_step
from sparsejax.config import PresetName, TrainConfig
from sparsejax.config.schedule import phases
from sparsejax.data.corpus import Corpus
from sparsejax.distributed.own_process import in_own_process
from sparsejax.distributed.processes import Exchange, join
from sparsejax.terminal import console
from sparsejax.training.step_times import StepTimes, from_json, time_steps, to_json

ACCELERATOR_PACKAGES = ("jax_cuda13_plugin", "jax_cuda12_plugin", "libtpu")
"""The packages of which one is installed where JAX can use an NVIDIA GPU (extra "cuda")
or a TPU (`jax[tpu]`)."""


def default_preset() -> PresetName:
    """Returns the preset of a command without --preset: on a GPU or TPU a model that is
    wide enough for sparse phases to pay, elsewhere one that a laptop trains in
    minutes."""
    return "tiny" if accelerator_here() is None else "wide-200m"


@cache
def accelerator_here() -> str | None:
    """Returns the model of the GPU or TPU that JAX would use, or None where it would
    compute on the CPU."""
    if not any(map(find_spec, ACCELERATOR_PACKAGES)):
        return None
    return in_own_process(_accelerator_of_this_process)


def _accelerator_of_this_process() -> str | None:
    device = jax.devices()[0]
    return None if device.platform == "cpu" else device.device_kind


def keep_programs() -> None:
    """Makes JAX keep compiled programs on disk, unless the user has it do so already:
    the process that trains then reads the programs of the one that timed them."""
    if jax.config.jax_compilation_cache_dir is None:
        programs = tuning_cache.root() / "programs"
        jax.config.update("jax_compilation_cache_dir", str(programs))


def why_untimed(config: TrainConfig, run_folder: Path | None) -> str | None:
    """Returns why the steps of a run are not timed before it, or None where they
    are."""
    if all(phase.is_dense for phase in phases(config)):
        return "no phase is sparse"
    if run_folder is not None and latest_step(run_folder / "checkpoints") is not None:
        return "its checkpoints say which phases are trained dense"
    if accelerator_here() is None:
        return "this machine has no GPU or TPU"
    return None


def times_of_steps(
    config: TrainConfig,
    corpus: Corpus,
    *,
    tune: bool = True,
    heartbeat_seconds: int | None = None,
) -> StepTimes:
    """Returns the times of the run's dense and sparse steps on the GPUs or TPUs of this
    machine: see `sparsejax.training.step_times`.

    Args:
      config: the settings of the run.
      corpus: the tokens of the run.
      tune: whether to find first the fastest configs of the kernels that nobody has
        timed on these GPUs: see `sparsejax.tuning.tune`.
      heartbeat_seconds: that of `processes.join`, where the run has several processes;
        each of them calls this before it joins the others itself. None: there is one.
    """
    console.say("timing dense and sparse steps here before the first of them")
    few = 4 * (config.tokens_per_step + config.data.sequence_length)
    keep_programs()
    if tune:
        # Not in the process that times: its dense steps would have the lower clock.
        in_own_process(_tune, config, heartbeat_seconds)
    return in_own_process(_time_steps, config, corpus.head(few), heartbeat_seconds)


def agreed(times: StepTimes | None) -> StepTimes | None:
    """Returns the times that the first process of the run has measured, in all of its
    processes, which have to decide alike. They also take its tuned configs, and so
    compile the same programs."""
    _share_tuned()
    text = json.dumps(None if times is None else to_json(times))
    first = Exchange("step times").gather("times", text, timeout_seconds=600)[0]
    plain = json.loads(first)
    return None if plain is None else from_json(plain)


def _tune(config: TrainConfig, heartbeat_seconds: int | None) -> None:
    # It loads all kernels, which a process on a CPU has no use for.
    from sparsejax.tuning import tune

    with _joined(heartbeat_seconds):
        tune.tune_for_all(tune.gemms_of_run(config), tune=True, report=console.say)


def _time_steps(
    config: TrainConfig, corpus: Corpus, heartbeat_seconds: int | None
) -> StepTimes:
    with _joined(heartbeat_seconds):
        _share_tuned()
        return time_steps(config, corpus)


def _share_tuned() -> None:
    """Gives the tuned configs of the first process to all processes of a run."""
    if jax.process_count() > 1:
        from sparsejax.tuning import tune

        tune.tune_for_all((), tune=False, report=console.say)


@contextmanager
def _joined(heartbeat_seconds: int | None) -> Iterator[None]:
    """Joins this process, which was started to answer a question, with those of the
    other hosts, where there are any, and leaves them at the end of the block."""
    console.quiet_orbax()
    keep_programs()
    if heartbeat_seconds is None:
        yield
        return
    join(heartbeat_seconds=heartbeat_seconds)
    console.STDOUT.quiet = jax.process_index() > 0
    try:
        yield
    finally:
        jax.distributed.shutdown()
