"""Meshes that a library user has made: with explicit axes, as `jax.make_mesh` makes
them unasked, or without some of the axes; and parameters that lie where he put them."""

from contextlib import nullcontext
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from sparsejax import (
    NM,
    VNM,
    ActivationEnergy,
    Attention,
    FFNLayout,
    FFNSparsity,
    ModelConfig,
    SparseFFN,
    Transformer,
    cross_entropy,
    ffn,
    gated_ffn,
    loss_and_gradient,
    sparsify,
    switch,
)
from sparsejax.distributed.mesh import state_shardings

TWO_FOUR = FFNSparsity(weights=NM(2, 4), activations=NM(2, 4))
OBSERVING = FFNSparsity(
    weights=NM(2, 4),
    activations=VNM(4, 2, 16),
    router=ActivationEnergy(),
    most_experts_per_token=2,
)
DENSE = FFNSparsity()
X = jax.random.normal(jax.random.key(0), (2, 32, 32))
WHOLE = PartitionSpec()
# Four steps of Adam, whose first ones divide by tiny gradients: sums in another order
# are carried on.
CLOSE = {"rtol": 2e-4, "atol": 1e-5}


def mesh_of(names: tuple[str, ...], kind: AxisType) -> jax.sharding.Mesh:
    shape = (8,) if len(names) == 1 else (2, 4)
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names))


class GateUpDown(nnx.Module):
    """A module that is not ours."""

    def __init__(self, rngs):
        linear = partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.gate, self.up, self.down = linear(32, 64), linear(32, 64), linear(64, 32)

    def __call__(self, x):
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


def place_by_neurons(module: nnx.Module, mesh: jax.sharding.Mesh) -> None:
    """Puts each matrix of an FFN where its neurons, the axis of size 64, are split over
    the last axis of the mesh, and everything else on all devices."""

    def put(array):
        spec = [mesh.axis_names[-1] if size == 64 else None for size in array.shape]
        spec = WHOLE if array.ndim < 2 else PartitionSpec(*spec)
        return jax.device_put(array, NamedSharding(mesh, spec))

    nnx.update(module, jax.tree.map(put, nnx.state(module)))


def losses(module: nnx.Module, x: jax.Array, phases: tuple[FFNSparsity, ...]) -> list:
    """The losses of a step in each phase, and, eagerly, of the module they leave."""
    optimizer = nnx.Optimizer(module, optax.adam(1e-2), wrt=nnx.Param)
    loss_of = lambda module, x: ((module(x) - jnp.sin(x)) ** 2).mean()

    @nnx.jit
    def step(module, optimizer, x):
        loss, gradient = loss_and_gradient(loss_of, module, x)
        optimizer.update(module, gradient)
        return loss

    found = []
    for sparsity in phases:
        switch(module, optimizer, sparsity)
        found.append(float(step(module, optimizer, x)))
    return [*found, float(loss_of(module, x[0]))]


PHASES = (DENSE, TWO_FOUR, OBSERVING, DENSE)
FEW = (TWO_FOUR,)


@cache
def on_one_device(phases: tuple[FFNSparsity, ...]) -> list:
    return losses(SparseFFN(32, 64, rngs=nnx.Rngs(0)), X, phases)


@pytest.mark.parametrize(("has_layout", "is_set"), [(True, False), (False, True)])
def test_a_sparse_ffn_trains_on_explicit_axes(has_layout, is_set):
    mesh = jax.make_mesh((2, 4), ("data", "tensor"))
    assert mesh.axis_types == (AxisType.Explicit,) * 2
    layout = FFNLayout(mesh=mesh) if has_layout else None
    module = SparseFFN(32, 64, layout=layout, rngs=nnx.Rngs(0))
    place_by_neurons(module, mesh)
    x = jax.device_put(X, NamedSharding(mesh, PartitionSpec(None, "data")))
    # With the mesh set everything lies on it, without it just what was put there.
    phases = PHASES if is_set else FEW
    with jax.set_mesh(mesh) if is_set else nullcontext():
        got = losses(module, x, phases)
    np.testing.assert_allclose(got, on_one_device(phases), **CLOSE)
    # Its parameters are where they were put, and say so.
    assert jax.typeof(module.w_up[...]).sharding.spec == PartitionSpec(None, "tensor")
    assert jax.typeof(module(x[0])).sharding.spec == PartitionSpec("data", None)


@pytest.mark.parametrize(
    "names", [("tensor",), ("data",), ("fsdp",), ("data", "tensor")], ids="-".join
)
def test_a_mesh_may_lack_axes(names):
    mesh = mesh_of(names, AxisType.Auto)
    module = SparseFFN(32, 64, layout=FFNLayout(mesh=mesh), rngs=nnx.Rngs(0))
    np.testing.assert_allclose(losses(module, X, FEW), on_one_device(FEW), **CLOSE)


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=str)
def test_a_sparsified_module_trains_where_its_parameters_were_put(kind):
    def trained(mesh):
        module = GateUpDown(nnx.Rngs(0))
        if mesh is not None:
            place_by_neurons(module, mesh)
        sparsify(module, [""])
        return losses(module, X, (FFNSparsity(weights=NM(2, 4)),))

    got = trained(mesh_of(("data", "tensor"), kind))
    np.testing.assert_allclose(got, trained(None), **CLOSE)


