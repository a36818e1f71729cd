"""Cases of text: odd folders, names, contents and globs."""

import glob
import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.random import Generator

from sparsejax.config import DataConfig
from sparsejax.data.batches import train_batches, validation_batches
from sparsejax.data.corpus import Corpus, load_corpus, unigram_loss
from tests.fuzz.judge import judging, require
from tests.fuzz.mutations import damaged, one_of
from tests.support.files.tokenizer_file import write_tokenizer

NAMES = (
    "a.txt",
    "b.txt",
    "c.txt",
    "d.md",
    ".hidden.txt",
    "b [1].txt",
    "*.txt",
    "?",
    "**",
    "ü 漢.txt",
    "new\nline.txt",
    "-dash.txt",
    " .txt",
    "no ending",
    "\udcff\udcfe.txt",
    "n" * 200 + ".txt",
)
FOLDERS = ("sub", "sub [2]", "sub/deep", ".git", "ü", "link")


def prepare(folder: Path) -> Path:
    """A tokenizer.json."""
    return write_tokenizer(folder / "tokenizer.json")


def case(generator: Generator, folder: Path, tokenizer: Path) -> str:
    root = folder / one_of(generator, ("corpus", "corpus [1]", "ü", ".corpus"))
    _write(generator, root)
    pattern, matches = _glob(generator, root)
    path = None
    if generator.random() < 0.3:
        path = _tokenizer(generator, folder, tokenizer)
    config = DataConfig(
        text=pattern,
        tokenizer=path,
        sequence_length=one_of(generator, (1, 2, 8, 16, 16, 4096)),
        validation_share=one_of(generator, (0.05, 0.3, 0.5, 0.95, 1e-12, 0.999999)),
        seed=one_of(generator, (0, 1, 2**31, 2**32 - 1)),
    )
    vocab_size = one_of(generator, (100, 256, 512, 512, 512, 70_000, 2**31 - 1))
    corpus = load_corpus(config, vocab_size=vocab_size)
    with judging():
        encode = _bytes if path is None else _encoder(path)
        read = _expected(root, pattern, matches)
        files = {name: encode(content) for name, content in read.items()}
        files = {name: tokens for name, tokens in files.items() if len(tokens)}
        train, held_out = expected_sides(files, config.validation_share)
        check_sides(corpus, [list(chain(*train))], [list(chain(*held_out))])
    check_batches(generator, corpus, config, vocab_size)
    return "the right windows"


def expected_sides(
    files: dict[str, list[int]], share: float
) -> tuple[list[list[int]], list[list[int]]]:
    """The files of each side in the order of their names, as `load_corpus` says."""
    if len(files) == 1:
        (tokens,) = files.values()
        cut = len(tokens) - max(1, round(len(tokens) * share))
        return [tokens[:cut]], [tokens[cut:]]
    score = {
        name: int(hashlib.sha256(os.fsencode(name)).hexdigest()[:16], 16) / 2**64
        for name in files
    }
    chosen = {name for name in files if score[name] < share}
    chosen = chosen or {min(score, key=lambda name: score[name])}
    if len(chosen) == len(files):
        chosen -= {max(score, key=lambda name: score[name])}
    sides: tuple[list, list] = ([], [])
    for name in sorted(files):
        sides[name in chosen].append(files[name])
    return sides


def check_sides(
    corpus: Corpus, train: list[list[int]], held_out: list[list[int]]
) -> None:
    """Every token is on the side, and in the array, that it belongs to."""
    for name, found, expected in (
        ("trained on", corpus.train, train),
        ("held out", corpus.validation, held_out),
    ):
        expected = [part for part in expected if part]
        require(
            [part.tolist() for part in found] == expected,
            f"of parts of {[len(part) for part in expected]} tokens "
            f"{[part.size for part in found]} are {name}, or others",
        )


