"""The ranking of meshes that a plan prints."""

import re
from pathlib import Path

import pytest

from sparsejax.command import main
from sparsejax.cost_model import BREAK_EVEN_SPEEDS

ROOT = Path(__file__).parents[3]
H100S = ["--device", "NVIDIA H100 80GB HBM3"]


def planned(capsys, *arguments: str) -> str:
    assert main.run(["plan", *H100S, *arguments]) == 0
    return capsys.readouterr().out


def table(shown: str) -> dict[str, list[str]]:
    """The cells of each row by its mesh, in the order of the rows."""
    mesh = r"\d+ x \d+ x \d+(?: \(ZeRO \d\))?"
    rows = re.findall(rf"^│ ({mesh}) +│(.*)│$", shown, re.MULTILINE)
    return {mesh: [cell.strip() for cell in cells.split("│")] for mesh, cells in rows}


def test_a_plan_ranks_the_meshes_of_its_gpus(capsys):
    llama = "--preset", "llama-1b", "--recipe", "paper"
    shown = planned(capsys, *llama, "--devices", "32")
    # The mesh that a run would have is planned as before.
    assert "mesh: data 32 x fsdp 1 x tensor 1 = 32 devices, planned from" in shown
    assert "predicted on 32 x NVIDIA H100 80GB HBM3, the fastest 8 of" in shown
    rows = table(shown)
    assert len(rows) == 8
    dense = [float(cells[1].replace(",", "")) for cells in rows.values()]
    sparse = [float(cells[2].replace(",", "")) for cells in rows.values()]
    assert all(map(float.__lt__, sparse, dense))
    rates = [
        float(cells[3].removesuffix("k").replace(",", "")) for cells in rows.values()
    ]
    assert rates == sorted(rates, reverse=True)
    found = r"fastest: data (\d+) x fsdp (\d+) x tensor (\d+(?: \(ZeRO \d\))?)"
    fastest = " x ".join(re.search(found, shown).groups())
    assert fastest == next(iter(rows))
    assert any("ZeRO 1" in mesh for mesh in rows)
    assert "predicted, not measured: " in shown and "2026-11-25" in shown
    assert "assumed links: 360 GB/s of NVLink between the 8 GPUs" in shown
    assert "of them are exposed" in shown
    assert re.search(r"refused, \d+ of the meshes: .*model.heads=16 is not a", shown)


def test_a_mesh_that_is_left_open_and_cannot_be_replicas_is_the_fastest(capsys):
    # 256 sequences for 512 GPUs.
    shown = planned(capsys, "--preset", "llama-1b", "--devices", "512")
    fastest = next(iter(table(shown)))
    data, fsdp, tensor = fastest.split(" x ")
    assert f"mesh: data {data} x fsdp {fsdp} x tensor {tensor} = 512 dev" in shown
    assert "batch_size=256 is not a multiple of mesh.data x mesh.fsdp" in shown


@pytest.mark.parametrize("devices", ["1", "2"])
def test_one_gpu_has_no_links(devices, capsys):
    shown = planned(capsys, "--preset", "wide-200m", "--devices", devices)
    # On two, fsdp has two stages: one micro-batch has nothing to add up.
    assert len(table(shown)) == (1 if devices == "1" else 4)
    assert ("assumed links" in shown) == ("fastest: " in shown) == (devices == "2")


def test_a_loop_over_layers_has_no_stage_that_sums_once(capsys):
    seven = ["--preset", "llama-7b", "--model.scan-layers"]
    looped = planned(capsys, *seven, "--devices", "64")
    assert "ZeRO 2" in looped and "ZeRO 1" not in looped
    # Nor does the plan name the stage that such a run would be refused.
    split = planned(capsys, *seven, "--devices", "8", "--mesh.fsdp=8")
    assert "at --mesh.zero-stage 2" in split and "zero-stage 1" not in split


def test_the_links_are_flags(capsys):
    slow = ["--links.network-gb-per-s", "5", "--links.devices-per-host", "4"]
    shown = planned(capsys, "--preset", "llama-1b", "--devices", "8", *slow)
    assert "between the 4 GPUs of a host, 5 GB/s of network for each" in shown
    assert main.run(["train", *slow]) == 1
    assert "--links.* say how fast a plan takes the links" in capsys.readouterr().err
    wrong = ["--links.network-gb-per-s", "0"]
    with pytest.raises(SystemExit) as refused:
        main.run(["plan", *H100S, "--devices", "8", *wrong])
    assert refused.value.code == 2
    assert "network_gb_per_s=0.0 is not above 0" in capsys.readouterr().err


@pytest.mark.parametrize(("recipe", "known"), [("experts", True), ("paper", False)])
def test_a_plan_says_what_its_steps_make_of_the_run(recipe, known, capsys):
    shown = planned(capsys, "--preset", "llama-1b", "--recipe", recipe)
    assert "assumed on a GPU" not in shown
    ((_, dense, sparse, *_),) = table(shown).values()
    dense, sparse = (float(cell.replace(",", "")) for cell in (dense, sparse))
    told = re.search(
        r"sparse steps (\S+) times as fast as dense ones; the run takes (\S+) of", shown
    )
    assert float(told[1]) == pytest.approx(dense / sparse, abs=0.006)
    share = 51_000 / 60_000
    took = share * sparse / dense + 1 - share
    assert float(told[2]) == pytest.approx(took, abs=0.006)
    low, high = BREAK_EVEN_SPEEDS
    assert (f"sparse steps were {low} to {high} times as fast" in shown) == known


def test_a_plan_of_a_dense_run_compares_no_steps(capsys):
    shown = planned(capsys, "--preset", "llama-1b", "--recipe", "dense")
    assert "times as fast as dense ones" not in shown


def test_what_breaks_even_is_what_the_results_say():
    table = (ROOT / "docs" / "results.md").read_text().split("breaks even at |\n", 1)[1]
    rows = table.split("\n\n", 1)[0].splitlines()[1:]
    found = [
        float(at) for row in rows for at in re.findall(r"(\d\.\d+)(?=[^|]*\|$)", row)
    ]
    assert len(found) >= 6
    assert (min(found), max(found)) == BREAK_EVEN_SPEEDS
