"""The routers: how a token chooses g of the E experts, one frozen value per way.

A router scores all experts for every token, and the g largest scores win. What it reads
decides when it can be asked: the token X, the token's id and an estimate of the
pre-activations Y1 are known before GEMM 1, Y1 only after it. No gradient passes through
a choice. A router is registered in `named_routers`, so that settings can name it.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from sparsejax.routing.best_experts import best_experts
from sparsejax.routing.regression import linear_scores

Reads = Literal["x", "token_ids", "y_up", "y_up_fp8"]
"""The array that a router reads: "x", the tokens X (tokens, d_model); "token_ids",
their ids (tokens,); "y_up", the pre-activations Y1 (tokens, d_hidden) with the clusters
of neurons contiguous; or "y_up_fp8", those of X and W1 rounded to 8-bit floats. A gated
FFN has two pre-activations, and in place of Y1 stands sqrt(|A|), whose fourth power is
the squared mass of A, as relu(Y1)'s is."""

State = Mapping[str, Array]
"""The arrays that a router keeps, by name. They are not trained; checkpoints hold
them."""

NO_STATE: State = {}


class Router(ABC):
    """A way for a token to choose its experts.

    A subclass is a frozen dataclass, because a router is a part of `FFNSparsity`, which
    is compared and hashed. It says its `name`, what it `reads` and how it scores the
    experts; a router that keeps arrays also says how they begin and what a clustering
    of the neurons makes of them. One that reads Y1, rounded or not, is asked inside the
    FFN, on a mesh by every device for its own experts, and keeps no arrays.
    """

    name: ClassVar[str]
    """The name of the router in settings, records and the printed plan."""
    reads: ClassVar[Reads]
    scores_are_energies: ClassVar[bool] = False
    """Whether `energy_shares` can say the experts' shares of a token's energy."""
    learns: ClassVar[bool] = False
    """Whether training steps move what it keeps: `learned_state`."""
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
          w_up: W1 of one layer, or Wg where the FFN is gated; expert e has the columns
            from e d_hidden / experts.
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
          w_up: W1 of one layer, or Wg where the FFN is gated, its columns in the order
            of the clusters.
          centres: the unit centres of `clusters.balanced_clusters`.
        """
        return self.initial_state(w_up, centres.shape[0])

    def learned_state(
        self,
        state: State,
        x: Float[Array, "tokens d_model"],
        energies: Float[Array, "tokens experts"],
        share: float,
    ) -> State:
        """Returns the arrays that the router keeps after it has seen some tokens, a
        `share` of an optimiser step, and the true energies of the experts for them:
        those it had, under the same names and of the same shapes and dtypes, unless it
        `learns`."""
        del x, energies, share
        return state

    def learn(
        self,
        state: State,
        x: Float[Array, "tokens d_model"],
        energies: Float[Array, "tokens experts"],
        share: float,
    ) -> State:
        """Returns what `learned_state` returns, once it is checked. Training calls this
        method; a router of its own overrides the other one.

        Raises:
          ValueError: `learned_state` returned other arrays than it was given.
        """
        learned = self.learned_state(state, x, energies, share)
        given, got = (
            {name: jax.typeof(array).str_short() for name, array in arrays.items()}
            for arrays in (state, learned)
        )
        if got != given:
            raise ValueError(
                f"learned_state of router={self.name!r} must return the arrays that it "
                f"was given, {given}, and not {got}"
            )
        return learned

    @property
    def before_up(self) -> bool:
        """Whether the router can be asked before GEMM 1, as `skip_blocks` needs."""
        return self.reads != "y_up"

    @property
    def inside(self) -> bool:
        """Whether the FFN asks the router itself, for it reads pre-activations. Else
        the FFN is given the experts of each token."""
        return self.reads in ("y_up", "y_up_fp8")

    @property
    def chooses_different(self) -> bool:
        """Whether the experts that a token chooses are different ones, as those of
        `choose` are; a subclass with another `choose` or `of_scores` may name one
        twice."""
        own = type(self)
        return own.choose is Router.choose and own.of_scores is Router.of_scores

    @property
    def has_state(self) -> bool:
        """Whether the router keeps any arrays."""
        return _has_state(self)

    def energy_shares(
        self, scores: Float[Array, "tokens experts"]
    ) -> Float[Array, "tokens experts"]:
        """Returns the share of each expert in the energy of a token, by its scores.
        Raises NotImplementedError where they do not say it (`scores_are_energies`)."""
        raise NotImplementedError(
            f"router={self.name!r} does not score experts by their energy"
        )

    def choose(
        self,
        read: Array,
        *,
        experts: int,
        experts_per_token: int = 1,
        state: State = NO_STATE,
        threshold: Float[Array, ""] | None = None,
    ) -> Int[Array, "tokens experts_per_token"]:
        """Returns the experts of the largest scores, best first, without a gradient.
        With a threshold it is `of_scores`.

        Raises:
          ValueError: `experts_per_token` is not in [1, experts].
        """
        scores = self.scores(lax.stop_gradient(read), experts, state)
        return self.of_scores(scores, experts_per_token, threshold)

    def of_scores(
        self,
        scores: Float[Array, "tokens experts"] | Int[Array, "tokens experts"],
        most: int,
        threshold: Float[Array, ""] | None = None,
    ) -> Int[Array, "tokens most"]:
        """Returns the experts of the `most` largest scores, best first. With a
        threshold those whose share of the token's energy is not above it are left out,
        but for the best one: -1 stands in their place."""
        best = best_experts(scores, most)
        if threshold is None:
            return best
        shares = self.energy_shares(lax.stop_gradient(scores))
        above = jnp.take_along_axis(shares, best, axis=-1) > threshold
        return jnp.where(above.at[:, 0].set(True), best, -1)


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
        return linear_scores(read, state["centres"])


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
    scores_are_energies = True

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

    def energy_shares(
        self, scores: Float[Array, "tokens experts"]
    ) -> Float[Array, "tokens experts"]:
        """Returns energy_e over the sum of all energies; zeros where that is zero."""
        tiny = jnp.finfo(jnp.float32).tiny
        return scores / jnp.maximum(jnp.sum(scores, axis=-1, keepdims=True), tiny)


@dataclass(frozen=True)
class ActivationEnergyFP8(ActivationEnergy):
    """The router that chooses as `ActivationEnergy`, by energies that are estimated
    before GEMM 1: from a product of X and W1 that were rounded to 8-bit floats.

        energy_e = sum over the neurons f of expert e of relu((q(X) q(W1))_f)^4

    q rounds to float8_e4m3fn, X with a scale for each token and W1 with one
    (`ops.fp8_matmul.rounded_product`). Tensor cores multiply such operands in half of
    the time, and with `skip_blocks` GEMM 1 then computes the chosen experts' neurons
    alone, in the compute dtype. Nothing but the choice rests on rounded numbers.
    """

    name = "activation_energy_fp8"
    reads = "y_up_fp8"


NEAREST_CENTRE = NearestCentre()


def check_token_ids(token_ids: Array, shape: tuple[int, ...]) -> None:
    """Raises ValueError where ids are no integers, or not one for each token of a batch
    of this shape."""
    if token_ids.shape != shape or not jnp.issubdtype(token_ids.dtype, jnp.integer):
        raise ValueError(
            f"token_ids of shape {token_ids.shape} and dtype {token_ids.dtype} must be "
            f"integers of shape {shape}, one for each token of x"
        )


def _mix(x):
    """Returns each number mixed by MurmurHash3's 32-bit finaliser, by which every input
    bit reaches every output bit."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
