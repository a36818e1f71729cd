"""The choice of what runs an FFN's GEMMs, made for all of them together; what is told
where they are no faster than dense ones."""

import itertools
import warnings
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.device import Device
from sparsejax.feed_forward import choice
from sparsejax.feed_forward.choice import (
    SlowerThanDense,
    decide,
    warn_if_slower,
    why_slower_than_dense,
)
from sparsejax.feed_forward.ffn import ffn
from sparsejax.feed_forward.sparsity import DENSE, FFNSparsity
from sparsejax.feed_forward.spec import FFNSpec
from sparsejax.ops.backend import Decision
from sparsejax.ops.gemm_spec import Times
from sparsejax.sparsity.patterns import NM, VNM
from tests.support.devices import hopper

TWO_FOUR = NM(2, 4)
ALL_SIX = FFNSparsity(
    weights=TWO_FOUR, activations=TWO_FOUR, token_sparsity="magnitude"
)
DENSE_US = 100.0
KERNELS = "mosaic_sm90"


def spec(sparsity: FFNSparsity = ALL_SIX, device: Device = hopper.H200) -> FFNSpec:
    return FFNSpec(
        tokens=4096,
        d_model=2048,
        d_hidden=8192,
        dtype="bfloat16",
        sparsity=sparsity,
        device=device,
    )


def pretend_times(
    monkeypatch, us: dict[int, float], packing: dict[int, float], gain: float = 1.0
) -> None:
    """Kernels that take so long, by the number of the GEMM; dense ones take 100 us."""

    def choose(gemm, backend):
        number = int(gemm.name[0])
        times = Times(
            kernel_us=us[number],
            dense_us=DENSE_US,
            packing_us=packing.get(number, 0.0),
            least_gain=gain,
        )
        refused = gemm.pattern is None or gemm.why_not_packed is not None
        faster = us[number] * gain < DENSE_US
        on_kernel = not refused and (backend == KERNELS or faster)
        return Decision(
            spec=gemm,
            backend=KERNELS if on_kernel else "xla",
            path="path",
            executed_share=0.5 if on_kernel else 1.0,
            reason="as requested" if backend else f"{gemm.why_not_packed}",
            times=None if refused else times,
        )

    monkeypatch.setattr(choice, "_choose", choose)
    monkeypatch.setattr(choice, "_can_go_either_way", lambda gemm: gemm.experts is None)


def total_us(on: tuple[bool, ...], us: dict[int, float], packing: dict[int, float]):
    """The six GEMMs, by a rule of its own: A is packed by GEMM 1 and dY1 by GEMM 3
    where these and the next GEMM run on kernels."""
    total = 0.0
    for number in range(1, 7):
        if not on[number - 1]:
            total += DENSE_US
            continue
        total += us[number]
        fused = number in (2, 4) and on[number - 2]
        # Weights (1, 3) are packed once for many calls.
        if number not in (1, 3) and not fused:
            total += packing.get(number, 0.0)
    return total


@pytest.mark.parametrize("seed", range(40))
def test_it_is_the_fastest_of_all_that_may_be_combined(seed, monkeypatch):
    draw = iter(jax.random.uniform(jax.random.key(seed), (12,), minval=30, maxval=140))
    us = {number: float(next(draw)) for number in range(1, 7)}
    packing = {number: float(next(draw)) / 2 for number in range(1, 7)}
    pretend_times(monkeypatch, us, packing)
    chosen = tuple(d.backend == KERNELS for d in spec().explain())
    allowed = [
        on
        for on in itertools.product((True, False), repeat=6)
        # 2 and 4 together, 5 and 6 together and only after them
        if on[1] == on[3] and on[4] == on[5] and (on[1] or not on[4])
    ]
    assert chosen in allowed
    best = min(total_us(on, us, packing) for on in allowed)
    assert total_us(chosen, us, packing) == pytest.approx(best)


