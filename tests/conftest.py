"""Settings of every test: strict ranks, no accidental GPU; the text of small runs."""

import gc
import os
import shutil
import signal
import tempfile

import jax
import pytest

from tests.support.devices import gpu_record
from tests.support.devices.xla_flags import EIGHT_DEVICES, QUICK_COMPILATION
from tests.support.micro_run import write_text
from tests.support.whole_runs import quick_runs
from tests.support.wide_console import widen

# XLA reads its flags when JAX is first asked for its devices.
given_flags = os.environ.get("XLA_FLAGS", "")
if QUICK_COMPILATION not in given_flags:
    os.environ["XLA_FLAGS"] = f"{QUICK_COMPILATION} {given_flags}".strip()

# Each worker's NumPy would take all cores: on 32 of them 20 workers held each other up,
# and a test of one minute took more than five. Workers find it in the environment.
for library in ("OPENBLAS", "OMP", "MKL"):
    os.environ.setdefault(f"{library}_NUM_THREADS", "1")

# The workers of `-n 16` share one GPU, whose memory the first would take.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

if EIGHT_DEVICES not in os.environ.get("XLA_FLAGS", ""):
    # test_eight_devices runs them, in processes that have the devices.
    collect_ignore = ["on_eight_devices"]

# A program runs in the thread that calls it. In the pool of XLA, a thread per core,
# the interpreter of GPU kernels waits for programs that the pool has no thread for: on
# two cores it hung, once in some fifty runs of all tests. Read with the backend.
jax.config.update("jax_cpu_enable_async_dispatch", False)

if jax.default_backend() == "cpu":
    # Compiling is most of the time, and what LLVM makes faster runs for moments. In the
    # environment for the processes that tests start.
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    jax.config.update("jax_disable_most_optimizations", True)

# What one test has compiled, no other compiles again: a folder of this test run alone,
# for its workers and the processes of tests, who find it in the environment.
COMPILED = None
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    COMPILED = tempfile.mkdtemp(prefix="compiled-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = COMPILED
    jax.config.update("jax_compilation_cache_dir", COMPILED)
# Nobody's own tuning results are read or written.
NO_CACHE = tempfile.mkdtemp(prefix="sparsejax-cache-")
os.environ["SPARSEJAX_CACHE"] = NO_CACHE
# Nor is anything downloaded, or kept of what the packages of Hugging Face prepare.
os.environ["HF_HOME"] = NO_CACHE
os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)

# Operations need not say which hundred calls they come from: no test reads it, and XLA
# would carry it through all of its passes.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
jax.config.update("jax_traceback_in_locations_limit", 0)

jax.config.update("jax_numpy_rank_promotion", "raise")
# On a GPU float32 GEMMs would otherwise round their operands to TF32.
jax.config.update("jax_default_matmul_precision", "highest")


@pytest.fixture(scope="module", autouse=True)
def compiled_programs_are_freed():
    """Each takes three of the 65,530 memory mappings that Linux allows a process: at
    the end of a long run, compiling would crash it."""
    yield
    jax.clear_caches()


@pytest.fixture(scope="session", autouse=True)
def ctrl_c_is_heeded():
    """A script that runs the tests in the background has SIGINT ignored, and so would
    they: those of Ctrl-C would wait for ever."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module")
def quick():
    """Runs that print as on a wide terminal."""
    with quick_runs() as patch:
        widen(patch)
        yield


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    """A glob of the files that the runs of a module read."""
    return write_text(tmp_path_factory.mktemp("text"))


# Of these single tests take up to minutes. They come first, and a worker that has no
# more tests takes over short ones: at the end none is left alone with a long one.
LONGEST_FIRST = (
    "test_eight_devices.py",
    "test_kill.py",
    "test_new_process.py",
    "test_processes.py",
    "test_commands.py",
    "test_train.py",
    "test_before_training.py",
    "bench/test_ffn.py",
    "test_tuned_tables.py",
)


def pytest_collection_modifyitems(items):
    def rank(item):
        path = item.path.as_posix()
        places = enumerate(LONGEST_FIRST)
        found = (place for place, name in places if path.endswith(f"/{name}"))
        return next(found, len(LONGEST_FIRST))

    items.sort(key=rank)


def pytest_collection_finish():
    """Takes all objects that stand now out of the search for garbage: they stand to the
    end. Little of what tracing makes is garbage: a search follows every 50,000 objects,
    not 700."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)


def pytest_unconfigure():
    shutil.rmtree(NO_CACHE, ignore_errors=True)
    if COMPILED is not None:
        shutil.rmtree(COMPILED, ignore_errors=True)


def pytest_terminal_summary(terminalreporter, config):
    if hasattr(config, "workerinput"):  # of pytest-xdist: sees a part of the tests
        return
    on_a_gpu = config.option.markexpr == "gpu" and jax.default_backend() == "gpu"
    passed, failed, errors = (
        [report.nodeid.partition("::")[0] for report in terminalreporter.getreports(of)]
        for of in ("passed", "failed", "error")
    )
    whole = on_a_gpu and gpu_record.is_of_whole_files(config)
    if whole and passed + failed + errors:
        row = gpu_record.append(passed, failed + errors)
        terminalreporter.write_line(f"recorded: {row}")
    elif stale := gpu_record.what_is_stale():
        terminalreporter.write_line(stale, yellow=True, bold=True)
