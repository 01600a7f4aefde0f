"""What a node's file keeps of its events: all of them, but of the accounts the fewer the longer it has been running."""

from __future__ import annotations

from noloco_node.telemetry.events import Account, AnyEvent, Doing, EventFile, NodeMoved, NodeStopped

OF_A_LIFE = 1.0 / 1800.0
"""Two accounts in a node's file lie this part of its life apart: within the first hour all are there."""
AT_LAST_SECONDS = 60.0
"""Two accounts lie at most so many seconds apart. One in two seconds, as they are made, would be 41 MB a day."""


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
        if self._began is None:
            self._began = event.time
        if isinstance(event, Account):
            self._withhold(event)
            if self._is_due(event):
                self._write_withheld()
            return
        if isinstance(event, NodeStopped | NodeMoved) or (
            isinstance(event, Doing) and event.what in ("joining", "paused")
        ):
            self._write_withheld()
        self._file.write(event)

    def close(self) -> None:
        """Close the file."""
        self._write_withheld()
        self._file.close()

    def _withhold(self, account: Account) -> None:
        worst = max(account.loop_lag_seconds, self._withheld.loop_lag_seconds if self._withheld else 0.0)
        self._withheld = account.model_copy(update={"loop_lag_seconds": worst})

    def _is_due(self, account: Account) -> bool:
        last = self._last
        if last is None or account.time < last.time:  # this machine's clock has been set back
            return True
        life = abs(account.time - (self._began or 0.0))
        return account.time - last.time >= min(AT_LAST_SECONDS, OF_A_LIFE * life)

    def _write_withheld(self) -> None:
        if self._withheld is not None:
            self._file.write(self._withheld)
            self._last, self._withheld = self._withheld, None
