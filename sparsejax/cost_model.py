"""The cost of a run before it runs: parameters, FLOPs, memory, what devices send each
other, expected speed-up.

Pure arithmetic over settings; nothing is allocated or compiled. Counts are per token
where the name says so, a multiply-add is two FLOPs, and forward plus backward is three
times the forward. Speed-ups rest on `KernelFactors`, which are assumptions until a
benchmark on the machine at hand replaces them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sparsejax.config import MeshConfig, ModelConfig
from sparsejax.feed_forward.spec import DENSE, FFNSparsity
from sparsejax.sparsity.patterns import NM

ONE_DEVICE = MeshConfig(data=1)

_GATED = (1, 1, 2, 3, 4, 4, 5, 5, 6)
GEMM_NUMBERS = {"relu2": (1, 2, 3, 4, 5, 6), "swiglu": _GATED, "reglu2": _GATED}
"""The numbers of the FFN's GEMMs, each of 2 tokens d_model d_hidden FLOPs: the rows of
the table in `feed_forward.spec` that they stand in. A gate doubles rows 1, 4 and 5."""


@dataclass(frozen=True, kw_only=True)
class ParameterCount:
    """The number of trained parameters of each component, over all layers."""

    embedding: int
    attention: int
    ffn: int
    norms: int
    head: int
    """The number of parameters of the head; 0 where the head is the embedding."""

    @property
    def total(self) -> int:
        return self.embedding + self.attention + self.ffn + self.norms + self.head


def parameter_count(config: ModelConfig) -> ParameterCount:
    """Returns the number of trained parameters of `model.Transformer(config)`. Weights
    that are masked are stored whole and counted so; of those that are blocks on a
    diagonal, only the blocks are."""
    d, layers = config.d_model, config.layers
    kv_width = config.kv_heads * config.head_dim
    matrices = 3 if config.gated else 2
    vocabulary = config.vocab_size * d
    return ParameterCount(
        embedding=vocabulary,
        attention=layers * (2 * d * d + 2 * d * kv_width) // config.groups,
        ffn=layers * matrices * d * config.d_hidden // config.groups,
        norms=(2 * layers + 1) * d,
        head=0 if config.tie_embeddings else vocabulary,
    )


@dataclass(frozen=True, kw_only=True)
class FlopsPerToken:
    """The FLOPs of one token, forward and backward, with all GEMMs dense, by component.

    The embedding is a look-up and norms and activations are not counted. Attention's
    scores and mixing (SDPA) are stated twice: `sdpa_full` multiplies every query with
    every key, `sdpa_causal` is the half that a kernel which skips the future computes.
    """

    attention_projections: int
    sdpa_causal: int
    sdpa_full: int
    ffn: int
    head: int

    def total(self, *, causal: bool = True) -> int:
        """Returns the sum over all components; with `causal` the scores of the future
        are not counted."""
        sdpa = self.sdpa_causal if causal else self.sdpa_full
        return self.attention_projections + sdpa + self.ffn + self.head

    def ffn_share(self, *, causal: bool = True) -> float:
        """Returns f, the FFN's share of a dense step's FLOPs, which bounds what it can
        save."""
        return self.ffn / self.total(causal=causal)


def flops_per_token(config: ModelConfig, sequence_length: int) -> FlopsPerToken:
    """Returns the FLOPs of one token in a sequence of `sequence_length`, with all GEMMs
    dense: of weights that are blocks on a diagonal the FLOPs of the blocks, of masked
    weights those of whole ones."""
    parameters = parameter_count(config)
    # Forward: Q K^T and P V are each 2 * sequence_length * d_model per token.
    sdpa = 3 * config.layers * 4 * sequence_length * config.d_model
    return FlopsPerToken(
        attention_projections=6 * parameters.attention,
        sdpa_causal=sdpa // 2,
        sdpa_full=sdpa,
        ffn=6 * parameters.ffn,
        head=6 * config.vocab_size * config.d_model,
    )


def relative_flops(
    config: ModelConfig, whole: ModelConfig, sequence_length: int
) -> float:
    """Returns the FLOPs of a dense step of `config` over those of a dense step of
    `whole`."""
    own, other = (flops_per_token(of, sequence_length) for of in (config, whole))
    return own.total() / other.total()


@dataclass(frozen=True, kw_only=True)
class KernelFactors:
    """The assumed speed of a sparse GEMM, as a multiple of the dense one of the same
    shape.

    Measure with the benchmarks of this repository and pass your own.
    """

    two_four: float = 1.5
    """The speed-up of a GEMM with one 2:4 operand, at most 2. Micro-benchmark quoted
    for arXiv 2602.06183 (H200, cuSPARSELt-class kernels)."""
    grouped_efficiency: float = 1.0
    """The share of the factor experts / experts_per_token that a grouped GEMM realises.
    With `two_four` the default gives 6 for 4 experts (V:2:16), inside the 4 to 7 that
    kernels for this format reach."""


def gemm_speedups(
    config: ModelConfig,
    sparsity: FFNSparsity,
    factors: KernelFactors = KernelFactors(),
) -> tuple[float, ...]:
    """Returns the assumed speed-up s_i of each FFN GEMM, in the order of
    `GEMM_NUMBERS`."""
    routed = max(1.0, _routing_factor(sparsity) * factors.grouped_efficiency)
    return _gemm_factors(config, sparsity, factors.two_four, routed)


def predicted_speedup(
    ffn_share: float, gemm_speedups: Sequence[float], overhead: float = 0.0
) -> float:
    """Returns dense step time / sparse step time: 1 / ((1 - f) + f mean(1 / s_i) + o).

    Args:
      ffn_share: f, the FFN's share of a dense step's time (or FLOPs, if the step is
        compute-bound).
      gemm_speedups: s_i of the FFN's GEMMs, all of equal cost.
      overhead: o, the time of routing, packing and permuting, as a share of the dense
        step.
    """
    if not 0.0 <= ffn_share <= 1.0:
        raise ValueError(
            f"ffn_share={ffn_share} is not in [0, 1]: it is the FFN's share of a step"
        )
    if not gemm_speedups or min(gemm_speedups) <= 0:
        raise ValueError(
            f"gemm_speedups={tuple(gemm_speedups)} must be positive factors, one for "
            f"each GEMM of the FFN; 1 for a GEMM that stays dense"
        )
    remaining = sum(1 / s for s in gemm_speedups) / len(gemm_speedups)
    return 1 / ((1 - ffn_share) + ffn_share * remaining + overhead)


LOWER_CLOCK = 0.04
"""The share by which a dense step took longer on an H200, of 134 M to 7 B parameters,
once the process had run a kernel that uses sparse tensor cores (experiments/LOG.md,
2026-11-22)."""


def whole_run_speedup(sparse_step: float, sparse_share: float) -> float:
    """Returns dense run time / run time: 1 / (q / sparse_step + 1 - q), q =
    `sparse_share` of the steps being sparse."""
    if not 0.0 <= sparse_share <= 1.0:
        raise ValueError(
            f"sparse_share={sparse_share} is not in [0, 1]: it is the share of the "
            f"run's steps that are sparse"
        )
    return 1 / (sparse_share / sparse_step + (1 - sparse_share))


@dataclass(frozen=True, kw_only=True)
class MemoryBytes:
    """The bytes on one device in a training step, by use. The peak is below `total`
    where uses do not overlap, and above it by the compiler's temporaries, among them
    copies of weights in the compute dtype and a layer's gradients before they are
    reduced."""

    parameters: int
    """The float32 master weights."""
    moments: int
    """AdamW's two moments, float32."""
    gradients: int
    """The gradients of all parameters at once, float32."""
    packed: int
    """S(W) of the sparse weights, as `Compressed` holds them: half the values in the
    compute dtype, and one byte of position for each. `Packed`, on Hopper, takes three
    quarters of that."""
    gathered: int
    """The largest set of weights that is held whole over fsdp at one time, in the
    compute dtype: a layer's, or the head. With remat "none" attention's of all layers
    are added, which the backward reads again. 0 where fsdp is 1."""
    activations: int
    """The activations that are saved between forward and backward."""
    logits: int
    """The logits, float32, and their gradient in the compute dtype."""

    @property
    def total(self) -> int:
        state = self.parameters + self.moments + self.gradients + self.packed
        return state + self.gathered + self.activations + self.logits


