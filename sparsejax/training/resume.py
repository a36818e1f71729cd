"""The beginning of a run: anew, with the weights of a folder, as a branch of another
run, or where it was stopped."""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from sparsejax.config.config_file import check_resumable, from_json
from sparsejax.config.schedule import are_alike, phase_at, phases, steps_left
from sparsejax.data.corpus import unigram_loss
from sparsejax.feed_forward.sparsity import DENSE, FFNSparsity
from sparsejax.interchange.pretrained import Pretrained
from sparsejax.interchange.tensors import Names
from sparsejax.models.sparse_ffn import sparse_ffns
from sparsejax.reports.provenance import commit
from sparsejax.reports.records import (
    records_until,
    wall_seconds,
    write_whole,
)
from sparsejax.switches.growth import check_grows, same_size
from sparsejax.training.branch import Branch, Trunk
from sparsejax.training.progress import Progress
from sparsejax.training.run import Run
from sparsejax.training.step import TrainState, with_model
from sparsejax.training.step_times import StepTimes, phases_run_dense


def begin_or_resume(
    progress: Progress,
    step_times: StepTimes | None,
    branch: Branch | None,
    init_from: Pretrained | None,
) -> None:
    """Brings the run to the point where the first step of this process begins.

    Args:
      progress: the run, before any step.
      step_times: how long its steps take, or None where they were not timed.
      branch: the checkpoint of another run that a new one begins with, or None.
      init_from: the folder of weights that a new run begins with, or None.
    Raises:
      ValueError: every checkpoint is damaged, or the checkpoint does not fit the
        settings, the tokens or the branch.
    """
    checkpoints, folder = progress.checkpoints, progress.folder
    damaged = checkpoints.set_aside_damaged()
    if damaged and checkpoints.latest_step() is None:
        found = "; ".join(f"{each.path} ({each.reason})" for each in damaged)
        raise ValueError(
            f"every checkpoint in {folder} is damaged and was set aside: {found}; "
            f"there is nothing to go on from. To train anew in this folder, give "
            f"the command that began it again, with --branch or --init-from if it had "
            f"one; to keep its records, use another folder"
        )
    if checkpoints.latest_step() is not None:
        _restore(progress, branch, init_from)
        progress.observe_only(
            "resume",
            checkpoint=str(checkpoints.path()),
            run_dense=progress.run_dense,
        )
    elif branch is not None:
        with Trunk(branch, progress.config, folder) as trunk:
            _begin_as_branch(progress, trunk, step_times)
    else:
        if init_from is None:
            _refuse_other_beginning(folder)
        if step_times is not None:
            _leave_out_slower_phases(progress, step_times)
            progress.wall_seconds_before = step_times.seconds
        if init_from is None:
            progress.state = _first_state(progress.run_of_phase, progress.phase.held)
            _record_start(progress, step_times)
        else:
            _begin_with(progress, init_from, step_times)
    for checkpoint in damaged:
        path, reason = str(checkpoint.path), checkpoint.reason
        progress.observe_only("damaged", checkpoint=path, reason=reason)


def _first_state(run: Run, sparsity: FFNSparsity) -> TrainState:
    """Returns the state before the first step, drawn from the seed; where its phase has
    experts, their neurons are clustered as in a switch."""
    if sparsity.experts is None:
        return run.initial_state(sparsity)
    return run.switch(run.initial_state(DENSE), DENSE, sparsity)


def _refuse_other_beginning(folder: Path) -> None:
    """Raises ValueError where the records of a folder without a checkpoint say that its
    run began with another's state or weights, and it would begin with random ones."""
    metrics = folder / "metrics.jsonl"
    first = metrics.read_text(errors="replace") if metrics.exists() else ""
    first = first.partition("\n")[0]
    for name, flag in (("branch", "--branch"), ("init_from", "--init-from")):
        # A line that a crash cut off may be no JSON.
        if first.startswith('{"event": "start"') and f'"{name}": ' in first:
            raise ValueError(
                f"{folder} has no checkpoint, and {metrics} says that its run began "
                f"with {flag}; give the command that began it again, with {flag}, or "
                f"use another folder"
            )


