"""A GEMM with a 2:4 operand, as its measured times are looked up: as a linear layer.

A kernel counts the rows and columns of the matrices that it multiplies, its sparse
operand always the left one (`Shape`), so that which size counts tokens depends on the
GEMM. Here tokens are tokens, and d_in and d_out are the widths of the layer.
"""

from dataclasses import dataclass
from typing import Literal

from pallas_kernels.sm90.sparse_matmul_configs import Shape


@dataclass(frozen=True, kw_only=True)
class TunedGemm:
    """The facts of a GEMM that its measured times depend on.

        output = input @ weight        a weight gradient = input^T @ output gradient

    X W1 and A W2 of an FFN are such products, and dY W2^T and dY1 W1^T are those of the
    transposed weight. Both factors and the result lie in memory with a row per token; a
    weight gradient is (d_in, d_out).
    """

    is_weight_gradient: bool = False
    """Whether the GEMM sums over the tokens, into float32."""
    sparse_operand: Literal["weight", "input", "gradient"] = "weight"
    """The factor that is 2:4, along the axis that is summed over."""
    experts: int = 1
    """The number of experts that the GEMM is grouped by: a row meets the weight of its
    expert."""
    group_tile: int = 0
    """The number of consecutive rows that have one expert; 0 where nothing is
    grouped."""
    d_in: int
    """The width of the input. Neurons are those of one expert; and in a weight gradient
    the residual rows of a sparse input count, too."""
    d_out: int
    """The width of the output, counted as `d_in` is, with the residual rows of a sparse
    gradient."""
    tokens: int
    """The number of tokens that the GEMM has. Of a grouped GEMM it is the number of
    rows: one for each expert of a token, and those that fill up group tiles."""
    weight_transposed: bool = False
    """Whether a dense weight is stored (d_out, d_in)."""
    float32_out: bool = False
    """Whether the result is float32 though it is no weight gradient."""
    dtype: str = "bfloat16"
    """The dtype of both factors: "bfloat16" or "float16"."""

    @classmethod
    def of(cls, shape: Shape) -> "TunedGemm | None":
        """Returns the GEMM that a kernel of this shape computes, whether its result is
        packed or not; None where an operand lies in memory as in no linear layer."""
        common = {
            "experts": shape.experts,
            "group_tile": shape.group_tile,
            "dtype": shape.dtype,
        }
        match shape.mode:
            case "sparse_weight":
                found = cls(
                    d_in=shape.k,
                    d_out=shape.m,
                    tokens=shape.n,
                    float32_out=shape.float32_out,
                    **common,
                )
            case "sparse_activation":
                found = cls(
                    sparse_operand="input",
                    d_in=shape.k,
                    d_out=shape.n,
                    tokens=shape.m,
                    weight_transposed=shape.b_k_major,
                    float32_out=shape.float32_out,
                    **common,
                )
            case "weight_gradient":
                of_output = shape.transpose_out
                found = cls(
                    is_weight_gradient=True,
                    sparse_operand="gradient" if of_output else "input",
                    d_in=shape.n if of_output else shape.m,
                    d_out=shape.m if of_output else shape.n,
                    tokens=shape.k,
                    **common,
                )
        alike = found.shape(packed_out=shape.packed_out)
        return found if alike == shape else None

    def shape(self, *, packed_out: bool = False) -> Shape:
        """Returns the GEMM as its kernel sees it, which may write its result 2:4."""
        if self.is_weight_gradient:
            of_output = self.sparse_operand == "gradient"
            m, n = (self.d_out, self.d_in) if of_output else (self.d_in, self.d_out)
            return Shape(
                m=m,
                n=n,
                k=self.tokens,
                mode="weight_gradient",
                dtype=self.dtype,
                b_k_major=False,
                transpose_out=of_output,
                float32_out=True,
                experts=self.experts,
                group_tile=self.group_tile,
                packed_out=packed_out,
            )
        of_weight = self.sparse_operand == "weight"
        return Shape(
            m=self.d_out if of_weight else self.tokens,
            n=self.tokens if of_weight else self.d_out,
            k=self.d_in,
            mode="sparse_weight" if of_weight else "sparse_activation",
            dtype=self.dtype,
            b_k_major=of_weight or self.weight_transposed,
            transpose_out=of_weight,
            float32_out=self.float32_out,
            experts=self.experts,
            group_tile=self.group_tile,
            packed_out=packed_out,
        )

    @property
    def multiplications(self) -> int:
        """The number of multiplications of the GEMM, those with zeros included: a row
        meets one expert."""
        return self.tokens * self.d_in * self.d_out

    @property
    def dense_multiplications(self) -> int:
        """The number of multiplications of the dense GEMM, where a row meets all
        experts and no row fills up a group tile."""
        rows = self.tokens - (self.experts - 1) * self.group_tile
        widths = self.d_in * self.d_out
        return max(rows, self.group_tile) * widths * self.experts

    @property
    def numbers_to_pack(self) -> int:
        """The number of numbers that the sparse factor has before it is packed: a
        weight those of all experts."""
        match self.sparse_operand:
            case "weight":
                return self.d_in * self.d_out * self.experts
            case "input":
                return self.tokens * self.d_in
            case "gradient":
                return self.tokens * self.d_out
