"""A tuned GEMM and the shape that its kernel has."""

from dataclasses import replace

import pytest

from pallas_kernels import tuning
from pallas_kernels.sm90.sparse_matmul_configs import (
    Shape,
    default_config,
)
from pallas_kernels.tuned_gemm import TunedGemm
from tests.support.devices import hopper

pytestmark = pytest.mark.usefixtures("no_tables")
GPU = hopper.H200
GEMM = TunedGemm(tokens=1000, d_in=128, d_out=256)
ACTIVATION = TunedGemm(sparse_operand="input", tokens=1024, d_in=256, d_out=128)
GRADIENT = replace(ACTIVATION, is_weight_gradient=True)
OF_OUTPUT = replace(GRADIENT, sparse_operand="gradient")


@pytest.mark.parametrize(
    ("gemm", "shape"),
    [
        (GEMM, Shape(m=256, n=1000, k=128)),
        (
            replace(ACTIVATION, weight_transposed=True, float32_out=True),
            Shape(
                m=1024,
                n=128,
                k=256,
                mode="sparse_activation",
                transpose_out=False,
                float32_out=True,
            ),
        ),
        (
            replace(GRADIENT, experts=4, group_tile=128),
            Shape(
                m=256,
                n=128,
                k=1024,
                mode="weight_gradient",
                b_k_major=False,
                transpose_out=False,
                float32_out=True,
                experts=4,
                group_tile=128,
            ),
        ),
        (
            replace(OF_OUTPUT, dtype="float16"),
            Shape(
                m=128,
                n=256,
                k=1024,
                mode="weight_gradient",
                b_k_major=False,
                transpose_out=True,
                float32_out=True,
                dtype="float16",
            ),
        ),
    ],
    ids=["weight", "activation", "weight gradient", "of the output"],
)
def test_a_kernels_shape_and_a_layers_widths_are_one_gemm(gemm, shape):
    assert gemm.shape() == shape and TunedGemm.of(shape) == gemm
    packed = replace(shape, packed_out=True)
    assert gemm.shape(packed_out=True) == packed and TunedGemm.of(packed) == gemm
    # No layer has this one: its result lies the other way round.
    if shape.mode != "weight_gradient":
        odd = replace(shape, transpose_out=not shape.transpose_out)
        assert TunedGemm.of(odd) is None
        default = default_config(odd, GPU.multiprocessors)
        assert tuning.config_for(GPU, odd) == default
