"""Matrices in 8-bit floats, as NumPy rounds them."""

import ml_dtypes
import numpy as np

DTYPES = {
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}


def rounded(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Returns what a matrix stands for in 8-bit floats, in float64: divided by the
    smallest power of two, searched one by one, with which nothing overflows. Subnormal
    numbers of float32 are zero, as everywhere in XLA."""
    x = np.where(np.abs(x) < np.float32(2.0**-126), x * np.float32(0), x)
    kind = DTYPES[np.dtype(dtype).name]
    largest, most = np.abs(x.astype(np.float64)).max(), float(ml_dtypes.finfo(kind).max)
    step = 1.0
    if largest:
        while largest / step > most:
            step *= 2
        while largest / (step / 2) <= most and step > 2.0**-126:
            step /= 2
    # ml_dtypes rounds once, to the nearest and to even.
    return (x.astype(np.float64) / step).astype(kind).astype(np.float64) * step
