"""Flags that the tests and the processes that they start give XLA."""

QUICK_COMPILATION = (
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters=true "
    "--xla_cpu_parallel_codegen_split_count=1 "
    "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
)
"""On a CPU fusions go through XLA's older emitter, and a program is one LLVM module:
compiling takes a third of the time. The newer emitter runs MLIR's passes over every
fusion, in contexts made anew for every program. On a GPU the GEMMs that
XLA runs, those of 8-bit floats too, go to cuBLAS: XLA would otherwise compile and time
tens of kernels for each. The Triton kernels that it may choose in a run are not tested
then."""

EIGHT_DEVICES = "--xla_force_host_platform_device_count=8"
