"""The cost of a token in training, of an arm over that of the dense model: as it was
measured, by FLOPs, or by the seconds that are predicted at the widths of a preset.

A dense step of an arm with another shape costs more or less than one of the dense
model. How much depends on the width: in a model of d_model 384 that reads bytes the FFN
is most of a step, and at d_model 2048 with a vocabulary of 128,256 it is half of it, so
that there an FFN of twice the neurons costs less. A speed that was measured at some
widths belongs to costs at those widths.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from experiments.comparing.finished_runs import FinishedRun
from experiments.worth.bootstrap import Replicates
from pallas_kernels.device import Device
from sparsejax.config import MeshConfig, ModelConfig, PresetName
from sparsejax.config.presets import PRESETS
from sparsejax.cost_model import Links, Speeds, flops_per_token, predicted_step
from sparsejax.feed_forward.sparsity import DENSE
from sparsejax.reports.metrics import ffn_decisions


@dataclass(frozen=True, kw_only=True)
class AtWidths:
    """The shapes of a comparison at the widths of a preset, and the seconds that
    `sparsejax plan` predicts for their dense steps on one GPU.

    The dense model gets the preset's d_model, and with it its head_dim; every other arm
    keeps its ratios to the dense model's d_model and d_hidden, and all have as many
    layers as makes the deepest arm as deep as the preset. Vocabulary, sequence length,
    micro-batches and recomputation are the preset's; activation, static weights and
    precision are the arm's.
    """

    preset: PresetName
    device: Device
    reference: ModelConfig
    """The dense model of the comparison."""
    most_layers: int
    """The number of layers of the comparison's deepest arm."""

    @property
    def name(self) -> str:
        """The preset and the GPU, as rows name them."""
        return f"{self.preset}, {self.device.kind}"

    def seconds_per_token(self, model: ModelConfig) -> float:
        """Returns the predicted seconds of a token in a dense step of an arm. Between
        two whole numbers of layers they lie on a straight line.

        Raises:
          ValueError: nothing is known of the GPU's speeds, or a width of the arm is no
            whole number of heads at the preset's widths.
        """
        layers = model.layers * PRESETS[self.preset]().model.layers / self.most_layers
        below, above = max(1, math.floor(layers)), math.ceil(layers)
        first = self._seconds(model, below)
        if below == above:
            return first
        return first + (layers - below) * (self._seconds(model, above) - first)

    def _seconds(self, model: ModelConfig, layers: int) -> float:
        given = PRESETS[self.preset]()
        base = given.model
        d_model = base.d_model * model.d_model / self.reference.d_model
        heads = d_model / base.head_width
        if heads != int(heads):
            raise ValueError(
                f"an arm of d_model {model.d_model} has d_model {d_model:g} at the "
                f"widths of {self.preset}, which is no multiple of its head_dim "
                f"{base.head_width}; leave --widths-of out, or that arm"
            )
        scaled = replace(
            base,
            layers=layers,
            d_model=int(d_model),
            heads=int(heads),
            kv_heads=int(heads) * base.kv_heads // base.heads,
            d_hidden=round(d_model * model.d_hidden / model.d_model),
            activation=model.activation,
            static_weights=model.static_weights,
            precision=model.precision,
        )
        speeds = Speeds.of(self.device, scaled.dtype)
        if speeds is None:
            raise ValueError(
                f"no speeds are known of {self.device.kind!r} in {scaled.dtype}; take "
                f"--device 'NVIDIA H200' or another GPU for which sparsejax plan "
                f"predicts steps"
            )
        mesh = MeshConfig(data=1)
        micro_batches = given.micro_batches_on(mesh)
        tokens = given.tokens_per_step // micro_batches
        step = predicted_step(
            scaled,
            sequence_length=given.data.sequence_length,
            tokens_per_device=tokens,
            micro_batches=micro_batches,
            sparsity=DENSE,
            decisions=ffn_decisions(
                scaled, DENSE, tokens, None, mesh=mesh, device=self.device
            ),
            speeds=speeds,
            mesh=mesh,
            links=Links(),
            optimizer=given.optimizer.name,
        )
        return step.total / given.tokens_per_step


