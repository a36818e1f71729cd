"""What an FFN with experts reads besides its tokens and weights."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from sparsejax.dtypes import accumulation_dtype
from sparsejax.feed_forward.layout import FFNLayout, token_spec
from sparsejax.routing.dispatch import Dispatch, expert_of_row


class ExpertOperands[T](NamedTuple):
    """The operands of the experts, or one value of another type for each of them, such
    as its spec on a mesh."""

    index: T | None = None
    """The value for the experts of each token, (tokens, choices); None where the FFN
    finds them after GEMM 1."""
    skipped_means: T | None = None
    """The value for the mean of A in each neuron over the tokens that skip it,
    (d_hidden,) float32; None without mean compensation."""
    energy_threshold: T | None = None
    """The value for the share of a token's energy that an expert must have to be used,
    () float32; None where every token uses as many experts."""


def expert_specs(
    layout: FFNLayout | None, operands: ExpertOperands[jax.Array] | None
) -> ExpertOperands[PartitionSpec] | None:
    """Returns how the operands of the experts lie on a mesh."""
    if operands is None:
        return None
    neurons = PartitionSpec() if layout is None else PartitionSpec(layout.hidden)
    return ExpertOperands(
        index=None if operands.index is None else token_spec(layout),
        skipped_means=None if operands.skipped_means is None else neurons,
        energy_threshold=(
            None if operands.energy_threshold is None else PartitionSpec()
        ),
    )


def skips(routed: Dispatch) -> Float[Array, "tokens experts"]:
    """Returns 1 where a token does not use an expert and 0 where it does, float32."""
    rows = routed.row_valid.shape[0]
    expert = expert_of_row(routed)[jnp.minimum(routed.token_rows, rows - 1)]
    expert = jnp.where(routed.token_rows < rows, expert, routed.experts)
    used = jax.nn.one_hot(expert, routed.experts, dtype=bool).any(axis=1)
    return 1.0 - used.astype(jnp.float32)


def mean_contribution(
    means: Float[Array, " d_hidden"],
    w_down: Float[Array, "d_hidden d_model"],
    routed: Dispatch,
) -> Float[Array, "tokens d_model"]:
    """Returns what the neurons that a token skips give on average,

        sum over the experts e that it does not use of m_e W2_e,

    where m_e are the means of A in the neurons of e. GEMMs read the dtype of `w_down`,
    and sums are in float32."""
    accumulate = accumulation_dtype(w_down.dtype)
    by_expert = w_down.reshape(routed.experts, -1, w_down.shape[1])
    of_expert = jnp.einsum(
        "ef,efd->ed",
        means.reshape(routed.experts, -1).astype(w_down.dtype),
        by_expert,
        preferred_element_type=accumulate,
    ).astype(w_down.dtype)
    skipped = skips(routed).astype(w_down.dtype)
    return jnp.matmul(skipped, of_expert, preferred_element_type=accumulate)


def mean_weight_gradient(
    means: Float[Array, " d_hidden"],
    dy: Float[Array, "tokens d_model"],
    routed: Dispatch,
) -> Float[Array, "d_hidden d_model"]:
    """Returns the gradient of `mean_contribution` by W2, float32: m_f times the sum of
    dY over the tokens that skip neuron f."""
    accumulate = accumulation_dtype(dy.dtype)
    skipped = skips(routed).astype(dy.dtype)
    sums = jnp.matmul(skipped.T, dy, preferred_element_type=accumulate)
    of_neuron = jnp.repeat(sums, means.shape[0] // routed.experts, axis=0)
    return means.astype(accumulate)[:, None] * of_neuron