@pytest.mark.parametrize("is_gated", [False, True])
def test_the_pure_functions_differentiate_on_explicit_axes(is_gated):
    mesh = mesh_of(("fsdp", "tensor"), AxisType.Explicit)
    put = lambda a, *spec: jax.device_put(a, NamedSharding(mesh, PartitionSpec(*spec)))
    w = jax.random.normal(jax.random.key(1), (32, 64)) / 6
    arrays = X[0], w, w.T + 0.1
    placed = (
        put(arrays[0], "fsdp"),
        put(arrays[1], "fsdp", "tensor"),
        put(arrays[2], "tensor"),
    )
    scales = jnp.ones(2 + is_gated)

    def loss(x, up, down):
        how = {"sparsity": FFNSparsity(weights=NM(2, 4)), "scales": scales}
        y = gated_ffn(x, up, up, down, **how) if is_gated else ffn(x, up, down, **how)
        return (y**2).mean()

    gradients = jax.value_and_grad(loss, argnums=(0, 1, 2))
    expected = gradients(*arrays)

    def eagerly(*arrays):
        # Outside of jit, jax itself differentiates such arrays only with a mesh set.
        with jax.set_mesh(mesh):
            return gradients(*arrays)

    for run in (eagerly, jax.jit(gradients)):
        got = run(*placed)
        for one, other in zip(
            jax.tree.leaves(got), jax.tree.leaves(expected), strict=True
        ):
            # float32 sums in another order
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
        assert [jax.typeof(a).sharding.spec for a in got[1]] == [
            PartitionSpec("fsdp", None),
            PartitionSpec("fsdp", "tensor"),
            PartitionSpec("tensor", None),
        ]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_weights_are_held_whole_over_an_axis_of_any_name(kind):
    mesh = jax.make_mesh((8,), ("batch",), axis_types=(kind,))
    of = {"tokens": ("batch",), "hidden": None, "stored": "batch"}

    def loss_and_norm(layout: FFNLayout | None, whole: bool) -> tuple[float, float]:
        module = SparseFFN(32, 64, sparsity=TWO_FOUR, layout=layout, rngs=nnx.Rngs(0))
        x = X
        if layout is not None:
            place_by_neurons(module, mesh)
            x = jax.device_put(X, NamedSharding(mesh, PartitionSpec(None, "batch")))
        loss_of = lambda module, x: ((module(x) - jnp.sin(x)) ** 2).mean()
        run = nnx.jit(partial(loss_and_gradient, loss_of, whole=whole))
        loss, gradient = run(module, x)
        return float(loss), float(optax.tree.norm(gradient))

    expected = loss_and_norm(None, False)
    for whole in (False, True):
        got = loss_and_norm(FFNLayout(mesh=mesh, **of), whole)
        np.testing.assert_allclose(got, expected, **CLOSE)


MODEL = ModelConfig(
    vocab_size=32, d_model=32, layers=1, heads=8, kv_heads=8, d_hidden=64
)
TOKENS = jax.random.randint(jax.random.key(2), (1, 8, 9), 0, 32)


@cache
def transformer_loss(
    mesh: jax.sharding.Mesh | None, place: str, whole: bool = False
) -> tuple:
    """The loss of a 2:4 transformer and the norm of its gradient."""
    model = Transformer(MODEL, sparsity=TWO_FOUR, mesh=mesh, rngs=nnx.Rngs(0))
    tokens = TOKENS
    if place != "nowhere":
        state = nnx.state(model)
        on_all = NamedSharding(mesh, WHOLE)
        where = state_shardings(state, mesh) if place == "split" else on_all
        nnx.update(model, jax.device_put(state, where))
        tokens = jax.device_put(tokens, on_all)
    run = nnx.jit(partial(loss_and_gradient, cross_entropy, whole=whole))
    loss, gradient = run(model, tokens)
    return float(loss), float(optax.tree.norm(gradient))


@pytest.mark.parametrize(
    ("names", "kind", "place", "whole"),
    [
        (("tensor",), AxisType.Auto, "whole", False),
        (("fsdp", "tensor"), AxisType.Explicit, "split", False),
        (("fsdp", "tensor"), AxisType.Explicit, "split", True),
    ],
)
def test_a_transformer_on_such_meshes(names, kind, place, whole):
    got = transformer_loss(mesh_of(names, kind), place, whole)
    # float32 sums in another order
    np.testing.assert_allclose(got, transformer_loss(None, "nowhere"), rtol=1e-4)


def test_attention_alone_on_explicit_axes():
    mesh = mesh_of(("data", "tensor"), AxisType.Explicit)
    alone = Attention(32, heads=4, rngs=nnx.Rngs(0))
    x = jnp.reshape(X, (4, 16, 32))
    on_mesh = Attention(32, heads=4, mesh=mesh, rngs=nnx.Rngs(0))
    placed = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
    # float32 sums in another order
    np.testing.assert_allclose(on_mesh(placed), alone(x), rtol=1e-4, atol=1e-5)


def test_weights_on_another_device_are_refused_with_what_to_write():
    mesh = mesh_of(("data", "tensor"), AxisType.Auto)
    module = SparseFFN(32, 64, layout=FFNLayout(mesh=mesh), rngs=nnx.Rngs(0))
    nnx.update(module, jax.device_put(nnx.state(module), jax.devices()[1]))
    message = r"w_up lies on device .*8 devices .*nnx.update\(model, jax.device_put"
    for call in (
        lambda: module(X[0]),
        lambda: switch(module, None, TWO_FOUR),
        lambda: loss_and_gradient(lambda m, x: m(x).mean(), module, X),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert module.sparsity == DENSE
    # What the message says to write.
    whole = NamedSharding(mesh, WHOLE)
    nnx.update(module, jax.device_put(nnx.state(module), whole))
    switch(module, None, TWO_FOUR)
    assert module(X[0]).shape == X[0].shape
