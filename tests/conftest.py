"""Settings and fixtures that all tests share."""

from __future__ import annotations

import contextlib
import gc
import logging
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

from tests import budgets, fork_server
from tests.profiles import LONG
from tests.support import nothing_left_behind

# What libraries and test files load stays until the end: nothing of it is garbage, and no test goes through it again.
gc.disable()

# Two cores, tiny tensors: more threads only wait for each other (an order of magnitude on a busy machine).
torch.set_num_threads(1)

# A shell without job control starts what runs beside it with Ctrl-C ignored, and what a test starts would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
# A daemon that is started by `nohup` stays when its terminal closes; tests close terminals, and may run by `nohup`.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# How long examples take, to run or to make, says how busy the machine is. Two runs of the same code have the same
# examples, so that a change fails for what it changes; `--hypothesis-profile=explore` looks for others.
UNHURRIED = [hypothesis.HealthCheck.too_slow]
hypothesis.settings.register_profile("suite", deadline=None, suppress_health_check=UNHURRIED, derandomize=True)
hypothesis.settings.register_profile("explore", deadline=None, suppress_health_check=UNHURRIED)
hypothesis.settings.load_profile("suite")


@pytest.fixture(autouse=True)
def the_same_chances() -> None:
    """What a test draws from the generators of the process is the same in every run, alone or among others."""
    torch.default_generator.manual_seed(0)  # `torch.manual_seed` writes down its whole stack for each kind of device
    random.seed(0)


if fork_server.Popen.client is None:  # a part of the suite has one before its first import (`tests/parts.py`)
    fork_server.install(fork_server.Client())


def pytest_addoption(parser: pytest.Parser) -> None:
    """What may be asked of a run of tests."""
    parser.addoption("--judge-budgets", action="store_true", help="fail if a test or folder takes more than it may")


def pytest_configure(config: pytest.Config) -> None:
    """Every run looks at what tests take."""
    config.pluginmanager.register(budgets.Accountant(judges=config.getoption("--judge-budgets")))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `long` belong to `make test-long`; one that is named on the command line runs in any case."""
    named = any("::" in word for word in config.args)
    left = [item for item in items if item.get_closest_marker("long") and not LONG and not named]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]


def pytest_collection_finish() -> None:
    """From the first test on, Python's garbage collector looks at what tests make, and at nothing else. torch's loggers
    pass on what they are told: pytest puts six handlers a test to each logger that does not, and torch has fifty."""
    for name, logger in logging.Logger.manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            logger.propagate = True
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def spawned(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a test marked so starts is spawned as users start it, importing all for itself."""
    with fork_server.spawning() if request.node.get_closest_marker("spawned") else contextlib.nullcontext():
        yield


@pytest.fixture
def temporary(tmp_path: Path) -> Iterator[Path]:
    """Temporary files of the commands and daemons of a test, empty again at the end: no socket is left.

    It patches by itself: a test's own `monkeypatch` is then undone before this one, and names no folder that is gone.
    """
    with nothing_left_behind() as base, pytest.MonkeyPatch.context() as patched:
        patched.setenv("TMPDIR", str(base))
        patched.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
        yield base
