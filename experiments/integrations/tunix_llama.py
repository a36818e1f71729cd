"""Trains a Llama of Tunix, a library of Google's that this one knows nothing of, with
2:4 weights in its feed-forward networks, and dense at the end.

    uv run --group tunix experiments/integrations/tunix_llama.py

The model is tiny, has random weights, and learns to copy: each sequence is a random one
twice. It prints the loss at the end of each phase, and how far the dense `SparseFFN`s
are from Tunix's own modules: no further than rounding. It takes seconds on a CPU.
"""

import sys
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax
import tyro
from flax import nnx
from jaxtyping import Array, Float, Int

from sparsejax import (
    NM,
    FFNSparsity,
    densify,
    explain,
    loss_and_gradient,
    sparsify,
    switch,
)

DENSE = FFNSparsity()
TWO_FOUR = FFNSparsity(weights=NM(2, 4))


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the example."""

    steps: int = 150
    """Steps of each of the three phases: dense, sparse, dense."""
    batch_size: int = 32
    sequence_length: int = 16
    """Tokens of a sequence, the second half of which repeats the first."""
    seed: int = 0


def llama(seed: int) -> nnx.Module:
    """Returns Tunix's Llama of two layers with d_model 64 and 256 neurons, with random
    weights: its own are zeros, which a checkpoint replaces.

    Raises:
      ImportError: Tunix is not installed.
    """
    try:
        from tunix.models.llama3 import model as llama3  # pyrefly: ignore[missing-import]
    except ImportError as error:
        raise ImportError(
            "this example needs Tunix; run it with `uv run --group tunix`, or install "
            "google-tunix"
        ) from error
    config = llama3.ModelConfig(
        num_layers=2,
        vocab_size=64,
        embed_dim=64,
        hidden_dim=256,
        num_heads=4,
        head_dim=16,
        num_kv_heads=2,
        rope_theta=10_000,
        norm_eps=1e-5,
    )
    model = llama3.Llama3(config, rngs=nnx.Rngs(seed))
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    drawn = [
        leaf if leaf.ndim < 2 else jax.random.normal(key, leaf.shape, leaf.dtype) / 8
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    return nnx.merge(graph, jax.tree.unflatten(structure, drawn), rest)


def logits_of(
    model: nnx.Module, tokens: Int[Array, "batch sequence"]
) -> Float[Array, "batch sequence vocab"]:
    """Returns the logits of Tunix's model, which takes positions and a mask."""
    length = tokens.shape[1]
    positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
    causal = jnp.tril(jnp.ones((length, length), bool))
    mask = jnp.broadcast_to(causal, (len(tokens), length, length))
    logits, _ = model(tokens, positions, None, mask)  # pyrefly: ignore[not-callable]
    return logits


def loss_of(
    model: nnx.Module, tokens: Int[Array, "batch sequence"]
) -> Float[Array, ""]:
    """Returns the mean loss in nats per token of the second half of the sequences,
    which can be known from the first."""
    half = tokens.shape[1] // 2
    logits = logits_of(model, tokens[:, :-1])[:, half - 1 :]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, half:])
    return losses.mean()


def main(config: Config) -> list[float]:
    """Runs the example, and returns the loss before the first step and at the end of
    each phase."""
    model = llama(config.seed)
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    keys = jax.random.split(jax.random.key(config.seed), 3 * config.steps + 1)

    def batch(key: jax.Array) -> Int[Array, "batch sequence"]:
        shape = config.batch_size, config.sequence_length // 2
        first = jax.random.randint(key, shape, 0, 64)
        return jnp.concatenate([first, first], axis=1)

    held_out = batch(keys[-1])
    before = logits_of(model, held_out)
    for explanation in sparsify(model, [r"layers/\d+/mlp"]):
        print(f"{explanation.path}: {explanation.reason}")
    for explanation in explain(model):
        if not explanation.is_sparse_ffn:
            print(f"{explanation.path} stays: {explanation.reason}")
    off = jnp.abs(logits_of(model, held_out) - before).max()
    print(f"dense: logits differ from Tunix's own by {off:.1e}")

    @nnx.jit
    def step(model, optimizer, tokens):
        _, gradient = loss_and_gradient(loss_of, model, tokens[None])
        optimizer.update(model, gradient)

    losses = [float(loss_of(model, held_out))]
    print(f"loss before training: {losses[0]:.4f}")
    phases = {"dense": DENSE, "2:4 weights": TWO_FOUR, "dense again": DENSE}
    done = 0
    for name, sparsity in phases.items():
        switch(model, optimizer, sparsity)
        for key in keys[done : done + config.steps]:
            step(model, optimizer, batch(key))
        done += config.steps
        losses.append(float(loss_of(model, held_out)))
        print(f"loss after {config.steps} steps, {name}: {losses[-1]:.4f}")
    densify(model)
    after = float(loss_of(model, held_out))
    print(f"loss of Tunix's own modules with these weights: {after:.4f}")
    return [*losses, after]


if __name__ == "__main__":
    try:
        main(tyro.cli(Config, description=__doc__))
    except ImportError as error:
        sys.exit(f"ImportError: {error}")
