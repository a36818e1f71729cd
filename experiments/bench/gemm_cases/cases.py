"""The GEMMs that the GEMM benchmark compares with dense ones, by case.

    matrix    the kernel with a 2:4 operand, also with packing at every call, is
              compared with float32
    experts   the same kernel grouped over experts, one for each token, is compared
              with float32
    grouped   dense GEMMs grouped over experts by the `xla` backend and by the kernels
              are compared with `jax.lax.ragged_dot`, which is timed too; the kernel of
              GEMMs 1 to 4 reads the weights as they are stored, the others copies
    squares   GEMMs 1 and 3 of a dense FFN, or by expert, with the squared ReLU or its
              gradient in the kernel's epilogue are compared with float32; XLA's dense
              GEMM has a pass after it
    energies  the energies of experts from X and W1 in 8-bit floats, with X rounded
              in the call, by XLA and by the kernel, are compared with those of the
              rounded operands in float32

Every dense GEMM is over all F neurons, as cuBLAS runs it. Operands are random bfloat16,
as they lie in memory in a training step.
"""

from typing import Literal, get_args

from experiments.bench.gemm_cases import energies, grouped, squares, two_four
from experiments.bench.gemm_cases.comparison import Case, Size
from sparsejax.tuning.ffn_gemms import Gemm
from sparsejax.tuning.tune import trial_of_experts, trial_of_problem

CaseName = Literal["matrix", "experts", "grouped", "squares", "energies"]

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
        compare=two_four.compare_matrix,
        trial=lambda gemm, size, _: trial_of_problem(
            two_four.matrix_problem(gemm, size)
        ),
    ),
    "experts": Case(
        shapes=tuple(f"16384,4096,16384,{experts}" for experts in (2, 4, 8)),
        gemms=get_args(Gemm),
        compare=two_four.compare_experts,
        trial=lambda gemm, size, setting: trial_of_experts(
            two_four.experts_problem(gemm, size, setting)
        ),
    ),
    "grouped": Case(
        shapes=("16384,4096,16384,4", "8192,2048,8192,4", "16384,2048,8192,8"),
        gemms=("1", "2", "3", "4", "5"),
        known_gemms=("1", "2", "3", "4", "5"),
        compare=grouped.compare_grouped,
    ),
    "squares": Case(
        shapes=(
            "65536,768,3072,1",
            "16384,2048,8192,1",
            "16384,4096,16384,1",
            "65536,768,6144,8",
            "16384,2048,8192,8",
        ),
        gemms=("1", "3"),
        known_gemms=("1", "3"),
        compare=squares.compare_squares,
    ),
    "energies": Case(
        shapes=("65536,768,6144,8", "16384,2048,8192,8", "16384,2048,16384,8"),
        gemms=("1",),
        known_gemms=("1",),
        compare=energies.compare_energies,
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
