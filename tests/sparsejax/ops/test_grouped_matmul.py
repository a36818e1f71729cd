"""Grouped GEMMs against a loop over rows, on every path."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

from sparsejax.ops import grouped_loops
from sparsejax.ops.grouped_matmul import grouped_matmul, grouped_outer
from tests.support.devices import hopper

EXPERTS, TILES, K, N = 3, 7, 5, 6


def in_chunks(run, size):
    """Runs what "xla" is where the platform is no CPU, with chunks of `size` rows."""

    def with_size(*arguments):
        with mock.patch.object(grouped_loops, "CHUNK_ROWS", size):
            return run(*arguments)

    return with_size


def ragged_dot(rows, weights, tile_expert, used, *, out_dtype=None):
    """What "xla" is on a TPU."""
    out_dtype = rows.dtype if out_dtype is None else out_dtype
    operands = rows, weights, tile_expert, used
    return grouped_loops.matmul_by_ragged_dot(*operands, out_dtype)


def matmul_in_chunks(size):
    def run(rows, weights, tile_expert, used, *, out_dtype=None):
        out_dtype = rows.dtype if out_dtype is None else out_dtype
        operands = rows, weights, tile_expert, used
        return in_chunks(grouped_loops.matmul_by_chunks, size)(*operands, out_dtype)

    return run


MATMULS = {
    "xla": functools.partial(grouped_matmul, backend="xla"),
    "reference": functools.partial(grouped_matmul, backend="reference"),
    "tokamax": functools.partial(grouped_matmul, backend="tokamax"),
    "ragged dot": ragged_dot,
    "chunks of 3": matmul_in_chunks(3),
    "chunks of 2048": matmul_in_chunks(2048),
}
OUTERS = {
    "xla": functools.partial(grouped_outer, backend="xla"),
    "reference": functools.partial(grouped_outer, backend="reference"),
    "tokamax": functools.partial(grouped_outer, backend="tokamax"),
    "ragged dot": grouped_loops.outer_by_ragged_dot,
    "chunks of 3": in_chunks(grouped_loops.outer_by_chunks, 3),
    "chunks of 2048": in_chunks(grouped_loops.outer_by_chunks, 2048),
}
PATHS = pytest.mark.parametrize("path", MATMULS)

ROUTINGS = {
    "some of each": [4, 1, 3],
    "empty first": [0, 5, 2],
    "empty last": [6, 1, 0],
    "all in the middle": [0, 12, 0],
    "nothing": [0, 0, 0],
    "one row": [0, 0, 1],
}
ROUTING = pytest.mark.parametrize("sizes", ROUTINGS.values(), ids=ROUTINGS)


def layout(sizes, v):
    """(expert of each tile, used tiles, expert of each row or -1): plain loops."""
    tile_expert, row_expert = [], []
    for expert, size in enumerate(sizes):
        tiles = -(-size // v)
        tile_expert += [expert] * tiles
        row_expert += [expert] * size + [-1] * (tiles * v - size)
    used = len(tile_expert)
    assert used <= TILES
    tile_expert += [EXPERTS - 1] * (TILES - used)
    row_expert += [-1] * (TILES * v - len(row_expert))
    return np.array(tile_expert, np.int32), np.int32(used), np.array(row_expert)


def make(sizes, v, seed=0):
    tile_expert, used, row_expert = layout(sizes, v)
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(TILES * v, K)) * (row_expert >= 0)[:, None]
    weights = rng.normal(size=(EXPERTS, K, N))
    return rows, weights, tile_expert, used, row_expert


def expected_matmul(rows, weights, row_expert):
    out = np.zeros((len(rows), N))
    for row, expert in enumerate(row_expert):
        if expert >= 0:
            out[row] = rows[row] @ weights[expert]
    return out


def expected_outer(lhs, rhs, row_expert):
    out = np.zeros((EXPERTS, lhs.shape[1], rhs.shape[1]))
    for row, expert in enumerate(row_expert):
        if expert >= 0:
            out[expert] += np.outer(lhs[row], rhs[row])
    return out


def assert_close(got, expected):
    # float64 sums of at most 28 products
    np.testing.assert_allclose(got, expected, rtol=1e-13, atol=1e-13)


@PATHS
@ROUTING
def test_matmul(path, sizes):
    rows, weights, tile_expert, used, row_expert = make(sizes, v=4)
    with jax.enable_x64(True):
        got = jax.jit(MATMULS[path])(rows, weights, tile_expert, used)
    assert_close(got, expected_matmul(rows, weights, row_expert))


@PATHS
def test_the_result_may_be_float32(path):
    """Sums of bfloat16 products that are not rounded to bfloat16."""
    rows, weights, tile_expert, used, row_expert = make([4, 1, 3], v=4)
    rows, weights = (jnp.asarray(a, jnp.bfloat16) for a in (rows, weights))
    run = functools.partial(MATMULS[path], out_dtype=jnp.float32)
    got = jax.jit(run)(rows, weights, tile_expert, used)
    assert got.dtype == jnp.float32
    exact = [np.asarray(a, np.float64) for a in (rows, weights)]
    # float32 sums of at most 28 products
    expected = expected_matmul(*exact, row_expert)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


@PATHS
@ROUTING
def test_outer(path, sizes):
    rows, _, tile_expert, used, row_expert = make(sizes, v=4)
    other = np.random.default_rng(1).normal(size=(len(rows), N))
    with jax.enable_x64(True):
        run = jax.jit(OUTERS[path], static_argnums=4)
        got = run(rows, other, tile_expert, used, EXPERTS)
    # padding rows of `other` hold numbers; those of `rows` are zero, which is enough
    assert_close(got, expected_outer(rows, other, row_expert))


@pytest.mark.parametrize("backend", ["xla", "reference"])
def test_outer_as_columns_of_one_weight(backend):
    rows, _, tile_expert, used, _ = make([4, 1, 3], v=4)
    rows = rows.astype(np.float32)
    run = functools.partial(
        grouped_outer, rows, rows, tile_expert, used, EXPERTS, backend=backend
    )
    np.testing.assert_array_equal(run(expert_axis=1), run().swapaxes(0, 1))


@pytest.mark.parametrize("expert_axis", [0, 1])
def test_outer_of_whole_tiles_takes_its_kernel_unasked(monkeypatch, expert_axis):
    calls = hopper.pretend(monkeypatch)
    tile_expert, used, _ = layout([100, 0, 3], v=64)
    operands = (
        jax.random.randint(key, (len(tile_expert) * 64, size), -1, 2)
        for key, size in zip(
            jax.random.split(jax.random.key(0)), (64, 128), strict=True
        )
    )
    lhs, rhs = (x.astype(jnp.bfloat16) for x in operands)
    run = functools.partial(grouped_outer, expert_axis=expert_axis)
    where = (jnp.asarray(tile_expert), used, EXPERTS)
    got = run(lhs, rhs, *where)
    assert calls == ["dense_over_rows"]
    np.testing.assert_array_equal(got, run(lhs, rhs, *where, backend="reference"))
    one, other = (jnp.stack([x, 2 * x]) for x in (lhs, rhs))
    both = jax.vmap(lambda a, b: run(a, b, *where))(one, other)
    np.testing.assert_array_equal(both, jnp.stack([got, 4 * got]))
    calls.clear()
    run(lhs.astype(jnp.float32), rhs.astype(jnp.float32), *where)
    assert calls == []


def test_rows_of_whole_tiles_take_their_kernel_unasked(monkeypatch):
    """Forward and backward. What it leaves beyond the used tiles, NaN here, is zero in
    the result."""
    calls = hopper.pretend(monkeypatch)
    tile_expert, used, _ = layout([100, 0, 200], v=128)
    rows = jax.random.randint(jax.random.key(0), (len(tile_expert) * 128, 128), -1, 2)
    weights = jax.random.randint(jax.random.key(1), (EXPERTS, 128, 192), -1, 2)
    padding = np.arange(len(rows))[:, None] < 128 * used
    rows, weights = (x.astype(jnp.bfloat16) for x in (rows * padding, weights))
    where = jnp.asarray(tile_expert), used

    def run(backend):
        of = lambda *operands: grouped_matmul(*operands, *where, backend=backend)
        out, pull_back = jax.vjp(of, rows, weights)
        # Signs, so that all sums are of whole numbers that bfloat16 has.
        return out, *pull_back(jnp.sign(out))

    got = run(None)
    assert calls == ["dense_rows", "dense_rows", "dense_over_rows"]
    for ours, theirs in zip(got, run("reference"), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    calls.clear()
    grouped_matmul(rows.astype(jnp.float32), weights, *where)
    grouped_matmul(rows[:, :64], weights[:, :64], *where)
    assert calls == []


@pytest.mark.parametrize(
    ("matmul", "outer"),
    [
        (grouped_loops.matmul_by_tiles, grouped_loops.outer_by_tiles),
        (grouped_loops._matmul_by_chunks, grouped_loops._outer_by_chunks),
    ],
)
def test_outside_of_a_jit_a_loop_is_compiled_once(matmul, outer):
    rows, weights, *tiles, _ = make([4, 1, 3], v=2)
    size = (4,) if matmul is grouped_loops._matmul_by_chunks else ()
    before = matmul._cache_size(), outer._cache_size()
    for _ in range(2):
        out = matmul(rows, weights, *tiles, jnp.dtype("float32"), *size)
        outer(rows, out, *tiles, EXPERTS, *size)
    assert (matmul._cache_size(), outer._cache_size()) == (before[0] + 1, before[1] + 1)


def test_a_routing_may_need_every_chunk():
    """The number of chunks is static, and the least that all routings fit in: chunks of
    5 rows, experts with 6, 6 and 2 of 14 need rows // size + experts of them."""
    rows, weights, tile_expert, used, row_expert = make([6, 5, 2], v=2)
    assert used == TILES and len(rows) // 5 + EXPERTS == 2 + 2 + 1
    with jax.enable_x64(True):
        matmul = jax.jit(matmul_in_chunks(5))
        got = matmul(rows, weights, tile_expert, used)
        outer = jax.jit(in_chunks(grouped_loops.outer_by_chunks, 5), static_argnums=4)
        dweights = outer(rows, got, tile_expert, used, EXPERTS)
    expected = expected_matmul(rows, weights, row_expert)
    assert_close(got, expected)
    assert_close(dweights, expected_outer(rows, expected, row_expert))


