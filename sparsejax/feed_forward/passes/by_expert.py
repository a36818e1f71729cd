"""The FFN where a token uses the neurons of its experts only: A is V:N:M.

The clusters of neurons (experts) lie contiguously in F, so V:2:M with M = 4E is a
grouped GEMM over experts whose sparse operand is 2:4, and V:4:M one of dense operands.
Tokens are sorted by expert and padded to tiles of V rows; a row is one (token, expert)
pair and holds F / E neurons, or, in `joined_experts`, one token with those of all its
experts. A gated FFN has two products with X in each row, G and U.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sparsejax.dtypes import accumulation_dtype
from sparsejax.feed_forward.activation import Hidden
from sparsejax.feed_forward.experts.penalty import Penalty, penalised, penalty
from sparsejax.feed_forward.experts.sample import (
    Sample,
    all_products,
    sample_of,
    stride_on_device,
)
from sparsejax.feed_forward.frame import Execution, Static
from sparsejax.feed_forward.layout import FFNLayout, gather_experts, own_experts
from sparsejax.feed_forward.operands.experts import ExpertOperands
from sparsejax.feed_forward.operands.packed_rows import PackedRows, counted
from sparsejax.feed_forward.operands.weights import (
    FFNWeights,
    ReadWeights,
    as_dense,
)
from sparsejax.feed_forward.passes.dense_by_expert import (
    DenseRows,
    backward_of_dense_rows,
    down_of_dense_rows,
    rows_of_a,
)
from sparsejax.feed_forward.passes.expert_rows import (
    all_neurons,
    from_hidden,
    hidden_gradient,
    into_tokens,
    own_neurons,
    packed_for_kernels,
    rows_into_hidden,
    rows_of_tokens,
    weight_gradients_by_expert,
)
from sparsejax.feed_forward.passes.joined_experts import (
    JoinedRows,
    backward_of_sets,
    forward_by_sets,
    forward_of_sets,
)
from sparsejax.feed_forward.passes.masked import (
    into_hidden,
    kept_where_masked,
    weight_gradients,
)
from sparsejax.feed_forward.passes.packed_by_expert import (
    backward_of_packed,
    down_of_packed,
)
from sparsejax.feed_forward.plan import FFNPlan
from sparsejax.kept_names import HIDDEN, ROUTES, under_name
from sparsejax.ops.expert_rows import gather_rows, looked_up
from sparsejax.ops.fp8_matmul import quantise_rows, rounded_product
from sparsejax.routing.dispatch import Dispatch
from sparsejax.routing.routers import NO_STATE
from sparsejax.sparsity.masks import magnitude_mask


class Residuals(NamedTuple):
    """The arrays that the backward needs besides the weights and, where `x_rows` is
    None, besides X."""

    kept_rows: Hidden
    """What the activation keeps of each row, (rows, d_hidden / E) each; masked where A
    is 2:4 and the backward re-uses the mask."""
    kept: Hidden | None
    """What the activation keeps of all neurons, (tokens, d_hidden) each, not masked;
    None unless the weight gradients are dense and the forward's mask is not re-used."""
    routed: Dispatch
    x_rows: jax.Array | None
    """The rows of X as GEMM 1 read them, (rows, d_model); None unless
    `FFNPlan.keeps_rows_of_x`."""


type OfRows = Residuals | PackedRows | DenseRows | JoinedRows
"""What the backward needs of the rows of tokens."""


class WithPenalty(NamedTuple):
    """The arrays that the backward needs."""

    of_rows: OfRows
    penalty: Penalty | None
    """What it needs for the penalty on skipped neurons; None where there is none."""


