"""Rows of experts in parts."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.sm90.dense_over_rows import dense_over_rows
from pallas_kernels.sm90.gemm import split_k
from pallas_kernels.sm90.gemm.split_k import OrderedReduction, RowParts
from pallas_kernels.sm90.gemm.tile_scheduler import OverTokensOfExpert, Tiling
from pallas_kernels.sm90.grouped_matmul import sparse_over_rows
from tests.support.devices.emitted import modules

MULTIPROCESSORS, GROUP_TILE = 132, 128
FENCE = "#nvvm.proxy_kind<async.global>"


@partial(jax.jit, static_argnums=0)
def cut(parts: RowParts, ends):
    """All columns of a table, of which so many are used."""
    of = partial(parts.part, ends)
    return jax.vmap(of)(jnp.arange(parts.most)), parts.count(ends)


@pytest.mark.parametrize("size", [1, 3, 9, 1000])
@pytest.mark.parametrize("experts", [1, 5, 16])
def test_parts_of_an_expert_are_about_as_long_and_have_its_rows_in_order(size, experts):
    generator = np.random.default_rng(size + experts)
    most = 40
    parts = RowParts(experts, most * experts, size)
    for _ in range(10):
        own = generator.integers(0, most, experts, endpoint=True)
        own[generator.random(experts) < 0.3] = 0
        table, count = cut(parts, jnp.asarray(np.cumsum(own), jnp.int32))
        assert experts <= count <= parts.most
        of_expert, first, length, number, after = (np.array(x)[:count] for x in table)
        # One after the other, without a gap.
        assert first[0] == 0 and (first[1:] == (first + length)[:-1]).all()
        for expert in range(experts):
            mine = of_expert == expert
            assert length[mine].sum() == own[expert]
            assert list(number[mine]) == list(range(mine.sum()))
            assert list(after[mine]) == list(range(mine.sum()))[::-1]
            assert np.ptp(length[mine]) <= 1
            assert length[mine].max() <= np.ceil(1.5 * size)
            if mine.sum() > 1:
                assert length[mine].min() >= size // 2


def parts_of(own, m: int, n: int) -> list[int]:
    """Returns the parts of each expert that has so many group tiles."""
    parts = RowParts.of(m, n, sum(own), len(own), MULTIPROCESSORS)
    table, count = cut(parts, jnp.asarray(np.cumsum(own), jnp.int32))
    return list(np.bincount(np.asarray(table.expert)[:count]))


@pytest.mark.parametrize(
    ("m", "n", "experts", "parts"),
    [
        # Tiles of 256 x 256 for a quarter of 66 pairs of multiprocessors, and for half,
        (2048, 512, 16, 7),
        (2048, 1024, 8, 4),
        # and for more.
        (2048, 1088, 8, 1),
        (2048, 2048, 4, 1),
        (2176, 2048, 4, 1),
        (4096, 4096, 4, 1),
    ],
)
def test_an_expert_with_most_of_the_rows_is_cut_up_where_that_fills_the_gpu(
    m, n, experts, parts
):
    tiles = 16384 // GROUP_TILE
    most = round(0.9 * tiles)
    own = [0, most, *np.diff(np.linspace(0, tiles - most, experts - 1).astype(int))]
    assert parts_of(own, m, n) == [1, parts] + [1] * (experts - 2)


@pytest.mark.parametrize("experts", [2, 4, 8, 16])
@pytest.mark.parametrize("width", [768, 1024, 2048, 4096])
def test_about_equal_shares_are_not_cut_up(width, experts):
    share = 16384 // GROUP_TILE // experts
    own = [share, share + share // 3, *[share] * (experts - 2)]
    assert parts_of(own, width, 4 * width // experts) == [1] * experts


def test_no_part_is_shorter_than_a_group_tile():
    for tiles in (1, 2, 7):
        assert RowParts.of(64, 64, tiles, 3, MULTIPROCESSORS).size >= 1


@pytest.mark.parametrize("parts_of_share", [1, 2, 4])
@pytest.mark.parametrize(("m", "n"), [(768, 768), (2048, 2048)])
def test_equal_shares_have_as_many_parts_as_asked_for(m, n, parts_of_share):
    parts = RowParts.of(m, n, 8 * 24, 8, MULTIPROCESSORS, parts_of_share=parts_of_share)
    own = jnp.asarray(24 * (1 + np.arange(8)), jnp.int32)
    table, count = cut(parts, own)
    counts = np.bincount(np.asarray(table.expert)[:count])
    assert list(counts) == [parts_of_share] * 8


class Blocked(Exception):
    """A block has to wait."""


class Flags:
    """Semaphores of one block and warpgroup of each cluster, by task."""

    def __init__(self) -> None:
        self.signals: dict[int, int] = {}

    @property
    def at(self):
        return self

    def __getitem__(self, place):
        task, block, warpgroup = place
        assert (block, warpgroup) == (0, 0)
        return task

    def wait(self, task) -> None:
        if not self.signals.get(task):
            raise Blocked
        self.signals[task] -= 1

    def signal(self, task) -> None:
        self.signals[task] = self.signals.get(task, 0) + 1


@pytest.mark.parametrize("blocks", [1, 4, 7])
def test_parts_are_added_in_their_order_whichever_block_goes_on(monkeypatch, blocks):
    """And some block always can."""
    generator = np.random.default_rng(blocks)
    tiling = Tiling(64, 64, 2, 3, grid_tile_width=8, grid_minor_dim="m")
    ends = jnp.asarray(np.cumsum([1, 9, 0, 4]), jnp.int32)
    walk = OverTokensOfExpert(tiling, RowParts(4, 16, 2), ends, steps_of_tile=1)
    of = jax.vmap(walk.task)(jnp.arange(int(walk.count)))
    columns = [np.asarray(column).tolist() for column in of]
    tasks = [type(of)(*column) for column in zip(*columns, strict=True)]
    flags, waited_for_writes = Flags(), []
    monkeypatch.setattr(split_k.pl, "semaphore_wait", flags.wait)
    monkeypatch.setattr(split_k.pl, "semaphore_signal", flags.signal)
    monkeypatch.setattr(split_k.plgpu, "wait_smem_to_gmem", waited_for_writes.append)
    monkeypatch.setattr(split_k, "order_copies", lambda: None)
    monkeypatch.setattr(split_k.lax, "axis_index", lambda name: 0)
    reduction = OrderedReduction(flags, tiles_of_c=6)
    written: dict[tuple, list] = {}
    left = [tasks[block::blocks] for block in range(blocks)]
    while any(left):
        went_on = 0
        for block in generator.permutation(blocks):
            if not left[block]:
                continue
            task = left[block][0]
            try:
                reduction.wait(task)
            except Blocked:
                continue
            place = task.expert, task.row, task.column
            assert reduction.adds(task) == (place in written)
            written.setdefault(place, []).append(task.part)
            reduction.done(task)
            left[block].pop(0)
            went_on += 1
        assert went_on
    lengths = {expert: [] for expert in range(4)}
    for (expert, _, _), parts in written.items():
        assert parts == list(range(len(parts)))
        lengths[expert].append(len(parts))
    assert lengths == {0: [1] * 6, 1: [5] * 6, 2: [1] * 6, 3: [2] * 6}
    # Each flag is used up, and set when the writes are done, not only read.
    assert not any(flags.signals.values())
    assert waited_for_writes == [0] * (4 + 1) * 6


@pytest.mark.parametrize(("m", "n", "cut_up"), [(512, 2048, True), (4096, 4096, False)])
def test_the_kernels_wait_and_add_where_experts_may_be_cut_up(m, n, cut_up):
    rows = 20 * GROUP_TILE

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    b, ends = array(rows, n), array(16, dtype=jnp.int32)
    words = array(m // 64, rows // 64, 128, dtype=jnp.uint32)
    packed = array(m, rows // 2), words
    options = {"group_tile": GROUP_TILE, "multiprocessors": MULTIPROCESSORS}
    dense = partial(dense_over_rows, **options)
    sparse = partial(sparse_over_rows, **options, transpose_out=False)
    for run, a in ((dense, (array(rows, m),)), (sparse, packed)):
        traced = str(jax.make_jaxpr(run)(*a, b, ends))
        for operation in ("semaphore_wait", "semaphore_signal", "reduction_op=add"):
            assert (operation in traced) == cut_up
        (text,) = modules(run, *a, b, ends)
        assert text.count(FENCE) == cut_up * text.count("fence.acquire.") == cut_up
        if cut_up:
            # A flag, then the fence, then the copies that add.
            flag, fence = text.index("fence.acquire."), text.index(FENCE)
            assert flag < fence < text.index("cp.reduce.async.bulk")
