"""GEMMs with a 2:4 operand: the kernel, and packing, against dense GEMMs."""

from functools import partial

import jax.numpy as jnp
import numpy as np

from experiments.bench.expert_shares import expert_shares, routed
from experiments.bench.gemm_cases.comparison import (
    Call,
    Comparison,
    Error,
    Setting,
    Size,
)
from experiments.bench.references import cusparselt
from pallas_kernels import tuning
from pallas_kernels.sm90.sparse_matmul_configs import (
    Config,
    default_config,
    why_invalid,
)
from sparsejax.ops.backend import current_device
from sparsejax.ops.kernels.registry import HOPPER
from sparsejax.tuning import expert_gemms, ffn_gemms
from sparsejax.tuning.ffn_gemms import Gemm
from sparsejax.tuning.tune import EXPERTS_ERROR, compile_all

PACK_AND_SPARSE = "pack and sparse"
SCALED_COPY, PACK = "scaled copy", "pack"


def matrix_problem(gemm: Gemm, size: Size) -> ffn_gemms.Problem:
    """Returns the GEMM without experts, with random operands."""
    return ffn_gemms.make_problem(gemm, size.tokens, size.d_model, size.d_hidden)


def compare_matrix(gemm: Gemm, size: Size, setting: Setting) -> Comparison:
    """Returns the comparison of a GEMM without experts, and of packing its operand."""
    problem = matrix_problem(gemm, size)
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


def experts_problem(gemm: Gemm, size: Size, setting: Setting) -> expert_gemms.Problem:
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


def compare_experts(gemm: Gemm, size: Size, setting: Setting) -> Comparison:
    """Returns the comparison of a GEMM over experts, and of packing its operand."""
    problem = experts_problem(gemm, size, setting)
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
