"""The parts that the GEMM kernels share: tiles, splits, the instruction, the
epilogue."""
