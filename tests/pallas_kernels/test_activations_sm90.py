"""2:4 activations on Hopper: the kernels' bodies run on CPU, lowered for CUDA, and run
where there is a GPU."""

import itertools
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import activation_tiles, activations_sm90, over_tokens_sm90
from sparsejax.formats import compress, decompress
from sparsejax.packing import Packed, pack, unpack
from sparsejax.patterns import NM
from sparsejax.pruning import magnitude_mask, nm_mask
from tests.pallas_kernels.lanes import Memory, emulated, lanes

TOKENS = [1, 100]
FEATURES = 128
GARBAGE = 0xA5


def on_cpu(kernel, grid, out_type, *operands, scratch=()):
    """`activation_tiles.on_tiles`, every tile after the other."""
    out = [
        np.full(o.shape, GARBAGE, np.uint8).repeat(o.dtype.itemsize, -1).view(o.dtype)
        for o in out_type
    ]
    arrays = [np.ascontiguousarray(operand) for operand in operands]
    with emulated():
        for tile in itertools.product(*map(range, grid)):
            shared = [np.zeros(s.shape, s.dtype) for s in scratch]
            refs = [Memory(array) for array in (*arrays, *out, *shared)]
            kernel(*(lanes(np.uint32(i)) for i in tile), *refs)
    return tuple(jnp.asarray(array) for array in out)


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def kernels(request, monkeypatch):
    """The public functions, with their bodies run here or on a GPU."""
    if request.param == "cpu":
        monkeypatch.setattr(activation_tiles, "on_tiles", on_cpu)
    return activations_sm90


def random(shape, dtype=jnp.bfloat16, seed: int = 0):
    """With all that selection must decide: ties, zeros, signs, infinities, NaN."""
    keys = jax.random.split(jax.random.key(seed), 2)
    special = jnp.array([0.0, -0.0, 1.5, -1.5, jnp.inf, -jnp.inf, jnp.nan, 1e-30])
    chosen = jax.random.randint(keys[1], shape, 0, 8 * len(special))
    drawn = jax.random.normal(keys[0], shape)
    edge = special[jnp.minimum(chosen, len(special) - 1)]
    return jnp.where(chosen < len(special), edge, drawn).astype(dtype)


def same(got, expected) -> None:
    """Bit for bit, but for the kind of NaN."""
    got, expected = (np.asarray(x.astype(jnp.float32)) for x in (got, expected))
    np.testing.assert_array_equal(got, expected)
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(got)[number], np.signbit(expected)[number])


def kept_features(y_up) -> Packed:
    """A = relu(Y1)^2 by the plain definition."""
    hidden = jnp.maximum(y_up, 0)
    return pack(compress(hidden * hidden, mask=nm_mask(hidden, NM(2, 4))))


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_keeps_the_two_largest_of_four_features(kernels, tokens, dtype):
    y_up = random((tokens, FEATURES), dtype)
    values, metadata, nonzeros = kernels.keep_features(y_up)
    expected = kept_features(y_up)
    same(values, expected.values)
    exist = np.asarray(unpack(Packed(values, metadata)).metadata)
    np.testing.assert_array_equal(exist, np.asarray(unpack(expected).metadata))
    dense = np.asarray(decompress(unpack(expected)).astype(jnp.float32)) != 0
    dense = np.pad(dense, ((0, -tokens % 64), (0, 0)))
    counts = dense.reshape(-1, 16, FEATURES).sum(axis=1)
    np.testing.assert_array_equal(np.asarray(nonzeros), counts)


@pytest.mark.parametrize("tokens", TOKENS)
def test_the_gradient_is_formed_at_the_kept_positions(kernels, tokens):
    y_up, da = random((tokens, FEATURES)), random((tokens, FEATURES), seed=1)
    a = kept_features(y_up)
    got = kernels.backward(da, a.values, a.metadata)
    positions = np.asarray(unpack(a).metadata).astype(int)
    columns = np.repeat(np.arange(0, FEATURES, 4), 2) + positions
    gradient = np.take_along_axis(np.asarray(da, np.float32), columns, axis=1)
    root = np.asarray(
        jnp.sqrt(a.values.astype(jnp.float32)).astype(a.dtype), np.float32
    )
    with np.errstate(invalid="ignore", over="ignore"):
        expected = jnp.asarray(gradient * (2 * root)).astype(jnp.bfloat16)
    same(got, expected)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_keeps_the_two_largest_of_four_gated_features(kernels, tokens, dtype):
    gate = random((tokens, FEATURES), dtype)
    up = random((tokens, FEATURES), dtype, seed=1)
    values, metadata, nonzeros, hidden, kept_up = kernels.keep_gated_features(gate, up)
    relu = jnp.maximum(gate, 0)
    a = relu * relu * up
    mask = magnitude_mask(a)
    for got, of in ((values, a), (hidden, relu), (kept_up, up)):
        expected = pack(compress(of, mask=mask))
        # Without optimisations XLA keeps the rounding between the two products.
        same(got, expected.values)
    np.testing.assert_array_equal(
        np.asarray(unpack(Packed(values, metadata)).metadata),
        np.asarray(unpack(expected).metadata),
    )
    dense = np.asarray(jnp.where(mask, a, 0).astype(jnp.float32)) != 0
    dense = np.pad(dense, ((0, -tokens % 64), (0, 0)))
    counts = dense.reshape(-1, 16, FEATURES).sum(axis=1)
    np.testing.assert_array_equal(np.asarray(nonzeros), counts)


