"""What may be sparse in an FFN: settings and sizes that do not fit are refused."""

from dataclasses import dataclass

import jax.numpy as jnp
import pytest

from sparsejax.feed_forward.sparsity import FFNSparsity
from sparsejax.feed_forward.spec import FFNSpec
from sparsejax.routing.routers import ActivationEnergy, TokenHash
from sparsejax.sparsity.patterns import NM, VNM
from tests.support.oracles.ffn_cases import TWO_FOUR

VENOM = VNM(8, 2, 16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": NM(1, 4)}, r"weights=NM\(n=1, m=4\) is not 2:4.*use NM\(2, 4\)"),
        ({"activations": NM(2, 8)}, r"activations=NM\(n=2, m=8\) is not 2:4"),
        ({"activations": VNM(8, 1, 16)}, "keeps n=1 of four; .* need n=2"),
        ({"activations": VNM(8, 3, 16)}, "keeps n=3 of four; .* n=4 is dense inside"),
        (
            {"activations": VENOM, "experts_per_token": 5},
            r"experts_per_token=5 is not in \[1, 4\]",
        ),
        (
            {"activations": VENOM, "experts_per_token": 0},
            r"experts_per_token=0 is not in \[1, 4\]",
        ),
        ({"activations": VNM(8, 2, 18)}, "m=18 is not a multiple of 4.*use m=20"),
        ({"skip_blocks": True}, "needs a V:N:M activation pattern, not None"),
        (
            {"skip_blocks": True, "activations": TWO_FOUR},
            r"not NM\(n=2, m=4\); set activations=VNM",
        ),
        (
            {
                "skip_blocks": True,
                "activations": VENOM,
                "router": ActivationEnergy(),
                "weight_gradients": "expert_columns",
            },
            "only known after GEMM 1 over all neurons; choose router=",
        ),
        (
            {"skip_blocks": True, "activations": VENOM},
            "weight_gradients='dense' cannot be computed; use 'expert_columns'",
        ),
        (
            {"weight_gradients": "expert_columns", "activations": TWO_FOUR},
            "needs a V:N:M activation pattern, not NM",
        ),
        ({"weights": "2:4"}, r"weights='2:4' must be a 2:4 pattern.*use NM\(2, 4\)"),
        ({"weights": (2, 4)}, r"weights=\(2, 4\) must be a 2:4 pattern"),
        ({"weights": VENOM}, r"weights=VNM\(.*must be a 2:4 pattern.*use NM\(2, 4\)"),
        (
            {"activations": "2:4"},
            r"activations='2:4' must be a pattern .* use NM\(2, 4\), or VNM\(v, 2, m\)",
        ),
        (
            {"router": "truemass"},
            "router='truemass' must be one of 'nearest_centre', 'token_hash', 'activat",
        ),
        ({"router": None}, "router=None must be one of 'nearest_centre', "),
        (
            {"activations": VENOM, "weight_gradients": "expert"},
            "weight_gradients='expert' must be one of 'dense', 'expert_columns'$",
        ),
        (
            {"token_sparsity": "mag"},
            "token_sparsity='mag' must be one of 'magnitude', 'mvue', .* or None$",
        ),
        (
            {"activations": VENOM, "experts_per_token": 1.0},
            r"experts_per_token=1\.0 must be an int$",
        ),
        ({"experts_per_token": True}, "experts_per_token=True must be an int$"),
        (
            {"experts_per_token": 0},
            "experts_per_token=0 must be at least 1; leave it out where activations=N",
        ),
        (
            {"activations": TWO_FOUR, "experts_per_token": -3},
            "experts_per_token=-3 must be at least 1; leave it out",
        ),
        (
            {"activations": VENOM, "skip_blocks": "yes"},
            "skip_blocks='yes' must be True or False$",
        ),
        ({"mask_reuse": 1}, "mask_reuse=1 must be True or False$"),
        ({"permute_tokens": None}, "permute_tokens=None must be True or False$"),
        (
            {"exact_gradients": True, "mask_reuse": False},
            "exact_gradients=True with mask_reuse=False, which approximates",
        ),
        (
            {"exact_gradients": True, "token_sparsity": "magnitude"},
            "exact_gradients=True with token_sparsity='magnitude', which approximates",
        ),
        ({"dense_features": "5 %"}, "dense_features='5 %' must be a float$"),
        ({"dense_features": 1.0}, r"dense_features=1.0 is not in \[0, 1\)"),
        ({"dense_features": -0.1}, r"dense_features=-0.1 is not in \[0, 1\)"),
    ],
)
def test_impossible_combination_says_what_to_change(options, message):
    with pytest.raises(ValueError, match=message):
        FFNSparsity(**options)


@pytest.mark.parametrize(
    ("sparsity", "d_model", "d_hidden", "message"),
    [
        (FFNSparsity(weights=TWO_FOUR), 10, 64, "d_model=10 is not a mu.* pad to 12"),
        (
            FFNSparsity(activations=TWO_FOUR),
            8,
            66,
            "d_hidden=66 is not a multiple of m=4.*pad to 68",
        ),
        (
            FFNSparsity(activations=VENOM),
            8,
            72,
            "d_hidden=72 is not a multiple of m=16.*pad to 80",
        ),
        (
            FFNSparsity(
                activations=VNM(6, 2, 16),
                weight_gradients="expert_columns",
                token_sparsity="magnitude",
            ),
            8,
            64,
            "multiples of 6, but token_sparsity='magnitude' needs groups of four",
        ),
    ],
)
def test_sizes_that_do_not_divide(sparsity, d_model, d_hidden, message):
    def spec(d_model, d_hidden):
        return FFNSpec(
            tokens=3,
            d_model=d_model,
            d_hidden=d_hidden,
            dtype="float32",
            sparsity=sparsity,
        )

    with pytest.raises(ValueError, match=message):
        spec(d_model, d_hidden)


def test_arrays_that_nothing_would_read_or_move_are_refused():
    @dataclass(frozen=True)
    class ReadsTooLate(ActivationEnergy):
        def initial_state(self, w_up, experts):
            return {"load": jnp.ones(experts)}

    @dataclass(frozen=True)
    class LearnsNothing(TokenHash):
        learns = True

    with pytest.raises(ValueError, match="reads Y1, where a router is asked without"):
        FFNSparsity(activations=VNM(8, 2, 8), router=ReadsTooLate())
    with pytest.raises(ValueError, match="learns and keeps no arrays"):
        FFNSparsity(activations=VNM(8, 2, 8), router=LearnsNothing())


def test_a_router_that_asks_for_what_nobody_gives_is_refused():
    @dataclass(frozen=True)
    class Misspelt(TokenHash):
        reads = "token_id"

    with pytest.raises(ValueError, match="reads of router=.*'token_id' must be .*'x'"):
        FFNSparsity(activations=VNM(8, 2, 8), router=Misspelt())


def test_errors_offer_the_routers_that_can():
    with pytest.raises(ValueError, match="'same_experts' or 'learned', or skip_blocks"):
        FFNSparsity(
            activations=VNM(8, 2, 8),
            router=ActivationEnergy(),
            skip_blocks=True,
            weight_gradients="expert_columns",
        )
    with pytest.raises(
        ValueError,
        match="use router='activation_energy', 'activation_energy_fp8' or 'learned'",
    ):
        FFNSparsity(
            activations=VNM(8, 2, 16), router=TokenHash(), most_experts_per_token=2
        )
