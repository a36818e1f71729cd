"""The model card of an exported run: README.md of its folder."""

from sparsejax.config import ModelConfig
from sparsejax.config.schedule import Phase
from sparsejax.feed_forward.sparsity import FFNSparsity
from sparsejax.interchange.architectures import CLASSES, model_type_of
from sparsejax.interchange.trained_model import TrainedModel
from sparsejax.sparsity.patterns import name_of

HEADER = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- sparsejax
---
"""


def model_card(run: TrainedModel, *, name: str, tokenizer: str | None) -> str:
    """Returns the card of a run's model as Markdown: what it is, how it was trained, to
    which loss, on how many tokens, by which commit. No path of the run's data is in it.

    Args:
      run: the model as its run left it, before its weights were made dense.
      name: the title.
      tokenizer: what the tokenizer is, in words; None where there is none.
    """
    sections = [
        HEADER + f"# {name}",
        _what_it_is(run.model.config, tokenizer),
        "## Training",
        _how_it_was_trained(run),
        "\n".join(_table(run)),
    ]
    if not run.model.sparsity.is_dense:
        sections += ["## Weights", _what_became_of_the_weights(run.model.sparsity)]
    elif run.model.config.static_weights is not None:
        sections += ["## Weights", _what_static_weights_are(run.model.config)]
    return "\n\n".join(sections) + "\n"


def _what_it_is(model: ModelConfig, tokenizer: str | None) -> str:
    architecture = CLASSES[model_type_of(model)]
    reads = tokenizer or "token ids; no tokenizer turned text into them in this run"
    return (
        f"A decoder-only transformer, `{architecture}` of `transformers`: "
        f"{model.layers} layers, d_model {model.d_model}, {model.heads} heads "
        f"({model.kv_heads} of keys and values), FFN {model.activation} of width "
        f"{model.d_hidden}. It reads {reads}."
    )


def _how_it_was_trained(run: TrainedModel) -> str:
    config = run.config
    recipe = f"recipe `{config.recipe}`"
    if config.phases.schedule:
        recipe = "a schedule of its own"
    return (
        f"Pre-trained by sparsejax with {recipe}, {run.step:,} of {config.steps:,} "
        f"steps.{_what_it_began_with(run)} The phases of the whole run:\n\n"
        + "\n".join(f"* {_phase(phase)}" for phase in run.phases)
    )


def _what_it_began_with(run: TrainedModel) -> str:
    """Returns a sentence where the run went on with weights of another function."""
    starts = [of for of in run.records() if of["event"] == "start"]
    if not starts or not (starts[0].get("init_from") or {}).get("relufied"):
        return ""
    return (
        " It began with the weights of a model gated by SiLU, and put squared ReLU in "
        "its place: another function, trained back from a loss of "
        f"{starts[0]['validation_loss']:.4f} nats per token at its first step."
    )


def _phase(phase: Phase) -> str:
    text = f"{phase.kind}: {phase.steps:,} steps, {_sparsity(phase.sparsity)}"
    if phase.static_weights is not None:
        text += f" on static weights {name_of(phase.static_weights)}"
    if phase.d_hidden is not None:
        text += f", FFN width {phase.d_hidden}"
    if phase.layers is not None:
        text += f", {phase.layers} layers"
    if phase.every is not None:
        between = _sparsity(phase.every.sparsity)
        text += f"; every {phase.every.steps} steps one of {between}"
    return text


def _sparsity(sparsity: FFNSparsity) -> str:
    if sparsity.is_dense:
        return "dense"
    sides = {"weights": sparsity.weights, "activations": sparsity.activations}
    named = [f"{side} {name_of(of)}" for side, of in sides.items() if of is not None]
    return ", ".join(named)


def _table(run: TrainedModel) -> list[str]:
    records = run.records()
    validations = [of for of in records if of["event"] == "validation"]
    starts = [of for of in records if of["event"] == "start"]
    loss = "not recorded"
    if validations:
        last = validations[-1]
        loss = f"{last['loss']:.4f} nats per token, at step {last['step']:,}"
    commit = starts[0].get("commit") if starts else None
    rows = {
        "tokens seen": f"{run.tokens:,}",
        "validation loss": loss,
        "sequence length": f"{run.config.data.sequence_length:,}",
        "sequences per step": f"{run.config.batch_size:,}",
        "peak learning rate": f"{run.config.optimizer.peak_learning_rate:g}",
        "compute type": run.config.model.dtype,
        "seed": str(run.config.seed),
        "commit of sparsejax": commit or "not recorded",
    }
    return ["| | |", "|---|---|", *(f"| {key} | {of} |" for key, of in rows.items())]


def _what_static_weights_are(model: ModelConfig) -> str:
    assert model.static_weights is not None
    return (
        f"The run was in a phase with static weights {name_of(model.static_weights)} "
        f"in all linear layers. They are stored as whole matrices, with zeros where "
        f"the pattern has no entry."
    )


def _what_became_of_the_weights(sparsity: FFNSparsity) -> str:
    if sparsity.activations is None:
        return (
            "The run was in a phase with 2:4 weights. They are stored folded, as plain "
            "matrices that compute what the run computed."
        )
    return (
        f"The run was in a phase with {_sparsity(sparsity)}. This model leaves no "
        f"activation out, so that it computes something else than the run did, and the "
        f"validation loss above is not its own."
    )
