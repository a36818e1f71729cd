"""The worth of a comparison's arms: tokens and seconds to their loss, over those of the
dense model.

The reference's runs of at least three lengths give the dense curve (`dense_curve`).
Every replicate of a bootstrap (`bootstrap`) has losses, a curve and speeds of its own.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from experiments.comparing.finished_runs import FinishedRun
from experiments.worth.bootstrap import (
    DEVIATIONS_IN_INTERVAL,
    INTERVAL,
    REPLICATES,
    Replicates,
    replicates,
)
from experiments.worth.dense_curve import DenseCurves
from experiments.worth.dense_rivals import DenseRivals, Length
from experiments.worth.step_costs import (
    AtWidths,
    are_alike,
    break_even,
    cost,
    cost_shares,
    mean_where_known,
)
from sparsejax.config import ModelConfig
from sparsejax.cost_model import parameter_count

type Key = tuple[str, int]
"""The arm of a run, and its number of tokens."""


@dataclass(frozen=True)
class Speed:
    """The speed of a sparse step over a dense one, with the 90 % interval of that
    figure where it is known."""

    value: float
    low: float | None = None
    high: float | None = None

    @classmethod
    def read(cls, text: str) -> Self:
        """Returns the speed of a text, "1.44" or "1.44:1.42-1.46".

        Raises:
          ValueError: a number is missing or not positive and finite, or the value lies
            outside its interval.
        """
        value, colon, interval = text.partition(":")
        numbers = [float(value), *map(float, interval.split("-") if colon else ())]
        if len(numbers) not in (1, 3) or not all(0 < x < math.inf for x in numbers):
            raise ValueError(f"{text!r} is not a positive speed")
        if colon and not numbers[1] <= numbers[0] <= numbers[2]:
            raise ValueError(f"{text!r} has a value outside its interval")
        return cls(*numbers)

    def replicates(self, generator: np.random.Generator) -> Replicates:
        """Returns the value, and draws of a log-normal distribution about it whose
        central 90 % are as wide as the interval."""
        drawn = np.full(REPLICATES, self.value)
        if self.low is not None and self.high is not None:
            deviation = math.log(self.high / self.low) / DEVIATIONS_IN_INTERVAL
            drawn *= np.exp(generator.normal(0.0, deviation, REPLICATES))
        return np.concatenate([[self.value], drawn])


@dataclass(frozen=True, kw_only=True)
class Row:
    """One arm at one length, over its seeds.

    R is a ratio of costs to one loss, the arm's over the dense model's: `R_tokens` in
    tokens, `R` in seconds of steps, `R_wall` in wall-clock seconds of the whole run.
    `R_best` is R over the dense arm that needs the fewest seconds for that loss.
    `_low` and `_high` are the ends of the 90 % interval, None where there is none.
    """

    comparison: str
    arm: str
    parameters: int
    """The number of parameters of the arm's model at the end, without embedding and
    head."""
    tokens: int
    tokens_per_parameter: float
    """The arm's tokens over the parameters of the dense model."""
    loss: float
    """The mean loss over the seeds, in nats per token."""
    adjusted_loss: float
    """That mean without what the seeds add to the losses of all arms
    (`bootstrap.SeedFit`), so that arms with other seeds can be compared."""
    dense_tokens: float | None
    """The tokens D_eq at which the dense curve, whose losses are adjusted likewise, has
    the adjusted loss; None where it never has."""
    delta: float | None
    """ln(D / D_eq), which is ln of `R_tokens`."""
    extrapolated: bool
    """Whether D_eq is below the shortest or above the longest dense run."""
    sparse_share: float
    """The share q of the steps that are sparse."""
    dense_cost: float
    """The cost of the arm's dense steps, over that of as many steps of the dense model
    as the arm has in all (`step_costs.cost_shares`)."""
    sparse_cost: float
    """The cost that the arm's sparse steps would have if they were dense, likewise."""
    at_widths: str | None
    """The preset and the GPU for which the seconds of dense steps were predicted, whose
    ratios these costs are, as "llama-1b, NVIDIA H200"; None where they are FLOPs of the
    models as trained."""
    seconds: float | None
    """The measured seconds of the arm's steps, a mean over the seeds; None where not
    known."""
    wall_seconds: float | None
    """The measured wall-clock seconds of the arm's runs, likewise."""
    speed: float | None
    """The speed of a sparse step over a dense one; None where it was not given."""
    speed_low: float | None
    speed_high: float | None
    speed_from: str | None
    """The source of R's seconds: "measured", that of `speed`, "FLOPs", or "predicted
    for" and `at_widths`."""
    break_even_speed: float | None
    """The speed of a sparse step at which R is 1; None where there is none."""
    R_tokens: float | None
    R_tokens_low: float | None
    R_tokens_high: float | None
    R: float | None
    R_low: float | None
    R_high: float | None
    R_at_most: float | None
    """The arm's seconds over those of the longest dense run, where the arm ended below
    that run in 95 % of the replicates: R is less, however the dense curve goes on. None
    elsewhere."""
    R_wall: float | None
    R_wall_low: float | None
    R_wall_high: float | None
    R_best: float | None
    R_best_low: float | None
    R_best_high: float | None
    best_dense: str | None
    """The dense arm of `R_best`, another one than the row's own; None where none
    reaches the loss."""
    best_extrapolated: bool
    """Whether that arm reaches the loss before its shortest run or beyond its longest,
    so that `R_best` rests on how its loss falls there."""
    best_is_least: bool
    """Whether `R_best` is only the least that it can be, and then without an interval:
    a dense arm with a single length seems to pass the loss at a lower cost, and where
    it does nobody knows (`dense_rivals.Best`)."""
    R_best_likely: float | None
    """What R_best is then if the loss of that arm falls as those of other dense arms
    do; None elsewhere."""
    R_best_likely_low: float | None
    R_best_likely_high: float | None
    measured: bool
    """Whether R comes from measured seconds; `R_wall` always does."""
    side_by_side: int
    """The number of runs that shared a device while these were trained."""
    seeds: int
    device: str | None
    commit: str | None
    """The commit that the runs were trained with."""
    command: str
    analysed_with: str | None
    """The commit of the script that made the row."""


