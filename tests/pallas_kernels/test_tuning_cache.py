"""The user's own tuned entries: where they lie, and what happens to their files."""

import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest

from pallas_kernels import tuning, tuning_cache
from pallas_kernels.tuned_gemm import TunedGemm
from tests.support.devices import hopper
from tests.support.devices.hopper import timed

pytestmark = pytest.mark.usefixtures("no_tables")
GPU = hopper.H200
GEMM = TunedGemm(tokens=1000, d_in=128, d_out=256)


def test_entries_come_back_and_replace_those_of_their_shape():
    assert tuning.entries(GPU.kind) == {}
    other = replace(GEMM, tokens=64)
    tuning.save(GPU.kind, [timed(GEMM), timed(other, grid_tile_width=3)])
    tuning.save(GPU.kind, [timed(GEMM, 5.0)])
    assert tuning.entries(GPU.kind) == {
        GEMM: timed(GEMM, 5.0),
        other: timed(other, grid_tile_width=3),
    }
    assert len(tuning_cache.files(GPU.kind)) == 2
    assert tuning.entries(hopper.H100.kind) == tuning.shipped(GPU.kind) == {}


def test_what_a_developer_ships_is_one_file_of_lines():
    other = replace(GEMM, tokens=64)
    tuning.save_shipped(GPU.kind, [timed(GEMM), timed(other, grid_tile_width=3)])
    tuning.save_shipped(GPU.kind, [timed(GEMM, 5.0)])
    assert len(tuning.file_of(GPU.kind).read_text().splitlines()) == 2
    assert tuning.entries(GPU.kind)[GEMM].sparse_us == 5.0
    assert tuning_cache.files(GPU.kind) == []


def test_the_users_entries_win_over_those_of_the_package():
    other = replace(GEMM, tokens=8000)
    tuning.save_shipped(GPU.kind, [timed(GEMM, 1.0), timed(other, 1.5)])
    table = tuning.file_of(GPU.kind).read_bytes()
    tuning.save(GPU.kind, [timed(GEMM, 5.0)])
    assert tuning.entries(GPU.kind)[GEMM].sparse_us == 5.0
    assert tuning.entries(GPU.kind)[other].sparse_us == 1.5
    assert tuning.file_of(GPU.kind).read_bytes() == table


@pytest.mark.parametrize("stale", ["driver", "jax", "kernels"])
def test_what_was_measured_with_anything_else_is_not_read(stale, monkeypatch):
    tuning.save(GPU.kind, [timed(GEMM)])
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
    tuning.save(GPU.kind, [timed(GEMM), timed(replace(GEMM, tokens=64))])
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
        tuning.save(GPU.kind, [timed(gemm), timed(GEMM, gemm.tokens)])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, gemms))
    assert set(tuning.own(GPU.kind)) == {GEMM, *gemms}
    assert not list(tmp_path.rglob("*.part"))


def test_a_write_that_fails_leaves_what_was_there(monkeypatch, tmp_path):
    tuning.save(GPU.kind, [timed(GEMM)])
    (file,) = tuning_cache.files(GPU.kind)
    before = file.read_bytes()

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(tuning_cache.os, "replace", full)
    with pytest.warns(UserWarning, match="cannot be kept .no space left.* SPARSEJAX_C"):
        tuning.save(GPU.kind, [timed(GEMM, 5.0)])
    assert file.read_bytes() == before and not list(tmp_path.rglob("*.part"))
    # This process knows it nevertheless.
    assert tuning.entries(GPU.kind)[GEMM].sparse_us == 5.0


def test_a_cache_that_is_no_folder_is_a_warning(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(tuning_cache.VARIABLE, str(tmp_path / "file"))
    assert tuning.entries(GPU.kind) == {}
    with pytest.warns(UserWarning, match="cannot be kept"):
        tuning.save(GPU.kind, [timed(GEMM)])
    with pytest.warns(UserWarning, match="cannot be kept"):
        tuning.save(GPU.kind, [timed(replace(GEMM, tokens=64))])
    assert set(tuning.entries(GPU.kind)) == {GEMM, replace(GEMM, tokens=64)}


def test_another_process_gives_its_entries_instead_of_the_caches():
    tuning.save(GPU.kind, [timed(GEMM, 3.0)])
    given = tuning.own_as_text(GPU.kind)
    tuning.save(GPU.kind, [timed(GEMM, 5.0), timed(replace(GEMM, tokens=64))])
    tuning.take_own(GPU.kind, given)
    assert tuning.entries(GPU.kind) == {GEMM: timed(GEMM, 3.0)}
    tuning.save(GPU.kind, [timed(replace(GEMM, tokens=8000))])
    assert set(tuning.entries(GPU.kind)) == {GEMM, replace(GEMM, tokens=8000)}
