"""Checkpoints: bit for bit, atomic, and refused with a reason where they do not fit."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sparsejax.checkpoints import checkpoint
from sparsejax.checkpoints.checkpoint import Checkpoints

KEEP_ALL = None


class Moments(NamedTuple):
    mu: jax.Array
    nu: jax.Array | None


def bits(array: jax.Array) -> tuple:
    """What has to be equal for two leaves to be the same to the last bit."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return str(array.dtype), bits(jax.random.key_data(array))
    return str(array.dtype), array.shape, np.asarray(array).tobytes()


def assert_same(found, expected) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for got in jax.tree.leaves(found):
        assert isinstance(got, jax.Array)
    assert jax.tree.map(bits, found) == jax.tree.map(bits, expected)


def state_of(value: float) -> dict:
    return {"w": jnp.full((2, 3), value, jnp.float32), "step": jnp.int32(value)}


def save_steps(folder: Path, *steps: int, **options) -> None:
    with Checkpoints(folder, keep=KEEP_ALL) as checkpoints:
        for step in steps:
            checkpoints.save(step, state_of(step), **options)


def run_child(script: str, folder: Path, **environment: str):
    """Runs a script that finds the folder in its first argument."""
    return subprocess.run(
        [sys.executable, "-c", script, str(folder)],
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
        cwd=Path(checkpoint.__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_every_kind_of_leaf_comes_back_bit_for_bit(tmp_path):
    nans = jnp.array([0x7FC01234, 0xFFC00001, 0x7F800000, 0x80000000], jnp.uint32)
    state = {
        "float32": jax.lax.bitcast_convert_type(nans, jnp.float32),
        "negative zero": jnp.full((64, 64), -0.0),
        "bfloat16": jnp.arange(7, dtype=jnp.bfloat16) / 3,
        "float16": jnp.float16(1e-7),
        "ints": [jnp.int32(-5), jnp.uint8(200), jnp.int8([-128, 127])],
        "bool": jnp.array([[True], [False]]),
        "moments": Moments(mu=jnp.ones(3), nu=None),
        "no entries": jnp.zeros((0, 3), jnp.bfloat16),
        "keys": (jax.random.key(3), jax.random.split(jax.random.key(1, impl="rbg"), 2)),
        "nothing": None,
        "empty": ({}, [], ()),
        "by number": {7: jnp.arange(2), 70: jnp.arange(3)},
        "a.b/c['d']": jnp.arange(3),
    }
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, state, blocking=True)
    reader = Checkpoints(tmp_path)
    for template in (state, jax.eval_shape(lambda: state)):
        restored = reader.restore(template=template)
        assert_same(restored.state, state)
        assert restored.step == 3
    drawn = jax.random.normal(restored.state["keys"][0], (4,))
    assert bits(drawn) == bits(jax.random.normal(state["keys"][0], (4,)))


def test_a_part_of_a_checkpoint_is_read_and_the_rest_is_not(tmp_path):
    save_steps(tmp_path, 3)
    w = {"w": state_of(3)["w"]}
    assert_same(Checkpoints(tmp_path).restore(template=w, part=True).state, w)
    with pytest.raises(ValueError, match="the template nothing"):
        Checkpoints(tmp_path).restore(template=w)
    other = {"v": jnp.zeros((2, 3))}
    with pytest.raises(ValueError, match="the checkpoint has nothing"):
        Checkpoints(tmp_path).restore(template=other, part=True)


@settings(
    deadline=None,
    max_examples=12,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_array_comes_back_bit_for_bit(tmp_path_factory, data):
    dtype = data.draw(st.sampled_from(["float32", "float16", "int32", "uint8", "bool"]))
    shape = data.draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    array = jnp.asarray(data.draw(hnp.arrays(dtype, shape)))
    folder = tmp_path_factory.mktemp("any")
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(0, array)
    assert_same(Checkpoints(folder).restore(template=array).state, array)


class Variable(NamedTuple):
    value: Any


def test_centres_are_found_under_the_name_that_older_checkpoints_gave_them(tmp_path):
    centres = jnp.arange(6.0).reshape(2, 3)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(2), "centres": Variable(centres)})
    now = {"w": jnp.ones(2), "router_state": Variable({"centres": centres})}
    assert_same(Checkpoints(tmp_path).restore(template=now).state, now)
    # A router that keeps none has no use for them.
    without = {"w": jnp.ones(2)}
    assert_same(Checkpoints(tmp_path).restore(template=without).state, without)
    with pytest.raises(ValueError, match=r"centres'\].* has float32 \(2, 3\)"):
        other = {"w": jnp.ones(2), "router_state": Variable({"centres": centres.T})}
        Checkpoints(tmp_path).restore(template=other)


