"""Which settings of the sparsity of an FFN fit together."""

from typing import TYPE_CHECKING

from sparsejax.sparsity.patterns import NM, VNM

if TYPE_CHECKING:
    from sparsejax.feed_forward.spec import FFNSparsity


def check_experts(sparsity: "FFNSparsity") -> None:
    """Raises ValueError where settings of the experts do not fit the activation
    pattern, or one another."""
    activations = sparsity.activations
    venom = isinstance(activations, VNM)
    if isinstance(activations, VNM):
        if activations.n not in (2, 4):
            raise ValueError(
                f"activations={activations} keeps n={activations.n} of four; sparse "
                f"tensor cores need n=2, and n=4 is dense inside an expert"
            )
        if not 1 <= sparsity.experts_per_token <= activations.experts:
            raise ValueError(
                f"experts_per_token={sparsity.experts_per_token} is not in "
                f"[1, {activations.experts}], the experts of {activations} (m / 4)"
            )
    if sparsity.skip_blocks and not venom:
        raise ValueError(
            f"skip_blocks=True needs a V:N:M activation pattern, not {activations}; "
            f"set activations=VNM(v, 2, m)"
        )
    if sparsity.skip_blocks and not sparsity.router.before_up:
        raise ValueError(
            f"skip_blocks=True with router={sparsity.router.name!r}: its choice is "
            f"only known after GEMM 1 over all neurons; choose router="
            f"'nearest_centre', 'token_hash' or 'learned', or skip_blocks=False"
        )
    if sparsity.skip_blocks and sparsity.weight_gradients != "expert_columns":
        raise ValueError(
            f"skip_blocks=True leaves nothing outside the token's experts, so "
            f"weight_gradients={sparsity.weight_gradients!r} cannot be computed; use "
            f"'expert_columns'"
        )
    most = sparsity.most_experts_per_token
    if most is not None:
        if not sparsity.experts or not sparsity.router.scores_are_energies:
            raise ValueError(
                f"most_experts_per_token={most} needs a V:N:M activation pattern and a "
                f"router that knows the experts' shares of a token's energy, not "
                f"activations={activations}, router={sparsity.router.name!r}; leave it "
                f"out or use router='activation_energy' or 'learned'"
            )
        if not sparsity.experts_per_token < most <= sparsity.experts:
            raise ValueError(
                f"most_experts_per_token={most} is not above experts_per_token="
                f"{sparsity.experts_per_token}, the mean, and at most "
                f"{sparsity.experts}, the experts of {activations}"
            )
    target = sparsity.skipped_energy
    if target is not None and not (venom and 0 < target < 1):
        raise ValueError(
            f"skipped_energy={target} with activations={activations} is not a share in "
            f"(0, 1) of the energy of a token with a V:N:M activation pattern; use one "
            f"such as 0.05, or leave it out"
        )
    if sparsity.mean_compensation and not venom:
        raise ValueError(
            f"mean_compensation=True needs a V:N:M activation pattern, not "
            f"{activations}: without experts no token skips a neuron; set activations="
            f"VNM(v, 2, m)"
        )
    if sparsity.weight_gradients == "expert_columns" and not venom:
        raise ValueError(
            f"weight_gradients='expert_columns' needs a V:N:M activation pattern, not "
            f"{activations}; use 'dense' or activations=VNM(v, 2, m)"
        )


def check_backward(sparsity: "FFNSparsity") -> None:
    """Raises ValueError where the backward could not be exact though it should."""
    along_tokens = sparsity.token_sparsity
    approximate = {
        "mask_reuse=False": not sparsity.mask_reuse,
        f"token_sparsity={along_tokens!r}": along_tokens is not None,
    }
    for setting, is_set in approximate.items():
        if sparsity.exact_gradients and is_set:
            raise ValueError(
                f"exact_gradients=True with {setting}, which approximates the "
                f"gradients; leave one of them out"
            )


def check_patterns(sparsity: "FFNSparsity") -> None:
    """Raises ValueError where a pattern is none, and says which one was meant."""
    if not isinstance(sparsity.weights, NM | None):
        raise ValueError(
            f"weights={sparsity.weights!r} must be a 2:4 pattern, whose groups lie "
            f"along d_model, or None for dense weights; use NM(2, 4)"
        )
    if not isinstance(sparsity.activations, NM | VNM | None):
        raise ValueError(
            f"activations={sparsity.activations!r} must be a pattern along the neurons "
            f"or None for dense activations; use NM(2, 4), or VNM(v, 2, m), or "
            f"VNM(v, 4, m), with m four times the number of experts"
        )