@pytest.mark.parametrize("tokens", TOKENS)
def test_gradients_of_both_branches_are_formed_at_the_kept_positions(kernels, tokens):
    gate, up, da = (random((tokens, FEATURES), seed=i) for i in range(3))
    relu = jnp.maximum(gate, 0)
    mask = magnitude_mask(relu * relu * up)
    packed = [pack(compress(of, mask=mask)) for of in (relu, up, da)]
    hidden, kept_up, kept_da = (np.asarray(p.values, np.float32) for p in packed)
    got = kernels.gated_backward(
        da, packed[0].values, packed[1].values, packed[0].metadata
    )
    with np.errstate(invalid="ignore", over="ignore"):
        expected = kept_da * hidden * 2 * kept_up, kept_da * hidden * hidden
    for ours, theirs in zip(got, expected, strict=True):
        same(ours, jnp.asarray(theirs).astype(jnp.bfloat16))


def sparse_rows(c, rows):
    return replace(c, values=c.values[rows], metadata=c.metadata[rows])


def transposed(x, mask) -> Packed:
    return pack(compress(x.T, mask=mask.T))


@pytest.mark.parametrize("with_rest", [False, True])
@pytest.mark.parametrize(("tokens", "ordered"), [(30, 64), (100, 128), (150, 192)])
def test_keeps_the_two_largest_of_four_tokens(kernels, tokens, ordered, with_rest):
    packed = kept_features(random((tokens, FEATURES)))
    order = np.full(ordered, -1, np.int32)
    order[:tokens] = np.random.default_rng(1).permutation(tokens)
    dense = jnp.pad(decompress(unpack(packed)), ((0, 1), (0, 0)))[order]
    mask = magnitude_mask(dense, axis=0)
    slots = None
    if with_rest:  # every second feature, in another order
        slots = np.full(FEATURES, -1, np.int32)
        slots[::2] = np.random.default_rng(0).permutation(64)
    got = over_tokens_sm90.keep_tokens(
        packed.values,
        packed.metadata,
        jnp.asarray(order),
        slots if slots is None else jnp.asarray(slots),
        rest_rows=64 * with_rest,
    )
    kept = unpack(Packed(*got))
    like = [transposed(dense, mask)]
    if with_rest:
        rest = transposed(dense, ~mask)
        like.append(pack(sparse_rows(unpack(rest), np.argsort(slots)[64:])))
    like = [unpack(packed) for packed in like]
    same(kept.values, jnp.concatenate([c.values for c in like]))
    positions = jnp.concatenate([c.metadata for c in like])
    np.testing.assert_array_equal(kept.metadata, positions)


def lowered(function, *shapes) -> str:
    operands = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    traced = jax.jit(function).trace(*operands)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_lowers_for_hopper(dtype):
    y_up, kept = ((100, 128), dtype), ((100, 64), dtype)
    words = ((2, 2, 128), "uint32")
    assert "mosaic_gpu" in lowered(activations_sm90.keep_features, y_up)
    assert "mosaic_gpu" in lowered(activations_sm90.backward, y_up, kept, words)
    assert "mosaic_gpu" in lowered(activations_sm90.keep_gated_features, y_up, y_up)
    gated = lowered(activations_sm90.gated_backward, y_up, kept, kept, words)
    assert "mosaic_gpu" in gated
    order = slots = ((128,), "int32")
    keep_tokens = over_tokens_sm90.keep_tokens
    assert "mosaic_gpu" in lowered(keep_tokens, kept, words, order)
    with_rest = partial(keep_tokens, rest_rows=64)
    assert "mosaic_gpu" in lowered(with_rest, kept, words, order, slots)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: activations_sm90.keep_features(jnp.zeros((4, 96), jnp.bfloat16)),
            "96 features are not a multiple of 64",
        ),
        (
            lambda: activations_sm90.keep_features(jnp.zeros((4, 64))),
            "not float32",
        ),
        (
            lambda: activations_sm90.keep_gated_features(
                jnp.zeros((4, 64), jnp.bfloat16), jnp.zeros((4, 128), jnp.bfloat16)
            ),
            "gate bfloat16.* and up bfloat16.* must be alike",
        ),
        (
            lambda: over_tokens_sm90.keep_tokens(
                jnp.zeros((100, 32), jnp.bfloat16),
                jnp.zeros((2, 1, 128), jnp.uint32),
                jnp.arange(100),
            ),
            "100 tokens in order .* multiples of 64",
        ),
    ],
)
def test_what_cannot_be_packed_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
