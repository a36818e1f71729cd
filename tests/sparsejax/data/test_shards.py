"""Token files of every convention, and what is wrong with those that are refused."""

import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sparsejax.data.shards import open_shard
from tests.support.files.shard_files import CONVENTIONS, header, write_shard


@pytest.mark.parametrize("convention", CONVENTIONS)
@settings(deadline=None, max_examples=20)
@given(tokens=st.lists(st.integers(0, 50_256), min_size=1, max_size=40))
def test_every_convention_gives_its_tokens_by_memory_map(
    tmp_path_factory, convention, tokens
):
    path = write_shard(tmp_path_factory.mktemp("shard") / "a", tokens, convention)
    found = open_shard(path, "uint16")
    assert isinstance(found, np.memmap)
    assert found.tolist() == tokens
    is_wide = convention in ("llm.c llama-3", "npy uint32")
    assert found.dtype == (np.uint32 if is_wide else np.uint16)


@pytest.mark.parametrize("convention", ["llm.c llama-3", "npy uint32"])
def test_ids_above_65535_are_whole(tmp_path, convention):
    path = write_shard(tmp_path / "a", [128_255, 3], convention)
    assert open_shard(path, "uint16").tolist() == [128_255, 3]


def test_the_setting_decides_where_nothing_is_said(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(np.array([128_255, 3], "<u4").tobytes())
    assert open_shard(path, "uint32").tolist() == [128_255, 3]


def test_a_file_that_says_its_type_ignores_the_setting(tmp_path):
    for convention in ("llm.c gpt-2", "npy uint16"):
        path = write_shard(tmp_path / "a", [1, 2], convention)
        assert open_shard(path, "uint32").tolist() == [1, 2]


def npy(array: np.ndarray, **options) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def npz() -> bytes:
    file = io.BytesIO()
    np.savez(file, tokens=np.zeros(3, np.uint16))
    return file.getvalue()


TOKENS = np.arange(5, dtype=np.uint16)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.bin", b"", r"a\.bin is empty \(0 bytes\); remove"),
        ("a.npy", b"", r"a\.npy is empty \(0 bytes\)"),
        ("a.npy", npy(TOKENS[:0]), r"a\.npy holds no tokens; remove"),
        ("a.bin", header(20240520, 1, 0), r"a\.bin holds no tokens"),
        ("a.bin", b"\1\2\3", r"has 3 bytes, not a multiple of the 2 of data\.shard_"),
        (
            "a.bin",
            header(20240520, 1, 9) + TOKENS.tobytes(),
            r"truncated or damaged: its header promises 9 tokens of uint16, so 1042 "
            r"bytes, and it has 1034; copy",
        ),
        (
            "a.bin",
            header(20240520, 1, 4) + TOKENS.tobytes(),
            r"promises 4 tokens of uint16, so 1032 bytes, and it has 1034",
        ),
        (
            "a.bin",
            header(20240801, 7, -3) + TOKENS.tobytes(),
            r"promises -3 tokens of uint32, so 1012 bytes, and it has 1034",
        ),
        (
            "a.bin",
            header(20240520, 1, 5)[:600],
            r"truncated: it begins as an llm\.c header .* has 1024 bytes, and the file "
            r"has 600",
        ),
        (
            "a.bin",
            header(20240520, 2, 5) + TOKENS.tobytes(),
            r"\(magic 20240520\) of version 2, and only version 1 is known",
        ),
        (
            "a.bin",
            header(20240801, 1, 5) + TOKENS.tobytes(),
            r"of version 1, and only version 7 is known",
        ),
        ("a.bin", header(20240522, 1, 5), r"llm\.c file of multiple-choice questions"),
        (
            "a.npy",
            npy(TOKENS)[:-2],
            r"promises 5 tokens of uint16, so 138 bytes, and it has 136",
        ),
        ("a.npy", npy(TOKENS)[:60], r"a\.npy does not begin as a \.npy file"),
        ("a.npy", TOKENS.tobytes(), r"a\.npy does not begin as a \.npy file"),
        ("a.npy", npz(), r"a\.npy does not begin as a \.npy file"),
        ("a.npy", npy(TOKENS.astype(np.int64)), r"an array of int64 with shape \(5,\)"),
        ("a.npy", npy(TOKENS.astype(">u2")), r"an array of >u2 with .*little-endian"),
        ("a.npy", npy(TOKENS.astype(float)), r"an array of float64"),
        ("a.npy", npy(TOKENS.reshape(1, 5)), r"an array of uint16 with shape \(1, 5\)"),
        ("a.npy", npy(TOKENS[0]), r"an array of uint16 with shape \(\)"),
        (
            "a.npy",
            npy(TOKENS[:1]).replace(b"(1,), }   ", b"(True,), }"),
            r"an array of uint16 with shape \(True,\)",
        ),
        (
            "a.npy",
            npy(np.array([{}, 1]), allow_pickle=True),
            r"an array of object with shape \(2,\); tokens are one dimension",
        ),
    ],
)
def test_a_file_that_is_not_whole_tokens_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        open_shard(tmp_path / name, "uint16")


