"""Cases of config.json: settings that are wrong, odd, missing, or not even JSON."""

import io
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

from numpy.random import Generator
from rich.console import Console

from sparsejax import cost_model
from sparsejax.config import RECIPES, RecipeName, TrainConfig, config_file
from sparsejax.config.config_file import from_json, read_config, to_json
from sparsejax.config.presets import PRESETS
from sparsejax.config.schedule import phases
from sparsejax.cost_model import parameter_count
from sparsejax.distributed.mesh import check_shardable
from sparsejax.dtypes import Precision
from sparsejax.feed_forward.sparsity import TokenSparsity
from sparsejax.ops.backend import Backend
from sparsejax.routing.named_routers import ROUTERS
from sparsejax.terminal import console, printed_plan
from tests.fuzz.judge import judging, require
from tests.fuzz.mutations import damaged, mutated_json, one_of
from tests.support.micro_run import micro_config


def case(generator: Generator, folder: Path, material: None) -> str:
    path = folder / "config.json"
    write(generator, path)
    settings = _parsed(path)
    config = read_config(path)
    with judging():
        require(
            to_json(config) == _with_defaults(settings),
            f"{to_json(config)} was read from {settings}",
        )
        for name, value in _numbers([to_json(config)]):
            require(0 <= value <= 3.5e38, f"{name}={value} was accepted")
    check_round_trip(config)
    check_plan(generator, config)
    return "settings and plan"


def write(generator: Generator, path: Path) -> None:
    """A config.json with anything wrong in it, or nothing."""
    settings = to_json(starting_point(generator))
    kind = generator.random()
    if kind < 0.75:
        settings = mutated_json(generator, settings, int(generator.integers(4)))
    content = json.dumps(settings).encode()
    if kind > 0.7:
        content = damaged(generator, content)
    if kind > 0.98:
        content = b'{"model":' * 100_000
    path.write_bytes(content)


def starting_point(generator: Generator) -> TrainConfig:
    """A preset or the micro run, with another recipe and some of its settings."""
    starts = [*(make() for make in PRESETS.values()), micro_config("*.txt")]
    settings = to_json(one_of(generator, starts))
    settings["recipe"] = recipe = one_of(generator, get_args(RecipeName))
    plain = to_json(replace(TrainConfig(), recipe=recipe))["phases"]["sparsity"]
    settings["phases"]["sparsity"] = sparsity = plain
    if recipe == "paper":
        experts = one_of(generator, (1, 2, 4, 8))
        v = one_of(generator, (8, 16, 30, 128))
        sparsity |= {
            "experts_per_token": int(generator.integers(1, experts + 1)),
            "router": one_of(generator, ROUTERS).name,
            "skip_blocks": bool(generator.integers(2)),
            "activations": f"{v}:2:{4 * experts}",
        }
    if RECIPES[recipe].activations is not None:
        kinds = (None, *get_args(TokenSparsity))
        sparsity["token_sparsity"] = kind = one_of(generator, kinds)
        sparsity["mask_reuse"] = bool(generator.integers(2))
        if kind is not None:
            sparsity["dense_features"] = one_of(generator, (0.0, 0.05, 0.5))
            sparsity["permute_tokens"] = bool(generator.integers(2))
    if recipe == "weights" and generator.random() < 0.5:
        settings["model"]["activation"] = "swiglu"
    elif recipe != "paper" and generator.random() < 0.3:
        settings["model"]["activation"] = "reglu2"
    if generator.random() < 0.3:
        decay = one_of(generator, (0.0, 0.2, 0.9))
        settings["optimizer"] |= {"schedule": "wsd", "decay_share": decay}
    if generator.random() < 0.5:
        settings["mesh"] = {
            axis: one_of(generator, (1, 1, 2)) for axis in ("data", "fsdp", "tensor")
        }
    if generator.random() < 0.2:
        settings["backend"] = one_of(generator, get_args(Backend))
    settings["model"]["remat"] = one_of(generator, ("none", "full", "dots"))
    if recipe != "s2d":
        precisions = ("dtype", *get_args(Precision))
        settings["model"]["precision"] = one_of(generator, precisions)
    return from_json(settings)


def check_round_trip(config: TrainConfig) -> None:
    """The settings come back from JSON, and as the same text."""
    with judging():
        text = json.dumps(to_json(config))
        again = config_file.from_json(json.loads(text))
        require(again == config, f"{again} was written as {config}")
        require(json.dumps(to_json(again)) == text, f"another text than {text}")


def check_plan(generator: Generator, config: TrainConfig) -> None:
    """Phases add up, every figure of the plan is finite, and it can be printed."""
    planned = phases(config)
    with judging():
        steps = [phase.steps for phase in planned]
        require(min(steps) > 0, f"an empty phase in {steps}")
        require(sum(steps) == config.steps, f"{steps} are not {config.steps} steps")
    devices = (1, 8, *3 * (config.mesh.devices or 1,))
    mesh = config.mesh.resolve(one_of(generator, devices))
    sparsities = [phase.sparsity for phase in planned]
    micro_batches = config.micro_batches_on(mesh)
    micro_batch = config.batch_size // micro_batches
    check_shardable(config.model, sparsities, mesh, micro_batch=micro_batch)
    length = config.data.sequence_length
    tokens = micro_batch * length // mesh.token_shards
    flops = cost_model.flops_per_token(config.model, length)
    figures = [parameter_count(config.model), flops]
    for sparsity in sparsities:
        memory = cost_model.memory_bytes(
            config.model, tokens_per_device=tokens, mesh=mesh, sparsity=sparsity
        )
        sent = cost_model.communication_bytes(
            config.model, mesh, sparsity, micro_batches, tokens
        )
        factors = cost_model.gemm_speedups(config.model, sparsity)
        step = cost_model.predicted_speedup(flops.ffn_share(), factors)
        whole = cost_model.whole_run_speedup(step, config.phases.sparse_share)
        figures += [memory, sent, {"step": step, "run": whole}]
    with judging():
        for name, figure in _numbers(figures):
            require(math.isfinite(figure) and figure >= 0, f"{name} is {figure}")
    print_plan(replace(config, mesh=mesh))


def print_plan(config: TrainConfig) -> str:
    """Prints the plan of --dry-run."""
    printed = io.StringIO()
    shown, console.STDOUT = console.STDOUT, Console(file=printed, width=120)
    try:
        printed_plan.announce(config, predicted=True, assumed=True)
    finally:
        console.STDOUT = shown
    return printed.getvalue()


def _numbers(figures: list[Any]) -> Iterator[tuple[str, float]]:
    """The numbers in dataclasses and nested dictionaries, by name."""
    for figure in figures:
        values = figure if isinstance(figure, dict) else asdict(figure)
        for name, value in values.items():
            if isinstance(value, dict):
                yield from _numbers([value])
            elif isinstance(value, int | float):
                yield name, value


def _parsed(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes().decode("utf-8"))
    except (ValueError, RecursionError):
        return None


def _with_defaults(settings: dict) -> dict:
    """The settings, and the defaults of those that are not there."""

    def filled(defaults: dict, given: dict) -> dict:
        full = dict(defaults)
        for name, value in given.items():
            nested = isinstance(defaults[name], dict) and value is not None
            full[name] = filled(defaults[name], value) if nested else value
        return full

    recipe = settings.get("recipe", TrainConfig.recipe)
    defaults = to_json(TrainConfig(recipe=recipe))
    full = filled(defaults, settings)
    if full["phases"]["sparsity"] is None:  # stands for the recipe's own
        full["phases"]["sparsity"] = defaults["phases"]["sparsity"]
    return full
