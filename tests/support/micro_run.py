"""A training run small enough for tests, and what two runs are compared by."""

import json
from dataclasses import fields, replace
from pathlib import Path

import jax
import numpy as np

from sparsejax.config import (
    RECIPES,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    RecipeConfig,
    TrainConfig,
)
from sparsejax.config.config_file import to_json
from sparsejax.feed_forward.sparsity import FFNSparsity
from sparsejax.sparsity.patterns import VNM
from sparsejax.training.step import TrainState

WORDS = "the sparse dense token mask expert weight neuron of in and with is a".split()


def write_text(folder: Path) -> str:
    """Eight files of random words; the glob that finds them."""
    generator = np.random.default_rng(0)
    for index in range(8):
        words = " ".join(generator.choice(WORDS, 300))
        (folder / f"{index}.txt").write_text(words)
    return f"{folder}/*.txt"


def micro_config(text: str, **changes) -> TrainConfig:
    """3 steps of warm-up, 6 sparse ones, 3 of the tail; 16 neurons per expert."""
    phases = RecipeConfig(warmup_share=0.25, sparse_share=0.5)
    recipe = changes.pop("recipe", "two-four")
    blocks = {"paper": VNM(8, 2, 16), "experts": VNM(8, 4, 16)}
    if recipe in blocks:
        sparsity = replace(RECIPES[recipe], activations=blocks[recipe])
        phases = replace(phases, sparsity=sparsity)
    config = TrainConfig(
        recipe=recipe,
        model=ModelConfig(
            vocab_size=256, d_model=16, layers=2, heads=2, kv_heads=1, d_hidden=64
        ),
        data=DataConfig(text=text, sequence_length=16, validation_share=0.3),
        optimizer=OptimizerConfig(
            peak_learning_rate=1e-2, schedule="cosine", warmup_share=0.1
        ),
        phases=phases,
        steps=12,
        batch_size=4,
        log_every=1,
        eval_every=4,
        eval_batches=2,
        checkpoint_every=2,
        sample_length=0,
        plot=False,
    )
    return replace(config, **changes)


def arguments_of(config: TrainConfig) -> list[str]:
    """The command line that gives `config`, which has no schedule."""
    arguments = []

    def add(values: dict, prefix: str) -> None:
        for name, value in values.items():
            flag = f"{prefix}{name.replace('_', '-')}"
            if name == "schedule" and prefix == "phases.":
                assert not value  # is read from a file
            elif name == "sparsity" and prefix == "phases.":
                add(value, prefix)
            elif isinstance(value, dict):
                add(value, f"{flag}.")
            elif isinstance(value, bool):
                last = flag.split(".")
                arguments.append(
                    "--" + ".".join([*last[:-1], ("no-" * (not value)) + last[-1]])
                )
            else:
                arguments.extend([f"--{flag}", str(value)])

    add(to_json(config), "")
    return arguments


def with_phases(config: TrainConfig, **changes) -> TrainConfig:
    """Other settings of the phases, those of the sparse one's sparsity among them."""
    names = {field.name for field in fields(FFNSparsity)}
    own = {name: value for name, value in changes.items() if name not in names}
    of_sparsity = {name: changes[name] for name in changes if name in names}
    phases = replace(config.phases, **own)
    if of_sparsity:
        phases = replace(phases, sparsity=replace(config.sparsity, **of_sparsity))
    return replace(config, phases=phases.relative_to(config.recipe))


def arrays_of(state: TrainState) -> dict[str, np.ndarray]:
    """The leaves by name; random keys as their data."""

    def plain(leaf: jax.Array) -> np.ndarray:
        is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf)

    leaves = jax.tree.leaves_with_path(state)
    return {jax.tree_util.keystr(path): plain(leaf) for path, leaf in leaves}


def assert_same_bits(left: TrainState, right: TrainState) -> None:
    ours, theirs = arrays_of(left), arrays_of(right)
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        assert array.dtype == theirs[name].dtype, name
        assert array.tobytes() == theirs[name].tobytes(), name


def read_records(folder: Path) -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def without_speed(records: list[dict]) -> list[dict]:
    """The records without what depends on the clock, or on the checkout: a file in it
    may be written between two runs that are compared."""
    left_out = (
        "tokens_per_second",
        "tflops",
        "mfu",
        "seconds",
        "router_share",
        "commit",
    )
    return [
        {k: v for k, v in record.items() if not any(name in k for name in left_out)}
        for record in records
    ]


def stopped_run(folder: Path, config: TrainConfig) -> list[str]:
    """Makes the folder of a run of `config` that has begun; returns the arguments that
    resume it."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(to_json(config)))
    return ["--resume", str(folder)]
