"""Gradients of a trained model in several precisions against those of float32."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments import gradient_precision
from experiments.gradient_precision import (
    SETTINGS,
    Config,
    batches_of,
    compared,
    gradient_of,
    in_setting,
)
from sparsejax.config.presets import PRESETS
from sparsejax.interchange.named_model import load_named_model
from sparsejax.training import train as loop
from sparsejax.training.train import train
from tests.support.micro_run import micro_config
from tests.support.whole_runs import shared_run

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture(scope="module")
def run(text, quick, tmp_path_factory) -> str:
    """A run of twelve dense steps."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    config = micro_config(text, recipe="dense", steps=12)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "Run", shared_run)
        train(config, folder)
    return str(folder)


def test_what_alternates_is_of_batches_and_what_stays_of_all():
    exact = {"head": jnp.array([3.0, 4.0]), "embedding": jnp.array([12.0])}
    signs = {0: 1.0, 1: -1.0, 2: 1.0, 3: -1.0}

    def noisy(tokens):
        off = signs[int(tokens[0, 0])]
        return jnp.float32(2.0 + off), exact | {"head": exact["head"] + off * 0.3}

    def biased(tokens):
        del tokens
        return jnp.float32(2.5), exact | {"embedding": exact["embedding"] * 1.1}

    batches = [np.full((2, 3), index) for index in range(4)]
    others = {"fp8": noisy, "bfloat16": biased}
    found = compared(lambda _: (jnp.float32(2.0), exact), others, batches)
    noise, bias = found
    assert (noise.setting, bias.setting) == ("fp8", "bfloat16")
    assert noise.of_batch == pytest.approx(0.3 * 2**0.5 / 13, rel=1e-5)
    assert noise.of_all == pytest.approx(0, abs=1e-6) and noise.of_head < 1e-6
    assert noise.loss_difference == pytest.approx(0, abs=1e-6)
    assert noise.loss_error == pytest.approx((4 / 3) ** 0.5 / 2, rel=1e-5)
    assert bias.of_batch == pytest.approx(1.2 / 13, rel=1e-5)
    assert bias.of_all == pytest.approx(1.2 / 13, rel=1e-5) and bias.of_head == 0
    assert bias.loss_difference == pytest.approx(0.5) and bias.loss_error == 0
    (single,) = compared(
        lambda _: (jnp.float32(2.0), exact), {"fp8": noisy}, [batches[0]]
    )
    assert np.isnan(single.loss_error)
    assert single.of_head == pytest.approx(0.3 * 2**0.5 / 5, rel=1e-5)


def test_a_setting_is_bfloat16_with_one_change():
    model = PRESETS["tiny"]().model
    given = replace(model, precision="fp8", logits_of_loss="dtype")
    plain = replace(
        given, dtype="bfloat16", precision="dtype", logits_of_loss="float32"
    )
    assert in_setting(given, "bfloat16") == plain
    for name, change in SETTINGS.items():
        assert in_setting(given, name) == replace(plain, **change)


def test_a_run_is_held_against_float32(run, tmp_path, capsys):
    results = tmp_path / "rows.jsonl"
    arguments = [run, "--windows", "6", "--batch-size", "2", "--results", str(results)]
    assert gradient_precision.run(arguments) == 0
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    found = {row["setting"]: row for row in rows}
    assert list(found) == list(SETTINGS)
    length = micro_config("").data.sequence_length
    for row in rows:
        assert (row["tokens"], row["tokens_per_batch"]) == (6 * length, 2 * length)
        assert row["run"] == run and row["command"].split()[1] == run
        assert row["of_all"] <= row["of_batch"] * 1.2
    # 8 bits of bfloat16, and 4 of the products that fp8 rounds.
    assert 1e-3 < found["bfloat16"]["of_all"] < 0.02
    assert found["bfloat16 logits"]["of_all"] != found["bfloat16"]["of_all"]
    assert found["bfloat16 logits"]["of_all"] < 0.03
    assert 2 * found["bfloat16"]["of_all"] < found["fp8"]["of_all"] < 0.5
    assert found["fp8_all"]["of_all"] != found["fp8"]["of_all"]
    assert "gradients to those of float32" in capsys.readouterr().out


def test_the_gradient_is_that_of_the_model_as_it_is(run):
    named = load_named_model(run)
    assert named.model.config.dtype == "float32"
    (batch,) = batches_of(named, Config(run=run, windows=2, batch_size=2))
    loss, got = gradient_of(named.model, named.model.config)(jnp.asarray(batch))
    # A small step against the gradient lowers the loss by the gradient's square.
    step = 1e-2
    moved = load_named_model(run).model
    params = nnx.state(moved, nnx.Param)
    nnx.update(moved, jax.tree.map(lambda w, of: w - step * of, params, got))
    after, _ = gradient_of(moved, moved.config)(jnp.asarray(batch))
    square = sum(float(jnp.sum(of * of)) for of in jax.tree.leaves(got))
    assert float(loss - after) == pytest.approx(step * square, rel=0.1)


def test_a_run_in_8_bit_floats_is_held_against_float32_too(run, monkeypatch):
    """The reference keeps none of the settings that the run computes in."""
    asked = []

    def recorded(model, config):
        asked.append(config)
        return gradient_of(model, config)

    named = load_named_model(run)
    given = replace(named.model.config, dtype="bfloat16", precision="fp8")
    named.model.config = replace(given, logits_of_loss="dtype")
    monkeypatch.setattr(gradient_precision, "load_named_model", lambda _: named)
    monkeypatch.setattr(gradient_precision, "gradient_of", recorded)
    config = Config(
        run=run, windows=2, batch_size=2, settings=("bfloat16",), results=None
    )
    (found,) = gradient_precision.main(config, "the command")
    exact, narrow = asked
    assert (exact.dtype, narrow.dtype) == ("float32", "bfloat16")
    for of in asked:
        assert (of.precision, of.logits_of_loss) == ("dtype", "float32")
    assert 1e-3 < found.of_all < 0.02


def test_what_has_no_held_out_batch_is_refused(run, capsys):
    with pytest.raises(ValueError, match="batch_size=0 must be at least 1"):
        Config(run=run, batch_size=0)
    assert gradient_precision.run([run, "--batch-size", "4096"]) == 1
    told = capsys.readouterr().err
    assert "does not fill a batch of 4096" in " ".join(told.split())
