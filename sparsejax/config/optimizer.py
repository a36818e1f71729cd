"""The settings of a run's optimiser and of its learning rate."""

from dataclasses import dataclass
from typing import Literal

from sparsejax.annotations import check_fields
from sparsejax.config.ranges import (
    Decay,
    NotNegative,
    Positive,
    Share,
    check_intervals,
    check_shares,
)

ScheduleName = Literal["cosine", "wsd"]
OptimizerName = Literal["adamw", "lion", "muon", "adafactor"]

READS: dict[OptimizerName, tuple[str, ...]] = {
    "adamw": ("beta1", "beta2", "epsilon"),
    "lion": ("beta1", "beta2"),
    "muon": ("beta1", "beta2", "epsilon", "momentum"),
    "adafactor": (),
}
"""The settings that some optimisers read and others do not."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """An optimiser with a linear warm-up and a schedule of the learning rate over all
    steps, whatever their phases."""

    name: OptimizerName = "adamw"
    """The rule of a step. adamw: arXiv 1711.05101. lion: the sign of a momentum (arXiv
    2302.06675); take a third to a tenth of AdamW's learning rate. muon: the momentum of
    every matrix in a block made orthogonal, at the RMS of AdamW's updates (arXiv
    2502.16982), and AdamW for embedding, head and norm scales. adafactor: second
    moments as rows and columns (arXiv 1804.04235); its learning rate is relative to the
    RMS of each weight."""
    peak_learning_rate: Positive = 3e-3
    schedule: ScheduleName = "wsd"
    """Course of the learning rate. wsd (warm-up, stable, decay): constant at the peak,
    and a decay over the last steps (arXiv 2405.18392), before which a sparse phase is
    to end. cosine: one cosine decay from the warm-up to the last step."""
    warmup_share: Share = 0.04
    """Share of the steps over which the learning rate rises from 0."""
    decay_share: Share = 0.2
    """Share of the steps, the last ones, over which schedule wsd decays; 0: it stays at
    the peak, as in a trunk that others branch from."""
    final_ratio: Share = 0.05
    """Learning rate after the last step over that at the peak."""
    beta1: Decay = 0.9
    """Decay of the first moment; of Lion the share of its momentum in an update."""
    beta2: Decay = 0.95
    """Decay of the second moment; of Lion that of its momentum."""
    epsilon: Positive = 1e-8
    momentum: Decay = 0.95
    """Decay of Muon's momentum of the matrices in blocks."""
    weight_decay: NotNegative = 0.1
    """Decay of matrices, times the learning rate, embedding and head included; norm
    scales have none."""
    clip_norm: Positive = 1.0
    """Global norm that larger gradients are scaled down to."""

    def __post_init__(self) -> None:
        check_fields(self, "optimizer.")
        check_intervals(self, "optimizer.")
        for name in ("beta1", "beta2", "epsilon", "momentum"):
            value = getattr(self, name)
            if name not in READS[self.name] and value != getattr(OptimizerConfig, name):
                raise ValueError(
                    f"optimizer.{name}={value} has no meaning in optimizer.name="
                    f"{self.name!r}; leave it out"
                )
        if (
            self.schedule == "cosine"
            and self.decay_share != OptimizerConfig.decay_share
        ):
            raise ValueError(
                f"optimizer.decay_share={self.decay_share} has no meaning in schedule "
                f"'cosine', which decays from the warm-up to the last step; leave it "
                f"out or use --optimizer.schedule wsd"
            )
        if self.schedule == "wsd":
            check_shares(
                self,
                "optimizer.",
                "warmup_share",
                "decay_share",
                otherwise="a shorter warm-up",
            )
