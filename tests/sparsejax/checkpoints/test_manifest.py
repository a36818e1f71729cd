"""Manifests: any change of a file or of the manifest itself is found and named."""

import errno
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsejax.checkpoints import manifest

FILES = {"a": b"first", "sub/b": b"\x00" * 300_000, "sub/deep/empty": b""}


@pytest.fixture
def folder(tmp_path) -> Path:
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    manifest.write(tmp_path, 5)
    return tmp_path


def test_the_manifest_says_what_sha256_says(folder):
    entries = json.loads((folder / "manifest.json").read_text())
    assert entries["format_version"] == 5
    assert entries["files"].keys() == FILES.keys()
    # sha256sum of the same bytes
    assert entries["files"]["a"] == {
        "size": 5,
        "sha256": "a7937b64b8caa58f03721bb6bacf5c78cb235febe0e70b1b84cd99541461a08e",
    }
    assert entries["files"]["sub/deep/empty"] == {
        "size": 0,
        "sha256": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    }


def test_an_untouched_folder_and_further_files_are_no_damage(folder):
    assert manifest.find_damage(folder) is None
    (folder / "sub" / "note").write_text("extra")
    assert manifest.find_damage(folder) is None


@pytest.mark.parametrize(
    ("name", "content", "damage"),
    [
        ("a", b"firs", "a has 4 bytes instead of 5"),
        ("a", b"first!", "a has 6 bytes instead of 5"),
        ("a", b"First", "a does not fit its checksum"),
        ("sub/deep/empty", b"0", "sub/deep/empty has 1 bytes instead of 0"),
        ("sub/b", b"\x00" * 299_999 + b"\x01", "sub/b does not fit its checksum"),
    ],
)
def test_a_changed_file_is_named(folder, name, content, damage):
    (folder / name).write_bytes(content)
    assert manifest.find_damage(folder) == damage


def test_what_took_the_place_of_a_file_is_named(folder):
    (folder / "a").unlink()
    assert manifest.find_damage(folder) == "a is missing"
    (folder / "a").mkdir()
    size = (folder / "a").stat().st_size
    assert manifest.find_damage(folder) in (
        f"a has {size} bytes instead of 5",
        "a is a folder",
    )
    (folder / "a").rmdir()
    (folder / "a").write_bytes(FILES["a"])
    (folder / "sub" / "deep" / "empty").unlink()
    (folder / "sub" / "deep").rmdir()
    (folder / "sub" / "deep").write_bytes(b"a file")
    assert manifest.find_damage(folder) == "sub/deep/empty is missing"


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_any_changed_bit_of_the_manifest_is_found(tmp_path_factory, data):
    folder = tmp_path_factory.getbasetemp() / "bits"
    if not folder.exists():
        folder.mkdir()
        (folder / "file").write_bytes(b"content")
        manifest.write(folder, 5)
    path = folder / "manifest.json"
    content = path.read_bytes()
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    path.write_bytes(changed)
    try:
        damage = manifest.find_damage(folder)
    finally:
        path.write_bytes(content)
    assert damage == "manifest.json does not fit its own checksum"
    assert manifest.find_damage(folder) is None


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{}", b"null", b"\xff", b'{"files', b"[" * 100_000],
    ids=lambda content: str(content[:8]),
)
def test_a_manifest_that_is_none_is_named(folder, content):
    (folder / "manifest.json").write_bytes(content)
    damage = manifest.find_damage(folder)
    assert damage == "manifest.json does not fit its own checksum"
    (folder / "manifest.json").unlink()
    assert manifest.find_damage(folder) == "manifest.json is missing"


@pytest.mark.parametrize("name", ["a", "manifest.json"])
def test_a_broken_sector_is_damage_and_a_missing_permission_is_not(
    folder, name, monkeypatch
):
    opened, code = Path.open, errno.EIO

    def open_or_fail(path, *arguments, **options):
        if path == folder / name:
            raise OSError(code, "from the test")
        return opened(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", open_or_fail)
    assert manifest.find_damage(folder) == f"{name} cannot be read from the disk"
    code = errno.EACCES
    with pytest.raises(OSError, match="from the test"):
        manifest.find_damage(folder)


def test_a_manifest_is_written_once(folder):
    with pytest.raises(FileExistsError):
        manifest.write(folder, 5)
