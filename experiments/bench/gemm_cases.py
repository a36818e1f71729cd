"""The GEMMs that the GEMM benchmark compares with dense ones, by case.

    matrix    the kernel with a 2:4 operand, also with packing at every call, is
              compared with float32
    experts   the same kernel grouped over experts, one for each token, is compared
              with float32
    grouped   dense GEMMs grouped over experts by the `xla` backend and by the kernels
              are compared with `jax.lax.ragged_dot`, which is timed too; the kernel of
              GEMMs 1 to 4 reads the weights as they are stored, the others copies
    energies  the energies of experts from X and W1 in 8-bit floats, with X rounded
              in the call, by XLA and by the kernel, are compared with those of the
              rounded operands in float32

Every dense GEMM is over all F neurons, as cuBLAS runs it. Operands are random bfloat16,
as they lie in memory in a training step.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from experiments.bench.expert_shares import drawn_shares, expert_shares, routed
from experiments.bench.gemm_comparison import (
    AnyConfig,
    Call,
    Case,
    Comparison,
    Error,
    Number,
    Setting,
    Size,
)
from experiments.bench.references import cusparselt
from pallas_kernels import tuning
from pallas_kernels.sm90 import dense_rows, expert_energies
from pallas_kernels.sm90.gemm import dense_kernel
from pallas_kernels.sm90.sparse_matmul_configs import (
    Config,
    default_config,
    why_invalid,
)
from sparsejax.ops import grouped_matmul
from sparsejax.ops.backend import Backend, current_device
from sparsejax.ops.expert_rows import looked_up
from sparsejax.ops.fp8_matmul import (
    Quantised,
    QuantisedWeight,
    dequantise,
    quantise_rows,
    quantise_weight,
    rounded_product,
)
from sparsejax.ops.kernels.registry import HOPPER, kernels_of
from sparsejax.routing.dispatch import gather_rows
from sparsejax.routing.routers import NO_STATE, ActivationEnergy
from sparsejax.tuning import expert_gemms, ffn_gemms
from sparsejax.tuning.ffn_gemms import Gemm
from sparsejax.tuning.tune import (
    EXPERTS_ERROR,
    compile_all,
    trial_of_experts,
    trial_of_problem,
)

CaseName = Literal["matrix", "experts", "grouped", "energies"]
GROUPED_ERROR = 4e-3
"""The largest relative difference of two bfloat16 results that are rounded from float32
sums in two orders."""

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

PACK_AND_SPARSE = "pack and sparse"
SCALED_COPY, PACK = "scaled copy", "pack"

CONTRACT_ROWS = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
)


# A 2:4 operand.


def _matrix_problem(gemm: Gemm, size: Size) -> ffn_gemms.Problem:
    return ffn_gemms.make_problem(gemm, size.tokens, size.d_model, size.d_hidden)


def _compare_matrix(gemm: Gemm, size: Size, setting: Setting) -> Comparison:
    problem = _matrix_problem(gemm, size)
    config = setting.config or tuning.config_for(current_device(), problem.shape)
    source, b = problem.source, problem.b
    two = jnp.asarray(2, problem.copied.dtype)
    calls = compile_all(
        {
            "dense": (problem.dense, (problem.masked_once, b)),
            HOPPER.name: (partial(problem.sparse, config), (problem.packed, b)),
            PACK_AND_SPARSE: (problem.pack_and_multiply, (source, b)),
            SCALED_COPY: (jnp.multiply, (problem.copied, two)),
            PACK: (problem.pack, (source,)),
        }
    )

    def check(_: str, call: Call) -> Error:
        once, again = (problem.whole(call()) for _ in range(2))
        np.testing.assert_array_equal(once, again)
        ours, bound, dense = ffn_gemms.errors(problem, once)
        assert ours <= bound, f"{problem.shape}: error {ours}, dense {dense}"
        return Error(ours, dense)

    beside = {PACK_AND_SPARSE: calls[PACK_AND_SPARSE]}
    if setting.peer and gemm == "1":
        beside |= cusparselt.fastest_calls(problem.shape)
    return Comparison(
        dense=calls["dense"],
        kernels={HOPPER.name: {config: calls[HOPPER.name]}},
        check=check,
        beside=beside,
        moving={name: calls[name] for name in (SCALED_COPY, PACK)},
    )


def _experts_problem(gemm: Gemm, size: Size, setting: Setting) -> expert_gemms.Problem:
    """Returns the GEMM of experts with random operands. Raises ValueError where no
    config runs it."""
    tokens, d_model, d_hidden, experts = size
    assert experts is not None
    shares = np.full(experts, 1 / experts)
    if setting.share_of_first is not None:
        shares = expert_shares(experts, setting.share_of_first)
    rows = routed(tokens, shares, setting.v)
    problem = expert_gemms.make_problem(gemm, tokens, d_model, d_hidden, rows)
    if not _candidates(problem):
        multiprocessors = current_device().count_multiprocessors()
        heuristic = default_config(problem.shape, multiprocessors)
        raise ValueError(
            f"v={setting.v}, T={tokens}, d={d_model}, F={d_hidden} have no grouped 2:4 "
            f"kernel: {why_invalid(heuristic, problem.shape)}"
        )
    return problem


def _compare_experts(gemm: Gemm, size: Size, setting: Setting) -> Comparison:
    problem = _experts_problem(gemm, size, setting)
    configs = _candidates(problem) if setting.config is None else [setting.config]
    calls = compile_all(
        {
            config: (partial(problem.sparse, config), problem.operands)
            for config in configs
        }
        | {
            "dense": (problem.dense, problem.of_dense),
            PACK: (problem.pack, problem.source),
        }
    )

    def check(_: str, call: Call) -> Error:
        error = expert_gemms.error(problem, call)
        assert error < EXPERTS_ERROR, f"{problem.shape}: relative error {error}"
        return Error(error)

    return Comparison(
        dense=calls["dense"],
        kernels={HOPPER.name: {config: calls[config] for config in configs}},
        check=check,
        moving={PACK: calls[PACK]},
        # One pass makes the operands of both weight gradients.
        gemms_packed=1 + (problem.shape.mode == "weight_gradient"),
    )


def _candidates(problem: expert_gemms.Problem) -> list[Config]:
    multiprocessors = current_device().count_multiprocessors()
    return tuning.candidates(problem.shape, multiprocessors)


# Dense operands, grouped over experts.


def _compare_grouped(gemm: Number, size: Size, setting: Setting) -> Comparison:
    tokens, d_model, d_hidden, experts = size
    assert experts is not None
    shares = drawn_shares(experts)
    if setting.share_of_first is not None:
        shares = expert_shares(experts, setting.share_of_first)
    rows = routed(tokens, shares, setting.v)
    used_tiles = jnp.sum(-(-rows.group_sizes // setting.v))
    group_sizes = -(-rows.group_sizes // setting.v) * setting.v
    tiles, own = (rows.tile_expert, used_tiles), d_hidden // experts
    keys = jax.random.split(jax.random.key(0), 3)
    normal = partial(jax.random.normal, dtype=jnp.bfloat16)
    x = normal(keys[0], (tokens, d_model))
    as_float32 = {"preferred_element_type": jnp.float32}
    of_kernel: dict[str, tuple[Callable[..., Any], tuple]] = {}
    backends: list[Backend] = ["xla"]

    if gemm != "5":
        # W1 (d, E, F / E) or W2 (E, F / E, d); GEMMs 3 and 4 read them transposed.
        axis, transposed = (1 if gemm in "14" else 0), gemm in "34"
        stored = (d_model, experts, own) if axis else (experts, own, d_model)
        w = normal(keys[2], stored)
        by_expert = jnp.moveaxis(w, axis, 0)
        by_expert = by_expert.swapaxes(1, 2) if transposed else by_expert
        lhs = x if gemm in "13" else normal(keys[1], (tokens, own))
        operands = gather_rows(lhs, rows), by_expert
        into = gemm in "13"
        widths = (d_model, d_hidden) if into else (d_hidden, d_model)
        whole = x if into else normal(keys[0], (tokens, d_hidden))
        dense = jnp.matmul, (whole, normal(keys[1], widths))

        def ragged(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
            out = lax.ragged_dot(lhs, rhs, group_sizes, **as_float32)
            return out.astype(lhs.dtype)

        def ours(backend: Backend, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
            return grouped_matmul.grouped_matmul(lhs, rhs, *tiles, backend=backend)

        why_not = dense_rows.why_unsupported((d_model, own), setting.v, str(lhs.dtype))
        kernels = kernels_of(current_device())
        if kernels is not None and why_not is None:
            as_stored = partial(
                kernels.dense_rows_matmul,
                expert_axis=axis,
                k_major=transposed,
            )
            of_kernel = {HOPPER.name: (as_stored, (operands[0], w, looked_up(rows)))}

    else:
        g = normal(keys[1], (tokens, d_hidden))
        dense = (lambda lhs, rhs: jnp.matmul(lhs.T, rhs, **as_float32)), (x, g)
        x_rows = gather_rows(x, rows)
        operands = x_rows, normal(keys[2], (len(x_rows), own))
        if current_device().is_hopper:
            backends.append(HOPPER.name)

        def ragged(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
            return lax.ragged_dot_general(
                lhs, rhs, group_sizes, CONTRACT_ROWS, **as_float32
            )

        def ours(backend: Backend, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
            return grouped_matmul.grouped_outer(
                lhs, rhs, *tiles, experts, backend=backend
            )

    calls = compile_all(
        {"dense": dense, "ragged_dot": (ragged, operands)}
        | {backend: (partial(ours, backend), operands) for backend in backends}
        | of_kernel
    )
    # Beyond the used tiles a kernel writes nothing.
    written = slice(int(used_tiles) * setting.v if gemm != "5" else None)
    right = np.asarray(calls["ragged_dot"]()[written], np.float32)

    def check(name: str, call: Call) -> Error:
        got = np.asarray(call()[written], np.float32)
        error = float(np.linalg.norm(got - right) / np.linalg.norm(right))
        assert error < GROUPED_ERROR, f"{name} at {size}: relative error {error}"
        return Error(error)

    names = dict.fromkeys(("ragged_dot", *backends, *of_kernel))
    return Comparison(
        dense=calls["dense"],
        kernels={name: {None: calls[name]} for name in names},
        check=check,
        executed_flops=2 * tokens * d_model * own,
    )


# 8-bit floats.


def _compare_energies(gemm: Number, size: Size, setting: Setting) -> Comparison:
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


CASES: dict[CaseName, Case] = {
    "matrix": Case(
        shapes=tuple(
            f"{tokens},{widths}"
            for widths in (
                "2048,8192",
                "2048,8448",
                "4096,14336",
                "4096,16384",
                "5120,13824",
                "8192,28672",
            )
            for tokens in (1024, 4096, 16384, 32768)
        ),
        gemms=("1",),
        has_experts=False,
        compare=_compare_matrix,
        trial=lambda gemm, size, _: trial_of_problem(_matrix_problem(gemm, size)),
    ),
    "experts": Case(
        shapes=tuple(f"16384,4096,16384,{experts}" for experts in (2, 4, 8)),
        gemms=get_args(Gemm),
        compare=_compare_experts,
        trial=lambda gemm, size, setting: trial_of_experts(
            _experts_problem(gemm, size, setting)
        ),
    ),
    "grouped": Case(
        shapes=("16384,4096,16384,4", "8192,2048,8192,4", "16384,2048,8192,8"),
        gemms=("1", "2", "3", "4", "5"),
        known_gemms=("1", "2", "3", "4", "5"),
        compare=_compare_grouped,
    ),
    "energies": Case(
        shapes=("65536,768,6144,8", "16384,2048,8192,8", "16384,2048,16384,8"),
        gemms=("1",),
        known_gemms=("1",),
        compare=_compare_energies,
    ),
}


def size_of(case: CaseName, text: str) -> Size:
    """Returns the size that a text states as "T,d,F", or with experts as "T,d,F,E".
    Raises ValueError for other text."""
    names, example = "T,d,F", "4096,2048,8192"
    if CASES[case].has_experts:
        names, example = "T,d,F,E", "16384,4096,16384,4"
    try:
        numbers = [int(number) for number in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != len(names.split(",")):
        raise ValueError(f"shape {text!r} is not {names}; give for example {example}")
    tokens, d_model, d_hidden, *experts = numbers
    return Size(tokens, d_model, d_hidden, *(experts or [None]))
