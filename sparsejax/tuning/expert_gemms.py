"""The FFN's GEMMs of experts with a 2:4 operand, each by itself: their operands are
random and lie as in memory, with each token in one expert.

They are numbered as in `ffn_gemms`. The dense GEMM that each stands for is over all
neurons.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.tuned_gemm import Shape, TunedGemm
from sparsejax.feed_forward.operands.packed_rows import PackedRows, counted, row_groups
from sparsejax.feed_forward.sparsity import FFNSparsity
from sparsejax.feed_forward.tiles import dense_feature_count
from sparsejax.ops.expert_rows import looked_up
from sparsejax.ops.sparse_matmul import pack_weight
from sparsejax.routing.dispatch import Dispatch, used_tiles
from sparsejax.sparsity.compressed import compress, decompress
from sparsejax.sparsity.masks import magnitude_mask
from sparsejax.sparsity.packed import Packed, in_blocks, pack, unpack
from sparsejax.tuning.ffn_gemms import Gemm, kernels_here

DENSE_SHARE = FFNSparsity().dense_features
"""The share of an expert's features that stay dense by default."""


class Problem(NamedTuple):
    """One GEMM of E experts and its operands."""

    tuned: TunedGemm
    """The key under which the tables hold the GEMM's times."""
    sparse: Callable[..., Any]
    """Runs the kernel's GEMM, as a function of its config and the operands."""
    operands: tuple
    dense: Callable[[jax.Array, jax.Array], jax.Array]
    of_dense: tuple[jax.Array, jax.Array]
    pack: Callable[..., Any]
    """Makes the sparse operand from `source`; for GEMMs 5 and 6 the operands of
    both."""
    source: tuple
    expected: Callable[[], tuple[Callable[[Any], jax.Array], np.ndarray]]
    """Returns a function that takes some of the result, and these numbers in
    float32."""

    @property
    def shape(self) -> Shape:
        """The kernel's view of the GEMM."""
        return self.tuned.shape()


