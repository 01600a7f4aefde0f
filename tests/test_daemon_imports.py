"""What a daemon brings into a process beside the libraries that it cannot do without: the guard of its memory and
of its start. A library too many costs each node tens of megabytes and half a second."""

from __future__ import annotations

import pytest

from benchmarks import idle
from tests.profiles import LONG

MOST_MEMORY = 0.25
"""The most of what torch takes, of memory that no other process shares: it was 0.14."""
MOST_SECONDS = 0.9
"""The most of the processor time that torch takes to be imported: it was 0.43 to 0.45."""


@pytest.mark.parametrize(
    ("module", "small"),
    [
        (idle.DAEMON, True),
        pytest.param("datasets", False, marks=pytest.mark.skipif(not LONG, reason="in the long run only")),
    ],
)
def test_a_daemon_adds_little_to_torch(module: str, small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that it imports does either; one that reads Parquet would be seen."""
    monkeypatch.setattr(idle, "DAEMON", module)
    found = idle.imports()
    (_, torch_bytes, torch_seconds), (_, own, seconds) = found["torch"], found[module]
    assert (own < MOST_MEMORY * torch_bytes) is small
    assert seconds < MOST_SECONDS * torch_seconds