@functools.cache
def compiled(path, v):
    """One compilation per v: group sizes are data."""
    return jax.jit(MATMULS[path]), jax.jit(OUTERS[path], static_argnums=4)


@pytest.mark.parametrize("path", ["xla", "chunks of 3"])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_group_sizes(path, data):
    v = data.draw(st.sampled_from([1, 2, 5]))
    sizes, left = [], TILES
    for _ in range(EXPERTS):
        size = data.draw(st.integers(0, left * v))
        left -= -(-size // v)
        sizes.append(size)
    seed = data.draw(st.integers(0, 100))
    rows, weights, tile_expert, used, row_expert = make(sizes, v, seed)
    matmul, outer = compiled(path, v)
    with jax.enable_x64(True):
        out = matmul(rows, weights, tile_expert, used)
        assert_close(out, expected_matmul(rows, weights, row_expert))
        dweights = outer(rows, out, tile_expert, used, EXPERTS)
    assert_close(dweights, expected_outer(rows, np.asarray(out), row_expert))


@pytest.mark.parametrize("backend", ["xla", "tokamax", "reference"])
@ROUTING
def test_gradient(backend, sizes):
    rows, weights, tile_expert, used, row_expert = make(sizes, v=4)

    def product(rows, weights):
        return grouped_matmul(rows, weights, tile_expert, used, backend=backend)

    own = (row_expert >= 0)[:, None]
    dout = np.random.default_rng(2).normal(size=(len(rows), N)) * own
    with jax.enable_x64(True):
        _, pull_back = jax.vjp(product, jnp.asarray(rows), jnp.asarray(weights))
        drows, dweights = pull_back(jnp.asarray(dout))
        check_grads(product, (rows, weights), 1, ["rev"], rtol=1e-6)
    for row, expert in enumerate(row_expert):
        if expert >= 0:
            assert_close(drows[row], weights[expert] @ dout[row])
    assert_close(dweights, expected_outer(rows, dout, row_expert))


@PATHS
def test_unused_tiles_are_not_read(path):
    """A NaN behind the last used tile reaches nothing."""
    rows, weights, tile_expert, used, _ = make([4, 1, 3], v=4)
    rows[used * 4 :] = np.nan
    got = jax.jit(MATMULS[path])(rows, weights, tile_expert, used)
    assert np.all(np.isfinite(got))
    np.testing.assert_array_equal(got[used * 4 :], np.zeros_like(got[used * 4 :]))


@pytest.mark.parametrize("path", MATMULS)
def test_bfloat16_accumulates_in_float32(path):
    """256 terms of 2^-8 beside a 1: lost one by one in bfloat16, kept in float32."""
    k = 256
    rows = np.full((TILES, k), 2.0**-8)
    rows[:, 0] = 1.0
    weights = np.ones((EXPERTS, k, 2))
    tile_expert = np.array([0, 0, 1, 1, 2, 2, 2], np.int32)
    arrays = (jnp.asarray(rows, jnp.bfloat16), jnp.asarray(weights, jnp.bfloat16))
    out = MATMULS[path](*arrays, tile_expert, np.int32(TILES))
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(out, float), 1 + 255 / 256, rtol=2**-8)
    dweights = OUTERS[path](
        *(a[:TILES] for a in (arrays[0], arrays[0])),
        tile_expert,
        np.int32(TILES),
        EXPERTS,
    )
    # two rows for experts 0 and 1, three for 2, in float32: exact
    assert dweights.dtype == jnp.float32
    np.testing.assert_array_equal(dweights[:, 1, 1], np.array([2, 2, 3]) * 2.0**-16)