def forward(
    static: Static, x: jax.Array, w: ReadWeights, operands: ExpertOperands[jax.Array]
) -> tuple[jax.Array, WithPenalty, Sample | None]:
    """Returns Y (tokens, d_model), what the backward needs, and what is observed."""
    plan, layout = static.plan, static.layout
    products = None if plan.sparsity.skip_blocks else into_hidden(plan, x, w)
    chosen = _chosen(static, x, w, products, operands)
    if products is None:
        y, residuals = _forward_of_rows(plan, layout, x, w, chosen)
    else:
        y, residuals = _forward_of_products(plan, layout, w, products, chosen)
    # The dispatch has a name of its own, and to gather the rows of X again is cheap.
    named = {
        field: under_name(HIDDEN, of)
        for field, of in residuals._asdict().items()
        if field not in ("routed", "rows", "x_rows")
    }
    residuals = residuals._replace(**named)
    if static.observed_share is None:
        return y, WithPenalty(residuals, None), None
    assert chosen is not None
    strength = operands.penalty_strength
    sample, of_sample = _observed(static, x, w, products, chosen, strength)
    return y, WithPenalty(residuals, of_sample), sample


def _observed(
    static: Static,
    x: jax.Array,
    w: ReadWeights,
    products: Hidden | None,
    chosen: jax.Array,
    strength: jax.Array | None,
) -> tuple[Sample, Penalty | None]:
    """Returns what is observed, and what the backward needs for the penalty. Y1 of the
    sampled tokens is computed where GEMM 1 has not."""
    sparsity, layout = static.plan.sparsity, static.layout
    assert sparsity.experts is not None
    assert static.observed_share is not None
    stride = stride_on_device(len(x), layout, static.observed_share)
    x, chosen = x[::stride], chosen[::stride]
    if products is None:
        w_up = as_dense(w.up, w.packed_up, up=True)
        y_up = all_products(x, w_up)
    else:
        y_up = under_name(HIDDEN, products[-1][::stride])
    # Without the names a backward that recomputes would choose for all tokens again, or
    # keep all of Y1 for it.
    sample = sample_of(x, y_up, under_name(ROUTES, chosen), sparsity.experts, layout)
    if strength is None:
        return sample, None
    return sample, penalty(sample, y_up, strength, layout)


def _chosen(
    static: Static,
    x: jax.Array,
    w: ReadWeights,
    products: Hidden | None,
    operands: ExpertOperands[jax.Array],
) -> jax.Array | None:
    """Returns the experts of each token: those that the call was given, or, by a router
    that reads pre-activations, those of the largest scores."""
    sparsity = static.plan.sparsity
    if sparsity.chooses_in_fp8:
        scores = _scores_in_fp8(static, x, w)
    elif products is not None and sparsity.router.reads == "y_up":
        scores = _scores(static, products)
    else:
        return operands.index
    return sparsity.router.of_scores(
        gather_experts(static.layout, scores),
        sparsity.expert_choices,
        operands.energy_threshold,
    )


def _forward_of_products(
    plan: FFNPlan,
    layout: FFNLayout | None,
    w: ReadWeights,
    products: Hidden,
    expert_index: jax.Array | None,
) -> tuple[jax.Array, OfRows]:
    """Computes `forward` from the products of all tokens with the weights of all
    neurons."""
    sparsity = plan.sparsity
    if plan.joins_experts:
        assert expert_index is not None
        return forward_of_sets(plan, w, products, expert_index)
    routed = rows_of_tokens(plan, expert_index, layout)
    if plan.packs_activations:
        assert plan.kernels is not None
        (y_up,) = products
        rows = looked_up(routed)
        kept = plan.kernels.keep_features(y_up, rows, by_token=True)
        return down_of_packed(plan, w, counted(routed, kept, None))
    unmasked = None
    if not sparsity.mask_reuse and sparsity.weight_gradients == "dense":
        unmasked = plan.activation.keep(products)
    of_rows = tuple(own_neurons(product, routed) for product in products)
    if plan.keeps_dense_rows:
        a = plan.activation.apply(plan.activation.keep(of_rows))
        return down_of_dense_rows(plan, w, a, routed, None)
    return _down(plan, w, of_rows, routed, unmasked, None)


