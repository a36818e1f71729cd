"""Templates, formats, settings and states that checkpoints refuse, each with its
reason."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax.checkpoints.checkpoint import Checkpoints
from tests.support.files.saved_states import assert_same, save_steps, state_of


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ({"w": jnp.ones((2, 3))}, r"at state\['step'\] the checkpoint has int32 \(\)"),
        (
            {**state_of(0), "b": jnp.ones(2)},
            r"at state\['b'\] the checkpoint has nothing, the template float32 \(2,\)",
        ),
        (
            {**state_of(0), "w": jnp.ones((3, 2))},
            r"at state\['w'\] .* float32 \(2, 3\), the template float32 \(3, 2\)",
        ),
        (
            {**state_of(0), "w": jnp.ones((2, 3), jnp.bfloat16)},
            r"the template bfloat16 \(2, 3\); build the template from the settings",
        ),
        (
            {**state_of(0), "step": jax.random.key(0)},
            r"at state\['step'\] .* int32 \(\), the template key<fry> \(\)",
        ),
        ({**state_of(0), "w": None}, r"at state\['w'\] .* the template nothing"),
        ({**state_of(0), "w": 3}, r"state\['w'\] of the template is int; every leaf"),
    ],
)
def test_a_template_that_does_not_fit_is_refused(tmp_path, template, message):
    save_steps(tmp_path, 1)
    with pytest.raises(ValueError, match=message):
        Checkpoints(tmp_path).restore(template=template)


def test_another_kind_of_key_is_refused(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, jax.random.key(0, impl="rbg"))
    with pytest.raises(ValueError, match=r"key<rbg> \(\), the template key<fry> \(\)"):
        Checkpoints(tmp_path).restore(template=jax.random.key(0))


def test_64_bits_are_refused_rather_than_cut(tmp_path):
    with jax.enable_x64(True):
        state = {"count": jnp.int64(2**40)}
        template = jax.eval_shape(lambda: state)
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(1, state)
        assert_same(Checkpoints(tmp_path).restore(template=template).state, state)
    with pytest.raises(ValueError, match=r"state\['count'\] .* is int64.*enable_x64"):
        Checkpoints(tmp_path).restore(template=template)


def rewrite_record(folder: Path, text: str) -> None:
    record = folder / "record.json"
    assert json.loads(record.read_text())["format_version"] == 2
    record.write_text(text)


@pytest.mark.parametrize(
    ("files", "version"),
    [
        (["record/metadata"], 1),  # format 1 had no manifest
        (["record.json", "manifest.json"], 7),
    ],
)
def test_an_unknown_format_is_refused_and_never_deleted(tmp_path, files, version):
    for file in files:
        path = tmp_path / "step_00000001" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"format_version": version}))
    message = rf"format_version={version} of .* which reads 2; use the version that"
    with pytest.raises(ValueError, match=message):
        Checkpoints(tmp_path).restore(template=state_of(0))
    with pytest.raises(ValueError, match=message):
        Checkpoints(tmp_path).set_aside_damaged()
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(2, state_of(2))
    assert Checkpoints(tmp_path).steps() == [1, 2]


@pytest.mark.parametrize("text", ["", '{"format_ver', "[]", "{}"])
def test_a_damaged_record_is_named(tmp_path, text):
    save_steps(tmp_path, 1, 2)
    rewrite_record(tmp_path / "step_00000002", text)
    with pytest.raises(ValueError, match=r"step_00000002 is not a checkpoint of"):
        Checkpoints(tmp_path).metadata()
    assert Checkpoints(tmp_path).restore(1, template=state_of(0)).step == 1


def test_a_folder_that_orbax_did_not_write_is_named(tmp_path):
    (tmp_path / "step_00000001").mkdir()
    with pytest.raises(ValueError, match=r"step_00000001 is not a checkpoint of"):
        Checkpoints(tmp_path).restore(template={})


def test_missing_checkpoints_are_named(tmp_path):
    for folder in (tmp_path, tmp_path / "absent"):
        reader = Checkpoints(folder)
        assert reader.latest_step() is None
        assert reader.steps() == []
        with pytest.raises(ValueError, match=r"no complete checkpoint in .*start a"):
            reader.restore(template={})
    save_steps(tmp_path, 1, 3)
    with pytest.raises(ValueError, match=r"of step=2 in .*; there are \[1, 3\]"):
        Checkpoints(tmp_path).path(2)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((4, {}), {}, r"step=4 is below step 5, the newest checkpoint in .*; continue"),
        ((-1, {}), {}, r"step=-1 is negative"),
        ((6, {"n": 3}), {}, r"state\['n'\] is int, not jax.Array; convert it"),
        ((6, {"n": np.ones(2)}), {}, r"state\['n'\] is ndarray, not jax.Array"),
        ((6, {}), {"metadata": {"a": jnp.ones(2)}}, r"metadata cannot be stored as"),
        ((6, {}), {"data_state": b"bytes"}, r"data_state cannot be stored as JSON"),
    ],
)
def test_what_cannot_be_saved_is_refused(tmp_path, arguments, options, message):
    save_steps(tmp_path, 5)
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(ValueError, match=message):
            checkpoints.save(*arguments, **options)
    assert Checkpoints(tmp_path).steps() == [5]


def test_unusable_settings_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"keep=0 would delete every checkpoint"):
        Checkpoints(tmp_path, keep=0)
    with pytest.raises(ValueError, match=r"'gs://bucket/run' is a URL"):
        Checkpoints("gs://bucket/run")
    with pytest.raises(ValueError, match=r"keep_every=-1 is negative; give a number"):
        Checkpoints(tmp_path, keep_every=-1)
