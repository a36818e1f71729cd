"""The grouped benchmark times what it has checked."""

import json
from dataclasses import replace

import pytest

from experiments import bench_grouped
from sparsejax.ops import grouped_matmul


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setattr(grouped_matmul, "CHUNK_ROWS", grouped_matmul.CHUNK_ROWS)
    return bench_grouped.Config(
        shapes=((40, 16, 64, 4),),
        v=8,
        rounds=2,
        repeats=2,
        results=tmp_path / "rows.jsonl",
    )


def test_rows(config):
    rows = bench_grouped.main(config)
    assert [json.loads(line) for line in config.results.open()] == json.loads(
        json.dumps(rows)
    )
    names = [(row["form"], row["name"]) for row in rows]
    assert len(set(names)) == 6
    assert all(row["ratio"] == 1.0 for row in rows if row["name"] == "dense")
    assert all(row["time_ms"] > 0 for row in rows)


def test_one_expert_may_have_nearly_all_tokens(config, monkeypatch):
    routed = []
    dispatch = bench_grouped.dispatch

    def noted(*args):
        routed.append(dispatch(*args))
        return routed[-1]

    monkeypatch.setattr(bench_grouped, "dispatch", noted)
    rows = bench_grouped.main(replace(config, share_of_first=0.9))
    assert [row["share_of_first"] for row in rows] == [0.9] * 6
    assert routed[0].group_sizes[0] > 0.7 * 40
    with pytest.raises(ValueError, match=r"share_of_first=1\.5 of 4 experts"):
        bench_grouped.main(replace(config, share_of_first=1.5))


def test_a_wrong_product_stops_the_benchmark(config, monkeypatch):
    right = grouped_matmul.grouped_matmul
    monkeypatch.setattr(
        grouped_matmul, "grouped_matmul", lambda *a, **k: 1.05 * right(*a, **k)
    )
    with pytest.raises(AssertionError, match="relative error"):
        bench_grouped.main(config)
