"""Times one training step of the sparse FFN against the dense one.

    uv run experiments/bench/ffn.py
    uv run --extra cuda experiments/bench/ffn.py --dtype bfloat16 --zeros 0.9 \\
        --tokens 16384 --d-model 4096 --d-hidden 16384 --backend mosaic_sm90 \\
        --only "2:4 activations along tokens" "all six GEMMs 2:4" \\
        --results experiments/results/bench_ffn.jsonl

A step is everything that a training step spends on one FFN: routing, soft threshold
and packing of the weights, forward, backward. Inputs and output cotangent are random;
with `--run` weights and inputs are those of the middle layer of a trained model:

    uv run --extra cuda experiments/pretrain.py --recipe activations \\
        --model.d-model 2048 --model.d-hidden 8192 --run-folder runs/wide \\
        --model.heads 16 --model.kv-heads 16
    uv run --extra cuda experiments/bench/ffn.py --run runs/wide --dtype bfloat16

Every mode is first compared with the masked dense computation of `masked_ffn`, written
without the library's masks, dispatch or grouped GEMMs; a wrong mode stops the run.

Two CPU cores: about 1 minute. Expected there: V:N:M with skip_blocks takes less than
half of the dense time; 2:4 alone saves nothing, because only sparse tensor cores can
skip inside a group of four, and costs its selection. On a GPU calls follow each other
without a gap, as in a training step; the dense step is timed alone too, before any
sparse one has run (`over_alone`).
"""

import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import NormalDist
from typing import Literal

import jax
import jax.numpy as jnp
import tyro
from flax import nnx
from jaxtyping import Array
from rich import box
from rich.console import Console
from rich.table import Table

from experiments.bench.kernel_times import kernel_times
from experiments.bench.references.masked_ffn import Inputs, masked_dense
from experiments.bench.rows import append_rows
from experiments.bench.sparse_modes import choose, sparse_modes
from sparsejax.checkpoints.checkpoint import Checkpoints
from sparsejax.config import MeshConfig
from sparsejax.config.config_file import read_config
from sparsejax.feed_forward.ffn import ffn
from sparsejax.feed_forward.sparsity import DENSE, FFNSparsity
from sparsejax.feed_forward.spec import FFNSpec
from sparsejax.models.transformer import Transformer
from sparsejax.ops.backend import Backend, current_device
from sparsejax.reports.metrics import ffn_statistics
from sparsejax.reports.provenance import commit
from sparsejax.routing.clusters import balanced_clusters, contiguous_order
from sparsejax.sparsity.masks import soft_threshold, soft_threshold_scale
from sparsejax.training.run import Run
from sparsejax.tuning.timing import Timing, over_alone, time_interleaved, time_queued

BASELINE = "dense"

# Library and check sum in another order, so at float32 a handful of the two million
# groups of the default shape choose otherwise: a relative error of 1e-4 to 1e-3. In
# bfloat16 some in a thousand do, and every number is rounded to 2^-9 of itself.
TOLERANCES = {"float32": 2e-3, "bfloat16": 5e-2}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of the benchmark: sizes, modes, inputs, and where the rows are
    written."""

    tokens: int = 4096
    """Number of tokens T."""
    d_model: int = 512
    d_hidden: int = 2048
    """Number of neurons F."""
    experts: int = 4
    """Number of experts E, clusters of neurons; a token uses 1 of E (and 2 of 2 E in
    one mode)."""
    v: int = 128
    """Rows of a V:N:M block: the row tile of the grouped GEMMs."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of X, dY and the GEMMs; the weights are float32 masters."""
    zeros: float = 0.5
    """Share of zeros in relu(Y1): 0.5 in a new network, 0.9 in a trained one."""
    run: Path | None = None
    """Folder of a run of a squared-ReLU model: weights are those of its middle layer,
    inputs what that layer reads of the training text; d_model, d_hidden and zeros are
    then the model's. None: weights and inputs are random."""
    backend: Backend | None = None
    """The backend that runs the sparse modes; None: the fastest for each GEMM."""
    only: tuple[str, ...] = ()
    """Names of the modes that are timed beside the dense one; none named: all."""
    rounds: int = 15
    seed: int = 0
    results: Path | None = Path("runs/bench_ffn.jsonl")
    """File to which one JSON line per mode is appended; None writes nothing. Rows that
    are to stay: experiments/results/bench_ffn_cpu.jsonl."""


