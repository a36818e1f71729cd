"""The tuned file: written, read back, asked about neighbours; the search."""

import json
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest

import hopper
from pallas_kernels import grouped_matmul_sm90 as grouped
from pallas_kernels import tuning
from pallas_kernels.sparse_matmul_configs import (
    Config,
    Shape,
    default_config,
    why_invalid,
)
from pallas_kernels.sparse_matmul_sm90 import sparse_matmul
from pallas_kernels.tuning import Entry

GPU = hopper.H200
SHAPE = Shape(m=256, n=1000, k=128)


def entry(shape: Shape, sparse_us: float = 1.0, **config) -> Entry:
    known = hopper.timed(shape, sparse_us, 2.0)
    return replace(known, config=replace(known.config, **config))


SHIPPED = tuple(tuning.FOLDER.glob("*.json"))


@pytest.mark.newest_jax
@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_every_shipped_config_lowers(file):
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert rows
    lowered = set()
    for row in rows:
        shape, config = Shape(**row["shape"]), Config(**row["config"])
        assert why_invalid(config, shape) is None
        assert row["sparse_us"] > 0 < row["dense_us"] and row["date"] and row["jax"]
        assert row["pack_us"] > 0
        # Whatever the number of tokens.
        if (alike := (config, tuning.with_tokens(shape, 1024))) not in lowered:
            lowered.add(alike)
            assert "mosaic_gpu" in lowered_text(shape, config)


