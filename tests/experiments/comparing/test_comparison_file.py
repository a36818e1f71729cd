"""A comparison's file: its runs, what is refused, and the files that there are."""

from dataclasses import replace
from pathlib import Path

import pytest

from experiments.comparing import comparison_file
from experiments.comparing.comparison_file import kept_steps, read_comparison
from sparsejax.config import (
    Interleaved,
    OptimizerConfig,
    PhaseConfig,
    RecipeConfig,
    TrainConfig,
)
from sparsejax.config.config_file import changed_settings
from sparsejax.config.presets import PRESETS
from sparsejax.config.schedule import phases
from sparsejax.cost_model import parameter_count
from sparsejax.feed_forward.sparsity import DENSE, FFNSparsity
from sparsejax.sparsity.patterns import NM, VNM
from sparsejax.training.branch import Branch
from tests.support.micro_run import with_phases

FILES = Path(comparison_file.__file__).parents[1] / "comparisons"


def write(folder: Path, text: str) -> Path:
    path = folder / "some.toml"
    path.write_text(text)
    return path


def test_a_file_gives_runs_over_a_shared_base(tmp_path):
    path = write(
        tmp_path,
        """
        seeds = [3, 1]
        baseline = "b"
        [base]
        preset = "gpt-124m"
        steps = 50
        phases = { warmup_share = 0.125 }
        [runs.a]
        recipe = "paper"
        phases.sparsity.activations = "128:2:32"
        optimizer.clip_norm = 2
        [runs.b]
        recipe = "dense"
        steps = 60
        """,
    )
    comparison = read_comparison(path)
    assert (comparison.name, comparison.baseline) == ("some", "b")
    trials = comparison.trials
    order = [("b", 3), ("a", 3), ("b", 1), ("a", 1)]
    assert [(trial.name, trial.seed) for trial in trials] == order
    assert trials[0].place == "b/seed-3"
    gpt = PRESETS["gpt-124m"]()
    seeded = replace(gpt, seed=3, data=replace(gpt.data, seed=3))
    shared = with_phases(replace(seeded, steps=50), warmup_share=0.125)
    assert trials[0].config == replace(shared, recipe="dense", steps=60)
    optimizer = replace(gpt.optimizer, clip_norm=2.0)
    paper = replace(shared, recipe="paper", optimizer=optimizer)
    assert trials[1].config == with_phases(paper, activations=VNM(128, 2, 32))


def test_without_a_baseline_it_is_the_first(tmp_path):
    path = write(tmp_path, "seeds = [0]\n[runs.b]\n[runs.a]")
    comparison = read_comparison(path)
    assert comparison.baseline == "b"
    assert [trial.name for trial in comparison.trials] == ["b", "a"]


def test_a_run_may_have_some_of_the_seeds(tmp_path):
    path = write(
        tmp_path, "seeds = [2, 0, 1]\n[runs.b]\n[runs.a]\nseeds = [1, 2]\nsteps = 9"
    )
    trials = read_comparison(path).trials
    order = [("b", 2), ("a", 2), ("b", 0), ("b", 1), ("a", 1)]
    assert [(trial.name, trial.seed) for trial in trials] == order
    assert [trial.config.steps for trial in trials if trial.name == "a"] == [9, 9]


BRANCHES = """
seeds = [0, 1]
baseline = "dense-long"
[base]
steps = 400
optimizer = { schedule = "wsd", decay_share = 0.0 }
checkpoint_every = 100
keep_every = 200
[runs.sparse-long]
branch = "sparse"
steps = 800
recipe = "two-four"
optimizer.decay_share = 0.5
[runs.dense-long]
branch = "dense@200"
recipe = "dense"
optimizer.decay_share = 0.5
[runs.dense]
recipe = "dense"
[runs.longest]
seeds = [1]
branch = "sparse-long@600"
steps = 1000
[runs.sparse]
"""


