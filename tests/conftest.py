"""What all tests share: one thread each, no network, and a tiny model with its data."""

import contextlib
import gc
import os
import shutil
import sys

# No test may depend on the network. Without this, a name that is not found on the disk is looked up on the hub.
os.environ["HF_HUB_OFFLINE"] = "1"
# Tokenizers warn if a process forks after they have used threads, and warnings are errors here.
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Tests write thousands of small files. On a disk each takes some ms, and a ledger, which is synchronized, takes 20 ms; in
# memory it is 0.1 ms. `fsync` itself is called as always. Pytest keeps the folders of failed tests there, of three runs.
with contextlib.suppress(OSError):
    if shutil.disk_usage("/dev/shm").free > 2**32:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")
# Without a GPU, Triton interprets its kernels, so that their tests run everywhere. It reads this when it is imported.
os.environ.setdefault("TRITON_INTERPRET", str(int(shutil.which("nvidia-smi") is None)))
# The suite runs in as many processes as there are cores, so that more threads would only wait for each other. NumPy, whose
# threads spin while they wait, reads this too.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import jaxtyping
import pytest


def pytest_sessionstart(session):
    """Import what most tests need, ahead of the collection, in which the warnings of libraries are errors.

    The process that only hands out the tests does not: those that run them would wait for it.
    """
    if session.config.getoption("dist", "no") == "no":
        import tests.support.tiny  # noqa: F401
        from scripts.bench.measure import keep_freed_memory
        from tests.support.array_types import CHECKED, jaxtyped

        # The system clears memory before it gives it out again, which takes a part of every short training. So the process
        # keeps what it frees. Only glibc can be told to.
        with contextlib.suppress(OSError, ValueError):
            keep_freed_memory()
        # The package's functions do not check shapes and dtypes, which would cost a user's program time. In tests an import
        # hook adds the checks to each module, and so it must be there before the first module is imported.
        jaxtyping.jaxtyped = jaxtyped
        jaxtyping.install_import_hook(CHECKED, "tests.support.array_types.checked")


def pytest_collection_finish():
    """Take modules and tests out of the garbage collection that Transformers makes before every training.

    They are 600,000 objects, none of them garbage. To look through them takes 0.4 s each time, longer than a short training:
    without this, the files that train take twice as long. Garbage that the tests make is collected as always.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def what_tests_leave_is_no_garbage():
    """Take what the tests of a file have imported and cached out of it too, some thousand objects a file."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def secrets_are_kept_apart(tmp_path_factory):
    """Keep the secrets of rounds and the list of trained weights out of the user's own folder of states.

    The folder goes with all that pytest has written.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("states")))
        yield


@pytest.fixture(autouse=True)
def no_run_of_another_test_is_known():
    """Forget private runs on the same data, since a test that trains would say that their ε add up."""
    if "doppler_hf.run.reporting.other_runs" in sys.modules:
        sys.modules["doppler_hf.run.reporting.other_runs"]._OF_PROCESS.clear()


@pytest.fixture(autouse=True)
def arrays_are_checked_where_modules_are_tested(request):
    """Leave whole trainings alone: they pass the same arrays again and again, and most of their time would be checks."""
    folder = request.path.relative_to(request.config.rootpath / "tests").parts[0]
    jaxtyping.config.update("jaxtyping_disable", folder in {"end_to_end", "audit", "cli", "scripts", "run"})


@pytest.fixture
def checked_arrays(arrays_are_checked_where_modules_are_tested):
    """Check them nevertheless."""
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def unchecked_arrays(arrays_are_checked_where_modules_are_tested):
    """Leave arrays to what functions themselves refuse, as outside of the tests, where nobody checks types first."""
    jaxtyping.config.update("jaxtyping_disable", True)


@pytest.fixture
def own_caches(tmp_path, monkeypatch):
    """Keep what `datasets` caches apart from other tests'."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
