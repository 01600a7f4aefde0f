"""What a node's file keeps of its events: all of them, but of the accounts the fewer the longer it has been running."""

from __future__ import annotations

from noloco_node.telemetry.events import Account, AnyEvent, EventFile, NodeMoved, NodeStopped

OF_A_LIFE = 1.0 / 1800.0
"""Of the time that a node has been up, between two accounts in its file: within the first hour all are there."""
AT_LAST_SECONDS = 60.0
"""The most. One in two seconds, as they are made, would be 41 MB a day."""
CHANGED_SOONER = 6.0
"""Times as often where who is there has changed since the last one."""


class Diary:
    """Writes a node's events to its file. The last account before it stops or moves is in it, and after a kill -9 one
    that is at most `AT_LAST_SECONDS` old."""

    def __init__(self, file: EventFile) -> None:
        self._file = file
        self._began: float | None = None
        self._last: Account | None = None
        self._withheld: Account | None = None

    def write(self, event: AnyEvent) -> None:
        """Take in one event, in the order of their times."""
        self._began = event.time if self._began is None else self._began
        if isinstance(event, Account):
            self._withheld = event
            if self._is_due(event, event.time - self._began):
                self._write_withheld()
            return
        if isinstance(event, NodeStopped | NodeMoved):
            self._write_withheld()
        self._file.write(event)

    def close(self) -> None:
        """Close the file."""
        self._write_withheld()
        self._file.close()

    def _is_due(self, account: Account, up: float) -> bool:
        last = self._last
        if last is None or account.time < last.time:  # this machine's clock has been set back
            return True
        changed = (account.nodes_per_stage, account.missing_stages) != (last.nodes_per_stage, last.missing_stages)
        seconds = min(AT_LAST_SECONDS, OF_A_LIFE * up)
        return account.time - last.time >= (seconds / CHANGED_SOONER if changed else seconds)

    def _write_withheld(self) -> None:
        if self._withheld is not None:
            self._file.write(self._withheld)
            self._last, self._withheld = self._withheld, None
