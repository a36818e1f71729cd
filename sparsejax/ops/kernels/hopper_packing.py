"""The part of Hopper's kernels that prunes and packs 2:4 operands."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.device import Device
from pallas_kernels.sm90 import activations, prune_weight
from pallas_kernels.sm90 import over_tokens as over_tokens_kernels
from sparsejax.ops.kernels.base import (
    ExpertRows,
    KeptActivations,
    KeptGatedActivations,
    OverTokens,
    ResidualRows,
)
from sparsejax.ops.kernels.hopper_lookups import (
    experts_of,
    looking_up,
    lookups,
    one_by_one,
    over_tokens,
    slots,
)
from sparsejax.sparsity.packed import WGMMA_ORDER, Packed


@dataclass(frozen=True)
class HopperPacking:
    """The methods of `base.KernelSet` that make packed operands, for a GPU of compute
    capability 9.0."""

    device: Device

    layout = WGMMA_ORDER

    def why_not_packed(
        self, rows: int, k: int, dtype: str, out_dtype: jnp.dtype
    ) -> str | None:
        return prune_weight.why_unsupported(rows, k, dtype, str(jnp.dtype(out_dtype)))

    def pack_weight(
        self,
        w: Float[Array, "matrices _ _"],
        scales: Float[Array, " matrices"],
        *,
        axis: int,
        dtype: jnp.dtype,
    ) -> Packed:
        run = one_by_one(prune_weight.prune_weight, k_major=axis == -1, dtype=dtype)
        return self._packed(*run(w, scales))

    def keep_features(
        self, y_up: Float[Array, "_ _"], rows: ExpertRows | None, *, by_token: bool
    ) -> KeptActivations:
        run = one_by_one(
            looking_up,
            kernel=activations.keep_features,
            experts=experts_of(rows),
        )
        found = lookups(rows, by_token=True) if by_token else ()
        values, metadata, counts = run(found, y_up)
        return KeptActivations(self._packed(values, metadata), counts)

    def activation_gradient(
        self,
        da: Float[Array, "_ _"],
        a: Packed,
        rows: ExpertRows | None,
        *,
        by_token: bool,
    ) -> Packed:
        self._check(a)
        run = one_by_one(
            looking_up, kernel=activations.backward, experts=experts_of(rows)
        )
        found = lookups(rows, by_token=True) if by_token else ()
        return self._packed(run(found, da, a.values, a.metadata), a.metadata)

    def keep_gated_features(
        self, gate: Float[Array, "tokens features"], up: Float[Array, "tokens features"]
    ) -> KeptGatedActivations:
        run = one_by_one(activations.keep_gated_features)
        values, metadata, counts, hidden, kept_up = run(gate, up)
        a, hidden, kept = (self._packed(v, metadata) for v in (values, hidden, kept_up))
        return KeptGatedActivations(a, hidden, kept, counts)

    def gated_gradients(
        self, da: Float[Array, "tokens features"], hidden: Packed, up: Packed
    ) -> tuple[Packed, Packed]:
        self._check(hidden, up)
        run = one_by_one(activations.gated_backward)
        gradients = run(da, hidden.values, up.values, hidden.metadata)
        dgate, dup = (self._packed(values, hidden.metadata) for values in gradients)
        return dgate, dup

    def over_tokens(
        self,
        a: Packed,
        dy_up: Packed,
        rows: ExpertRows | None,
        residual: ResidualRows | None,
        *,
        by_segments: bool,
    ) -> OverTokens:
        self._check(a, dy_up)
        run = _over_tokens(
            over_tokens_kernels.keep_tokens_of_both, rows, residual, by_segments
        )
        operands = a.values, dy_up.values, dy_up.metadata
        found = run(lookups(rows, by_token=False), slots(residual), *operands)
        return self._over_tokens(found)

    def activation_gradient_over_tokens(
        self,
        da: Float[Array, "_ _"],
        a: Packed,
        rows: ExpertRows | None,
        residual: ResidualRows | None,
        *,
        by_token: bool,
        by_segments: bool,
    ) -> tuple[Packed, OverTokens]:
        self._check(a)
        run = _over_tokens(over_tokens_kernels.backward, rows, residual, by_segments)
        operands = da, a.values, a.metadata
        dy_up, *found = run(
            lookups(rows, by_token=by_token), slots(residual), *operands
        )
        return self._packed(dy_up, a.metadata), self._over_tokens(found)

    def gated_gradients_over_tokens(
        self,
        da: Float[Array, "tokens features"],
        hidden: Packed,
        up: Packed,
        residual: ResidualRows | None,
        *,
        by_segments: bool,
    ) -> tuple[tuple[Packed, Packed], OverTokens]:
        self._check(hidden, up)
        run = _over_tokens(
            over_tokens_kernels.gated_backward, None, residual, by_segments
        )
        operands = da, hidden.values, up.values, hidden.metadata
        dgate, dup, *found = run((), slots(residual), *operands)
        dgate, dup = (self._packed(v, hidden.metadata) for v in (dgate, dup))
        return (dgate, dup), self._over_tokens(found)

    def keep_tokens(
        self, x: Packed, residual: ResidualRows | None, *, by_segments: bool
    ) -> Packed:
        self._check(x)
        run = _over_tokens(over_tokens_kernels.keep_tokens, None, residual, by_segments)
        return self._packed(*run((), slots(residual), x.values, x.metadata))

    def _over_tokens(self, found: Any) -> OverTokens:
        a, *gradients = (self._packed(*matrix) for matrix in found)
        return OverTokens(a, tuple(gradients))

    # What it has packed.

    def _packed(self, values: jax.Array, metadata: jax.Array) -> Packed:
        return Packed(values, metadata, self.layout)

    def _check(self, *operands: Packed) -> None:
        """Raises ValueError where an operand was packed in another order than
        Hopper's."""
        for operand in operands:
            if operand.layout != self.layout:
                raise ValueError(
                    f"an operand packed in the order {operand.layout.name!r} cannot be "
                    f"read by Hopper's kernels, which read {self.layout.name!r}; pack "
                    f"it for the "
                    f"device that multiplies it"
                )


def _over_tokens(
    kernel: Callable[..., Any],
    rows: ExpertRows | None,
    residual: ResidualRows | None,
    by_segments: bool,
) -> Callable[..., Any]:
    return one_by_one(
        over_tokens,
        kernel=kernel,
        experts=experts_of(rows),
        residual_rows=0 if residual is None else residual.rows,
        by_segments=by_segments,
    )