def lowered_text(shape: Shape, config: Config) -> str:
    values = jax.ShapeDtypeStruct((shape.m, shape.k // 2), shape.dtype)
    words = jax.ShapeDtypeStruct((-(-shape.m // 64), -(-shape.k // 64), 128), "uint32")
    stored = (shape.n, shape.k) if shape.b_k_major else (shape.k, shape.n)
    lookups: list[tuple[int, ...]] = []
    if not shape.group_tile:
        run = partial(
            sparse_matmul,
            b_k_major=shape.b_k_major,
            transpose_out=shape.transpose_out,
            out_dtype=jnp.float32 if shape.float32_out else None,
            config=config,
            multiprocessors=GPU.multiprocessors,
        )
    else:
        lookups = [(tuning.tokens(shape) // shape.group_tile,), ()]
        if shape.sums_over_tokens:
            lookups = [(shape.experts,)]
            run = partial(
                grouped.sparse_over_rows,
                group_tile=shape.group_tile,
                transpose_out=shape.transpose_out,
            )
        elif shape.transpose_out:
            run = partial(grouped.sparse_weights, experts=shape.experts)
            m = shape.experts * shape.m
            values = values.update(shape=(m, shape.k // 2))
            words = words.update(shape=(m // 64, *words.shape[1:]))
        else:
            run = partial(grouped.sparse_rows, b_k_major=shape.b_k_major)
            own = shape.experts, shape.k, shape.n
            stored = (shape.n, *own[:2]) if shape.b_k_major else own

        def config_for(asked: Shape) -> Config:
            assert asked == shape
            return config

        run = partial(run, config_for=config_for, multiprocessors=GPU.multiprocessors)
    b = jax.ShapeDtypeStruct(stored, shape.dtype)
    integers = [jax.ShapeDtypeStruct(size, "int32") for size in lookups]
    traced = jax.jit(run).trace(values, words, b, *integers)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "FOLDER", tmp_path / "tuned")
    tuning.entries.cache_clear()
    yield
    tuning.entries.cache_clear()


def test_entries_come_back_and_replace_those_of_their_shape():
    assert tuning.entries(GPU.kind) == {}
    other = replace(SHAPE, n=64)
    tuning.save(GPU.kind, [entry(SHAPE), entry(other, width=3)])
    tuning.save(GPU.kind, [entry(SHAPE, 5.0)])
    assert tuning.entries(GPU.kind) == {
        SHAPE: entry(SHAPE, 5.0),
        other: entry(other, width=3),
    }
    assert len(tuning.file_of(GPU.kind).read_text().splitlines()) == 2
    assert tuning.entries("NVIDIA H100") == {}


def test_an_entry_speaks_for_its_neighbours_alone():
    tuning.save(GPU.kind, [entry(SHAPE, width=3), entry(replace(SHAPE, n=8000), 3.0)])
    for n in (500, 1000, 2000):
        assert tuning.nearest(GPU, replace(SHAPE, n=n)).config.width == 3
    assert tuning.nearest(GPU, replace(SHAPE, n=5000)).sparse_us == 3.0
    assert tuning.nearest(GPU, replace(SHAPE, n=499)) is None
    assert tuning.nearest(GPU, replace(SHAPE, k=192)) is None
    assert tuning.config_for(GPU, replace(SHAPE, n=501)).width == 3
    assert tuning.config_for(GPU, replace(SHAPE, k=64)) == default_config(
        SHAPE, GPU.multiprocessors
    )


@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        (SHAPE, "n"),
        (replace(SHAPE, n=128, transpose_out=False), "m"),
        (replace(SHAPE, n=128, b_k_major=False, float32_out=True), "k"),
    ],
    ids=["weight", "activation", "weight gradient"],
)
def test_neighbours_differ_in_their_tokens_alone(shape, axis):
    tuning.save(GPU.kind, [entry(shape)])
    assert tuning.tokens_axis(shape) == axis
    for size in ("m", "n", "k"):
        doubled = replace(shape, **{size: 2 * getattr(shape, size)})
        found = tuning.nearest(GPU, doubled)
        assert found == (entry(shape) if size == axis else None)
        assert tuning.tokens(doubled) == tuning.tokens(shape) * (1 + (size == axis))


def test_a_config_that_does_not_fit_a_neighbour_is_not_taken_there():
    as_is = replace(SHAPE, n=1024, transpose_out=False)
    found = replace(entry(as_is), config=Config(out_columns=32))
    tuning.save(GPU.kind, [found])
    assert tuning.config_for(GPU, as_is) == default_config(as_is, GPU.multiprocessors)


def test_a_gemm_with_a_packed_result_takes_the_config_of_the_one_without():
    shape = replace(SHAPE, n=1024)
    tuning.save(GPU.kind, [entry(shape, tile_n=128, out_columns=64, width=3)])
    packed = replace(shape, packed_out=True)
    assert tuning.config_for(GPU, packed) == tuning.config_for(GPU, shape)
    tuning.save(GPU.kind, [entry(shape, tile_n=176, out_columns=88)])
    assert tuning.config_for(GPU, packed) == default_config(packed, GPU.multiprocessors)


def test_what_lost_or_was_never_measured_and_is_small_is_told():
    tuning.save(GPU.kind, [entry(SHAPE, 3.0), entry(replace(SHAPE, k=64), 1.0)])
    assert "measured slower: 3.0 us, dense 2.0 us, at 1000" in tuning.why_slower(
        GPU, replace(SHAPE, n=900)
    )
    assert tuning.why_slower(GPU, replace(SHAPE, k=64)) is None
    assert "too small" in tuning.why_slower(GPU, replace(SHAPE, m=192))
    assert tuning.why_slower(GPU, replace(SHAPE, m=192, n=2**20)) is None


ROWS = Shape(m=256 + 3 * 128, n=128, k=64, transpose_out=False)
ROWS = replace(ROWS, experts=4, group_tile=128)
"""GEMM 2 of four experts, 256 tokens."""


def test_a_larger_gemm_is_estimated_from_the_largest_that_is_nowhere_larger():
    small = replace(SHAPE, n=500)
    tuning.save(GPU.kind, [entry(small, width=3), entry(SHAPE, width=4)])
    wide = replace(SHAPE, m=512, n=8000, k=192)
    assert tuning.nearest(GPU, wide) is None
    times = tuning.times(GPU, wide)
    assert times.entry.shape == SHAPE and times.estimated
    # 2 x 8 x 1.5 times the work; a weight is packed once, whatever the tokens.
    assert (times.sparse_us, times.dense_us, times.pack_us) == (24.0, 48.0, 30.0)
    assert tuning.config_for(GPU, wide).width == 4
    for smaller in ({"m": 192}, {"k": 64}, {"n": 249}):
        assert tuning.times(GPU, replace(wide, **smaller)) is None
    assert tuning.times(GPU, replace(wide, n=250)).entry.shape == small
    assert tuning.times(GPU, replace(wide, dtype="float16")) is None
    measured = tuning.times(GPU, replace(SHAPE, n=1500))
    assert (measured.sparse_us, measured.estimated) == (1.5, False)


def test_groups_are_estimated_from_fewer_and_smaller_ones():
    tuning.save(GPU.kind, [entry(ROWS)])
    # Twice the experts, eight times the tokens, each with two rows.
    more = replace(ROWS, m=2 * 2048 + 7 * 128, experts=8)
    times = tuning.times(GPU, more, rows_of_token=2)
    assert times.sparse_us == times.pack_us / 10.0 == more.m / ROWS.m
    assert times.dense_us == 2.0 * 8 * 2
    assert tuning.times(GPU, replace(more, experts=2)) is None
    # An eighth of the tokens for each expert.
    assert tuning.times(GPU, replace(more, m=ROWS.m, experts=32)) is None
    assert tuning.times(GPU, replace(more, experts=1, group_tile=0)) is None


def test_an_estimate_must_gain_more_than_its_error():
    wide = replace(SHAPE, m=512, n=8000)
    tuning.save(GPU.kind, [entry(SHAPE, 1.8)])
    assert tuning.why_slower(GPU, wide) is None
    tuning.save(GPU.kind, [entry(SHAPE, 1.85)])
    assert tuning.why_slower(GPU, SHAPE) is None
    assert tuning.why_slower(GPU, wide).startswith("estimated slower, or faster by les")


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_shipped_entries_are_estimated_by_the_others(file, monkeypatch):
    """No gain, packing included, comes out higher than measured by more than what an
    estimate is asked for."""
    estimated = 0
    monkeypatch.setattr(tuning, "FOLDER", file.parent)
    known = dict(tuning.entries(GPU.kind))
    for shape, own in known.items():
        others = {
            other: entry
            for other, entry in known.items()
            if tuning.with_tokens(other, 1) != tuning.with_tokens(shape, 1)
        }
        with monkeypatch.context() as patch:
            patch.setattr(tuning, "entries", lambda kind, others=others: others)
            times = tuning.times(GPU, shape)
        if times is None:
            continue
        estimated += 1
        gain = times.dense_us / (times.sparse_us + times.pack_us)
        measured = own.dense_us / (own.sparse_us + own.pack_us)
        assert gain < tuning.ESTIMATED_GAIN * measured, shape
    assert estimated > len(known) / 2


def test_the_search_takes_the_fastest_of_the_correct_ones():
    configs = tuning.candidates(SHAPE, GPU.multiprocessors)
    assert all(why_invalid(config, SHAPE) is None for config in configs)
    assert len(set(configs)) == len(configs) > 2
    times = {config: float(i) for i, config in enumerate(configs)}
    asked = []

    def time_us(correct):
        asked.extend(correct)
        return times

    best = tuning.search(
        SHAPE, GPU.multiprocessors, lambda config: config != configs[0], time_us
    )
    assert best == (configs[1], 1.0)
    assert asked == configs[1:]
    with pytest.raises(ValueError, match="no config computes Shape.m=256, n=1000"):
        tuning.search(SHAPE, GPU.multiprocessors, lambda config: False, time_us)
