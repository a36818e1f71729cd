"""The worth of a comparison's arms: tokens and seconds to their loss, over those of the
dense model.

The reference's runs of at least three lengths give the dense curve (`dense_curve`).
Every replicate of a bootstrap (`bootstrap`) has losses, a curve and speeds of its own.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

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
from experiments.worth.row import Row
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
    against = _Comparison.of(groups, reference, speeds, speed_from, at_widths, seed)
    dense = [key for key in groups if key[0] == reference]
    order = (*dense, *(key for key in groups if key not in dense))
    origin = {"command": command, "analysed_with": analysed_with}
    return [against.row(key, comparison=comparison, **origin) for key in order]


@dataclass(frozen=True, kw_only=True)
class _Comparison:
    """The arms of a comparison, and the dense model that each is held against."""

    groups: Mapping[Key, Sequence[FinishedRun]]
    dense: Mapping[Key, Sequence[FinishedRun]]
    """The groups of the reference."""
    model: ModelConfig
    """The model of the reference."""
    losses: Mapping[Key, Replicates]
    curves: DenseCurves
    costs: Mapping[Key, tuple[Replicates | float | None, bool]]
    """The cost of a token of each group, and whether it was measured
    (`step_costs.cost`)."""
    rivals: DenseRivals
    speeds: Mapping[str, Speed]
    speed_from: str | None
    at_widths: AtWidths | None

    @classmethod
    def of(
        cls,
        groups: Mapping[Key, Sequence[FinishedRun]],
        reference: str,
        speeds: Mapping[str, Speed],
        speed_from: str | None,
        at_widths: AtWidths | None,
        seed: int,
    ) -> Self:
        """Returns the comparison, its curves fitted and its speeds drawn. Raises
        ValueError where there is no dense curve."""
        dense = {key: of for key, of in groups.items() if key[0] == reference}
        dense_runs = [run for of in dense.values() for run in of]
        models = {run.config.model for run in dense_runs}
        if len(models) > 1:
            raise ValueError(
                f"the runs of the reference {reference!r} have {len(models)} different "
                f"models; name the arms in the comparison file so that it has one"
            )
        generator = np.random.default_rng(seed)
        losses = replicates(groups, generator)
        drawn_speeds = {arm: of.replicates(generator) for arm, of in speeds.items()}
        lengths = [tokens for _, tokens in dense]
        curves = DenseCurves.fit(
            np.array(lengths, np.float64),
            np.stack([losses[key] for key in dense], axis=1),
            np.array([len(of) for of in dense.values()], np.float64),
        )
        costs = {
            key: cost(of, dense_runs, drawn_speeds.get(key[0]), at_widths)
            for key, of in groups.items()
        }
        others = _lengths_of_others(groups, losses, costs, reference)
        return cls(
            groups=groups,
            dense=dense,
            model=models.pop(),
            losses=losses,
            curves=curves,
            costs=costs,
            rivals=DenseRivals(reference, curves, lengths, others),
            speeds=speeds,
            speed_from=speed_from,
            at_widths=at_widths,
        )

    def row(self, key: Key, **origin: Any) -> Row:
        """Returns the row of a group, with the fields of its origin."""
        (arm, tokens), of = key, self.groups[key]
        equal = self.curves.tokens(self.losses[key])
        reached = bool(np.isfinite(equal[0]))
        _, measured = self.costs[key]
        speed = self.speeds.get(arm)
        dense_cost, sparse_cost = cost_shares(of, self.model, self.at_widths)
        excess = tokens / equal[0]
        shortest, longest = min(self.rivals.lengths), max(self.rivals.lengths)
        return Row(
            arm=arm,
            parameters=parameters(of[0].config.model),
            tokens=tokens,
            tokens_per_parameter=tokens / parameters(self.model),
            loss=float(np.mean([run.loss for run in of])),
            adjusted_loss=float(self.losses[key][0]),
            dense_tokens=float(equal[0]) if reached else None,
            delta=math.log(excess) if reached else None,
            # A curve through three points returns their lengths but for rounding.
            extrapolated=not (
                shortest * (1 - 1e-6) <= equal[0] <= longest * (1 + 1e-6)
            ),
            sparse_share=float(np.mean([run.sparse_share for run in of])),
            dense_cost=dense_cost,
            sparse_cost=sparse_cost,
            at_widths=None if self.at_widths is None else self.at_widths.name,
            seconds=mean_where_known(run.seconds for run in of),
            wall_seconds=mean_where_known(run.wall_seconds for run in of),
            speed=None if speed is None else speed.value,
            speed_low=None if speed is None else speed.low,
            speed_high=None if speed is None else speed.high,
            speed_from=self._source_of(key),
            break_even_speed=break_even(dense_cost, sparse_cost, excess),
            **self._ratios(key, equal),
            R_at_most=self._bound(key),
            measured=measured,
            side_by_side=max(run.side_by_side for run in of),
            seeds=len(of),
            device=_all_of(run.device for run in of),
            commit=_all_of(run.commit for run in of),
            **origin,
        )

    def _ratios(self, key: Key, equal: Replicates) -> dict[str, Any]:
        """Returns the ratios of a group as fields of its row: those over the dense
        curve, that over the dense arms of its own shape and that over all of them."""
        (arm, tokens), of = key, self.groups[key]
        relative, _ = self.costs[key]
        ratios = of_wall = None
        if relative is not None:
            ratios = relative * (tokens / equal)
        if self.at_widths is None:
            dense_runs = [run for of in self.dense.values() for run in of]
            of_wall = wall_ratios(of, dense_runs, equal)
        spread = any(len(of) > 1 for of in self.groups.values())
        return {
            **ratio_fields("R_tokens", tokens / equal, spread),
            **ratio_fields("R", ratios, spread),
            **ratio_fields("R_wall", of_wall, spread),
            **self._over(key, "own", self._of_own_shape(key), spread),
            **self._over(key, "best", self.rivals.arms - {arm}, spread),
        }

    def _over(
        self, key: Key, name: str, rivals: Collection[str], has_spread: bool
    ) -> dict[str, Any]:
        """Returns the ratio of a group over the best of some dense arms as fields of
        its row, with this name in theirs."""
        relative, _ = self.costs[key]
        best = self.rivals.best(self.losses[key], rivals)
        ratios = likely = None
        if relative is not None and best.name is not None:
            ratios = relative * key[1] / best.costs
            likely = relative * key[1] / best.likely if best.is_least else None
        return {
            **ratio_fields(f"R_{name}", ratios, has_spread and not best.is_least),
            f"{name}_dense": best.name,
            f"{name}_extrapolated": best.extrapolated,
            f"{name}_is_least": best.is_least,
            **ratio_fields(f"R_{name}_likely", likely, has_spread),
        }

    def _of_own_shape(self, key: Key) -> set[str]:
        """Returns the dense arms whose model is that of an arm with sparse steps; none
        for a dense arm."""
        if all(map(_is_dense, self.groups[key])):
            return set()
        model = self.groups[key][0].config.model
        same = {
            arm for (arm, _), of in self.groups.items() if of[0].config.model == model
        }
        return same & self.rivals.arms

    def _bound(self, key: Key) -> float | None:
        """Returns `R_at_most` of a group."""
        longest = max(self.dense, key=lambda of: of[1])
        own, dense = (self.costs[of][0] for of in (key, longest))
        is_below = np.mean(self.losses[key] < self.losses[longest]) >= 0.95
        if own is None or dense is None or not is_below:
            return None
        of_arm, of_dense = (np.ravel(of)[0] for of in (own, dense))
        return float(of_arm * key[1] / (of_dense * longest[1]))

    def _source_of(self, key: Key) -> str | None:
        """Returns the source of a group's R, its row's `speed_from`."""
        relative, measured = self.costs[key]
        if measured or relative is None:
            return "measured" if measured else None
        if key[0] in self.speeds:
            return self.speed_from
        widths = self.at_widths
        return "FLOPs" if widths is None else f"predicted for {widths.name}"


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
