"""Settings and fixtures that all tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

from tests.support import nothing_left_behind

# Two cores, tiny tensors: more threads only wait for each other (an order of magnitude on a busy machine).
torch.set_num_threads(1)

# How long an example takes says how busy the machine is.
hypothesis.settings.register_profile("suite", deadline=None)
hypothesis.settings.load_profile("suite")


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Temporary files of the commands and daemons of a test, empty again at the end: no socket is left."""
    with nothing_left_behind() as base:
        monkeypatch.setenv("TMPDIR", str(base))
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
        yield base
