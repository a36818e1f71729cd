"""Trains a Llama of MaxText, a library of Google's that this one knows nothing of, with
2:4 weights in its feed-forward networks, and dense at the end.

    uv run --group maxtext experiments/integrations/maxtext_llama.py

The model is tiny, has random weights, and learns to copy: each sequence is a random one
twice. It prints the loss at the end of each phase, and how far the dense `SparseFFN`s
are from MaxText's own modules: no further than rounding. It takes a minute on a CPU,
much of it for MaxText to load.
"""

import os
import sys
from dataclasses import dataclass
from importlib import resources

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
VOCABULARY = 64


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the example."""

    steps: int = 150
    """Steps of each of the three phases: dense, sparse, dense."""
    batch_size: int = 32
    sequence_length: int = 16
    """Tokens of a sequence, the second half of which repeats the first."""
    scan_layers: bool = False
    """Whether MaxText stacks the parameters of its layers, along their second axis."""
    fused_mlp: bool = False
    """Whether MaxText keeps gate and up projection in one kernel, (64, 2, 256)."""
    seed: int = 0


def llama(config: Config) -> nnx.Module:
    """Returns MaxText's Llama of two layers with d_model 64 and 256 neurons.

    Raises:
      ImportError: MaxText, or what it imports, is not installed.
    """
    # Without this MaxText asks for libraries of Google's cloud.
    os.environ.setdefault("DECOUPLE_GCLOUD", "TRUE")
    try:
        import maxtext  # pyrefly: ignore[missing-import]
        from maxtext.configs import pyconfig  # pyrefly: ignore[missing-import]
        from maxtext.utils import (  # pyrefly: ignore[missing-import]
            model_creation_utils,
        )
    except ImportError as error:
        raise ImportError(
            f"this example needs MaxText and what it imports ({error}); run it with "
            f"`uv run --group maxtext`"
        ) from error
    settings = pyconfig.initialize(
        ["", str(resources.files(maxtext) / "configs" / "base.yml")],
        run_name="tiny",
        hardware="cpu",
        skip_jax_distributed_system=True,
        enable_checkpointing=False,
        decoder_block="llama2",
        base_emb_dim=64,
        base_num_query_heads=4,
        base_num_kv_heads=2,
        base_mlp_dim=256,
        base_num_decoder_layers=2,
        head_dim=16,
        vocab_size=VOCABULARY,
        max_target_length=config.sequence_length,
        per_device_batch_size=config.batch_size,
        mlp_activations=["silu", "linear"],
        fused_mlp=config.fused_mlp,
        scan_layers=config.scan_layers,
        dropout_rate=0.0,
        dtype="float32",
        weight_dtype="float32",
        attention="dot_product",
        logits_dot_in_fp32=True,
    )
    devices = jax.devices()[:1]
    rngs = nnx.Rngs(config.seed)
    return model_creation_utils.from_config(settings, devices, rngs=rngs)


def logits_of(
    model: nnx.Module, tokens: Int[Array, "batch sequence"]
) -> Float[Array, "batch sequence vocab"]:
    """Returns the logits of MaxText's model, which takes positions."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return model(  # pyrefly: ignore[not-callable]
        tokens, positions, enable_dropout=False
    )


def loss_of(
    model: nnx.Module, tokens: Int[Array, "batch sequence"]
) -> Float[Array, ""]:
    """Returns the mean loss in nats per token of the second half of the sequences,
    which can be known from the first."""
    half = tokens.shape[1] // 2
    logits = logits_of(model, tokens)[:, half - 1 : -1]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, half:])
    return losses.mean()


def main(config: Config) -> list[float]:
    """Runs the example, and returns the loss before the first step, at the end of each
    phase, and of MaxText's own modules with the weights that came out."""
    model = llama(config)
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    keys = jax.random.split(jax.random.key(config.seed), 3 * config.steps + 1)

    def batch(key: jax.Array) -> Int[Array, "batch sequence"]:
        shape = config.batch_size, config.sequence_length // 2
        first = jax.random.randint(key, shape, 0, VOCABULARY)
        return jnp.concatenate([first, first], axis=1)

    held_out = batch(keys[-1])
    before = logits_of(model, held_out)
    rule = "decoder/layers/mlp" if config.scan_layers else r"decoder/layers_\d+/mlp"
    for explanation in sparsify(model, [rule]):
        print(f"{explanation.path}: {explanation.reason}")
    for explanation in explain(model):
        if not explanation.is_sparse_ffn:
            print(f"{explanation.path} stays: {explanation.reason}")
    off = float(jnp.abs(logits_of(model, held_out) - before).max())
    print(f"dense: logits differ from MaxText's own by {off:.1e}")
    # float32 sums of 256 products
    assert off < 1e-4, off

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
    print(f"loss of MaxText's own modules with these weights: {after:.4f}")
    return [*losses, after]


if __name__ == "__main__":
    try:
        main(tyro.cli(Config, description=__doc__))
    except ImportError as error:
        sys.exit(f"ImportError: {error}")
