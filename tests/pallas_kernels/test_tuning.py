"""Tuned entries: written, read back, asked about neighbours; the search."""

import json
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import tuning, tuning_cache
from pallas_kernels.device import CPU, KNOWN, Device
from pallas_kernels.sm90 import grouped_matmul as grouped
from pallas_kernels.sm90.sparse_matmul import sparse_matmul
from pallas_kernels.sm90.sparse_matmul_configs import (
    Config,
    Shape,
    default_config,
    why_invalid,
)
from pallas_kernels.tuned_gemm import TunedGemm
from pallas_kernels.tuning import Entry
from tests.support import hopper

GPU = hopper.H200
GEMM = TunedGemm(tokens=1000, d_in=128, d_out=256)
SHAPE = GEMM.shape()


def entry(gemm: TunedGemm, sparse_us: float = 1.0, **config) -> Entry:
    known = hopper.timed(gemm, sparse_us, 2.0)
    return replace(known, config=replace(known.config, **config))


def config_of(gemm: TunedGemm, device: Device = GPU) -> Config:
    return tuning.config_for(device, gemm.shape())


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
    """What two shapes have in common for which a config is the same program but for its
    constants: not the sizes, but whether the last tile of A's rows is whole."""
    experts = min(shape.experts, 2)
    return replace(shape, m=shape.m % 128, n=1, k=1, experts=experts)


@pytest.mark.newest_jax
@pytest.mark.parametrize("part", range(4))
def test_every_shipped_config_lowers(part):
    """Of shapes that are alike the largest."""
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


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "FOLDER", tmp_path / "tuned")
    monkeypatch.setattr(tuning, "_given", {})
    monkeypatch.setenv(tuning_cache.VARIABLE, str(tmp_path / "cache"))
    tuning.forget()
    yield
    tuning.forget()


def test_entries_come_back_and_replace_those_of_their_shape():
    assert tuning.entries(GPU.kind) == {}
    other = replace(GEMM, tokens=64)
    tuning.save(GPU.kind, [entry(GEMM), entry(other, grid_tile_width=3)])
    tuning.save(GPU.kind, [entry(GEMM, 5.0)])
    assert tuning.entries(GPU.kind) == {
        GEMM: entry(GEMM, 5.0),
        other: entry(other, grid_tile_width=3),
    }
    assert len(tuning_cache.files(GPU.kind)) == 2
    assert tuning.entries(hopper.H100.kind) == tuning.shipped(GPU.kind) == {}


def test_what_a_developer_ships_is_one_file_of_lines():
    other = replace(GEMM, tokens=64)
    tuning.save_shipped(GPU.kind, [entry(GEMM), entry(other, grid_tile_width=3)])
    tuning.save_shipped(GPU.kind, [entry(GEMM, 5.0)])
    assert len(tuning.file_of(GPU.kind).read_text().splitlines()) == 2
    assert tuning.entries(GPU.kind)[GEMM].sparse_us == 5.0
    assert tuning_cache.files(GPU.kind) == []


def test_the_users_entries_win_over_those_of_the_package():
    other = replace(GEMM, tokens=8000)
    tuning.save_shipped(GPU.kind, [entry(GEMM, 1.0), entry(other, 1.5)])
    table = tuning.file_of(GPU.kind).read_bytes()
    tuning.save(GPU.kind, [entry(GEMM, 5.0)])
    assert tuning.entries(GPU.kind)[GEMM].sparse_us == 5.0
    assert tuning.entries(GPU.kind)[other].sparse_us == 1.5
    assert tuning.file_of(GPU.kind).read_bytes() == table


@pytest.mark.parametrize("stale", ["driver", "jax", "kernels"])
def test_what_was_measured_with_anything_else_is_not_read(stale, monkeypatch):
    tuning.save(GPU.kind, [entry(GEMM)])
    match stale:
        case "driver":
            monkeypatch.setattr(tuning_cache, "driver_version", lambda: "999.1")
        case "jax":
            monkeypatch.setattr(jax, "__version__", "99.0")
        case "kernels":
            monkeypatch.setattr(tuning_cache, "kernel_hash", lambda: "0" * 16)
    tuning.forget()
    assert tuning.entries(GPU.kind) == {}


