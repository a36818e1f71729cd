"""The settings of a run's phases: the named recipes, and schedules as data."""

from dataclasses import dataclass, fields, replace
from typing import Annotated, Literal, get_args

from sparsejax.annotations import check_fields, check_value
from sparsejax.config.ranges import (
    INT32_MAX,
    CountOrNone,
    CountOrZero,
    Interval,
    Positive,
    Share,
    check_intervals,
    check_shares,
)
from sparsejax.dtypes import Precision
from sparsejax.feed_forward.sparsity import DENSE, FFNSparsity, TokenSparsity
from sparsejax.routing.routers import ActivationEnergyFP8, Router
from sparsejax.sparsity.patterns import (
    NM,
    VNM,
    BlockDiagonal,
    Pattern,
    StaticPattern,
    name_of,
)

RecipeName = Literal[
    "experts", "two-four", "paper", "activations", "weights", "s2d", "dense"
]

RECIPES: dict[RecipeName, FFNSparsity] = {
    "experts": FFNSparsity(
        activations=VNM(128, 4, 32),
        router=ActivationEnergyFP8(),
        experts_per_token=2,
        skip_blocks=True,
        weight_gradients="expert_columns",
        skipped_energy=0.05,
    ),
    "two-four": FFNSparsity(weights=NM(2, 4), activations=NM(2, 4)),
    "paper": FFNSparsity(
        weights=NM(2, 4),
        activations=VNM(128, 2, 16),
        weight_gradients="expert_columns",
    ),
    "activations": FFNSparsity(activations=NM(2, 4)),
    "weights": FFNSparsity(weights=NM(2, 4)),
    "s2d": DENSE,
    "dense": DENSE,
}
"""The sparsity of the FFNs in each recipe's sparse phase.

experts has two of eight experts, chosen by an estimate of their activation energy, with
dense weights and a penalty on the neurons of the others; its runs took least of dense's
time (docs/results.md). two-four has 2:4 weights and activations. paper is that of arXiv
2602.06183, one of four experts by nearest centre; activations is that of arXiv
2503.16672; `STATIC_WEIGHTS` says what s2d has besides."""

STATIC_WEIGHTS: dict[RecipeName, StaticPattern] = {"s2d": BlockDiagonal(4)}
"""The entries that the weights of all linear layers have in the first phase of a recipe
that begins with static ones. s2d is that of arXiv 2304.05511, whose weights are 75 to
87.5 % zeros, unstructured; with blocks on a diagonal any device computes the quarter
that is left as dense GEMMs."""


@dataclass(frozen=True, kw_only=True)
class Interleaved:
    """Steps of a phase that run with another sparsity than its others: each `steps`-th,
    counted from the first of the phase. Neurons keep their order and weights their
    scales. Without `sparsity` these steps are dense, on all neurons."""

    steps: Annotated[int, Interval(least=2, most=INT32_MAX)]
    sparsity: FFNSparsity = DENSE

    def __post_init__(self) -> None:
        check_fields(self, "every.")
        check_intervals(self, "every.")


@dataclass(frozen=True, kw_only=True)
class PhaseConfig:
    """One phase of a schedule: consecutive steps that are trained alike."""

    name: str
    """Name of the phase in records, tables and figures; unique in a schedule."""
    share: Annotated[float | None, Interval(above=0, most=1)] = None
    """Share of the run's steps that the phase has. None, in one phase of a schedule:
    what the others leave."""
    sparsity: FFNSparsity = DENSE
    """Sparsity of the phase's steps and validations."""
    every: Interleaved | None = None
    """Steps of the phase that have another sparsity; None: there are none."""
    learning_rate_scale: Positive = 1.0
    """Factor that the learning rate of the optimiser's schedule is multiplied by."""
    d_hidden: CountOrNone = None
    """Neurons per FFN in this phase, of a model that grows. None: the model's."""
    layers: CountOrNone = None
    """Layers in this phase, of a model that grows. None: the model's."""
    static_weights: StaticPattern | None = None
    """The entries that the weights of all linear layers have in this phase, of a model
    whose others begin at zero after it. None: the model's."""
    precision: Precision | None = None
    """Precision of the phase's linear layers, as in `model.precision`. None: the
    model's."""

    def __post_init__(self) -> None:
        check_fields(self, "phases.schedule.")
        check_intervals(self, "phases.schedule.")
        sparse = not all(sparsity.is_dense for sparsity in self.sparsities)
        if sparse and any((self.d_hidden, self.layers, self.static_weights)):
            raise ValueError(
                f"phase {self.name!r} has a size of its own and sparse steps; a model "
                f"grows while its FFNs are dense: leave d_hidden, layers and "
                f"static_weights out, or the sparsity"
            )
        if not self.name.strip() or not self.name.isprintable():
            raise ValueError(
                f"phases.schedule.name={self.name!r} must be a word or some, in one "
                f"line; records and figures tell phases by it"
            )
        experts = {s.experts for s in self.sparsities if s.experts}
        if len(experts) > 1:
            raise ValueError(
                f"phase {self.name!r} has steps with {min(experts)} experts and steps "
                f"with {max(experts)}, but its neurons lie in one order; give both the "
                f"same number of experts, or make two phases of it"
            )
        with_state = {
            s.router.name for s in self.sparsities if s.experts and s.router.has_state
        }
        if len(with_state) > 1:
            raise ValueError(
                f"phase {self.name!r} has steps with router={min(with_state)!r} and "
                f"steps with router={max(with_state)!r}, but its state has room for "
                f"what one of them keeps; give both the same, or make two phases of it"
            )

        observed = {s.observes for s in self.sparsities if s.experts}
        if len(observed) > 1:
            raise ValueError(
                f"phase {self.name!r} has steps with experts that keep "
                f"{' and '.join(map(str, observed))} from step to step, but its state "
                f"has room for one of them; give both the same settings of the experts"
            )

    def check_all_is_read(self) -> None:
        """Raises ValueError where a sparsity of the phase has a setting that nothing
        reads beside its others."""
        for sparsity in self.sparsities:
            for name in _unread(sparsity):
                value = getattr(sparsity, name)
                value = value.name if isinstance(value, Router) else value
                raise ValueError(
                    f"{name}={value!r} has no meaning in phase {self.name!r}, with "
                    f"weights={_name_of(sparsity.weights)}, "
                    f"activations={_name_of(sparsity.activations)} and "
                    f"token_sparsity={sparsity.token_sparsity!r}; leave it out"
                )

    @property
    def sparsities(self) -> tuple[FFNSparsity, ...]:
        """The sparsity of the phase's steps and, if it has any, that of the steps in
        between."""
        between = () if self.every is None else (self.every.sparsity,)
        return (self.sparsity, *between)


