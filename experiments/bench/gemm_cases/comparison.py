"""What a case of the GEMM benchmark is: sizes, settings, and one GEMM compiled."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench.expert_shares import drawn_shares, expert_shares, routed
from pallas_kernels.sm90.gemm import dense_kernel
from pallas_kernels.sm90.sparse_matmul_configs import Config
from sparsejax.routing.dispatch import Dispatch
from sparsejax.tuning.ffn_gemms import Gemm
from sparsejax.tuning.tune import Trial

Number = Literal["1", "2", "3", "4", "5", "6"]
"""The number of a GEMM's equation. Of dense operands GEMM 3 is a case of its own: it
reads W2 transposed, GEMM 1 reads W1 as it is."""

Call = Callable[[], Any]

AnyConfig = Config | dense_kernel.Config | None
"""The config of a kernel; None of an implementation that has none."""


class Size(NamedTuple):
    """The size of an FFN."""

    tokens: int
    d_model: int
    d_hidden: int
    experts: int | None
    """The number of experts; None where there are none."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The settings of a case's GEMMs besides their size."""

    v: int
    share_of_first: float | None
    peer: bool
    config: Config | None = None
    """The config of the kernel with a 2:4 operand that a search has found; None without
    one."""


class Rows(NamedTuple):
    """Rows of tokens, sorted by expert and filled up to whole tiles."""

    routed: Dispatch
    """The rows, and where each token's is."""
    group_sizes: jax.Array
    """The number of rows of each expert, those that only fill up a tile included."""
    used_tiles: jax.Array
    """The number of tiles that have rows of tokens."""


def rows_of(size: Size, setting: Setting) -> Rows:
    """Returns the rows of the tokens that are sent to one expert each: with a share of
    the first one that is given, or with shares that are drawn."""
    assert size.experts is not None
    shares = drawn_shares(size.experts)
    if setting.share_of_first is not None:
        shares = expert_shares(size.experts, setting.share_of_first)
    found = routed(size.tokens, shares, setting.v)
    tiles = -(-found.group_sizes // setting.v)
    return Rows(found, tiles * setting.v, jnp.sum(tiles))


def near(right: np.ndarray, bound: float, size: Size) -> Callable[[str, Call], "Error"]:
    """Returns the check that a result differs from `right`, float64, by less than
    `bound` of its norm. Of a result with more rows the first ones are compared: beyond
    the used tiles a kernel writes nothing."""

    def check(name: str, call: Call) -> Error:
        got = np.asarray(call()[: len(right)], np.float64)
        error = float(np.linalg.norm(got - right) / np.linalg.norm(right))
        assert error < bound, f"{name} at {size}: relative error {error}"
        return Error(error)

    return check


class Error(NamedTuple):
    """The relative error of a result."""

    ours: float
    dense: float | None = None
    """The relative error of the dense GEMM; None where its result is another one."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One GEMM, compiled to functions without arguments."""

    dense: Call
    kernels: Mapping[str, Mapping[AnyConfig, Call]]
    """The calls that are timed, by implementation and by config; None is the config of
    an implementation that has none. The fastest call of each implementation is
    reported."""
    check: Callable[[str, Call], Error]
    """Returns the error of one call of an implementation. Raises AssertionError where
    it is above the bound."""
    beside: Mapping[str, Call] = field(default_factory=dict)
    """Other calls that are timed in turn with the dense GEMM and the kernels, by
    name."""
    moving: Mapping[str, Call] = field(default_factory=dict)
    """Packing, and the calls that it is compared with, by name. They are timed by
    themselves: in the same rounds, calls that only move bytes would let the chip
    rest."""
    gemms_packed: int = 1
    """The number of GEMMs that read the result of one packing."""
    executed_flops: int | None = None
    """The FLOPs of the tokens' own experts, without rows that only fill up tiles; None
    where an operand is 2:4."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kind of comparison, with the shapes and GEMMs that it has unless others are
    asked for."""

    shapes: tuple[str, ...]
    """The sizes T,d,F of each comparison, and E where there are experts."""
    gemms: tuple[Number, ...]
    """The numbers of the GEMMs' equations."""
    known_gemms: tuple[Number, ...] = get_args(Gemm)
    has_experts: bool = True
    compare: Callable[[Any, Size, Setting], Comparison]
    """Returns the comparison of one GEMM: makes operands of a size and compiles the
    calls."""
    trial: Callable[[Any, Size, Setting], Trial] | None = None
    """Returns the GEMM as a search of configs takes it; None where nothing is tuned."""