def _begin_with(
    progress: Progress, folder: Pretrained, step_times: StepTimes | None
) -> None:
    """Takes the weights of a folder, with a fresh optimiser, at step 0."""
    folder.check_fits(progress.config.model)
    folder.check_phases(progress.phases)
    own = progress.run_of_phase.config.model
    if not same_size(own, progress.config.model):
        raise ValueError(
            f"the first phase, {progress.phase.kind!r}, has a smaller model than "
            f"{folder.folder}; begin with a phase of the whole model"
        )
    progress.pretrained = folder.origin(progress.folder)
    parameters = folder.parameters()
    run = progress.run_of_phase
    progress.state = state_with(run, parameters, progress.phase.held)
    loss = progress.validation_loss(progress.phase)
    # Before anything is trained: a folder that is moved is needed no more.
    _record_start(
        progress, step_times, init_from=progress.pretrained, validation_loss=loss
    )
    progress.save(blocking=True)


def state_with(
    run: Run, params: Mapping[Names, np.ndarray], sparsity: FFNSparsity
) -> TrainState:
    """Returns the state before the first step with these parameters, by their path in
    the model, in place of random ones. A dense model enters `sparsity` by a switch,
    with scales and clusters of these weights."""
    state = run.initial_state(DENSE)

    def given(path: tuple, leaf: jax.Array) -> jax.Array:
        names = tuple(entry.key for entry in path if hasattr(entry, "key"))
        return jax.device_put(params[names], leaf.sharding)

    shardings = jax.tree.map(lambda leaf: leaf.sharding, run.template(DENSE))

    @partial(jax.jit, out_shardings=shardings)
    def with_scales(state: TrainState) -> TrainState:
        model = run.model(state, DENSE)
        for ffn in sparse_ffns(model):
            ffn.refresh_scales()
        return with_model(state, model, state.moments)

    placed = jax.tree.map_with_path(given, state.params)
    state = with_scales(replace(state, params=placed))
    return run.switch(state, DENSE, sparsity) if sparsity != DENSE else state


def _begin_as_branch(
    progress: Progress, trunk: Trunk, step_times: StepTimes | None
) -> None:
    """Takes over the trunk's state and position in the data, and switches to the phase
    in which the branch goes on."""
    _check_corpus(progress, trunk.corpus)
    trunk_run = progress.run.of_phase(trunk.phase)
    trunk_run.check_shardable(*trunk.phase.sparsities)
    progress.step, progress.origin = trunk.step, trunk.origin
    progress.phase_index = phase_at(progress.phases, progress.step)
    check_grows(trunk_run.config.model, progress.run_of_phase.config.model)
    before = trunk.wall_seconds()
    timing = 0.0 if step_times is None else step_times.seconds
    progress.wall_seconds_before = None if before is None else before + timing
    if step_times is not None:
        _leave_out_slower_phases(progress, step_times)
    elif are_alike(progress.phases, trunk.phases) and not progress.config.keep_slower:
        progress.train_dense(trunk.run_dense)
    restored = trunk.restore(trunk_run.template(trunk.phase.held))
    progress.state = restored.state
    progress.batches.set_state(restored.data_state)
    _record_start(
        progress,
        step_times,
        branch=trunk.origin
        | {"seconds": trunk.seconds(), "learning_rate": trunk.learning_rate},
        learning_rate=progress.learning_rate_of(progress.step),
        **({} if step_times is not None else {"run_dense": progress.run_dense}),
    )
    own = progress.run_of_phase.config.model
    grows = not same_size(trunk_run.config.model, own)
    if grows or trunk.phase.sparsities != progress.phase.sparsities:
        progress.switch(trunk.phase, progress.phase_index)
    progress.save(blocking=True)


