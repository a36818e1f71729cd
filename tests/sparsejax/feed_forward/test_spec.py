"""One call of an FFN: what it refuses, and what it explains."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.device import Device
from sparsejax.feed_forward.ffn import ffn
from sparsejax.feed_forward.gated_ffn import GatedFFNSpec, gated_ffn
from sparsejax.feed_forward.sparsity import DENSE, FFNSparsity
from sparsejax.feed_forward.spec import FFNSpec
from sparsejax.sparsity.patterns import VNM
from tests.support.devices import hopper
from tests.support.oracles.ffn_cases import TWO_FOUR, all_sparsities, name_of

VENOM = VNM(8, 2, 16)


def test_dense_sizes_are_free():
    assert FFNSpec(tokens=1, d_model=3, d_hidden=5, dtype="float32").gemms()


@pytest.mark.parametrize(
    ("x", "w_up", "w_down", "message"),
    [
        ((2, 3, 8), (8, 16), (16, 8), "must be matrices; flatten batch axes"),
        ((3, 8), (8, 16), (16, 4), r"shapes do not chain: x \(3, 8\)"),
        ((3, 4), (8, 16), (16, 8), r"shapes do not chain: x \(3, 4\)"),
    ],
)
def test_shapes_that_do_not_chain(x, w_up, w_down, message):
    with pytest.raises(ValueError, match=message):
        FFNSpec.of(*(jnp.zeros(shape) for shape in (x, w_up, w_down)), DENSE)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.int32, jnp.bool_, jnp.complex64])
def test_a_dtype_that_no_ffn_computes_in_is_refused_by_the_operands_name(dtype):
    shapes = {"x": (3, 8), "w_up": (8, 16), "w_down": (16, 8)}
    for wrong in shapes:
        operands = {
            name: jnp.zeros(shape, dtype if name == wrong else jnp.float32)
            for name, shape in shapes.items()
        }
        name = np.dtype(dtype).name
        message = f"^{wrong} has dtype {name}, .* {wrong}.astype\\(jnp.bfloat16\\)$"
        for run in (ffn, lambda **operands: FFNSpec.of(**operands, sparsity=DENSE)):
            with pytest.raises(ValueError, match=message):
                run(**operands)
        if wrong != "x":
            operands["w_gate"] = operands["w_up"]
        else:
            operands["w_gate"] = jnp.zeros((8, 16))
        with pytest.raises(ValueError, match="has dtype"):
            gated_ffn(**operands)


def test_numpys_float64_is_what_jax_makes_of_it():
    operands = [np.zeros(shape) for shape in ((3, 8), (8, 16), (16, 8))]
    assert FFNSpec.of(*operands, DENSE).dtype == "float32"
    gated = operands[0], operands[1], operands[1], operands[2]
    assert GatedFFNSpec.of(*gated, DENSE).dtype == "float32"
    with jax.enable_x64(True):
        assert FFNSpec.of(*operands, DENSE).dtype == "float64"
        assert GatedFFNSpec.of(*gated, DENSE).dtype == "float64"


def test_what_is_no_sparsity_is_named():
    with pytest.raises(ValueError, match="sparsity='2:4' must be of type FFNSparsity"):
        spec_of("2:4")


def spec_of(sparsity, **changes):
    sizes = {"tokens": 32, "d_model": 8, "d_hidden": 64, "dtype": "float32"}
    return FFNSpec(**(sizes | changes), sparsity=sparsity)


@pytest.mark.parametrize("sparsity", list(all_sparsities()), ids=name_of)
def test_gemms_follow_the_table(sparsity):
    """Checks which operand is sparse in GEMMs 1 to 6: the table of the six
    equations."""
    weight = "weight" if sparsity.weights else None
    dense_inside = sparsity.activations == VNM(8, 4, 16)
    activation = "input" if sparsity.activations and not dense_inside else None
    tokens = sparsity.token_sparsity is not None
    gemms = spec_of(sparsity).gemms()
    assert [gemm.sparse_operand for gemm in gemms] == [
        weight,
        activation,
        None if sparsity.exact_gradients else weight,
        activation,
        "gradient" if tokens else None,
        "input" if tokens else None,
    ]
    assert all((g.pattern is None) == (g.sparse_operand is None) for g in gemms)
    venom, skip = sparsity.experts is not None, sparsity.skip_blocks
    columns = sparsity.weight_gradients == "expert_columns"
    # dA outside a token's experts is read where dense gradients unmask it.
    read = not sparsity.mask_reuse and not columns
    two_four = sparsity.weights is not None and not sparsity.exact_gradients
    by_expert = skip or (venom and (two_four or dense_inside) and not read)
    grouped = [skip, venom, by_expert, venom, columns, columns]
    assert [gemm.experts for gemm in gemms] == [4 if g else None for g in grouped]
    t, d, f = 32, 8, 64
    assert {gemm.tokens for gemm in gemms} == {t}
    widths = [(d, f), (f, d), (d, f), (f, d), (d, f), (f, d)]
    assert [(gemm.d_in, gemm.d_out) for gemm in gemms] == widths
    assert [gemm.is_weight_gradient for gemm in gemms] == [False] * 4 + [True] * 2
    assert all(gemm.dense_flops == 2 * t * d * f for gemm in gemms)


@pytest.mark.parametrize("sparsity", list(all_sparsities()), ids=name_of)
def test_explain_counts_what_is_executed(sparsity):
    """Without sparse tensor cores only whole experts are skipped."""
    share = sparsity.experts_per_token / (sparsity.experts or 1)
    decisions = spec_of(sparsity).explain()
    assert len(decisions) == 6
    for decision in decisions:
        assert decision.backend == "xla"
        assert decision.executed_share == (share if decision.spec.experts else 1.0)
        assert decision.reason.startswith("the first that can run it; mosaic_sm90: ")
    for decision in spec_of(sparsity).explain("reference"):
        assert (decision.executed_share, decision.reason) == (1.0, "as requested")


def test_explain_names_the_path():
    everything = FFNSparsity(weights=TWO_FOUR, activations=VENOM)
    paths = [decision.path for decision in spec_of(everything).explain()]
    assert paths == [
        "dense GEMM over the masked weight; skips nothing",
        *["grouped GEMM over 4 experts, a loop over row tiles"] * 3,
        "dense GEMM by XLA",
        "dense GEMM by XLA",
    ]
    on_a100 = spec_of(everything, device=hopper.A100, tokens=16384)
    on_gpu = [d.path for d in on_a100.explain()]
    assert on_gpu[1].startswith("grouped GEMM over 4 experts, a loop over chunks of")
    assert on_gpu[4] == "dense GEMM by cuBLAS"


@pytest.mark.parametrize(
    ("sparsity", "reason"),
    [
        (FFNSparsity(weights=TWO_FOUR), "needs a Hopper GPU, not cpu"),
        (FFNSparsity(activations=VNM(4, 2, 16)), "needs a Hopper GPU, not cpu"),
    ],
)
def test_missing_kernel_is_named(sparsity, reason):
    with pytest.raises(NotImplementedError, match=reason):
        spec_of(sparsity).explain("mosaic_sm90")


def test_a_backend_of_sparse_gemms_leaves_a_dense_ffn_to_the_library():
    decisions = spec_of(DENSE).explain("mosaic_sm90")
    assert {d.backend for d in decisions} == {"xla"}


def test_spec_is_hashable_and_reads_the_call():
    x, w_up, w_down = (
        jax.ShapeDtypeStruct(s, "bfloat16") for s in ((3, 8), (8, 16), (16, 8))
    )
    spec = FFNSpec.of(x, w_up, w_down, DENSE)
    assert spec == FFNSpec(
        tokens=3,
        d_model=8,
        d_hidden=16,
        dtype="bfloat16",
        device=Device.of(jax.devices()[0]),
    )
    assert hash(spec) == hash(FFNSpec.of(x, w_up, w_down, DENSE))
    assert DENSE.is_dense and not FFNSparsity(weights=TWO_FOUR).is_dense
    assert FFNSparsity(token_sparsity="mvue").needs_key
    assert not FFNSparsity(token_sparsity="magnitude").needs_key
