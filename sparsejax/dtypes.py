"""The dtypes that an FFN computes in, and the one that it sums in."""

from typing import Literal

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

COMPUTE_DTYPES = ("float32", "bfloat16", "float64")
"""The dtypes that an FFN's operands may have; float64, which no kernel takes, is for
tests of gradients. A new one is registered here; where a setting is to offer it, such
as `ModelConfig.dtype`, it stands in the type of that setting too."""

Precision = Literal["dtype", "fp8", "fp8_all"]
"""The precision of the GEMMs of linear layers: their operands are in the compute dtype
("dtype"); or they are 8-bit floats in the forward and for the gradients of inputs
("fp8"), and for the gradients of weights too ("fp8_all")."""


def check_compute_dtype(name: str, dtype: str) -> None:
    """Raises ValueError where operand `name` has a dtype that no FFN computes in, or
    the argument `dtype` is one."""
    if dtype not in COMPUTE_DTYPES:
        what = f"dtype={dtype}" if name == "dtype" else f"{name} has dtype {dtype}"
        raise ValueError(
            f"{what}, and an FFN computes in float32 or bfloat16 (in "
            f"float16 relu(Y1)^2 would be infinite from Y1 = 256 on); use bfloat16 by "
            f"dtype=jnp.bfloat16"
            + ("" if name == "dtype" else f" or {name}.astype(jnp.bfloat16)")
        )


def dtype_in_jax(array: Array) -> str:
    """Returns the dtype that JAX computes with: float32 for NumPy's float64, unless x64
    is enabled."""
    return str(jnp.result_type(array))


def accumulation_dtype(dtype: DTypeLike) -> jnp.dtype:
    """Returns the dtype that numbers of `dtype` are summed in: float64 for float64, and
    float32 for all others, those of 8 bits included."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def widest(*dtypes: DTypeLike) -> jnp.dtype:
    """Returns the dtype that holds the numbers of all `dtypes`: the one that they
    share, or else one that sums are accumulated in."""
    known = {jnp.dtype(dtype) for dtype in dtypes}
    if len(known) == 1:
        return known.pop()
    return jnp.result_type(*map(accumulation_dtype, known))
