"""What a plan says of the share of a step that can be saved, and of what that gains."""

from sparsejax import cost_model
from sparsejax.config import TrainConfig
from sparsejax.config.schedule import Phase, model_of
from sparsejax.feed_forward.sparsity import FFNSparsity
from sparsejax.terminal.console import say
from sparsejax.terminal.printed_gemms import names_of


def break_even_speeds(config: TrainConfig) -> tuple[float, float] | None:
    """Returns how many times as fast as dense ones the sparse steps of a run must be to
    be worth their loss, the least and the greatest of the comparisons that were made;
    None for a recipe of which that is not known."""
    known = config.recipe == "experts" and not config.phases.schedule
    return cost_model.BREAK_EVEN_SPEEDS if known else None


def say_shares(config: TrainConfig, planned: tuple[Phase, ...]) -> None:
    """Prints what share of a step the FFN takes, and what share of a run phases with a
    smaller model spare."""
    flops = cost_model.flops_per_token(config.model, config.data.sequence_length)
    say(f"FFN share of a dense step's FLOPs: {flops.ffn_share():.1%}")
    spared = _spared_by_smaller_models(config, planned)
    if spared:
        say(
            f"predicted by FLOPs: phases with a smaller model spare {spared:.0%} of a "
            f"dense run's time. Not a measurement"
        )


def say_assumed(config: TrainConfig, planned: tuple[Phase, ...]) -> None:
    """Prints how fast sparse steps and the run would be on a GPU whose kernels have no
    overhead; nothing where no step is sparse."""
    shares: dict[FFNSparsity, float] = {}
    for phase in planned:
        for share, sparsity in zip(phase.shares, phase.sparsities, strict=True):
            of_run = share * phase.steps / config.steps
            shares[sparsity] = shares.get(sparsity, 0.0) + of_run
    sparse = {of: share for of, share in shares.items() if not of.is_dense}
    if not sparse:
        return
    flops = cost_model.flops_per_token(config.model, config.data.sequence_length)
    names, took, described = names_of(planned), 0.0, []
    for sparsity, share in sparse.items():
        factors = cost_model.gemm_speedups(config.model, sparsity)
        step = cost_model.predicted_speedup(flops.ffn_share(), factors)
        took += share / step
        assumed = ", ".join(f"{factor:.3g}" for factor in factors)
        described.append(
            f"(GEMMs {assumed} times as fast, no overhead): {names[sparsity]} step "
            f"{step:.2f}x"
        )
    share = sum(sparse.values())
    spared = _spared_by_smaller_models(config, planned)
    whole = 1 / (1 / cost_model.whole_run_speedup(share / took, share) - spared)
    say(
        f"assumed on a GPU with fast kernels {', '.join(described)}, whole run "
        f"{whole:.2f}x at {share:.0%} sparse steps. Not a measurement"
    )


def _spared_by_smaller_models(config: TrainConfig, planned: tuple[Phase, ...]) -> float:
    """Returns the share of a dense run's FLOPs that the phases of a model that grows do
    without before it has grown."""
    length = config.data.sequence_length
    return sum(
        phase.steps
        / config.steps
        * (1 - cost_model.relative_flops(of, config.model, length))
        for phase in planned
        if (of := model_of(phase, config.model)) != config.model
    )
