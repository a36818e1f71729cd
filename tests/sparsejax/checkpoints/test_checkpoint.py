"""Checkpoints: bit for bit, atomic, and refused with a reason where they do not fit."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sparsejax.checkpoints import checkpoint
from sparsejax.checkpoints.checkpoint import Checkpoints
from tests.support.files.saved_states import assert_same, bits, save_steps, state_of


class Moments(NamedTuple):
    mu: jax.Array
    nu: jax.Array | None


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


def kept(**arrays):
    return {name: Variable(array) for name, array in arrays.items()}


CENTRES, STRENGTH = jnp.arange(6.0).reshape(2, 3), jnp.ones(4)
NOW = {
    "w": jnp.ones(2),
    "router_state": kept(centres=CENTRES),
    "observed": kept(penalty_strength=STRENGTH, energy_threshold=2 * STRENGTH),
}
ONE_VARIABLE = {
    name: state if name == "w" else Variable({k: v.value for k, v in state.items()})
    for name, state in NOW.items()
}


@pytest.mark.parametrize(
    "saved",
    [
        NOW,
        ONE_VARIABLE,
        {"centres": Variable(CENTRES), "observed": NOW["observed"], "w": NOW["w"]},
    ],
)
def test_what_layers_keep_is_found_under_the_names_of_older_checkpoints(
    saved, tmp_path
):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, saved)
    assert_same(Checkpoints(tmp_path).restore(template=NOW).state, NOW)
    with pytest.raises(ValueError, match=r"centres'\].* has float32 \(2, 3\)"):
        other = NOW | {"router_state": kept(centres=CENTRES.T)}
        Checkpoints(tmp_path).restore(template=other)


def test_centres_of_old_are_not_read_where_a_router_keeps_none(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(2), "centres": Variable(CENTRES)})
        checkpoints.save(2, NOW)
    without = {"w": jnp.ones(2)}
    assert_same(Checkpoints(tmp_path).restore(1, template=without).state, without)
    with pytest.raises(ValueError, match="the template nothing"):
        Checkpoints(tmp_path).restore(2, template=without)


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


KILLED = """
import os, signal, sys
import jax.numpy as jnp
from sparsejax.checkpoints.checkpoint import Checkpoints
from tests.support.files.saved_states import assert_same, bits, save_steps, state_of

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
from tests.support.files.saved_states import assert_same, bits, save_steps, state_of

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