def check_batches(
    generator: Generator, corpus: Corpus, config: DataConfig, vocab_size: int
) -> None:
    """An epoch is every window of the training side once, whatever the batches are."""
    length = config.sequence_length
    batch_size = one_of(generator, (1, 2, 2, 3, 4, 32))
    micro = one_of(generator, (1, 1, 1, 2))
    batches = train_batches(corpus, config, batch_size=batch_size, micro_batches=micro)
    held_out = validation_batches(
        corpus, config, batch_size=batch_size, batches=int(generator.integers(1, 5))
    )
    epoch = Counter(_windows(corpus.train, length))
    count = sum(epoch.values())
    steps = min(-(-count // batch_size), 6)
    taken = [next(batches)["tokens"].reshape(-1, length + 1) for _ in range(steps)]
    with judging():
        windows = np.concatenate(taken)[:count]
        read = Counter(window.tobytes() for window in windows)
        require(read <= epoch, "windows that are none, or one of them twice")
        if steps * batch_size >= count:
            require(read == epoch, f"{count - len(windows)} windows are left out")
        require(int(windows.max()) < vocab_size, f"{windows.max()} of {vocab_size}")
        read = Counter(w.tobytes() for batch in held_out for w in batch)
        require(
            read <= Counter(_windows(corpus.validation, length)),
            "held-out windows that are none, or one of them twice",
        )
        if corpus.vocab_size < 10**6:
            require(np.isfinite(unigram_loss(corpus)), "no unigram loss")


def _windows(parts: Sequence[np.ndarray], length: int) -> Iterator[bytes]:
    for part in parts:
        tokens = np.asarray(part, np.int32)
        for start in range(0, len(tokens) - length, length):
            yield tokens[start : start + length + 1].tobytes()


def _write(generator: Generator, root: Path) -> None:
    """A few files, folders, links, and what cannot be read."""
    root.mkdir()
    folders = [root]
    for _ in range(generator.integers(3)):
        folder = root / one_of(generator, FOLDERS)
        folder.mkdir(parents=True, exist_ok=True)
        folders.append(folder)
    for _ in range(generator.integers(1, 12)):
        path = one_of(generator, folders) / one_of(generator, NAMES)
        if os.path.lexists(path):
            continue
        match int(generator.integers(20)):
            case 0:
                path.mkdir()
            case 1 if generator.random() < 0.5:
                path.symlink_to(one_of(generator, folders))
            case 2:
                path.symlink_to("nowhere")
            case 3:
                path.symlink_to(path.name)
            case 4:
                others = [other for other in root.rglob("*") if other.is_file()]
                path.symlink_to(one_of(generator, others or [root]))
            case 5:
                os.mkfifo(path)
            case _:
                path.write_bytes(_content(generator))


def _content(generator: Generator) -> bytes:
    size = one_of(generator, (1, 5, 100, 1000, 5000))
    match int(generator.integers(6)):
        case 0:
            return b""
        case 1:
            return generator.bytes(size)
        case 2:
            return damaged(generator, "ü 漢\r\n".encode() * size)
        case 3:
            return b"\xef\xbb\xbf" + b"x" * size
        case _:
            words = (b"the ", b"sparse\n", b"tensor", "ü".encode())
            return b"".join(one_of(generator, words) for _ in range(size // 4))


def _glob(generator: Generator, root: Path) -> tuple[str, Callable[[str], bool] | None]:
    """A glob, and which names, relative to its fixed part, it matches.

    None: a pattern that is a path, literally.
    """
    here = glob.escape(str(root))
    visible = lambda name: not any(p.startswith(".") for p in name.split("/"))
    flat = lambda name: visible(name) and "/" not in name
    match int(generator.integers(12)):
        case 0:
            return f"{here}/*", flat
        case 1:
            return f"{here}/*.txt", lambda name: flat(name) and name.endswith(".txt")
        case 2:
            return f"{here}/**", visible
        case 3:
            return f"{here}/nothing*", lambda name: False
        case 4:
            name = one_of(generator, NAMES)
            return str(root / name), None
        case 5:
            return f"{root}/**/*.txt", None
        case 6:
            odd = ("[", "]", "**[", "\x00", "*\x00", "\ud800*", "sub/../*", "//*")
            return f"{root}/{one_of(generator, odd)}", None
        case 7:
            return one_of(generator, ("", "\x00", "[", "~nobody/*", "n" * 5000)), None
        case 8:
            start = one_of(generator, "abn")
            return f"{here}/{start}*", lambda n: flat(n) and n.startswith(start)
        case _:
            return (
                f"{here}/**/*.txt",
                lambda name: visible(name) and name.endswith(".txt"),
            )


def _expected(
    root: Path, pattern: str, matches: Callable[[str], bool] | None
) -> dict[str, bytes]:
    """The content of each file that matches, by name; of links to one file, the first.

    Where the pattern was odd, what `glob` finds is taken for right.
    """
    if matches is None:
        found = {Path(path) for path in glob.glob(pattern, recursive=True)}
        fixed = Path(pattern).parent
        while glob.has_magic(str(fixed)):
            fixed = fixed.parent
        named = {p.relative_to(fixed).as_posix(): p for p in found}
    else:
        named = {p.relative_to(root).as_posix(): p for p in _walk(root, ())}
        # An escaped folder is a wildcard as well, so names begin before it.
        above = f"{root.name}/" if glob.has_magic(root.name) else ""
        named = {above + name: path for name, path in named.items() if matches(name)}
    unique = {}
    for name in sorted(named):
        if named[name].is_file():
            unique.setdefault(os.path.realpath(named[name]), (name, named[name]))
    return {name: path.read_bytes() for name, path in unique.values()}


def _walk(folder: Path, above: tuple[str, ...]) -> Iterator[Path]:
    real = os.path.realpath(folder)
    if real in above:
        return
    for path in folder.iterdir():
        if path.is_dir():
            yield from _walk(path, (*above, real))
        else:
            yield path


def _tokenizer(generator: Generator, folder: Path, tokenizer: Path) -> str:
    """The path of a tokenizer.json, that may be damaged or not there."""
    path = folder / "tokenizer.json"
    content = tokenizer.read_bytes()
    match int(generator.integers(10)):
        case 0:
            return str(folder)
        case 1:
            return one_of(generator, ("", "\x00", "nowhere.json", "\ud800"))
        case 2 | 3:
            content = damaged(generator, content)
    path.write_bytes(content)
    return str(path)


def _bytes(content: bytes) -> list[int]:
    return list(content)


def _encoder(path: str) -> Callable[[bytes], list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(path)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids
    return lambda content: encode(content.decode("utf-8"))
