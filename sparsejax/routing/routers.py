"""The routers: how a token chooses g of the E experts, one frozen value per way.

A router scores all experts for every token, and the g largest scores win. What it reads
decides when it can be asked: the token X and the token's id are known before GEMM 1,
the pre-activations Y1 only after it. No gradient passes through a choice. `ROUTERS` is
where a router is registered, so that settings can name it.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

Reads = Literal["x", "token_ids", "y_up"]
"""The array that a router reads: "x", the tokens X (tokens, d_model); "token_ids",
their ids (tokens,); or "y_up", the pre-activations Y1 (tokens, d_hidden) with the
clusters of neurons contiguous."""

State = Mapping[str, Array]
"""The arrays that a router keeps, by name. They are not trained; checkpoints hold
them."""

NO_STATE: State = {}


class Router(ABC):
    """A way for a token to choose its experts.

    A subclass is a frozen dataclass, because a router is a part of `FFNSparsity`, which
    is compared and hashed. It says its `name`, what it `reads` and how it scores the
    experts; a router that keeps arrays also says how they begin and what a clustering
    of the neurons makes of them. One that reads Y1 is asked inside the FFN, on a mesh
    by every device for its own experts, and keeps no arrays.
    """

    name: ClassVar[str]
    """The name of the router in settings, records and the printed plan."""
    reads: ClassVar[Reads]
    clusters: ClassVar[bool] = True
    """Whether like neurons are brought together into the experts before it is asked. A
    choice that is to be random needs them as they were initialised."""

    @abstractmethod
    def scores(self, read: Array, experts: int, state: State) -> Array:
        """Returns the scores (tokens, experts) of all experts, integers or floats.

        Args:
          read: the array that `reads` names.
          experts: E, or the experts of this device where `read` is its part of Y1.
          state: the arrays that the router keeps, those of one layer.
        """

    def initial_state(
        self, w_up: Float[Array, "d_model d_hidden"], experts: int
    ) -> State:
        """Returns the arrays that the router keeps, before any clustering: none, unless
        a subclass says otherwise.

        Args:
          w_up: W1 of one layer; expert e has the columns from e d_hidden / experts.
        """
        del w_up, experts
        return NO_STATE

    def clustered_state(
        self,
        w_up: Float[Array, "d_model d_hidden"],
        centres: Float[Array, "experts d_model"],
    ) -> State:
        """Returns the arrays that the router keeps, after a clustering: those that it
        would begin with, unless a subclass says otherwise.

        Args:
          w_up: W1 of one layer, its columns in the order of the clusters.
          centres: the unit centres of `clusters.balanced_clusters`.
        """
        return self.initial_state(w_up, centres.shape[0])

    @property
    def before_up(self) -> bool:
        """Whether the router can be asked before GEMM 1, as `skip_blocks` needs."""
        return self.reads != "y_up"

    @property
    def has_state(self) -> bool:
        """Whether the router keeps any arrays."""
        return _has_state(self)

    def choose(
        self,
        read: Array,
        *,
        experts: int,
        experts_per_token: int = 1,
        state: State = NO_STATE,
    ) -> Int[Array, "tokens experts_per_token"]:
        """Returns the experts of the largest scores, best first, without a gradient.

        Raises:
          ValueError: `experts_per_token` is not in [1, experts].
        """
        scores = self.scores(lax.stop_gradient(read), experts, state)
        return best_experts(scores, experts_per_token)


@cache
def _has_state(router: Router) -> bool:
    one_neuron = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    return bool(jax.eval_shape(lambda w_up: router.initial_state(w_up, 1), one_neuron))


@dataclass(frozen=True)
class NearestCentre(Router):
    """The router by which a token chooses the experts whose centres have the largest
    cosine with it.

    For unit centres these are the centres at the smallest distance from the token made
    unit norm. The products are those of float32, whatever the dtype of the token.

    Source: arXiv 2602.06183, as we read it; arXiv 2110.01786.
    """

    name = "nearest_centre"
    reads = "x"

    def initial_state(
        self, w_up: Float[Array, "d_model d_hidden"], experts: int
    ) -> State:
        """Returns the mean directions of `experts` equal blocks of columns, made unit
        norm: a valid router, if a poor one."""
        tiny = jnp.finfo(jnp.float32).tiny
        w_up = w_up.astype(jnp.float32)
        norm = jnp.linalg.norm(w_up, axis=0, keepdims=True)
        unit = w_up / jnp.maximum(norm, tiny)
        blocks = unit.reshape(unit.shape[0], experts, unit.shape[1] // experts)
        centres = jnp.swapaxes(blocks.mean(axis=-1), -1, -2)
        norm = jnp.linalg.norm(centres, axis=-1, keepdims=True)
        return {"centres": centres / jnp.maximum(norm, tiny)}

    def clustered_state(
        self,
        w_up: Float[Array, "d_model d_hidden"],
        centres: Float[Array, "experts d_model"],
    ) -> State:
        """Returns the centres of the clusters, as `{"centres": (experts, d_model)}`."""
        del w_up
        return {"centres": centres}

    def scores(
        self, read: Float[Array, "tokens d_model"], experts: int, state: State
    ) -> Float[Array, "tokens experts"]:
        """Returns <x, c_e>, float32: the cosine times the norm of the token."""
        del experts
        centres = state["centres"].astype(jnp.float32)
        if read.dtype == jnp.bfloat16:
            # Three bfloat16 parts hold a float32, and products of two are exact: one
            # pass over x on tensor cores.
            parts = jnp.concatenate(_bfloat16_parts(centres))
            products = jnp.einsum(
                "td,ed->te", read, parts, preferred_element_type=jnp.float32
            )
            large, middle, small = jnp.split(products, 3, axis=1)
            return large + (middle + small)
        return jnp.einsum(
            "td,ed->te",
            read.astype(jnp.float32),
            centres,
            precision=lax.Precision.HIGHEST,
        )


@dataclass(frozen=True)
class TokenHash(Router):
    """The router by which a token chooses its experts by a fixed hash of its id.

    Each (token, expert) pair is mixed to 32 bits and the largest g win, so that the
    first expert does not depend on g. The choice is the same on every backend and in
    every run.

    Source: hash routing is that of arXiv 2106.04426; the mixing is the finaliser of
      MurmurHash3, applied twice.
    """

    name = "token_hash"
    reads = "token_ids"

    def scores(
        self, read: Int[Array, " tokens"], experts: int, state: State
    ) -> Int[Array, "tokens experts"]:
        """Returns 31 bits of the hash of each (token, expert) pair, int32."""
        del state
        ids = _mix(read.astype(jnp.uint32))[:, None]
        every_expert = jnp.arange(experts, dtype=jnp.uint32)[None, :]
        # 2^32 over the golden ratio spreads the small expert numbers over all bits.
        mixed = _mix(ids ^ ((every_expert + 1) * jnp.uint32(0x9E3779B9)))
        return (mixed >> 1).astype(jnp.int32)


@dataclass(frozen=True)
class SameExperts(Router):
    """Every token chooses the first g experts, and neurons are never clustered.

    Neurons begin alike, so that the first g F / E of them are a random share of all. It
    is a control: whatever a router that looks at the token gains over this one is due
    to the choice, and not to the patterns, the backward or the fewer neurons, which are
    the same. The other neurons get no gradient where `weight_gradients` is
    "expert_columns"; the optimiser's weight decay and what its moments still hold from
    a dense phase before move them all the same. A model that grows from F / 4 neurons
    differs from a quarter by this router in what its other neurons are when they join:
    new and with zero rows of W2 there, initial or from a dense warm-up here.
    """

    name = "same_experts"
    reads = "x"
    clusters = False

    def scores(
        self, read: Float[Array, "tokens d_model"], experts: int, state: State
    ) -> Int[Array, "tokens experts"]:
        """Returns E - 1, E - 2, ..., 0 for every token."""
        del state
        descending = jnp.arange(experts - 1, -1, -1, dtype=jnp.int32)
        return jnp.broadcast_to(descending, (read.shape[0], experts))


@dataclass(frozen=True)
class ActivationEnergy(Router):
    """The router by which a token chooses the experts whose neurons carry the most of
    its activation.

    The energy of expert e is the squared mass of A = relu(y)^2 in its neurons,

        energy_e = sum over the neurons f of expert e of relu(y_f)^4

    and the g experts with the largest ones are the best that any router can choose. All
    neurons have to be computed for it, so GEMM 1 can skip none.
    """

    name = "activation_energy"
    reads = "y_up"

    def scores(
        self, read: Float[Array, "tokens d_hidden"], experts: int, state: State
    ) -> Float[Array, "tokens experts"]:
        """Returns the energy of each expert, summed in float32.

        Raises:
          ValueError: d_hidden is not a multiple of `experts`.
        """
        del state
        tokens, d_hidden = read.shape
        if d_hidden % experts:
            raise ValueError(
                f"d_hidden={d_hidden} is not a multiple of experts={experts}, required "
                f"by equal clusters; pad to {-(-d_hidden // experts) * experts}"
            )
        clusters = read.reshape(tokens, experts, d_hidden // experts)
        square = jnp.square(jnp.maximum(clusters.astype(jnp.float32), 0.0))
        return jnp.sum(square * square, axis=-1)


NEAREST_CENTRE = NearestCentre()

ROUTERS: tuple[Router, ...] = (
    NEAREST_CENTRE,
    TokenHash(),
    ActivationEnergy(),
    SameExperts(),
)
"""Every router that settings can name; a new one is registered here and nowhere
else."""

FORMER_NAMES = {"true_mass": "activation_energy"}
"""The names of routers in settings of earlier versions, which are still read, and the
present name of each."""


def named_router(name: Any) -> Router:
    """Returns the registered router of a name, which may be a former one.

    Raises:
      ValueError: there is no router of that name; the message lists all names.
    """
    routers = {router.name: router for router in ROUTERS}
    if isinstance(name, str):
        name = FORMER_NAMES.get(name, name)
        if name in routers:
            return routers[name]
    raise ValueError(f"router={name!r} must be one of {', '.join(map(repr, routers))}")


def name_of(router: Router) -> str:
    """Returns the name under which settings find this router again.

    Raises:
      ValueError: the router is not registered, or another one has its name.
    """
    if router not in ROUTERS:
        raise ValueError(
            f"{router} cannot be written into settings, which know routers by name; "
            f"register it in sparsejax.routing.routers.ROUTERS"
        )
    return router.name


def best_experts(
    scores: Float[Array, "tokens experts"] | Int[Array, "tokens experts"],
    experts_per_token: int,
) -> Int[Array, "tokens g"]:
    """Returns the experts of the g largest scores, best first; ties go to the lower
    expert.

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


def _bfloat16_parts(x: jax.Array) -> list[jax.Array]:
    """Returns three bfloat16 arrays that sum to x, the largest first."""
    parts = []
    for _ in range(3):
        # XLA must not take the rounding for the identity.
        part = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        parts.append(part.astype(jnp.bfloat16))
        x = x - part
    return parts


def _mix(x):
    """Returns each number mixed by MurmurHash3's 32-bit finaliser, by which every input
    bit reaches every output bit."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
