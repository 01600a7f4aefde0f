"""Settings and fixtures that all tests share."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

from tests.support import nothing_left_behind

# Two cores, tiny tensors: more threads only wait for each other (an order of magnitude on a busy machine).
torch.set_num_threads(1)

# A shell without job control starts what runs beside it with Ctrl-C ignored, and what a test starts would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long examples take, to run or to make, says how busy the machine is. Two runs of the same code have the same
# examples, so that a change fails for what it changes; `--hypothesis-profile=explore` looks for others.
UNHURRIED = [hypothesis.HealthCheck.too_slow]
hypothesis.settings.register_profile("suite", deadline=None, suppress_health_check=UNHURRIED, derandomize=True)
hypothesis.settings.register_profile("explore", deadline=None, suppress_health_check=UNHURRIED)
hypothesis.settings.load_profile("suite")


@pytest.fixture(autouse=True)
def the_same_chances() -> None:
    """What a test draws from the generators of the process is the same in every run, alone or among others."""
    torch.manual_seed(0)
    random.seed(0)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Temporary files of the commands and daemons of a test, empty again at the end: no socket is left."""
    with nothing_left_behind() as base:
        monkeypatch.setenv("TMPDIR", str(base))
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
        yield base
