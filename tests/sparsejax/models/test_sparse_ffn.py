"""`SparseFFN` against NumPy, and what becomes of its weights and state."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from sparsejax.feed_forward.sparsity import DENSE, FFNSparsity
from sparsejax.models.sparse_ffn import SparseFFN, sparse_ffns
from sparsejax.routing.routers import NearestCentre, SameExperts, TokenHash
from sparsejax.sparsity.compressed import decompress
from sparsejax.sparsity.masks import magnitude_mask
from sparsejax.sparsity.patterns import NM, VNM
from sparsejax.switches.switching import switch

WEIGHTS = FFNSparsity(weights=NM(2, 4))
TWO_FOUR = FFNSparsity(weights=NM(2, 4), activations=NM(2, 4))
VENOM = FFNSparsity(weights=NM(2, 4), activations=VNM(4, 2, 16))
D, F = 16, 64


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def best_two(values: np.ndarray) -> list[int]:
    return sorted(range(4), key=lambda i: (-values[i], i))[:2]


def masked_rows(y: np.ndarray) -> np.ndarray:
    """relu(y)^2 with two kept of every four, by signed value, one group at a time."""
    a = np.zeros_like(y)
    for row in range(y.shape[0]):
        for start in range(0, y.shape[1], 4):
            for i in best_two(y[row, start : start + 4]):
                a[row, start + i] = max(y[row, start + i], 0) ** 2
    return a


def soft_shrunk(w: np.ndarray) -> np.ndarray:
    """S(w), groups of four along the rows of w (axis 0)."""
    s = np.zeros_like(w)
    for column in range(w.shape[1]):
        for start in range(0, w.shape[0], 4):
            group = w[start : start + 4, column]
            shrunk = np.maximum(np.abs(group) - np.sort(np.abs(group))[1], 0)
            s[start : start + 4, column] = np.sign(group) * shrunk
    return s


def beta_of(w: np.ndarray, s: np.ndarray) -> float:
    return (w * s).sum() / (s * s).sum()


def soft_thresholded(w: np.ndarray) -> np.ndarray:
    s = soft_shrunk(w)
    return beta_of(w, s) * s


@pytest.mark.parametrize("sparsity", [DENSE, WEIGHTS, TWO_FOUR, VENOM])
def test_relu2_ffn_matches_numpy(sparsity):
    layer = SparseFFN(D, F, sparsity=sparsity, rngs=nnx.Rngs(0))
    w_up, w_down = np.asarray(layer.w_up[...]), np.asarray(layer.w_down[...])
    x = normal(2, 7, D)
    tokens = x.reshape(-1, D)
    y = tokens @ (soft_thresholded(w_up) if sparsity.weights else w_up)
    a = masked_rows(y) if sparsity.activations else np.maximum(y, 0) ** 2
    if sparsity.experts:
        blocks = (w_up / np.linalg.norm(w_up, axis=0)).reshape(D, 4, F // 4).mean(-1)
        cosine = tokens @ (blocks / np.linalg.norm(blocks, axis=0))
        expert_of_neuron = np.arange(F) // (F // 4)
        a[cosine.argmax(-1)[:, None] != expert_of_neuron[None, :]] = 0
    expected = (a @ w_down).reshape(x.shape)
    np.testing.assert_allclose(layer(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sparsity", [DENSE, WEIGHTS])
def test_swiglu_ffn_matches_numpy(sparsity):
    layer = SparseFFN(D, F, activation="swiglu", sparsity=sparsity, rngs=nnx.Rngs(0))
    read = soft_thresholded if sparsity.weights else np.asarray
    w_gate, w_up = (read(np.asarray(w[...])) for w in (layer.w_gate, layer.w_up))
    x = normal(5, D)
    gate = x @ w_gate
    expected = (gate / (1 + np.exp(-gate)) * (x @ w_up)) @ np.asarray(layer.w_down[...])
    np.testing.assert_allclose(layer(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sparsity", [DENSE, WEIGHTS, TWO_FOUR])
def test_reglu2_ffn_matches_numpy(sparsity):
    layer = SparseFFN(D, F, activation="reglu2", sparsity=sparsity, rngs=nnx.Rngs(0))
    read = soft_thresholded if sparsity.weights else np.asarray
    w_gate, w_up = (read(np.asarray(w[...])) for w in (layer.w_gate, layer.w_up))
    x = normal(5, D)
    a = np.maximum(x @ w_gate, 0) ** 2 * (x @ w_up)
    if sparsity.activations:
        a = np.where(magnitude_mask(a), a, 0)
    expected = a @ np.asarray(layer.w_down[...])
    np.testing.assert_allclose(layer(x), expected, rtol=1e-4, atol=1e-5)


def test_initial_weights_have_their_fan_in_deviation():
    layer = SparseFFN(64, 256, down_scale=0.5, rngs=nnx.Rngs(0))
    # 16384 samples: the deviation is known to about 0.6 %
    np.testing.assert_allclose(layer.w_up[...].std(), 1 / 8, rtol=0.03)
    np.testing.assert_allclose(layer.w_down[...].std(), 0.5 / 16, rtol=0.03)


def test_scales_are_those_of_the_masters_and_frozen_until_refreshed():
    layer = SparseFFN(D, F, sparsity=WEIGHTS, rngs=nnx.Rngs(0))

    def betas():
        # S(W2^T): groups along d are rows of the transposed weight
        weights = np.asarray(layer.w_up[...]), np.asarray(layer.w_down[...]).T
        return [beta_of(w, soft_shrunk(w)) for w in weights]

    before = np.asarray(layer.scales[...])
    np.testing.assert_allclose(before, betas(), rtol=1e-4)
    layer.w_up[...] = layer.w_up[...] ** 3
    np.testing.assert_array_equal(layer.scales[...], before)
    layer.refresh_scales()
    np.testing.assert_allclose(layer.scales[...], betas(), rtol=1e-4)
    assert abs(layer.scales[...][0] - before[0]) > 0.05


def test_widths_without_groups_of_four_stay_usable_when_dense():
    layer = SparseFFN(6, 10, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(layer.scales[...], [1, 1])
    assert layer(normal(3, 6)).shape == (3, 6)
    with pytest.raises(ValueError, match="d_model=6"):
        layer.compute_as(WEIGHTS)


def test_shapes_and_settings_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="activations=.*silu"):
        SparseFFN(D, F, activation="swiglu", sparsity=TWO_FOUR, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"activations=VNM\(.*silu leaves no zeros"):
        SparseFFN(D, F, activation="swiglu", sparsity=VENOM, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="d_hidden=40 is not a multiple of m=16"):
        SparseFFN(D, 40, sparsity=VENOM, rngs=nnx.Rngs(0))
    layer = SparseFFN(D, F, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="d_model=16"):
        layer(normal(3, F))
    with pytest.raises(ValueError, match="no experts to cluster"):
        layer.cluster()


@pytest.mark.parametrize(
    "choice",
    [
        {"activation": "gelu"},
        {"activation": "relu"},
        {"activation": "SwiGLU"},
        {"backend": "cuda"},
        {"sparsity": "2:4"},
        {"sparsity": NM(2, 4)},
    ],
)
def test_a_choice_that_is_none_is_refused_where_it_is_given(choice):
    ((name, value),) = choice.items()
    with pytest.raises(ValueError, match=re.escape(f"{name}={value!r} must be")):
        SparseFFN(D, F, rngs=nnx.Rngs(0), **choice)


@pytest.mark.parametrize("width", [0, -16, 16.0, "16", True, None])
@pytest.mark.parametrize("name", ["d_model", "d_hidden"])
def test_a_width_that_is_none_is_refused(name, width):
    widths = {"d_model": D, "d_hidden": F} | {name: width}
    with pytest.raises(
        ValueError, match=f"^{name}={width!r} must be an int of at leas"
    ):
        SparseFFN(**widths, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    "rngs", [0, None, jax.random.key(0)], ids=["int", "none", "key"]
)
def test_random_streams_that_are_none_are_refused(rngs):
    with pytest.raises(ValueError, match=r"(?s)rngs=.* must be of type Rngs"):
        SparseFFN(D, F, rngs=rngs)


def test_widths_may_be_integers_of_numpy():
    widths = np.array([D, F])
    assert SparseFFN(*widths, rngs=nnx.Rngs(0))(normal(2, D)).shape == (2, D)


def test_hash_router_needs_token_ids():
    sparsity = FFNSparsity(activations=VNM(4, 2, 16), router=TokenHash())
    layer = SparseFFN(D, F, sparsity=sparsity, rngs=nnx.Rngs(0))
    x = normal(2, 5, D)
    with pytest.raises(ValueError, match="token_hash.*token_ids"):
        layer(x)
    # one token id, one expert: hidden values of all tokens lie in the same block
    ids = jnp.full((2, 5), 17)
    assert len(set(layer.route(x.reshape(-1, D), ids)[:, 0].tolist())) == 1
    assert layer(x, token_ids=ids).shape == x.shape
    for wrong in (ids.T, ids.reshape(-1), ids[:1], ids + 0.5):
        with pytest.raises(ValueError, match=r"must be integers of shape \(2, 5\)"):
            layer(x, token_ids=wrong)


def test_centres_appear_stay_and_go_with_the_experts():
    layers = [SparseFFN(D, F, rngs=nnx.Rngs(i)) for i in range(2)]
    assert [ffn.router_state for ffn in sparse_ffns(nnx.List(layers))] == [None, None]
    first = layers[0]
    first.compute_as(VENOM)
    assert first.router_state["centres"].shape == (4, D)
    np.testing.assert_allclose(
        np.linalg.norm(first.router_state["centres"], axis=-1), np.ones(4), rtol=1e-5
    )
    first.cluster()
    clustered = first.router_state["centres"][...]
    first.compute_as(FFNSparsity(activations=VNM(8, 2, 16), experts_per_token=2))
    np.testing.assert_array_equal(first.router_state["centres"], clustered)
    first.compute_as(FFNSparsity(activations=VNM(4, 2, 8)))
    assert first.router_state["centres"].shape == (2, D)
    by_hash = FFNSparsity(activations=VNM(4, 2, 8), router=TokenHash())
    first.compute_as(by_hash, keep_router_state=True)
    assert first.router_state["centres"].shape == (2, D)
    first.compute_as(TWO_FOUR, keep_router_state=True)
    assert first.router_state["centres"].shape == (2, D)
    first.compute_as(TWO_FOUR)
    assert first.router_state is None


class Renames(NearestCentre):
    """A router that after a clustering keeps an array of another name."""

    name = "renames"

    def clustered_state(self, w_up, centres):
        return {"centroids": centres}


def test_arrays_of_other_names_are_refused():
    sparsity = FFNSparsity(activations=VNM(4, 2, 16), router=Renames())
    layer = SparseFFN(D, F, sparsity=sparsity, rngs=nnx.Rngs(0))
    before = jax.tree.map(jnp.copy, nnx.state(layer))
    with pytest.raises(ValueError, match=r"\['centroids'\] cannot .* \['centres'\]"):
        layer.cluster()
    chex.assert_trees_all_equal(nnx.state(layer), before)


OBSERVED = FFNSparsity(
    activations=VNM(4, 4, 16),
    router="activation_energy",
    most_experts_per_token=2,
    skipped_energy=0.05,
)


@pytest.mark.parametrize("sparsity", [DENSE, VENOM, OBSERVED], ids=str)
def test_the_state_goes_through_a_pure_dictionary(sparsity):
    """As in Flax's guide to checkpoints: arrays by names in dictionaries, and back."""
    layer, other = (
        SparseFFN(D, F, sparsity=sparsity, rngs=nnx.Rngs(seed)) for seed in (0, 1)
    )
    for name in layer.observed or ():
        layer.observed[name].set_value(layer.observed[name] + 0.5)
    arrays = nnx.to_pure_dict(nnx.state(layer))
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(arrays))
    graph, state = nnx.split(other)
    nnx.replace_by_pure_dict(state, arrays)
    chex.assert_trees_all_equal(nnx.state(nnx.merge(graph, state)), nnx.state(layer))
    kept = {"router_state": VENOM, "observed": OBSERVED}
    assert {name for name in kept if name in arrays} == {
        name for name, of in kept.items() if of == sparsity
    }


