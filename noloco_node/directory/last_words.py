"""What a seed remembers of a run's end, so that who comes when all records are gone is told that it is over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from noloco_node.directory.records import SERVING, Directory, DirectoryView, PeerState

LOOKS_A_LIFE = 3
"""Looks within the life of a record, so that no last word is missed."""


def is_over(view: DirectoryView, now: float, before: bool) -> bool:
    """Whether a run has come to its end, as records at DHT time `now` say; `before`: whether it had at the last look.

    While anybody of the first stage says that it trains the run goes on, and what was remembered is forgotten. Where
    others say so alone it stays as it was: they can train nothing by themselves. Else it is over where half of the
    first stage's last words say so, of those that are left as of those that are leaving: of two, one may be told to
    leave just before the end. Where there are none it stays as it was. Who has only just come says nothing, nor who
    went before it had trained: it was told that the run is over.
    """
    training = [
        any(not record.finished for record in view.live(stage, now, PeerState.TRAINING))
        for stage in range(len(view.stages))
    ]
    if any(training):
        return before and not training[0]
    records = [r for r in view.live(0, now, *PeerState) if r.state is not PeerState.JOINING]
    words = [r.finished for r in records if r.finished or r.clock > 0.0]
    return before if not words else 2 * sum(words) >= len(words)


class LastWords:
    """Follows the records of a run. `over` may be known from an earlier life; `changed` is told when it is another."""

    def __init__(self, directory: Directory, over: bool, changed: Callable[[bool], None]) -> None:
        self._directory = directory
        self._changed = changed
        self.over = over
        self.knows = over
        """Whether it has ever seen a node at work or at its end, in this life or in an earlier one that saw the end."""

    async def run(self, record_seconds: float) -> None:
        """Look again and again, until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(record_seconds / LOOKS_A_LIFE)

    async def look(self) -> None:
        """Read the records anew."""
        view = await self._directory.refresh()
        over = is_over(view, self._directory.now(), self.over)
        self.knows = self.knows or any(
            live.record.finished or live.record.state in SERVING for stage in view.stages for live in stage.values()
        )
        if over is not self.over:
            self.over = over
            self._changed(over)
