"""The options of the commands that begin with the settings of a run.

A preset, a stopped run, the trunk of a branch or a folder of weights gives the settings
to start from; every other flag overrides one of them.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, cast, get_args

import tyro

from sparsejax.checkpoints.checkpoint_folder import runs_beside
from sparsejax.config import RecipeName, TrainConfig
from sparsejax.config.config_file import (
    check_branchable,
    check_resumable,
    read_config,
    read_schedule,
)
from sparsejax.config.presets import PRESETS
from sparsejax.config.schedule import phases
from sparsejax.cost_model import Links
from sparsejax.feed_forward.activation import ActivationName
from sparsejax.interchange.pretrained import Pretrained
from sparsejax.launch import before_training
from sparsejax.launch.flags import REGISTRY, check_flags, with_flags, without_flags
from sparsejax.reports.profile import ProfiledSteps
from sparsejax.reports.sinks import SinkName
from sparsejax.training.branch import Branch


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The settings of a run, and how it begins."""

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    resume: Path | None = None
    """Run folder of a stopped run: continue it, with its own settings."""
    branch: str | None = None
    """RUN@STEP: begin with the checkpoint of that step in the run folder RUN (without
    @STEP: the latest), and go on in another folder, with that run's settings where no
    others are given; model, tokens and seeds stay."""
    init_from: Path | None = None
    """A Hugging Face folder (Llama, Arcee, Mistral, Qwen2, Qwen3, or what `sparsejax
    export` wrote), a run folder, or RUN@STEP: begin with its weights and a fresh
    optimiser, with its model and tokenizer where no others are given. Needs --recipe or
    --model of what its activation allows."""
    relufy: bool = False
    """With --init-from, of a model whose gate is SiLU: go on with squared ReLU in its
    place (activation reglu2), so that 2:4 and V:N:M activations become possible. This
    is another function, whose loss jumps at the start and must be trained back, so
    that --phases.warmup-share, the dense steps before the sparse ones, is 0.2 or more
    where no other is given; none is refused."""
    schedule: Path | None = None
    """A file, TOML or JSON, with the phases of the run instead of the recipe's: tables
    [[phase]] with name, share of the steps, sparsity, every, learning_rate_scale."""

    def trunk(self) -> Branch | None:
        """Returns the checkpoint that the run branches from; None where it does not."""
        return None if self.branch is None else Branch.named(self.branch)

    def weights(self) -> Pretrained | None:
        """Returns the weights that the run begins with; None where it draws its own."""
        return _weights(self.init_from, self.relufy)


def _weights(folder: Path | None, relufy: bool) -> Pretrained | None:
    if folder is None:
        if relufy:
            raise ValueError(
                "--relufy changes the function of weights that --init-from names, and "
                "there is none; add --init-from FOLDER, or leave --relufy out"
            )
        return None
    pretrained = Pretrained.read(folder)
    return pretrained.with_relu() if relufy else pretrained


