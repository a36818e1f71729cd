"""The files of a corpus: which they are, their order and their sides."""

import os
from pathlib import Path

import pytest

from sparsejax.data.files import (
    hold_out,
    hold_out_packages,
    named_side,
    shard_files,
    text_files,
)


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def test_a_folder_gives_its_shards_by_name_and_ignores_all_else(tmp_path):
    touch(tmp_path, "b.npy", "a.bin", "a.idx", "meta.pkl", "._a.bin", "deeper/c.bin")
    files = shard_files(str(tmp_path))
    assert files.names == ("a.bin", "b.npy")
    assert files.paths == (tmp_path / "a.bin", tmp_path / "b.npy")


def test_a_folder_whose_name_looks_like_a_glob_is_a_folder(tmp_path):
    touch(tmp_path, "run[1]/a.bin", "run1/b.bin")
    assert shard_files(f"{tmp_path}/run[1]").names == ("a.bin",)


def test_the_home_folder_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    touch(tmp_path, "a.bin")
    assert shard_files("~").names == shard_files("~/*.bin").names == ("a.bin",)


def test_a_glob_names_files_from_its_fixed_part_on(tmp_path):
    touch(tmp_path, "x/train/b.bin", "x/val/a.bin", "x/c.npy")
    assert shard_files(f"{tmp_path}/x/**").names == (
        "c.npy",
        "train/b.bin",
        "val/a.bin",
    )
    assert shard_files(f"{tmp_path}/x/c.npy").names == ("c.npy",)


def test_the_order_is_that_of_names_and_not_of_the_disk(tmp_path, monkeypatch):
    touch(tmp_path, "a.bin", "b.bin", "c.bin")
    monkeypatch.setattr("os.listdir", lambda _: ["c.bin", "a.bin", "b.bin"])
    assert shard_files(str(tmp_path)).names == ("a.bin", "b.bin", "c.bin")


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ("nowhere", r"shards='.*nowhere' does not exist; give a folder with \.bin or"),
        ("nowhere/*.bin", r"shards='.*' has no such file; give"),
        ("empty", r"shards='.*empty' has no such file; give"),
        ("mixed/*", r"mixed/a\.idx, which is neither \.bin nor \.npy; narrow the glob"),
        ("mixed/a.idx", r"mixed/a\.idx, which is neither"),
    ],
)
def test_a_place_without_shards_is_named(tmp_path, shards, message):
    (tmp_path / "empty").mkdir()
    touch(tmp_path, "mixed/a.bin", "mixed/a.idx")
    with pytest.raises(ValueError, match=message):
        shard_files(f"{tmp_path}/{shards}")


def test_an_empty_setting_is_no_folder():
    with pytest.raises(ValueError, match=r"shards='' does not exist"):
        shard_files("")


def test_a_folder_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    # A permission would not stop the superuser that test machines run as.
    def refuse(folder):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.listdir", refuse)
    with pytest.raises(ValueError, match=r"cannot be read \(Permission denied\)"):
        shard_files(str(tmp_path))


def test_text_needs_a_match(tmp_path):
    with pytest.raises(ValueError, match=r"text='.*': no file matches in .*; give a"):
        text_files(f"{tmp_path}/**/*.txt")
    with pytest.raises(ValueError, match=r"text='.*' is a folder; give a glob .*\*\*/"):
        text_files(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "side"),
    [
        ("val.bin", "held out"),
        ("fineweb_val_000000.bin", "held out"),
        ("edufineweb_val_000000.npy", "held out"),
        ("Validation-3.npy", "held out"),
        ("part2valid7.bin", "held out"),
        ("val/000.bin", "held out"),
        ("train_val.bin", "held out"),  # never trained on in doubt
        ("fineweb_test_0.bin", "left out"),
        ("test/val.bin", "left out"),
        ("train.bin", None),
        ("fineweb_train_000001.bin", None),
        ("evaluation.bin", None),
        ("interval_latest.npy", None),
        ("00.val", None),  # an ending, not a word of the name
    ],
)
def test_a_name_states_its_side_in_whole_words(name, side):
    assert named_side(name) == side


