"""Says how far the gradient of a trained model is from float32's, by precision.

    uv run experiments/gradient_precision.py RUN
    uv run experiments/gradient_precision.py RUN --windows 512 --settings bfloat16 fp8

A whole comparison of losses takes hours of a GPU for each precision. What the rounding
does to a gradient is known in minutes, and says which precision is worth the hours. The
model of a run, in its latest checkpoint or at RUN@STEP, computes the gradient of its
mean loss over each batch of the run's held-out text in float32, and in each setting:

* bfloat16: `model.dtype` bfloat16;
* bfloat16 logits: with `model.logits_of_loss` "dtype";
* fp8: bfloat16 with `model.precision` "fp8"; fp8_all: with "fp8_all".

The table has the difference of the losses, and |g - g32| / |g32| for the gradient g of
a batch, in the mean over the batches, and for the gradient of all batches together:
noise averages out over them, and a bias stays. The last column is that of the head
alone.

It runs on a CPU in minutes for models of some million parameters. `--results` takes a
row per setting.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import batched, islice
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx
from jaxtyping import Array, Float, Int, PyTree
from rich.table import Table

from experiments.bench.rows import append_rows
from experiments.command_line import run_script
from sparsejax.config import ModelConfig
from sparsejax.config.ranges import Count, check_intervals
from sparsejax.data.corpus import load_corpus
from sparsejax.data.held_out import every_window
from sparsejax.interchange.named_model import NamedModel, load_named_model
from sparsejax.models.transformer import Transformer, cross_entropy
from sparsejax.reports.provenance import commit
from sparsejax.terminal import console

Setting = Literal["bfloat16", "bfloat16 logits", "fp8", "fp8_all"]

SETTINGS: dict[Setting, dict] = {
    "bfloat16": {},
    "bfloat16 logits": {"logits_of_loss": "dtype"},
    "fp8": {"precision": "fp8"},
    "fp8_all": {"precision": "fp8_all"},
}
"""The changes of a `ModelConfig` whose dtype is bfloat16."""

type Gradient = Callable[[Int[Array, "batch tokens"]], tuple[Float[Array, ""], PyTree]]


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings: which model, on how much text, in which precisions."""

    run: tyro.conf.Positional[str]
    """Run folder, or RUN@STEP."""
    windows: Count = 128
    """Most windows of held-out tokens, each as long as those of the training."""
    batch_size: Count = 8
    """Windows of a batch."""
    settings: tuple[Setting, ...] = tuple(SETTINGS)
    """Precisions that are held against float32."""
    results: Path | None = Path("runs/gradient_precision.jsonl")
    """File to which a row per setting is added; None writes nothing."""

    def __post_init__(self) -> None:
        check_intervals(self)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a precision does to a model's loss and gradient."""

    setting: Setting
    loss_difference: float
    """The mean loss less that in float32, in nats per token."""
    loss_error: float
    """The standard error of that, by its spread over the batches; NaN of one batch."""
    of_batch: float
    """|g - g32| / |g32| of a batch, in the mean over the batches."""
    of_all: float
    """|g - g32| / |g32| of the gradient of all batches."""
    of_head: float
    """|g - g32| / |g32| of the head's gradient alone, for all batches; where the
    embedding is the head, of the embedding's."""


def main(config: Config, command: str) -> list[Measured]:
    """Prints the table, adds the rows to the file, and returns them.

    Raises:
      ValueError: the run has no checkpoint, or its held-out text fills no batch.
    """
    named = load_named_model(config.run)
    batches = list(batches_of(named, config))
    if not batches:
        raise ValueError(
            f"the held-out text of {config.run} does not fill a batch of "
            f"{config.batch_size} windows of {named.sequence_length} tokens; give a "
            f"smaller --batch-size"
        )
    given = named.model.config
    exact = replace(in_setting(given, "bfloat16"), dtype="float32")
    reference = gradient_of(named.model, exact)
    others = {
        name: gradient_of(named.model, in_setting(given, name))
        for name in config.settings
    }
    with jax.default_matmul_precision("highest"):
        found = compared(reference, others, batches)
    tokens = sum(batch[:, 1:].size for batch in batches)
    of_run = {
        "run": config.run,
        "parameters": sum(of.size for of in jax.tree.leaves(_params(named.model))),
        "vocab_size": named.model.config.vocab_size,
        "tokens": tokens,
        "tokens_per_batch": batches[0][:, 1:].size,
        "device": jax.devices()[0].device_kind,
        "commit": commit(),
        "command": command,
    }
    append_rows((asdict(of) | of_run for of in found), config.results)
    _print(found, tokens, batches[0][:, 1:].size)
    return found


