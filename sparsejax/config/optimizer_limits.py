"""What an optimiser cannot do: the switches, growth and meshes that its state cannot
follow."""

from collections.abc import Sequence
from dataclasses import replace

from sparsejax.config.mesh import MeshConfig
from sparsejax.config.schedule import Phase, model_of
from sparsejax.config.train import TrainConfig
from sparsejax.sparsity.patterns import NM, name_of


def check_optimizer(
    config: TrainConfig, phases: Sequence[Phase], mesh: MeshConfig
) -> None:
    """Checks that the optimiser's state can follow the run: its switches, its growth,
    its mesh.

    Args:
      config: the settings of the run.
      phases: its phases.
      mesh: its mesh, with the number of replicas.
    Raises:
      ValueError: says what the optimiser cannot do, and which one can.
    """
    name, model = config.optimizer.name, config.model
    use = "use --optimizer.name adamw or lion"
    models = [model_of(phase, model) for phase in phases]
    static = [of.static_weights for of in models if of.static_weights is not None]
    by_masks = [pattern for pattern in static if isinstance(pattern, NM)]
    if name == "muon" and by_masks:
        raise ValueError(
            f"optimizer.name='muon' makes whole matrices of updates, and static "
            f"weights {name_of(by_masks[0])} are to stay zero outside of their masks; "
            f"{use}, or blocks such as diagonal:4"
        )
    if name != "adafactor":
        return
    if any(replace(of, precision=model.precision) != model for of in models):
        raise ValueError(
            f"optimizer.name='adafactor' keeps second moments as rows and columns of "
            f"each weight, which cannot be grown with a model that a phase makes "
            f"smaller; {use}"
        )
    if model.groups > 1:
        raise ValueError(
            f"optimizer.name='adafactor' keeps second moments as rows and columns of "
            f"whole weights, and static_weights={name_of(static[0])} are blocks; {use}"
        )
    if any(of.experts for phase in phases for of in phase.sparsities):
        raise ValueError(
            f"optimizer.name='adafactor' keeps second moments as rows and columns of "
            f"each weight, which do not say for sure where the neurons are that a "
            f"phase with experts renumbers; {use}, or muon, or a recipe without experts"
        )
    if mesh.fsdp * mesh.tensor > 1:
        raise ValueError(
            f"optimizer.name='adafactor' keeps second moments as rows and columns, "
            f"which mesh.fsdp={mesh.fsdp} x mesh.tensor={mesh.tensor} does not split; "
            f"{use}, or mesh.data alone"
        )