def grouped(runs: Sequence[FinishedRun]) -> dict[Key, list[FinishedRun]]:
    """Returns the runs of one arm and one length together, whatever their seed.

    Raises:
      ValueError: two of them have the same seed.
    """
    groups: dict[Key, list[FinishedRun]] = {}
    for run in runs:
        groups.setdefault((run.arm, run.tokens), []).append(run)
    for (arm, tokens), of in groups.items():
        seeds = [run.seed for run in of]
        if len(set(seeds)) < len(seeds):
            names = ", ".join(dict.fromkeys(run.name for run in of))
            raise ValueError(
                f"arm {arm!r} has several runs of {tokens:,} tokens and one seed "
                f"({names}); give them arms of their own in the comparison file"
            )
    return dict(sorted(groups.items(), key=lambda of: of[0][1]))


def rows_of(
    groups: Mapping[Key, Sequence[FinishedRun]],
    reference: str,
    speeds: Mapping[str, Speed],
    speed_from: str | None,
    *,
    comparison: str,
    command: str,
    analysed_with: str | None = None,
    at_widths: AtWidths | None = None,
    seed: int = 0,
) -> list[Row]:
    """Returns a row per group, the rows of the reference first.

    Raises:
      ValueError: no dense curve, or a speed of an arm that is not there.
    """
    arms = dict.fromkeys(arm for arm, _ in groups)
    for name in (reference, *speeds):
        if name not in arms:
            raise ValueError(
                f"{name!r} is no arm with finished runs; there are "
                f"{', '.join(arms) or 'none'}"
            )
    dense = {key: of for key, of in groups.items() if key[0] == reference}
    models = {of.config.model for runs in dense.values() for of in runs}
    if len(models) > 1:
        raise ValueError(
            f"the runs of the reference {reference!r} have {len(models)} different "
            f"models; name the arms in the comparison file so that it has one"
        )
    (model,) = models
    generator = np.random.default_rng(seed)
    losses = replicates(groups, generator)
    drawn_speeds = {arm: of.replicates(generator) for arm, of in speeds.items()}
    curves = DenseCurves.fit(
        np.array([tokens for _, tokens in dense], np.float64),
        np.stack([losses[key] for key in dense], axis=1),
        np.array([len(of) for of in dense.values()], np.float64),
    )
    dense_runs = [run for of in dense.values() for run in of]
    predicted = None if at_widths is None else at_widths.name
    costs = {
        key: cost(of, dense_runs, drawn_speeds.get(key[0]), at_widths)
        for key, of in groups.items()
    }
    has_spread = any(len(of) > 1 for of in groups.values())
    lengths = [tokens for _, tokens in dense]
    longest = (reference, max(lengths))
    rivals = DenseRivals(
        reference,
        curves,
        lengths,
        _lengths_of_others(groups, losses, costs, reference),
    )
    cost_of_longest, _ = costs[longest]
    rows = []
    for key in (*dense, *(key for key in groups if key not in dense)):
        (arm, tokens), of = key, groups[key]
        equal = curves.tokens(losses[key])
        in_tokens = tokens / equal
        relative, measured = costs[key]
        ratios = None if relative is None else relative * in_tokens
        best = rivals.best(losses[key], arm)
        over_best = likely = None
        if relative is not None and best.name is not None:
            over_best = relative * tokens / best.costs
            likely = relative * tokens / best.likely if best.is_least else None
        of_wall = None if at_widths else wall_ratios(of, dense_runs, equal)
        bound: float | None = None
        is_below = np.mean(losses[key] < losses[longest]) >= 0.95
        if is_below and relative is not None and cost_of_longest is not None:
            own, dense_cost = (np.ravel(of)[0] for of in (relative, cost_of_longest))
            bound = float(own * tokens / (dense_cost * longest[1]))
        reached = bool(np.isfinite(equal[0]))
        dense_cost, sparse_cost = cost_shares(of, model, at_widths)
        speed = speeds.get(arm)
        source = speed_from
        if speed is None:
            source = f"predicted for {predicted}" if predicted else "FLOPs"
        if measured or relative is None:
            source = "measured" if measured else None
        rows.append(
            Row(
                comparison=comparison,
                arm=arm,
                parameters=parameters(of[0].config.model),
                tokens=tokens,
                tokens_per_parameter=tokens / parameters(model),
                loss=float(np.mean([run.loss for run in of])),
                adjusted_loss=float(losses[key][0]),
                dense_tokens=float(equal[0]) if reached else None,
                delta=math.log(in_tokens[0]) if reached else None,
                # A curve through three points returns their lengths but for rounding.
                extrapolated=not (
                    min(lengths) * (1 - 1e-6) <= equal[0] <= max(lengths) * (1 + 1e-6)
                ),
                sparse_share=float(np.mean([run.sparse_share for run in of])),
                dense_cost=dense_cost,
                sparse_cost=sparse_cost,
                at_widths=predicted,
                seconds=mean_where_known(run.seconds for run in of),
                wall_seconds=mean_where_known(run.wall_seconds for run in of),
                speed=None if speed is None else speed.value,
                speed_low=None if speed is None else speed.low,
                speed_high=None if speed is None else speed.high,
                speed_from=source,
                break_even_speed=break_even(dense_cost, sparse_cost, in_tokens[0]),
                **ratio_fields("R_tokens", in_tokens, has_spread),
                **ratio_fields("R", ratios, has_spread),
                R_at_most=bound,
                **ratio_fields("R_wall", of_wall, has_spread),
                **ratio_fields("R_best", over_best, has_spread and not best.is_least),
                best_dense=best.name,
                best_extrapolated=best.extrapolated,
                best_is_least=best.is_least,
                **ratio_fields("R_best_likely", likely, has_spread),
                measured=measured,
                side_by_side=max(run.side_by_side for run in of),
                seeds=len(of),
                device=_all_of(run.device for run in of),
                commit=_all_of(run.commit for run in of),
                command=command,
                analysed_with=analysed_with,
            )
        )
    return rows