def test_a_static_quarter_is_an_ffn_of_a_quarter_of_the_neurons_and_no_others_learn():
    quarter = FFNSparsity(
        activations=VNM(4, 2, 16),
        router=SameExperts(),
        weight_gradients="expert_columns",
    )
    layer = SparseFFN(D, F, rngs=nnx.Rngs(0))
    before = np.asarray(layer.w_up[...])
    switch(layer, None, quarter)
    # The neurons stay where they were initialised: the first quarter is a random one.
    np.testing.assert_array_equal(layer.w_up[...], before)
    x = normal(64, D)
    small = SparseFFN(
        D, F // 4, sparsity=FFNSparsity(activations=NM(2, 4)), rngs=nnx.Rngs(1)
    )
    small.w_up[...] = layer.w_up[..., : F // 4]
    small.w_down[...] = layer.w_down[: F // 4]
    np.testing.assert_allclose(layer(x), small(x), atol=1e-5)
    gradient = nnx.grad(lambda layer: (layer(x) ** 2).sum())(layer)
    own = nnx.grad(lambda layer: (layer(x) ** 2).sum())(small)
    for name, axis in (("w_up", 1), ("w_down", 0)):
        of_quarter, others = np.split(np.asarray(gradient[name][...]), [F // 4], axis)
        np.testing.assert_allclose(of_quarter, own[name][...], rtol=1e-4, atol=1e-4)
        assert np.abs(of_quarter).max() > 0 and not others.any()


def test_packed_weights_are_those_of_the_present_masters():
    layer = SparseFFN(D, F, sparsity=WEIGHTS, rngs=nnx.Rngs(0))
    before = decompress(layer.weights_as_read().up)
    expected = soft_thresholded(np.asarray(layer.w_up[...]))
    np.testing.assert_allclose(before, expected, rtol=1e-5, atol=1e-6)
    layer.w_up[...] = -layer.w_up[...]
    np.testing.assert_array_equal(decompress(layer.weights_as_read().up), -before)
    layer.compute_as(FFNSparsity(activations=NM(2, 4)))
    assert layer.weights_as_read() is None


def test_clustering_preserves_the_function_and_returns_the_permutation():
    layer = SparseFFN(D, F, sparsity=VENOM, rngs=nnx.Rngs(0))
    x = normal(9, D)
    dense = nnx.clone(layer)
    dense.compute_as(DENSE)
    before = dense(x)
    w_up, w_down = layer.w_up[...], layer.w_down[...]
    sparse_before = layer(x)
    order = layer.cluster()
    np.testing.assert_array_equal(np.sort(order), np.arange(F))
    np.testing.assert_array_equal(layer.w_up[...], w_up[:, order])
    np.testing.assert_array_equal(layer.w_down[...], w_down[order])
    dense = nnx.clone(layer)
    dense.compute_as(DENSE)
    np.testing.assert_allclose(dense(x), before, rtol=1e-4, atol=1e-5)
    # ... whereas the sparse function, which sees the experts, is another one
    assert np.abs(layer(x) - sparse_before).max() > 1e-2


def test_clustering_finds_planted_experts_and_sets_their_centres():
    layer = SparseFFN(D, F, sparsity=VENOM, rngs=nnx.Rngs(0))
    directions = np.linalg.qr(normal(D, D))[0][:, :4]
    planted = np.random.default_rng(3).permutation(np.arange(F) % 4)
    layer.w_up[...] = jnp.asarray(directions[:, planted] + 0.01 * normal(D, F))
    order = np.asarray(layer.cluster())
    for expert in range(4):
        members = planted[order[expert * 16 : (expert + 1) * 16]]
        assert len(set(members.tolist())) == 1
        centre = layer.router_state["centres"][expert]
        assert float(centre @ directions[:, members[0]]) > 0.99
    # Grouped already: a warm start keeps every expert's neurons together.
    again = np.asarray(layer.cluster(warm_start=True))
    np.testing.assert_array_equal(again // 16, np.arange(F) // 16)


def test_stacked_layers_pack_rescale_and_cluster_like_single_ones():
    @nnx.split_rngs(splits=2)
    @nnx.vmap(in_axes=0, out_axes=0)
    def stack(rngs):
        return SparseFFN(D, F, sparsity=VENOM, rngs=rngs)

    stacked = stack(nnx.Rngs(0))

    def layer_of(i):
        graph, state = nnx.split(stacked)
        return nnx.clone(nnx.merge(graph, jax.tree.map(lambda v: v[i], state)))

    singles = [layer_of(i) for i in range(2)]
    x = normal(9, D)
    with pytest.raises(ValueError, match="stacks several layers"):
        stacked(x)
    for layer in (stacked, *singles):
        layer.w_up[...] = 2 * layer.w_up[...] ** 3
        layer.refresh_scales()
    cluster = nnx.jit(SparseFFN.cluster)
    orders = [cluster(layer) for layer in singles]
    np.testing.assert_array_equal(cluster(stacked), np.stack(orders))
    packed = stacked.weights_as_read()
    for i, single in enumerate(singles):
        chex.assert_trees_all_close(
            jax.tree.map(lambda leaf, i=i: leaf[i], packed),
            single.weights_as_read(),
            rtol=1e-5,
        )
        chex.assert_trees_all_close(
            jax.tree.leaves(nnx.state(layer_of(i))),
            jax.tree.leaves(nnx.state(single)),
            rtol=1e-5,
        )
        np.testing.assert_allclose(layer_of(i)(x), single(x), rtol=1e-4, atol=1e-5)
    stacked.compute_as(FFNSparsity(activations=VNM(4, 2, 8)))
    assert stacked.router_state["centres"].shape == (2, 2, D)


@pytest.mark.parametrize("sparsity", [DENSE, TWO_FOUR, VENOM])
def test_a_training_loop_of_ones_own_learns(sparsity):
    layer = SparseFFN(D, F, sparsity=sparsity, rngs=nnx.Rngs(0))
    optimiser = nnx.Optimizer(layer, optax.adam(1e-2), wrt=nnx.Param)
    x = jnp.asarray(normal(64, D))
    target = jnp.tanh(x[:, ::-1])

    @nnx.jit
    def step(layer, optimiser):
        def loss_of(layer):
            return jnp.mean((layer(x) - target) ** 2)

        loss, grads = nnx.value_and_grad(loss_of)(layer)
        optimiser.update(layer, grads)
        return loss

    losses = [float(step(layer, optimiser)) for _ in range(60)]
    assert losses[-1] < 0.5 * losses[0]


def test_weights_begin_as_they_are_told_to():
    init = jax.nn.initializers.constant(0.5)
    layer = SparseFFN(
        8,
        16,
        activation="swiglu",
        kernel_init=init,
        param_dtype=jnp.bfloat16,
        down_scale=0.25,
        rngs=nnx.Rngs(0),
    )
    assert layer.w_gate is not None
    for weight, value, shape in [
        (layer.w_up, 0.5, (8, 16)),
        (layer.w_gate, 0.5, (8, 16)),
        (layer.w_down, 0.125, (16, 8)),
    ]:
        expected = jnp.full(shape, value, jnp.bfloat16)
        assert weight[...].dtype == jnp.bfloat16
        np.testing.assert_array_equal(weight[...], expected)


def test_bfloat16_masters_compute_as_the_same_numbers_in_float32():
    sparsity = FFNSparsity(weights=NM(2, 4), activations=NM(2, 4))
    build = lambda dtype: SparseFFN(
        8, 16, sparsity=sparsity, param_dtype=dtype, rngs=nnx.Rngs(0)
    )
    small, large = build(jnp.bfloat16), build(jnp.float32)
    for of, to in ((small.w_up, large.w_up), (small.w_down, large.w_down)):
        to[...] = of[...].astype(jnp.float32)
    large.refresh_scales()
    x = jax.random.normal(jax.random.key(1), (12, 8))
    total = lambda layer: (layer(x) ** 2).sum()
    # S(W) is rounded to bfloat16 of the one: half a unit of 8 bits, four GEMMs deep
    np.testing.assert_allclose(total(small), total(large), rtol=3e-2)
    gradient = nnx.grad(total)(small)
    assert gradient["w_up"].get_value().dtype == jnp.bfloat16


def test_a_dtype_that_no_ffn_computes_in_is_refused_where_it_is_given():
    with pytest.raises(ValueError, match=r"^dtype=float16, .* by dtype=jnp.bfloat16$"):
        SparseFFN(D, F, dtype=jnp.float16, rngs=nnx.Rngs(0))