@pytest.mark.parametrize("state", [{}, None, {"a": None, "b": ()}])
def test_a_state_without_arrays_is_a_state(tmp_path, state):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, metadata={"phase": 0})
    restored = Checkpoints(tmp_path).restore(template=state)
    assert restored.state == state
    assert restored.metadata == {"phase": 0}


def test_data_state_and_metadata_come_back(tmp_path):
    metadata = {"phase": 1, "kind": "2:4", "loss": [0.1, 1e-300, None], "config": {}}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {}, data_state={"next_index": 17}, metadata=metadata)
        checkpoints.save(2, {}, metadata={"phase": 2})
    restored = Checkpoints(tmp_path).restore(1, template={})
    assert restored.data_state == {"next_index": 17}
    assert restored.metadata == metadata
    assert Checkpoints(tmp_path).metadata(1) == metadata
    assert Checkpoints(tmp_path).metadata() == {"phase": 2}


def test_donated_arrays_are_saved_as_they_were(tmp_path):
    shape = (1024, 1024)
    increment = jax.jit(lambda x: x + 1, donate_argnums=0)
    array = jnp.zeros(shape)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(0, array)
        for _ in range(10):
            array = increment(array)
        array.block_until_ready()
    template = jax.ShapeDtypeStruct(shape, jnp.float32)
    assert_same(
        Checkpoints(tmp_path).restore(template=template).state, jnp.zeros(shape)
    )


def test_the_newest_and_the_permanent_stay(tmp_path):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.latest_step() is None
        for step in range(6):
            checkpoints.save(step, state_of(step), permanent=step in (1, 4))
        checkpoints.wait()
        assert checkpoints.steps() == [1, 4, 5]
        assert checkpoints.latest_step() == 5
        checkpoints.save(6, state_of(6))
    reader = Checkpoints(tmp_path)
    assert reader.steps() == [1, 4, 5, 6]
    for step in reader.steps():
        assert_same(reader.restore(step, template=state_of(0)).state, state_of(step))
    # The rest left nothing behind.
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [reader.path(step).name for step in reader.steps()]


def test_steps_that_are_a_multiple_of_keep_every_stay(tmp_path):
    with Checkpoints(tmp_path, keep=2, keep_every=4) as checkpoints:
        for step in range(2, 12):
            checkpoints.save(step, {}, permanent=step == 5)
    assert Checkpoints(tmp_path).steps() == [4, 5, 8, 10, 11]
    # None of them was marked: another policy may drop them.
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(12, {})
    assert Checkpoints(tmp_path).steps() == [5, 12]


def test_a_run_that_continues_keeps_what_an_earlier_one_made_permanent(tmp_path):
    save_steps(tmp_path, 1, permanent=True)
    save_steps(tmp_path, 2, 3)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(4, {})
    assert Checkpoints(tmp_path).steps() == [1, 4]


def test_the_same_step_again_replaces_and_stays_permanent(tmp_path):
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(5, state_of(1), permanent=True)
        for value in (2, 3):
            checkpoints.save(5, state_of(value), metadata={"value": value})
        checkpoints.wait()
        assert checkpoints.steps() == [5]
        assert len(list(tmp_path.iterdir())) == 1
        restored = checkpoints.restore(template=state_of(0))
        assert_same(restored.state, state_of(3))
        assert restored.metadata == {"value": 3}
        checkpoints.save(6, state_of(6))
    assert Checkpoints(tmp_path).steps() == [5, 6]


def test_the_same_step_again_never_leaves_a_moment_without_it(tmp_path, monkeypatch):
    """At the commit of the replacement, the replaced one is still whole."""
    save_steps(tmp_path, 5)
    rename = os.rename
    seen = []

    def look_first(source, target, **options):
        if Path(target).parent == tmp_path:
            restored = Checkpoints(tmp_path).restore(template=state_of(0))
            seen.append(restored.state["w"][0, 0].item())
        return rename(source, target, **options)

    with Checkpoints(tmp_path) as checkpoints:
        monkeypatch.setattr(os, "rename", look_first)
        checkpoints.save(5, state_of(7), blocking=True)
    # First the commit, then the deletion of the old one, when the new one counts.
    assert seen == [5.0, 7.0]