def modes(config: Config) -> dict[str, FFNSparsity]:
    """Returns the FFNs that are compared, by name; the baseline comes first.

    Those that choose experts by 8-bit floats have to be named: a kernel sums them with
    fewer bits than the oracle, and where two experts are nearly tied takes the other
    one, which may be more of the result than its tolerance.
    """
    known = sparse_modes(experts=config.experts, v=config.v)
    names = [name for name, of in known.items() if not of.chooses_in_fp8]
    return {BASELINE: DENSE, **choose(config.only or names, known)}


def of_run(config: Config) -> tuple[Config, Inputs]:
    """Returns the settings with the sizes of the run that `config.run` names, and its
    inputs.

    Raises:
      ValueError: the folder holds no run, or one of a gated model.
    """
    assert config.run is not None
    saved = config.run / "config.json"
    if not saved.is_file():
        raise ValueError(f"run={config.run}: there is no {saved}; give a run folder")
    train_config = read_config(saved)
    if train_config.model.gated:
        raise ValueError(
            f"run={config.run} has model.activation={train_config.model.activation!r}; "
            f"this is about the squared-ReLU FFN, train one with activation relu2"
        )
    train_config = replace(train_config, mesh=MeshConfig(data=1))
    run = Run(train_config, devices=jax.devices()[:1])
    with Checkpoints(config.run / "checkpoints") as checkpoints:
        phase = run.phases[checkpoints.metadata()["phase"]]
        restored = checkpoints.restore(template=run.template(phase.held))
    model = run.model(restored.state, phase.sparsity, phase.held)
    layer = train_config.model.layers // 2
    x = _ffn_inputs(model, run, layer, config.tokens)
    ffn = model.blocks.ffn
    w_up, w_down = ffn.w_up[...][layer], ffn.w_down[...][layer]
    assignment, centres = balanced_clusters(w_up, config.experts)
    order = contiguous_order(assignment, config.experts)
    w_up, w_down = w_up[:, order], w_down[order]
    active = jax.jit(lambda x, w: jnp.mean(x @ w.astype(x.dtype) > 0))(x, w_up)
    d_model, d_hidden = w_up.shape
    config = replace(
        config, d_model=d_model, d_hidden=d_hidden, zeros=1 - float(active)
    )
    random = make_inputs(config)
    inputs = replace(
        random,
        x=x.astype(config.dtype),
        w_up=w_up,
        w_down=w_down,
        scales=_scales(w_up, w_down),
        centres=centres,
    )
    return config, inputs


def _ffn_inputs(model: Transformer, run: Run, layer: int, tokens: int) -> jax.Array:
    """Returns the inputs of one layer's FFN, (tokens, d_model), for the first training
    batches."""

    @nnx.jit
    def read(model: Transformer, batch: jax.Array) -> jax.Array:
        _, inputs = model.features(
            batch[:, :-1], key=jax.random.key(0), capture_ffn_inputs=True
        )
        assert inputs is not None
        return inputs[layer].reshape(-1, inputs.shape[-1])

    batches, found, count = run.batches(), [], 0
    while count < tokens:
        for batch in run.place(next(batches)["tokens"]):
            found.append(read(model, batch))
            count += len(found[-1])
    return jnp.concatenate(found)[:tokens]


def _scales(w_up: jax.Array, w_down: jax.Array) -> jax.Array:
    scales = [soft_threshold_scale(w_up, axis=0), soft_threshold_scale(w_down, axis=1)]
    return jnp.stack(scales)