@dataclass(frozen=True, kw_only=True)
class RecipeConfig:
    """The lengths of a recipe's three phases, and what its sparse phase has other than
    the recipe; or, as a schedule, the phases that stand in place of these three."""

    warmup_share: Share = 0.05
    """Share of the steps that are dense before the sparse phase."""
    sparse_share: Share = 0.85
    """Share of the steps that are sparse; the rest is the dense tail, by default the
    second half of the steps in which the learning rate decays."""
    sparsity: FFNSparsity | None = None
    """Sparsity of the sparse phase: the recipe's, with other settings of its patterns,
    router and backward. None: the recipe's own."""
    static_weights: StaticPattern | None = None
    """Recipe s2d: which entries the weights of all linear layers have in its sparse
    phase. None: the recipe's own."""
    recluster_every: CountOrZero = 0
    """Steps between warm-started new clusterings in the sparse phase; 0: never."""
    fold: bool = True
    """Whether, on leaving 2:4 weights, W1 becomes beta S(W1), which the forward has
    used."""
    schedule: tuple[PhaseConfig, ...] = ()
    """Phases in their order. Empty: those of the recipe, dense, sparse, dense. With a
    schedule, `fold` and `recluster_every` are the only other settings here that are
    read."""

    def __post_init__(self) -> None:
        check_fields(self, "phases.")
        check_intervals(self, "phases.")
        if self.schedule:
            self._check_schedule()
        check_shares(
            self,
            "phases.",
            "warmup_share",
            "sparse_share",
            otherwise="fewer dense steps before them",
        )

    def sparsity_of(self, recipe: RecipeName) -> FFNSparsity:
        """Returns the sparsity of the sparse phase under a recipe.

        Raises:
          ValueError: there is no such recipe.
        """
        check_value("recipe", recipe, RecipeName)
        return RECIPES[recipe] if self.sparsity is None else self.sparsity

    def static_weights_of(self, recipe: RecipeName) -> StaticPattern | None:
        """Returns which entries the weights of all linear layers have in the sparse
        phase under a recipe; None where it has all of them."""
        return self.static_weights or STATIC_WEIGHTS.get(recipe)

    def relative_to(self, recipe: RecipeName) -> "RecipeConfig":
        """Returns the same settings with `sparsity` None where it is the recipe's
        own."""
        is_own = self.sparsity == RECIPES[recipe]
        return replace(self, sparsity=None) if is_own else self

    def check_fits(self, recipe: RecipeName) -> None:
        """Raises ValueError where `sparsity` is not a form of the recipe's, or has a
        setting that nothing would read."""
        own, chosen = RECIPES[recipe], self.sparsity_of(recipe)
        for name in ("weights", "activations"):
            has, wanted = getattr(chosen, name), getattr(own, name)
            if type(has) is not type(wanted):
                raise ValueError(
                    f"phases.sparsity.{name}={_name_of(has)} makes another recipe of "
                    f"{recipe!r}, which has {_name_of(wanted)}; leave it out, use "
                    f"another --recipe, or write the phases as a --schedule"
                )
        if own.is_dense and not chosen.is_dense:
            raise ValueError(
                f"phases.sparsity.token_sparsity={chosen.token_sparsity!r} makes "
                f"another recipe of {recipe!r}, whose GEMMs are dense; leave it out, "
                f"or use another --recipe"
            )
        given = {
            f"sparsity.{field.name}": getattr(chosen, field.name)
            for field in fields(FFNSparsity)
            if getattr(chosen, field.name) != getattr(DENSE, field.name)
        }
        if self.static_weights is not None and recipe not in STATIC_WEIGHTS:
            raise ValueError(
                f"phases.static_weights={_name_of(self.static_weights)} has no meaning "
                f"in recipe {recipe!r}; leave it out or use --recipe "
                f"{' or '.join(STATIC_WEIGHTS)}"
            )
        if self.recluster_every:
            given["recluster_every"] = self.recluster_every
        for name, value in given.items():
            is_read = READ_WHERE.get(name, lambda sparsity: True)
            if not is_read(chosen):
                value = value.name if isinstance(value, Router) else value
                recipes = [name for name, of in RECIPES.items() if is_read(of)]
                where = f"in recipe {recipe!r}"
                way = f"use --recipe {' or '.join(recipes)}"
                if is_read is _has_token_sparsity:
                    kinds = ", ".join(map(repr, get_args(TokenSparsity)))
                    where, way = "without token_sparsity", f"set that to one of {kinds}"
                raise ValueError(
                    f"phases.{name}={value!r} has no meaning {where}; leave it out or "
                    f"{way}"
                )

    def _check_schedule(self) -> None:
        for field_ in fields(self):
            value = getattr(self, field_.name)
            if field_.name not in READ_WITH_SCHEDULE and value != field_.default:
                given = f"{field_.name}={value!r}"
                if isinstance(value, FFNSparsity):
                    given = f"sparsity ({', '.join(_given(value)) or 'dense'})"
                raise ValueError(
                    f"phases.{given} has no meaning beside phases.schedule, whose "
                    f"phases say that themselves; leave one of them out"
                )
        names = [phase.name for phase in self.schedule]
        if double := {name for name in names if names.count(name) > 1}:
            raise ValueError(
                f"phases.schedule has several phases named {sorted(double)[0]!r}; "
                f"records and figures tell them by their names, give each its own"
            )
        shares = [phase.share for phase in self.schedule]
        total, left = sum(filter(None, shares)), shares.count(None)
        if left > 1:
            raise ValueError(
                f"phases.schedule has {left} phases without a share of the steps; one "
                f"of them takes what is left, give the others theirs"
            )
        if total > 1 + 1e-9 or (not left and total < 1 - 1e-9):
            raise ValueError(
                f"the shares in phases.schedule sum to {total:g} and not to 1; change "
                f"one, or leave one out, which then is what the others leave"
            )