def test_revisions_are_ordered_as_numbers(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        for value in range(12):
            checkpoints.save(1, state_of(value))
        assert Checkpoints(tmp_path).latest_step() == 1
    restored = Checkpoints(tmp_path).restore(template=state_of(0))
    assert_same(restored.state, state_of(11))


def test_names_that_are_no_checkpoint_are_ignored(tmp_path):
    save_steps(tmp_path, 1)
    for name in (
        "step_00000002.writing",
        "step_00000003.orbax-checkpoint-tmp",
        "step_00000003.orbax-checkpoint-tmp-1700000000",
        "step_00000004_1.deleting",
        "step_5x",
        "metrics",
    ):
        (tmp_path / name).mkdir()
    (tmp_path / "step_00000002.writing" / "half").write_text("written")
    reader = Checkpoints(tmp_path)
    assert reader.steps() == [1]
    reader.close()
    assert len(list(tmp_path.iterdir())) == 7  # a reader deletes nothing
    save_steps(tmp_path, 2)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"step_00000001", "step_00000002", "step_5x", "metrics"}


KILLED = """
import os, signal, sys
import jax.numpy as jnp
from sparsejax.checkpoints.checkpoint import Checkpoints

def die(*args, **options):
    os.kill(os.getpid(), signal.SIGKILL)

checkpoints = Checkpoints(sys.argv[1], keep=1)
checkpoints.save(1, {"w": jnp.arange(1 << 20)}, blocking=True)
if os.environ["DIE_AT"] == "commit":
    os.rename = die
checkpoints.save(2, {"w": jnp.arange(1 << 20) + 1})
die() if os.environ["DIE_AT"] == "once saving" else checkpoints.wait()
"""


@pytest.mark.parametrize("moment", ["commit", "once saving"])
def test_a_process_killed_while_saving_loses_nothing(tmp_path, moment):
    killed = run_child(KILLED, tmp_path, DIE_AT=moment)
    assert killed.returncode == -9, killed.stderr
    template = {"w": jax.ShapeDtypeStruct((1 << 20,), jnp.int32)}
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        step = checkpoints.latest_step()
        # Without a hook the save may just have made it.
        assert step in ((1,) if moment == "commit" else (1, 2))
        if step == 1:
            assert (tmp_path / "step_00000002.writing").is_dir()
        expected = {"w": jnp.arange(1 << 20) + step - 1}
        assert_same(checkpoints.restore(template=template).state, expected)
        checkpoints.save(2, {"w": jnp.arange(1 << 20) + 2})
    restored = Checkpoints(tmp_path).restore(template=template)
    assert_same(restored.state, {"w": jnp.arange(1 << 20) + 2})
    assert len(list(tmp_path.iterdir())) == 1


MESHES = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from sparsejax.checkpoints.checkpoint import Checkpoints

def place(mesh, axes):
    return NamedSharding(mesh, P(*axes))

wide = jax.make_mesh((4, 2), ("data", "model"))
narrow = jax.make_mesh((2,), ("data",), devices=jax.devices()[2:4])
w = jnp.arange(64.0).reshape(8, 8)
key = jax.random.split(jax.random.key(0), 4)
state = {
    "w": jax.device_put(w, place(wide, ("data", "model"))),
    "key": jax.device_put(key, place(wide, ("data",))),
}
with Checkpoints(sys.argv[1]) as checkpoints:
    checkpoints.save(1, state)
for spec in (("data",), (None, "data")):
    template = {
        "w": jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=place(narrow, spec)),
        "key": jax.ShapeDtypeStruct(
            key.shape, key.dtype, sharding=place(narrow, ("data",))
        ),
    }
    found = Checkpoints(sys.argv[1]).restore(template=template).state
    for name in state:
        assert found[name].sharding == template[name].sharding, found[name].sharding
    np.testing.assert_array_equal(found["w"], w)
    data = jax.random.key_data
    np.testing.assert_array_equal(data(found["key"]), data(key))
    assert found["w"].addressable_shards[0].data.size == 32
found = Checkpoints(sys.argv[1]).restore(template=state).state
assert found["w"].sharding == state["w"].sharding
assert found["key"].sharding == state["key"].sharding
template = jax.eval_shape(lambda: {"w": w, "key": key})
found = Checkpoints(sys.argv[1]).restore(template=template)
assert found.state["w"].devices() == {jax.devices()[0]}
print("restored on every mesh")
"""


def test_another_mesh_restores_the_same_arrays(tmp_path):
    child = run_child(
        MESHES, tmp_path, XLA_FLAGS="--xla_force_host_platform_device_count=8"
    )
    assert child.stdout == "restored on every mesh\n", child.stderr
    assert child.stderr == ""  # orbax has nothing to warn about


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
