"""The router that learns how much of a token's energy each expert has."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from sparsejax.routing.regression import (
    regression_at,
    regression_scores,
    regression_step,
)
from sparsejax.routing.routers import NEAREST_CENTRE, Router, State


@dataclass(frozen=True)
class LearnedEnergy(Router):
    """The router by which a token chooses the experts that a regression expects the
    most of its energy in.

    The regression is `regression.regression_scores`: linear in the token and in
    d_model / 4 learned features of it, each the square of a relu, as neurons are. It
    begins at the centres of `NearestCentre` and at some of the neurons. At every
    training step its coefficients take one step of Adam on the cross entropy of

        softmax over the experts of s_e  to  energy_e / sum of all energies

    for the sample of the tokens whose neurons are all computed. It is known before
    GEMM 1, so that `skip_blocks` can use it. A new clustering makes it begin anew.
    """

    name = "learned"
    reads = "x"
    scores_are_energies = True
    learns = True

    def initial_state(
        self, w_up: Float[Array, "d_model d_hidden"], experts: int
    ) -> State:
        """Returns the regression at the centres of `NearestCentre`, with Adam's moments
        of its coefficients, zeros."""
        return regression_at(
            NEAREST_CENTRE.initial_state(w_up, experts)["centres"], w_up
        )

    def clustered_state(
        self,
        w_up: Float[Array, "d_model d_hidden"],
        centres: Float[Array, "experts d_model"],
    ) -> State:
        """Returns the state of `initial_state` at other centres."""
        return regression_at(centres, w_up)

    def scores(
        self, read: Float[Array, "tokens d_model"], experts: int, state: State
    ) -> Float[Array, "tokens experts"]:
        """Returns the logarithms of the expected shares, each token's but for a
        constant, float32."""
        del experts
        return regression_scores(read, state)

    def energy_shares(
        self, scores: Float[Array, "tokens experts"]
    ) -> Float[Array, "tokens experts"]:
        """Returns the expected shares, which sum to one."""
        return jax.nn.softmax(scores, axis=-1)

    def learned_state(
        self,
        state: State,
        x: Float[Array, "tokens d_model"],
        energies: Float[Array, "tokens experts"],
        share: float,
    ) -> State:
        """Returns the state after a step of Adam. Its rate is 1 / (2 d_model), so that
        a step moves a score by about a half where all features agree."""
        total = jnp.sum(energies, axis=1, keepdims=True)
        shares = energies / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
        return regression_step(state, x, shares, share / (2 * x.shape[1]))