def test_branches_come_after_the_runs_that_they_begin_with(tmp_path):
    comparison = read_comparison(write(tmp_path, BRANCHES))
    of_one = ["dense", "dense-long", "sparse", "sparse-long", "longest"]
    order = [(name, 0) for name in of_one[:-1]] + [(name, 1) for name in of_one]
    assert [(trial.name, trial.seed) for trial in comparison.trials] == order
    by_name = {trial.name: trial for trial in comparison.trials}
    assert by_name["dense"].branch_in(tmp_path) is None
    trunks = {trial.name: (trial.trunk, trial.begin) for trial in comparison.trials}
    assert trunks == {
        "dense": (None, 0),
        "dense-long": ("dense", 200),
        "sparse": (None, 0),
        "sparse-long": ("sparse", 400),
        "longest": ("sparse-long", 600),
    }
    folder = tmp_path / "sparse-long" / "seed-1"
    assert by_name["longest"].branch_in(tmp_path) == Branch(folder, 600)
    assert by_name["sparse-long"].config.steps == 800
    some = comparison.only(["longest"], [1])
    assert [trial.name for trial in some.trials] == of_one
    some = comparison.only(["dense"], [0])
    assert [trial.name for trial in some.trials] == ["dense", "dense-long"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ("dense@200", "dens@200"),
            "runs.dense-long.branch='dens@200' must be another",
        ),
        (('"dense@200"', "3"), "runs.dense-long.branch=3 must be another of the runs"),
        (
            ("[runs.dense]", "[runs.dense]\nbranch = 'dense-long'"),
            "leads back to dense",
        ),
        (
            ("dense@200", "dense@100"),
            "runs.dense-long, seed 0: dense ends without a checkpoint of step 100; it "
            "keeps 200, 300, 400; .* set runs.dense.keep_every",
        ),
        (("[runs.sparse]", "[runs.sparse]\nsteps = 800"), "steps=800 leaves nothing"),
        (
            ("[runs.sparse]", "[runs.sparse]\nseeds = [0]"),
            "sparse-long, seed 1: it branches from sparse, which is not trained with",
        ),
        (
            ("[runs.dense]", "[runs.dense]\nmodel.layers = 2"),
            "dense-long, seed 0: dense holds a run whose model.layers is 2, and a ",
        ),
        (("[base]", "[base]\nbranch = 'dense'"), "setting branch is unknown"),
    ],
)
def test_a_branch_that_cannot_be_is_refused(change, message, tmp_path):
    path = write(tmp_path, BRANCHES.replace(*change))
    with pytest.raises(ValueError, match=message):
        read_comparison(path)


def test_a_run_may_have_a_schedule_instead_of_its_presets_phases(tmp_path):
    path = write(
        tmp_path,
        """
        seeds = [0]
        [base]
        preset = "wide-200m"
        recipe = "dense"
        [runs.a]
        [[runs.b.phases.schedule]]
        name = "sparse"
        share = 0.5
        sparsity = { activations = "2:4" }
        every = { steps = 8 }
        [[runs.b.phases.schedule]]
        name = "end"
        """,
    )
    _, b = read_comparison(path).trials
    schedule = (
        PhaseConfig(
            name="sparse",
            share=0.5,
            sparsity=FFNSparsity(activations=NM(2, 4)),
            every=Interleaved(steps=8),
        ),
        PhaseConfig(name="end"),
    )
    assert b.config == PRESETS["wide-200m"]().with_schedule(schedule)
    path = write(tmp_path, path.read_text().replace("2:4", "2:5"))
    with pytest.raises(
        ValueError, match=r"runs.b, seed 0: .*schedule\[0\]\.sparsity: activations"
    ):
        read_comparison(path)


def test_a_run_may_have_the_former_name_of_its_recipe(tmp_path):
    text = 'seeds = [0]\n[base]\nsteps = 40\n[runs.a]\nrecipe = "default"\n'
    (a,) = read_comparison(write(tmp_path, text)).trials
    assert a.config == TrainConfig(recipe="two-four", steps=40)


