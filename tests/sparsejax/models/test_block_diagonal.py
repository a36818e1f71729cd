"""Block-diagonal weights: against dense ones with zeros, how groups hear of each other,
and that the compiled program moves no weight."""

import re
from collections import Counter
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sparsejax.config import ModelConfig
from sparsejax.feed_forward.sparsity import FFNSparsity
from sparsejax.models.attention import Attention
from sparsejax.models.block_diagonal import (
    contiguous_groups,
    dense_weight,
    multiply,
    residual_groups,
)
from sparsejax.models.sparse_ffn import SparseFFN
from sparsejax.models.transformer import Transformer, cross_entropy
from sparsejax.sparsity.patterns import NM, BlockDiagonal

# Every axis of a weight or an activation has another size.
SMALL = ModelConfig(
    d_model=48,
    layers=2,
    heads=4,
    kv_heads=4,
    d_hidden=80,
    static_weights=BlockDiagonal(4),
)
READS_RESIDUAL = ("w_query", "w_key", "w_value", "w_up", "w_gate")


def plain_dense(blocks: np.ndarray, *, reads_residual: bool) -> np.ndarray:
    """A NumPy loop over the inputs: to which group each belongs, and as which of it."""
    groups, d_in, d_out = blocks.shape
    dense = np.zeros((groups * d_in, groups * d_out), blocks.dtype)
    share = d_in // groups if reads_residual else d_in
    seen = [0] * groups
    for feature in range(groups * d_in):
        group = feature // share % groups
        row = blocks[group, seen[group]]
        dense[feature, group * d_out : (group + 1) * d_out] = row
        seen[group] += 1
    return dense


