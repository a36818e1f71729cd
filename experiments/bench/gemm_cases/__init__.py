"""What the GEMM benchmark compares, a file for each kind of GEMM."""