def memory_bytes(
    config: ModelConfig,
    *,
    tokens_per_device: int,
    mesh: MeshConfig = ONE_DEVICE,
    sparsity: FFNSparsity = DENSE,
) -> MemoryBytes:
    """Returns the memory of one device of a mesh.

    Matrices, their gradients, moments and packed values are split over fsdp x tensor,
    norm scales are on every device. Over tensor are split: query, key, value,
    attention's result, the FFN's hidden values, the logits.

    Activations, per token and layer, in elements of the compute dtype, with flash
    attention (scores are never stored):
      remat "none": x, two normed inputs, query, key, value, attention's result, the
        residual between the branches, and the FFN's hidden values (relu2: relu(Y1), if
        routed of a token's experts only, and without mask_reuse of all neurons besides
        where the weight gradients are dense; gated: gate and up).
      remat "full": x; and one layer's "none" while it is recomputed.
      remat "dots": x and the outputs of the plain GEMMs: query, key, value, attention's
        projection, and the FFN's hidden values of all neurons; and one layer's "none".
        A GEMM that a kernel of ours runs is recomputed instead: for a sparse FFN this
        is an upper bound.
    The embedding's rows and what the head reads are one x each. Logits are float32,
    their gradient is of the compute dtype.

    Args:
      tokens_per_device: of one micro-batch, on one of data x fsdp parts.
      mesh: `data` is not read, for replicas hold the same.
    """
    d, branches = config.d_model, 2 if config.gated else 1
    element, tensor = _element(config), mesh.tensor
    parameters = parameter_count(config)
    matrices = (parameters.total - parameters.norms) // (mesh.fsdp * tensor)
    held = matrices + parameters.norms
    qkv = (d + 2 * config.kv_heads * config.head_dim) // tensor
    mixed = d // tensor
    hidden = branches * config.d_hidden // tensor
    kept_hidden = int(hidden / _routing_factor(sparsity))
    sums_over_rows = sparsity.weight_gradients == "expert_columns"
    if sparsity.experts and not sparsity.mask_reuse and not sums_over_rows:
        kept_hidden += hidden
    everything = element * (4 * d + mixed + qkv + kept_hidden)
    per_layer, recomputed = {
        "none": (everything, 0),
        "full": (element * d, everything),
        "dots": (element * (2 * d + qkv + hidden), everything),
    }[config.remat]
    saved = config.layers * per_layer + recomputed + 2 * d * element
    packed = 0
    if sparsity.weights is not None:
        packed = parameters.ffn // 2 * (element + 1) // (mesh.fsdp * tensor)
    return MemoryBytes(
        parameters=4 * held,
        moments=8 * held,
        gradients=4 * held,
        packed=packed,
        gathered=_largest_gathered(config, mesh, sparsity),
        activations=tokens_per_device * saved,
        logits=tokens_per_device * config.vocab_size // tensor * (4 + element),
    )


