"""Prints what a run would be and cost, without running it.

The data that is named is read and checked; nothing is allocated or written:

    sparsejax plan --preset llama-1b
    sparsejax plan --preset llama-1b --device 'NVIDIA H100 80GB HBM3' --devices 8
"""

from collections.abc import Sequence
from dataclasses import replace

import jax

from pallas_kernels.device import Device
from sparsejax.config import MeshConfig, TrainConfig
from sparsejax.data.batches import train_batches, validation_batches
from sparsejax.data.corpus import load_corpus
from sparsejax.launch.options import PlanOptions, parse
from sparsejax.ops.backend import current_device
from sparsejax.reports.planned_meshes import Ranking, rank_meshes
from sparsejax.terminal import console, printed_plan
from sparsejax.terminal.printed_meshes import say_meshes


def run(arguments: Sequence[str]) -> None:
    """Prints the plan of the run that the arguments describe.

    Raises:
      ValueError, ImportError, OSError, NotImplementedError: those of the run.
    """
    print_plan(parse(PlanOptions, arguments, command="plan", description=__doc__))


def print_plan(options: PlanOptions) -> None:
    """Prints the plan of a run, and which data it would read.

    Raises:
      ValueError, ImportError, OSError, NotImplementedError: those of the run; before
        anything is printed.
    """
    absent = absent_gpus(options)
    branch, init_from = options.trunk(), options.weights()
    said = what_data(options.config)
    config, ranking = options.config, ranked_meshes(options, absent)
    if ranking is not None:
        config = on_possible_mesh(config, ranking)
    printed_plan.announce(
        config,
        predicted=True,
        assumed=ranking is None or not ranking.planned,
        absent=absent,
        branch=branch,
        init_from=init_from,
    )
    if ranking is not None:
        say_meshes(options.config, ranking, options.links)
    console.say(said)


def ranked_meshes(
    options: PlanOptions, absent: printed_plan.Absent | None
) -> Ranking | None:
    """Returns all meshes of the devices that the plan is for, the fastest first; None
    where nothing is known of their speed."""
    if absent is None:
        device, count = current_device(), jax.device_count()
    else:
        device, count = absent.device, absent.mesh(options.config.mesh).devices
    return rank_meshes(options.config, device, count, options.links)


def on_possible_mesh(config: TrainConfig, ranking: Ranking) -> TrainConfig:
    """Returns the settings on the fastest mesh where they leave the mesh open and the
    one that would be taken, replicas alone, cannot be; else the settings as they
    are."""
    replicas = config.mesh == MeshConfig()
    if not replicas or not ranking.planned:
        return config
    if ranking.has(config.mesh.resolve(ranking.devices)):
        return config
    fastest = ranking.planned[0]
    return replace(config, mesh=fastest.mesh, micro_batches=fastest.micro_batches)


def what_data(config: TrainConfig) -> str:
    """Returns a line that describes the tokens that `config` would train on, which are
    read; or, where no data is named, why its model cannot train on the standard
    library's source: that does not keep a model from being planned.

    Raises:
      ValueError, ImportError: those of the run, for data that is named.
    """
    data = config.data
    try:
        corpus = load_corpus(data, vocab_size=config.model.vocab_size)
        held_out = config.validation_batch_size
        validation_batches(corpus, data, batch_size=held_out, batches=1)
        train_batches(corpus, data, batch_size=config.batch_size)
    except ValueError as error:
        if (data.text, data.shards, data.tokenizer) != (None, None, None):
            raise
        return f"data: none is named, and without it a run ends here: {error}"
    return f"data: {corpus.description}"


def absent_gpus(options: PlanOptions) -> printed_plan.Absent | None:
    """Returns the GPUs of --device and --devices; None where the plan is for those
    here.

    Raises:
      ValueError: --devices without --device or below 1, or nothing is known of the GPU.
    """
    if options.device is None and options.devices is None:
        return None
    if options.device is None:
        raise ValueError(
            f"--devices {options.devices} does not say which GPUs; add --device NAME, "
            f"or set the mesh to plan for more devices like the one here"
        )
    if options.devices is not None and options.devices < 1:
        raise ValueError(f"--devices {options.devices} is not 1 or more")
    return printed_plan.Absent(
        device=Device.named(options.device), count=options.devices
    )
