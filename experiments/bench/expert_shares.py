"""The shares of a benchmark's tokens that its experts have."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax.routing.dispatch import Dispatch, dispatch


def expert_shares(experts: int, share_of_first: float) -> np.ndarray:
    """Returns the share of all tokens that each expert has, float64 (experts,): the
    first one has `share_of_first`, and the others share the rest equally.

    Raises:
      ValueError: the share is not between 0 and 1, or there is one expert only.
    """
    if not 0 < share_of_first < 1 or experts == 1:
        raise ValueError(
            f"share_of_first={share_of_first} of {experts} experts: give a share "
            f"between 0 and 1, and two experts or more"
        )
    others = (1 - share_of_first) / (experts - 1)
    return np.array([share_of_first] + [others] * (experts - 1))


def drawn_shares(experts: int) -> np.ndarray:
    """Returns unequal shares, float64 (experts,), the same ones at every call."""
    return np.random.default_rng(0).dirichlet([4] * experts)


def routed(tokens: int, shares: np.ndarray, v: int) -> Dispatch:
    """Returns the rows of tokens that are sent to one expert each, in random order, so
    that the experts have these shares of them; a tile has v rows."""
    ends = np.round(np.cumsum(shares) * tokens)
    expert = np.searchsorted(ends, np.arange(tokens), side="right")
    expert = np.random.default_rng(0).permutation(expert)
    run = jax.jit(partial(dispatch, experts=len(shares), v=v))
    return run(jnp.asarray(expert[:, None], jnp.int32))