def make_inputs(config: Config) -> Inputs:
    """Returns random weights and inputs, with unit centres, so that experts are about
    equally popular.

    The first feature of X is 1, and its weight is chosen so that a share of `zeros` is
    left in relu(Y1), as a learned bias would leave it.
    """
    if not 0 < config.zeros < 1:
        raise ValueError(f"zeros={config.zeros} is not between 0 and 1")
    if config.tokens % 4:
        raise ValueError(f"tokens={config.tokens} is not a multiple of four")
    t, d, f = config.tokens, config.d_model, config.d_hidden
    keys = jax.random.split(jax.random.key(config.seed), 5)
    x = jax.random.normal(keys[0], (t, d)).at[:, 0].set(1)
    w_up = jax.random.normal(keys[1], (d, f)) / d**0.5
    w_up = w_up.at[0].set(-NormalDist().inv_cdf(config.zeros))
    w_down = jax.random.normal(keys[2], (f, d)) / f**0.5
    centres = jax.random.normal(keys[4], (config.experts, d))
    return Inputs(
        x=x.astype(config.dtype),
        w_up=w_up,
        w_down=w_down,
        dy=jax.random.normal(keys[3], (t, d), config.dtype),
        scales=_scales(w_up, w_down),
        centres=centres / jnp.linalg.norm(centres, axis=1, keepdims=True),
        token_ids=jax.random.randint(keys[4], (t,), 0, 50_000),
    )


def routes(sparsity: FFNSparsity, inputs: Inputs) -> Array | None:
    """Returns the experts of the tokens, int32 (tokens, experts_per_token), where they
    are known before GEMM 1; else None."""
    experts, router = sparsity.experts, sparsity.router
    if experts is None or router.inside:
        return None
    return router.choose(
        inputs.token_ids if router.reads == "token_ids" else inputs.x,
        experts=experts,
        experts_per_token=sparsity.experts_per_token,
        state=router.clustered_state(inputs.w_up, inputs.centres),
    )


Step = Callable[..., tuple[Array, Array, Array, Array]]


def step(
    sparsity: FFNSparsity, inputs: Inputs, *, backend: Backend | None = None
) -> tuple[Array, Array, Array, Array]:
    """Returns (y, dx, dw_up, dw_down) as the library computes them, which is what is
    timed."""
    expert_index = routes(sparsity, inputs)

    def run(x, w_up, w_down):
        return ffn(
            x,
            w_up,
            w_down,
            sparsity=sparsity,
            scales=inputs.scales,
            expert_index=expert_index,
            backend=None if sparsity.is_dense else backend,
        )

    y, pull_back = jax.vjp(run, inputs.x, inputs.w_up, inputs.w_down)
    return y, *pull_back(inputs.dy)


OUTPUTS = ("y", "dx", "dw_up", "dw_down")


def check(
    name: str, got: Sequence[Array], expected: Sequence[Array]
) -> dict[str, float]:
    """Returns the relative error of each output.

    Raises:
      AssertionError: an error is above that of `TOLERANCES`.
    """
    errors = {}
    tolerance = TOLERANCES[str(got[0].dtype)]
    for output, *arrays in zip(OUTPUTS, got, expected, strict=True):
        ours, theirs = (array.astype(jnp.float32) for array in arrays)
        error = float(jnp.linalg.norm(ours - theirs) / jnp.linalg.norm(theirs))
        if not error <= tolerance:
            raise AssertionError(
                f"mode {name!r}: {output} differs from the masked dense computation "
                f"by {error:.2e} of its norm, more than {tolerance:.0e}"
            )
        errors[output] = error
    return errors


def main(
    config: Config, *, run_step: Step = step, arguments: Sequence[str] = ()
) -> list[dict]:
    """Checks, times, prints and records every mode; returns the rows."""
    if config.run is None:
        inputs = make_inputs(config)
    else:
        config, inputs = of_run(config)
    run = partial(run_step, backend=config.backend)
    right = jax.jit(masked_dense, static_argnums=0)
    timed = partial(time_interleaved, baseline=BASELINE, rounds=config.rounds)
    if jax.default_backend() == "gpu":
        timed = partial(_queued, config.rounds)
    calls, memory, errors = {}, {}, {}
    alone = None
    for name, sparsity in modes(config).items():
        compiled = jax.jit(partial(run, sparsity)).lower(inputs).compile()
        calls[name] = partial(compiled, inputs)
        memory[name] = compiled.memory_analysis()
        errors[name] = check(name, calls[name](), right(sparsity, inputs))
        if alone is None:  # the baseline is the first
            (alone,) = timed(calls)
    assert alone is not None
    rows = [
        _row(config, timing, arguments)
        | {
            "error": errors[timing.name],
            "temporaries_mib": memory[timing.name].temp_size_in_bytes / 2**20,
            "kernel_us": _kernel_us(calls[timing.name]),
            **_routing(modes(config)[timing.name], inputs),
            **over_alone(timing, alone),
        }
        for timing in timed(calls)
    ]
    append_rows(rows, config.results)
    _print(config, rows)
    return rows


