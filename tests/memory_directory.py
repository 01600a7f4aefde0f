"""The directory's twin in memory: records in one shared hub."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice

from pydantic import ValidationError

from noloco_node import ambient
from noloco_node.directory.buckets import Place
from noloco_node.directory.records import DirectoryView, LiveRecord, PeerRecord, PeerState, SignedRecord
from noloco_node.directory.sampled_view import SampledView
from noloco_node.directory.store import MOST_RECORDS
from noloco_node.identity.peer_id import PeerId


class MemoryDirectoryHub:
    """What the directories of one test share. `now` gives the time in which records expire, seconds."""

    def __init__(self, stages: int, now: Callable[[], float] = ambient.wall) -> None:
        self.now = now
        self.reachable = True
        """False: publications find nobody and look-ups keep their last rows, as when a node is cut off."""
        self.rows: tuple[dict[PeerId, LiveRecord], ...] = tuple({} for _ in range(stages))
        """Level 0 of each stage."""
        self._buckets: dict[Place, dict[PeerId, LiveRecord]] = {}

    def at(self, place: Place) -> dict[PeerId, LiveRecord]:
        """The records of a place."""
        return self._buckets.setdefault(place, {}) if place.level else self.rows[place.stage]

    def live(self, place: Place, now: float) -> dict[PeerId, LiveRecord]:
        """The live rows of a place, as far as their holders have room."""
        rows = {peer: row for peer, row in self.at(place).items() if row.expires > now}
        if place.level:
            self._buckets[place] = dict(rows)
        return rows if len(rows) <= MOST_RECORDS else dict(islice(rows.items(), MOST_RECORDS))


class MemoryDirectory:
    """Implements `Directory` over a hub."""

    def __init__(self, hub: MemoryDirectoryHub) -> None:
        self._hub = hub
        self._view = DirectoryView(tuple({} for _ in hub.rows))
        self._sampled = SampledView(len(hub.rows), ambient.chance())
        self._written: dict[Place, float] = {}
        """Ends of what this node has published."""

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
        peer, now = PeerId(record.peer_id), self.now()
        places = self._sampled.to_write(peer, record.stage, life)
        if record.state is PeerState.GONE:
            places = (
                *places,
                *(
                    place
                    for place, end in self._written.items()
                    if end > now and place.stage == record.stage and place not in places
                ),
            )
        for place in places:
            rows = self._hub.at(place)
            expires = now + life if peer not in rows else max(now + life, rows[peer].expires + 1e-3)
            rows[peer] = LiveRecord(record, expires, record.model_dump_json().encode() if record.finished else b"")
            self._written[place] = expires
        return True

    async def refresh(self) -> DirectoryView:
        """Read all stages; expired rows are gone."""
        if self._hub.reachable:
            now = self.now()
            for place in self._sampled.to_read(now):
                self._sampled.took(place, self._hub.live(place, now), now)
            self._view = self._sampled.view(now)
        return self._view

    @property
    def no_room(self) -> Mapping[str, int]:
        """See `Directory.no_room`: nothing."""
        return {}

    def to_tell(self, most: int) -> tuple[SignedRecord, ...]:
        """See `Directory.to_tell`: nothing."""
        del most
        return ()

    def read(self, row: SignedRecord) -> PeerRecord | None:
        """See `Directory.read`: the record in JSON, since nobody signs."""
        try:
            return PeerRecord.model_validate_json(row.signed)
        except ValidationError:
            return None

    def told(self, teller: PeerId, records: Sequence[SignedRecord]) -> int:
        """See `Directory.told`: nothing is taken."""
        del teller, records
        return 0
