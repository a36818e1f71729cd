"""The metrics of a run: its speed, each figure with its definition, and its FFNs'
health."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.device import Device, dense_peak_tflops
from sparsejax.config import MeshConfig, ModelConfig
from sparsejax.cost_model import flops_per_token
from sparsejax.feed_forward.activation import ACTIVATIONS, ActivationName
from sparsejax.feed_forward.gated_ffn import GatedFFNSpec
from sparsejax.feed_forward.packing import rows_of_token
from sparsejax.feed_forward.plan import row_tile
from sparsejax.feed_forward.sparsity import FFNSparsity
from sparsejax.feed_forward.spec import FFNCall, FFNSpec
from sparsejax.models.sparse_ffn import SparseFFN, sparse_ffns
from sparsejax.models.transformer import Transformer
from sparsejax.ops.backend import (
    Backend,
    Decision,
    current_device,
)
from sparsejax.ops.expert_rows import combine_rows, gather_rows
from sparsejax.ops.fp8_matmul import quantise_weight, rounded_product
from sparsejax.routing.dispatch import dispatch
from sparsejax.routing.expert_sets import rows_of_sets
from sparsejax.routing.routers import ActivationEnergy, State
from sparsejax.sparsity.masks import flip_rate, magnitude_mask, soft_threshold
from sparsejax.sparsity.patterns import NM

ONE_DEVICE = MeshConfig(data=1)


@dataclass(frozen=True, kw_only=True)
class DensePeak:
    """The TFLOP/s that a utilisation is a share of: always those of a dense GEMM."""

    tflops: float
    source: str


def dense_peak(dtype: str, device: jax.Device | None = None) -> DensePeak:
    """Returns the dense peak of the device from its data sheet or, where it is not in
    our table, the best of five measured dense GEMMs of size 2048."""
    device = jax.devices()[0] if device is None else device
    listed = dense_peak_tflops(device.device_kind, dtype)
    if listed is not None:
        return DensePeak(tflops=listed, source=f"data sheet, dense {dtype}")
    size = 2048
    lhs, rhs = jax.random.normal(jax.random.key(0), (2, size, size), jnp.dtype(dtype))
    multiply = jax.jit(jnp.matmul)
    multiply(lhs, rhs).block_until_ready()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        multiply(lhs, rhs).block_until_ready()
        times.append(time.perf_counter() - start)
    return DensePeak(
        tflops=2 * size**3 / min(times) / 1e12,
        source=f"measured, dense {dtype} GEMM of size {size}",
    )


def ffn_decisions(
    config: ModelConfig,
    sparsity: FFNSparsity,
    tokens: int,
    backend: Backend | None = None,
    *,
    mesh: MeshConfig = ONE_DEVICE,
    device: Device | None = None,
) -> tuple[Decision, ...]:
    """Returns the decision for each FFN GEMM of a model on one device of the mesh, for
    `tokens` tokens on the whole mesh. `device` need not be there; None stands for the
    current one."""
    return ffn_spec(config, sparsity, tokens, mesh=mesh, device=device).explain(backend)


def ffn_spec(
    config: ModelConfig,
    sparsity: FFNSparsity,
    tokens: int,
    *,
    mesh: MeshConfig = ONE_DEVICE,
    device: Device | None = None,
) -> FFNCall:
    """Returns the spec of the FFN call that `ffn_decisions` decides about; where the
    weights are blocks on a diagonal, that of one of the blocks' FFNs, which run side by
    side."""
    kind = FFNSpec
    if config.activation != "relu2":
        kind = partial(GatedFFNSpec, activation=config.activation)
    return kind(
        tokens=tokens,
        d_model=config.d_model // config.groups,
        d_hidden=config.d_hidden // config.groups,
        dtype=config.dtype,
        sparsity=sparsity,
        precision=config.precision,
        device=current_device() if device is None else device,
        token_shards=mesh.token_shards,
        hidden_shards=mesh.tensor,
    )


def speed(
    config: ModelConfig,
    sequence_length: int,
    decisions: Sequence[Decision],
    tokens_per_second: float,
    peak: DensePeak,
    *,
    devices: int = 1,
) -> dict[str, float]:
    """Returns the throughput in the units of this project.

    dense_equivalent_tflops counts the FLOPs of the dense model (causal half of the
    attention scores, no recomputation), executed_tflops only those that the chosen
    paths execute, both of all devices together. Each mfu is its TFLOP/s / (`peak`, the
    dense peak of a device, x devices).
    """
    flops = flops_per_token(config, sequence_length)
    share = statistics.fmean(decision.executed_share for decision in decisions)
    dense = flops.total() * tokens_per_second / 1e12
    executed = dense - flops.ffn * (1 - share) * tokens_per_second / 1e12
    return {
        "tokens_per_second": tokens_per_second,
        "dense_equivalent_tflops": dense,
        "executed_tflops": executed,
        "mfu_dense_equivalent": dense / (peak.tflops * devices),
        "mfu_executed": executed / (peak.tflops * devices),
    }


def router_seconds(
    config: ModelConfig,
    sparsity: FFNSparsity,
    tokens: int,
    decisions: Sequence[Decision],
) -> float:
    """Returns the seconds that one FFN call of so many tokens spends on its router,
    forward and backward, where its GEMMs run as in `decisions`.

    What is timed is choosing the experts, sorting the tokens by expert, and moving
    rows: X and dY to their experts, Y and dX back. Choosing includes the product that a
    router reads, unless it is that of GEMM 1. It runs on random numbers and by itself,
    so that within a step it can take less; the shortest of five times is returned, and
    0 without a router.
    """
    if sparsity.experts is None:
        return 0.0
    of_gemms = [of.kernels for of in decisions if of.on_kernels]
    found = of_gemms[0] if of_gemms else None
    experts, v = sparsity.experts, row_tile(sparsity, on_kernels=bool(of_gemms))
    assert v is not None
    router, key = sparsity.router, jax.random.key(0)

    def normal(shape: tuple[int, ...]) -> jax.Array:
        return jax.random.normal(key, shape, jnp.dtype(config.dtype))

    x = normal((tokens, config.d_model))
    if router.reads == "token_ids":
        read = jnp.arange(tokens, dtype=jnp.int32)
    else:
        read = x if router.reads == "x" else normal((tokens, config.d_hidden))
    w_up = jax.ShapeDtypeStruct((config.d_model, config.d_hidden), jnp.float32)
    kept = jax.eval_shape(partial(router.initial_state, experts=experts), w_up)
    state = {name: normal(of.shape).astype(of.dtype) for name, of in kept.items()}
    choose = partial(
        router.choose, experts=experts, experts_per_token=sparsity.expert_choices
    )

    joins = rows_of_token(sparsity, decisions) < sparsity.expert_choices
    rounded = ()
    if sparsity.chooses_in_fp8:
        weight = quantise_weight(normal(w_up.shape))
        rounded = (weight,) * (2 if config.gated else 1)
    kind = ACTIVATIONS[config.activation]

    @jax.jit
    def there_and_back(x: jax.Array, read: jax.Array, state: State) -> jax.Array:
        if rounded:
            products = tuple(rounded_product(x, weight) for weight in rounded)
            read = kind.read_by_routers(products)
        chosen = choose(read, state=state)
        if joins:
            routed = rows_of_sets(chosen, experts, v).of_sets
        else:
            routed = dispatch(chosen, experts, v)
        # One row of a token is put back by XLA.
        putting_back = None if joins else found
        for _ in ("forward", "backward"):
            x = combine_rows(putting_back, gather_rows(found, x, routed), routed)
        return x

    jax.block_until_ready(there_and_back(x, read, state))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(there_and_back(x, read, state))
        times.append(time.perf_counter() - start)
    return min(times)


OF_ROUTER = ("router_mass", "oracle_mass", "random_mass", "tokens_per_expert")
"""The names of those of `ffn_statistics` that an FFN with a router has."""


def ffn_statistics(
    x: Float[Array, "tokens d_model"],
    w_read: Float[Array, "d_model d_hidden"],
    sparsity: FFNSparsity,
    expert_index: Int[Array, "tokens experts_per_token"] | None,
    *,
    threshold: Float[Array, ""] | None = None,
    w_gate: Float[Array, "d_model d_hidden"] | None = None,
    activation: ActivationName = "relu2",
) -> dict[str, Array]:
    """Returns the health of one FFN on the tokens x, float32.

    Mass is A^2, with A the result of the activation. All shares are means over tokens
    that have any mass.
      natural_density: non-zeros of A before any mask, a share of tokens x neurons.
      density: the same after router and 2:4.
      two_four_mass: mass inside the router's experts (all neurons without a router)
        that top-2-of-4 keeps. Where they are dense there: what it would keep.
      dead_neurons: share of neurons that no token activates.
      With a router: router_mass, the mass share inside the chosen experts; oracle_mass,
        inside the best g experts; random_mass, g / E; tokens_per_expert (E,).

    Args:
      x: the tokens that the FFN reads.
      w_read: W1 (gated: Wu) as GEMM 1 reads it: S(W) where it is sparse.
      sparsity: the sparsity of the FFN.
      expert_index: the experts of each token; None without a router, or with one that
        reads Y1.
      threshold: the share of a token's energy above which it uses an expert; None
        where every token uses as many.
      w_gate: Wg as GEMM 1 reads it; None of a plain FFN.
      activation: the FFN's activation.
    """
    multiply = partial(jnp.matmul, x, preferred_element_type=jnp.float32)
    weights = (w_read,) if w_gate is None else (w_gate, w_read)
    products = tuple(multiply(weight.astype(x.dtype)) for weight in weights)
    kind = ACTIVATIONS[activation]
    a, y_up = kind.apply(kind.keep(products)), kind.read_by_routers(products)
    active = a != 0
    mass = a**2
    total = mass.sum(axis=1)
    inside = jnp.ones_like(active)
    report: dict[str, Array] = {}
    if sparsity.experts:
        experts, chosen = sparsity.experts, sparsity.experts_per_token
        choice = {"experts": experts, "experts_per_token": chosen}
        oracle = ActivationEnergy().choose(y_up, **choice)
        if expert_index is None:
            read = y_up
            if sparsity.chooses_in_fp8:
                quantised = map(quantise_weight, weights)
                rounded = tuple(rounded_product(x, weight) for weight in quantised)
                read = kind.read_by_routers(rounded)
            expert_index = sparsity.router.choose(
                read,
                experts=experts,
                experts_per_token=sparsity.expert_choices,
                threshold=threshold,
            )
        # -1 is no expert.
        named = jnp.where(expert_index < 0, experts, expert_index).reshape(-1)
        inside = _columns_of(expert_index, y_up.shape[1], experts)
        best = _columns_of(oracle, y_up.shape[1], experts)
        report = {
            "router_mass": _mean_share(jnp.where(inside, mass, 0).sum(1), total),
            "oracle_mass": _mean_share(jnp.where(best, mass, 0).sum(1), total),
            "random_mass": jnp.float32(chosen / experts),
            "tokens_per_expert": jnp.bincount(named, length=experts),
        }
    kept = inside & magnitude_mask(a, NM(2, 4))
    used = active & (inside if sparsity.in_expert is None else kept)
    mass_inside = jnp.where(inside, mass, 0).sum(1)
    return report | {
        "natural_density": active.mean(),
        "density": used.mean(),
        "two_four_mass": _mean_share(jnp.where(kept, mass, 0).sum(1), mass_inside),
        "dead_neurons": 1 - active.any(axis=0).mean(),
    }


def _columns_of(expert_index: Array, features: int, experts: int) -> Bool[Array, "t f"]:
    chosen = jax.nn.one_hot(expert_index, experts, dtype=bool).any(axis=1)
    return jnp.repeat(chosen, features // experts, axis=1)


def _mean_share(part: Array, whole: Array) -> Array:
    has_mass = whole > 0
    share = jnp.where(has_mass, part / jnp.where(has_mass, whole, 1), 0)
    return share.sum() / jnp.maximum(has_mass.sum(), 1)


def model_statistics(
    model: Transformer, tokens: Int[Array, "batch sequence"]
) -> dict[str, Array]:
    """Returns the `ffn_statistics` of every layer, each value (layers, ...), and the
    betas.

    A SwiGLU FFN has no zeros: of it only beta (gate, up, down), and what is about its
    router, are reported.
    """
    ffn = model.blocks.ffn
    report: dict[str, Array] = {"beta": ffn.scales[...]}
    if ffn.activation == "swiglu" and ffn.sparsity.experts is None:
        return report
    key = jax.random.key(0)
    _, inputs = model(tokens, key=key, capture_ffn_inputs=True)
    graph, stacked = nnx.split(ffn)

    def of_layer(layer):
        state, x = layer
        ffn: SparseFFN = nnx.merge(graph, state)
        x = x.reshape(-1, x.shape[-1])
        *gate, w_up = (ffn.dense_form(w) for w in ffn.into_hidden)
        if ffn.sparsity.weights:
            *gate, w_up = (
                ffn.scales[...][i] * soft_threshold(w, axis=0)
                for i, w in enumerate((*gate, w_up))
            )
        return ffn_statistics(
            x,
            w_up,
            ffn.sparsity,
            ffn.route(x, tokens),
            threshold=ffn.energy_threshold,
            w_gate=gate[0] if gate else None,
            activation=ffn.activation,
        )

    found = jax.lax.map(of_layer, (stacked, inputs))
    if ffn.activation == "swiglu":
        found = {name: found[name] for name in OF_ROUTER}
    return report | found


def weight_masks(model: nnx.Module) -> list[Bool[Array, "..."]]:
    """Returns the 2:4 masks that S keeps, boolean, for every weight that GEMM 1 or 3
    reads."""
    masks = []
    for ffn in sparse_ffns(model):
        if ffn.d_model % 4 == 0 and ffn.groups == 1:
            masks += [magnitude_mask(w[...], axis=-2) for w in ffn.into_hidden]
            masks.append(magnitude_mask(ffn.w_down[...], axis=-1))
    return masks


def mask_flip_rate(
    before: Sequence[Bool[Array, "..."]], after: Sequence[Bool[Array, "..."]]
) -> Float[Array, " layers"]:
    """Returns the share of mask entries that differ, per layer, as a mean over the
    weights; float32.

    Between two consecutive optimiser steps it is r_k of arXiv 2404.01847.
    """
    per_weight = [jax.vmap(flip_rate)(a, b) for a, b in zip(before, after, strict=True)]
    return jnp.stack(per_weight).mean(axis=0)
