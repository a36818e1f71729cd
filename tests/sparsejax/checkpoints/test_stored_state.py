"""States as plain arrays and back; through a folder in test_checkpoint."""

from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparsejax.checkpoints.stored_state import (
    check_fits,
    describe,
    is_description,
    named_leaves,
    rebuild,
    storable,
    stored_spec,
)

PATH = Path("step_00000001")


class Pair(NamedTuple):
    first: jax.Array
    second: jax.Array | None


def test_what_is_stored_is_plain_and_brings_every_leaf_back():
    key = jax.random.split(jax.random.key(3), 2)
    state = {"pair": Pair(jnp.ones((2, 3)), None), "key": key, "no": jnp.zeros((0, 4))}
    leaves = named_leaves(state)
    stored = storable(leaves)
    assert set(stored) == {"['pair'].first", "['key']"}
    assert stored["['key']"].dtype == jnp.uint32
    described = {name: describe(name, leaf) for name, leaf in leaves.items()}
    assert all(map(is_description, described.values()))
    check_fits(PATH, described, leaves)
    for name, leaf in leaves.items():
        if name in stored:
            spec = stored_spec(leaf)
            assert (spec.shape, spec.dtype) == (stored[name].shape, stored[name].dtype)
        found = rebuild(PATH, stored.get(name), leaf, described[name])
        assert (found.shape, found.dtype) == (leaf.shape, leaf.dtype)
        is_key = name == "['key']"
        data = jax.random.key_data if is_key else np.asarray
        np.testing.assert_array_equal(data(found), data(leaf))


@jax.tree_util.register_pytree_with_keys_class
class Twins:
    """Two leaves, and one name for both."""

    def tree_flatten_with_keys(self):
        one = jax.tree_util.GetAttrKey("twin")
        return ((one, jnp.ones(1)), (one, jnp.ones(1))), None

    @classmethod
    def tree_unflatten(cls, structure, leaves):
        return cls()


def test_two_leaves_of_one_name_are_refused():
    with pytest.raises(ValueError, match=r"two leaves of the state are named \.twin;"):
        named_leaves(Twins())