READ_WITH_SCHEDULE = ("schedule", "fold", "recluster_every")
"""The names of the settings that hold for all phases of a schedule."""


def _has_experts(sparsity: FFNSparsity) -> bool:
    return sparsity.experts is not None


def _has_sparse_weights(sparsity: FFNSparsity) -> bool:
    return sparsity.weights is not None


def _has_sparse_activations(sparsity: FFNSparsity) -> bool:
    return sparsity.activations is not None


def _has_token_sparsity(sparsity: FFNSparsity) -> bool:
    return sparsity.token_sparsity is not None


READ_WHERE = {
    "recluster_every": _has_experts,
    "sparsity.router": _has_experts,
    "sparsity.experts_per_token": _has_experts,
    "sparsity.most_experts_per_token": _has_experts,
    "sparsity.skipped_energy": _has_experts,
    "sparsity.dense_features": _has_token_sparsity,
    "sparsity.permute_tokens": _has_token_sparsity,
    "sparsity.mask_reuse": _has_sparse_activations,
    "sparsity.exact_gradients": _has_sparse_weights,
}
"""For each setting of the phases that only some sparsities read, whether a sparsity
does."""


def _unread(sparsity: FFNSparsity) -> list[str]:
    """Returns the names of the settings of a sparsity that nothing reads beside its
    others, and that are not those of a dense one."""
    settings = [name.partition("sparsity.")[2] for name in READ_WHERE]
    return [
        name
        for name in filter(None, settings)
        if getattr(sparsity, name) != getattr(DENSE, name)
        and not READ_WHERE[f"sparsity.{name}"](sparsity)
    ]


def _given(sparsity: FFNSparsity) -> list[str]:
    """Returns the settings of a sparsity that are not those of a dense one, as text."""
    values = {field.name: getattr(sparsity, field.name) for field in fields(sparsity)}
    return [
        f"{name}={value.name!r}" if isinstance(value, Router) else f"{name}={value}"
        for name, value in values.items()
        if value != getattr(DENSE, name)
    ]


def _name_of(pattern: Pattern | BlockDiagonal | None) -> str:
    return "None" if pattern is None else repr(name_of(pattern))
