"""Which meshes a run could have, and in which order."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from pallas_kernels.device import CPU, Device
from sparsejax.config import MeshConfig
from sparsejax.config.presets import PRESETS
from sparsejax.cost_model import Links
from sparsejax.reports.planned_meshes import meshes_of, rank_meshes
from sparsejax.terminal.printed_meshes import why_fastest

H100 = Device.named("NVIDIA H100 80GB HBM3")
LLAMA = replace(PRESETS["llama-1b"](), recipe="dense")


def test_every_mesh_is_considered_once_at_each_stage():
    meshes = list(meshes_of(12))
    assert len(meshes) == len(set(meshes))
    by_stage = [
        {replace(of, zero_stage=3) for of in meshes if of.zero_stage == stage}
        for stage in (1, 2, 3)
    ]
    assert by_stage[0] == by_stage[1] == {of for of in by_stage[2] if of.fsdp > 1}
    assert len(by_stage[2]) == 18
    assert all(mesh.devices == 12 for mesh in meshes)


def test_meshes_are_ranked_and_refused_with_a_reason():
    ranking = rank_meshes(LLAMA, H100, 32, Links())
    times = [of.step_seconds for of in ranking.planned]
    assert times == sorted(times)
    refused = [mesh for meshes in ranking.refused.values() for mesh, _ in meshes]
    assert len(refused) + len(times) == len(list(meshes_of(32)))
    ((mesh, reason),) = ranking.refused["model.heads"]
    assert mesh == MeshConfig(data=1, fsdp=1, tensor=32)
    assert "model.heads=16 is not a multiple of mesh.tensor=32" in reason
    assert ranking.has(MeshConfig(data=32)) and not ranking.has(mesh)
    # Sums over tensor are waited for, and of two micro-batches those over replicas.
    first, second = (of.mesh for of in ranking.planned[:2])
    assert first == MeshConfig(data=1, fsdp=32, zero_stage=1)
    assert second == MeshConfig(data=2, fsdp=16, zero_stage=1)
    assert ranking.planned[0].micro_batches == 2
    assert "which waits for other devices" in why_fastest(ranking.planned)
    # Of one micro-batch they hide, and replicas have more parameters to step. There is
    # nothing to add up: stage 1 would gain nothing.
    whole = rank_meshes(replace(LLAMA, batch_size=64), H100, 32, Links()).planned
    assert whole[0].micro_batches == 1
    assert [of.mesh for of in whole[:2]] == [
        replace(first, zero_stage=2),
        replace(second, zero_stage=2),
    ]
    assert all(of.mesh.zero_stage > 1 for of in whole if of.micro_batches == 1)
    assert "which computes" in why_fastest(whole)


def test_micro_batches_shrink_until_they_fit():
    small = replace(H100, memory_bytes=40 * 2**30)
    most, few = (
        next(of for of in rank_meshes(LLAMA, device, 8, Links()).planned if fits(of))
        for device in (H100, small)
    )
    assert few.micro_batches > most.micro_batches
    assert few.memory_bytes <= 30 * 2**30 < most.memory_bytes
    with_none = rank_meshes(LLAMA, replace(H100, memory_bytes=2**30), 8, Links())
    assert not with_none.planned
    (_, reason), *_ = with_none.refused["too little memory"]
    assert "for micro-batches of one sequence on a device, and JAX takes 75%" in reason


def fits(planned):
    return planned.mesh == MeshConfig(data=1, fsdp=8)


def test_a_slower_network_costs_the_meshes_that_cross_it():
    fast, slow = (
        rank_meshes(LLAMA, H100, 32, Links(network_gb_per_s=rate))
        for rate in (50.0, 0.5)
    )
    assert slow.planned[0].step_seconds > fast.planned[0].step_seconds
    assert slow.planned[0].exposed_share > fast.planned[0].exposed_share


@pytest.mark.parametrize("device", [CPU, Device.named("NVIDIA H800")])
def test_a_device_of_unknown_speed_is_not_planned_for(device):
    assert rank_meshes(LLAMA, device, 8, Links()) is None


def rows_of_the_guide() -> list[list[str]]:
    guide = Path(__file__).parents[3] / "docs" / "many-gpus.md"
    table = guide.read_text().split("| preset | GPUs | batch |")[1].split("\n\n")[0]
    rows = [
        [cell.strip(" `") for cell in line.strip("|").split("|")]
        for line in table.splitlines()[2:]
    ]
    for above, row in pairwise(rows):
        row[0] = row[0] or above[0]
    return rows


@pytest.mark.parametrize("row", rows_of_the_guide(), ids=lambda row: "-".join(row[:2]))
def test_the_guides_table_is_what_is_predicted(row):
    preset, devices, batch = row[0], *(int(of.replace(",", "")) for of in row[1:3])
    config = PRESETS[preset]()
    paper = replace(config.phases.sparsity_of("paper"), skip_blocks=True)
    config = replace(
        config,
        recipe="paper",
        phases=replace(config.phases, sparsity=paper),
        model=replace(config.model, scan_layers=False),
        batch_size=batch,
    )
    best = rank_meshes(config, H100, devices, Links()).planned[0]
    mesh = best.mesh
    sparse, dense = sorted(1e3 * of.total for of in best.steps.values())
    assert row[3:] == [
        f"{mesh.data} x {mesh.fsdp} x {mesh.tensor}, {mesh.zero_stage}",
        str(best.micro_batches),
        f"{dense:,.0f}",
        f"{sparse:,.0f}",
        f"{config.tokens_per_step / best.step_seconds / 1e3:,.0f}",
        f"{best.exposed_share:.1%}",
        f"{best.memory_bytes / 2**30:.1f}",
    ]
