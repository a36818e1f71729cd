"""A share of the fuzz cases, and proofs that they can fail.

`python -m tests.fuzz` runs more of them, and other seeds.
"""

import shutil
import time
from collections import Counter
from pathlib import Path

import pytest

from sparsejax.checkpoints import checkpoint_folder, manifest
from sparsejax.config import config_file, ranges
from sparsejax.config import train as config
from sparsejax.data import corpus, shards
from tests.fuzz import command_lines
from tests.fuzz.cases import FAMILIES, Fuzzer, shares
from tests.fuzz.judge import TimedOut, Wrong, clear_error, time_limit

# Family, first seed, cases: parts of a few seconds, for several workers.
CHUNKS = [
    *(("configs", start, 300) for start in (0, 300, 600)),
    *(("command_lines", start, 110) for start in (0, 110)),
    *(("corpora", start, 180) for start in (0, 180)),
    *(("shards", start, 180) for start in (0, 180)),
    *(("checkpoints", start, 40) for start in (0, 40, 80, 120)),
    ("runs", 0, 12),
]


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory):
    return Fuzzer(tmp_path_factory.mktemp("fuzz"))


def test_two_thousand_cases_of_all_families_run_here():
    assert sum(count for _, _, count in CHUNKS) >= 2000
    assert {family for family, _, _ in CHUNKS} == FAMILIES.keys()


# When one array cannot be read, orbax leaves the reads of the others to themselves.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("family", "start", "count"), CHUNKS)
def test_every_case_ends_in_a_clear_error_or_a_right_result(
    fuzzer, family, start, count
):
    outcomes = fuzzer.run(family, range(start, start + count))
    assert outcomes.total() == count
    # Not all of them fail alike, or succeed alike.
    assert len(outcomes) >= 2


def test_a_long_run_gives_every_family_its_share():
    counts = shares(50_000)
    assert sum(counts.values()) == 50_000
    assert counts.keys() == FAMILIES.keys()
    assert min(counts.values()) >= 100


def shifted(path: Path, dtype: str):
    return shards.open_shard(path, dtype)[1:]


def raise_key_error(settings):
    raise KeyError("steps")


def deleted(path: Path) -> Path:
    shutil.rmtree(path, ignore_errors=True)
    return path


def other_seed(arguments):
    options = OPTIONS_OF(arguments)
    object.__setattr__(options.config, "seed", options.config.seed + 1)
    return options


OPTIONS_OF = command_lines.parse

# What is broken, and the family that must see it.
DEFECTS = {
    "damage is not found": (
        "checkpoints",
        (manifest, "find_damage", lambda folder: None),
    ),
    "damaged checkpoints are deleted": (
        "checkpoints",
        (checkpoint_folder, "_set_aside", deleted),
    ),
    "a save deletes what it should keep": (
        "checkpoints",
        (checkpoint_folder.CheckpointFolder, "_stays", lambda self, step: False),
    ),
    "shards are read from the second token": (
        "shards",
        (corpus, "open_shard", shifted),
    ),
    "nothing is checked against its interval": (
        "configs",
        (ranges, "_intervals", lambda kind: {}),
    ),
    "config.json ends in a KeyError": (
        "configs",
        (config_file, "from_json", raise_key_error),
    ),
    "what is held out is trained on": (
        "corpora",
        (corpus, "hold_out", lambda names, share: [n != names[0] for n in names]),
    ),
    "a flag changes another setting": (
        "command_lines",
        (command_lines, "parse", other_seed),
    ),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_found(fuzzer, defect, monkeypatch):
    family, patch = DEFECTS[defect]
    fuzzer.material(family)
    monkeypatch.setattr(*patch)
    with pytest.raises(Wrong) as found:
        fuzzer.run(family, range(300))
    # The message says how to see it again.
    command = str(found.value).splitlines()[-1]
    seed = int(command.split("--seed ")[1].split()[0])
    assert command.startswith(f"uv run python -m tests.fuzz --family {family} --seed ")
    with pytest.raises(Wrong):
        fuzzer.run_one(family, seed)
    monkeypatch.undo()
    fuzzer.run_one(family, seed)


def test_a_seed_makes_the_same_case_again(fuzzer):
    cases = [(family, seed) for family in ("configs", "shards") for seed in range(30)]
    first, again = (Counter(fuzzer.run_one(*case) for case in cases) for _ in range(2))
    assert first == again


def test_a_hang_is_ended_even_where_everything_is_caught():
    def hang() -> None:
        while True:
            try:
                time.sleep(1)
            except Exception:
                pass

    begin = time.monotonic()
    with pytest.raises(TimedOut, match="not done after 0.1 seconds"):
        with time_limit(0.1):
            hang()
    assert time.monotonic() - begin < 10


def raised_by(make) -> Exception:
    """The error of a call, with its traceback."""
    try:
        make()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def test_an_error_that_names_its_cause_is_clear():
    error = raised_by(lambda: config.TrainConfig(steps=0))
    assert clear_error(error) == "ValueError of ranges.check_intervals"


@pytest.mark.parametrize(
    ("message", "kind", "why"),
    [
        ("'steps'", KeyError, "a bare KeyError"),
        ("'steps' of /folder", TypeError, "a bare TypeError"),
        ("steps=0 is not one of /folder", LookupError, "a bare LookupError"),
        ("steps=0", ValueError, "says next to nothing"),
        ("something went wrong here", ValueError, "names nothing of the case"),
    ],
)
def test_other_errors_of_ours_are_not_clear(message, kind, why, monkeypatch):
    def fail(settings, section=""):
        raise kind(message)

    fail.__code__ = fail.__code__.replace(co_filename=config.__file__)
    monkeypatch.setattr(config, "check_intervals", fail)
    error = raised_by(lambda: config.TrainConfig())
    with pytest.raises(Wrong, match=why):
        clear_error(error)


def test_an_error_from_below_us_is_not_clear():
    error = raised_by(lambda: ranges.Interval(least=1).__contains__("a"))
    with pytest.raises(Wrong, match="a bare TypeError"):
        clear_error(error)
