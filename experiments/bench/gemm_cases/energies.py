"""The energies of experts from X and W1 in 8-bit floats, against GEMM 1."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench.gemm_cases.comparison import (
    AnyConfig,
    Call,
    Comparison,
    Error,
    Number,
    Setting,
    Size,
)
from pallas_kernels.sm90 import expert_energies
from pallas_kernels.sm90.gemm import dense_kernel
from sparsejax.ops.backend import current_device
from sparsejax.ops.fp8_matmul import (
    Quantised,
    QuantisedWeight,
    dequantise,
    quantise_rows,
    quantise_weight,
    rounded_product,
)
from sparsejax.ops.kernels.registry import HOPPER
from sparsejax.routing.routers import NO_STATE, ActivationEnergy
from sparsejax.tuning.tune import compile_all

ENERGIES_ERROR = 1e-2
"""The largest relative difference of energies. A product in bfloat16 has 2^-9, and its
fourth power four times as much; tensor cores sum 8-bit floats with fewer bits than
float32 has."""

ENERGIES_CONFIGS = (
    dense_kernel.Config(),
    dense_kernel.Config(cluster_axis="n"),
    dense_kernel.Config(cluster=1),
    dense_kernel.Config(stages=3),
    dense_kernel.Config(row_blocks=2, tile_n=128),
    dense_kernel.Config(tile_n=128, cluster_axis="n"),
)
"""The configs of the kernel of energies that are tried."""


def compare_energies(gemm: Number, size: Size, setting: Setting) -> Comparison:
    """Returns the comparison of the energies of all experts with GEMM 1."""
    del gemm, setting
    tokens, d_model, d_hidden, experts = size
    assert experts is not None
    x, w = (
        jax.random.normal(jax.random.key(seed), of, jnp.bfloat16)
        for seed, of in enumerate(((tokens, d_model), (d_model, d_hidden)))
    )
    quantised = quantise_weight(w)

    def fourth_powers(y_up: jax.Array) -> jax.Array:
        return ActivationEnergy().scores(y_up, experts, NO_STATE)

    def by_xla(x: jax.Array, quantised: QuantisedWeight) -> jax.Array:
        return fourth_powers(rounded_product(x, quantised))

    def by_kernel(
        config: dense_kernel.Config, x: jax.Array, quantised: QuantisedWeight
    ) -> jax.Array:
        return expert_energies.expert_energies(
            quantise_rows(x).values,
            quantised.transposed,
            experts=experts,
            config=config,
            multiprocessors=current_device().count_multiprocessors(),
        )

    runs = {("xla", None): by_xla}
    why_not = expert_energies.why_unsupported(d_model, d_hidden // experts)
    if current_device().is_hopper and why_not is None:
        own = d_hidden // experts
        fitting = (of for of in ENERGIES_CONFIGS if own % of.tile_n == 0)
        runs |= {(HOPPER.name, of): partial(by_kernel, of) for of in fitting}
    calls = compile_all(
        {"dense": (jnp.matmul, (x, w))}
        | {of: (run, (x, quantised)) for of, run in runs.items()}
    )
    rows, step = quantise_rows(x)
    exact = (rows.astype(jnp.float32) * step[:, None]) @ dequantise(
        Quantised(quantised.values, quantised.step)
    )
    right = np.asarray(fourth_powers(exact), np.float64)

    def shares(energies: Any) -> np.ndarray:
        """Returns each expert's share: a token's energies may have a factor."""
        energies = np.asarray(energies, np.float64)
        return energies / energies.sum(axis=1, keepdims=True)

    def check(name: str, call: Call) -> Error:
        error = np.abs(shares(call()) / shares(right) - 1).max()
        assert error < ENERGIES_ERROR, f"{name} at {size}: relative error {error}"
        return Error(float(error))

    kernels: dict[str, dict[AnyConfig, Call]] = {}
    for name, config in runs:
        kernels.setdefault(name, {})[config] = calls[name, config]
    return Comparison(
        dense=calls["dense"],
        kernels=kernels,
        check=check,
        executed_flops=2 * tokens * d_model * d_hidden,
    )
