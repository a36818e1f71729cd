"""The settings that say how many devices a run takes along each axis of its mesh."""

from dataclasses import dataclass, replace
from typing import Literal

from sparsejax.annotations import check_fields
from sparsejax.config.ranges import Count, CountOrZero, check_intervals


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """The number of devices along each axis of the mesh; their product is the number of
    all devices.

    The batch is split over data and fsdp.
    """

    data: CountOrZero = 0
    """Number of replicas of the parameters. 0: all devices that fsdp and tensor
    leave."""
    fsdp: Count = 1
    """Number of devices that parameters and moments are split over. zero_stage says
    whether gradients, and the weights that GEMMs read, are split as well."""
    tensor: Count = 1
    """Number of devices that share every token's work: heads, neurons, vocabulary."""
    zero_stage: Literal[1, 2, 3] = 3
    """What is split over fsdp while the micro-batches of a step run, as in ZeRO (arXiv
    1910.02054). 3: weights and gradients; weights are gathered and gradients summed in
    each micro-batch. 2: gradients; weights are gathered once per step, in the dtype
    that they are read in, and each device holds all of them. 1: neither; each device
    adds up whole gradients too, which are summed once per step. Parameters and moments
    are split in any case, and so are the embedding that is looked up and its gradient.
    Not read where fsdp is 1."""

    def __post_init__(self) -> None:
        check_fields(self, "mesh.")
        check_intervals(self, "mesh.")

    @property
    def devices(self) -> int:
        """The number of devices of the whole mesh; 0 while `data` is left open."""
        return self.data * self.fsdp * self.tensor

    @property
    def token_shards(self) -> int:
        """The number of parts that the sequences of a batch, and so their tokens, are
        split into; 0 while `data` is left open."""
        return self.data * self.fsdp

    def resolve(self, devices: int) -> "MeshConfig":
        """Returns the mesh with `data` filled in, for this many devices.

        Raises:
          ValueError: the axes do not multiply to `devices`.
        """
        shared = self.fsdp * self.tensor
        data = self.data or devices // shared
        if data * shared != devices:
            raise ValueError(
                f"mesh.data={self.data} x mesh.fsdp={self.fsdp} x mesh.tensor="
                f"{self.tensor} is not the number of devices, {devices}; set axes that "
                f"multiply to {devices} (data=0 takes what is left)"
            )
        return replace(self, data=data)
