"""The FLOPs of a step, and the speed-up that sparse GEMMs promise.

Counts are per token where the name says so, a multiply-add is two FLOPs, and forward
plus backward is three times the forward. Speed-ups rest on `KernelFactors`, which are
assumptions until a benchmark on the machine at hand replaces them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sparsejax.config import ModelConfig
from sparsejax.cost_model.hardware import FP8_GAIN
from sparsejax.cost_model.parameters import parameter_count
from sparsejax.feed_forward.sparsity import FFNSparsity

_GATED = (1, 1, 2, 3, 4, 4, 5, 5, 6)
GEMM_NUMBERS = {"relu2": (1, 2, 3, 4, 5, 6), "swiglu": _GATED, "reglu2": _GATED}
"""The numbers of the FFN's GEMMs, each of 2 tokens d_model d_hidden FLOPs: the rows of
the table in `feed_forward.spec` that they stand in. A gate doubles rows 1, 4 and 5."""


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
    # Forward: Q K^T and P V are each 2 * sequence_length * query_width per token.
    sdpa = 3 * config.layers * 4 * sequence_length * config.query_width
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


BREAK_EVEN_SPEEDS = (1.08, 1.33)
"""How many times as fast as dense ones the sparse steps of the recipe `experts` must be
for a whole run to reach the loss of the best dense run in as many seconds: the least
and the greatest over the comparisons in docs/results.md."""


def whole_run_speedup(sparse_step: float, sparse_share: float) -> float:
    """Returns dense run time / run time: 1 / (q / sparse_step + 1 - q), q =
    `sparse_share` of the steps being sparse."""
    if not 0.0 <= sparse_share <= 1.0:
        raise ValueError(
            f"sparse_share={sparse_share} is not in [0, 1]: it is the share of the "
            f"run's steps that are sparse"
        )
    return 1 / (sparse_share / sparse_step + (1 - sparse_share))


def _routing_factor(sparsity: FFNSparsity) -> float:
    """Returns E / g, how many times fewer neurons a token meets than without a
    router."""
    return (sparsity.experts or 1) / sparsity.experts_per_token


def _gemm_factors(
    config: ModelConfig, sparsity: FFNSparsity, two_four: float, routed: float
) -> tuple[float, ...]:
    """Returns how many times cheaper each GEMM is: `two_four` where an operand is 2:4,
    `routed` where it is computed by expert."""
    into_hidden = two_four if sparsity.weights else 1.0
    into_hidden *= routed if sparsity.skip_blocks else 1.0
    if sparsity.chooses_in_fp8:
        # The router reads a product of all neurons, in 8-bit floats.
        into_hidden = 1 / (1 / into_hidden + 1 / FP8_GAIN)
    back_into_hidden = two_four if sparsity.backward_weights else 1.0
    back_into_hidden *= routed if sparsity.da_by_expert else 1.0
    activation = two_four if sparsity.in_expert is not None else 1.0
    activation *= routed if sparsity.experts else 1.0
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