def _scores(static: Static, products: Hidden) -> jax.Array:
    """Returns the scores of this device's experts, (tokens, experts), by a router that
    reads pre-activations, from the products of X with the weights into the hidden
    layer."""
    plan, layout = static.plan, static.layout
    assert plan.sparsity.experts is not None
    _, experts = own_experts(layout, plan.sparsity.experts)
    read = plan.activation.read_by_routers(products)
    return plan.sparsity.router.scores(read, experts, NO_STATE)


def _scores_in_fp8(static: Static, x: jax.Array, w: ReadWeights) -> jax.Array:
    """Returns what `_scores` does for the products of operands that are rounded to
    8-bit floats. Where a kernel sums the energies they have another factor for each
    token, which the choice does not depend on."""
    plan, layout = static.plan, static.layout
    if plan.sums_energies:
        assert plan.kernels is not None and plan.sparsity.experts is not None
        _, experts = own_experts(layout, plan.sparsity.experts)
        weight = w.rounded("up").transposed
        return plan.kernels.expert_energies(
            quantise_rows(x).values, weight, experts=experts
        )
    up = rounded_product(x, w.rounded("up"))
    gate = () if w.gate is None else (rounded_product(x, w.rounded("gate")),)
    return _scores(static, (*gate, up))


def _forward_of_rows(
    plan: FFNPlan,
    layout: FFNLayout | None,
    x: jax.Array,
    w: ReadWeights,
    expert_index: jax.Array | None,
) -> tuple[jax.Array, OfRows]:
    """Computes `forward` where the experts are known before GEMM 1, which multiplies
    each row by the neurons of its expert alone, or else each token by all of them."""
    if plan.joins_experts:
        assert expert_index is not None
        return forward_by_sets(plan, x, w, expert_index)
    routed = rows_of_tokens(plan, expert_index, layout)
    if plan.up.spec.experts is None:
        products = into_hidden(plan, x, w)
        of_rows = tuple(own_neurons(product, routed) for product in products)
        return _down(plan, w, of_rows, routed, None, None)
    x_rows = gather_rows(plan.kernels, x, routed)
    kept_x = x_rows if plan.keeps_rows_of_x else None
    rows = looked_up(routed)
    if plan.up_writes_a:
        weight = packed_for_kernels(plan.up, w.packed_up)
        assert weight is not None and plan.kernels is not None
        kept = plan.kernels.matmul_keep_features(x_rows, weight, rows)
        return down_of_packed(plan, w, counted(routed, kept, kept_x))
    if plan.keeps_dense_rows:
        a = rows_of_a(plan, w, x_rows, routed)
        return down_of_dense_rows(plan, w, a, routed, kept_x)
    up = rows_into_hidden(plan, plan.up, x_rows, w.up, w.packed_up, routed)
    if plan.packs_activations:
        assert plan.kernels is not None
        kept = plan.kernels.keep_features(up, rows, by_token=False)
        return down_of_packed(plan, w, counted(routed, kept, kept_x))
    products: Hidden = (up,)
    if plan.gate is not None:
        assert w.gate is not None
        gate = rows_into_hidden(plan, plan.gate, x_rows, w.gate, w.packed_gate, routed)
        products = gate, up
    return _down(plan, w, products, routed, None, kept_x)


def _down(
    plan: FFNPlan,
    w: ReadWeights,
    products: Hidden,
    routed: Dispatch,
    unmasked: Hidden | None,
    kept_x: jax.Array | None,
) -> tuple[jax.Array, Residuals]:
    """Computes `forward` from the products of the rows on, with A masked or dense
    inside the experts. `unmasked` and `kept_x` become `Residuals.kept` and
    `Residuals.x_rows`."""
    kept = kept_where_masked(plan.activation, products, plan.sparsity.in_expert)
    y = from_hidden(plan, plan.down, plan.activation.apply(kept), w.down, routed)
    y = into_tokens(plan, plan.down, y, routed)
    if not plan.sparsity.mask_reuse:
        kept = plan.activation.keep(products)
    return y, Residuals(kept, unmasked, routed, kept_x)


