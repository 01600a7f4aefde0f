"""The directory's twin in memory: records in one shared hub. For tests and simulations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from noloco_node import ambient
from noloco_node.directory.records import DirectoryView, LiveRecord, PeerRecord, SignedRecord
from noloco_node.identity.peer_id import PeerId


class MemoryDirectoryHub:
    """What the directories of one test share. `now` gives the time in which records expire, seconds."""

    def __init__(self, stages: int, now: Callable[[], float] = ambient.wall) -> None:
        self.now = now
        self.reachable = True
        """False: publications find nobody and look-ups keep their last rows, as when a node is cut off."""
        self.rows: tuple[dict[PeerId, LiveRecord], ...] = tuple({} for _ in range(stages))


class MemoryDirectory:
    """Implements `Directory` over a hub."""

    def __init__(self, hub: MemoryDirectoryHub) -> None:
        self._hub = hub
        self._view = DirectoryView(tuple({} for _ in hub.rows))

    @property
    def view(self) -> DirectoryView:
        """The last view read; empty before the first `refresh`."""
        return self._view

    def now(self) -> float:
        """The hub's time, seconds."""
        return self._hub.now()

    async def publish(self, record: PeerRecord, life: float) -> bool:
        """Store the record for `life` seconds, or a little longer where an earlier one would outlive it."""
        if not self._hub.reachable:
            return False
        rows, peer = self._hub.rows[record.stage], PeerId(record.peer_id)
        expires = self.now() + life
        if peer in rows:
            expires = max(expires, rows[peer].expires + 1e-3)
        rows[peer] = LiveRecord(record, expires)
        return True

    async def refresh(self) -> DirectoryView:
        """Read all stages; expired rows are gone."""
        if self._hub.reachable:
            now = self.now()
            self._view = DirectoryView(
                tuple({peer: row for peer, row in rows.items() if row.expires > now} for rows in self._hub.rows)
            )
        return self._view

    def to_tell(self, most: int) -> tuple[SignedRecord, ...]:
        """Nothing: records are not signed here, and the hub tells everyone."""
        del most
        return ()

    def told(self, teller: PeerId, records: Sequence[SignedRecord]) -> int:
        """See `Directory.told`: nothing is taken."""
        del teller, records
        return 0
