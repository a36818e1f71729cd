"""Sparsity patterns as frozen types: N:M and V:N:M."""

from dataclasses import dataclass


@dataclass(frozen=True)
class NM:
    """`n` kept of every `m` consecutive entries along the reduction axis."""

    n: int
    m: int


@dataclass(frozen=True)
class VNM:
    """In every `v` x `m` block four columns are kept, and `n` of those four per row."""

    v: int
    n: int
    m: int

    @property
    def experts(self) -> int:
        """E, the number of equal neuron clusters: `m = 4 E`."""
        return self.m // 4


Pattern = NM | VNM
