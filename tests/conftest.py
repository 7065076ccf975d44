"""Fixtures shared by all tests, and what makes a run repeatable: one thread, one Hypothesis profile."""

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

# Before anything loads a library that counts the cores: tests, engines and trainers share them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# As in an engine (scheduler/runtime/libraries.py): tests count the memory of this process, too.
os.environ.setdefault("NUMPY_MADVISE_HUGEPAGE", "0")
# Of an authority without a key: reading the system's costs each client of httpx 60 ms, also for http.
os.environ["SSL_CERT_FILE"] = str(Path(__file__).parent / "support" / "nobody.pem")

import pytest
import torch
from hypothesis import HealthCheck, settings
from support import engine_template
from support.stale_builds import refuse_stale_builds
from support.time_limit import (  # noqa: F401 (hooks)
    pytest_runtest_logfinish,
    pytest_timeout_cancel_timer,
    pytest_timeout_set_timer,
)
from support.waiting import PATIENCE_S

from caesura.client import LaunchedScheduler

gc.disable()  # until everything is collected
torch.set_num_threads(1)
# Started in the background of a shell, or by nohup, this process would ignore these signals, and with it
# every process that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
for number in (signal.SIGQUIT, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)
# A machine's load is no property of the code: nothing is measured in time. `HYPOTHESIS_PROFILE=explore` tries
# new examples and remembers those that fail, which is how to look for more; the default tries the same ones
# in every run, and `short`, in `make test`, a third of them (support/properties.py).
settings.register_profile(
    "explore", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("repeatable", settings.get_profile("explore"), derandomize=True, database=None)
settings.register_profile("short", settings.get_profile("repeatable"), max_examples=33)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

if engine_template.is_wanted():
    engine_template.install()

LaunchedScheduler.__init__.__kwdefaults__["startup_timeout"] = PATIENCE_S


def pytest_sessionstart() -> None:
    refuse_stale_builds()


def pytest_sessionfinish() -> None:
    engine_template.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    with engine_template.executing(executing=item.get_closest_marker("executed") is not None):
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    slow = {item.path for item in items if item.get_closest_marker("slow") or item.get_closest_marker("long")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    """Freeze what has been imported and collected: it lives as long as the process."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _checkpoint(tmp_path_factory, "tiny", seed=1)


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _checkpoint(tmp_path_factory, "other", seed=2)


def _checkpoint(tmp_path_factory: pytest.TempPathFactory, name: str, *, seed: int) -> Path:
    # imports transformers, for seconds, which most tests do without
    from support.checkpoints import (
        make_checkpoint,
    )

    path = tmp_path_factory.mktemp("models") / name
    make_checkpoint(path, "qwen3", tied=True, seed=seed)
    return path
