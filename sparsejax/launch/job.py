"""A run from its settings to what it leaves: trained, watched, reported."""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import jax
import numpy as np

from sparsejax.checkpoints.checkpoint_folder import latest_step
from sparsejax.config import TrainConfig
from sparsejax.config.config_file import to_json
from sparsejax.data.corpus import Corpus
from sparsejax.distributed.processes import Exchange
from sparsejax.interchange.dense_weights import export
from sparsejax.interchange.pretrained import Pretrained
from sparsejax.models.generation import greedy_sample
from sparsejax.reports.loss_figure import plot_run
from sparsejax.reports.profile import ProfiledSteps
from sparsejax.reports.records import Record, check_writable, read_metrics
from sparsejax.reports.sinks import SinkName, opened
from sparsejax.terminal import console, printed_plan
from sparsejax.training.branch import Branch
from sparsejax.training.step_times import StepTimes
from sparsejax.training.train import Outcome, train

RUNS = Path("runs")
"""The folder in which a run is written that is given no folder."""


def main(
    config: TrainConfig,
    run_folder: Path | None = None,
    *,
    corpus: Corpus | None = None,
    step_times: StepTimes | None = None,
    branch: Branch | None = None,
    init_from: Pretrained | None = None,
    log_to: Sequence[SinkName] = (),
    profile: ProfiledSteps | None = None,
) -> Outcome:
    """Trains `config` in `run_folder`, or continues the run that is in it, to its end
    or to where a new process is to resume it, and returns how it ended. Process 0 gives
    the numbers of its records to the sinks `log_to`.

    `corpus`, `step_times`, `branch`, `init_from` and `profile` are those of
    `sparsejax.training.train.train`."""
    if run_folder is None:
        now = datetime.now().strftime("%Y%m%d-%H%M%S")
        what = "schedule" if config.phases.schedule else config.recipe
        name = f"{config.preset}-{what}-{now}"
        names = Exchange("run folder").gather("name", name, timeout_seconds=60)
        run_folder = RUNS / names[0]
    check_writable(run_folder)
    begun = latest_step(run_folder / "checkpoints")
    printed_plan.announce(
        config,
        step_times=step_times,
        branch=branch if begun is None else None,
        init_from=init_from if begun is None else None,
    )
    if begun == config.steps:
        console.say(
            f"{run_folder} holds a run that has taken its {begun:,} steps: nothing is "
            f"trained"
        )
    told = log_to if jax.process_index() == 0 else ()
    with (
        opened(told, run_folder, to_json(config), step=begun or 0) as log,
        console.progress(config) as show,
    ):

        def observe(record: Record) -> None:
            show(record)
            log(record)

        outcome = train(
            config,
            run_folder,
            observe=observe,
            stop_after_sparse=True,
            corpus=corpus,
            step_times=step_times,
            branch=branch,
            init_from=init_from,
            profile=profile,
        )
    if outcome.resume_in_new_process:
        return outcome
    try:
        report(outcome, config, run_folder)
    except OSError as error:
        raise OSError(
            f"the run ended well and its last good checkpoint is {outcome.checkpoint}, "
            f"but its results could not be written ({error}); free space or repair the "
            f"disk, then --resume {run_folder}"
        ) from error
    console.say(f"run folder: {run_folder}")
    if outcome.completed:
        console.say_speedup(read_metrics(run_folder))
    return outcome


def report(outcome: Outcome, config: TrainConfig, run_folder: Path) -> None:
    """Writes what a run leaves when it has ended: weights, a sample, a figure."""
    if outcome.completed:
        console.summarise(read_metrics(run_folder))
        console.say(export(outcome.model, run_folder / "model.safetensors"))
    else:
        console.say(f"stopped by SIGTERM or Ctrl-C; go on with --resume {run_folder}")
    if outcome.completed and config.sample_length:
        show_sample(outcome, config)
    if config.plot and jax.process_index() == 0:
        console.say(plot_run(run_folder))


def show_sample(outcome: Outcome, config: TrainConfig) -> None:
    """Prints how the model continues the first held-out tokens; as ids where no
    tokenizer turns them into text."""
    window = config.data.sequence_length
    prompt = outcome.corpus.validation[0][: min(64, window)]
    ids = greedy_sample(outcome.model, prompt, config.sample_length, window=window)
    decode = lambda ids: "".join(f"{id} " for id in np.asarray(ids).tolist())
    if outcome.corpus.tokenizer is not None:
        decode = outcome.corpus.tokenizer.decode
    console.show_sample(decode(prompt), decode(np.asarray(ids)))
