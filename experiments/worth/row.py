"""What experiments/equal_loss.py says of one arm at one length."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Row:
    """One arm at one length, over its seeds.

    R is a ratio of costs to one loss, the arm's over the dense model's: `R_tokens` in
    tokens, `R` in seconds of steps, `R_wall` in wall-clock seconds of the whole run.
    `R_own` is R over the dense arm whose model has the arm's own shape, and `R_best`
    over the dense arm, of whatever shape, that needs the fewest seconds for that loss.
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
    R_own: float | None
    R_own_low: float | None
    R_own_high: float | None
    own_dense: str | None
    """The dense arm of `R_own`, of several with that model the one that needs the
    fewest seconds; None where the row's arm has no sparse steps, and where no such arm
    reaches the loss."""
    own_extrapolated: bool
    """Whether that arm reaches the loss before its shortest run or beyond its longest,
    so that `R_own` rests on how its loss falls there."""
    own_is_least: bool
    """Whether `R_own` is only the least that it can be, as `best_is_least` says of
    `R_best`: the dense arm with that model has a single length."""
    R_own_likely: float | None
    """What R_own is then if the loss of that arm falls as those of other dense arms do;
    None elsewhere."""
    R_own_likely_low: float | None
    R_own_likely_high: float | None
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
