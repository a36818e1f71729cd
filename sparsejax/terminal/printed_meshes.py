"""The ranking of meshes that a plan prints: what each is predicted to cost, and why
others cannot be."""

from collections.abc import Sequence

from rich.table import Table

from sparsejax.config import MeshConfig, ModelConfig, TrainConfig
from sparsejax.config.schedule import model_of, phases
from sparsejax.cost_model import CALIBRATED_ON, JAX_SHARE, Links
from sparsejax.feed_forward.sparsity import FFNSparsity
from sparsejax.reports.planned_meshes import PlannedMesh, Ranking
from sparsejax.terminal import console
from sparsejax.terminal.console import say
from sparsejax.terminal.printed_shares import break_even_speeds

ROWS = 8
"""The most meshes that are printed."""


def say_meshes(config: TrainConfig, ranking: Ranking, links: Links) -> None:
    """Prints the fastest meshes, what is assumed of GPUs and links, why the first is
    the fastest, and one line for each kind of mesh that cannot be."""
    many = ranking.devices > 1
    if ranking.planned:
        console.STDOUT.print(_table(config, ranking))
        if (gain := whole_run(config, ranking.planned[0])) is not None:
            say(gain)
    else:
        say(f"no mesh of {ranking.devices:,} {ranking.device.kind} can train this run")
    say(
        f"predicted, not measured: GEMMs, attention and memory at the shares of the "
        f"data sheet's peaks that were reached in {CALIBRATED_ON}, FFN kernels by "
        f"their own times where the tables have them"
    )
    if many:
        say(
            f"assumed links: {links.nvlink_gb_per_s:g} GB/s of NVLink between the "
            f"{links.devices_per_host} GPUs of a host, {links.network_gb_per_s:g} GB/s "
            f"of network for each GPU between hosts, {links.nvlink_latency_us:g} and "
            f"{links.network_latency_us:g} us a hop (--links.*)"
        )
    if many and ranking.planned:
        say(why_fastest(ranking.planned))
        say(_communication(ranking.planned[0]))
    for refused in ranking.refused.values():
        mesh, reason = refused[0]
        say(f"refused, {len(refused):,} of the meshes: {in_words(mesh)}: {reason}")


def whole_run(config: TrainConfig, planned: PlannedMesh) -> str | None:
    """Returns in words how fast the sparse steps are, what the run takes of the time of
    as many dense steps, and what that is worth; None where no step is sparse or none is
    dense."""
    names = _columns(config)
    dense = planned.steps.get((config.model, FFNSparsity()))
    speeds = [
        f"{name} steps {dense.total / planned.steps[way].total:.2f} times as fast as "
        f"dense ones"
        for way, name in names.items()
        if dense is not None and not way[1].is_dense
    ]
    if dense is None or not speeds:
        return None
    share = planned.step_seconds / dense.total
    told = (
        f"{', '.join(speeds)}; the run takes {share:.2f} of the time of as many dense "
        f"steps"
    )
    if (speeds_needed := break_even_speeds(config)) is not None:
        low, high = speeds_needed
        told += (
            f". Its loss is another: with this recipe runs had the loss of the best "
            f"dense one in as many seconds where sparse steps were {low} to {high} "
            f"times as fast (docs/results.md)"
        )
    return told


def in_words(mesh: MeshConfig) -> str:
    """Returns a mesh as the plan names it."""
    axes = f"data {mesh.data} x fsdp {mesh.fsdp} x tensor {mesh.tensor}"
    return axes + _stage(mesh)


def _stage(mesh: MeshConfig) -> str:
    """Returns the stage of ZeRO of a mesh with fsdp, where it is not 3."""
    says = mesh.fsdp > 1 and mesh.zero_stage < 3
    return f" (ZeRO {mesh.zero_stage})" if says else ""


def why_fastest(planned: Sequence[PlannedMesh]) -> str:
    """Returns in a sentence what the first mesh has before the second, or that it is
    the only one."""
    first, *others = planned
    if not others:
        return f"{in_words(first.mesh)} is the only mesh that can be"
    second = others[0]
    computed = [of.step_seconds - of.exposed_seconds for of in (first, second)]
    gains = {
        "computes": (computed[0], computed[1]),
        "waits for other devices": (first.exposed_seconds, second.exposed_seconds),
    }
    does, (own, other) = max(gains.items(), key=lambda of: of[1][1] - of[1][0])
    return (
        f"fastest: {in_words(first.mesh)}, which {does} {1e3 * own:,.1f} ms a step "
        f"where the second {does} {1e3 * other:,.1f} ms"
    )


def _table(config: TrainConfig, ranking: Ranking) -> Table:
    shown = ranking.planned[:ROWS]
    title = f"predicted on {ranking.devices:,} x {ranking.device.kind}"
    if len(ranking.planned) > len(shown):
        title += f", the fastest {len(shown)} of {len(ranking.planned)} meshes"
    table = Table(title=title)
    table.add_column("data x fsdp x tensor", no_wrap=True)
    columns = _columns(config)
    names = ("parts", *(f"{of} ms" for of in columns.values()))
    for name in (*names, "tokens/s", "exposed", "GiB"):
        # On a narrow terminal a number goes on in a second line: none is cut off.
        table.add_column(name, justify="right", overflow="fold")
    for of in shown:
        mesh = of.mesh
        table.add_row(
            f"{mesh.data} x {mesh.fsdp} x {mesh.tensor}{_stage(mesh)}",
            f"{of.micro_batches:,}",
            *(f"{1e3 * of.steps[way].total:,.0f}" for way in columns),
            f"{ranking.tokens_per_step / of.step_seconds / 1e3:,.0f}k",
            f"{of.exposed_share:.1%}",
            f"{of.memory_bytes / 2**30:,.1f}",
        )
    table.caption = "parts: micro-batches of a step"
    if (has := ranking.device.memory_bytes) is not None:
        taken = JAX_SHARE * has / 2**30
        table.caption += f"; GiB of {taken:,.0f} that JAX takes"
    return table


def _communication(first: PlannedMesh) -> str:
    """Returns how long the collectives of the fastest mesh take, by axis, in the step
    of the run that waits for them longest."""
    step = max(first.steps.values(), key=lambda step: step.exposed)
    taken = ", ".join(
        f"{axis} {1e3 * seconds:,.0f} ms"
        for axis, seconds in step.communication.items()
    )
    return (
        f"its collectives in a step of {1e3 * step.total:,.0f} ms: {taken}; "
        f"{1e3 * step.exposed:,.0f} ms of them are exposed"
    )


def _columns(config: TrainConfig) -> dict[tuple[ModelConfig, FFNSparsity], str]:
    """Returns a name for each way in which the run computes: "dense" for the dense
    steps of the whole model, else that of the first phase with it."""
    names: dict[tuple[ModelConfig, FFNSparsity], str] = {}
    for phase in phases(config):
        model = model_of(phase, config.model)
        for when, sparsity in zip(("", ", between"), phase.sparsities, strict=False):
            is_dense = sparsity.is_dense and model == config.model
            name = "dense" if is_dense else f"{phase.kind}{when}"
            names.setdefault((model, sparsity), name)
    return names
