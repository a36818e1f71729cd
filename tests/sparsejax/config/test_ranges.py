"""The range of every setting, and the choices and types that it may be."""

import re
from pathlib import Path
from typing import get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsejax.config import (
    DataConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    RecipeConfig,
    TrainConfig,
)
from sparsejax.config.ranges import Interval, largest_divisor

NAN, INFINITY = float("nan"), float("inf")
COUNT = (0, -1, 2**31, 10**30)
NATURAL = (-1, 2**31)
SHARE = (-0.1, 1.5, NAN, INFINITY)
POSITIVE = (0.0, -1.0, NAN, INFINITY, 1e39)
OUT_OF_RANGE = {
    ModelConfig: {
        "vocab_size": COUNT,
        "d_model": COUNT,
        "layers": COUNT,
        "heads": COUNT,
        "kv_heads": COUNT,
        "head_dim": COUNT,
        "d_hidden": COUNT,
        "rope_base": POSITIVE,
        "norm_epsilon": POSITIVE,
    },
    OptimizerConfig: {
        "peak_learning_rate": POSITIVE,
        "warmup_share": SHARE,
        "decay_share": SHARE,
        "final_ratio": SHARE,
        "beta1": (-0.1, 1.0, NAN, INFINITY),
        "beta2": (-0.1, 1.0, NAN, INFINITY),
        "epsilon": POSITIVE,
        "momentum": (-0.1, 1.0, NAN, INFINITY),
        "weight_decay": (-0.1, NAN, INFINITY, 1e39),
        "clip_norm": POSITIVE,
    },
    RecipeConfig: {
        "warmup_share": SHARE,
        "sparse_share": SHARE,
        "recluster_every": NATURAL,
    },
    MeshConfig: {"data": NATURAL, "fsdp": COUNT, "tensor": COUNT},
    TrainConfig: {
        "steps": COUNT,
        "batch_size": COUNT,
        "micro_batches": COUNT,
        "sequences_per_device": COUNT,
        "seed": (-1, 2**32),
        "log_every": COUNT,
        "eval_every": NATURAL,
        "eval_batches": COUNT,
        "checkpoint_every": NATURAL,
        "keep_checkpoints": COUNT,
        "keep_every": NATURAL,
        "new_process_minutes": (-0.1, NAN, INFINITY, 1e39),
        "sample_length": NATURAL,
    },
}
SECTION = {
    DataConfig: "data.",
    ModelConfig: "model.",
    OptimizerConfig: "optimizer.",
    RecipeConfig: "phases.",
    MeshConfig: "mesh.",
    TrainConfig: "",
}


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (kind, name, value)
        for kind, ranges in OUT_OF_RANGE.items()
        for name, values in ranges.items()
        for value in values
    ],
)
def test_a_number_out_of_range_is_refused_by_its_dotted_name(kind, name, value):
    message = re.escape(f"{SECTION[kind]}{name}={value} must be ")
    with pytest.raises(ValueError, match=rf"^{message}(at least|above) \d"):
        kind(**{name: value})


CHOICES = {
    ModelConfig: {
        "activation": "gelu",
        "dtype": "float16",
        "precision": "fp4",
        "logits_of_loss": "bfloat16",
        "remat": "all",
    },
    DataConfig: {"shard_dtype": "int32", "split_by": "folder"},
    OptimizerConfig: {"name": "sgd", "schedule": "linear"},
    TrainConfig: {"preset": "small", "recipe": "papr", "backend": "cuda"},
}
WRONG_TYPES = {
    ModelConfig: {"layers": 2.0, "heads": True, "tie_embeddings": "no"},
    DataConfig: {"text": Path("corpus"), "seed": "0"},
    OptimizerConfig: {"beta1": "0.9", "clip_norm": None},
    RecipeConfig: {"sparsity": "paper", "fold": 1},
    MeshConfig: {"fsdp": None},
    TrainConfig: {"model": {"layers": 2}, "steps": "9", "plot": 0, "phases": None},
}


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (kind, name, value)
        for wrong in (CHOICES, WRONG_TYPES)
        for kind, fields in wrong.items()
        for name, value in fields.items()
    ],
)
def test_a_choice_or_a_type_that_is_none_is_refused_by_its_dotted_name(
    kind, name, value
):
    allowed = "one of '" if name in CHOICES.get(kind, ()) else "(an? |of type |True )"
    message = re.escape(f"{SECTION[kind]}{name}={value!r} must be ")
    with pytest.raises(ValueError, match=f"^{message}{allowed}"):
        kind(**{name: value})


@pytest.mark.parametrize("kind", CHOICES)
def test_every_choice_is_tried(kind):
    hints = get_type_hints(kind).items()
    chosen = {name for name, hint in hints if "Literal" in str(hint)}
    assert chosen == CHOICES[kind].keys()


@pytest.mark.parametrize("kind", OUT_OF_RANGE)
def test_every_number_has_a_range(kind):
    hints = get_type_hints(kind).items()
    kinds = (int, float, int | None)
    numbers = {name for name, hint in hints if hint in kinds}
    assert numbers == OUT_OF_RANGE[kind].keys()


def test_the_ends_of_a_range_belong_to_it_or_not_as_it_says():
    closed, half_open = Interval(least=0, most=1), Interval(above=0, below=1)
    assert [x in closed for x in (-1, 0, 0.5, 1, 2)] == [0, 1, 1, 1, 0]
    assert [x in half_open for x in (-1, 0, 0.5, 1, 2)] == [0, 0, 1, 0, 0]
    assert str(closed) == "at least 0 and at most 1"
    assert str(half_open) == "above 0 and below 1"


@given(number=st.integers(1, 2000), most=st.integers(1, 3000))
def test_the_largest_divisor_is_the_first_that_divides_from_above(number, most):
    expected = next(d for d in range(most, 0, -1) if number % d == 0)
    assert largest_divisor(number, most=most) == expected