def in_setting(config: ModelConfig, setting: Setting) -> ModelConfig:
    """Returns the settings of the model in a precision."""
    plain = replace(config, precision="dtype", logits_of_loss="float32")
    return replace(plain, dtype="bfloat16", **SETTINGS[setting])


def batches_of(
    named: NamedModel, config: Config
) -> Iterator[Int[np.ndarray, "batch tokens"]]:
    """Yields batches of whole windows of what the run has held out.

    Raises:
      ValueError: the model is none of a run, or the text is not the run's any more.
    """
    if named.data is None or named.corpus is None:
        raise ValueError(f"{config.run} is no run, and holds no text out; give a run")
    corpus = load_corpus(named.data, vocab_size=named.model.config.vocab_size)
    corpus.check_is_that_of(config.run, named.corpus)
    windows = every_window(corpus.validation, named.sequence_length)
    whole = (of for of in windows if len(of) == named.sequence_length + 1)
    for rows in batched(islice(whole, config.windows), config.batch_size):
        if len(rows) == config.batch_size:
            yield np.stack(rows).astype(np.int32)


def gradient_of(model: Transformer, config: ModelConfig) -> Gradient:
    """Returns a compiled function from tokens to the mean loss and its gradient, of a
    model with the arrays of `model` that computes as `config` says."""
    params, rest = _params(model), nnx.state(model, nnx.Not(nnx.Param))
    plain = replace(config, remat="none")
    graph = nnx.graphdef(
        nnx.eval_shape(
            lambda: Transformer(plain, sparsity=model.sparsity, rngs=nnx.Rngs(0))
        )
    )

    def loss(params: PyTree, tokens: jax.Array) -> jax.Array:
        # Random estimators draw alike in every precision.
        of = nnx.merge(graph, params, rest, copy=True)
        return cross_entropy(of, tokens, jax.random.key(0))

    both = jax.jit(jax.value_and_grad(loss))
    return lambda tokens: both(params, tokens)


def compared(
    reference: Gradient,
    others: dict[Setting, Gradient],
    batches: Sequence[Int[np.ndarray, "batch tokens"]],
) -> list[Measured]:
    """Returns what the gradients of `others` differ by from those of the reference."""
    total: PyTree = None
    sums: dict[Setting, PyTree] = dict.fromkeys(others)
    losses: dict[Setting, list[float]] = {name: [] for name in others}
    errors: dict[Setting, list[float]] = {name: [] for name in others}
    for batch in batches:
        expected_loss, expected = reference(jnp.asarray(batch))
        total = _plus(total, expected)
        for name, gradient in others.items():
            loss, got = gradient(jnp.asarray(batch))
            off = jax.tree.map(jnp.subtract, got, expected)
            sums[name] = _plus(sums[name], off)
            losses[name].append(float(loss) - float(expected_loss))
            errors[name].append(_norm(off) / _norm(expected))
    spread = lambda values: float(np.std(values, ddof=1) / np.sqrt(len(values)))
    return [
        Measured(
            setting=name,
            loss_difference=float(np.mean(losses[name])),
            loss_error=spread(losses[name]) if len(batches) > 1 else float("nan"),
            of_batch=float(np.mean(errors[name])),
            of_all=_norm(sums[name]) / _norm(total),
            of_head=_norm(_head(sums[name])) / _norm(_head(total)),
        )
        for name in others
    ]


def _params(model: Transformer) -> nnx.State:
    return nnx.state(model, nnx.Param)


def _plus(total: PyTree, of: PyTree) -> PyTree:
    return of if total is None else jax.tree.map(jnp.add, total, of)


def _norm(tree: PyTree) -> float:
    squares = [float(jnp.sum(jnp.square(of))) for of in jax.tree.leaves(tree)]
    return sum(squares) ** 0.5


def _head(gradient: nnx.State) -> PyTree:
    return gradient["head"] if "head" in gradient else gradient["embedding"]


def _print(found: Sequence[Measured], tokens: int, of_batch: int) -> None:
    table = Table(title=f"gradients to those of float32, {tokens:,} tokens")
    table.add_column("precision")
    for column in ("loss", f"{of_batch:,} tokens", "all", "head"):
        table.add_column(column, justify="right")
    for of in found:
        shares = (of.of_batch, of.of_all, of.of_head)
        loss = f"{1e3 * of.loss_difference:+.3f} +- {1e3 * of.loss_error:.3f} mn"
        table.add_row(of.setting, loss, *(f"{share:.2%}" for share in shares))
    console.STDOUT.print(table)


def run(arguments: list[str]) -> int:
    """Runs the command and returns its exit status."""
    script = "experiments/gradient_precision.py"
    return run_script(main, Config, arguments, script=script, description=__doc__)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
