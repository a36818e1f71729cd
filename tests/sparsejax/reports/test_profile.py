"""Traces of chosen steps: which steps they have, and where runs end among them."""

import gzip
import json
import re

import jax
import pytest

from sparsejax.reports.profile import ProfiledSteps, Profiler
from sparsejax.training.train import train
from tests.support.commands import run_train
from tests.support.micro_run import arguments_of, micro_config
from tests.support.whole_runs import Killed, kill_at

pytestmark = pytest.mark.usefixtures("quick")


def steps_in(folder) -> list[set[str]]:
    """The numbers of the steps that each trace in a folder has."""
    traces = sorted(folder.rglob("*.trace.json.gz"))
    found = []
    for path in traces:
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        of_train = [e for e in events if e.get("name") == "train"]
        found.append({e["args"]["step_num"] for e in of_train})
    return found


def test_the_chosen_steps_are_traced_and_no_others(text, tmp_path, capsys):
    folder = tmp_path / "run"
    arguments = [*arguments_of(micro_config(text)), "--run-folder", str(folder)]
    assert run_train([*arguments, "--profile", "5:7"]) == 0
    assert steps_in(folder / "profile") == [{"5", "6", "7"}]
    assert list((folder / "profile").rglob("*.xplane.pb"))
    assert f"step 7: trace in {folder / 'profile'}" in capsys.readouterr().out


def test_a_run_that_ends_among_them_writes_what_it_has(text, tmp_path):
    config = micro_config(text)
    with pytest.raises(Killed):
        train(
            config,
            tmp_path,
            observe=kill_at("step", 5),
            profile=ProfiledSteps(5, 9),
        )
    # A trace is looked at one step later than it is dispatched.
    (first,) = steps_in(tmp_path / "profile")
    assert first <= {"5", "6"} and "5" in first
    with jax.profiler.trace(tmp_path / "another"):  # none is running any more
        pass


@pytest.mark.parametrize("text", ["5", "7:5", "0:3", "a:b", "5:", "-1:3"])
def test_what_names_no_steps_is_refused(text):
    with pytest.raises(ValueError, match=rf"profile .*{re.escape(text)}.* FIRST:LAST"):
        ProfiledSteps.named(text)


def test_steps_that_the_run_does_not_have_are_refused_before_it(tmp_path, capsys):
    given = ["--run-folder", str(tmp_path / "run"), "--steps", "9"]
    assert run_train([*given, "--profile", "8:10"]) == 1
    assert "profile 8:10 goes beyond the last step" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_steps_behind_which_a_run_goes_on_are_refused(text, tmp_path, capsys):
    run, branch = tmp_path / "run", tmp_path / "branch"
    arguments = arguments_of(micro_config(text, recipe="dense", steps=2))
    assert run_train([*arguments, "--run-folder", str(run)]) == 0
    begins = ["--branch", f"{run}@2", "--steps", "4", "--run-folder", str(branch)]
    assert run_train([*begins, "--profile", "1:2"]) == 1
    assert "profile 1:2 lies behind step 2, with which" in capsys.readouterr().err
    assert not (branch / "metrics.jsonl").exists()
    assert run_train([*begins, "--profile", "2:3"]) == 0
    assert steps_in(branch / "profile") == [{"3"}]


def test_without_steps_nothing_is_traced(tmp_path):
    profiler = Profiler(tmp_path, None)
    with profiler.around(1, ()):
        assert profiler.end(1, ()) is None
    profiler.close()
    assert list(tmp_path.iterdir()) == []
