"""2:4 activations on Hopper: the kernels' bodies run on CPU, lowered for CUDA, and run
where there is a GPU."""

import itertools
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.sm90 import activations, over_tokens
from pallas_kernels.sm90.threads import activation_tiles
from sparsejax.feed_forward.operands.token_sparsity import fixed_token_order
from sparsejax.sparsity.compressed import compress, decompress
from sparsejax.sparsity.masks import magnitude_mask, nm_mask
from sparsejax.sparsity.packed import Packed, pack, unpack
from sparsejax.sparsity.patterns import NM
from tests.support.devices.emitted import grid, modules
from tests.support.devices.lanes import Memory, emulated, lanes

TOKENS = [1, 100]
FEATURES = 128
GARBAGE = 0xA5


def on_cpu(kernel, grid, out_type, *operands, name, scratch=()):
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
    return activations


@partial(jax.jit, static_argnames=("shape", "dtype", "seed"))
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


# Each compiled once, where the operations in them would be one by one.
kept_by = jax.jit(lambda x, mask: pack(compress(x, mask=mask)))
unpacked = jax.jit(unpack)
decompressed = jax.jit(lambda packed: decompress(unpack(packed)))
two_of_four = jax.jit(magnitude_mask, static_argnames="axis")


@jax.jit
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
    exist = np.asarray(unpacked(Packed(values, metadata)).metadata)
    np.testing.assert_array_equal(exist, np.asarray(unpacked(expected).metadata))
    dense = np.asarray(decompressed(expected).astype(jnp.float32)) != 0
    dense = np.pad(dense, ((0, -tokens % 64), (0, 0)))
    counts = dense.reshape(-1, 16, FEATURES).sum(axis=1)
    np.testing.assert_array_equal(np.asarray(nonzeros), counts)


@pytest.mark.parametrize("tokens", TOKENS)
def test_the_gradient_is_formed_at_the_kept_positions(kernels, tokens):
    y_up, da = random((tokens, FEATURES)), random((tokens, FEATURES), seed=1)
    a = kept_features(y_up)
    got = kernels.backward(da, a.values, a.metadata)
    positions = np.asarray(unpacked(a).metadata).astype(int)
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
    mask = two_of_four(a)
    for got, of in ((values, a), (hidden, relu), (kept_up, up)):
        expected = kept_by(of, mask)
        # Without optimisations XLA keeps the rounding between the two products.
        same(got, expected.values)
    np.testing.assert_array_equal(
        np.asarray(unpacked(Packed(values, metadata)).metadata),
        np.asarray(unpacked(expected).metadata),
    )
    dense = np.asarray(jnp.where(mask, a, 0).astype(jnp.float32)) != 0
    dense = np.pad(dense, ((0, -tokens % 64), (0, 0)))
    counts = dense.reshape(-1, 16, FEATURES).sum(axis=1)
    np.testing.assert_array_equal(np.asarray(nonzeros), counts)


@pytest.mark.parametrize("tokens", TOKENS)
def test_gradients_of_both_branches_are_formed_at_the_kept_positions(kernels, tokens):
    gate, up, da = (random((tokens, FEATURES), seed=i) for i in range(3))
    relu = jnp.maximum(gate, 0)
    mask = two_of_four(relu * relu * up)
    packed = [kept_by(of, mask) for of in (relu, up, da)]
    hidden, kept_up, kept_da = (np.asarray(p.values, np.float32) for p in packed)
    got = kernels.gated_backward(
        da, packed[0].values, packed[1].values, packed[0].metadata
    )
    with np.errstate(invalid="ignore", over="ignore"):
        expected = kept_da * hidden * 2 * kept_up, kept_da * hidden * hidden
    for ours, theirs in zip(got, expected, strict=True):
        same(ours, jnp.asarray(theirs).astype(jnp.bfloat16))


def packed_arrays(packed: Packed):
    return packed.values, packed.metadata


