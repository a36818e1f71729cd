"""cuDNN's flash attention where there is no cuDNN: programs are lowered, not run."""

import pytest
from jax._src.cudnn import fused_attention_stablehlo

from sparsejax.models import attention


def pretend_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets `Attention` choose cuDNN, and JAX lower it as for a Hopper GPU."""
    for name, answer in {
        "check_cudnn_version": lambda: 91900,
        "check_compute_capability": lambda capability: True,
        "is_cuda_compute_capability_equal": lambda capability: False,
    }.items():
        monkeypatch.setattr(fused_attention_stablehlo, name, answer)
    chosen = lambda *arguments: ("cudnn", "pretended")
    monkeypatch.setattr(attention, "attention_implementation", chosen)
