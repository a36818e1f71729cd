"""Which neurons belong together, which tokens go to them, and in which row.

Terms: an expert is a cluster of F / E neurons; a token is dispatched to g of the E
experts; the rows of an expert are padded to a multiple of v, so that every tile of v
rows has one expert.
"""

from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from sparsejax.prefix_sums import sums_before


def balanced_clusters(
    w_up: Float[Array, "d_model d_hidden"],
    experts: int,
    *,
    iterations: int = 20,
    initial: Int[Array, " d_hidden"] | None = None,
) -> tuple[Int[Array, " d_hidden"], Float[Array, "experts d_model"]]:
    """Equal clusters of neurons with similar input weights, and their centres.

    Spherical k-means over the unit columns n_f of `w_up`, with F / E neurons each:

        maximise  sum_f <n_f, c_e(f)>,   c_e = mean of the members, made unit norm

    Neurons are placed by deferred acceptance: every unplaced neuron proposes to the
    best expert it has not tried, every expert keeps the F / E best of those it holds
    and those that propose. The best assignment seen is returned, so the objective is
    at least that of `initial`. Deterministic; float32; jit with `experts` and
    `iterations` static.

    Args:
      w_up: the up projection. Columns that are zero or not finite fit everywhere.
      experts: E; F is a multiple of it.
      iterations: most rounds of k-means; it stops where an assignment repeats.
      initial: a balanced assignment to start from. None: centres far from each
        other, each the column least like those before it. A concrete one is checked,
        a traced one is trusted.
    Returns:
      the expert of each neuron, int32, and the centres, float32, of unit norm (zero
      for a cluster whose columns cancel or are all zero).
    Raises:
      ValueError: F is not a multiple of E, or `initial` is not balanced.
    Source: the clustering of arXiv 2110.01786 (MoEfication); warm start as in arXiv
      2410.03440. Differs in the placement: theirs is a constrained assignment.
    """
    d_hidden = w_up.shape[1]
    if d_hidden % experts:
        raise ValueError(
            f"d_hidden={d_hidden} is not a multiple of experts={experts}, required by "
            f"equal clusters; pad to {-(-d_hidden // experts) * experts}"
        )
    if initial is not None and not isinstance(initial, jax.core.Tracer):
        sizes = np.bincount(np.asarray(initial), minlength=experts)
        if initial.shape != (d_hidden,) or np.any(sizes != d_hidden // experts):
            raise ValueError(
                f"initial has shape {initial.shape}, cluster sizes {sizes.tolist()}, "
                f"not {d_hidden // experts} neurons in each of {experts} experts; pass "
                f"what balanced_clusters returned, or None"
            )
    return _clusters(w_up, experts, iterations, initial)


@partial(jax.jit, static_argnames=("experts", "iterations"), inline=True)
def _clusters(
    w_up: Float[Array, "d_model d_hidden"],
    experts: int,
    iterations: int,
    initial: Int[Array, " d_hidden"] | None,
) -> tuple[Int[Array, " d_hidden"], Float[Array, "experts d_model"]]:
    """`balanced_clusters` of what it has checked."""
    w_up = w_up.astype(jnp.float32)
    norm = jnp.linalg.norm(w_up, axis=0, keepdims=True)
    usable = jnp.isfinite(norm) & (norm > 0)
    units = jnp.where(usable, w_up / jnp.where(usable, norm, 1.0), 0.0)

    if initial is None:
        initial = _place(_cosines(units, _spread_columns(units, experts)))
    assignment = initial.astype(jnp.int32)
    sums = _member_sums(units, assignment, experts)

    def unfinished(state):
        iteration, moved, *_ = state
        return moved & (iteration < iterations)

    def improve(state):
        iteration, _, assignment, sums, best_objective, best, best_sums = state
        placed = _place(_cosines(units, _unit_rows(sums)))
        moved = jnp.any(placed != assignment)
        sums = _member_sums(units, placed, experts)
        objective = _objective(sums)
        better = objective > best_objective
        return (
            iteration + 1,
            moved,
            placed,
            sums,
            jnp.where(better, objective, best_objective),
            jnp.where(better, placed, best),
            jnp.where(better, sums, best_sums),
        )

    start = (0, True, assignment, sums, _objective(sums), assignment, sums)
    *_, best, best_sums = lax.while_loop(unfinished, improve, start)
    return best, _unit_rows(best_sums)


def contiguous_order(
    assignment: Int[Array, " d_hidden"], experts: int
) -> Int[Array, " d_hidden"]:
    """The neurons cluster by cluster, in their old order inside a cluster.

    Permuting columns and rows alike leaves the FFN's function unchanged:
    `w_up[:, order]`, `w_down[order, :]`. Expert e then has the neurons from e F / E.

    Raises:
      ValueError: the number of neurons is not a multiple of `experts`.
    """
    if assignment.shape[0] % experts:
        raise ValueError(
            f"assignment has {assignment.shape[0]} neurons, not a multiple of "
            f"experts={experts}; use balanced_clusters"
        )
    return jnp.argsort(assignment, stable=True).astype(jnp.int32)


def nearest_centre(
    x: Float[Array, "tokens d_model"],
    centres: Float[Array, "experts d_model"],
    *,
    experts_per_token: int = 1,
) -> Int[Array, "tokens g"]:
    """The experts whose centres have the largest cosine with the token, best first.

    For unit centres the same as the smallest distance to the token made unit norm.
    float32 products; ties go to the lower expert. No gradient.

    Source: arXiv 2602.06183, as we read it; arXiv 2110.01786.
    """
    centres = centres.astype(jnp.float32)
    if x.dtype == jnp.bfloat16:
        # Three bfloat16 parts hold a float32, and products of two are exact: one pass
        # over x on tensor cores.
        parts = jnp.concatenate(_bfloat16_parts(centres))
        products = jnp.einsum("td,ed->te", x, parts, preferred_element_type=jnp.float32)
        large, middle, small = jnp.split(products, 3, axis=1)
        return best_experts(large + (middle + small), experts_per_token)
    cosines = jnp.einsum(
        "td,ed->te",
        x.astype(jnp.float32),
        centres,
        precision=lax.Precision.HIGHEST,
    )
    return best_experts(cosines, experts_per_token)


def _bfloat16_parts(x: jax.Array) -> list[jax.Array]:
    """Three that sum to x, large first."""
    parts = []
    for _ in range(3):
        # XLA must not take the rounding for the identity.
        part = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        parts.append(part.astype(jnp.bfloat16))
        x = x - part
    return parts


def token_hash(
    token_ids: Int[Array, " tokens"], experts: int, *, experts_per_token: int = 1
) -> Int[Array, "tokens g"]:
    """g distinct experts by a fixed hash of the token id.

    Each (token, expert) pair is mixed to 32 bits and the largest g win, so the first
    expert does not depend on g. The same on every backend and in every run.

    Source: hash routing, arXiv 2106.04426; the mixing is the finaliser of MurmurHash3,
      applied twice.
    """
    ids = _mix(token_ids.astype(jnp.uint32))[:, None]
    every_expert = jnp.arange(experts, dtype=jnp.uint32)[None, :]
    # 2^32 over the golden ratio spreads the small expert numbers over all bits.
    mixed = _mix(ids ^ ((every_expert + 1) * jnp.uint32(0x9E3779B9)))
    return best_experts((mixed >> 1).astype(jnp.int32), experts_per_token)


def true_mass(
    y_up: Float[Array, "tokens d_hidden"], experts: int, *, experts_per_token: int = 1
) -> Int[Array, "tokens g"]:
    """The experts with the largest squared mass of A = relu(y)^2, best first.

        mass_e = sum over the neurons f of expert e of relu(y_f)^4

    Summed in float32; ties go to the lower expert. No gradient.

    Args:
      y_up: pre-activations, clusters contiguous (`contiguous_order`).
      experts: E; F is a multiple of it.
      experts_per_token: g.
    Raises:
      ValueError: F is not a multiple of E.
    """
    d_hidden = y_up.shape[1]
    if d_hidden % experts:
        raise ValueError(
            f"d_hidden={d_hidden} is not a multiple of experts={experts}, required by "
            f"equal clusters; pad to {-(-d_hidden // experts) * experts}"
        )
    return best_experts(expert_mass(y_up, experts), experts_per_token)


def expert_mass(
    y_up: Float[Array, "tokens d_hidden"], experts: int
) -> Float[Array, "tokens experts"]:
    """The squared mass of `true_mass`, float32; `experts` divides d_hidden."""
    tokens, d_hidden = y_up.shape
    clusters = y_up.reshape(tokens, experts, d_hidden // experts).astype(jnp.float32)
    square = jnp.square(jnp.maximum(clusters, 0.0))
    return jnp.sum(square * square, axis=-1)


def best_experts(
    scores: Float[Array, "tokens experts"] | Int[Array, "tokens experts"],
    experts_per_token: int,
) -> Int[Array, "tokens g"]:
    """The experts of the g largest scores, best first; ties go to the lower expert.

    Raises:
      ValueError: g is not in [1, experts].
    """
    experts = scores.shape[-1]
    if not 1 <= experts_per_token <= experts:
        raise ValueError(
            f"experts_per_token={experts_per_token} is not in [1, {experts}], the "
            f"number of experts; choose fewer"
        )
    scores = lax.stop_gradient(scores)
    if experts_per_token == 1:  # on a GPU top_k sorts
        return jnp.argmax(scores, axis=-1, keepdims=True).astype(jnp.int32)
    _, best = lax.top_k(scores, experts_per_token)
    return best


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Dispatch:
    """Tokens sorted by expert, each expert's rows padded to whole tiles of v.

    R, the number of rows, is static: the most that any distribution of the tokens
    needs. Rows that no token needs are padding, at the end of each expert and after
    the last one.
    """

    row_token: Array
    """(R,) int32: the token of the row; 0 where padding."""
    row_valid: Array
    """(R,) bool: False where padding."""
    token_rows: Array
    """(tokens, g) int32: the row of the token's j-th choice; R where it has none."""
    group_sizes: Array
    """(experts,) int32: rows per expert without padding."""
    tile_expert: Array
    """(R / v,) int32: the expert of each tile; E - 1 after the last used tile."""
    v: int = field(metadata={"static": True})
    experts: int = field(metadata={"static": True})


def row_count(tokens: int, experts_per_token: int, experts: int, v: int) -> int:
    """R = max(v, T g + min(E, T g) (v - 1) rounded down to v), with the smaller of g
    and E for g: the rows that any distribution of the tokens fits in."""
    most = tokens * min(experts_per_token, experts)
    return max(v, (most + min(experts, most) * (v - 1)) // v * v)


@partial(jax.jit, static_argnames=("experts", "v"), inline=True)
def dispatch(
    expert_index: Int[Array, "tokens g"],
    experts: int,
    v: int,
    *,
    token_order: Int[Array, " tokens"] | None = None,
) -> Dispatch:
    """The rows of all tokens, sorted by expert.

    Inside an expert the rows follow `token_order`, then the choice j. Empty experts
    take no tile. Integer arithmetic only: the same on every backend.

    Args:
      expert_index: the g experts of each token. A choice outside [0, experts) gets no
        row (the experts of other devices), nor does one that repeats an earlier choice
        of its token.
      experts: E.
      v: rows per tile.
      token_order: a permutation of the tokens; None: 0, 1, ...
    Returns:
      the dispatch, with R = `row_count`.
    """
    tokens, choices = expert_index.shape
    entries = tokens * choices
    rows = row_count(tokens, choices, experts, v)
    ordered = token_order is not None
    if token_order is None:
        token_order = jnp.arange(tokens)
    token_order = token_order.astype(jnp.int32)

    expert_index = _first_choices(expert_index.astype(jnp.int32))
    expert = expert_index[token_order].reshape(-1)
    # (E, T g): whether an entry is of the expert
    mine = expert[None, :] == jnp.arange(experts, dtype=jnp.int32)[:, None]
    group_sizes = jnp.sum(mine, axis=1, dtype=jnp.int32)
    tiles = (group_sizes + v - 1) // v
    tile_ends = jnp.cumsum(tiles, dtype=jnp.int32)
    starts = (tile_ends - tiles) * v
    row = jnp.sum(
        jnp.where(mine, starts[:, None] + sums_before(mine), 0), axis=0, dtype=jnp.int32
    )
    here = (expert >= 0) & (expert < experts)
    # Each entry without a row writes out of bounds at a place of its own.
    place = jnp.where(here, row, rows + jnp.arange(entries, dtype=jnp.int32))
    token = jnp.full(rows, -1, jnp.int32)
    token = token.at[place].set(
        jnp.repeat(token_order, choices), mode="drop", unique_indices=True
    )
    token_rows = jnp.where(here, row, rows).reshape(tokens, choices)
    if ordered:
        token_rows = token_rows.at[token_order].set(token_rows, unique_indices=True)
    tile = jnp.arange(rows // v, dtype=jnp.int32)
    tile_expert = jnp.sum(tile[:, None] >= tile_ends[None, :], axis=1, dtype=jnp.int32)
    return Dispatch(
        row_token=jnp.maximum(token, 0),
        row_valid=token >= 0,
        token_rows=token_rows,
        group_sizes=group_sizes,
        tile_expert=jnp.minimum(tile_expert, experts - 1),
        v=v,
        experts=experts,
    )


def _first_choices(expert_index: Int[Array, "tokens g"]) -> Int[Array, "tokens g"]:
    """-1, no expert, where an earlier choice of the token is the same."""
    choices = expert_index.shape[1]
    same = expert_index[:, :, None] == expert_index[:, None, :]
    repeats = jnp.any(same & np.tri(choices, k=-1, dtype=bool)[None], axis=2)
    return jnp.where(repeats, -1, expert_index)


@jax.custom_vjp
def gather_rows(
    x: Float[Array, "tokens d"], dispatch: Dispatch
) -> Float[Array, "rows d"]:
    """The token of every row; zeros in padding rows. Transpose: `combine_rows`."""
    rows = x[dispatch.row_token]
    return jnp.where(dispatch.row_valid[:, None], rows, jnp.zeros((), x.dtype))


@jax.custom_vjp
def combine_rows(
    y: Float[Array, "rows d"], dispatch: Dispatch
) -> Float[Array, "tokens d"]:
    """For every token the sum of its g rows, in float32, in the order of its choices.

    Padding rows are not read; a choice without a row adds nothing. Transpose:
    `gather_rows`. Returns y.dtype.
    """
    total = jnp.zeros((), jnp.promote_types(y.dtype, jnp.float32))
    for choice in range(dispatch.token_rows.shape[1]):
        row = dispatch.token_rows[:, choice]
        own = y.at[row].get(mode="fill", fill_value=0)
        total = total + own.astype(total.dtype)
    return total.astype(y.dtype)


# Each is the other's transpose. Written out because autodiff would turn the gather
# into a scatter-add of floats: slower, and in an order that may change between runs.
gather_rows.defvjp(
    lambda x, dispatch: (gather_rows(x, dispatch), dispatch),
    lambda dispatch, dout: (combine_rows(dout, dispatch), None),
)
combine_rows.defvjp(
    lambda y, dispatch: (combine_rows(y, dispatch), dispatch),
    lambda dispatch, dout: (gather_rows(dout, dispatch), None),
)


def token_of_row(dispatch: Dispatch) -> Int[Array, " rows"]:
    """The token of every row, -1 where padding."""
    return jnp.where(dispatch.row_valid, dispatch.row_token, -1)


def expert_of_row(dispatch: Dispatch) -> Int[Array, " rows"]:
    """The expert of every row, padding included."""
    return jnp.repeat(dispatch.tile_expert, dispatch.v)


def _mix(x):
    """The 32-bit finaliser of MurmurHash3: every input bit reaches every output bit."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _cosines(units, centres):
    """(F, E) from unit columns (d, F) and centres (E, d)."""
    return jnp.einsum("df,ed->fe", units, centres, precision=lax.Precision.HIGHEST)


def _member_sums(units, assignment, experts: int):
    """(E, d): the sum of each cluster's unit columns."""
    members = jax.nn.one_hot(assignment, experts, dtype=units.dtype)
    return jnp.einsum("df,fe->ed", units, members, precision=lax.Precision.HIGHEST)


def _objective(sums):
    # The cosines of the members with their own centre add up to the norm of their sum.
    return jnp.sum(jnp.linalg.norm(sums, axis=1))


def _unit_rows(sums):
    norm = jnp.linalg.norm(sums, axis=1, keepdims=True)
    return sums / jnp.where(norm == 0, 1.0, norm)


def _spread_columns(units, experts: int):
    """(E, d): columns far from each other, starting far from the mean."""
    mean = jnp.mean(units, axis=1)
    likeness = jnp.einsum("df,d->f", units, mean, precision=lax.Precision.HIGHEST)
    zero = jnp.all(units == 0, axis=0)
    chosen = []
    for _ in range(experts):
        column = units[:, jnp.argmin(jnp.where(zero, jnp.inf, likeness))]
        cosine = jnp.einsum("df,d->f", units, column, precision=lax.Precision.HIGHEST)
        likeness = jnp.maximum(likeness, cosine) if chosen else cosine
        chosen.append(column)
    return jnp.stack(chosen)


def _place(cosines):
    """(F,) int32: a balanced assignment by deferred acceptance."""
    d_hidden, experts = cosines.shape
    capacity = d_hidden // experts
    preference = jnp.argsort(-cosines, axis=1, stable=True).astype(jnp.int32)
    every_expert = jnp.arange(experts)

    def unplaced(state):
        return jnp.any(state[0] < 0)

    def propose(state):
        held_by, tried = state
        # The experts together have room for all, so nobody runs out of experts.
        next_choice = jnp.take_along_axis(preference, tried[:, None], axis=1)[:, 0]
        asked = jnp.where(held_by < 0, next_choice, held_by)
        candidate = asked[:, None] == every_expert[None, :]
        order = jnp.argsort(
            jnp.where(candidate, -cosines, jnp.inf), axis=0, stable=True
        )
        kept = jnp.zeros((d_hidden, experts), bool)
        kept = kept.at[order[:capacity], every_expert[None, :]].set(True)
        accepted = jnp.any(kept & candidate, axis=1)
        return jnp.where(accepted, asked, -1), tried + ~accepted

    start = (jnp.full(d_hidden, -1, jnp.int32), jnp.zeros(d_hidden, jnp.int32))
    held_by, _ = lax.while_loop(unplaced, propose, start)
    return held_by