def make_problem(
    gemm: Gemm,
    tokens: int,
    d_model: int,
    d_hidden: int,
    routed: Dispatch,
    *,
    dense_share: float = DENSE_SHARE,
) -> Problem:
    """Returns a GEMM with random operands of a size.

    Args:
      gemm: the number of the GEMM.
      tokens, d_model, d_hidden: the sizes of the FFN.
      routed: the rows of the tokens, each token in one expert.
      dense_share: the share of an expert's features that stay dense in GEMMs 5 and 6.
    """
    experts, v = routed.experts, routed.v
    used = int(used_tiles(routed))
    expert = np.asarray(routed.tile_expert)[:used]
    rows, own = routed.row_token.size, d_hidden // experts
    d, keys = d_model, jax.random.split(jax.random.key(0), 4)
    normal = partial(jax.random.normal, dtype=jnp.bfloat16)
    tokens_by_d = normal(keys[0], (tokens, d))
    tokens_by_f = normal(keys[1], (tokens, d_hidden))
    looked = jax.jit(looked_up)(routed)
    grouped = partial(TunedGemm, tokens=rows, experts=experts, group_tile=v)
    # The last expert's first tile.
    last, tile = int(expert[-1]), int(np.flatnonzero(expert == expert[-1])[0])
    some = slice(tile * v, tile * v + 64)
    if gemm == "1":
        packed = _sparse(keys[2], (d_hidden, d))
        x = normal(keys[3], (rows, d))

        def expected():
            a = _dense(packed)[last * own : (last + 1) * own]
            return (lambda out: out[some]), np.asarray(x[some], np.float32) @ a.T

        scale = jnp.full((1, 1), 1.483)
        return Problem(
            grouped(d_in=d, d_out=own),
            lambda config, w, x, rows: kernels_here(config).rows_by_expert_weight(
                x, w, rows
            ),
            (packed, x, looked),
            jnp.matmul,
            (tokens_by_d, normal(keys[2], (d, d_hidden))),
            partial(pack_weight, axis=-2, dtype=jnp.dtype(jnp.bfloat16)),
            (jax.random.normal(keys[2], (d, d_hidden)), scale),
            expected,
        )
    kept = jax.jit(_keep_rows)(tokens_by_f, routed)
    if gemm in ("2", "4"):
        packed = _sparse(keys[2], (rows, own))
        k_major = gemm == "4"
        stored = (d, experts, own) if k_major else (experts, own, d)
        b = normal(keys[3], stored)

        def expected():
            of_last = b[:, last].T if k_major else b[last]
            product = _dense(packed)[some] @ np.asarray(of_last, np.float32)
            return (lambda out: out[some]), product

        weight = b.reshape(d, -1) if k_major else b.reshape(-1, d)
        return Problem(
            grouped(
                sparse_operand="input", d_in=own, d_out=d, weight_transposed=k_major
            ),
            lambda config, a, b, rows: kernels_here(config).expert_rows_matmul(
                a, b, rows, b_k_major=k_major
            ),
            (packed, b, looked),
            (lambda a, w: a @ w.T) if k_major else jnp.matmul,
            (tokens_by_f, weight),
            _gradient if k_major else _keep_rows,
            (tokens_by_f, kept if k_major else routed),
            expected,
        )
    residual = in_blocks(dense_feature_count(own, dense_share))
    packed = _sparse(keys[2], (own + residual, rows))
    b, up = normal(keys[3], (rows, d)), gemm == "5"
    range_of_last = slice(tile * v, used * v)

    def of_last(results):
        parts = [result for result in results if result is not None]
        first, *_, second = [r[:, last].T if up else r[last] for r in parts * 2]
        return jnp.concatenate([first[:64], second[-64:]])

    def expected():
        a = np.concatenate([_dense(packed)[:64], _dense(packed)[-64:]])
        product = a[:, range_of_last] @ np.asarray(b[range_of_last], np.float32)
        return of_last, product

    tuned = grouped(
        is_weight_gradient=True,
        sparse_operand="gradient" if up else "input",
        d_in=d if up else own + residual,
        d_out=own + residual if up else d,
    )

    def dense(lhs, rhs):
        return jnp.matmul(lhs.T, rhs, preferred_element_type=jnp.float32)

    def pack_over_rows(da, kept):
        groups = row_groups(FFNSparsity(dense_features=dense_share), tokens, kept)
        return kernels_here().activation_gradient_over_tokens(
            da,
            kept.a,
            looked_up(kept.routed),
            groups.residual,
            by_token=True,
            by_segments=False,
        )

    return Problem(
        tuned,
        lambda config, a, b, rows: kernels_here(config).expert_weight_gradient(
            a, b, rows, transpose_out=up, residual_rows=residual
        ),
        (packed, b, looked),
        dense,
        (tokens_by_d, tokens_by_f) if up else (tokens_by_f, tokens_by_d),
        pack_over_rows,
        (tokens_by_f, kept),
        expected,
    )


def _keep_rows(y_up: jax.Array, routed: Dispatch) -> PackedRows:
    rows = looked_up(routed)
    kept = kernels_here().keep_features(y_up, rows, by_token=True)
    return counted(routed, kept, None)


def _gradient(da: jax.Array, kept: PackedRows) -> Packed:
    rows = looked_up(kept.routed)
    return kernels_here().activation_gradient(da, kept.a, rows, by_token=True)


def error(problem: Problem, call: Callable[[], Any]) -> float:
    """Returns the relative error of a kernel's result against float32, on some of its
    rows."""
    some, expected = problem.expected()
    got = np.asarray(some(call()), np.float32)
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def _sparse(key: jax.Array, shape: tuple[int, int]) -> Packed:
    @jax.jit
    def make(key):
        x = jax.random.normal(key, shape, jnp.bfloat16)
        return pack(compress(x, mask=magnitude_mask(x)))

    return make(key)


def _dense(packed: Packed) -> np.ndarray:
    return np.asarray(jax.jit(lambda p: decompress(unpack(p)))(packed), np.float32)