@pytest.mark.parametrize("transformation", ["vmap", "remat", "scan"])
def test_transformations(transformation):
    """Group sizes may differ inside a batch."""
    both = [
        make(sizes, v=4, seed=seed) for seed, sizes in enumerate([[4, 1, 3], [0, 9, 2]])
    ]
    stacked = [np.stack(arrays) for arrays in list(zip(*both, strict=True))[:4]]

    def one(rows, weights, tile_expert, used):
        def product(rows, weights):
            return grouped_matmul(rows, weights, tile_expert, used)

        if transformation == "remat":
            product = jax.checkpoint(product)
        out, pull_back = jax.vjp(product, rows, weights)
        return out, *pull_back(out)

    def scan(*stacked):
        return jax.lax.scan(lambda _, one_each: (None, one(*one_each)), None, stacked)[
            1
        ]

    with jax.enable_x64(True):
        run = jax.vmap(one) if transformation == "vmap" else scan
        out, drows, dweights = jax.jit(run)(*stacked)
    for i, (rows, weights, _, _, row_expert) in enumerate(both):
        expected = expected_matmul(rows, weights, row_expert)
        assert_close(out[i], expected)
        assert_close(dweights[i], expected_outer(rows, expected, row_expert))
        transposed = np.einsum("rn,rkn->rk", expected, weights[row_expert])
        assert_close(drows[i], transposed)


