"""Sinks: what they get, what is refused before a run, and what never stops one."""

import json
import re
import sqlite3
import sys
import time
from contextlib import closing
from types import SimpleNamespace

import pytest

from sparsejax.launch import job
from sparsejax.reports import sinks
from sparsejax.reports.records import read_metrics
from sparsejax.reports.sinks import SinkFailed, identity, numbers_of, opened
from tests.support.commands import run_train
from tests.support.files.event_files import scalars
from tests.support.micro_run import arguments_of, micro_config

pytestmark = pytest.mark.usefixtures("quick")

STEP = {"event": "step", "step": 3, "phase": 1, "kind": "sparse", "loss": 2.5}


class Fake:
    """A sink that keeps what it gets; it may fail at a step, or at its end."""

    def __init__(self, *, fails_at: int | None = None, fails_at_end: bool = False):
        self.got: list[tuple[int, dict[str, float]]] = []
        self.fails_at, self.fails_at_end, self.closed = fails_at, fails_at_end, False

    def log(self, step, values):
        if step == self.fails_at:
            raise ConnectionError("the server\nis away")
        self.got.append((step, dict(values)))

    def close(self):
        self.closed = True
        if self.fails_at_end:
            raise TimeoutError("no answer")


@pytest.fixture
def fake(monkeypatch):
    """Makes `Fake`s take the places of named sinks."""

    def put(**fakes: Fake) -> None:
        for name, sink in fakes.items():
            monkeypatch.setitem(sinks.SINKS, name, lambda *_, sink=sink: sink)

    return put


def test_the_numbers_of_a_record_are_named_by_group():
    more = {"sparse": True, "router_share": [0.5, 1.0], "counts": [[1, 2], [3, 4]]}
    assert numbers_of(STEP | more) == {
        "train/phase": 1.0,
        "train/loss": 2.5,
        "train/router_share": 0.75,
    }
    where = {"event": "recluster", "step": 4, "phase": 1, "kind": "sparse"}
    assert numbers_of(where) == {}


def test_every_sink_gets_every_number_and_is_closed(fake, tmp_path):
    first, second = Fake(), Fake()
    fake(tensorboard=first, trackio=second)
    names = ("tensorboard", "trackio", "tensorboard")
    with opened(names, tmp_path, {}) as observe:
        observe(STEP)
        assert not first.closed
    assert first.got == second.got == [(3, numbers_of(STEP))]
    assert first.closed and second.closed


def test_a_sink_that_fails_is_left_out_and_the_others_go_on(fake, tmp_path):
    failing, other = Fake(fails_at=3), Fake(fails_at_end=True)
    fake(wandb=failing, trackio=other)
    with (
        pytest.warns(SinkFailed, match=r"trackio failed \(TimeoutError: no answer"),
        opened(("wandb", "trackio"), tmp_path, {}) as observe,
    ):
        with pytest.warns(SinkFailed, match=r"wandb failed \(ConnectionError: the se"):
            observe(STEP)
        observe(STEP | {"step": 4})
    assert failing.got == [] and not failing.closed
    assert [step for step, _ in other.got] == [3, 4]


def test_a_run_goes_on_without_its_sink(fake, text, tmp_path):
    failing, whole = Fake(fails_at=4), Fake()
    fake(wandb=failing, tensorboard=whole)
    config = micro_config(text)
    with pytest.warns(SinkFailed, match="wandb failed"):
        outcome = job.main(config, tmp_path / "run", log_to=("wandb", "tensorboard"))
    assert outcome.completed
    losses = {
        record["step"]: record["loss"]
        for record in read_metrics(tmp_path / "run")
        if record["event"] == "step"
    }
    logged = {step: of["train/loss"] for step, of in whole.got if "train/loss" in of}
    assert logged == losses and len(losses) == 12
    assert {step for step, _ in failing.got} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("name", "package"),
    [("tensorboard", "tensorboardX"), ("wandb", "wandb"), ("trackio", "trackio")],
)
def test_a_missing_package_is_told_before_the_run(
    name, package, text, tmp_path, capsys, monkeypatch
):
    monkeypatch.setitem(sys.modules, package, None)
    folder = tmp_path / "run"
    given = [*arguments_of(micro_config(text)), "--run-folder", str(folder)]
    assert run_train([*given, "--log-to", name]) == 1
    shown = capsys.readouterr()
    assert f"--log-to {name} needs the package {package} (" in shown.err
    assert f"--extra {name}" in shown.err and "device: " not in shown.out
    assert not folder.exists()


