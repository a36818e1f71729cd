"""Phases of a training run, and what happens at the switch between two of them.

A switch happens between two optimiser steps, in this order:
  leaving 2:4 weights: fold, W1 := beta S(W1), so that the dense network computes what
    the sparse one did (W2 needs none: GEMM 2 has read W2 itself all along);
  entering 2:4 weights: beta of every weight is computed and from then on frozen;
  entering V:N:M activations: neurons are clustered by their columns of W1 and
    relabelled, W1, W2 and their optimiser moments alike.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int, PyTree

from sparsejax.config import RecipeConfig, RecipeName, TrainConfig
from sparsejax.layers import SparseFFN, set_sparsity, sparse_ffns
from sparsejax.ops.ffn_spec import DENSE, FFNSparsity, check_divisible
from sparsejax.patterns import NM, VNM
from sparsejax.pruning import soft_threshold


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Consecutive steps with one sparsity, and so with one compiled step."""

    kind: str
    """"warm-up", "sparse" or "dense"."""
    steps: int
    sparsity: FFNSparsity


def sparsity_of(recipe: RecipeName, settings: RecipeConfig) -> FFNSparsity:
    """The sparsity of the recipe's sparse phase.

    default: 2:4 weights in GEMMs 1 and 3, 2:4 activations in 2 and 4, the mixture that
    cost least in all our runs (experiments/LOG.md). paper: 2:4 weights and V:2:M
    activations, GEMMs 5 and 6 per expert (arXiv 2602.06183). activations: 2:4
    activations (arXiv 2503.16672). weights: 2:4 weights.
    """
    if recipe == "dense":
        return DENSE
    if recipe == "weights":
        return FFNSparsity(weights=NM(2, 4))
    if recipe == "paper":
        sparsity = FFNSparsity(
            weights=NM(2, 4),
            activations=VNM(settings.block_rows, 2, 4 * settings.experts),
            router=settings.router,
            experts_per_token=settings.experts_per_token,
            skip_blocks=settings.skip_blocks,
            weight_gradients="expert_columns",
        )
    else:
        weights = NM(2, 4) if recipe == "default" else None
        sparsity = FFNSparsity(weights=weights, activations=NM(2, 4))
    return replace(
        sparsity,
        mask_reuse=settings.mask_reuse,
        token_sparsity=settings.token_sparsity,
        dense_features=settings.dense_features,
        permute_tokens=settings.permute_tokens,
    )


def phases(config: TrainConfig) -> tuple[Phase, ...]:
    """The phases of a run, none of them empty: dense warm-up, sparse, dense tail.

    Raises:
      ValueError: the recipe's settings contradict each other, or its patterns do not
        divide the model's widths.
    """
    sparsity = sparsity_of(config.recipe, config.phases)
    if config.recipe == "dense":
        return (Phase(kind="dense", steps=config.steps, sparsity=DENSE),)
    warmup = round(config.phases.warmup_share * config.steps)
    sparse = round(config.phases.sparse_share * config.steps)
    sparse = min(sparse, config.steps - warmup)
    planned = (
        Phase(kind="warm-up", steps=warmup, sparsity=DENSE),
        Phase(kind="sparse", steps=sparse, sparsity=sparsity),
        Phase(kind="dense", steps=config.steps - warmup - sparse, sparsity=DENSE),
    )
    planned = tuple(phase for phase in planned if phase.steps)
    for phase in planned:
        check_divisible(config.model.d_model, config.model.d_hidden, phase.sparsity)
    return planned


def switch(
    model: nnx.Module,
    moments: PyTree,
    sparsity: FFNSparsity,
    *,
    fold: bool = True,
) -> PyTree:
    """Brings every `SparseFFN` of the model to `sparsity`, in place.

    Args:
      model: anything that contains `SparseFFN`s, stacked or not.
      moments: the optimiser's state; leaves whose path ends like that of an FFN's
        w_up or w_down are permuted with its neurons, all else is left as it is.
      sparsity: what the next steps compute.
      fold: on leaving 2:4 weights.
    Returns:
      the moments for the relabelled neurons.
    """
    entering_weights = False
    entering_experts = False
    for ffn in sparse_ffns(model):
        before = ffn.sparsity
        if before.weights and not sparsity.weights and fold:
            fold_weights(ffn)
        entering_weights |= bool(sparsity.weights and not before.weights)
        entering_experts |= sparsity.experts not in (None, before.experts)
    set_sparsity(model, sparsity)
    if entering_experts:
        moments = relabel_neurons(model, moments)
    if entering_weights:
        for ffn in sparse_ffns(model):
            ffn.refresh_scales()
    return moments


def fold_weights(ffn: SparseFFN) -> None:
    """W := beta S(W) for the weights that GEMM 1 reads (W1; Wg and Wu if gated)."""
    ffn.unpack()
    for index, w in enumerate(ffn.into_hidden):
        scale = ffn.scales[...][..., index, None, None]
        w[...] = scale * soft_threshold(w[...], axis=-2)


def relabel_neurons(
    model: nnx.Module, moments: PyTree, *, warm_start: bool = False
) -> PyTree:
    """Clusters the neurons of every `SparseFFN` of the model, in place.

    The dense function of the model stays as it is. Returns the moments, permuted alike.
    """
    for path, ffn in nnx.iter_modules(model):
        if isinstance(ffn, SparseFFN):
            order = ffn.cluster(warm_start=warm_start)
            moments = permute_neurons(moments, order, prefix=path)
    return moments


def permute_neurons(
    tree: PyTree,
    order: Int[Array, "*layers d_hidden"],
    *,
    prefix: tuple = (),
) -> PyTree:
    """The tree with neuron i of an FFN's leaves replaced by neuron order[i].

    The FFN's leaves are those whose path contains `prefix` followed by w_up or w_gate
    (neurons along the last axis) or w_down (second to last).
    """
    axes = {"w_up": -1, "w_gate": -1, "w_down": -2}

    def permute(path: tuple, leaf: jax.Array) -> jax.Array:
        names = [str(_name(entry)) for entry in path]
        for weight, axis in axes.items():
            if _contains(names, [*map(str, prefix), weight]):
                return _take(leaf, order, axis)
        return leaf

    return jax.tree_util.tree_map_with_path(permute, tree)


def _take(leaf: jax.Array, order: jax.Array, axis: int) -> jax.Array:
    if leaf.ndim == 2:
        return jnp.take(leaf, order, axis=axis)
    # Layer by layer: on a mesh, a layer that is permuted is whole on every device.
    return jax.lax.map(lambda layer: _take(layer[0], layer[1], axis), (leaf, order))


def _name(entry: object) -> object:
    for attribute in ("key", "name", "idx"):
        if hasattr(entry, attribute):
            return getattr(entry, attribute)
    return entry


def _contains(names: list[str], part: list[str]) -> bool:
    starts = range(len(names) - len(part) + 1)
    return any(names[start : start + len(part)] == part for start in starts)
