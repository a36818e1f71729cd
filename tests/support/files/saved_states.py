"""States that tests save, and the comparison of two of them to the last bit."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from sparsejax.checkpoints.checkpoint import Checkpoints

KEEP_ALL = None


def bits(array: jax.Array) -> tuple:
    """Returns what has to be equal for two leaves to be the same to the last bit."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return str(array.dtype), bits(jax.random.key_data(array))
    return str(array.dtype), array.shape, np.asarray(array).tobytes()


def assert_same(found, expected) -> None:
    """Asserts that two states have one structure and the same bits."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for got in jax.tree.leaves(found):
        assert isinstance(got, jax.Array)
    assert jax.tree.map(bits, found) == jax.tree.map(bits, expected)


def state_of(value: float) -> dict:
    """Returns a small state that tells its value."""
    return {"w": jnp.full((2, 3), value, jnp.float32), "step": jnp.int32(value)}


def save_steps(folder: Path, *steps: int, **options) -> None:
    """Saves `state_of(step)` for every step; none is deleted."""
    with Checkpoints(folder, keep=KEEP_ALL) as checkpoints:
        for step in steps:
            checkpoints.save(step, state_of(step), **options)
