"""The dense squared-ReLU FFN on a set of kernels: GEMM 1 writes A = relu(Y1)^2, and
GEMM 3 dY1 = dA 2 sqrt(A), in their epilogues. XLA runs the other GEMMs.

The kernels are those of rows of experts, of which there is one, with all neurons and
all tokens in their order.
"""

import jax
import jax.numpy as jnp

from sparsejax.feed_forward.frame import Execution, Static
from sparsejax.feed_forward.operands.weights import FFNWeights, ReadWeights, multiply
from sparsejax.feed_forward.passes.masked import weight_gradients
from sparsejax.feed_forward.tiles import GROUP_TILE
from sparsejax.kept_names import HIDDEN, under_name
from sparsejax.ops.kernels.base import ExpertRows


def forward(
    static: Static, x: jax.Array, w: ReadWeights, experts: None
) -> tuple[jax.Array, jax.Array, None]:
    """Returns Y (tokens, d_model), and A, which is all that the backward needs besides
    X and the weights. Nothing is observed."""
    del experts
    plan = static.plan
    assert plan.kernels is not None
    # (T, F) = (T, d) @ (d, F)
    a = plan.kernels.dense_rows_squared_relu(
        x, w.up[:, None], _all_tokens(x), expert_axis=1, k_major=False
    )
    # (T, d) = (T, F) @ (F, d)
    return multiply(plan.down, a, w.down), under_name(HIDDEN, a), None


def backward(
    static: Static,
    x: jax.Array,
    a: jax.Array,
    w: ReadWeights,
    dy: jax.Array,
    key: jax.Array | None,
) -> tuple[jax.Array, FFNWeights]:
    """Returns dX (tokens, d_model), and the gradients of the weights in float32."""
    plan = static.plan
    assert plan.kernels is not None
    # (T, F) = (T, d) @ (F, d)^T
    dy_up = plan.kernels.dense_rows_activation_gradient(
        dy, w.down[None], a, _all_tokens(dy), expert_axis=0, k_major=True
    )
    # (T, d) = (T, F) @ (F, d)
    dx = multiply(plan.d_input, dy_up, w.up.T)
    return dx, weight_gradients(plan, x, [dy_up], a, dy, key)


def _all_tokens(x: jax.Array) -> ExpertRows:
    """Returns the rows of one expert that all tokens use."""
    tiles = len(x) // GROUP_TILE
    count = jnp.int32(tiles)
    return ExpertRows(
        tile_expert=jnp.zeros(tiles, jnp.int32),
        used_tiles=count,
        ends=count[None],
        row_token=jnp.arange(len(x), dtype=jnp.int32),
        experts=1,
    )


DENSE_ON_KERNELS = Execution(forward, backward)
