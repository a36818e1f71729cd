"""The order of a packed weight, against a loop over the threads that read it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax.sparsity.compressed import compress, decompress
from sparsejax.sparsity.packed import Packed, pack, unpack
from sparsejax.sparsity.patterns import NM, TWO_FOUR

# Compiled once per shape, instead of once per primitive.
compress_jit = jax.jit(compress, static_argnames="axis")
decompress_jit = jax.jit(decompress)
pack_jit = jax.jit(pack)
unpack_jit = jax.jit(lambda packed: decompress(unpack(packed)))


def random(shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


def words_by_thread(w: np.ndarray) -> np.ndarray:
    """Returns what PTX asks of every thread, entry by entry, of a 2:4 matrix."""
    rows, k = w.shape
    words = np.zeros((-(-rows // 64), k // 64, 128), np.uint32)
    for block_row, block_column, thread in np.ndindex(words.shape):
        for half in range(2):
            row = 64 * block_row + 16 * (thread // 32) + thread % 32 // 4 + 8 * half
            for group in range(4):
                column = 64 * block_column + 16 * (thread % 4) + 4 * group
                first, second = 0, 1  # of a row that fills the block: it must be legal
                if row < rows:
                    first, second = np.flatnonzero(w[row, column : column + 4])
                bits = int(first) | int(second) << 2
                words[block_row, block_column, thread] |= bits << (
                    16 * half + 4 * group
                )
    return words


@pytest.mark.parametrize("shape", [(64, 64), (128, 192), (7, 64), (100, 128)])
@pytest.mark.parametrize("axis", [-1, -2])
def test_every_thread_finds_its_positions(shape, axis):
    w = random(shape)
    compressed = compress_jit(w if axis == -1 else w.T, axis=axis)
    packed = pack_jit(compressed)
    dense = np.asarray(decompress_jit(compressed))
    np.testing.assert_array_equal(
        packed.metadata, words_by_thread(dense if axis == -1 else dense.T)
    )
    assert packed.shape == shape and packed.dtype == jnp.float32
    assert packed.ndim == 2 and packed.metadata.dtype == jnp.uint32
    assert unpack(packed).metadata.dtype == jnp.uint8
    np.testing.assert_array_equal(unpack_jit(packed), dense if axis == -1 else dense.T)


def test_leading_axes_are_matrices_of_their_own():
    w = random((3, 2, 72, 64))
    stacked = pack(compress(w))
    single = pack(compress(w[2, 1]))
    np.testing.assert_array_equal(stacked.metadata[2, 1], single.metadata)
    np.testing.assert_array_equal(stacked.values[2, 1], single.values)
    unpacked = unpack(stacked)
    np.testing.assert_array_equal(unpacked.metadata, compress(w).metadata)
    in_vmap = jax.vmap(jax.vmap(lambda p: unpack(p).metadata))(stacked)
    np.testing.assert_array_equal(in_vmap, unpacked.metadata)


def test_a_packed_bfloat16_weight_has_nine_sixteenths_of_its_bytes():
    packed = pack(compress(random((128, 256)).astype(jnp.bfloat16)))
    leaves = jax.tree.leaves(packed)
    assert sum(leaf.nbytes for leaf in leaves) * 16 == 9 * 128 * 256 * 2
    assert isinstance(packed, Packed) and packed.pattern == TWO_FOUR


@pytest.mark.parametrize(
    ("shape", "pattern", "message"),
    [
        ((64, 96), TWO_FOUR, r"k=96, .* not a multiple of 64; pad it to 128"),
        ((64, 64), NM(1, 4), r"pattern=NM\(n=1, m=4\) is not 2:4"),
    ],
)
def test_what_tensor_cores_cannot_read_is_refused(shape, pattern, message):
    with pytest.raises(ValueError, match=message):
        pack(compress(random(shape), pattern))


def test_a_matrix_that_is_sparse_between_matrices_is_refused():
    compressed = compress(random((64, 64, 64)), axis=0)
    with pytest.raises(ValueError, match="axis=-3 is none of the last two"):
        pack(compressed)
