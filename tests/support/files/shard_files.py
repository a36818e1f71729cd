"""Writes tiny token shards as nanoGPT, llm.c and NumPy would."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

# How a shard is written: its ending, and bytes from tokens.
CONVENTIONS = ("nanogpt", "llm.c gpt-2", "llm.c llama-3", "npy uint16", "npy uint32")
HEADERS = {"llm.c gpt-2": (20240520, 1, "<u2"), "llm.c llama-3": (20240801, 7, "<u4")}


def header(magic: int, version: int, count: int) -> bytes:
    values = np.zeros(256, "<i4")
    values[:3] = magic, version, count
    return values.tobytes()


def write_shard(stem: Path, tokens: Sequence[int], convention: str) -> Path:
    """Writes the tokens to stem + .bin or .npy, and returns that path."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    if convention.startswith("npy"):
        path = stem.with_name(stem.name + ".npy")
        np.save(path, np.array(tokens, convention.split()[1]))
        return path
    path = stem.with_name(stem.name + ".bin")
    if convention == "nanogpt":
        path.write_bytes(np.array(tokens, "<u2").tobytes())
    else:
        magic, version, dtype = HEADERS[convention]
        body = np.array(tokens, dtype).tobytes()
        path.write_bytes(header(magic, version, len(tokens)) + body)
    return path
