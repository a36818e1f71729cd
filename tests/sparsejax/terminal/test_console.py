"""The output of the main job: its plan, its progress and its summary."""

import io
import re
from dataclasses import asdict, replace
from typing import get_args

import jax
import pytest
from rich.console import Console

from pallas_kernels import tuning
from pallas_kernels.device import Device
from pallas_kernels.tuned_gemm import TunedGemm
from sparsejax import cost_model
from sparsejax.config import MeshConfig, PhaseConfig, RecipeName, TrainConfig
from sparsejax.config.presets import PRESETS
from sparsejax.config.schedule import phases
from sparsejax.cost_model import parameter_count
from sparsejax.feed_forward.sparsity import FFNSparsity
from sparsejax.launch import job
from sparsejax.reports import metrics
from sparsejax.sparsity.patterns import NM
from sparsejax.terminal import console, printed_plan
from tests.support.commands import run_train
from tests.support.devices import hopper
from tests.support.micro_run import micro_config

pytestmark = pytest.mark.usefixtures("quick")


# The plan.


def test_a_plan_says_that_a_model_cannot_be_exported(capsys):
    assert run_train(["--preset", "tiny", "--dry-run", "--model.qkv-bias"]) == 0
    shown = capsys.readouterr().out
    assert "transformers is this model's: qkv_bias with activation='relu2'" in shown
    assert "biases 1,536, head" in shown


@pytest.mark.parametrize("recipe", get_args(RecipeName))
@pytest.mark.parametrize("preset", PRESETS)
def test_a_dry_run_prints_the_plan_and_allocates_nothing(
    preset, recipe, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    before = {id(array) for array in jax.live_arrays()}
    assert run_train(["--preset", preset, "--recipe", recipe, "--dry-run"]) == 0
    assert {id(array) for array in jax.live_arrays()} <= before
    assert list(tmp_path.iterdir()) == []
    shown = capsys.readouterr().out
    model = PRESETS[preset]().model
    assert f"parameters: {parameter_count(model).total:,} " in shown
    length = PRESETS[preset]().data.sequence_length
    flops = cost_model.flops_per_token(model, length)
    assert f"{flops.total() / 1e6:,.2f}" in shown
    assert f"FFN share of a dense step's FLOPs: {flops.ffn_share():.1%}" in shown
    assert "memory, GiB per device" in shown and "1  Y1 = X W1" in shown
    assert "gathered weights" not in shown
    uses_them = recipe not in ("s2d", "dense")
    assert ("assumed on a GPU with fast kernels" in shown) == uses_them
    assert ("predicted by FLOPs: " in shown) == (recipe == "s2d")
    assert ("is a batch of 4 dense GEMMs" in shown) == (recipe == "s2d")
    before = {"dense": [], "s2d": ["sparse"]}.get(recipe, ["warm-up", "sparse"])
    for kind in ("warm-up", "sparse", "dense"):
        assert (f"│ {kind} " in shown) == (kind in [*before, "dense"])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("", "2:4 along tokens (magnitude, permuted, 5% of the features dense)"),
        ("--phases.no-permute-tokens", "(magnitude, in order, 5%"),
        ("--phases.dense-features 0", "permuted, 0% of the features dense)"),
        ("--phases.no-mask-reuse", "2:4, selected anew in the backward"),
    ],
)
def test_the_plan_tells_ablations_apart(flags, said, capsys):
    ablation = "--recipe activations --phases.token-sparsity magnitude --dry-run"
    assert run_train([*ablation.split(), *flags.split()]) == 0
    assert said in capsys.readouterr().out


ON_64 = "--mesh.data 4 --mesh.fsdp 8 --mesh.tensor 2 --batch-size 512".split()