def test_the_kept_steps_are_those_of_the_keep_policy():
    config = TrainConfig(
        steps=1000,
        checkpoint_every=150,
        keep_checkpoints=3,
        phases=RecipeConfig(sparse_share=0.5),
    )
    # Switches at 50 and 550, the end, and of the others the newest.
    assert kept_steps(config) == [50, 550, 750, 900, 1000]
    assert kept_steps(replace(config, checkpoint_every=0)) == [50, 550, 1000]
    sparser = replace(config, recipe="dense", keep_every=300, keep_checkpoints=1)
    assert kept_steps(sparser) == [300, 600, 900, 1000]
    # A branch has a checkpoint where it begins, and none of before.
    assert kept_steps(config, 400) == [550, 750, 900, 1000]
    assert kept_steps(replace(config, checkpoint_every=0), 400) == [400, 550, 1000]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seeds = [0]\n[runs.a]\n[runs.b]\nseeds = 0", "runs.b.seeds=0 must be a list"),
        (
            "seeds = [0]\n[runs.a]\n[runs.b]\nseeds = [1]",
            r"seeds has 1, .* \[0\]",
        ),
        ("seeds = [0, 1]\n[runs.a]\nseeds = [0]", r"runs.a is what .* \[0, 1\]; leave"),
        ("seeds = [0", "Unclosed array|unclosed array"),
        ("[runs.a]", r"seeds=None must be a list of different integers, such as"),
        ("seeds = []\n[runs.a]", r"seeds=\[\] must be a list"),
        ("seeds = [1, 1]\n[runs.a]", r"seeds=\[1, 1\] must be a list of different"),
        ("seeds = [true]\n[runs.a]", r"seeds=\[True\] must be a list"),
        ("seeds = [-1]\n[runs.a]", r"runs.a, seed -1: data.seed=-1 must be at least 0"),
        ("seeds = [0]", r"runs=None must be tables, \[runs.NAME\], at least one"),
        ("seeds = [0]\nruns.a = 3", r"runs.a=3 must be a table of settings"),
        ("seeds = [0]\nbase = 3\n[runs.a]", "base=3 must be a table of settings"),
        ("seeds = [0]\n[runs.'../a']", r"the run '../a' is to be a folder; name it"),
        ("seeds = [0]\n[runs.'']", "the run '' is to be a folder"),
        ("seeds = [0]\nbaseline = 'c'\n[runs.a]\n[runs.b]", "give one of a, b$"),
        ("seeds = [0]\nsteps = 3\n[runs.a]", "steps is none of seeds, baseline, base"),
        ("seeds = [0]\n[runs.a]\nseed = 1", "runs.a sets a seed, which every run"),
        ("seeds = [0]\n[base.data]\nseed = 1\n[runs.a]", "base sets a seed"),
        ("seeds = [0]\n[runs.a]\npreset = ['x']", r"runs.a, seed 0: setting preset="),
        ("seeds = [0]\n[runs.a]\nsteps = 'x'", "runs.a, seed 0: setting steps='x' m"),
        ("seeds = [0]\n[runs.a]\nwidth = 1", "runs.a, seed 0: setting width is unk"),
        ("seeds = [0]\n[runs.a.phases.sparsity]\nmask_reuse = 0", "mask_reuse=0 must"),
        (
            "seeds = [0]\n[runs.a]\nrecipe = 'paper'\nphases.experts = 8",
            "setting phases.experts has its place in phases.sparsity, .* write phases."
            'sparsity.activations, as in "128:2:32" for eight experts',
        ),
        (
            "seeds = [0]\n[runs.a]\nphases.mask_reuse = false",
            "phases.mask_reuse has its place in .*; write phases.sparsity.mask_reuse$",
        ),
        ("seeds = [0]\n[runs.a]\ndata = 3", "setting data=3 must be a table of set"),
        ("seeds = [0]\n[runs.a.steps]\nx = 3", r"setting steps={'x': 3} must be no"),
        (
            "seeds = [0]\n[base]\nphases = 3\n[runs.a]\nphases.experts = 8",
            r"runs.a, seed 0: setting phases={'experts': 8} must be no table",
        ),
        ("seeds = [0]\n[runs.a]\nmodel.d_hidden = 6", "d_hidden=6 is not a multiple"),
        (
            "seeds = [0]\n[runs.a]\n[runs.b]\ndeterministic = true",
            "deterministic is a setting of the whole process, .* set it in base",
        ),
    ],
)
def test_a_file_that_cannot_be_is_refused_by_its_name(text, message, tmp_path):
    path = write(tmp_path, text)
    with pytest.raises(ValueError, match=message) as caught:
        read_comparison(path)
    assert str(caught.value).startswith(f"{path} does not hold a comparison: ")
    with pytest.raises(ValueError, match="there is no comparison .*; give a TOML file"):
        read_comparison(tmp_path / "none.toml")