def _largest_gathered(
    config: ModelConfig, mesh: MeshConfig, sparsity: FFNSparsity
) -> int:
    if mesh.fsdp == 1:
        return 0
    whole = gathered_bytes(config, sparsity)
    ffn = max(whole.ffn_forward, whole.ffn_backward)
    if config.remat == "none":
        kept = config.layers * whole.attention
        return (kept + max(ffn, whole.head)) // mesh.tensor
    return max(whole.attention + ffn, whole.head) // mesh.tensor


@dataclass(frozen=True, kw_only=True)
class GatheredBytes:
    """The bytes of the weights that the GEMMs of one layer, and the head, read, each
    matrix whole.

    Numbers are in the compute dtype. A 2:4 weight travels compressed: half the values,
    and two bits of position for each, which is 9/16 of the dense weight in bfloat16.
    """

    attention: int
    ffn_forward: int
    """The bytes of S(W1) for GEMM 1 and of W2 for GEMM 2."""
    ffn_backward: int
    """The bytes of S(W2^T) for GEMM 3 and of W1 for GEMM 4."""
    ffn_recomputed: int
    """The bytes that GEMM 1 reads once more in the backward: `ModelConfig.remat`."""
    head: int


def gathered_bytes(config: ModelConfig, sparsity: FFNSparsity = DENSE) -> GatheredBytes:
    """Returns the bytes of the weights that one layer and the head read.

    With remat GEMM 1 runs again in the backward. Where its weight is dense that costs
    no gather: GEMM 4 reads the same one, or ("dots") the output was kept.
    """
    element, layers = _element(config), config.layers
    parameters = parameter_count(config)
    dense = element * config.d_model * config.d_hidden // config.groups
    read = dense
    if sparsity.weights is not None:
        read = config.d_model * config.d_hidden // 2 * (4 * element + 1) // 4
    into_hidden = 2 if config.gated else 1
    recomputes = config.remat != "none" and sparsity.weights is not None
    return GatheredBytes(
        attention=element * parameters.attention // layers,
        ffn_forward=into_hidden * read + dense,
        ffn_backward=read + into_hidden * dense,
        ffn_recomputed=into_hidden * read if recomputes else 0,
        head=element * parameters.embedding,
    )


@dataclass(frozen=True, kw_only=True)
class CommunicationBytes:
    """The bytes that one device receives per optimiser step, by purpose."""

    gathered_weights: int
    """The bytes of all-gathers of weights over fsdp."""
    reduced_gradients: int
    """The bytes of reduce-scatters of gradients over fsdp and of their all-reduces over
    data, float32."""
    reduced_activations: int
    """The bytes of all-reduces of activations over tensor, in the compute dtype."""
    exchanged_tokens: int
    """The bytes of all-to-alls over fsdp: a device has columns of the embedding, not
    tokens."""

    @property
    def total(self) -> int:
        weights = self.gathered_weights + self.reduced_gradients
        return weights + self.reduced_activations + self.exchanged_tokens


