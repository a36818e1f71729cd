"""A GEMM with one compressed operand: product, exact gradient, refusals."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from sparsejax.ops.sparse_matmul import explain_sparse_matmul, sparse_matmul
from sparsejax.sparsity.compressed import compress
from sparsejax.sparsity.patterns import NM, VNM

# (m, k, n): odd rows and columns, one group, one row, one column
SIZES = [(5, 8, 7), (1, 4, 1), (3, 24, 1)]
PATTERNS = [NM(2, 4), NM(1, 8)]

FITTING = [(s, p) for s in SIZES for p in PATTERNS if s[1] % p.m == 0]
CASES = pytest.mark.parametrize(("size", "pattern"), FITTING)
SIDES = pytest.mark.parametrize("side", ["lhs", "rhs", "rhs, stored transposed"])
BACKENDS = pytest.mark.parametrize("backend", ["xla", "reference"])


def masked(w, pattern):
    """`w` with the largest of every m along the last axis, and which: plain loops."""
    kept = np.zeros(w.shape, bool)
    for row in range(w.shape[0]):
        for start in range(0, w.shape[1], pattern.m):
            group = range(start, start + pattern.m)
            ranked = sorted(group, key=lambda i: (-abs(w[row, i]), i))
            kept[row, ranked[: pattern.n]] = True
    return np.where(kept, w, 0), kept


def operands(size, pattern, side, seed=0):
    """(lhs, rhs) as passed, and both dense as they count."""
    m, k, n = size
    rng = np.random.default_rng(seed)
    lhs, rhs = rng.normal(size=(m, k)), rng.normal(size=(k, n))
    if side == "lhs":
        dense = masked(lhs, pattern)[0]
        return compress(jnp.asarray(lhs), pattern), jnp.asarray(rhs), dense, rhs
    dense = masked(rhs.T, pattern)[0].T
    if side == "rhs":
        packed = compress(jnp.asarray(rhs), pattern, axis=0)
    else:
        packed = compress(jnp.asarray(rhs.T), pattern, axis=1)
    return jnp.asarray(lhs), packed, lhs, dense


@CASES
@SIDES
@BACKENDS
def test_product(size, pattern, side, backend):
    with jax.enable_x64(True):
        lhs, rhs, dense_lhs, dense_rhs = operands(size, pattern, side)
        got = sparse_matmul(lhs, rhs, backend=backend)
    # float64 sums of at most 24 products
    np.testing.assert_allclose(got, dense_lhs @ dense_rhs, rtol=1e-13, atol=1e-13)


@SIDES
def test_gradient_by_finite_differences(side):
    with jax.enable_x64(True):
        lhs, rhs, *_ = operands((5, 8, 7), NM(2, 4), side)
        packed, dense = (lhs, rhs) if side == "lhs" else (rhs, lhs)

        def product(values, dense):
            sparse = replace(packed, values=values)
            pair = (sparse, dense) if side == "lhs" else (dense, sparse)
            return sparse_matmul(*pair)

        check_grads(product, (packed.values, dense), 1, ["rev"], rtol=1e-6)


@CASES
@SIDES
def test_gradient_of_the_kept_values_only(size, pattern, side):
    with jax.enable_x64(True):
        lhs, rhs, dense_lhs, dense_rhs = operands(size, pattern, side)
        dout = np.random.default_rng(1).normal(size=(size[0], size[2]))
        _, pull_back = jax.vjp(sparse_matmul, lhs, rhs)
        got = dict(zip(("lhs", "rhs"), pull_back(jnp.asarray(dout)), strict=True))
    expected = {"lhs": dout @ dense_rhs.T, "rhs": dense_lhs.T @ dout}
    packed, name = (lhs, "lhs") if side == "lhs" else (rhs, "rhs")
    # of the compressed operand: the entries of the dense gradient at kept places
    original = np.random.default_rng(0)
    full_lhs = original.normal(size=size[:2])
    full = full_lhs if side == "lhs" else original.normal(size=size[1:]).T
    _, kept = masked(full, pattern)
    at_kept = (expected[name] if side == "lhs" else expected[name].T)[kept]
    values = got.pop(name).values
    values = values.T if packed.axis == -2 else values
    np.testing.assert_allclose(values.reshape(-1), at_kept, rtol=1e-13, atol=1e-13)
    ((other, dense),) = got.items()
    np.testing.assert_allclose(dense, expected[other], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("side", ["lhs", "rhs"])
def test_dtypes_follow_the_operands(side):
    """Float32 weights with bfloat16 activations: each gets a gradient of its dtype."""
    lhs, rhs, *_ = operands((5, 8, 7), NM(2, 4), side)
    packed, dense = (lhs, rhs) if side == "lhs" else (rhs, lhs)
    packed = replace(packed, values=packed.values.astype(jnp.float32))
    dense = dense.astype(jnp.bfloat16)
    pair = (packed, dense) if side == "lhs" else (dense, packed)
    out, pull_back = jax.vjp(sparse_matmul, *pair)
    grads = pull_back(out)
    of_packed, of_dense = grads if side == "lhs" else grads[::-1]
    assert out.dtype == of_dense.dtype == jnp.bfloat16
    assert of_packed.values.dtype == jnp.float32


def test_sum_in_float32():
    """1 + 256 * 2^-8 is 2; summed in bfloat16, with 8 bits, it would stay 1."""
    k = 1024
    lhs = np.full((1, k), 2.0**-8, np.float32)
    lhs[0, 0] = 1.0
    rhs = compress(jnp.ones((k, 1), jnp.bfloat16), NM(1, 4), axis=0)
    got = sparse_matmul(jnp.asarray(lhs, jnp.bfloat16), rhs)
    assert float(got[0, 0]) == pytest.approx(1 + 255 * 2**-8, rel=2**-8)


@SIDES
def test_transformations(side):
    """jit, vmap, remat and scan against one call at a time."""
    with jax.enable_x64(True):
        both = [operands((5, 8, 7), NM(2, 4), side, seed)[:2] for seed in (0, 1)]
        expected = [sparse_matmul(*pair) for pair in both]
        lhs, rhs = jax.tree.map(lambda *leaves: jnp.stack(leaves), *both)
        runs = {
            "vmap": jax.vmap(sparse_matmul),
            "remat": jax.vmap(jax.checkpoint(sparse_matmul)),
            "scan": lambda *pairs: jax.lax.scan(
                lambda _, pair: (None, sparse_matmul(*pair)), None, pairs
            )[1],
        }
        for name, run in runs.items():
            got = jax.jit(run)(lhs, rhs)
            np.testing.assert_allclose(
                got, jnp.stack(expected), rtol=1e-13, atol=1e-13, err_msg=name
            )


def test_explain():
    lhs, rhs, *_ = operands((5, 8, 7), NM(2, 4), "rhs, stored transposed")
    decision = explain_sparse_matmul(lhs, rhs)
    spec = decision.spec
    assert (spec.tokens, spec.d_in, spec.d_out) == (5, 8, 7)
    assert spec.sparse_operand == "weight"
    assert spec.pattern == NM(2, 4)
    assert (decision.backend, decision.executed_share) == ("xla", 1.0)
    assert decision.path == "dense GEMM over the masked weight; skips nothing"


def test_errors():
    dense = jnp.ones((8, 8))
    packed = compress(dense, NM(2, 4), axis=0)
    row_wise = compress(dense, NM(2, 4), axis=1)
    with pytest.raises(ValueError, match="exactly one compressed operand, got .*@"):
        sparse_matmul(dense, dense)
    with pytest.raises(ValueError, match="decompress the other"):
        sparse_matmul(row_wise, packed)
    with pytest.raises(ValueError, match="lhs is sparse along axis 0.*axis=-1"):
        sparse_matmul(packed, dense)
    with pytest.raises(ValueError, match=r"8 in lhs .8, 8., 4 in rhs .* sparse axis 0"):
        sparse_matmul(dense, compress(jnp.ones((4, 8)), NM(2, 4), axis=0))
    with pytest.raises(ValueError, match="takes matrices.*jax.vmap"):
        sparse_matmul(jnp.ones((2, 8, 8)), packed)
    with pytest.raises(NotImplementedError, match="mosaic_sm90: needs a Hopper GPU"):
        sparse_matmul(dense, packed, backend="mosaic_sm90")


def test_vnm_operand():
    """V:N:M is sparse along its last axis: rows of the lhs, or a transposed weight."""
    rng = np.random.default_rng(0)
    w, x = rng.normal(size=(6, 16)), rng.normal(size=(16, 3))
    with jax.enable_x64(True):
        packed = compress(jnp.asarray(w), VNM(2, 2, 8))
        dense = np.zeros_like(w)
        for row, group in np.ndindex(6, 2):
            for i in range(2):
                place = packed.metadata[row, 2 * group + i]
                column = 8 * group + packed.columns[row // 2, group, place]
                dense[row, column] = packed.values[row, 2 * group + i]
        left = sparse_matmul(packed, jnp.asarray(x))
        right = sparse_matmul(jnp.asarray(x.T), packed)
    np.testing.assert_allclose(left, dense @ x, rtol=1e-13, atol=1e-13)
    np.testing.assert_allclose(right, x.T @ dense.T, rtol=1e-13, atol=1e-13)
