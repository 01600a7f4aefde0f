"""Tells whether another node publishes records under this one's identity.

Each of two lives of one key takes messages that were meant for the other. A start finds a twin that can be dialled; one
behind a router is found here.
"""

from __future__ import annotations

import asyncio

from noloco_node.directory.records import DirectoryView, LiveRecord
from noloco_node.identity.peer_id import PeerId


class DuplicateIdentityWatch:
    """Looks at the records under the own name. `first` is the sequence below which this life published nothing;
    `oldest` the DHT time by which all records of earlier lives have ended."""

    def __init__(self, own: PeerId, first: int, oldest: float) -> None:
        self._own, self._first, self._oldest = own, first, oldest
        self._foreign: int | None = None
        self.seen = asyncio.Event()
        """Set once there is one."""

    def look(self, view: DirectoryView, last: int) -> None:
        """This life's records so far are those up to the sequence `last`.

        A clock that was ahead in an earlier life may explain one record. A node that renews its record lives.
        """
        for row in (rows[self._own] for rows in view.stages if self._own in rows):
            if self._is_anothers(row, last):
                if self._foreign not in (None, row.record.sequence):
                    self.seen.set()
                self._foreign = row.record.sequence

    def _is_anothers(self, row: LiveRecord, last: int) -> bool:
        return row.expires > self._oldest and not self._first < row.record.sequence <= last
