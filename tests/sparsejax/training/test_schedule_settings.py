"""Schedules in files and in code: how they are read, and what is refused."""

import json
from dataclasses import replace

import pytest

from sparsejax.config import Interleaved, PhaseConfig, RecipeConfig, TrainConfig
from sparsejax.config.config_file import from_json, read_schedule, to_json
from sparsejax.config.schedule import phases
from sparsejax.feed_forward.sparsity import FFNSparsity
from sparsejax.sparsity.patterns import NM, VNM, name_of, named_pattern

TWO_FOUR = FFNSparsity(weights=NM(2, 4), activations=NM(2, 4))
VENOM = FFNSparsity(
    weights=NM(2, 4), activations=VNM(8, 2, 16), weight_gradients="expert_columns"
)
"""Four experts of 16 neurons each in the micro run."""


def with_schedule(config: TrainConfig, *schedule: PhaseConfig, **settings):
    config = config.with_schedule(schedule)
    return replace(config, phases=replace(config.phases, **settings))


TOML = """
[[phase]]
name = "begin"
share = 0.25
[[phase]]
name = "experts"
share = 0.5
sparsity.weights = "2:4"
sparsity.activations = "8:2:16"
sparsity.weight_gradients = "expert_columns"
every = { steps = 8 }
[[phase]]
name = "end"
learning_rate_scale = 2
"""
OF_TOML = (
    PhaseConfig(name="begin", share=0.25),
    PhaseConfig(name="experts", share=0.5, sparsity=VENOM, every=Interleaved(steps=8)),
    PhaseConfig(name="end", learning_rate_scale=2.0),
)


def test_phases_are_read_from_toml_and_from_json(tmp_path):
    (tmp_path / "a.toml").write_text(TOML)
    assert read_schedule(tmp_path / "a.toml") == OF_TOML
    config = TrainConfig().with_schedule(OF_TOML)
    written = to_json(config)
    assert from_json(json.loads(json.dumps(written))) == config
    plain = written["phases"]["schedule"]
    assert plain[1]["sparsity"]["activations"] == "8:2:16"
    assert plain[1]["every"]["sparsity"]["weights"] is None
    (tmp_path / "a.json").write_text(json.dumps({"phase": plain}))
    assert read_schedule(tmp_path / "a.json") == OF_TOML


def test_a_pattern_has_a_name_and_a_name_a_pattern():
    for pattern, name in ((NM(2, 4), "2:4"), (VNM(128, 2, 32), "128:2:32")):
        assert (name_of(pattern), named_pattern(name)) == (name, pattern)
    for name in ("2", "2:4:8:16", "2:x", "", ":", "2:4 ", "-2:4", "9" * 99 + ":4"):
        with pytest.raises(ValueError, match="names no pattern; write N:M as '2:4'"):
            named_pattern(name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "setting phase is missing"),
        ("phase = []", r"it has no phase, \[\[phase\]\]"),
        ("[[phase]]\nshare = 1", r"setting phase\[0\]\.name is missing; add it"),
        ("[[phase]]\nname = 'a'\nlength = 1", r"phase\[0\]\.length is unknown"),
        (
            "[[phase]]\nname = 'a'\nshare = 2",
            r"phase\[0\]: phases.schedule.share=2.0 ",
        ),
        ("[[phase]]\nname = ''", "phases.schedule.name='' must be a word or some"),
        (
            "[[phase]]\nname = 'a'\nsparsity.weights = '2:5'",
            r"phase\[0\]\.sparsity: weights=NM\(n=2, m=5\) is not 2:4",
        ),
        (
            "[[phase]]\nname = 'a'\nsparsity.weights = '8:2:16'",
            r"sparsity\.weights='8:2:16' must be a pattern, such as '2:4', or null",
        ),
        (
            "[[phase]]\nname = 'a'\nsparsity.activations = 'dense'",
            r"activations='dense': 'dense' names no pattern; write",
        ),
        (
            "[[phase]]\nname = 'a'\nsparsity.skip_blocks = true",
            r"phase\[0\]\.sparsity: skip_blocks=True needs a V:N:M",
        ),
        ("[[phase]]\nname = 'a'\nevery = 8", r"phase\[0\]\.every=8 must be an object"),
        (
            "[[phase]]\nname = 'a'\nsparsity.weights = '2:4'\n"
            "sparsity.router = 'learned'",
            "router='learned' has no meaning in phase 'a', with weights='2:4', "
            "activations=None and token_sparsity=None; leave it out",
        ),
        (
            "[[phase]]\nname = 'a'\nsparsity.activations = '2:4'\n"
            "sparsity.dense_features = 0.5",
            "dense_features=0.5 has no meaning in phase 'a', with weights=None, "
            "activations='2:4' and token_sparsity=None",
        ),
        (
            "[[phase]]\nname = 'a'\nevery.steps = 4\n"
            "every.sparsity.exact_gradients = true",
            "exact_gradients=True has no meaning in phase 'a'",
        ),
        (
            "[[phase]]\nname = 'a'\nevery.steps = 1",
            r"every\.steps=1 must be at ",
        ),
        ("[[phase]]\nname = 'a'\n[[phase]]\nname = 'a'", "several phases named 'a'"),
        ("[[phase]]\nname = 'a'\n[[phase]]\nname = 'b'", "2 phases without a share"),
        ("[[phase]]\nname = 'a'\nshare = 0.5", "sum to 0.5 and not to 1; change one"),
        ("[[phase", "does not hold a schedule"),
    ],
)
def test_a_file_that_holds_no_schedule_is_refused(text, message, tmp_path):
    path = tmp_path / "a.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        read_schedule(path)
    assert str(caught.value).startswith(f"{path} does not hold a schedule: ")
    with pytest.raises(ValueError, match="there is no schedule .*; give a file"):
        read_schedule(tmp_path / "b.toml")