def test_gpu_takes_static_loops_and_lowers(monkeypatch):
    """A loop whose length is data waits for the host on GPU: none may be left."""
    hopper.see_device(monkeypatch, hopper.A100)
    rows, weights, tile_expert, used, row_expert = make([4, 1, 3], v=4)

    def loss(rows, weights):
        return jnp.sum(grouped_matmul(rows, weights, tile_expert, used) ** 2) / 2

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))
    with jax.enable_x64(True):
        traced = gradient.trace(jnp.asarray(rows), jnp.asarray(weights))
        _, dweights = gradient(rows, weights)
    text = str(traced.jaxpr)
    # forward, dX, dW
    assert text.count(" scan[") == 3 and "while[" not in text
    assert traced.lower(lowering_platforms=("cuda",)).as_text()
    out = expected_matmul(rows, weights, row_expert)
    assert_close(dweights, expected_outer(rows, out, row_expert))


@pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="other devices loop over chunks"
)
def test_cpu_takes_the_loop():
    rows, weights, tile_expert, used, _ = make([4, 1, 3], v=4)
    text = str(jax.make_jaxpr(grouped_matmul)(rows, weights, tile_expert, used))
    assert "while[" in text


def test_errors():
    rows, weights, tile_expert, used, _ = make([4, 1, 3], v=4)
    with pytest.raises(ValueError, match="5 columns but .* contract 6"):
        grouped_matmul(rows, weights.swapaxes(1, 2), tile_expert, used)
    with pytest.raises(ValueError, match="27 rows are not a whole number of 7 tiles"):
        grouped_matmul(rows[:27], weights, tile_expert, used)
    with pytest.raises(ValueError, match="lhs has 28 rows and rhs 27"):
        grouped_outer(rows, rows[:27], tile_expert, used, EXPERTS)
    with pytest.raises(ValueError, match="expert_axis=2 must be one of 0, 1"):
        grouped_outer(rows, rows, tile_expert, used, EXPERTS, expert_axis=2)
    with pytest.raises(NotImplementedError, match="needs a Hopper GPU"):
        grouped_matmul(rows, weights, tile_expert, used, backend="mosaic_sm90")
    with pytest.raises(NotImplementedError, match="needs a Hopper GPU"):
        grouped_outer(rows, rows, tile_expert, used, EXPERTS, backend="mosaic_sm90")