def test_a_dry_run_plans_for_devices_that_are_not_here(capsys):
    arguments = "--preset llama-1b --micro-batches 8 --dry-run".split()
    assert run_train([*arguments, *ON_64]) == 0
    shown = capsys.readouterr().out
    assert "mesh: data 4 x fsdp 8 x tensor 2 = 64 devices, planned as if" in shown
    assert "micro-batches: 8 of 64 sequences, 2 on a device (as named)" in shown
    assert f"cpu, {jax.device_count()} here; compute bfloat16" in shown
    config = PRESETS["llama-1b"]()
    mesh = MeshConfig(data=4, fsdp=8, tensor=2)
    tokens = 64 * 4096 // 32
    rows = {
        cells[0]: cells[1:]
        for line in shown[shown.index("memory, GiB") :].splitlines()
        if len(cells := [cell.strip() for cell in line.split("│")[1:-1]]) == 3
    }
    sparsities = {phase.kind: phase.sparsity for phase in phases(config)}
    for column, kind in enumerate(("dense", "sparse")):
        sparsity = sparsities[kind]
        memory = cost_model.memory_bytes(
            config.model, tokens_per_device=tokens, mesh=mesh, sparsity=sparsity
        )
        for use, size in (asdict(memory) | {"total": memory.total}).items():
            assert rows[use][column] == f"{size / 2**30:,.2f}"
        sent, once = (
            cost_model.communication_bytes(config.model, of, sparsity, 8, tokens)
            for of in (mesh, replace(mesh, zero_stage=1))
        )
        assert (
            f"  {kind}: gathered weights {sent.gathered_weights / 2**30:,.2f}, "
            f"reduced gradients {sent.reduced_gradients / 2**30:,.2f}, "
            f"reduced activations {sent.reduced_activations / 2**30:,.2f}, "
            f"exchanged tokens {sent.exchanged_tokens / 2**30:,.2f}, "
            f"total {sent.total / 2**30:,.2f}; "
            f"at --mesh.zero-stage 1 {once.total / 2**30:,.2f}\n"
        ) in shown


