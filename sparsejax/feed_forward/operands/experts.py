"""What an FFN with experts reads besides its tokens and weights."""

from typing import NamedTuple

import jax
from jax.sharding import PartitionSpec

from sparsejax.feed_forward.layout import FFNLayout, token_spec


class ExpertOperands[T](NamedTuple):
    """The operands of the experts, or one value of another type for each of them, such
    as its spec on a mesh."""

    index: T | None = None
    """The value for the experts of each token, (tokens, choices); None where the FFN
    finds them after GEMM 1."""
    energy_threshold: T | None = None
    """The value for the share of a token's energy that an expert must have to be used,
    () float32; None where every token uses as many experts."""
    penalty_strength: T | None = None
    """The value for the norm of the penalty's gradient as a share of that of dW1, ()
    float32; None where there is no penalty."""


def expert_specs(
    layout: FFNLayout | None, operands: ExpertOperands[jax.Array] | None
) -> ExpertOperands[PartitionSpec] | None:
    """Returns how the operands of the experts lie on a mesh."""
    if operands is None:
        return None
    spec_of = lambda of: None if of is None else PartitionSpec()
    return ExpertOperands(
        index=None if operands.index is None else token_spec(layout),
        energy_threshold=spec_of(operands.energy_threshold),
        penalty_strength=spec_of(operands.penalty_strength),
    )
