"""Reported figures against plain loops and hand-made numbers."""

from dataclasses import replace
from operator import itemgetter
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sparsejax.config import MeshConfig, ModelConfig
from sparsejax.feed_forward.sparsity import DENSE, FFNSparsity
from sparsejax.models.transformer import Transformer
from sparsejax.ops.backend import Decision
from sparsejax.ops.gemm_spec import GemmSpec
from sparsejax.reports import metrics
from sparsejax.reports.metrics import (
    DensePeak,
    dense_peak,
    ffn_decisions,
    ffn_statistics,
    mask_flip_rate,
    model_statistics,
    speed,
    weight_masks,
)
from sparsejax.routing.dispatch import dispatch
from sparsejax.routing.named_routers import ROUTERS
from sparsejax.routing.routers import ActivationEnergy, TokenHash
from sparsejax.sparsity.patterns import NM, VNM

TWO_FOUR = FFNSparsity(weights=NM(2, 4), activations=NM(2, 4))
VENOM = FFNSparsity(
    weights=NM(2, 4), activations=VNM(4, 2, 16), weight_gradients="expert_columns"
)
MODEL = ModelConfig(
    vocab_size=64, d_model=16, layers=2, heads=2, kv_heads=2, d_hidden=32
)


def largest(values, count):
    """Indices of the largest; ties go to the lower."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]


def expected_statistics(x, w, sparsity, expert_index):
    """`ffn_statistics`, one token and one neuron at a time."""
    y = np.float64(x) @ np.float64(w)
    tokens, hidden = y.shape
    experts, chosen = sparsity.experts or 1, sparsity.experts_per_token
    size = hidden // experts
    natural = used = 0
    router, oracle, two_four = [], [], []
    counts = [0] * experts
    alive = set()
    for t in range(tokens):
        mass = [max(v, 0.0) ** 4 for v in y[t]]
        of_expert = [sum(mass[e * size : (e + 1) * size]) for e in range(experts)]
        best = largest(of_expert, chosen)
        mine = best if expert_index is None else list(expert_index[t])
        if sparsity.experts is None:
            mine = [0]
        for e in mine:
            counts[e] += 1
        kept_mass = 0.0
        for group in range(0, hidden, 4):
            two = [group + i for i in largest(y[t, group : group + 4], 2)]
            for f in range(group, group + 4):
                if y[t, f] <= 0:
                    continue
                natural += 1
                alive.add(f)
                inside = f // size in mine
                if inside and f in two:
                    kept_mass += mass[f]
                dense = sparsity.activations is None or sparsity.activations.n == 4
                if inside and (dense or f in two):
                    used += 1
        inside_mass = sum(of_expert[e] for e in mine)
        if sum(mass) > 0:
            router.append(inside_mass / sum(mass))
            oracle.append(sum(of_expert[e] for e in best) / sum(mass))
        if inside_mass > 0:
            two_four.append(kept_mass / inside_mass)
    report = {
        "natural_density": natural / (tokens * hidden),
        "density": used / (tokens * hidden),
        "two_four_mass": np.mean(two_four),
        "dead_neurons": 1 - len(alive) / hidden,
    }
    if sparsity.experts:
        report |= {
            "router_mass": np.mean(router),
            "oracle_mass": np.mean(oracle),
            "random_mass": chosen / experts,
            "tokens_per_expert": counts,
        }
    return report


def assert_equal_reports(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    "sparsity",
    [
        DENSE,
        TWO_FOUR,
        VENOM,
        replace(VENOM, experts_per_token=2),
        replace(VENOM, router=ActivationEnergy()),
    ],
    ids=["dense", "2:4", "one of four", "two of four", "activation energy"],
)
def test_the_statistics_of_a_network_are_those_of_plain_loops(sparsity):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(9, 8)).astype(np.float32)
    w = generator.normal(size=(8, 32)).astype(np.float32)
    x[4] = 0  # no mass at all
    w[:, 5] = 0  # never active
    w[:, 7] = w[:, 6]  # a tie in a group of four
    index = None
    if sparsity.experts and not sparsity.router.inside:
        orders = [generator.permutation(4) for _ in x]
        index = np.array([o[: sparsity.experts_per_token] for o in orders], np.int32)
    actual = ffn_statistics(jnp.asarray(x), jnp.asarray(w), sparsity, index)
    expected = expected_statistics(x, w, sparsity, index)
    assert_equal_reports(actual, expected)
    assert expected["dead_neurons"] >= 1 / 32
    if index is None and sparsity.experts:
        assert expected["router_mass"] == expected["oracle_mass"]
    elif sparsity.experts:
        assert expected["router_mass"] < expected["oracle_mass"]


def test_a_network_that_nothing_activates_has_finite_statistics():
    w = -jnp.ones((4, 16))
    index = jnp.zeros((3, 1), jnp.int32)
    report = ffn_statistics(jnp.ones((3, 4)), w, VENOM, index)
    assert all(bool(jnp.isfinite(value).all()) for value in report.values())
    assert float(report["dead_neurons"]) == 1
    assert float(report["router_mass"]) == float(report["density"]) == 0


def soft_thresholded(w):
    """Column by column, group by group along d."""
    out = np.zeros_like(w)
    for column in range(w.shape[1]):
        for group in range(0, w.shape[0], 4):
            sizes = np.abs(w[group : group + 4, column])
            third = np.sort(sizes)[1]
            for i in largest(sizes, 2):
                value = w[group + i, column]
                out[group + i, column] = np.sign(value) * (abs(value) - third)
    return out


@pytest.mark.parametrize(
    "sparsity",
    [
        DENSE,
        VENOM,
        replace(VENOM, router=TokenHash()),
        replace(VENOM, activations=VNM(4, 4, 16)),
    ],
)
def test_the_statistics_of_a_model_are_those_of_each_layer(sparsity):
    model = Transformer(MODEL, sparsity=sparsity, rngs=nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(1), (3, 7), 0, 64)
    report = model_statistics(model, tokens)
    _, inputs = model(tokens, capture_ffn_inputs=True)
    graph, stacked = nnx.split(model.blocks.ffn)
    np.testing.assert_array_equal(report.pop("beta"), model.blocks.ffn.scales[...])
    for layer in range(2):
        ffn = nnx.merge(graph, jax.tree.map(itemgetter(layer), stacked))
        x = inputs[layer].reshape(21, 16)
        w = np.asarray(ffn.w_up[...])
        if sparsity.weights:
            w = float(ffn.scales[...][0]) * soft_thresholded(w)
        index = ffn.route(x, tokens)
        expected = expected_statistics(
            np.asarray(x), w, sparsity, None if index is None else np.asarray(index)
        )
        assert_equal_reports({k: v[layer] for k, v in report.items()}, expected)


@pytest.mark.parametrize("sparsity", [DENSE, TWO_FOUR], ids=["dense", "2:4"])
def test_statistics_of_a_gated_ffn_are_those_of_its_activations(sparsity):
    generator = np.random.default_rng(0)
    x, w_gate, w_up = (generator.normal(size=s) for s in ((7, 8), (8, 24), (8, 24)))
    x, w_gate, w_up = (a.astype(np.float32) for a in (x, w_gate, w_up))
    a = np.maximum(x @ w_gate, 0) ** 2 * (x @ w_up)
    fours = np.abs(a).reshape(7, 6, 4)
    threshold = np.sort(fours, axis=2)[:, :, 2:3]
    kept = (fours >= threshold).reshape(a.shape)
    used = a if sparsity.activations is None else a * kept
    expected = {
        "natural_density": np.mean(a != 0),
        "density": np.mean(used != 0),
        "two_four_mass": np.mean(((a * kept) ** 2).sum(1) / (a**2).sum(1)),
        "dead_neurons": np.mean((a == 0).all(axis=0)),
    }
    report = ffn_statistics(x, w_up, sparsity, None, w_gate=w_gate, activation="reglu2")
    assert_equal_reports(report, expected)


def test_a_gated_model_with_squared_relu_reports_every_layer():
    config = replace(MODEL, activation="reglu2")
    model = Transformer(config, sparsity=TWO_FOUR, rngs=nnx.Rngs(0))
    report = model_statistics(model, jnp.arange(6)[None])
    assert report["beta"].shape == (2, 3)
    assert report["density"].shape == (2,)
    assert np.all(report["density"] <= 0.5 * (report["natural_density"] > 0))


def test_a_swiglu_model_reports_beta_alone():
    config = replace(MODEL, activation="swiglu")
    sparsity = FFNSparsity(weights=NM(2, 4))
    model = Transformer(config, sparsity=sparsity, rngs=nnx.Rngs(0))
    report = model_statistics(model, jnp.zeros((1, 3), jnp.int32))
    assert list(report) == ["beta"]
    assert report["beta"].shape == (2, 3)


def test_a_swiglu_model_with_experts_reports_its_router_too():
    config = replace(MODEL, activation="swiglu")
    sparsity = FFNSparsity(
        activations=VNM(4, 4, 16), router=ActivationEnergy(), experts_per_token=2
    )
    model = Transformer(config, sparsity=sparsity, rngs=nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 5), 0, 64)
    report = model_statistics(model, tokens)
    # The router is the oracle; the mass is that of silu(G) U, by hand for each layer.
    np.testing.assert_array_equal(report["router_mass"], report["oracle_mass"])
    _, inputs = model(tokens, capture_ffn_inputs=True)
    ffn = model.blocks.ffn
    for layer in range(2):
        x = np.asarray(inputs[layer], np.float64).reshape(10, 16)
        gate = x @ np.asarray(ffn.w_gate[...][layer], np.float64)
        a = gate / (1 + np.exp(-gate)) * (x @ np.asarray(ffn.w_up[...][layer]))
        mass = np.sort((a**2).reshape(10, 4, -1).sum(2), axis=1)
        expected = (mass[:, -2:].sum(1) / mass.sum(1)).mean()
        np.testing.assert_allclose(report["router_mass"][layer], expected, rtol=1e-5)
    assert report["tokens_per_expert"].sum() == 2 * 2 * 10
    assert "density" not in report


# Masks.


@pytest.mark.parametrize("activation", ["relu2", "swiglu", "reglu2"])
def test_masks_are_of_every_weight_that_may_be_sparse(activation):
    config = replace(MODEL, activation=activation)
    model = Transformer(config, rngs=nnx.Rngs(0))
    ffn = model.blocks.ffn
    masks = weight_masks(model)
    into_hidden = [ffn.w_up] if activation == "relu2" else [ffn.w_gate, ffn.w_up]
    weights = [np.asarray(w[...]) for w in into_hidden]
    weights.append(np.asarray(ffn.w_down[...]).swapaxes(1, 2))
    masks[-1] = masks[-1].swapaxes(1, 2)
    for w, mask in zip(weights, masks, strict=True):
        for layer in range(2):
            kept = soft_thresholded(w[layer]) != 0
            np.testing.assert_array_equal(mask[layer], kept)


def test_masks_of_a_width_that_groups_do_not_divide_do_not_exist():
    config = replace(MODEL, d_model=18, heads=1, kv_heads=1)
    assert weight_masks(Transformer(config, rngs=nnx.Rngs(0))) == []


def test_the_flip_rate_is_per_layer_and_the_mean_over_the_weights():
    before = [np.zeros((2, 4, 4), bool), np.zeros((2, 4, 8), bool)]
    after = [mask.copy() for mask in before]
    after[0][0, :2] = True  # half of layer 0 of the first weight
    after[1][1, 0, :8] = True  # a quarter of layer 1 of the second
    np.testing.assert_allclose(mask_flip_rate(before, after), [0.25, 0.125])


# Speed.


def decision(share: float) -> Decision:
    spec = GemmSpec(name="", tokens=1, d_in=1, d_out=1, dtype="float32")
    return Decision(spec=spec, backend="xla", path="", executed_share=share, reason="")


def test_speed_counts_the_dense_model_and_what_was_executed_apart():
    # By hand: per token and layer, 6 FLOPs per weight of attention and FFN; the causal
    # half of scores and values, 6 * sequence * d_model; 6 per weight of the head.
    sequence, rate = 10, 1e9
    attention, ffn, head = 4 * 16 * 16, 2 * 16 * 32, 16 * 64
    dense = 2 * (6 * attention + 6 * ffn + 6 * sequence * 16) + 6 * head
    decisions = [decision(share) for share in (1, 0.5, 1, 0.5, 0.25, 0.25)]
    skipped = 2 * 6 * ffn * (1 - 3.5 / 6)
    figures = speed(MODEL, sequence, decisions, rate, DensePeak(tflops=50, source=""))
    assert figures == pytest.approx(
        {
            "tokens_per_second": rate,
            "dense_equivalent_tflops": dense * 1e-3,
            "executed_tflops": (dense - skipped) * 1e-3,
            "mfu_dense_equivalent": dense * 1e-3 / 50,
            "mfu_executed": (dense - skipped) * 1e-3 / 50,
        }
    )


def test_the_utilisation_is_a_share_of_the_peak_of_all_devices():
    decisions = [decision(0.5)] * 6
    peak = DensePeak(tflops=50, source="")
    one, two = (speed(MODEL, 10, decisions, 1e9, peak, devices=d) for d in (1, 2))
    for name in one:
        assert two[name] == one[name] / (2 if name.startswith("mfu") else 1), name


@pytest.mark.parametrize("router", ROUTERS)
def test_every_router_is_timed(router, monkeypatch):
    """The shortest of five calls; two experts for every token."""
    seen = []
    monkeypatch.setattr(metrics, "dispatch", lambda *a: seen.append(a) or dispatch(*a))
    clock = iter([0, 5, 10, 12, 20, 23, 30, 34, 40, 46])
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: next(clock))
    sparsity = FFNSparsity(
        activations=VNM(8, 2, 16), router=router, experts_per_token=2
    )
    decisions = [decision(1.0)] * 6
    assert metrics.router_seconds(MODEL, sparsity, 24, decisions) == 2
    ((index, experts, v),) = seen
    assert (index.shape, experts, v) == ((24, 2), 4, 8)
    without = FFNSparsity(weights=NM(2, 4))
    assert metrics.router_seconds(MODEL, without, 24, decisions) == 0


def test_a_router_is_timed_with_as_many_experts_as_a_token_can_have(monkeypatch):
    seen = []
    monkeypatch.setattr(metrics, "dispatch", lambda *a: seen.append(a) or dispatch(*a))
    sparsity = FFNSparsity(
        activations=VNM(8, 2, 16), router="activation_energy", most_experts_per_token=3
    )
    metrics.router_seconds(MODEL, sparsity, 24, [decision(1.0)] * 6)
    ((index, *_),) = seen
    assert index.shape == (24, 3)


def test_a_dense_network_executes_what_it_is_equivalent_to():
    decisions = ffn_decisions(MODEL, DENSE, tokens=64)
    assert len(decisions) == 6
    figures = speed(MODEL, 8, decisions, 1.0, DensePeak(tflops=1, source=""))
    assert figures["executed_tflops"] == figures["dense_equivalent_tflops"]


def test_the_decisions_of_a_mesh_are_of_one_device_s_part():
    mesh = MeshConfig(data=2, fsdp=4, tensor=2)
    gemms = [d.spec for d in ffn_decisions(MODEL, DENSE, 64, mesh=mesh)]
    whole = [d.spec for d in ffn_decisions(MODEL, DENSE, 64)]
    # 64 / (data x fsdp) tokens and 32 / tensor neurons; d_model = 16 is never split
    local = {64: 8, 32: 16, 16: 16}
    assert [(g.tokens, g.d_in, g.d_out) for g in gemms] == [
        (local[g.tokens], local[g.d_in], local[g.d_out]) for g in whole
    ]


def test_decisions_are_those_of_the_gated_network_where_it_is_one():
    gated = replace(MODEL, activation="swiglu")
    names = [d.spec.name for d in ffn_decisions(gated, DENSE, tokens=64)]
    assert len(names) == 9


def test_decisions_follow_a_named_backend():
    decisions = ffn_decisions(MODEL, TWO_FOUR, 64, "reference")
    assert {d.backend for d in decisions} == {"reference"}
    with pytest.raises(NotImplementedError, match="mosaic_sm90"):
        ffn_decisions(MODEL, TWO_FOUR, 64, "mosaic_sm90")


def test_the_peak_of_a_listed_gpu_is_that_of_its_data_sheet():
    gpu = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200")
    peak = dense_peak("bfloat16", gpu)
    assert peak == DensePeak(tflops=989.4, source="data sheet, dense bfloat16")


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_the_peak_of_any_other_device_is_measured(platform, monkeypatch):
    times = iter([0.0, 4.0, 10.0, 12.0, 20.0, 23.0, 30.0, 39.0, 40.0, 45.0])
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: next(times))
    unlisted = SimpleNamespace(platform=platform, device_kind="unlisted")
    peak = dense_peak("float32", unlisted)
    # the best of five took 2 s
    assert peak.tflops == pytest.approx(2 * 2048**3 / 2.0 / 1e12)
    assert peak.source == "measured, dense float32 GEMM of size 2048"
