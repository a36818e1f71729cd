"""Files of tokens, as nanoGPT, llm.c and NumPy write them, read by memory map.

.bin   nothing but little-endian tokens (nanoGPT), or first a header of 256 int32:
       magic, version, number of tokens (llm.c; the magic says which vocabulary's)
.npy   one dimension, uint16 or uint32
"""

import os
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

_HEADER = 256 * 4
# Magic to version and dtype. As two uint16 a magic is a token above 55000 first, which
# GPT-2's vocabulary does not have: a file without a header cannot look like this.
_LLM_C = {20240520: (1, "<u2"), 20240801: (7, "<u4")}
_LLM_C_EVALUATION = 20240522


class _Layout(NamedTuple):
    dtype: np.dtype
    offset: int
    """The number of bytes before the first token."""
    count: int
    """The number of tokens."""


def open_shard(path: Path, dtype: str) -> np.memmap:
    """Returns the tokens of a file, uint16 or uint32 (tokens,), none of them read yet.

    Args:
      path: ends in .bin or .npy.
      dtype: "uint16" or "uint32", the dtype of a .bin file without a header.
    Raises:
      ValueError: names the file, which cannot be read, is empty, is cut off, has a
        header that nobody is known to write, or tokens of another type.
    """
    if not path.is_file():
        raise ValueError(f"{path} is not a file; leave it out of `shards`")
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                raise ValueError(f"{path} is empty (0 bytes); remove or replace it")
            is_npy = path.suffix == ".npy"
            layout = _npy(file, path) if is_npy else _bin(file, path, size, dtype)
            if layout.count == 0:
                raise ValueError(f"{path} holds no tokens; remove or replace it")
            end = layout.offset + layout.count * layout.dtype.itemsize
            if end != size:
                raise ValueError(
                    f"{path} is truncated or damaged: its header promises "
                    f"{layout.count} tokens of {layout.dtype}, so {end} bytes, and it "
                    f"has {size}; copy or write it again"
                )
            tokens = np.memmap(file, layout.dtype, "r", layout.offset, (layout.count,))
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error.strerror}); leave it out of `shards` or "
            f"change its permissions"
        ) from error
    if layout.offset == 0 and layout.dtype == np.uint16:
        _refuse_halves(path, tokens)
    return tokens


def _bin(file: BinaryIO, path: Path, size: int, dtype: str) -> _Layout:
    header = np.frombuffer(file.read(_HEADER)[: size // 4 * 4], "<i4")
    magic = int(header[0]) if header.size else None
    if magic == _LLM_C_EVALUATION:
        raise ValueError(
            f"{path} is an llm.c file of multiple-choice questions (magic {magic}), "
            f"not of text; leave it out of `shards`"
        )
    if magic not in _LLM_C:
        plain = np.dtype(dtype).newbyteorder("<")
        if size % plain.itemsize:
            raise ValueError(
                f"{path} has {size} bytes, not a multiple of the {plain.itemsize} of "
                f"data.shard_dtype={dtype!r}: it is truncated, or its tokens are of "
                f"another type; copy it again or set --data.shard-dtype"
            )
        return _Layout(plain, 0, size // plain.itemsize)
    if size < _HEADER:
        raise ValueError(
            f"{path} is truncated: it begins as an llm.c header (magic {magic}), which "
            f"has {_HEADER} bytes, and the file has {size}; copy or write it again"
        )
    version, written = _LLM_C[magic]
    if header[1] != version:
        raise ValueError(
            f"{path} has an llm.c header (magic {magic}) of version {header[1]}, and "
            f"only version {version} is known; write it with that version"
        )
    return _Layout(np.dtype(written), _HEADER, int(header[2]))


def _npy(file: BinaryIO, path: Path) -> _Layout:
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    try:
        shape, _, dtype = readers[np.lib.format.read_magic(file)](file)
    except Exception as error:  # NumPy's parser fails in many ways on damaged headers.
        raise ValueError(
            f"{path} does not begin as a .npy file ({error}); write it with numpy.save"
        ) from error
    # A damaged header may hold (True,), an integer to NumPy.
    one_dimension = [type(size) for size in shape] == [int]
    if dtype not in (np.dtype("<u2"), np.dtype("<u4")) or not one_dimension:
        raise ValueError(
            f"{path} holds an array of {dtype} with shape {shape}; tokens are one "
            f"dimension of little-endian uint16 or uint32: save it with .astype("
            f"'uint16').ravel()"
        )
    return _Layout(dtype, file.tell(), shape[0])


def _refuse_halves(path: Path, tokens: np.ndarray) -> None:
    """Raises ValueError where uint32 tokens were read as pairs of uint16.

    Their upper halves are then every second token, all of them tiny, in which no check
    of the vocabulary finds a fault.
    """
    sample = tokens[:4096]
    if sample.size < 64:
        return
    if sample[1::2].max() <= 3 and np.median(sample[::2]) > 255:
        raise ValueError(
            f"{path}: every second token is below 4, as if the tokens were of uint32 "
            f"and not of data.shard_dtype='uint16'; set --data.shard-dtype uint32"
        )
