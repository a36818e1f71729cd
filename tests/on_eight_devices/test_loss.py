"""The loss of tokens whose logits are split over the vocabulary."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from sparsejax.models.loss import in_one_reduction, token_losses


@pytest.mark.parametrize("reduce", [in_one_reduction, token_losses])
def test_no_device_gathers_logits_of_the_whole_vocabulary(reduce):
    mesh = jax.make_mesh((2, 4), ("data", "tensor"))
    place = lambda *axes: NamedSharding(mesh, PartitionSpec(*axes))
    random = np.random.default_rng(0)
    logits = random.standard_normal((4, 8, 64)).astype(np.float32)
    targets = random.integers(0, 64, (4, 8)).astype(np.int32)
    shared = (
        jax.device_put(logits, place("data", None, "tensor")),
        jax.device_put(targets, place("data", None)),
    )
    run = jax.jit(reduce, out_shardings=place("data", None))
    # Nothing of four or more devices' logits: 4 x 8 x 64 floats over 8 devices.
    text = run.lower(*shared).compile().as_text()
    assert "f32[2,8,16]" in text
    assert "f32[2,8,64]" not in text and "f32[4,8,64]" not in text
    for got, expected in zip(
        jax.tree.leaves(run(*shared)),
        jax.tree.leaves(reduce(logits, targets)),
        strict=True,
    ):
        np.testing.assert_allclose(got, expected, rtol=1e-6)