def _record_start(
    progress: Progress, step_times: StepTimes | None, **values: Any
) -> None:
    """Writes the first records of a run, into an emptied file."""
    if jax.process_index() == 0:
        with progress.writing(progress.metrics_file):
            progress.metrics_file.write_text("")
    progress.record(
        "start",
        corpus=progress.run.corpus.description,
        unigram_loss=unigram_loss(progress.run.corpus),
        micro_batches=progress.run.micro_batches,
        commit=commit(),
        **values,
    )
    if step_times is not None:
        progress.record(
            "step_times", run_dense=progress.run_dense, **asdict(step_times)
        )


def _leave_out_slower_phases(progress: Progress, times: StepTimes) -> None:
    """Makes the phases dense that would lose time sparse, by the step times."""
    if progress.config.keep_slower:
        return
    minutes = (
        progress.config.new_process_minutes if progress.stop_after_sparse else None
    )
    left = steps_left(progress.phases, progress.step)
    progress.train_dense(phases_run_dense(times, left, new_process_minutes=minutes))


def _check_corpus(progress: Progress, fingerprint: Any) -> None:
    """Raises ValueError where `fingerprint`, that of a checkpoint's tokens, is not the
    fingerprint of the run's tokens."""
    if fingerprint != progress.run.corpus.fingerprint:
        raise ValueError(
            f"the checkpoint was trained on other tokens than "
            f"{progress.run.corpus.description}; point --data.text or --data.shards, "
            f"and --data.tokenizer, at those that the run began with"
        )


def _restore(
    progress: Progress, branch: Branch | None, init_from: Pretrained | None
) -> None:
    """Restores the newest checkpoint, and metrics.jsonl as it was when that was saved.

    Raises:
      ValueError: the checkpoint has other settings or tokens, or is not of the branch
        that is named.
    """
    metadata = progress.checkpoints.metadata()
    before = from_json(metadata["config"])
    check_resumable(before, progress.config, progress.folder)
    # Checkpoints of before there was any are of runs that are no branches.
    progress.origin = metadata.get("branch")
    if branch is not None:
        branch.check_begun(progress.origin, progress.folder)
    progress.pretrained = metadata.get("init_from")
    if init_from is not None:
        init_from.check_begun(progress.pretrained, progress.folder)
    _check_corpus(progress, metadata["corpus"])
    step = progress.checkpoints.latest_step()
    assert step is not None
    _check_phase(progress, step, metadata["phase"], metadata["kind"], before.steps)
    progress.phase_index = metadata["phase"]
    # With other steps a phase may have some that had none, and others other numbers.
    # Checkpoints of before there was any are of runs that left no phase out.
    former = phases(before)
    dense = {former[number].kind for number in metadata.get("run_dense", ())}
    numbered = enumerate(progress.phases)
    progress.train_dense([n for n, phase in numbered if phase.kind in dense])
    template = progress.run_of_phase.template(progress.phase.held)
    restored = progress.checkpoints.restore(template=template)
    progress.state, progress.step = restored.state, restored.step
    progress.batches.set_state(restored.data_state)
    if jax.process_index() == 0:
        kinds = [phase.kind for phase in progress.phases]
        kept = records_until(progress.metrics_file, restored.step, kinds)
        with progress.writing(progress.metrics_file):
            write_whole(progress.metrics_file, kept)
        records = [json.loads(line) for line in kept.splitlines()]
        progress.wall_seconds_before = wall_seconds(records, restored.step)


def _check_phase(
    progress: Progress, step: int, index: int, kind: str, steps_before: int
) -> None:
    """Raises ValueError where a new number of steps moves `step` into another phase."""
    ends = progress.run.phase_ends()
    planned = progress.phases
    start = ends[index - 1] if 0 < index < len(ends) else 0
    if index < len(ends) and planned[index].kind == kind:
        last = index + 1 == len(ends)
        if start <= step < ends[index] or (last and step == ends[index]):
            return
    plan = ", ".join(
        f"{phase.kind} to step {end}" for phase, end in zip(planned, ends, strict=True)
    )
    raise ValueError(
        f"steps={progress.config.steps} plans {plan}, but {progress.folder} is at step "
        f"{step} in phase {index} ({kind}) of steps={steps_before}; choose steps "
        f"that keep step {step} in that phase, or resume with {steps_before}"
    )