def test_a_sink_that_cannot_be_opened_is_told_before_the_run(monkeypatch, tmp_path):
    closed = Fake()

    def refuse(*_):
        raise RuntimeError("not logged in")

    monkeypatch.setitem(sinks.SINKS, "trackio", lambda *_: closed)
    monkeypatch.setitem(sinks.SINKS, "wandb", refuse)
    with (
        pytest.raises(ValueError, match=r"wandb cannot be opened \(RuntimeError: not"),
        opened(("trackio", "wandb"), tmp_path, {}),
    ):
        pytest.fail("it is open")
    assert closed.closed


def test_tensorboard_reads_what_was_logged(tmp_path):
    with opened(("tensorboard",), tmp_path, {}) as observe:
        observe(STEP)
    found = scalars(tmp_path / "tensorboard")
    assert sorted(found) == [(3, "train/loss", 2.5), (3, "train/phase", 1.0)]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_resumed_run_goes_on_in_its_own(name, tmp_path, monkeypatch):
    began, logged = [], []
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    log = lambda values, step: logged.append((step, values))
    package = SimpleNamespace(log=log, finish=lambda: logged.append("end"))
    package.init = lambda **how: began.append(how) or package
    monkeypatch.setitem(sys.modules, name, package)
    for folder in (tmp_path / "a", tmp_path / "a", tmp_path / "b"):
        with opened((name,), folder, {"steps": 9}, step=2) as observe:
            observe(STEP)
    which = "id" if name == "wandb" else "name"
    named = [how[which] for how in began]
    assert named[0] == named[1] == identity(tmp_path / "a") != named[2]
    assert all(how["resume"] == "allow" for how in began)
    assert began[0]["project"] == "sparsejax" and began[0]["config"] == {"steps": 9}
    assert logged[:2] == [(3, numbers_of(STEP)), "end"]


# The packages themselves, without a server.


def test_wandb_keeps_a_run_offline_and_goes_on_in_it(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for loss in (2.5, 1.25):
        with opened(("wandb",), tmp_path, {"steps": 9}) as observe:
            observe(STEP | {"loss": loss})
        # Its folders are named by the second, and the next would write into this one.
        time.sleep(1)
    files = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert {path.stem for path in files} == {f"run-{identity(tmp_path)}"}
    # A record's name and its value as JSON stand next to each other.
    logged = b"".join(path.read_bytes() for path in files)
    found = re.findall(rb"train/loss\x82\x01.(\d\.\d+)", logged)
    assert b"2.5" in found and b"1.25" in found


def test_trackio_keeps_a_run_on_this_machine_and_goes_on_in_it(tmp_path, monkeypatch):
    # It reads this when it is imported, and nothing else imports it.
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for step in (3, 4):
        with opened(("trackio",), tmp_path, {"steps": 9}) as observe:
            observe(STEP | {"step": step})
    with closing(sqlite3.connect(tmp_path / "trackio" / "sparsejax.db")) as data:
        rows = data.execute("select run_name, step, metrics from metrics").fetchall()
    values = numbers_of(STEP)
    name = identity(tmp_path)
    assert [(of, step, json.loads(logged)) for of, step, logged in rows] == [
        (name, 3, values),
        (name, 4, values),
    ]