type CostOfModel = Callable[[ModelConfig], float]
"""Returns the cost of a token in a dense step of a model, in any unit."""


def cost(
    runs: Sequence[FinishedRun],
    dense_runs: Sequence[FinishedRun],
    speed: Replicates | None,
    at_widths: AtWidths | None = None,
) -> tuple[Replicates | float | None, bool]:
    """Returns the cost of a token of these runs, in tokens of the dense runs' model,
    and whether it was measured. Without `at_widths` it is measured in seconds of steps
    where no speed is given, no run shared its device, and all had as many devices of
    one kind; everywhere else it comes from `cost_shares` and the speed of the sparse
    steps.

    The cost is None where the runs have sparse steps whose speed is not known.
    """
    if speed is None and at_widths is None and are_alike(runs, dense_runs):
        own, dense = (_mean_per_token(of) for of in (runs, dense_runs))
        if own is not None and dense is not None:
            return own / dense, True
    if speed is None and any(run.sparse_share > 0 for run in runs):
        return None, False
    dense, sparse = cost_shares(runs, dense_runs[0].config.model, at_widths)
    return dense + sparse / (1.0 if speed is None else speed), False


def cost_shares(
    runs: Sequence[FinishedRun], model: ModelConfig, at_widths: AtWidths | None
) -> tuple[float, float]:
    """Returns what an arm's dense steps cost, and what its sparse steps would cost if
    they were dense, over the cost of as many steps of the dense `model` as the arm has
    in all: by FLOPs, or by predicted seconds. They are means over its runs: which steps
    are sparse may differ between them, where phases were found slower than dense."""
    shares = []
    for run in runs:
        flops = _flops_of(run)
        of_model = flops if at_widths is None else at_widths.seconds_per_token
        shares.append(_shares(run, model, of_model))
    dense, sparse = (float(np.mean(of)) for of in zip(*shares, strict=True))
    return dense, sparse


def _flops_of(run: FinishedRun) -> CostOfModel:
    length = run.config.data.sequence_length
    return lambda model: flops_per_token(model, length).total()


def _shares(
    run: FinishedRun, model: ModelConfig, of_model: CostOfModel
) -> tuple[float, float]:
    of_model = cache(of_model)
    dense = sparse = 0.0
    for of in run.stretches:
        relative = of_model(of.model) / of_model(model)
        share = relative * of.steps / run.config.steps
        dense += (1 - of.sparse_share) * share
        sparse += of.sparse_share * share
    return dense, sparse


def break_even(dense: float, sparse: float, excess: float) -> float | None:
    """Returns the speed of a sparse step at which R is 1, for these costs; None where
    the arm has no sparse steps, or where no speed suffices.

    Args:
      dense: the cost of the arm's dense steps, as `cost_shares` returns it.
      sparse: that of its sparse steps.
      excess: D / D_eq.
    """
    left = (1 / excess if excess > 0 else math.inf) - dense
    return sparse / left if sparse and left > 0 else None


def are_alike(runs: Sequence[FinishedRun], others: Sequence[FinishedRun]) -> bool:
    """Returns whether all of these runs were trained on one kind of device, and on as
    many of them."""
    return len({run.device for run in (*runs, *others)}) == 1


def _mean_per_token(runs: Sequence[FinishedRun]) -> float | None:
    """Returns the measured seconds of steps per token; None where a run has none."""
    mean = mean_where_known(run.seconds for run in runs)
    return None if mean is None else mean * len(runs) / sum(r.tokens for r in runs)


def mean_where_known(values: Iterable[float | None]) -> float | None:
    """Returns the mean of the values; None where one of them is None."""
    given = list(values)
    known = [value for value in given if value is not None]
    return float(np.mean(known)) if len(known) == len(given) else None