def sparse_rows(c, rows):
    return replace(c, values=c.values[rows], metadata=c.metadata[rows])


def transposed(x, mask) -> Packed:
    return kept_by(x.T, mask.T)


def selected_over_tokens(packed: Packed, dense, by_segments: bool) -> list[Packed]:
    """By the plain definition: all features, and what the dense ones lose."""
    features = decompressed(packed)
    order = np.arange(len(features))
    if by_segments:
        order = fixed_token_order(len(features))
    order = np.pad(order, (0, -order.size % 64), constant_values=-1)
    features = jnp.pad(features, ((0, 1), (0, 0)))[order]
    mask = two_of_four(features, axis=0)
    parts = [transposed(features, mask)]
    if dense is not None:
        rest = unpacked(transposed(features, ~mask))
        parts.append(pack(sparse_rows(rest, np.argsort(dense.slots)[-dense.rows :])))
    return parts


def assert_over_tokens(got, packed: Packed, dense, by_segments: bool) -> None:
    like = [unpacked(part) for part in selected_over_tokens(packed, dense, by_segments)]
    kept = unpacked(Packed(*got))
    same(kept.values, jnp.concatenate([c.values for c in like]))
    positions = jnp.concatenate([c.metadata for c in like])
    np.testing.assert_array_equal(kept.metadata, positions)


@pytest.fixture(params=[False, True], ids=["", "dense features"])
def dense(request):
    """Every second feature, in another order."""
    if not request.param:
        return None
    slots = np.full(FEATURES, -1, np.int32)
    slots[::2] = np.random.default_rng(0).permutation(64)
    return over_tokens.DenseFeatures(jnp.asarray(slots), 64)


@pytest.mark.parametrize("by_segments", [False, True])
@pytest.mark.parametrize("tokens", [30, 64, 150])
def test_keeps_the_two_largest_of_four_tokens(kernels, tokens, by_segments, dense):
    packed = kept_features(random((tokens, FEATURES)))
    got = over_tokens.keep_tokens(
        *packed_arrays(packed), dense, by_segments=by_segments
    )
    assert_over_tokens(got, packed, dense, by_segments)


@pytest.mark.parametrize("by_segments", [False, True])
@pytest.mark.parametrize("tokens", [30, 64, 150])
def test_gradients_are_packed_over_tokens_on_the_way(
    kernels, tokens, by_segments, dense
):
    y_up, da = random((tokens, FEATURES)), random((tokens, FEATURES), seed=1)
    a = kept_features(y_up)
    dy, *packed = over_tokens.backward(
        da, *packed_arrays(a), dense, by_segments=by_segments
    )
    expected = kernels.backward(da, a.values, a.metadata)
    same(dy, expected)
    both = over_tokens.keep_tokens_of_both(
        a.values, dy, a.metadata, dense, by_segments=by_segments
    )
    for arrays in (packed, both):
        for got, of in zip(arrays, (a, Packed(expected, a.metadata)), strict=True):
            assert_over_tokens(got, of, dense, by_segments)


@pytest.mark.parametrize("by_segments", [False, True])
@pytest.mark.parametrize("tokens", [30, 64])
def test_gated_gradients_are_packed_over_tokens_on_the_way(
    kernels, tokens, by_segments, dense
):
    gate, up, da = (random((tokens, FEATURES), seed=i) for i in range(3))
    relu = jnp.maximum(gate, 0)
    mask = two_of_four(relu * relu * up)
    a, hidden, kept_up = (kept_by(of, mask) for of in (relu * relu * up, relu, up))
    kept = hidden.values, kept_up.values, hidden.metadata
    dgate, dup, *packed = over_tokens.gated_backward(
        da, *kept, dense, by_segments=by_segments
    )
    expected = kernels.gated_backward(da, *kept)
    for ours, theirs in zip((dgate, dup), expected, strict=True):
        same(ours, theirs)
    gradients = [Packed(values, hidden.metadata) for values in expected]
    for got, of in zip(packed, (a, *gradients), strict=True):
        assert_over_tokens(got, of, dense, by_segments)


