"""The tuned file: written, read back, asked about neighbours; the search."""

import json
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest

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

GPU = "NVIDIA H200"
SHAPE = Shape(m=256, n=1000, k=128)


def entry(shape: Shape, sparse_us: float = 1.0, **config) -> Entry:
    return Entry(
        shape=shape,
        config=replace(default_config(shape), **config),
        sparse_us=sparse_us,
        dense_us=2.0,
        pack_us=10.0,
        jax="0.11.2",
        date="2026-01-01",
        commit=None,
    )


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

        run = partial(run, config_for=config_for)
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
    assert tuning.entries(GPU) == {}
    other = replace(SHAPE, n=64)
    tuning.save(GPU, [entry(SHAPE), entry(other, width=3)])
    tuning.save(GPU, [entry(SHAPE, 5.0)])
    assert tuning.entries(GPU) == {
        SHAPE: entry(SHAPE, 5.0),
        other: entry(other, width=3),
    }
    assert len(tuning.file_of(GPU).read_text().splitlines()) == 2
    assert tuning.entries("NVIDIA H100") == {}


def test_an_entry_speaks_for_its_neighbours_alone():
    tuning.save(GPU, [entry(SHAPE, width=3), entry(replace(SHAPE, n=8000), 3.0)])
    for n in (500, 1000, 2000):
        assert tuning.nearest(GPU, replace(SHAPE, n=n)).config.width == 3
    assert tuning.nearest(GPU, replace(SHAPE, n=5000)).sparse_us == 3.0
    assert tuning.nearest(GPU, replace(SHAPE, n=499)) is None
    assert tuning.nearest(GPU, replace(SHAPE, k=192)) is None
    assert tuning.config_for(GPU, replace(SHAPE, n=501)).width == 3
    assert tuning.config_for(GPU, replace(SHAPE, k=192)) == default_config(SHAPE)


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
    tuning.save(GPU, [entry(shape)])
    assert tuning.tokens_axis(shape) == axis
    for size in ("m", "n", "k"):
        doubled = replace(shape, **{size: 2 * getattr(shape, size)})
        found = tuning.nearest(GPU, doubled)
        assert found == (entry(shape) if size == axis else None)
        assert tuning.tokens(doubled) == tuning.tokens(shape) * (1 + (size == axis))


def test_a_config_that_does_not_fit_a_neighbour_is_not_taken_there():
    as_is = replace(SHAPE, n=1024, transpose_out=False)
    found = replace(entry(as_is), config=Config(out_columns=32))
    tuning.save(GPU, [found])
    assert tuning.config_for(GPU, as_is) == default_config(as_is)


def test_a_gemm_with_a_packed_result_takes_the_config_of_the_one_without():
    shape = replace(SHAPE, n=1024)
    tuning.save(GPU, [entry(shape, tile_n=128, out_columns=64, width=3)])
    packed = replace(shape, packed_out=True)
    assert tuning.config_for(GPU, packed) == tuning.config_for(GPU, shape)
    tuning.save(GPU, [entry(shape, tile_n=176, out_columns=88)])
    assert tuning.config_for(GPU, packed) == default_config(packed)


def test_what_lost_or_was_never_measured_and_is_small_is_told():
    tuning.save(GPU, [entry(SHAPE, 3.0), entry(replace(SHAPE, k=64), 1.0)])
    assert "measured slower: 3.0 us, dense 2.0 us, at 1000" in tuning.why_slower(
        GPU, replace(SHAPE, n=900)
    )
    assert tuning.why_slower(GPU, replace(SHAPE, k=64)) is None
    assert "too small" in tuning.why_slower(GPU, replace(SHAPE, m=512))
    assert tuning.why_slower(GPU, Shape(m=8192, n=1024, k=2048)) is None


def test_the_search_takes_the_fastest_of_the_correct_ones():
    configs = tuning.candidates(SHAPE)
    assert all(why_invalid(config, SHAPE) is None for config in configs)
    assert len(set(configs)) == len(configs) > 2
    times = {config: float(i) for i, config in enumerate(configs)}
    asked = []

    def time_us(correct):
        asked.extend(correct)
        return times

    best = tuning.search(SHAPE, lambda config: config != configs[0], time_us)
    assert best == (configs[1], 1.0)
    assert asked == configs[1:]
    with pytest.raises(ValueError, match="no config computes Shape.m=256, n=1000"):
        tuning.search(SHAPE, lambda config: False, time_us)