def test_dense_and_sparse_differ_in_what_their_names_say():
    comparison = read_comparison(FILES / "venom-134m.toml")
    places = [trial.place for trial in comparison.trials]
    assert places.count("dense/seed-1") == 1 and len(places) == 8
    parameters = parameter_count(comparison.trials[0].config.model)
    assert 130e6 < parameters.total < 140e6
    by_name = {trial.name: trial.config for trial in comparison.trials}
    dense = by_name["dense"]
    for name, config in by_name.items():
        changed = set(changed_settings(dense, config)) - {"seed", "data.seed"}
        if name.startswith("dense"):
            assert changed <= {"steps"} and f"{config.steps}" in f"{name} 600"
        else:
            assert config.steps == dense.steps and config.phases.sparse_share == 0.5
            assert all(of == "recipe" or of.startswith("phases.") for of in changed)


def test_the_ablations_differ_in_what_their_names_say():
    comparison = read_comparison(FILES / "ablations.toml")
    assert comparison.baseline == "dense"
    seeds = {trial.seed for trial in comparison.trials}
    assert len(seeds) == 2 and len(comparison.trials) == 12
    first = [trial for trial in comparison.trials if trial.seed == 0]
    full = FFNSparsity(activations=NM(2, 4), token_sparsity="magnitude")
    expected = {
        "dense": [("dense", DENSE)],
        "full": [("warm-up", DENSE), ("sparse", full)],
        "no-warm-up": [("sparse", full)],
        "naive-backward": [
            ("warm-up", DENSE),
            ("sparse", replace(full, dense_features=0.0)),
        ],
        "no-permutation": [
            ("warm-up", DENSE),
            ("sparse", replace(full, permute_tokens=False)),
        ],
        "no-mask-reuse": [
            ("warm-up", DENSE),
            ("sparse", replace(full, mask_reuse=False)),
        ],
    }
    planned = {
        trial.name: [(phase.kind, phase.sparsity) for phase in phases(trial.config)]
        for trial in first
    }
    assert planned == expected
    alike = {
        replace(trial.config, recipe="dense", phases=TrainConfig().phases)
        for trial in first
    }
    decay = OptimizerConfig(schedule="cosine")
    assert alike == {TrainConfig(recipe="dense", sample_length=0, optimizer=decay)}


def test_runs_of_other_lengths_may_share_an_arm(tmp_path):
    path = tmp_path / "some.toml"
    path.write_text(
        'seeds = [0]\n[runs.dense]\narm = "all"\n[runs.long]\nsteps = 2000\n'
        'arm = "all"\n[runs.other]\n'
    )
    arms = {trial.name: trial.arm for trial in read_comparison(path).trials}
    assert arms == {"dense": "all", "long": "all", "other": None}
    path.write_text("seeds = [0]\n[runs.dense]\narm = 3\n")
    with pytest.raises(ValueError, match=r"runs\.dense\.arm=3 must be a name"):
        read_comparison(path)


def test_runs_that_are_left_out_this_time_stay_listed():
    whole = read_comparison(FILES / "wide-tiny.toml")
    first = whole.only(["wide-63"], []).listing({})
    assert list(first["runs"]) == ["dense-100", "wide-63"]
    again = whole.only(["two-of-eight"], []).listing(first)
    assert list(again["runs"]) == ["dense-100", "wide-63", "two-of-eight"]
    assert again["arms"]["wide-63"] == "wide"
    seeds = read_comparison(FILES / "wide-5m.toml")
    second = seeds.only([], [1]).listing(seeds.only([], [0]).listing({}))
    assert second["runs"]["wide-60"] == ["wide-60/seed-0", "wide-60/seed-1"]
    assert second == seeds.only([], [1]).listing(second)
