"""Pre-trains a transformer: dense warm-up, sparse feed-forward network, dense tail.

On a laptop or any machine (3 to 8 minutes on two CPU cores; bytes of the Python
standard library's source; validation loss about 1.1 nats per byte, unigram model 3.4):

    uv run experiments/pretrain.py

The same on a GPU, the method of arXiv 2602.06183, own text, a larger model:

    uv run --extra cuda experiments/pretrain.py --preset gpt-124m --recipe paper \\
        --data.text 'corpus/**/*.txt' --data.tokenizer tokenizer.json

What it would cost, without running it; and continuing a stopped run:

    uv run experiments/pretrain.py --preset llama-1b --dry-run
    uv run experiments/pretrain.py --preset llama-1b --dry-run \\
        --device 'NVIDIA H100 80GB HBM3' --devices 8
    uv run experiments/pretrain.py --resume runs/tiny-default-20260101-120000

A new run that begins with another one's last checkpoint, and goes on to more steps:

    uv run experiments/pretrain.py --steps 2600 \\
        --branch runs/tiny-default-20260101-120000

The run folder receives config.json, metrics.jsonl, checkpoints/, loss.png and
model.safetensors, the dense weights. For a long dense phase after one on a GPU's sparse
tensor cores the process starts itself anew, as dense steps are faster then
(--new-process-minutes).
"""

import argparse
import json
import os
import sys
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, NoReturn, get_args

import jax
import numpy as np
import tyro

from experiments.export import export
from experiments.plot import plot_run
from experiments.running import before_training, console, printed_plan
from experiments.running.command_line import (
    REGISTRY,
    check_flags,
    with_flags,
    without_flags,
)
from experiments.running.own_process import Terminated
from pallas_kernels.device import Device
from sparsejax.checkpoints.checkpoint_folder import latest_step
from sparsejax.config import RecipeName, TrainConfig
from sparsejax.config_file import (
    check_branchable,
    check_resumable,
    read_config,
    read_schedule,
)
from sparsejax.data.batches import train_batches, validation_batches
from sparsejax.data.corpus import Corpus, load_corpus
from sparsejax.distributed.processes import Exchange, ProcessLost, join
from sparsejax.interchange.pretrained import Pretrained
from sparsejax.models.transformer import greedy_sample
from sparsejax.presets import PRESETS
from sparsejax.reports.records import check_writable
from sparsejax.reports.step_times import StepTimes
from sparsejax.training.branch import Branch
from sparsejax.training.progress import NonFiniteLoss
from sparsejax.training.train import Outcome, train

RUNS = Path("runs")
"""The folder in which a run is written that is given no folder."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Settings of the command: what to do with a configuration, and where."""

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    run_folder: Path | None = None
    """Folder in which the run is written. Default: runs/PRESET-RECIPE-DATE-TIME."""
    resume: Path | None = None
    """Run folder of a stopped run: continue it, with its own settings."""
    branch: str | None = None
    """RUN@STEP: begin with the checkpoint of that step in the run folder RUN (without
    @STEP: the latest), and go on in another folder, with that run's settings where no
    others are given; model, tokens and seeds stay."""
    init_from: Path | None = None
    """A Hugging Face folder (Llama, Arcee, Mistral, or what `sparsejax export` wrote):
    begin with its weights and a fresh optimiser, with its model and tokenizer where no
    others are given. Needs --recipe or --model of what its activation allows."""
    schedule: Path | None = None
    """A file, TOML or JSON, with the phases of the run instead of the recipe's: tables
    [[phase]] with name, share of the steps, sparsity, every, learning_rate_scale."""
    dry_run: bool = False
    """Print the plan and stop: the data is read and checked, nothing is allocated or
    written."""
    device: str | None = None
    """With --dry-run: name of the GPU to plan for, as "NVIDIA H100 80GB HBM3", from
    tables; none needs to be here."""
    devices: int | None = None
    """With --device: number of these GPUs. Default: as many as the mesh says."""
    tune: bool = True
    """Whether, on a Hopper GPU, the 2:4 GEMMs of the run that nobody has timed on it
    are timed first, some seconds each, and kept in $SPARSEJAX_CACHE or
    ~/.cache/sparsejax. With --no-tune unknown times are estimated."""
    distributed: bool = False
    """Whether this is one of several processes, on one host or on many: found through
    SLURM, Open MPI or Kubernetes, or through JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES
    and JAX_PROCESS_ID. All need the same command and the same run folder."""
    heartbeat_seconds: int = 100
    """With --distributed: a process that is silent for this long counts as dead."""


