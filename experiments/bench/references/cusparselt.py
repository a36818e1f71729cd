"""NVIDIA's own library for 2:4 GEMMs, cuSPARSELt, called through PyTorch."""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

from pallas_kernels.sm90.sparse_matmul_configs import Shape
from sparsejax.tuning.timing import time_queued

AS_IS, TRANSPOSED = "peer, as is", "peer, transposed"


def fastest_calls(shape: Shape) -> dict[str, Callable[[], Any]]:
    """Returns calls of cuSPARSELt's fastest algorithm for a GEMM of random bfloat16
    operands, by name: with its output as it comes, (m, n), and with it transposed, as
    training needs it. Empty, with a printed reason, where PyTorch or its cuSPARSELt is
    not there."""
    try:
        # Not one of our dependencies.
        torch = importlib.import_module("torch")
        compress, multiply = torch._cslt_compress, torch._cslt_sparse_mm
        device = torch.device("cuda")
    except (ImportError, AttributeError) as error:
        print(f"no cuSPARSELt: {error}")
        return {}

    class Replay:
        """A product that is recorded once and launched as a graph: prepared from Python
        at every call it would take 0.4 ms, whatever its size."""

        def __init__(self, transpose: bool, algorithm: int) -> None:
            run = partial(
                multiply, packed, b, alg_id=algorithm, transpose_result=transpose
            )
            run()  # raises RuntimeError where there is no such algorithm
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            # XLA's threads may allocate meanwhile.
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.out = run()

        def __call__(self) -> "Replay":
            self.graph.replay()
            return self

        def block_until_ready(self) -> None:
            """Waits until the product is computed; `jax.block_until_ready` calls
            this."""
            torch.cuda.synchronize()

    like = {"device": device, "dtype": torch.bfloat16}
    a = torch.randn(shape.m, shape.k // 4, 4, **like)
    kept = a.abs().topk(2, -1).indices
    a *= torch.zeros_like(a).scatter_(-1, kept, 1)
    packed = compress(a.view(shape.m, shape.k))
    b = torch.randn(shape.n, shape.k, **like).t()

    fastest = {}
    for name, transpose in ((AS_IS, False), (TRANSPOSED, True)):
        algorithms = {}
        for algorithm in range(64):
            try:
                algorithms[str(algorithm)] = Replay(transpose, algorithm)
            except RuntimeError:
                break
        timings, _ = time_queued(
            algorithms, baseline="0", rounds=1, seconds=0.02, settle_seconds=0.02
        )
        fastest[name] = algorithms[min(timings, key=lambda t: t.time_ms).name]
    return fastest