def test_the_hash_holds_out_its_share_and_of_any_two_one():
    names = [f"{i}.txt" for i in range(4000)]
    # Three standard deviations of a binomial of 4000 tries at 0.2.
    assert abs(sum(hold_out(names, 0.2)) - 800) < 3 * (4000 * 0.2 * 0.8) ** 0.5
    assert sum(hold_out(names[:2], 1e-9)) == sum(hold_out(names[:2], 1 - 1e-9)) == 1


def test_the_hash_of_a_file_does_not_ask_the_others():
    names = [f"{i}.txt" for i in range(100)]
    whole = dict(zip(names, hold_out(names, 0.3), strict=True))
    some = names[::3]
    assert hold_out(some, 0.3) == [whole[name] for name in some]


def test_a_name_that_is_no_utf8_is_a_name(tmp_path):
    name = os.fsdecode(b"\xff\xfe.txt")
    (tmp_path / name).write_bytes(b"x")
    (tmp_path / "a.txt").write_bytes(b"x")
    names = text_files(f"{tmp_path}/*.txt").names
    assert names == ("a.txt", name)
    # The first 8 bytes of sha256sum of the names' bytes are 0.097 and 0.232 of 2^64.
    assert hold_out(names, 0.15) == [True, False]


def test_a_file_that_links_name_again_is_read_once(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.txt").write_text("x")
    (tmp_path / "c.txt").symlink_to(tmp_path / "sub" / "b.txt")
    (tmp_path / "latest").symlink_to("sub")
    assert text_files(f"{tmp_path}/**/*.txt").names == ("c.txt",)
    (tmp_path / "c.txt").unlink()
    assert text_files(f"{tmp_path}/**/*.txt").names == ("latest/b.txt",)


def test_a_shard_under_two_names_is_refused(tmp_path):
    (tmp_path / "train.bin").write_bytes(b"\0\0")
    (tmp_path / "val.bin").symlink_to("train.bin")
    with pytest.raises(ValueError, match="val.bin is the same file as another one of"):
        shard_files(str(tmp_path))


def test_links_without_an_end_are_refused(tmp_path):
    """Two of them: `glob` would follow them 2^40 ways."""
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "one" / "link").symlink_to(tmp_path / "two")
    (tmp_path / "two" / "link").symlink_to(tmp_path / "one")
    for read in (text_files, shard_files):
        with pytest.raises(ValueError, match=r"link is a link to .*'\*\*' has no end"):
            read(f"{tmp_path}/**")
    assert text_files(f"{tmp_path}/*").names == ("a.txt",)
    # "**" does not enter hidden folders.
    (tmp_path / "one").rename(tmp_path / ".one")
    (tmp_path / "two").rename(tmp_path / ".two")
    assert text_files(f"{tmp_path}/**").names == ("a.txt",)


def test_a_package_is_on_one_side():
    names = [f"{package}/{file}" for package in "abcdefgh" for file in ("x", "y/z")]
    names += ["alone.py"]
    chosen = hold_out_packages(names, 0.4)
    sides = dict(zip(names, chosen, strict=True))
    for package in "abcdefgh":
        assert sides[f"{package}/x"] == sides[f"{package}/y/z"]
    assert 0 < sum(chosen) < len(names)
    # By the names of the packages alone, as files of such names would be.
    packages = [*"abcdefgh", "alone.py"]
    by_package = dict(zip(packages, hold_out(packages, 0.4), strict=True))
    assert chosen == [by_package[name.split("/")[0]] for name in names]
    # More files in one of them move none to the other side.
    more = hold_out_packages([*names, "a/new"], 0.4)
    assert more == [*chosen, sides["a/x"]]


def test_a_single_package_cannot_be_split():
    with pytest.raises(ValueError, match="all 2 files lie in 'a'; give a glob whose"):
        hold_out_packages(["a/x", "a/y"], 0.5)