EXPERTS = 3


def by_expert() -> activation_tiles.ByExpert:
    """Rows of three experts in group tiles of 128; some rows are nobody's."""
    generator = np.random.default_rng(3)
    tokens = generator.integers(-1, 40, 4 * 128).astype(np.int32)
    tile_expert = np.array([0, 1, 1, 2], np.int32)
    return activation_tiles.ByExpert(
        jnp.asarray(tokens), jnp.asarray(tile_expert), EXPERTS
    )


def gathered(x, rows: activation_tiles.ByExpert):
    """Returns for each row its token's features of its expert."""
    tokens = np.asarray(rows.row_token)
    parts = np.asarray(x).reshape(len(x), EXPERTS, -1)
    expert = np.repeat(np.asarray(rows.tile_expert), 128)
    found = np.where(tokens[:, None] < 0, 0, parts[tokens, expert])
    return jnp.asarray(found)


def test_rows_of_experts_are_kept_as_if_gathered_before(kernels):
    y_up, rows = random((40, EXPERTS * 64)), by_expert()
    got = kernels.keep_features(y_up, rows)
    for ours, theirs in zip(
        got, kernels.keep_features(gathered(y_up, rows)), strict=True
    ):
        same(ours, theirs)


def test_gradients_of_rows_of_experts_are_those_gathered_before(kernels):
    shape = (40, EXPERTS * 64)
    y_up, da, rows = random(shape), random(shape, seed=1), by_expert()
    a = packed_arrays(kept_features(gathered(y_up, rows)))
    got = kernels.backward(da, *a, rows)
    same(got, kernels.backward(gathered(da, rows), *a))


@pytest.mark.parametrize("in_place", [False, True])
def test_each_expert_has_its_dense_features(kernels, in_place):
    shape = (40, EXPERTS * 64)
    y_up, da, rows = random(shape), random(shape, seed=1), by_expert()
    a = packed_arrays(kept_features(gathered(y_up, rows)))
    slots = np.full((EXPERTS, 64), -1, np.int32)
    for expert in range(EXPERTS):  # all features have a row, in another order
        slots[expert] = np.random.default_rng(expert).permutation(64)
    dense = over_tokens.DenseFeatures(jnp.asarray(slots.reshape(-1)), 64)
    if in_place:
        da, rows = gathered(da, rows), rows._replace(row_token=None)
    dy, *packed = over_tokens.backward(da, *a, dense, by_segments=False, by_expert=rows)
    of_rows = rows._replace(row_token=None)
    both = over_tokens.keep_tokens_of_both(
        a[0], dy, a[1], dense, by_segments=False, by_expert=of_rows
    )
    for ours, theirs in zip(both, packed, strict=True):
        same(ours.values, theirs.values)
        np.testing.assert_array_equal(ours.metadata, theirs.metadata)
    if not in_place:
        da = gathered(da, rows)
    for expert in range(EXPERTS):
        of_expert = over_tokens.DenseFeatures(jnp.asarray(slots[expert]), 64)
        expected_dy, *expected = over_tokens.backward(
            da, *a, of_expert, by_segments=False
        )
        same(dy, expected_dy)
        own = np.repeat(np.asarray(rows.tile_expert) == expert, 2)
        for ours, theirs in zip(packed, expected, strict=True):
            np.testing.assert_array_equal(
                ours.metadata[:, own], theirs.metadata[:, own]
            )
            values = (of.values.reshape(128, -1, 32)[:, own] for of in (ours, theirs))
            same(*values)


def lowered(function, *shapes) -> str:
    operands = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    traced = jax.jit(function).trace(*operands)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