def backward(
    static: Static,
    x: jax.Array | None,
    residuals: WithPenalty,
    w: ReadWeights,
    dy: jax.Array,
    key: jax.Array | None,
) -> tuple[jax.Array, FFNWeights]:
    """Returns dX (tokens, d_model), and the gradients of the weights in float32, that
    of the penalty among them; `x` is None where the residuals hold its rows."""
    dx, dw = _backward_of_rows(static.plan, x, residuals.of_rows, w, dy, key)
    if residuals.penalty is not None:
        dw = dw._replace(up=penalised(dw.up, residuals.penalty, static.layout))
    return dx, dw


def _backward_of_rows(
    plan: FFNPlan,
    x: jax.Array | None,
    residuals: OfRows,
    w: ReadWeights,
    dy: jax.Array,
    key: jax.Array | None,
) -> tuple[jax.Array, FFNWeights]:
    """Computes `backward` without the penalty."""
    if isinstance(residuals, JoinedRows):
        assert x is not None
        return backward_of_sets(plan, x, residuals, w, dy)
    sparsity, activation = plan.sparsity, plan.activation
    routed, by_rows = residuals.routed, plan.sums_over_rows
    # X as GEMM 5 reads it: of the rows or of the tokens.
    x_read = x if residuals.x_rows is None else residuals.x_rows
    assert x_read is not None
    if by_rows and residuals.x_rows is None:
        x_read = gather_rows(plan.kernels, x_read, routed)
    dy_rows = gather_rows(plan.kernels, dy, routed)
    if isinstance(residuals, PackedRows):
        return backward_of_packed(plan, x_read, residuals, w, dy, dy_rows, key)
    if isinstance(residuals, DenseRows):
        return backward_of_dense_rows(plan, x_read, residuals, w, dy, dy_rows, key)
    da = hidden_gradient(plan, w, dy, dy_rows, routed)
    da_rows = da if plan.d_hidden.spec.experts else own_neurons(da, routed)
    a_rows, of_rows = activation.with_gradients(da_rows, residuals.kept_rows)
    selected = of_rows
    if sparsity.in_expert is not None and not sparsity.mask_reuse:
        pattern = sparsity.in_expert
        selected = tuple(jnp.where(magnitude_mask(g, pattern), g, 0) for g in of_rows)
    dx = _input_gradient(plan, w, selected, routed)
    if by_rows:
        return dx, weight_gradients_by_expert(
            plan, x_read, of_rows, a_rows, dy_rows, key, routed
        )
    if residuals.kept is not None:
        a, into = activation.with_gradients(da, residuals.kept)
    else:
        a = all_neurons(a_rows, routed)
        into = tuple(all_neurons(gradient, routed) for gradient in of_rows)
    return dx, weight_gradients(plan, x_read, into, a, dy, key)


def _input_gradient(
    plan: FFNPlan, w: ReadWeights, gradients: Hidden, routed: Dispatch
) -> jax.Array:
    """Returns dX (tokens, d_model). In a gated FFN the rows of dX are the sums of two
    products in float32."""
    dtype = gradients[0].dtype
    product = partial(from_hidden, plan, routed=routed, transposed=True)
    if plan.d_input_gate is None:
        dx = product(plan.d_input, gradients[0], w.up)
    else:
        assert w.gate is not None
        accumulate = accumulation_dtype(dtype)
        of_gate = product(plan.d_input_gate, gradients[0], w.gate, out_dtype=accumulate)
        of_up = product(plan.d_input, gradients[1], w.up, out_dtype=accumulate)
        dx = (of_gate + of_up).astype(dtype)
    return into_tokens(plan, plan.d_input, dx, routed)


BY_EXPERT = Execution(forward, backward)
