"""Cases of token shards: every convention, written well, and then damaged."""

import io
import os
import re
from pathlib import Path

import numpy as np
from numpy.random import Generator

from sparsejax.config import DataConfig
from sparsejax.data import corpus as corpus_module
from sparsejax.data import shards as shards_module
from tests.fuzz.corpora import check_batches, check_sides, expected_sides
from tests.fuzz.judge import clear_error, judging, require
from tests.fuzz.mutations import damaged, one_of
from tests.support.files.shard_files import CONVENTIONS, header, write_shard

STEMS = ("a", "b", "train_0", "val_0", "sub/valid", "test", ".hidden", "b [1]", "ü")
MAGICS = {20240520: (1, "<u2"), 20240801: (7, "<u4")}


def case(generator: Generator, folder: Path, material: None) -> str:
    root = folder / one_of(generator, ("shards", "shards [1]", "ü"))
    root.mkdir()
    dtype = one_of(generator, ("uint16", "uint16", "uint32"))
    many = 300 if generator.random() < 0.01 else int(generator.integers(1, 7))
    for number in range(many):
        stem = one_of(generator, STEMS) if many < 10 else f"{number:03d}"
        _write(generator, root / stem, dtype)
    read = _check_each(root, dtype)
    source = str(root)
    if generator.random() < 0.3:
        source += one_of(generator, ("/*.bin", "/**", "/*", "/a.bin", "/n*", "/", "*"))
    config = DataConfig(
        shards=source,
        shard_dtype=dtype,
        sequence_length=one_of(generator, (1, 2, 8, 16)),
        validation_share=one_of(generator, (0.05, 0.3, 0.95)),
        seed=int(generator.integers(2**32)),
    )
    vocab_size = one_of(generator, (100, 50_304, 70_000, 70_000, 2**31 - 1))
    corpus = corpus_module.load_corpus(config, vocab_size=vocab_size)
    if source == str(root):
        with judging():
            _check_corpus(corpus, root, read, config.validation_share)
    check_batches(generator, corpus, config, vocab_size)
    return "the right windows"


def reading(path: Path, dtype: str) -> list[int] | None:
    """Returns the tokens that the bytes hold by their own convention; None where they
    hold none."""
    content = path.read_bytes()
    if path.suffix == ".npy":
        file = io.BytesIO(content)
        try:
            array = np.load(file, allow_pickle=False)
        except Exception:
            return None
        known = array.dtype.str in ("<u2", "<u4") and array.ndim == 1
        return array.tolist() if known and not file.read() else None
    magic = int.from_bytes(content[:4], "little")
    if magic in MAGICS and len(content) >= 1024:
        _, version, count = np.frombuffer(content, "<i4", 3).tolist()
        known, kind = MAGICS[magic]
        tokens = np.frombuffer(content[1024:], "u1")
        if version != known or tokens.size != count * np.dtype(kind).itemsize:
            return None
        return tokens.view(kind).tolist()
    plain = np.dtype(dtype).newbyteorder("<")
    if len(content) % plain.itemsize:
        return None
    return np.frombuffer(content, plain).tolist()


def _check_each(root: Path, dtype: str) -> dict[str, list[int]]:
    """The tokens of every shard by name; each opens to what its bytes say, or not."""
    read = {}
    for path in sorted(root.rglob("*")):
        if path.suffix not in (".bin", ".npy"):
            continue
        try:
            tokens = shards_module.open_shard(path, dtype)
        except Exception as error:
            clear_error(error)
            continue
        with judging():
            expected = reading(path, dtype)
            require(
                tokens.tolist() == expected,
                f"{path.name}: {tokens[:8]}..., and its bytes say "
                f"{expected and expected[:8]}...",
            )
        read[path.relative_to(root).as_posix()] = tokens.tolist()
    return read


def _check_corpus(
    corpus: corpus_module.Corpus,
    root: Path,
    read: dict[str, list[int]],
    share: float,
) -> None:
    """Asserts that each of the folder's own files is on the side that its name says."""
    files = {
        name: read.get(name, [])
        for name in sorted(os.listdir(root))
        if name.endswith((".bin", ".npy")) and not name.startswith(".")
    }
    words = {
        name: set(re.split(r"[\W\d_]+", os.path.splitext(name)[0].lower()))
        for name in files
    }
    files = {name: files[name] for name in files if "test" not in words[name]}
    require(all(files.values()), f"of {list(files)} one is empty or unreadable")
    named = {n for n in files if words[n] & {"val", "valid", "validation"}}
    train = [files[name] for name in files if name not in named]
    held_out = [files[name] for name in files if name in named]
    if not named:
        train, held_out = expected_sides(files, share)
    check_sides(corpus, train, held_out)


def _write(generator: Generator, stem: Path, dtype: str) -> None:
    if os.path.lexists(stem.with_name(stem.name + ".bin")):
        return
    convention = one_of(generator, CONVENTIONS)
    size = one_of(generator, (3, 60, 100, 300, 3000))
    most = one_of(generator, (100, 100, 50_304, 2**16))
    tokens = generator.integers(most, size=size)
    if os.path.lexists(stem.with_name(stem.name + ".npy")):
        return
    path = write_shard(stem, tokens.tolist(), convention)
    if convention == "nanogpt" and dtype == "uint32" and generator.random() < 0.9:
        path.write_bytes(tokens.astype("<u4").tobytes())
    if generator.random() < 0.25:
        _damage(generator, path)


def _damage(generator: Generator, path: Path) -> None:
    content = path.read_bytes()
    match int(generator.integers(12)):
        case 0:
            ending = one_of(generator, (".npy", ".bin", ".txt", "", ".BIN", ".bin.npy"))
            other = path.with_suffix(ending)
            if not other.exists():
                path.rename(other)
        case 1:
            path.unlink()
            one_of(generator, (path.mkdir, lambda: path.symlink_to("nowhere")))()
        case 2:
            fields = np.frombuffer(content[:1024].ljust(1024, b"\0"), "<i4").copy()
            odd = (0, -1, 1, 7, 2**31 - 1, -(2**31), *MAGICS, 20240522)
            fields[generator.integers(3)] = one_of(generator, odd)
            path.write_bytes(fields.tobytes() + content[1024:])
        case 3:
            magic, version = one_of(generator, ((20240520, 1), (20240801, 7)))
            path.write_bytes(header(magic, version, len(content) // 2) + content)
        case 4:
            kinds = ("<i4", ">u2", "<u8", "f4", "<u2", "?", "U3", "O", "<u2,<u2")
            array = np.zeros(int(generator.integers(30)), one_of(generator, kinds))
            shape = one_of(generator, ((-1,), (1, -1), (-1, 1), ()))
            file = io.BytesIO()
            np.save(file, array.reshape(shape) if shape else array[:1].reshape(-1))
            path.write_bytes(file.getvalue())
        case 5:
            shape = one_of(generator, ("(-4,)", "(9e9,)", "(2**70,)", "()", "(True,)"))
            text = f"{{'descr': '<u2', 'fortran_order': False, 'shape': {shape}, }}"
            text = text.ljust(117) + "\n"
            path.write_bytes(b"\x93NUMPY\x01\x00\x76\x00" + text.encode() + b"ab")
        case 6 | 7 | 8:
            # Most of a short shard is header, of a long one body: damage the header.
            path.write_bytes(damaged(generator, content[:128]) + content[128:])
        case _:
            path.write_bytes(damaged(generator, content))