def test_a_kernel_that_loses_alone_is_taken_where_it_saves_a_packing(monkeypatch):
    us = {1: 110.0, 2: 60.0, 3: 110.0, 4: 60.0, 5: 200.0, 6: 200.0}
    packing = {2: 45.0, 4: 45.0}
    pretend_times(monkeypatch, us, packing)
    decisions = spec().explain()
    on_kernels = [decision.backend == KERNELS for decision in decisions]
    assert on_kernels == [True] * 4 + [False] * 2
    for index in range(4):
        assert "least time together with it" in decisions[index].reason
    # Without anything to save, each of them is left to dense.
    pretend_times(monkeypatch, us, {})
    alone = [decision.backend == KERNELS for decision in spec().explain()]
    assert alone == [False, True, False, True, False, False]


def test_an_estimate_has_to_gain_more_than_its_error(monkeypatch):
    us = dict.fromkeys(range(1, 7), 95.0)
    pretend_times(monkeypatch, us, {}, gain=1.0)
    assert [d.backend == KERNELS for d in spec().explain()] == [True] * 6
    pretend_times(monkeypatch, us, {}, gain=1.1)
    assert [d.backend == KERNELS for d in spec().explain()] == [False] * 6


def test_gemms_by_expert_and_named_backends_are_left_as_they_are(monkeypatch):
    experts = FFNSparsity(
        weights=TWO_FOUR,
        activations=VNM(128, 2, 16),
        weight_gradients="expert_columns",
        skip_blocks=True,
    )
    pretend_times(monkeypatch, dict.fromkeys(range(1, 7), 50.0), {})
    of_experts = spec(experts)
    kept = decide(of_experts.gemms(), None, of_experts.with_epilogues)
    assert kept == of_experts.with_epilogues(
        choice._one_by_one(of_experts.gemms(), None)
    )
    named = spec().explain(KERNELS)
    assert all(decision.backend == KERNELS for decision in named)


def test_what_is_slower_than_dense_is_told_as_explain_has_it(monkeypatch):
    assert why_slower_than_dense(spec(DENSE).explain()) is None
    fast = dict.fromkeys(range(1, 7), 50.0)
    pretend_times(monkeypatch, fast, {})
    decisions = spec().explain()
    assert why_slower_than_dense(decisions) is None
    slow = tuple(
        replace(of, times=replace(of.times, kernel_us=120.0)) for of in decisions
    )
    told = why_slower_than_dense(slow)
    assert "720 us on NVIDIA H200" in told and "600 us" in told


def test_masks_alone_are_told_to_be_slower():
    a100 = Device.named("NVIDIA A100-SXM4-80GB")
    told = why_slower_than_dense(spec(device=a100).explain())
    assert "none of its sparse GEMMs runs on sparse tensor cores" in told
    assert "needs a Hopper GPU, not NVIDIA A100" in told


def test_a_caller_is_warned_once_on_a_gpu_and_never_on_a_cpu(monkeypatch):
    choice._warn_once.cache_clear()
    a100 = Device.named("NVIDIA A100-SXM4-80GB")
    decisions = spec(device=a100).explain()
    with pytest.warns(SlowerThanDense, match=r"explain says it GEMM by GEMM"):
        warn_if_slower(decisions)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_slower(decisions)
        warn_if_slower(spec(device=Device(platform="cpu", kind="cpu")).explain())
        warn_if_slower(spec(DENSE, device=a100).explain())


def test_a_call_warns_where_it_is_made(monkeypatch):
    choice._warn_once.cache_clear()
    a100 = Device.named("NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr("sparsejax.feed_forward.spec.current_device", lambda: a100)
    x, w_up, w_down = jnp.ones((8, 16)), jnp.ones((16, 64)), jnp.ones((64, 16))
    two_four = FFNSparsity(activations=TWO_FOUR)
    with pytest.warns(SlowerThanDense) as caught:
        ffn(x, w_up, w_down, sparsity=two_four)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ffn(x, w_up, w_down, sparsity=two_four, backend="xla")