def _queued(rounds: int, calls: Mapping[str, Callable[[], object]]) -> list[Timing]:
    # Alone it follows a compilation, during which the chip has cooled.
    settle = 1.0 if len(calls) == 1 else 0.08
    timings, _ = time_queued(
        calls, baseline=BASELINE, rounds=rounds, settle_seconds=settle
    )
    return timings


def _routing(sparsity: FFNSparsity, inputs: Inputs) -> dict:
    """Returns how many tokens each expert has, and the share of A^2 that lies in the
    chosen experts and in the best; nothing without a router."""
    if not sparsity.experts:
        return {}
    w_up = inputs.w_up
    if sparsity.weights:
        w_up = inputs.scales[0] * soft_threshold(w_up, axis=0)
    measure = jax.jit(ffn_statistics, static_argnums=2)
    report = measure(inputs.x, w_up, sparsity, routes(sparsity, inputs))
    shares = ("router_mass", "oracle_mass")
    return {
        "tokens_per_expert": report["tokens_per_expert"].tolist(),
        **{name: round(float(report[name]), 4) for name in shares},
    }


def _kernel_us(call: Callable[[], object]) -> dict[str, float]:
    """Returns the microseconds of each GPU kernel in one step that runs by itself, by
    name: the chip has rested, so that their sum is below the time of a step among
    others."""
    return {name: round(1e3 * ms, 1) for name, ms in kernel_times(call).items()}


def _row(config: Config, timing: Timing, arguments: Sequence[str]) -> dict:
    sparsity = modes(config)[timing.name]
    spec = FFNSpec(
        tokens=config.tokens,
        d_model=config.d_model,
        d_hidden=config.d_hidden,
        dtype=config.dtype,
        sparsity=sparsity,
        device=current_device(),
    )
    decisions = spec.explain(None if sparsity.is_dense else config.backend)
    dense_flops = sum(decision.spec.dense_flops for decision in decisions)
    figures = (
        "time_ms",
        "time_ms_min",
        "time_ms_max",
        "ratio",
        "ratio_min",
        "ratio_max",
    )
    return {
        "mode": timing.name,
        "shape": {
            "tokens": config.tokens,
            "d_model": config.d_model,
            "d_hidden": config.d_hidden,
            "experts": sparsity.experts,
            "v": config.v if sparsity.experts else None,
        },
        "dtype": spec.dtype,
        "inputs": "random" if config.run is None else f"of run {config.run.name}",
        "zeros": round(config.zeros, 4),
        "gemms": [f"{d.spec.name}: {d.backend}" for d in decisions],
        **{name: round(getattr(timing, name), 4) for name in figures},
        "rounds": timing.rounds,
        "executed_share": sum(d.executed_share for d in decisions) / len(decisions),
        "dense_equivalent_gflops": round(dense_flops / timing.time_ms / 1e6, 1),
        "device": jax.devices()[0].device_kind,
        "cores": os.cpu_count(),
        "jax": jax.__version__,
        "commit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "command": shlex.join(["python", "-m", "experiments.bench.ffn", *arguments]),
    }


def _print(config: Config, rows: Sequence[dict]) -> None:
    table = Table(
        box=box.SIMPLE,
        title=f"FFN step, T={config.tokens} d={config.d_model} F={config.d_hidden} "
        f"E={config.experts} V={config.v}, {config.dtype}, {rows[0]['device']}",
        caption="time / dense: median of the ratios in one round (min-max) over "
        f"{config.rounds} rounds, and of the medians, where dense was timed alone; "
        "executed: share of the dense FLOPs; GFLOP/s: dense-equivalent, as if all six "
        "GEMMs were dense",
    )
    table.add_column("mode", no_wrap=True)
    for heading in ("ms", "time / dense", "/ alone", "executed", "GFLOP/s"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row["mode"],
            f"{row['time_ms']:.1f}",
            f"{row['ratio']:.2f} ({row['ratio_min']:.2f}-{row['ratio_max']:.2f})",
            f"{1 / row['over_dense_alone']:.2f}",
            f"{row['executed_share']:.0%}",
            f"{row['dense_equivalent_gflops']:.0f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__), arguments=sys.argv[1:])