def test_the_paths_of_a_mesh_are_those_of_one_device_s_gemms(capsys, monkeypatch):
    sizes = []

    def record(*arguments, **options):
        decisions = metrics.ffn_decisions(*arguments, **options)
        first = decisions[0].spec
        sizes.append((first.tokens, first.d_in, first.d_out))
        return decisions

    monkeypatch.setattr(printed_plan, "ffn_decisions", record)
    assert run_train("--dry-run --mesh.data 4 --mesh.tensor 2".split()) == 0
    assert sizes == [(32 * 128 // 4, 128, 512 // 2)] * 2
    assert "mesh: data 4 x fsdp 1 x tensor 2 = 8 devices" in capsys.readouterr().out


ON_TENSOR_CORES = "mosaic_sm90: 2:4 weight on the sparse tensor cores (50%)"
MASKED = "xla: dense GEMM over the masked weight; skips nothing (100%)"


def test_a_sparse_phase_that_is_no_faster_than_dense_is_told(capsys, monkeypatch):
    def shown(micro_batches: int, *, pack_us: float = 60.0) -> str:
        packed = replace(known, pack_us=pack_us)
        monkeypatch.setattr(tuning, "entries", lambda kind: {gemm: packed})
        batch = f"--batch-size {micro_batches} --micro-batches {micro_batches}"
        one_device = "--preset llama-1b --recipe weights --mesh.data 1 --dry-run"
        assert run_train(f"{batch} {one_device}".split()) == 0
        return capsys.readouterr().out

    gemm = TunedGemm(tokens=4096, d_in=2048, d_out=8192)
    known = hopper.timed(gemm, 50.0, 100.0, 60.0)
    hopper.pretend(monkeypatch)
    once = shown(1)
    assert "packing: 220 us a layer and micro-batch, dense 200 us (0.91" in once
    assert "no faster than dense at this size: take more tokens" in once
    twice = shown(2)
    assert "packing: 160 us a layer and micro-batch, dense 200 us (1.25" in twice
    assert "faster than dense at" not in twice
    # Faster by less than the rest of a step loses.
    lost = shown(2, pack_us=90.0)
    assert "packing: 190 us a layer and micro-batch, dense 200 us (1.05" in lost
    assert "a step of this model about 0.99 times" in lost
    assert "no faster than dense at this size" in lost


@pytest.mark.parametrize(
    ("sparse_us", "path"),
    [
        (54.5, f"{ON_TENSOR_CORES}; measured 109 us, dense 164 us, packing 10 us"),
        (91.0, f"{MASKED}; measured mosaic_sm90 182 us, dense 164 us, packing 10 us"),
        (None, ON_TENSOR_CORES),
    ],
    ids=["faster", "slower", "not measured"],
)
def test_the_times_behind_a_choice_are_said(sparse_us, path, capsys, monkeypatch):
    gemm = TunedGemm(tokens=2048, d_in=2048, d_out=8192)
    known = {}
    if sparse_us is not None:
        known[gemm] = hopper.timed(gemm, sparse_us, 82.1, 10.0)
    monkeypatch.setattr(tuning, "entries", lambda kind: known)
    hopper.pretend(monkeypatch)
    # Twice the tokens that were timed, in one micro-batch.
    one_sequence = "--batch-size 1 --micro-batches 1 --mesh.data 1 --dry-run"
    llama = "--preset llama-1b --recipe weights"
    assert run_train(f"{llama} {one_sequence}".split()) == 0
    shown = capsys.readouterr().out
    paths = [line for line in shown.splitlines() if "1  Y1 = X W1" in line]
    assert paths == [
        "  1  Y1 = X W1       xla: dense GEMM by cuBLAS (100%)",
        f"  1  Y1 = X W1       {path}",
    ]
    assert ("measured: each GEMM alone" in shown) == (sparse_us is not None)
    # GEMMs 1 and 3, each with a packing; what lost is not run, and not counted.
    together = "the sparse ones with packing: 238 us a layer and micro-batch, dense 328"
    assert (together in shown) == (sparse_us == 54.5)
    # Two GEMMs of six, in 238 us for 328; the rest of the FLOPs takes 4 % longer.
    ffn = share_of_ffn("llama-1b")
    step = 1 / ((1 - ffn) * 1.04 + ffn * (4 + 2 * 238 / 328) / 6)
    assert (f"a step of this model about {step:.2f} times" in shown) == (
        sparse_us == 54.5
    )
    assert "no faster than dense at this size" not in shown


def test_an_estimate_is_said_with_what_it_comes_from(capsys, monkeypatch):
    gemm = TunedGemm(tokens=2048, d_in=2048, d_out=4096)
    known = hopper.timed(gemm, 20.0, 30.0, 10.0)
    monkeypatch.setattr(tuning, "entries", lambda kind: {gemm: known})
    hopper.pretend(monkeypatch)
    one_sequence = "--batch-size 1 --micro-batches 1 --mesh.data 1 --dry-run"
    assert run_train(f"--preset llama-1b --recipe weights {one_sequence}".split()) == 0
    shown = capsys.readouterr().out
    times = (
        "estimated 80 us, dense 120 us, packing 20 us from 2048 tokens x 2048 x 4096"
    )
    assert f"{ON_TENSOR_CORES}; {times}\n" in shown
    assert "estimated: in proportion to a GEMM that is nowhere larger" in shown
    assert "measured: each GEMM alone" not in shown


def planned(capsys, *arguments: str) -> str:
    assert run_train([*arguments, "--dry-run"]) == 0
    return capsys.readouterr().out


def memory_row(shown: str, use: str) -> list[str]:
    *_, row = (line for line in shown.splitlines() if line.startswith(f"│ {use} "))
    return [cell.strip() for cell in row.split("│")[2:-1]]


def test_a_plan_for_gpus_that_are_not_here(capsys):
    """On whatever this machine has: kernels, mesh and memory are theirs."""
    llama = "--preset", "llama-1b", "--recipe", "weights", "--micro-batches", "8"
    h100s = "--device", "NVIDIA H100 80GB HBM3", "--devices", "8"
    shown = planned(capsys, *llama, *h100s)
    assert "device: NVIDIA H100 80GB HBM3, 8 that need not be here" in shown
    assert "attention: cudnn" in shown
    assert "mesh: data 8 x fsdp 1 x tensor 1 = 8 devices, planned from tables" in shown
    assert "2:4 weight on the sparse tensor cores (50%); measured " in shown
    assert memory_row(shown, "the GPU has") == ["80.00", "80.00"]
    assert memory_row(shown, "of which JAX takes") == ["60.00", "60.00"]
    assert memory_row(shown, "fits") == ["yes", "yes"]
    sharded = planned(capsys, *llama, *h100s, "--mesh.fsdp", "4", "--mesh.tensor", "2")
    assert "mesh: data 1 x fsdp 4 x tensor 2 = 8 devices" in sharded
    assert "the GPU has" in sharded
    crowded = planned(capsys, *llama[:-1], "2", *h100s)
    total = [float(of) for of in memory_row(crowded, "total")]
    assert min(total) > 60 and memory_row(crowded, "fits") == ["no", "no"]
    h200 = planned(capsys, *llama, "--device", "NVIDIA H200", "--mesh.fsdp", "4")
    assert "= 4 devices" in h200 and "; measured " in h200
    a100 = planned(capsys, *llama, "--device", "NVIDIA A100-SXM4-80GB")
    assert "needs a Hopper GPU, not NVIDIA A100-SXM4-80GB" in a100
    assert "= 1 device, " in a100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--device", "plan for GPUs that need not be here; add --dry-run"),
        ("--devices", "plan for GPUs that need not be here; add --dry-run"),
        ("--dry-run --devices", "--devices 8 does not say which GPUs; add --device"),
        ("--dry-run --mesh.fsdp 3 --device --devices", "the number of devices, 8"),
        ("--dry-run --device", "a device named 'H100'; take one of 'NVIDIA H100 80GB"),
        ("--dry-run --device --devices", "--devices 0 is not 1 or more"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(arguments, message, capsys):
    count = "0" if "0 is not" in message else "8"
    name = "H100" if "'H100'" in message else "NVIDIA H100 80GB HBM3"
    values = {"--device": ["--device", name], "--devices": ["--devices", count]}
    words = [word for given in arguments.split() for word in values.get(given, [given])]
    assert run_train(words) == 1
    error = capsys.readouterr().err
    assert error.startswith("ValueError: ") and message in error


def test_times_of_another_gpu_are_said_to_be_no_more_than_that(capsys, monkeypatch):
    untuned, tuned = "NVIDIA H100 NVL", "NVIDIA H100 80GB HBM3"
    hopper.see_device(monkeypatch, Device.named(untuned))
    one_device = "--preset llama-1b --recipe weights --mesh.data 1 --dry-run"
    assert run_train(one_device.split()) == 0
    shown = capsys.readouterr().out
    assert f"cut up as on {tuned} (50%); estimated " in shown
    guess = f"measured on {tuned}, not on {untuned}: a guess until it is"
    assert shown.count(guess) == 1
    assert "a GEMM that is nowhere larger" not in shown
    assert "measured: each GEMM alone" not in shown


def share_of_ffn(preset: str) -> float:
    config = PRESETS[preset]()
    length = config.data.sequence_length
    return cost_model.flops_per_token(config.model, length).ffn_share()


def test_a_mesh_left_open_is_planned_on_at_least_one_replica(capsys):
    assert run_train("--dry-run --mesh.fsdp 32 --batch-size 64".split()) == 0
    shown = capsys.readouterr().out
    assert "mesh: data 1 x fsdp 32 x tensor 1 = 32 dev" in shown
    assert "micro-batches: 1 of 64 sequences, 2 on a device (chosen for this" in shown


def test_the_devices_that_train_are_said_with_their_processes(capsys):
    config = TrainConfig(batch_size=32 * jax.device_count())
    printed_plan.announce(config)
    shown = capsys.readouterr().out
    here = jax.device_count()
    assert f"device: cpu, {here} of {here}; compute float32" in shown
    assert f"mesh: data {here} x fsdp 1 x tensor 1 = {here} device" in shown
    assert ", 1 process\n" in shown
    assert "memory, GiB" not in shown


@pytest.mark.parametrize("recipe", ["two-four", "paper"])
def test_nothing_is_printed_of_a_plan_that_cannot_be(recipe, capsys):
    wrong = ["--recipe", recipe, "--model.d-hidden", "6"]
    assert run_train([*wrong, "--dry-run"]) == 1
    assert run_train(["--backend", "mosaic_sm90", "--dry-run"]) == 1
    assert capsys.readouterr().out == ""


# What is printed.


def test_a_resume_says_from_where_and_what_was_damaged(text, tmp_path, capsys):
    folder = tmp_path / "run"
    job.main(micro_config(text), folder)
    newest = folder / "checkpoints" / "step_00000012"
    size = (newest / "record.json").stat().st_size
    (newest / "record.json").write_text("{}")
    capsys.readouterr()
    assert run_train(["--resume", str(folder)]) == 0
    shown = capsys.readouterr().out.splitlines()
    used = folder / "checkpoints" / "step_00000010"
    assert f"step 10: continues from {used}" in shown
    assert (
        f"{newest}.damaged is damaged (record.json has 2 bytes instead of {size}) and "
        f"set aside; the run goes on from step 10"
    ) in shown


def test_text_is_printed_as_it_is_brackets_included(capsys):
    console.say("text='[a-z]*.txt' [/nothing] [bold]x")
    console.show_sample("a[b]c\\", "[/red]\x1b[2J\n")
    shown = capsys.readouterr().out
    assert "text='[a-z]*.txt' [/nothing] [bold]x" in shown
    assert "a[b]c\\[/red]\ufffd[2J" in shown


def test_an_error_is_one_line_of_standard_error_and_status_one(capsys):
    error = FileNotFoundError("no [folder]")
    assert console.fail(error) == 1
    assert console.fail(error, "make [it]") == 1
    shown = capsys.readouterr()
    assert shown.err == "FileNotFoundError: no [folder]\nFileNotFoundError: make [it]\n"
    assert shown.out == ""


def test_an_error_is_red(monkeypatch):
    shown = io.StringIO()
    terminal = Console(
        file=shown, force_terminal=True, color_system="standard", no_color=False
    )
    monkeypatch.setattr(console, "STDERR", terminal)
    console.fail(ValueError("no"))
    assert shown.getvalue() == "\x1b[31mValueError: no\x1b[0m\n"


def test_a_perplexity_beyond_float_is_infinite(capsys):
    where = {"phase": 0, "kind": "dense", "step": 3}
    console.summarise(
        [
            {"event": "start", "unigram_loss": 3.0} | where,
            {"event": "validation", "loss": 1e4} | where,
        ]
    )
    assert "inf" in capsys.readouterr().out


def test_a_summary_needs_no_record_that_is_lost(capsys):
    where = {"phase": 0, "kind": "dense", "step": 3}
    console.summarise([{"event": "validation", "loss": 1.5} | where])
    assert "1.5000" in capsys.readouterr().out
    console.summarise([])
    assert "unigram" not in capsys.readouterr().out


def test_the_plan_counts_the_FLOPs_of_a_smaller_model(capsys):
    schedule = (
        PhaseConfig(name="narrow", share=0.5, d_hidden=128, layers=2),
        PhaseConfig(name="sparse", share=0.25, sparsity=FFNSparsity(weights=NM(2, 4))),
        PhaseConfig(name="whole"),
    )
    config = TrainConfig().with_schedule(schedule)
    printed_plan.announce(config, predicted=True, assumed=True)
    shown = capsys.readouterr().out
    small = replace(config.model, d_hidden=128, layers=2)
    of = [
        cost_model.flops_per_token(model, 128).total()
        for model in (small, config.model)
    ]
    share = of[0] / of[1]
    assert f"d_hidden 128, 2 layers: {share:.2f} of the FLOPs" in shown
    spared = 0.5 * (1 - share)
    assert f"smaller model spare {spared:.0%} of a dense run's time" in shown
    said = re.search(r"sparse step ([\d.]+)x, whole run ([\d.]+)x at 25%", shown)
    assert said is not None
    step, whole = map(float, said.groups())
    wanted = 1 / (0.25 / step + 0.25 + 0.5 * share)
    assert whole == pytest.approx(wanted, abs=0.01)


def test_steps_of_a_smaller_model_are_no_measure_of_sparse_ones(capsys):
    step = {"event": "step", "phase": 0, "sparse": False, "tokens_per_second": 900.0}
    small = step | {"d_hidden": 16, "layers": 2}
    dense = step | {"phase": 1, "tokens_per_second": 100.0}
    sparse = step | {"phase": 2, "sparse": True, "tokens_per_second": 150.0}
    records = [small, dense, sparse] * 3
    console.say_speedup(records)
    assert "dense ones 100: 1.50 times as fast" in capsys.readouterr().out
    console.say_speedup(records[:-1])
    assert not capsys.readouterr().out