@dataclass(frozen=True, kw_only=True)
class PlanOptions(RunOptions):
    """A run to be planned, and what it is planned for."""

    device: str | None = None
    """Name of the GPU to plan for, as "NVIDIA H100 80GB HBM3", from tables; none needs
    to be here. In `sparsejax train` with --dry-run only."""
    devices: int | None = None
    """With --device: number of these GPUs. Default: as many as the mesh says."""
    links: Links = field(default_factory=Links)
    """The links between GPUs that a plan assumes."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions(PlanOptions):
    """A run to be trained, and where."""

    run_folder: Path | None = None
    """Folder in which the run is written. Default: runs/PRESET-RECIPE-DATE-TIME."""
    dry_run: bool = False
    """Print the plan and stop: the data is read and checked, nothing is allocated or
    written. The same as `sparsejax plan`."""
    log_to: tuple[SinkName, ...] = ()
    """Where the numbers of metrics.jsonl go as well: tensorboard (event files in the
    run folder), wandb (Weights & Biases), trackio; each is an extra of its name."""
    profile: ProfiledSteps | None = None
    """FIRST:LAST, as 20:22: a trace of these steps is written to the folder profile of
    the run folder, for XProf. Take steps after those that compile."""
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


def parse[T: RunOptions](
    kind: type[T], arguments: Sequence[str], *, command: str, description: str | None
) -> T:
    """Returns the options of a command line: a preset, a stopped run or the trunk of a
    branch, then whatever overrides it.

    Args:
      kind: the class of the options that the command has.
      arguments: the words after the command.
      command: the name of the command, as its help says it.
      description: what the command does, as its help says it.
    Raises:
      ValueError: --resume with --schedule or with --branch, a damaged config.json, a
        setting that may not change, or no checkpoint to branch from.
    """
    first = argparse.ArgumentParser(
        prog=f"sparsejax {command}",
        usage="%(prog)s [OPTIONS]",
        add_help=False,
        allow_abbrev=False,
    )
    first.add_argument("--preset", choices=list(PRESETS))
    first.add_argument("--recipe")
    first.add_argument("--resume", type=Path)
    first.add_argument("--branch")
    first.add_argument("--init-from", type=Path)
    first.add_argument("--relufy", action=argparse.BooleanOptionalAction, default=False)
    first.add_argument("--schedule", type=Path)
    first.add_argument("--model.activation", dest="activation")
    start, _ = first.parse_known_args(arguments)
    check_flags(arguments)
    branch = None if start.branch is None else Branch.named(start.branch)
    pretrained = _weights(start.init_from, start.relufy)
    check_one_beginning(start)
    if start.resume is not None:
        default = settings_in(start.resume, "--resume", "a stopped run")
        if _is_other_recipe(start.recipe, default):
            other = default.with_recipe(start.recipe)
            check_resumable(default, other, start.resume)
    else:
        if branch is not None:
            default = settings_in(branch.folder, "--branch", "the run to branch from")
        else:
            default = PRESETS[start.preset or before_training.default_preset()]()
        if _is_other_recipe(start.recipe, default):
            default = default.with_recipe(start.recipe)
        if start.schedule is not None:
            default = default.with_schedule(read_schedule(start.schedule))
        if pretrained is not None:
            default = _before_flags(pretrained, default, start.activation)
    options = tyro.cli(
        kind,
        args=arguments,
        default=kind(config=with_flags(default)),
        description=description,
        prog=f"sparsejax {command}",
        registry=REGISTRY,
    )
    options = replace(options, config=without_flags(options.config))
    if start.resume is not None:
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
        computed = replace(options.config.model, activation=pretrained.model.activation)
        options = replace(options, config=replace(options.config, model=computed))
        pretrained.check_fits(options.config.model)
        pretrained.check_phases(phases(options.config))
    return options


def _before_flags(
    pretrained: Pretrained, start: TrainConfig, activation: str | None
) -> TrainConfig:
    """Returns the settings `start` with the model of a folder, as flags change them.

    A gate of SiLU does not fit a recipe with 2:4 activations, but flags may still
    change those: until they have, the model's gate is a squared ReLU. Raises ValueError
    where `activation`, which a flag gives, is another one than the folder's."""
    model = pretrained.model
    if activation in get_args(ActivationName):
        given = cast(ActivationName, activation)
        pretrained.check_fits(replace(model, activation=given))
    try:
        return pretrained.settings(start)
    except ValueError:
        if model.activation != "swiglu":
            raise
        gated = replace(model, activation="reglu2")
        return replace(pretrained, model=gated).settings(start)


def _is_other_recipe(recipe: str | None, default: TrainConfig) -> bool:
    """Returns whether a recipe that is given is one, and not that of the settings."""
    present = None if default.phases.schedule else default.recipe
    return recipe in get_args(RecipeName) and recipe != present


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
            f"{runs_beside(folder)}"
        )
    return read_config(saved)