def two(**settings) -> tuple[PhaseConfig, ...]:
    return (PhaseConfig(name="a", share=0.5, **settings), PhaseConfig(name="b"))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: RecipeConfig(schedule=two(), warmup_share=0.5),
            "phases.warmup_share=0.5 has no meaning beside phases.schedule",
        ),
        (
            lambda: RecipeConfig(schedule=two(), sparsity=VENOM),
            r"phases.sparsity \(weights=.* has no meaning beside phases.schedule",
        ),
        (
            lambda: RecipeConfig(schedule=({"name": "a"},)),
            "phases.schedule=.* must be of type tuple",
        ),
        (
            lambda: TrainConfig(recipe="paper", phases=RecipeConfig(schedule=two())),
            "recipe='paper' has no meaning beside phases.schedule",
        ),
        (
            lambda: with_schedule(TrainConfig(), *two(), recluster_every=5),
            "phases.recluster_every=5 has no meaning in a schedule without experts",
        ),
        (
            lambda: PhaseConfig(
                name="a",
                sparsity=VENOM,
                every=Interleaved(
                    steps=2, sparsity=replace(VENOM, activations=VNM(8, 2, 32))
                ),
            ),
            "phase 'a' has steps with 4 experts and steps with 8, but its neurons lie",
        ),
    ],
)
def test_what_cannot_be_in_a_schedule_is_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("sparsity", [TWO_FOUR, VENOM])
def test_a_swiglu_network_refuses_what_its_phases_cannot_be(sparsity):
    base = TrainConfig(recipe="weights")
    base = replace(base, model=replace(base.model, activation="swiglu"))
    message = "phase 'a' makes activations 2:4, which .*'swiglu'.* as in '128:4:32'"
    for schedule in (
        two(sparsity=sparsity),
        two(every=Interleaved(steps=2, sparsity=sparsity)),
    ):
        with pytest.raises(ValueError, match=message):
            base.with_schedule(schedule)
    inside = replace(VENOM, activations=VNM(8, 4, 16))
    assert base.with_schedule(two(sparsity=inside)).phases.schedule


def test_a_phase_whose_pattern_does_not_divide_the_widths_is_refused():
    every = Interleaved(steps=2, sparsity=replace(VENOM, activations=VNM(8, 2, 44)))
    with pytest.raises(ValueError, match="d_hidden=512 is not a multiple of m=44"):
        phases(with_schedule(TrainConfig(), *two(every=every)))
