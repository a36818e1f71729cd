"""The phases of a training run: how many steps each has, and how sparse they are."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from sparsejax.config.model import ModelConfig
from sparsejax.config.phases import Interleaved, PhaseConfig, RecipeConfig, RecipeName
from sparsejax.config.train import TrainConfig
from sparsejax.dtypes import Precision
from sparsejax.feed_forward.sparsity import DENSE, FFNSparsity, check_divisible
from sparsejax.sparsity.patterns import StaticPattern


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Consecutive steps that share one form of the state. All have one sparsity, and so
    one compiled step, or some of them have another sparsity."""

    kind: str
    """The name of the phase; in the recipes "warm-up", "sparse" or "dense"."""
    steps: int
    sparsity: FFNSparsity
    """The sparsity of the phase's steps and validations."""
    every: Interleaved | None = None
    """The steps of the phase that have another sparsity; None where there are none."""
    learning_rate_scale: float = 1.0
    d_hidden: int | None = None
    """The neurons per FFN where their number is not the run's (see `switches.growth`);
    else None."""
    layers: int | None = None
    """The number of layers where it is not the run's; else None."""
    static_weights: StaticPattern | None = None
    """The entries that the weights of the linear layers have, where that is not what
    the run's model says."""
    precision: Precision | None = None
    """The precision of the linear layers where it is not the run's; else None."""

    @property
    def sparsities(self) -> tuple[FFNSparsity, ...]:
        """The sparsity of the phase and, if it has any, that of the steps in
        between."""
        between = () if self.every is None else (self.every.sparsity,)
        return (self.sparsity, *between)

    @property
    def shares(self) -> tuple[float, ...]:
        """The share of the phase's steps that each of `sparsities` has."""
        if self.every is None:
            return (1.0,)
        return (1 - 1 / self.every.steps, 1 / self.every.steps)

    @property
    def is_dense(self) -> bool:
        """Whether all six GEMMs are dense in all steps of the phase."""
        return all(sparsity.is_dense for sparsity in self.sparsities)

    @property
    def held(self) -> FFNSparsity:
        """The sparsity that the phase's state belongs to, which fits all of its steps:
        the state has the arrays of a router if the router of some steps keeps any, and
        scales if some steps have 2:4 weights."""
        with_experts = [of for of in self.sparsities if of.experts]
        with_state = [of for of in with_experts if of.router.has_state]
        first = (with_state or with_experts or self.sparsities)[0]
        weights = [of.weights for of in self.sparsities if of.weights]
        return replace(first, weights=weights[0] if weights else None)

    def sparsity_of(self, number: int) -> FFNSparsity:
        """Returns the sparsity of one step of the phase; steps are counted from 1."""
        if self.every is not None and number % self.every.steps == 0:
            return self.every.sparsity
        return self.sparsity

    def as_dense(self) -> "Phase":
        """Returns the phase with all GEMMs dense in all of its steps."""
        return replace(self, sparsity=DENSE, every=None)


def model_of(phase: Phase, whole: ModelConfig) -> ModelConfig:
    """Returns the model that a phase trains, in a run whose model is `whole`.

    Raises:
      ValueError: there is no such model.
    """
    return replace(
        whole,
        d_hidden=phase.d_hidden or whole.d_hidden,
        layers=phase.layers or whole.layers,
        static_weights=phase.static_weights or whole.static_weights,
        precision=phase.precision or whole.precision,
    )


def phase_at(planned: Sequence[Phase], step: int) -> int:
    """Returns the number of the phase that the step after `step` steps belongs to; for
    a run that is over, the number of its last phase."""
    ends = accumulate(phase.steps for phase in planned)
    return next((i for i, end in enumerate(ends) if step < end), len(planned) - 1)


def are_alike(left: Sequence[Phase], right: Sequence[Phase]) -> bool:
    """Returns whether the phases on both sides are the same but for their lengths."""
    return [replace(of, steps=0) for of in left] == [
        replace(of, steps=0) for of in right
    ]


def steps_left(planned: Sequence[Phase], step: int) -> tuple[Phase, ...]:
    """Returns the phases, each as long as what is left of it after `step` steps."""
    ends = accumulate(phase.steps for phase in planned)
    return tuple(
        replace(phase, steps=min(phase.steps, max(0, end - step)))
        for phase, end in zip(planned, ends, strict=True)
    )


def with_dense(phases: Sequence[Phase], run_dense: Sequence[int]) -> tuple[Phase, ...]:
    """Returns the phases, those whose number is in `run_dense` with all GEMMs dense."""
    return tuple(
        phase.as_dense() if number in run_dense else phase
        for number, phase in enumerate(phases)
    )


def phases(config: TrainConfig) -> tuple[Phase, ...]:
    """Returns the phases of a run, none of them empty: those of its schedule or,
    without one, the recipe's. The shares of the steps are rounded one by one, and what
    they leave goes to the phase that has none, or else to the last.

    Raises:
      ValueError: a phase's patterns do not divide the widths of its model.
    """
    schedule = config.phases.schedule or recipe_schedule(config.recipe, config.phases)
    steps = _steps_of(schedule, config.steps)
    planned = tuple(
        Phase(
            kind=phase.name,
            steps=count,
            sparsity=phase.sparsity,
            every=phase.every,
            learning_rate_scale=phase.learning_rate_scale,
            d_hidden=phase.d_hidden,
            layers=phase.layers,
            static_weights=phase.static_weights,
            precision=phase.precision,
        )
        for phase, count in zip(schedule, steps, strict=True)
        if count
    )
    for phase in planned:
        model_of(phase, config.model)
        for sparsity in phase.sparsities:
            check_divisible(config.model.d_model, config.model.d_hidden, sparsity)
    return planned


def recipe_schedule(
    recipe: RecipeName, settings: RecipeConfig
) -> tuple[PhaseConfig, ...]:
    """Returns a recipe as a schedule: dense warm-up, sparse phase, dense tail. One with
    static weights has them from the first step on, for a model that is dense has no
    weights that could be new.

    Raises:
      ValueError: there is no such recipe.
    """
    sparsity = settings.sparsity_of(recipe)
    static = settings.static_weights_of(recipe)
    if recipe == "dense":
        return (PhaseConfig(name="dense"),)
    sparse = {"sparsity": sparsity, "static_weights": static}
    first = [("sparse", settings.sparse_share, sparse)]
    if static is None:
        first.insert(0, ("warm-up", settings.warmup_share, {}))
    phases = [PhaseConfig(name=name, share=of, **own) for name, of, own in first if of]
    return (*phases, PhaseConfig(name="dense"))


def _steps_of(schedule: Sequence[PhaseConfig], steps: int) -> list[int]:
    """Returns the number of steps of each phase."""
    shares = [phase.share for phase in schedule]
    takes_the_rest = shares.index(None) if None in shares else len(shares) - 1
    counts, left = [0] * len(shares), steps
    for index, share in enumerate(shares):
        if index != takes_the_rest:
            assert share is not None
            counts[index] = min(round(share * steps), left)
            left -= counts[index]
    counts[takes_the_rest] = left
    return counts
