"""The tables of tuned GEMMs that the package ships."""

import json
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import tuning
from pallas_kernels.device import KNOWN
from pallas_kernels.sm90 import grouped_matmul as grouped
from pallas_kernels.sm90.sparse_matmul import sparse_matmul
from pallas_kernels.sm90.sparse_matmul_configs import (
    Config,
    Shape,
    why_invalid,
)
from pallas_kernels.tuned_gemm import TunedGemm
from tests.support.devices import hopper

pytestmark = pytest.mark.usefixtures("no_tables")
GPU = hopper.H200

SHIPPED = tuple(tuning.FOLDER.glob("*.json"))


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_every_shipped_entry_is_valid(file):
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert rows
    for row in rows:
        gemm, config = TunedGemm(**row["gemm"]), Config(**row["config"])
        assert why_invalid(config, gemm.shape()) is None
        assert row["sparse_us"] > 0 < row["dense_us"] and row["date"] and row["jax"]
        assert row["pack_us"] > 0


def alike(shape: Shape) -> Shape:
    """Returns what two shapes have in common for which a config is the same program but
    for its constants: not the sizes, but whether the last tile of A's rows is whole."""
    experts = min(shape.experts, 2)
    return replace(shape, m=shape.m % 128, n=1, k=1, experts=experts)


# On the newest jax a quarter of them: the tests of each kernel have all of its forms.
@pytest.mark.parametrize(
    "part", [pytest.param(0, marks=pytest.mark.newest_jax), 1, 2, 3]
)
def test_every_shipped_config_lowers(part):
    """Lowers, of shapes that are alike, the largest."""
    largest: dict[tuple[Config, Shape], Shape] = {}
    size = lambda shape: (shape.m, shape.n, shape.k)
    for file in SHIPPED:
        for entry in tuning._read(file.read_text()):
            shape = entry.gemm.shape()
            key = entry.config, alike(shape)
            largest[key] = max(largest.get(key, shape), shape, key=size)
    chosen = list(largest.items())[part::4]
    assert chosen
    for (config, _), shape in chosen:
        assert "mosaic_gpu" in lowered_text(shape, config)


def lowered_text(shape: Shape, config: Config) -> str:
    values = jax.ShapeDtypeStruct((shape.m, shape.k // 2), shape.dtype)
    words = jax.ShapeDtypeStruct((-(-shape.m // 64), -(-shape.k // 64), 128), "uint32")
    stored = (shape.n, shape.k) if shape.b_k_major else (shape.k, shape.n)
    lookups: list[tuple[int, ...]] = []
    if not shape.group_tile:
        run = partial(
            sparse_matmul,
            mode=shape.mode,
            b_k_major=shape.b_k_major,
            transpose_out=shape.transpose_out,
            out_dtype=jnp.float32 if shape.float32_out else None,
            config=config,
            multiprocessors=GPU.multiprocessors,
        )
    else:
        rows = shape.n if shape.mode == "sparse_weight" else shape.m
        lookups = [(rows // shape.group_tile,), ()]
        if shape.mode == "weight_gradient":
            lookups = [(shape.experts,)]
            run = partial(
                grouped.sparse_over_rows,
                group_tile=shape.group_tile,
                transpose_out=shape.transpose_out,
            )
        elif shape.mode == "sparse_weight":
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


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_shipped_entries_are_estimated_by_the_others(file, monkeypatch):
    """No gain, packing included, comes out higher than measured by more than what an
    estimate is asked for."""
    estimated = 0
    monkeypatch.setattr(tuning, "FOLDER", file.parent)
    (gpu,) = (gpu for gpu in KNOWN.values() if tuning.file_of(gpu.kind) == file)
    known = dict(tuning.entries(gpu.kind))
    for gemm, own in known.items():
        others = {
            other: entry
            for other, entry in known.items()
            if replace(other, tokens=1) != replace(gemm, tokens=1)
        }
        with monkeypatch.context() as patch:
            patch.setattr(tuning, "entries", lambda kind, others=others: others)
            times = tuning.times(gpu, gemm)
        if times is None:
            continue
        estimated += 1
        gain = times.dense_us / (times.sparse_us + times.pack_us)
        measured = own.dense_us / (own.sparse_us + own.pack_us)
        assert gain < tuning.ESTIMATED_GAIN * measured, gemm
    assert estimated > len(known) / 2
