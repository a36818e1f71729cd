"""2:4 GEMMs grouped over experts: tasks counted here, lowered, run where a GPU is."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.sm90 import grouped_matmul as grouped
from pallas_kernels.sm90.gemm.split_k import RowParts
from pallas_kernels.sm90.gemm.tile_scheduler import (
    ByExpert,
    OverTokensOfExpert,
    Tiling,
    tiling_of,
)
from pallas_kernels.sm90.sparse_matmul_configs import (
    Config,
    Shape,
    default_config,
    why_invalid,
)
from pallas_kernels.tuning import candidates
from sparsejax.sparsity.compressed import compress, decompress
from sparsejax.sparsity.masks import magnitude_mask
from sparsejax.sparsity.packed import pack, unpack
from tests.support.oracles.expert_groups import GROUP_TILE, GROUPS, UNUSED

MULTIPROCESSORS = 132
sparse_rows, sparse_weights, sparse_over_rows = (
    partial(kernel, multiprocessors=MULTIPROCESSORS)
    for kernel in (
        grouped.sparse_rows,
        grouped.sparse_weights,
        grouped.sparse_over_rows,
    )
)


def groups(name: str):
    """Expert of each group tile, the used ones, and the ends of each expert."""
    counts = np.array(GROUPS[name])
    expert = np.repeat(np.arange(counts.size), counts)
    expert = np.pad(expert, (0, UNUSED), constant_values=counts.size - 1)
    return expert.astype(np.int32), int(counts.sum()), counts.cumsum().astype(np.int32)


# Which tiles are visited.


@pytest.mark.newest_jax
@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("tokens_are_rows", [True, False])
@pytest.mark.parametrize(("size", "width"), [(64, 8), (128, 3), (64, 1)])
def test_every_used_tile_is_visited_once_with_its_expert(
    name, tokens_are_rows, size, width
):
    expert, used, _ = groups(name)
    others, tokens = 3, expert.size * GROUP_TILE // size
    sizes = (tokens, others) if tokens_are_rows else (others, tokens)
    tiling = Tiling(size, size, *sizes, grid_tile_width=width, grid_minor_dim="m")
    walk = ByExpert(
        tiling, jnp.asarray(expert), jnp.asarray([used]), GROUP_TILE, tokens_are_rows
    )
    assert walk.count == used * GROUP_TILE // size * others
    tasks = [walk.task(jnp.int32(i)) for i in range(int(walk.count))]
    places = {(int(t.row), int(t.column)) for t in tasks}
    rows = range(used * GROUP_TILE // size)
    expected = {(row, other) for row in rows for other in range(others)}
    if not tokens_are_rows:
        expected = {place[::-1] for place in expected}
    assert places == expected and len(tasks) == len(expected)
    for task in tasks:
        token = int(task.row if tokens_are_rows else task.column) * size
        assert int(task.expert) == expert[token // GROUP_TILE]


@pytest.mark.newest_jax
@pytest.mark.parametrize("size", [1, 2, 100])
@pytest.mark.parametrize("name", GROUPS)
def test_a_weight_gradient_sums_over_each_experts_own_rows(name, size):
    expert, _, ends = groups(name)
    tiling = Tiling(64, 64, 2, 3, grid_tile_width=8, grid_minor_dim="m")
    parts = RowParts(ends.size, expert.size, size)
    walk = OverTokensOfExpert(tiling, parts, jnp.asarray(ends), steps_of_tile=1)
    of_index = jax.jit(walk.task)
    tasks = [of_index(jnp.int32(i)) for i in range(int(walk.count))]
    steps = {}
    for index, task in enumerate(tasks):
        assert int(task.index) == index
        own = steps.setdefault((int(task.expert), int(task.row), int(task.column)), [])
        # A task may wait for the one that has the part before its own.
        before = tasks[index - 6]
        if int(task.part):
            assert (before.row, before.column) == (task.row, task.column)
            assert int(before.part) == int(task.part) - 1
            assert int(before.parts_after) == int(task.parts_after) + 1
        first = int(task.first_step)
        own.extend(range(first, first + int(task.steps)))
    assert len(steps) == 18
    starts = np.pad(ends[:-1], (1, 0))
    for (expert, _, _), own in steps.items():
        assert own == list(range(starts[expert], ends[expert]))


# What can run.


@pytest.mark.parametrize("transpose_out", [True, False])
def test_no_block_has_two_experts(transpose_out):
    shape = Shape(
        m=512,
        n=512,
        k=256,
        mode="sparse_weight" if transpose_out else "sparse_activation",
        transpose_out=transpose_out,
        experts=4,
        group_tile=GROUP_TILE,
    )
    config = default_config(shape, MULTIPROCESSORS)
    assert why_invalid(config, shape) is None
    assert all(
        why_invalid(c, shape) is None for c in candidates(shape, MULTIPROCESSORS)
    )
    tiling = tiling_of(shape, config)
    size = tiling.tile_n if transpose_out else tiling.tile_m
    assert GROUP_TILE % size == 0
    too_large = Config(tile_n=192) if transpose_out else Config()
    assert "does not divide group_tile=128" in str(why_invalid(too_large, shape))


@partial(jax.jit, static_argnums=1)
def sparse(key, shape):
    """2:4 whole numbers along the last axis: sums are exact in any order."""
    x = jax.random.randint(key, shape, -2, 3).astype(jnp.bfloat16)
    x = jnp.where(magnitude_mask(x), x, 0)
    return x, pack(compress(x, mask=magnitude_mask(x)))


@partial(jax.jit, static_argnums=1)
def whole_numbers(key, shape):
    return jax.random.randint(key, shape, -1, 2).astype(jnp.bfloat16)


def rows_case(name, *, b_k_major: bool, k: int = 192, n: int = 320):
    expert, used, _ = groups(name)
    experts, rows = len(GROUPS[name]), expert.size * GROUP_TILE
    keys = jax.random.split(jax.random.key(0))
    a, packed = sparse(keys[0], (rows, k))
    b = whole_numbers(keys[1], (n, experts, k) if b_k_major else (experts, k, n))
    by_expert = np.asarray(b, np.float32)
    if b_k_major:
        by_expert = by_expert.transpose(1, 2, 0)
    dense = np.asarray(a, np.float32).reshape(-1, GROUP_TILE, k)
    expected = np.einsum("tvk,tkn->tvn", dense, by_expert[expert]).reshape(rows, n)
    run = partial(sparse_rows, b_k_major=b_k_major)
    operands = packed.values, packed.metadata, b, jnp.asarray(expert), jnp.int32(used)
    return run, operands, expected[: used * GROUP_TILE]


def weights_case(name, *, m: int = 192, k: int = 320):
    expert, used, _ = groups(name)
    experts, rows = len(GROUPS[name]), expert.size * GROUP_TILE
    keys = jax.random.split(jax.random.key(1))
    a, packed = sparse(keys[0], (experts * m, k))
    b = whole_numbers(keys[1], (rows, k))
    by_expert = np.asarray(a, np.float32).reshape(experts, m, k)
    tiles = np.asarray(b, np.float32).reshape(-1, GROUP_TILE, k)
    expected = np.einsum("tvk,tmk->tvm", tiles, by_expert[expert]).reshape(rows, m)
    run = partial(sparse_weights, experts=experts)
    operands = packed.values, packed.metadata, b, jnp.asarray(expert), jnp.int32(used)
    return run, operands, expected[: used * GROUP_TILE]


def over_rows_case(
    name, *, transpose_out: bool, split_rows: int = 0, m: int = 320, n: int = 192
):
    expert, used, ends = groups(name)
    experts, rows = len(GROUPS[name]), expert.size * GROUP_TILE
    keys = jax.random.split(jax.random.key(2))
    a, packed = sparse(keys[0], (m, rows))
    b = whole_numbers(keys[1], (rows, n))
    a, dense = np.asarray(a, np.float32), np.asarray(b, np.float32)
    own = [
        np.repeat((expert == e) & (np.arange(expert.size) < used), GROUP_TILE)
        for e in range(experts)
    ]
    expected = np.stack([a[:, rows] @ dense[rows] for rows in own])
    if transpose_out:
        expected = expected.transpose(2, 0, 1)

    def run(*operands, **options):
        results = sparse_over_rows(
            *operands,
            group_tile=GROUP_TILE,
            transpose_out=transpose_out,
            split_rows=split_rows,
            **options,
        )
        if not split_rows:
            return results
        return jnp.concatenate(results, axis=2 if transpose_out else 1)

    return run, (packed.values, packed.metadata, b, jnp.asarray(ends)), expected


CASES = {
    "rows, B as rows": partial(rows_case, b_k_major=False),
    "rows, B as columns": partial(rows_case, b_k_major=True),
    "weights": weights_case,
    "over rows": partial(over_rows_case, transpose_out=False),
    "over rows, transposed": partial(over_rows_case, transpose_out=True),
    "over rows, some apart": partial(
        over_rows_case, transpose_out=False, split_rows=64
    ),
    "over rows, transposed, some apart": partial(
        over_rows_case, transpose_out=True, split_rows=128
    ),
}


@pytest.mark.newest_jax
@pytest.mark.parametrize("case", CASES)
def test_lowers_for_hopper(case):
    run, operands, _ = CASES[case]("uneven")
    lowered = jax.jit(run).trace(*operands).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda values, words, b, expert, used: sparse_rows(
                values, words, b, expert[:3], used, b_k_major=False
            ),
            "1024 rows are not a whole number of 3",
        ),
        (
            lambda values, words, b, expert, used: sparse_rows(
                values, words, b, expert, used, b_k_major=True
            ),
            "B of k=192 and the same dtype",
        ),
        (
            lambda values, words, b, expert, used: sparse_weights(
                values, words, b[0], expert, used, experts=5
            ),
            "1024 rows of A are not 5 experts",
        ),
    ],
)
def test_operands_that_do_not_fit_are_refused(call, message):
    _, operands, _ = rows_case("uneven", b_k_major=False)
    with pytest.raises(ValueError, match=message):
        call(*operands)


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("case", CASES)
def test_each_row_meets_its_expert_on_a_gpu(case, name):
    run, operands, expected = CASES[case](name)
    got, again = (jax.jit(run)(*operands) for _ in range(2))
    if "over" not in case:  # rows that are not used are not written
        got, again = got[: len(expected)], again[: len(expected)]
    np.testing.assert_array_equal(got, again)
    np.testing.assert_array_equal(np.asarray(got, np.float32), expected)


def configs_of(case: str) -> list[Config]:
    # Lines of C are 128 bytes: 32 numbers of float32, else 64.
    of_config = partial(Config, cluster=1, out_columns=32 if "over" in case else 64)
    return [
        of_config(row_blocks=1, tile_n=128),
        of_config(row_blocks=1, tile_n=64, grid_tile_width=3),
        of_config(row_blocks=2, warpgroups=1, tile_n=128),
    ]


@pytest.mark.newest_jax
@pytest.mark.parametrize("case", CASES)
def test_the_configs_of_the_next_test_can_run_every_case(case):
    run, operands, _ = CASES[case]("uneven")
    for config in configs_of(case):
        traced = jax.jit(partial(run, config_for=lambda _, c=config: c)).trace(
            *operands
        )
        assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_every_config_gives_the_same_on_a_gpu(case):
    run, operands, expected = CASES[case]("uneven")
    for config in configs_of(case):
        got = jax.jit(partial(run, config_for=lambda _, c=config: c))(*operands)
        got = got if "over" in case else got[: len(expected)]
        np.testing.assert_array_equal(np.asarray(got, np.float32), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_random_groups_on_a_gpu(case, monkeypatch):
    generator = np.random.default_rng(0)
    for _ in range(5):
        counts = generator.integers(0, 6, int(generator.integers(1, 9)))
        monkeypatch.setitem(GROUPS, "random", list(counts))
        sizes = {
            size: 64 * int(generator.integers(3, 12))
            for size in {"weights": "mk"}.get(case, "mn" if "over" in case else "kn")
        }
        run, operands, expected = CASES[case]("random", **sizes)
        got = jax.jit(run)(*operands)
        got = got if "over" in case else got[: len(expected)]
        np.testing.assert_array_equal(np.asarray(got, np.float32), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [case for case in CASES if "over" in case])
def test_the_parts_of_an_experts_rows_are_added_in_their_order_on_a_gpu(
    case, monkeypatch
):
    """More tasks than blocks, and each time the blocks come in another order."""
    monkeypatch.setitem(GROUPS, "most of one", [1, 29, 0, 2])
    run, (values, metadata, b, ends), expected = CASES[case](
        "most of one", m=640, n=832
    )
    run = jax.jit(run)
    np.testing.assert_array_equal(run(values, metadata, b, ends), expected)
    values, b = (
        jax.random.normal(jax.random.key(i), x.shape, x.dtype)
        for i, x in enumerate((values, b))
    )
    once = run(values, metadata, b, ends)
    for _ in range(20):
        np.testing.assert_array_equal(run(values, metadata, b, ends), once)


def test_the_cases_are_what_they_say():
    """The operands are 2:4 and every sum is below what bfloat16 holds exactly."""
    for case in CASES.values():
        _, (values, *_), expected = case("uneven")
        assert np.abs(np.asarray(values, np.float32)).max() <= 2
        assert np.abs(expected).max() <= 256
    a, packed = sparse(jax.random.key(0), (64, 64))
    np.testing.assert_array_equal(decompress(unpack(packed)), a)