def main(
    config: TrainConfig,
    run_folder: Path | None = None,
    *,
    corpus: Corpus | None = None,
    step_times: StepTimes | None = None,
    branch: Branch | None = None,
    init_from: Pretrained | None = None,
) -> Outcome:
    """Trains `config` in `run_folder`, or continues the run that is in it, to its end
    or to where a new process is to resume it, and returns how it ended.

    `corpus`, `step_times`, `branch` and `init_from` are those of
    `sparsejax.training.train.train`."""
    if run_folder is None:
        now = datetime.now().strftime("%Y%m%d-%H%M%S")
        what = "schedule" if config.phases.schedule else config.recipe
        name = f"{config.preset}-{what}-{now}"
        names = Exchange("run folder").gather("name", name, timeout_seconds=60)
        run_folder = RUNS / names[0]
    check_writable(run_folder)
    begun = latest_step(run_folder / "checkpoints") is not None
    printed_plan.announce(
        config, step_times=step_times, branch=None if begun else branch
    )
    with console.progress(config) as observe:
        outcome = train(
            config,
            run_folder,
            observe=observe,
            stop_after_sparse=True,
            corpus=corpus,
            step_times=step_times,
            branch=branch,
            init_from=init_from,
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
        console.say(f"stopped by SIGTERM; go on with --resume {run_folder}")
    if outcome.completed and config.sample_length:
        show_sample(outcome, config)
    if config.plot and jax.process_index() == 0:
        console.say(plot_run(run_folder))


def what_data(config: TrainConfig) -> str:
    """Returns a line that describes the tokens that `config` would train on, which are
    read; or, where no data is named, why its model cannot train on the standard
    library's source: that does not keep a model from being planned.

    Raises:
      ValueError, ImportError: those of the run, for data that is named.
    """
    data = config.data
    try:
        corpus = load_corpus(data, vocab_size=config.model.vocab_size)
        held_out = config.validation_batch_size
        validation_batches(corpus, data, batch_size=held_out, batches=1)
        train_batches(corpus, data, batch_size=config.batch_size)
    except ValueError as error:
        if (data.text, data.shards, data.tokenizer) != (None, None, None):
            raise
        return f"data: none is named, and without it a run ends here: {error}"
    return f"data: {corpus.description}"


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


def read_metrics(run_folder: Path) -> list[dict]:
    """Returns the records of metrics.jsonl."""
    lines = (run_folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def parse(arguments: list[str]) -> Options:
    """Returns the options of a command line: a preset, a stopped run or the trunk of a
    branch, then whatever overrides it.

    Raises:
      ValueError: --resume with another folder or with --branch, a damaged config.json,
        a setting that may not change, or no checkpoint to branch from.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--preset", choices=list(PRESETS))
    first.add_argument("--recipe")
    first.add_argument("--resume", type=Path)
    first.add_argument("--branch")
    first.add_argument("--init-from", type=Path)
    first.add_argument("--schedule", type=Path)
    start, _ = first.parse_known_args(arguments)
    check_flags(arguments)
    branch = None if start.branch is None else Branch.named(start.branch)
    pretrained = None if start.init_from is None else Pretrained.read(start.init_from)
    check_one_beginning(start)
    if start.resume is not None:
        default = settings_in(start.resume, "--resume", "a stopped run")
    else:
        if branch is not None:
            default = settings_in(branch.folder, "--branch", "the run to branch from")
        else:
            default = PRESETS[start.preset or before_training.default_preset()]()
        present = None if default.phases.schedule else default.recipe
        if start.recipe in get_args(RecipeName) and start.recipe != present:
            default = default.with_recipe(start.recipe)
        if start.schedule is not None:
            default = default.with_schedule(read_schedule(start.schedule))
        if pretrained is not None:
            default = pretrained.settings(default)
    options = tyro.cli(
        Options,
        args=arguments,
        default=Options(config=with_flags(default)),
        description=__doc__,
        prog="experiments/pretrain.py",
        registry=REGISTRY,
    )
    options = replace(options, config=without_flags(options.config))
    if start.resume is not None:
        if options.run_folder is not None:
            raise ValueError(
                "--resume continues in its own folder; leave --run-folder out"
            )
        if start.schedule is not None:
            raise ValueError(
                f"--resume {start.resume} goes on with the phases that its run has; "
                f"leave --schedule {start.schedule} out"
            )
        check_resumable(default, options.config, start.resume)
    elif branch is not None:
        trunk = read_config(branch.folder / "config.json")
        check_branchable(trunk, options.config, branch.folder)
        branch.first_step()
    elif pretrained is not None:
        pretrained.check_fits(options.config.model)
    return options


def check_one_beginning(start: argparse.Namespace) -> None:
    """Raises ValueError where a run is to begin in two ways, or to go on and begin."""
    ways = {"--resume": "goes on with a run", "--branch": "begins one"}
    ways["--init-from"] = "begins one"
    values = (start.resume, start.branch, start.init_from)
    given = [
        f"{flag} {value} {does}"
        for (flag, does), value in zip(ways.items(), values, strict=True)
        if value is not None
    ]
    if len(given) > 1:
        raise ValueError(f"{', and '.join(given)}; leave one of them out")


def settings_in(folder: Path, flag: str, what: str) -> TrainConfig:
    """Returns the settings of the run in `folder`. Raises ValueError where there is
    none, and says which folder the flag that named it wants."""
    saved = folder / "config.json"
    if not saved.is_file():
        raise ValueError(
            f"{flag} {folder}: there is no {saved}; give the run folder of {what}"
        )
    return read_config(saved)


def absent_gpus(options: Options) -> printed_plan.Absent | None:
    """Returns the GPUs of --device and --devices; None where the plan is for those
    here.

    Raises:
      ValueError: they are asked for without --dry-run, --devices without --device or
        below 1, or nothing is known of the GPU.
    """
    if options.device is None and options.devices is None:
        return None
    if not options.dry_run:
        raise ValueError(
            "--device and --devices plan for GPUs that need not be here; add --dry-run"
        )
    if options.device is None:
        raise ValueError(
            f"--devices {options.devices} does not say which GPUs; add --device NAME, "
            f"or set the mesh to plan for more devices like the one here"
        )
    if options.devices is not None and options.devices < 1:
        raise ValueError(f"--devices {options.devices} is not 1 or more")
    return printed_plan.Absent(
        device=Device.named(options.device), count=options.devices
    )


def run(arguments: list[str]) -> int:
    """Runs the command and returns its exit status."""
    console.quiet_orbax()
    try:
        options = parse(arguments)
        absent = absent_gpus(options)
        branch = None if options.branch is None else Branch.named(options.branch)
        weights = options.init_from
        init_from = None if weights is None else Pretrained.read(weights)
        if options.dry_run:
            said = what_data(options.config)
            printed_plan.announce(
                options.config, predicted=True, absent=absent, branch=branch
            )
            console.say(said)
            return 0
        if options.config.deterministic:
            console.repeat_bits()
        run_folder = options.resume or options.run_folder
        corpus, step_times = timed_first(options, run_folder)
        if options.distributed:
            join(heartbeat_seconds=options.heartbeat_seconds)
            console.STDOUT.quiet = jax.process_index() > 0
            step_times = before_training.agreed(step_times)
        outcome = main(
            options.config,
            run_folder,
            corpus=corpus,
            step_times=step_times,
            branch=branch,
            init_from=init_from,
        )
        if outcome.resume_in_new_process:
            resume_in_new_process(options, outcome.folder)
    except Terminated:
        console.say("stopped by SIGTERM before the first step")
        return 0
    except (
        ValueError,
        NotImplementedError,
        ImportError,
        OSError,
        NonFiniteLoss,
        ProcessLost,
    ) as error:
        return console.fail(error)
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        reason = next(iter(str(error).splitlines()), "").rstrip(".")
        if not isinstance(error, MemoryError) and "out of memory" not in reason.lower():
            raise
        return console.fail(
            error,
            f"{reason}; --dry-run says what the run needs, and fewer "
            f"--sequences-per-device (or more --micro-batches), --model.remat full or "
            f"a mesh of more devices need less",
        )
    return 0


def timed_first(
    options: Options, run_folder: Path | None
) -> tuple[Corpus | None, StepTimes | None]:
    """Returns the run's tokens, and the times of its steps on the GPUs of this machine;
    None and None where they are not timed (`before_training.why_untimed`). JAX is not
    yet asked for its devices in this process."""
    config = options.config
    if before_training.why_untimed(config, run_folder) is not None:
        return None, None
    check_writable(RUNS if run_folder is None else run_folder)
    corpus = load_corpus(config.data, vocab_size=config.model.vocab_size)
    heartbeat = options.heartbeat_seconds if options.distributed else None
    times = before_training.times_of_steps(
        config, corpus, tune=options.tune, heartbeat_seconds=heartbeat
    )
    return corpus, times


def resume_in_new_process(options: Options, run_folder: Path) -> NoReturn:
    """Starts the interpreter anew, in the place of this process."""
    arguments = ["--resume", str(run_folder)]
    if options.distributed:
        jax.distributed.shutdown()
        arguments += ["--distributed"]
        arguments += ["--heartbeat-seconds", str(options.heartbeat_seconds)]
    console.say(
        "the dense phase goes on in a new process, where the GPU's clock is not held "
        "down for sparse tensor cores"
    )
    sys.stdout.flush()
    sys.stderr.flush()
    # What stands before the arguments: options of the interpreter, and the program.
    program = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]
    os.execv(sys.executable, [sys.executable, *program, *arguments])


def leave(status: int) -> NoReturn:
    """Ends this process with an exit status. After an error it ends at once, without
    the wait for all to end together: the others must notice, and one of them may be
    waiting for this one."""
    if status != 0 and jax.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    leave(run(sys.argv[1:]))