TOKENS = 64 * 65536
"""In blocks of 64 one more than a launch may have along y."""
MANY = {
    "y": jax.ShapeDtypeStruct((TOKENS, 128), "bfloat16"),
    "kept": jax.ShapeDtypeStruct((TOKENS, 64), "bfloat16"),
    "words": jax.ShapeDtypeStruct((TOKENS // 64, 2, 128), "uint32"),
}


@pytest.mark.parametrize(
    ("kernel", "operands"),
    [
        (activations.keep_features, ("y",)),
        (activations.keep_gated_features, ("y", "y")),
        (activations.backward, ("y", "kept", "words")),
        (activations.gated_backward, ("y", "kept", "kept", "words")),
        (partial(over_tokens.keep_tokens, by_segments=True), ("kept", "words")),
        (
            partial(over_tokens.backward, by_segments=True),
            ("y", "kept", "words"),
        ),
    ],
    ids=lambda value: getattr(getattr(value, "func", value), "__name__", None),
)
def test_any_number_of_tokens_can_be_launched(kernel, operands):
    (text,) = modules(kernel, *(MANY[name] for name in operands))
    assert grid(text) == (TOKENS // 64 * 2, 1, 1)


@pytest.mark.newest_jax
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_lowers_for_hopper(dtype):
    y_up, kept = ((100, 128), dtype), ((100, 64), dtype)
    words = ((2, 2, 128), "uint32")
    assert "mosaic_gpu" in lowered(activations.keep_features, y_up)
    assert "mosaic_gpu" in lowered(activations.backward, y_up, kept, words)
    assert "mosaic_gpu" in lowered(activations.keep_gated_features, y_up, y_up)
    rows = jnp.zeros(128, jnp.int32), jnp.zeros(1, jnp.int32)

    def of_experts(y_up):
        return activations.keep_features(
            y_up, activation_tiles.ByExpert(*rows, experts=2)
        )

    assert "mosaic_gpu" in lowered(of_experts, y_up)
    gated = lowered(activations.gated_backward, y_up, kept, kept, words)
    assert "mosaic_gpu" in gated
    slots = ((128,), "int32")
    for function, shapes in (
        (over_tokens.keep_tokens, (kept, words)),
        (over_tokens.keep_tokens_of_both, (kept, kept, words)),
        (over_tokens.backward, (y_up, kept, words)),
        (over_tokens.gated_backward, (y_up, kept, kept, words)),
    ):
        run = partial(function, by_segments=True)
        assert "mosaic_gpu" in lowered(run, *shapes)

        def with_rest(*operands, run=run):
            *operands, slots = operands
            return run(*operands, over_tokens.DenseFeatures(slots, 64))

        assert "mosaic_gpu" in lowered(with_rest, *shapes, slots)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: activations.keep_features(
                jnp.zeros((4, 128), jnp.bfloat16),
                activation_tiles.ByExpert(jnp.zeros(96, jnp.int32), jnp.zeros(2), 2),
            ),
            "96 rows in 2 group tiles",
        ),
        (
            lambda: activations.keep_features(jnp.zeros((4, 96), jnp.bfloat16)),
            "96 features are not a multiple of 64",
        ),
        (
            lambda: activations.keep_features(jnp.zeros((4, 64))),
            "not float32",
        ),
        (
            lambda: activations.keep_gated_features(
                jnp.zeros((4, 64), jnp.bfloat16), jnp.zeros((4, 128), jnp.bfloat16)
            ),
            "gate bfloat16.* and up bfloat16.* must be alike",
        ),
        (
            lambda: over_tokens.keep_tokens(
                jnp.zeros((100, 32), jnp.bfloat16),
                jnp.zeros((2, 1, 128), jnp.uint32),
                over_tokens.DenseFeatures(jnp.zeros(64, jnp.int32), 16),
                by_segments=True,
            ),
            "16 rows below are not a multiple of 64",
        ),
    ],
)
def test_what_cannot_be_packed_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