def _lengths_of_others(
    groups: Mapping[Key, Sequence[FinishedRun]],
    losses: Mapping[Key, Replicates],
    costs: Mapping[Key, tuple[Replicates | float | None, bool]],
    reference: str,
) -> dict[str, list[Length]]:
    """Returns the lengths of every dense arm but the reference: those whose runs train
    no sparse step, and no layer with static weights."""
    lengths: dict[str, list[Length]] = {}
    sparse = {arm for (arm, _), of in groups.items() if not all(map(_is_dense, of))}
    for arm, tokens in groups:
        relative, _ = costs[arm, tokens]
        if arm not in (reference, *sparse) and relative is not None:
            length = Length(losses[arm, tokens], relative * tokens)
            lengths.setdefault(arm, []).append(length)
    return lengths


def _is_dense(run: FinishedRun) -> bool:
    static = any(of.model.static_weights for of in run.stretches)
    return run.sparse_share == 0 and not static


def ratio_fields(
    name: str, ratios: Replicates | None, has_spread: bool
) -> dict[str, float | None]:
    """Returns a ratio as fields of a row: its value, and the ends of its interval.

    There is no interval where no arm has two seeds, nor where one replicate in a
    hundred or more has a dense curve that does not fall: such a curve says nothing of
    the ratio. Where there are fewer of them, the interval is that of the others.
    """
    value = low = high = None
    if ratios is not None:
        value = float(ratios[0])
        known = ratios[1:][~np.isnan(ratios[1:])]
        if has_spread and len(known) > 0.99 * len(ratios[1:]):
            low, high = (float(x) for x in np.percentile(known, INTERVAL))
    return {name: value, f"{name}_low": low, f"{name}_high": high}


def wall_ratios(
    runs: Sequence[FinishedRun],
    dense_runs: Sequence[FinishedRun],
    equal: Replicates,
) -> Replicates | None:
    """Returns the wall-clock seconds of these runs over those of a dense run of D_eq
    tokens, or None where they were not measured on as many devices of one kind, or
    where D_eq is below all dense runs and their line falls below 0 there.

    The dense run's are a straight line in its tokens, fitted to the dense runs: what
    does not grow with the tokens, as compilation, is paid once by either.

    Args:
      runs: the runs of one arm and one length.
      dense_runs: the runs of the dense model, of at least two lengths.
      equal: D_eq, the tokens after which the dense model has the arm's loss.
    """
    own = mean_where_known(run.wall_seconds for run in runs)
    dense = [run.wall_seconds for run in dense_runs if run.wall_seconds is not None]
    if own is None or len(dense) < len(dense_runs) or not are_alike(runs, dense_runs):
        return None
    slope, constant = np.polyfit([run.tokens for run in dense_runs], dense, 1)
    if constant < 0 and equal[0] < min(run.tokens for run in dense_runs):
        return None
    return own / (constant + slope * equal)


def parameters(model: ModelConfig) -> int:
    """Returns the number of a model's parameters without embedding and head."""
    count = parameter_count(model)
    return count.total - count.embedding - count.head


def _all_of(values: Iterable[str | None]) -> str | None:
    return ", ".join(dict.fromkeys(filter(None, values))) or None
