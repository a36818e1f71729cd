"""Times of GPU kernels, summed by what they compute."""

import jax.numpy as jnp

from experiments.bench.kernel_times import by_kind, kernel_times


def test_kernels_are_grouped_by_what_they_compute():
    ms = {
        "sparse_matmul_64x64x64_mosaic_gpu_kernel": 16.0,
        "pack_weight_mosaic_gpu_kernel": 4.0,
        "nvjet_sm90_tst_128x256_64x4_1x2_h_bz_NNT": 32.0,
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32": 8.0,
        "cutlass_fmha_gemm": 2.0,
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop": 24.0,
        "MemcpyD2D": 1.0,
        "loop_multiply_fusion_3": 3.0,
        "input_reduce_fusion_1": 0.5,
        "loop_add_fusion": 0.25,
    }
    assert list(by_kind(ms).items()) == [
        ("dense GEMM", 40.0),
        ("attention", 26.0),
        ("2:4 GEMM", 16.0),
        ("2:4 packing", 4.0),
        ("loop_multiply_fusion_3", 3.0),
        ("copy", 1.0),
        ("other kernels", 0.75),
    ]


def test_the_kernels_by_expert_have_kinds_of_their_own():
    ms = {
        "dense_over_rows_64x64x128_mosaic_gpu_kernel": 1.0,
        "dense_rows_128x64x64_mosaic_gpu_kernel": 2.0,
        "gather_rows_mosaic_gpu_kernel": 0.5,
        "sum_rows_mosaic_gpu_kernel": 0.25,
    }
    assert by_kind(ms) == {"experts' dense GEMM": 3.0, "experts' rows": 0.75}


def test_without_kernels_there_is_nothing_to_group():
    assert by_kind({}) == {}


def test_without_a_gpu_no_kernel_ran():
    assert kernel_times(lambda: jnp.zeros(8)) == {}