def test_the_key_is_in_the_path(monkeypatch, tmp_path):
    monkeypatch.setattr(tuning_cache, "driver_version", lambda: "580.65 (open)")
    place = tuning_cache.folder(GPU.kind)
    assert place.parent == tmp_path / "cache" / "tuned" / "nvidia-h200"
    kernels = tuning_cache.kernel_hash()
    key = f"driver-580.65-open-_jax-{jax.__version__}_kernels-{kernels}"
    assert place.name == key and len(kernels) == 16
    monkeypatch.delenv(tuning_cache.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert str(tuning_cache.root()) == "/somewhere/sparsejax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/of-a-user")
    assert str(tuning_cache.root()) == "/home/of-a-user/.cache/sparsejax"


def test_the_key_changes_with_every_kernel_in_every_folder(tmp_path):
    hash_of = tuning_cache.kernel_hash.__wrapped__
    kernel = tmp_path / "sm90" / "gemm" / "kernel.py"
    kernel.parent.mkdir(parents=True)
    kernel.write_text("a = 1")
    first = hash_of(tmp_path)
    (tmp_path / "tuning.py").write_text("b = 1")
    assert hash_of(tmp_path) == first
    kernel.write_text("a = 2")
    second = hash_of(tmp_path)
    moved = kernel.rename(tmp_path / "sm90" / "kernel.py")
    assert len({first, second, hash_of(tmp_path), hash_of(moved.parent)}) == 4
    assert tuning_cache.kernel_hash() != hash_of(tmp_path / "nothing")


def test_the_driver_is_nvmls_or_the_backends(monkeypatch):
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlSystemGetDriverVersion=lambda: b"580.65.06",
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    version = tuning_cache.driver_version.__wrapped__
    assert version() == "580.65.06"
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not importable
    backend = SimpleNamespace(platform_version="PJRT C API\ncuda 13000")
    monkeypatch.setattr(tuning_cache, "get_backend", lambda: backend)
    assert version() == "PJRT C API cuda 13000"
    backend.platform_version = ""
    assert version() == "unknown"


@pytest.mark.parametrize(
    "text", ["", "{", "{}", "[]", '{"gemm": {"tokens": 1}}', "\udcff", "negative"]
)
def test_a_damaged_file_is_left_out_and_named(text):
    tuning.save(GPU.kind, [entry(GEMM), entry(replace(GEMM, tokens=64))])
    damaged, whole = tuning_cache.files(GPU.kind)
    if text == "negative":
        text = damaged.read_text().replace('"sparse_us": 1.0', '"sparse_us": -1.0')
    damaged.write_bytes(text.encode(errors="surrogateescape"))
    tuning.forget()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        known = tuning.entries(GPU.kind)
        assert tuning.entries(GPU.kind) == known
    assert len(known) == 1 and whole.stem.startswith(("64x", "1000x"))
    assert [str(damaged) in str(warning.message) for warning in told] == [True]


def test_processes_that_tune_at_once_lose_nothing(tmp_path):
    gemms = [replace(GEMM, tokens=64 * count) for count in range(1, 25)]

    def one(gemm):
        tuning.save(GPU.kind, [entry(gemm), entry(GEMM, gemm.tokens)])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, gemms))
    assert set(tuning.own(GPU.kind)) == {GEMM, *gemms}
    assert not list(tmp_path.rglob("*.part"))


def test_a_write_that_fails_leaves_what_was_there(monkeypatch, tmp_path):
    tuning.save(GPU.kind, [entry(GEMM)])
    (file,) = tuning_cache.files(GPU.kind)
    before = file.read_bytes()

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(tuning_cache.os, "replace", full)
    with pytest.warns(UserWarning, match="cannot be kept .no space left.* SPARSEJAX_C"):
        tuning.save(GPU.kind, [entry(GEMM, 5.0)])
    assert file.read_bytes() == before and not list(tmp_path.rglob("*.part"))
    # This process knows it nevertheless.
    assert tuning.entries(GPU.kind)[GEMM].sparse_us == 5.0