@settings(deadline=None, max_examples=150)
@given(
    cut=st.integers(1, 138),
    damage=st.dictionaries(st.integers(0, 137), st.integers(0, 255), max_size=3),
)
@example(cut=138, damage={})
def test_no_damage_of_an_array_file_ends_in_another_error(
    tmp_path_factory, cut, damage
):
    content = bytearray(npy(TOKENS))
    for position, value in damage.items():
        content[position] = value
    path = tmp_path_factory.mktemp("shard") / "a.npy"
    path.write_bytes(content[:cut])
    try:
        found = open_shard(path, "uint16")
    except ValueError as error:
        assert str(path) in str(error)
    else:
        assert found.ndim == 1 and found.nbytes <= cut


@pytest.mark.parametrize("name", ["folder.bin", "nowhere.npy"])
def test_what_is_no_file_is_named(tmp_path, name):
    (tmp_path / "folder.bin").mkdir()
    (tmp_path / "nowhere.npy").symlink_to(tmp_path / "gone")
    with pytest.raises(ValueError, match=rf"{name} is not a file; leave it out"):
        open_shard(tmp_path / name, "uint16")


@pytest.mark.parametrize("convention", ["nanogpt", "npy uint16"])
def test_an_unreadable_file_is_named(tmp_path, monkeypatch, convention):
    # A permission would not stop the superuser that test machines run as.
    def refuse(path: Path, mode: str):
        raise PermissionError(13, "Permission denied")

    path = write_shard(tmp_path / "a", [1, 2], convention)
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ValueError, match=r"a\.... cannot be read \(Permission denied"):
        open_shard(path, "uint16")


@pytest.mark.parametrize("vocab_size", [50_257, 128_256, 2**18])
def test_wide_tokens_read_as_narrow_ones_are_noticed(tmp_path, vocab_size):
    ids = np.random.default_rng(0).integers(0, vocab_size, 200)
    path = tmp_path / "a.bin"
    path.write_bytes(ids.astype("<u4").tobytes())
    with pytest.raises(ValueError, match=r"set --data\.shard-dtype uint32"):
        open_shard(path, "uint16")
    assert open_shard(path, "uint32").tolist() == ids.tolist()


def test_a_file_that_says_its_type_is_believed(tmp_path):
    for convention in ("llm.c gpt-2", "npy uint16"):
        path = write_shard(tmp_path / "a", [300, 0] * 100, convention)
        assert open_shard(path, "uint16").tolist() == [300, 0] * 100


def test_text_of_few_letters_is_not_taken_for_wide_tokens(tmp_path):
    for tokens in ([0, 1, 2, 3] * 50, [65, 0] * 50, [300, 0] * 3, [300] + [1] * 99):
        path = write_shard(tmp_path / "a", tokens, "nanogpt")
        assert open_shard(path, "uint16").tolist() == tokens
