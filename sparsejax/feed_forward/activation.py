"""The activations of an FFN: A from the products with X, and the gradients before it.

relu2    A = relu(Y1)^2         dY1 = dA * 2 relu(Y1)
swiglu   A = silu(G) * U        dG = dA * U * silu'(G)     dU = dA * silu(G)
reglu2   A = relu(G)^2 * U      dG = dA * U * 2 relu(G)    dU = dA * relu(G)^2
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import jax
import jax.numpy as jnp

ActivationName = Literal["relu2", "swiglu", "reglu2"]
GatedActivation = Literal["swiglu", "reglu2"]

type Hidden = tuple[jax.Array, ...]
"""One array (tokens, d_hidden) for each weight into the hidden layer: (Y1,), or (G, U)
of a gated FFN, G being the gate."""


class Activation(Protocol):
    """The function between the GEMMs into the hidden layer and the one out of it.

    Its operands are the products of X with the weights, each (tokens, d_hidden): Y1, or
    the gate G and U of a gated FFN. What `keep` returns is all that A and the backward
    need of them.
    """

    name: ClassVar[ActivationName]
    gated: ClassVar[bool]
    """Whether the activation takes a gate G besides U."""

    def keep(self, products: Hidden) -> Hidden:
        """Returns what the backward needs of the products. Where its first array is
        zero, A and all gradients before the activation are zero."""
        ...

    def scores(self, products: Hidden) -> jax.Array:
        """Returns scores (tokens, d_hidden) in the order of the magnitudes of A, by
        which a pattern chooses the entries that it keeps."""
        ...

    def read_by_routers(self, products: Hidden) -> jax.Array:
        """Returns the array (tokens, d_hidden) that stands for Y1 where a router reads
        it. The fourth power of its positive part is A^2, the mass of A."""
        ...

    def apply(self, kept: Hidden) -> jax.Array:
        """Returns A (tokens, d_hidden), from what `keep` returned."""
        ...

    def with_gradients(self, da: jax.Array, kept: Hidden) -> tuple[jax.Array, Hidden]:
        """Returns A, and the gradients of the products in the order of the products,
        from dA and what `keep` returned."""
        ...


@dataclass(frozen=True)
class SquaredReLU:
    """The activation A = relu(Y1)^2 of a plain FFN; see `Activation`."""

    name: ClassVar[ActivationName] = "relu2"
    gated: ClassVar[bool] = False

    def keep(self, products: Hidden) -> Hidden:
        (y_up,) = products
        return (jax.nn.relu(y_up),)

    def scores(self, products: Hidden) -> jax.Array:
        # The signed value of Y1 orders relu(Y1)^2 as well, zeros included.
        (y_up,) = products
        return y_up

    def read_by_routers(self, products: Hidden) -> jax.Array:
        (y_up,) = products
        return y_up

    def apply(self, kept: Hidden) -> jax.Array:
        (hidden,) = kept
        return hidden * hidden

    def with_gradients(self, da: jax.Array, kept: Hidden) -> tuple[jax.Array, Hidden]:
        (hidden,) = kept
        return hidden * hidden, (da * 2 * hidden,)


class _Gated:
    """An activation A = s(G) * U; a subclass gives s as its `_of_gate`."""

    gated: ClassVar[bool] = True

    def _of_gate(self, gate: jax.Array) -> jax.Array:
        raise NotImplementedError

    def keep(self, products: Hidden) -> Hidden:
        return products

    def scores(self, products: Hidden) -> jax.Array:
        return jnp.abs(self.apply(products))

    def read_by_routers(self, products: Hidden) -> jax.Array:
        return jnp.sqrt(self.scores(products))

    def apply(self, kept: Hidden) -> jax.Array:
        gate, up = kept
        return self._of_gate(gate) * up

    def with_gradients(self, da: jax.Array, kept: Hidden) -> tuple[jax.Array, Hidden]:
        a, pull_back = jax.vjp(self.apply, kept)
        return a, pull_back(da)[0]


@dataclass(frozen=True)
class SwiGLU(_Gated):
    """The activation A = silu(G) * U. It leaves no zeros, so that A cannot be 2:4, but
    it can be dense inside a token's experts; see `Activation`.

    Source: arXiv 2002.05202.
    """

    name: ClassVar[ActivationName] = "swiglu"

    def _of_gate(self, gate: jax.Array) -> jax.Array:
        return jax.nn.silu(gate)


@dataclass(frozen=True)
class SquaredReGLU(_Gated):
    """The activation A = relu(G)^2 * U; see `Activation`."""

    name: ClassVar[ActivationName] = "reglu2"

    def _of_gate(self, gate: jax.Array) -> jax.Array:
        hidden = jax.nn.relu(gate)
        return hidden * hidden


ACTIVATIONS: dict[ActivationName, Activation] = {
    of.name: of for of in (SquaredReLU(), SwiGLU(), SquaredReGLU())
}
"""All activations of an FFN by name; a new one is registered here."""