def test_a_cache_that_is_no_folder_is_a_warning(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(tuning_cache.VARIABLE, str(tmp_path / "file"))
    assert tuning.entries(GPU.kind) == {}
    with pytest.warns(UserWarning, match="cannot be kept"):
        tuning.save(GPU.kind, [entry(GEMM)])
    with pytest.warns(UserWarning, match="cannot be kept"):
        tuning.save(GPU.kind, [entry(replace(GEMM, tokens=64))])
    assert set(tuning.entries(GPU.kind)) == {GEMM, replace(GEMM, tokens=64)}


def test_another_process_gives_its_entries_instead_of_the_caches():
    tuning.save(GPU.kind, [entry(GEMM, 3.0)])
    given = tuning.own_as_text(GPU.kind)
    tuning.save(GPU.kind, [entry(GEMM, 5.0), entry(replace(GEMM, tokens=64))])
    tuning.take_own(GPU.kind, given)
    assert tuning.entries(GPU.kind) == {GEMM: entry(GEMM, 3.0)}
    tuning.save(GPU.kind, [entry(replace(GEMM, tokens=8000))])
    assert set(tuning.entries(GPU.kind)) == {GEMM, replace(GEMM, tokens=8000)}


def test_an_entry_speaks_for_its_neighbours_alone():
    tuning.save(
        GPU.kind,
        [entry(GEMM, grid_tile_width=3), entry(replace(GEMM, tokens=8000), 3.0)],
    )
    for n in (500, 1000, 2000):
        assert tuning.nearest(GPU, replace(GEMM, tokens=n)).config.grid_tile_width == 3
    assert tuning.nearest(GPU, replace(GEMM, tokens=5000)).sparse_us == 3.0
    assert tuning.nearest(GPU, replace(GEMM, tokens=499)) is None
    assert tuning.nearest(GPU, replace(GEMM, d_in=192)) is None
    assert config_of(replace(GEMM, tokens=501)).grid_tile_width == 3
    narrow = replace(GEMM, d_in=64)
    assert config_of(narrow) == default_config(narrow.shape(), GPU.multiprocessors)


ACTIVATION = TunedGemm(sparse_operand="input", tokens=1024, d_in=256, d_out=128)
GRADIENT = replace(ACTIVATION, is_weight_gradient=True)
OF_OUTPUT = replace(GRADIENT, sparse_operand="gradient")


@pytest.mark.parametrize("gemm", [GEMM, ACTIVATION, GRADIENT, OF_OUTPUT])
def test_neighbours_differ_in_their_tokens_alone(gemm):
    tuning.save(GPU.kind, [entry(gemm)])
    for size in ("tokens", "d_in", "d_out"):
        doubled = replace(gemm, **{size: 2 * getattr(gemm, size)})
        found = tuning.nearest(GPU, doubled)
        assert found == (entry(gemm) if size == "tokens" else None)


@pytest.mark.parametrize(
    ("gemm", "shape"),
    [
        (GEMM, Shape(m=256, n=1000, k=128)),
        (
            replace(ACTIVATION, weight_transposed=True, float32_out=True),
            Shape(
                m=1024,
                n=128,
                k=256,
                mode="sparse_activation",
                transpose_out=False,
                float32_out=True,
            ),
        ),
        (
            replace(GRADIENT, experts=4, group_tile=128),
            Shape(
                m=256,
                n=128,
                k=1024,
                mode="weight_gradient",
                b_k_major=False,
                transpose_out=False,
                float32_out=True,
                experts=4,
                group_tile=128,
            ),
        ),
        (
            replace(OF_OUTPUT, dtype="float16"),
            Shape(
                m=128,
                n=256,
                k=1024,
                mode="weight_gradient",
                b_k_major=False,
                transpose_out=True,
                float32_out=True,
                dtype="float16",
            ),
        ),
    ],
    ids=["weight", "activation", "weight gradient", "of the output"],
)
def test_a_kernels_shape_and_a_layers_widths_are_one_gemm(gemm, shape):
    assert gemm.shape() == shape and TunedGemm.of(shape) == gemm
    packed = replace(shape, packed_out=True)
    assert gemm.shape(packed_out=True) == packed and TunedGemm.of(packed) == gemm
    # No layer has this one: its result lies the other way round.
    if shape.mode != "weight_gradient":
        odd = replace(shape, transpose_out=not shape.transpose_out)
        assert TunedGemm.of(odd) is None
        default = default_config(odd, GPU.multiprocessors)
        assert tuning.config_for(GPU, odd) == default


def test_a_config_that_does_not_fit_a_neighbour_is_not_taken_there():
    found = replace(entry(ACTIVATION), config=Config(out_columns=32))
    tuning.save(GPU.kind, [found])
    default = default_config(ACTIVATION.shape(), GPU.multiprocessors)
    assert config_of(ACTIVATION) == default != found.config


def test_a_gemm_with_a_packed_result_takes_the_config_of_the_one_without():
    gemm = replace(GEMM, tokens=1024)
    tuning.save(GPU.kind, [entry(gemm, tile_n=128, out_columns=64, grid_tile_width=3)])
    packed = gemm.shape(packed_out=True)
    assert tuning.config_for(GPU, packed) == config_of(gemm)
    assert config_of(gemm).grid_tile_width == 3
    tuning.save(GPU.kind, [entry(gemm, tile_n=176, out_columns=88)])
    assert tuning.config_for(GPU, packed) == default_config(packed, GPU.multiprocessors)


def test_what_lost_or_was_never_measured_and_is_small_is_told():
    tuning.save(GPU.kind, [entry(GEMM, 3.0), entry(replace(GEMM, d_in=64), 1.0)])
    assert "measured slower: 3.0 us, dense 2.0 us, at 1000" in tuning.why_slower(
        GPU, replace(GEMM, tokens=900)
    )
    assert tuning.why_slower(GPU, replace(GEMM, d_in=64)) is None
    assert "too small" in tuning.why_slower(GPU, replace(GEMM, d_out=192))
    assert tuning.why_slower(GPU, replace(GEMM, d_out=192, tokens=2**20)) is None


ROWS = replace(ACTIVATION, tokens=256 + 3 * 128, d_in=64, experts=4, group_tile=128)
"""GEMM 2 of four experts, 256 tokens."""


def test_a_larger_gemm_is_estimated_from_the_largest_that_is_nowhere_larger():
    small = replace(GEMM, tokens=500)
    tuning.save(
        GPU.kind, [entry(small, grid_tile_width=3), entry(GEMM, grid_tile_width=4)]
    )
    wide = replace(GEMM, d_out=512, tokens=8000, d_in=192)
    assert tuning.nearest(GPU, wide) is None
    times = tuning.times(GPU, wide)
    assert times.entry.gemm == GEMM and times.estimated
    # 2 x 8 x 1.5 times the work; a weight is packed once, whatever the tokens.
    assert (times.sparse_us, times.dense_us, times.pack_us) == (24.0, 48.0, 30.0)
    assert config_of(wide).grid_tile_width == 4
    for smaller in ({"d_out": 192}, {"d_in": 64}, {"tokens": 249}):
        assert tuning.times(GPU, replace(wide, **smaller)) is None
    assert tuning.times(GPU, replace(wide, tokens=250)).entry.gemm == small
    assert tuning.times(GPU, replace(wide, dtype="float16")) is None
    measured = tuning.times(GPU, replace(GEMM, tokens=1500))
    assert (measured.sparse_us, measured.estimated) == (1.5, False)


def test_groups_are_estimated_from_fewer_and_smaller_ones():
    tuning.save(GPU.kind, [entry(ROWS)])
    # Twice the experts, eight times the tokens, each with two rows.
    more = replace(ROWS, tokens=2 * 2048 + 7 * 128, experts=8)
    times = tuning.times(GPU, more, rows_of_token=2)
    assert times.sparse_us == times.pack_us / 10.0 == more.tokens / ROWS.tokens
    assert times.dense_us == 2.0 * 8 * 2
    assert tuning.times(GPU, replace(more, experts=2)) is None
    # An eighth of the tokens for each expert.
    assert tuning.times(GPU, replace(more, tokens=ROWS.tokens, experts=32)) is None
    assert tuning.times(GPU, replace(more, experts=1, group_tile=0)) is None


def test_a_hopper_without_an_entry_takes_those_of_another_as_estimates():
    tuning.save_shipped(GPU.kind, [entry(GEMM, grid_tile_width=3)])
    near, wide = replace(GEMM, tokens=1500), replace(GEMM, d_out=512, tokens=8000)
    for gemm in (GEMM, near, wide):
        known = tuning.times(GPU, gemm)
        guess = tuning.times(hopper.H100, gemm)
        assert guess == replace(known, measured_on=GPU.kind)
        assert guess.estimated and guess.least_gain == tuning.GAIN_ELSEWHERE
        assert config_of(gemm, hopper.H100).grid_tile_width == 3
    assert not tuning.times(GPU, near).estimated
    # Fewer multiprocessors take longer for everything.
    slower = tuning.times(Device.named("NVIDIA H20"), GEMM)
    scale = 132 / 78
    assert (slower.sparse_us, slower.dense_us, slower.pack_us) == pytest.approx(
        (1.0 * scale, 2.0 * scale, 10.0 * scale)
    )
    # Their own speak first, even of a smaller GEMM.
    tuning.save(hopper.H100.kind, [entry(GEMM, 5.0)])
    assert tuning.times(hopper.H100, GEMM).measured_on is None
    assert tuning.times(hopper.H100, wide).measured_on is None
    assert tuning.times(GPU, GEMM).sparse_us == 1.0
    assert tuning.times(hopper.A100, GEMM) is None
    assert tuning.times(CPU, GEMM) is None


def test_of_several_tuned_gpus_the_one_of_most_alike_size_is_taken():
    small, large = Device.named("NVIDIA H20"), Device.named("NVIDIA H100 PCIe")
    for device, sparse_us in ((small, 3.0), (GPU, 4.0)):
        tuning.save_shipped(device.kind, [entry(GEMM, sparse_us)])
    assert tuning.nearest_tuned(large) == GPU
    assert tuning.nearest_tuned(GPU) == small
    assert tuning.nearest_tuned(replace(GPU, multiprocessors=None)) is None


def test_what_another_gpu_gained_must_be_more_than_an_estimates_error():
    tuning.save_shipped(GPU.kind, [entry(GEMM, 1.55)])
    assert tuning.why_slower(hopper.H100, GEMM) is None
    tuning.save_shipped(GPU.kind, [entry(GEMM, 1.65)])
    assert tuning.why_slower(GPU, GEMM) is None
    why = tuning.why_slower(hopper.H100, GEMM)
    assert why.startswith("estimated slower, or faster by less than the estimate's")
    assert why.endswith("dense 2.0 us, measured on NVIDIA H200")


def test_an_estimate_must_gain_more_than_its_error():
    wide = replace(GEMM, d_out=512, tokens=8000)
    tuning.save(GPU.kind, [entry(GEMM, 1.7)])
    assert tuning.why_slower(GPU, wide) is None
    tuning.save(GPU.kind, [entry(GEMM, 1.75)])
    assert tuning.why_slower(GPU, GEMM) is None
    assert tuning.why_slower(GPU, wide).startswith("estimated slower, or faster by les")


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


def test_the_search_takes_the_fastest_of_the_correct_ones():
    configs = tuning.candidates(SHAPE, GPU.multiprocessors)
    assert all(why_invalid(config, SHAPE) is None for config in configs)
    assert len(set(configs)) == len(configs) > 2
    times = {config: float(i) for i, config in enumerate(configs)}
    asked = []

    def time_us(correct):
        asked.extend(correct)
        return times

    best = tuning.search(SHAPE, configs, lambda config: config != configs[0], time_us)
    assert best == (configs[1], 1.0)
    assert asked == configs[1:]
    with pytest.raises(ValueError, match="no config computes Shape.m=256, n=1000"):
        tuning.search(SHAPE, configs, lambda config: False, time_us)
