"""R at sizes that nobody trained, where the law that made the rows is known."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from experiments import predict_ratio
from experiments.predict_ratio import Config, main
from experiments.worth.delta_fit import DeltaFit, Excess

SIZES = (5_000_000, 12_000_000, 30_000_000)
LENGTHS = (20.0, 60.0, 200.0)


def law(parameters: float, length: float, *, size: float) -> float:
    """The excess ln(D / D_eq) of the arm, falling with the size and the length."""
    return 0.05 - size * math.log(parameters / 5e6) - 0.01 * math.log(length / 20)


def write_rows(folder: Path, *, size: float, spread: float, **changes) -> Path:
    """Rows as experiments/equal_loss.py writes them; the interval of each ratio of
    tokens is `spread` wide in its logarithm."""
    rows = []
    for parameters in SIZES:
        for length in LENGTHS:
            ratio = math.exp(law(parameters, length, size=size))
            rows.append(
                {
                    "arm": "sparse",
                    "parameters": parameters,
                    "tokens": round(parameters * length),
                    "tokens_per_parameter": length,
                    "R_tokens": ratio,
                    "R_tokens_low": ratio * math.exp(-spread / 2),
                    "R_tokens_high": ratio * math.exp(spread / 2),
                    "R": 0.9 * ratio,
                    "sparse_share": 0.8,
                }
                | changes
            )
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def predicted(path: Path, **settings):
    results = path.with_name("predicted.jsonl")
    settings = {"speed": "1.5", "speed_from": "a test"} | settings
    config = Config(rows=path, arm="sparse", results=results, **settings)
    return main(config, "the command")


def test_the_law_of_the_rows_is_extrapolated(tmp_path):
    path = write_rows(tmp_path, size=0.02, spread=0.002)
    predictions = predicted(path, parameters=(1.8e9,), tokens_per_parameter=(20, 100))
    for of in predictions:
        delta = law(of.parameters, of.tokens_per_parameter, size=0.02)
        # The fit is of the law itself, to the rounding of float64.
        assert of.delta == pytest.approx(delta, abs=1e-9)
        expected = (0.2 + 0.8 / 1.5) * math.exp(delta)
        assert pytest.approx(expected, rel=1e-9) == of.R
        assert of.R_low < of.R < of.R_high
        assert of.size_is_resolved and of.size_slope == pytest.approx(-0.02)
        assert of.rungs == SIZES and not of.measured
    written = (tmp_path / "predicted.jsonl").read_text().splitlines()
    assert [json.loads(line)["R"] for line in written] == [of.R for of in predictions]


def test_the_worst_rung_stands_where_the_size_is_not_resolved(tmp_path, capsys):
    # The excess falls by 0.0009 over all sizes, with deviations of 0.012.
    path = write_rows(tmp_path, size=0.0005, spread=0.04)
    (of,) = predicted(path, parameters=(7.5e9,), tokens_per_parameter=(60,))
    assert not of.size_is_resolved
    assert of.delta == pytest.approx(law(5e6, 60, size=0.0005), abs=1e-9)
    assert "is not resolved" in capsys.readouterr().out


def test_a_speed_brings_its_interval_and_a_control_its_own_cost(tmp_path):
    path = write_rows(tmp_path, size=0.02, spread=1e-6)
    asked = {"parameters": (1.8e9,), "tokens_per_parameter": (20,)}
    (of,) = predicted(path, speed="1.5:1.4-1.6", **asked)
    excess = math.exp(law(1.8e9, 20, size=0.02))
    # 2,000 draws know the percentiles of a deviation of 2 % to a tenth of it.
    assert of.R_low == pytest.approx((0.2 + 0.8 / 1.6) * excess, rel=4e-3)
    assert of.R_high == pytest.approx((0.2 + 0.8 / 1.4) * excess, rel=4e-3)
    # A larger model, whose steps cost more.
    flops = {"parameters": 9_000_000, "dense_cost": 0.3, "sparse_cost": 1.2}
    wide = write_rows(tmp_path, size=0.02, spread=1e-6, **flops)
    (of,) = predicted(wide, speed="1.5", **asked)
    assert pytest.approx((0.3 + 1.2 / 1.5) * excess, rel=1e-9) == of.R
    dense = write_rows(tmp_path, size=0.02, spread=1e-6, sparse_share=0.0)
    (of,) = predicted(dense, speed=None, speed_from=None, **asked)
    assert pytest.approx(0.9 * excess, rel=1e-9) == of.R


def test_rows_at_the_widths_of_a_preset_are_read_where_they_are_asked_for(tmp_path):
    flops = {"dense_cost": 0.2, "sparse_cost": 0.8}
    at_1b = {"dense_cost": 0.3, "sparse_cost": 0.9, "at_widths": "llama-1b, an H200"}
    path = write_rows(tmp_path, size=0.0, spread=0.002, **flops)
    lines = path.read_text()
    path = write_rows(tmp_path, size=0.0, spread=0.002, **at_1b)
    path.write_text(lines + path.read_text())
    given = {"parameters": (1.8e9,), "tokens_per_parameter": (20,)}
    (plain,) = predicted(path, **given)
    (wide,) = predicted(path, widths_of="llama-1b", **given)
    assert wide.delta == pytest.approx(plain.delta, rel=1e-6)
    ratio = (0.3 + 0.9 / 1.5) / (0.2 + 0.8 / 1.5)
    assert wide.R / plain.R == pytest.approx(ratio, rel=1e-6)
    said = "made with --widths-of llama-7b; give --widths-of llama-1b or no --widths-of"
    with pytest.raises(ValueError, match=said):
        predicted(path, widths_of="llama-7b", **given)
    # Rows of another GPU, at one of the sizes.
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[-1]["at_widths"] = "llama-1b, an H100"
    path.write_text("".join(json.dumps(row) + "\n" for row in lines))
    with pytest.raises(ValueError, match="different GPUs.*an H200; llama-1b, an H100"):
        predicted(path, widths_of="llama-1b", **given)


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        ({}, {"speed": None, "speed_from": None}, "sparse has sparse steps, and how"),
        ({}, {"speed_from": None}, "belong together"),
        ({}, {"speed": "fast"}, "could not convert"),
        ({"sparse_share": 0.0}, {}, "of which sparse has none; leave it out"),
        (
            {"parameters": 9_000_000},
            {},
            "has 9,000,000 parameters, .* make the rows",
        ),
        ({"R_tokens_low": None}, {}, "has an interval; train a second seed"),
        ({"tokens_per_parameter": 20.0}, {}, "known at 1 length only"),
        ({"arm": "other"}, {}, "--arm sparse has no row in .*; there are other"),
    ],
)
def test_what_cannot_be_predicted_is_refused(tmp_path, changes, settings, message):
    path = write_rows(tmp_path, size=0.02, spread=0.01, **changes)
    with pytest.raises(ValueError, match=message):
        predicted(path, **settings)


def test_a_row_without_an_interval_is_left_out_and_named(tmp_path, capsys):
    path = write_rows(tmp_path, size=0.02, spread=0.002)
    expected = predicted(path, parameters=(1.8e9,), tokens_per_parameter=(20,))
    lines = path.read_text().splitlines()
    one_seed = json.loads(lines[0]) | {"R_tokens": 3.0, "R_tokens_low": None}
    path.write_text("\n".join([*lines, json.dumps(one_seed)]) + "\n")
    capsys.readouterr()
    assert predicted(path, parameters=(1.8e9,), tokens_per_parameter=(20,)) == expected
    said = capsys.readouterr().out
    assert "20.0 tokens per parameter of 5,000,000 has no interval; left out" in said


def test_sizes_and_lengths_that_vary_together_determine_nothing():
    generator = np.random.default_rng(0)
    rows = [
        Excess(parameters=n, tokens_per_parameter=r, delta=0.01, deviation=0.01)
        for n, r in ((5_000_000, 20.0), (12_000_000, 60.0), (12_000_000, 200.0))
    ]
    together = DeltaFit.draw(rows[:2], generator)
    with pytest.raises(ValueError, match="2 rows determine 2 of 3 coefficients"):
        together.at(30e6, 60.0)
    assert np.isfinite(DeltaFit.draw(rows, generator).at(30e6, 60.0)).all()


def test_an_interval_without_width_is_refused():
    with pytest.raises(ValueError, match="says nothing of its spread"):
        Excess.of_ratio(5, 20.0, 1.0, 1.0, 1.0)


def test_the_command_runs_a_file(tmp_path, capsys):
    path = write_rows(tmp_path, size=0.02, spread=0.01)
    arguments = [str(path), "--arm", "sparse", "--speed", "1.5:1.4-1.6"]
    results = ["--results", str(tmp_path / "out.jsonl")]
    assert predict_ratio.run([*arguments, *results]) == 1
    assert "belong together" in capsys.readouterr().err
    assert predict_ratio.run([*arguments, "--speed-from", "a test", *results]) == 0
    assert "predicted, not measured: R of sparse" in capsys.readouterr().out
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 6