@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("reads_residual", [True, False])
def test_the_groups_compute_what_a_dense_weight_with_zeros_does(groups, reads_residual):
    generator = np.random.default_rng(0)
    blocks = generator.normal(size=(groups, 32 // groups, 24 // groups))
    blocks = blocks.astype(np.float32)
    x = generator.normal(size=(3, 5, 32)).astype(np.float32)
    dense = plain_dense(blocks, reads_residual=reads_residual)
    cut = residual_groups if reads_residual else contiguous_groups
    blocks_read = jnp.asarray(blocks)
    out = multiply(cut(jnp.asarray(x), groups), blocks_read, blocks_read)
    np.testing.assert_allclose(out, x @ dense, rtol=1e-5, atol=1e-5)
    stacked = dense_weight(
        jnp.stack([jnp.asarray(blocks), jnp.asarray(2 * blocks)]),
        reads_residual=reads_residual,
    )
    assert np.asarray(stacked[0]).tobytes() == dense.tobytes()
    assert np.asarray(stacked[1]).tobytes() == (2 * dense).tobytes()


def test_two_branches_connect_all_features_with_all():
    groups, d, f = 4, 32, 64
    ones = jnp.ones((groups, d // groups, f // groups))
    into = dense_weight(ones, reads_residual=True)
    out_of = dense_weight(jnp.swapaxes(ones, 1, 2), reads_residual=False)
    branch = np.asarray(into @ out_of)
    assert np.count_nonzero(branch) == branch.size / groups
    assert np.all(branch @ branch > 0)


def as_dense(model: Transformer) -> Transformer:
    """The dense model that computes the same."""
    whole = Transformer(replace(model.config, static_weights=None), rngs=nnx.Rngs(1))

    def of_leaf(path, leaf, blocks):
        if leaf.shape == blocks.shape:
            return blocks
        name = str(path[-2].key if hasattr(path[-2], "key") else path[-2])
        own = [
            plain_dense(np.asarray(layer), reads_residual=name in READS_RESIDUAL)
            for layer in blocks
        ]
        return jnp.asarray(np.stack(own))

    params = jax.tree_util.tree_map_with_path(
        of_leaf, nnx.state(whole, nnx.Param), nnx.state(model, nnx.Param)
    )
    nnx.update(whole, params)
    return whole


@pytest.mark.parametrize("activation", ["relu2", "swiglu"])
def test_a_model_and_its_gradient_are_those_of_the_dense_one_inside_of_the_blocks(
    activation,
):
    config = replace(SMALL, activation=activation)
    model = Transformer(config, rngs=nnx.Rngs(0))
    whole = as_dense(model)
    tokens = jax.random.randint(jax.random.key(0), (2, 9), 0, 256)
    loss_and_gradient = nnx.jit(nnx.value_and_grad(cross_entropy))
    loss, gradient = loss_and_gradient(model, tokens)
    expected, dense_gradient = loss_and_gradient(whole, tokens)
    assert float(loss) == pytest.approx(float(expected), abs=1e-5)
    for path, blocks in nnx.to_flat_state(gradient):
        blocks = np.asarray(blocks[...])
        dense = np.asarray(dict(nnx.to_flat_state(dense_gradient))[path][...])
        if dense.shape != blocks.shape:
            own = {"reads_residual": path[-1] in READS_RESIDUAL}
            places = [plain_dense(np.ones_like(b), **own) for b in blocks]
            dense = dense * np.stack(places)
            blocks = np.stack([plain_dense(b, **own) for b in blocks])
        scale = np.abs(dense).max()
        np.testing.assert_allclose(blocks, dense, atol=2e-5 * scale, err_msg=str(path))


def test_a_block_begins_with_the_deviation_of_its_own_fan_in():
    ffn = SparseFFN(64, 256, groups=4, rngs=nnx.Rngs(0))
    assert ffn.w_up[...].shape == (4, 16, 64)
    assert ffn.w_up[...].std() == pytest.approx(16**-0.5, rel=0.05)
    assert ffn.w_down[...].std() == pytest.approx(64**-0.5, rel=0.05)


@pytest.mark.parametrize("scan_layers", [True, False])
def test_the_compiled_step_copies_and_transposes_no_weight(scan_layers):
    config = replace(SMALL, dtype="bfloat16", scan_layers=scan_layers)
    graph, params, rest = nnx.split(
        Transformer(config, rngs=nnx.Rngs(0)), nnx.Param, ...
    )
    tokens = jnp.zeros((2, 8), jnp.int32)

    def loss(params: nnx.State) -> jax.Array:
        return cross_entropy(nnx.merge(graph, params, rest), tokens)

    compiled = jax.jit(jax.value_and_grad(loss)).lower(params).compile()
    text = compiled.as_text()
    assert text is not None
    shapes = {tuple(leaf.shape[1:]) for leaf in jax.tree.leaves(params["blocks"])}
    weights = {shape for shape in shapes if len(shape) == 3}
    assert weights == {(4, 12, 12), (4, 12, 20), (4, 20, 12)}
    results = re.findall(r"= \w+\[([\d,]+)\]\S* (\w[\w-]*)\(", text)
    moved = {
        tuple(int(size) for size in sizes.split(",") if size != "1")
        for sizes, what in results
        if what in ("copy", "transpose")
    }
    assert moved, "the text of the program has another form than this test reads"
    assert not moved & weights
    gemms = [shape for shape, what in results if what == "dot"]
    assert len(gemms) >= 3 * 6


def test_the_backward_recomputes_no_linear_layer_where_it_keeps_their_outputs():
    def gemms(remat: str) -> dict[int, int]:
        """Returns the number of a step's GEMMs by their number of batch axes."""
        config = replace(SMALL, layers=1, remat=remat)
        graph, params, rest = nnx.split(
            Transformer(config, rngs=nnx.Rngs(0)), nnx.Param, ...
        )

        def loss(params: nnx.State) -> jax.Array:
            model = nnx.merge(graph, params, rest)
            return cross_entropy(model, jnp.zeros((2, 8), jnp.int32))

        text = jax.jit(jax.grad(loss)).lower(params).as_text()
        axes = re.findall(r"dot_general .*?batching_dims = \[([\d, ]*)\]", text)
        return Counter(len(of.split(",")) for of in axes)

    none, dots, full = gemms("none"), gemms("dots"), gemms("full")
    # Six linear layers, each forward and twice in the backward; attention's two GEMMs.
    assert (none[1], none[2]) == (18, 6)
    # No backward reads the output of the last one.
    assert (dots[1], full[1]) == (18, 18 + 5)
    # XLA's scores are computed again; what they mix is kept with dots.
    assert (dots[2], full[2]) == (6 + 1, 6 + 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d_model": 40}, r"model.d_model=40 is not a multiple of 4\^2, .*pad to 48"),
        ({"d_hidden": 82}, "model.d_hidden=82 is not a multiple of the 4 groups"),
        (
            {"d_model": 48, "heads": 8, "kv_heads": 1},
            "model.kv_heads x head_dim=6 is not a multiple of the 4 groups",
        ),
        ({"static_weights": NM(2, 8)}, r"static_weights=NM\(n=2, m=8\) must keep one,"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **changes)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (0, "^groups=0 must be at least 1: .*; use 1 for whole weights"),
        (-2, "^groups=-2 must be at least 1"),
        (2.0, r"^groups=2\.0 must be an int"),
        (300, r"^groups=300 is not in \[2, 256\]"),
        (3, "is not a multiple of the 3 groups of"),
        (8, r"^d_model=16 is not a multiple of 8\^2, .*; pad to 64, or use"),
    ],
)
def test_groups_that_do_not_fit_are_refused_where_a_layer_is_made(groups, message):
    for build in (partial(SparseFFN, 16, 64), partial(Attention, 16, 8)):
        with pytest.raises(ValueError, match=message):
            build(groups=groups, rngs=nnx.Rngs(0))


def test_blocks_have_no_other_sparsity():
    ffn = SparseFFN(16, 64, groups=2, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="2 groups, whose weights are block-diagonal"):
        ffn.check(FFNSparsity(weights=NM(2, 4)))
