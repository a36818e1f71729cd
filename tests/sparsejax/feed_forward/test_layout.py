"""Layouts of an FFN on a mesh that are refused; the mesh itself is in
on_eight_devices."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType

from sparsejax.feed_forward.ffn import ffn
from sparsejax.feed_forward.gated_ffn import gated_ffn
from sparsejax.feed_forward.layout import FFNLayout
from sparsejax.feed_forward.sparsity import DENSE, FFNSparsity
from sparsejax.feed_forward.spec import FFNSpec
from sparsejax.sparsity.compressed import pack_positions, unpack_positions
from sparsejax.sparsity.patterns import NM, VNM

AXES = ("data", "fsdp", "tensor")


def layout_of(*sizes: int, **names) -> FFNLayout:
    automatic = (AxisType.Auto,) * len(sizes)
    return FFNLayout(mesh=AbstractMesh(sizes, AXES, axis_types=automatic), **names)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"hidden": "model"}, "hidden='model' names the axis 'model', which"),
        ({"tokens": ("data", "expert")}, "names the axis 'expert', which is not one"),
        ({"hidden": "data"}, "hidden='data' must not be among tokens"),
        ({"tokens": ("data",)}, "stored='fsdp' must be"),
    ],
)
def test_axes_must_be_the_meshs_and_have_one_meaning(names, message):
    with pytest.raises(ValueError, match=message):
        layout_of(2, 2, 2, **names)


def test_explicit_axes_become_automatic():
    types = AxisType.Auto, AxisType.Explicit, AxisType.Auto
    mesh = AbstractMesh((2, 3, 4), AXES, axis_types=types)
    assert FFNLayout(mesh=mesh) == layout_of(2, 3, 4)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("tensor",), ((), "tensor", None)),
        (("data",), (("data",), None, None)),
        (("fsdp",), (("fsdp",), None, "fsdp")),
        (("data", "tensor"), (("data",), "tensor", None)),
    ],
)
def test_default_axes_that_the_mesh_lacks_are_dropped(names, expected):
    layout = FFNLayout(mesh=AbstractMesh((2, 2)[: len(names)], names))
    assert (layout.tokens, layout.hidden, layout.stored) == expected
    sizes = layout.token_shards, layout.hidden_shards, layout.stored_shards
    has = [bool(axis) for axis in expected]
    assert sizes == tuple(2 if axis else 1 for axis in has)


def test_a_mesh_of_other_axes_alone_is_no_layout_unless_they_are_named():
    mesh = AbstractMesh((4,), ("batch",))
    with pytest.raises(ValueError, match=r"name its axes, as FFNLayout\(mesh"):
        FFNLayout(mesh=mesh)
    # What the message says to write.
    layout = FFNLayout(mesh=mesh, tokens=("batch",), hidden=None, stored=None)
    assert layout.token_shards == 4


@pytest.mark.parametrize("run", [ffn, gated_ffn])
def test_a_mesh_is_no_layout(run):
    x, w = jnp.zeros((4, 8)), jnp.zeros((8, 8))
    weights = (w, w) if run is ffn else (w, w, w)
    mesh = AbstractMesh((1, 1, 1), AXES)
    with pytest.raises(ValueError, match="layout=.* must be of type FFNLayout or None"):
        run(x, *weights, layout=mesh)


def test_a_mesh_may_have_other_axes_and_other_names():
    axes, automatic = ("dp", "ep", "zero", "tp"), (AxisType.Auto,) * 4
    mesh = AbstractMesh((2, 3, 4, 5), axes, axis_types=automatic)
    layout = FFNLayout(mesh=mesh, tokens=("dp", "zero"), hidden="tp", stored="zero")
    assert (layout.token_shards, layout.hidden_shards, layout.stored_shards) == (
        8,
        5,
        4,
    )


@pytest.mark.parametrize(
    ("sizes", "tokens", "d_hidden", "sparsity", "message"),
    [
        ((2, 4, 1), 12, 64, DENSE, r"12 tokens .* of 8, the size .* data x fsdp"),
        ((1, 3, 2), 12, 64, DENSE, r"d_hidden=64 .* of 6, .* tensor x fsdp .* to 66"),
        (
            (1, 1, 32),
            8,
            64,
            FFNSparsity(activations=NM(2, 4)),
            r"over mesh axis tensor of size 32 leaves 2 neurons .* groups of 4",
        ),
        (
            (1, 1, 8),
            8,
            64,
            FFNSparsity(activations=VNM(4, 2, 16)),
            r"4 experts .* not a multiple of mesh axis tensor of size 8",
        ),
    ],
)
def test_nothing_is_cut_apart(sizes, tokens, d_hidden, sparsity, message):
    with pytest.raises(ValueError, match=message):
        layout_of(*sizes).check(tokens, d_hidden, sparsity)
    x = jax.ShapeDtypeStruct((tokens, 8), jnp.float32)
    w_up = jax.ShapeDtypeStruct((8, d_hidden), jnp.float32)
    w_down = jax.ShapeDtypeStruct((d_hidden, 8), jnp.float32)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(
            lambda *a: ffn(*a, sparsity=sparsity, layout=layout_of(*sizes)),
            x,
            w_up,
            w_down,
        )


def test_explain_shows_the_gemms_of_one_device():
    spec = FFNSpec(
        tokens=96,
        d_model=16,
        d_hidden=64,
        dtype="float32",
        **layout_of(2, 3, 4).shards,
    )
    first, second, *_, fifth, _ = (decision.spec for decision in spec.explain())
    assert (first.tokens, first.d_in, first.d_out) == (16, 16, 16)
    assert (second.tokens, second.d_in, second.d_out) == (16, 16, 16)
    assert (fifth.tokens, fifth.d_in, fifth.d_out) == (16, 16, 16)
    whole = FFNSpec(tokens=96, d_model=16, d_hidden=64, dtype="float32")
    assert sum(g.dense_flops for g in whole.gemms()) == 24 * sum(
        g.dense_flops for g in spec.gemms()
    )


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 9])
def test_positions_take_two_bits_and_come_back(axis, size):
    shape = [3, 5]
    shape[axis] = size
    positions = jax.random.randint(jax.random.key(size), shape, 0, 4, jnp.uint8)
    packed = pack_positions(positions, axis=axis)
    shape[axis] = -(-size // 4)
    assert (packed.shape, packed.dtype) == (tuple(shape), jnp.uint8)
    assert jnp.array_equal(unpack_positions(packed, size, axis=axis), positions)


def test_the_first_of_four_positions_is_in_the_lowest_bits():
    packed = pack_positions(jnp.array([1, 0, 2, 3, 3], jnp.uint8))
    assert packed.tolist() == [0b11_10_00_01, 0b11]
