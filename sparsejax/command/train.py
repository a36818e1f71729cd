"""Pre-trains a transformer: dense warm-up, sparse feed-forward network, dense tail.

On a laptop or any machine (3 to 13 minutes on two CPU cores; bytes of the Python
standard library's source; validation loss about 1.1 nats per byte, unigram model 3.4):

    sparsejax train

On a GPU, the method of arXiv 2602.06183, own text, a larger model:

    sparsejax train --preset gpt-124m --recipe paper \\
        --data.text 'corpus/**/*.txt' --data.tokenizer tokenizer.json

Continuing a stopped run:

    sparsejax train --resume runs/tiny-experts-20260101-120000

A new run that begins with another one's last checkpoint, and goes on to more steps:

    sparsejax train --steps 2600 --branch runs/tiny-experts-20260101-120000

The run folder receives config.json, metrics.jsonl, checkpoints/, loss.png and
model.safetensors, the dense weights. For a long dense phase after one on a GPU's sparse
tensor cores the process starts itself anew, as dense steps are faster then
(--new-process-minutes).
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import jax

from sparsejax.command.plan import print_plan
from sparsejax.cost_model import Links
from sparsejax.data.corpus import Corpus, load_corpus
from sparsejax.distributed.own_process import Terminated
from sparsejax.distributed.processes import join
from sparsejax.launch import before_training, job
from sparsejax.launch.options import TrainOptions, parse
from sparsejax.reports.records import check_writable
from sparsejax.reports.sinks import check_installed
from sparsejax.terminal import console
from sparsejax.training.step_times import StepTimes


def run(arguments: Sequence[str]) -> None:
    """Trains, or continues, the run that the arguments describe.

    Raises:
      ValueError, NotImplementedError, ImportError, OSError: a setting, the data or a
        folder is not what it has to be; says which, and the way out.
      NonFiniteLoss, ProcessLost: the run cannot go on; names the last good checkpoint.
    """
    try:
        _run(read_options(arguments), arguments)
    except Terminated:
        console.say("stopped by SIGTERM or Ctrl-C before the first step")


def read_options(arguments: Sequence[str]) -> TrainOptions:
    """Returns the options of a command line: see `sparsejax.launch.options.parse`.

    Raises:
      ValueError: as it does; --resume with another folder; --device or --links without
        --dry-run.
    """
    options = parse(TrainOptions, arguments, command="train", description=__doc__)
    if options.resume is not None and options.run_folder is not None:
        raise ValueError("--resume continues in its own folder; leave --run-folder out")
    absent = options.device is not None or options.devices is not None
    if absent and not options.dry_run:
        raise ValueError(
            "--device and --devices plan for GPUs that need not be here; add --dry-run"
        )
    if options.links != Links() and not options.dry_run:
        raise ValueError(
            "--links.* say how fast a plan takes the links between GPUs to be, and a "
            "run uses those that are there; add --dry-run, or leave them out"
        )
    return options


def _run(options: TrainOptions, arguments: Sequence[str]) -> None:
    if options.profile is not None:
        options.profile.check_within(options.config.steps)
    if options.dry_run:
        print_plan(options)
        return
    check_installed(options.log_to)
    branch, init_from = options.trunk(), options.weights()
    if options.config.deterministic:
        console.repeat_bits()
    run_folder = options.resume or options.run_folder
    corpus, step_times = timed_first(options, run_folder)
    if options.distributed:
        join(heartbeat_seconds=options.heartbeat_seconds)
        console.STDOUT.quiet = jax.process_index() > 0
        step_times = before_training.agreed(step_times)
    outcome = job.main(
        options.config,
        run_folder,
        corpus=corpus,
        step_times=step_times,
        branch=branch,
        init_from=init_from,
        log_to=options.log_to,
        profile=options.profile,
    )
    if outcome.resume_in_new_process:
        step, profile = int(outcome.state.step), options.profile
        if profile is not None and profile.last <= step:
            options = replace(options, profile=None)  # It is done.
        resume_in_new_process(options, arguments, outcome.folder)


def timed_first(
    options: TrainOptions, run_folder: Path | None
) -> tuple[Corpus | None, StepTimes | None]:
    """Returns the run's tokens, and the times of its steps on the GPUs of this machine;
    None and None where they are not timed (`before_training.why_untimed`). JAX is not
    yet asked for its devices in this process."""
    config = options.config
    if before_training.why_untimed(config, run_folder) is not None:
        return None, None
    check_writable(job.RUNS if run_folder is None else run_folder)
    corpus = load_corpus(config.data, vocab_size=config.model.vocab_size)
    heartbeat = options.heartbeat_seconds if options.distributed else None
    times = before_training.times_of_steps(
        config, corpus, tune=options.tune, heartbeat_seconds=heartbeat
    )
    return corpus, times


def resume_in_new_process(
    options: TrainOptions, arguments: Sequence[str], run_folder: Path
) -> NoReturn:
    """Starts the interpreter anew, in the place of this process, whose command line
    ends with `arguments`."""
    resume = ["--resume", str(run_folder)]
    if options.profile is not None:
        resume += ["--profile", f"{options.profile.first}:{options.profile.last}"]
    if options.log_to:
        resume += ["--log-to", *options.log_to]
    if options.distributed:
        jax.distributed.shutdown()
        resume += ["--distributed"]
        resume += ["--heartbeat-seconds", str(options.heartbeat_seconds)]
    console.say(
        "the dense phase goes on in a new process, where the GPU's clock is not held "
        "down for sparse tensor cores"
    )
    sys.stdout.flush()
    sys.stderr.flush()
    # What stands before the arguments: options of the interpreter, and the program.
    program = sys.orig_argv[1 : len(sys.orig_argv) - len(arguments)]
    os.execv(sys.executable, [sys.executable, *program, *resume])