def communication_bytes(
    config: ModelConfig,
    mesh: MeshConfig,
    sparsity: FFNSparsity,
    micro_batches: int,
    tokens_per_device: int,
) -> CommunicationBytes:
    """Returns the bytes that a device receives in one optimiser step on a mesh with
    `data` set.

    Of n devices and a whole of S bytes, each receives S (n - 1) / n in an all-gather
    and in a reduce-scatter, and twice that in a ring all-reduce.

    Assumed, in every micro-batch:
      weights: a layer's are gathered in the forward and again in the backward, as
        `gathered_bytes` says, attention's with remat "none" only once; the head once,
        since its backward follows its forward.
      gradients: reduce-scattered over fsdp, then all-reduced over data; those of the
        embedding, complete for its columns, only over data; of norm scales over both.
      activations: per layer, attention's and the FFN's output in the forward, and the
        gradients of their inputs in the backward; with remat "full" attention's output
        once more. Also the gradient of what the head reads, and in float32 the
        embedding's rows.
      tokens: the embedding's rows, and their gradients.
    These bytes were read from compiled steps, except where XLA on CPUs does more than
    it must: it sums what could be scattered, and what query, key and value give back
    one by one. They were not measured on GPUs. Not counted are scalars, and a few
    numbers per token for the softmax over a split vocabulary and for experts chosen by
    activation energy.

    Args:
      tokens_per_device: tokens of one micro-batch on one of data x fsdp parts.
    """
    element, layers = _element(config), config.layers
    parameters, whole = parameter_count(config), gathered_bytes(config, sparsity)
    layer = whole.ffn_forward + whole.ffn_backward + whole.ffn_recomputed
    layer += whole.attention * (1 if config.remat == "none" else 2)
    weights = (layers * layer + whole.head) // mesh.tensor

    norms, embedding = 4 * parameters.norms, 4 * parameters.embedding // mesh.tensor
    scattered = 4 * (parameters.attention + parameters.ffn) // mesh.tensor + embedding
    gradients = (
        _received(scattered, mesh.fsdp)
        + 2 * _received((scattered + embedding) // mesh.fsdp, mesh.data)
        + 2 * _received(norms, mesh.token_shards)
    )

    token = tokens_per_device * config.d_model
    sums = layers * (5 if config.remat == "full" else 4) + 1
    activations = token * (sums * element + 4)
    return CommunicationBytes(
        gathered_weights=micro_batches * _received(weights, mesh.fsdp),
        reduced_gradients=micro_batches * gradients,
        reduced_activations=micro_batches * 2 * _received(activations, mesh.tensor),
        exchanged_tokens=micro_batches * 2 * _received(token * element, mesh.fsdp),
    )


def _received(whole: int, devices: int) -> int:
    return whole * (devices - 1) // devices


def _element(config: ModelConfig) -> int:
    """Returns the bytes of a number in the compute dtype."""
    return {"float32": 4, "bfloat16": 2}[config.dtype]


def _routing_factor(sparsity: FFNSparsity) -> float:
    """Returns E / g, how many times fewer neurons a token meets than without a
    router."""
    return (sparsity.experts or 1) / sparsity.experts_per_token


def _gemm_factors(
    config: ModelConfig, sparsity: FFNSparsity, two_four: float, routed: float
) -> tuple[float, ...]:
    """Returns how many times cheaper each GEMM is: `two_four` where an operand is 2:4,
    `routed` where it is computed by expert."""
    weight = two_four if sparsity.weights else 1.0
    into_hidden = weight * (routed if sparsity.skip_blocks else 1.0)
    back_into_hidden = weight * (routed if sparsity.da_by_expert else 1.0)
    activation = 1.0
    if sparsity.activations is not None:
        activation = two_four
        activation *= 1.0 if isinstance(sparsity.activations, NM) else routed
    gradient = routed if sparsity.weight_gradients == "expert_columns" else 1.0
    if sparsity.token_sparsity is not None:
        # Amdahl over the features: a share of them stays dense along the tokens.
        dense = sparsity.dense_features
        gradient /= dense + (1 - dense) / two_four
    by_number = {
        1: into_hidden,
        2: activation,
        3: back_into_hidden,
        4: activation,
        5: gradient,
        6: gradient,
    }
    return tuple(by_number[number] for number in GEMM_NUMBERS[config.activation])
