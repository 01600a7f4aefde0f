"""A pure account of the readers of a donor's snapshot, and of the peers that wait for a place.

A place is kept by reading, not by asking: otherwise peers that ask and never read, or drip, keep all joiners out. Each
new chunk pays for some time. Nobody loses a place that nobody else wants.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from noloco_node.identity.peer_id import PeerId

WAIT_SECONDS = 15.0
"""A refused peer keeps its turn for so many seconds after it asked last."""
MOST_WAITING = 64
WHOLE_SECONDS = 900.0
"""While others wait, a reader that takes the whole state within so many seconds keeps its place: half of what they
wait."""
FAIR_PART = 0.25
"""While others wait, a reader that takes this part of its share of the donor's rate keeps its place."""


@dataclass(slots=True)
class _Reader:
    paid_until: float
    had: set[int] = field(default_factory=set[int])


class Readers:
    """The readers of one donor's snapshots. All times in monotonic seconds; `patience` is the progress deadline."""

    def __init__(self, places: int, patience: float, chunk_bytes: int) -> None:
        self._places = places
        self._patience = patience
        self._chunk_bytes = chunk_bytes
        self._readers: dict[PeerId, _Reader] = {}
        self._waiting: dict[PeerId, float] = {}
        """When each asked last, in the order in which they first asked."""
        self._chunks = 0

    def begin(self, chunks: int) -> None:
        """A new snapshot of so many chunks is given from now on: readers of the last one read no more."""
        self._readers.clear()
        self._chunks = chunks

    def clear(self) -> None:
        """Nothing is given any more."""
        self._readers.clear()
        self._waiting.clear()

    def reading(self, now: float) -> list[PeerId]:
        """The peers that have a place and keep it if another wants it."""
        return [peer for peer, reader in self._readers.items() if now <= reader.paid_until]

    def has_place(self, peer: PeerId) -> bool:
        """Whether this peer reads; one that lags does until somebody takes its place."""
        return peer in self._readers

    def renew(self, peer: PeerId, now: float) -> bool:
        """Whether a new snapshot may be taken for `peer`: nobody else reads as it should, and nobody came before."""
        others = [each for each in self.reading(now) if each != peer]
        return not (others or self._before(peer, now) >= self._places) or self._wait(peer, now)

    def enter(self, peer: PeerId, now: float) -> bool:
        """Give `peer` a place, or keep it at its own; False where there is none for it, and then it waits."""
        if peer not in self._readers:
            reading = self.reading(now)
            if len(reading) + self._before(peer, now) >= self._places:
                return self._wait(peer, now)
            if len(self._readers) >= self._places:
                del self._readers[next(each for each in self._readers if each not in reading)]
            self._readers[peer] = _Reader(now + 2.0 * self._patience)
        self._waiting.pop(peer, None)
        return True

    def gave(self, peer: PeerId, index: int, now: float, rate: float) -> None:
        """It was given this chunk. `rate` is the donor's, in bytes per second."""
        reader = self._readers.get(peer)
        if reader is None or index in reader.had:
            return
        reader.had.add(index)
        fair = self._places * self._chunk_bytes / (FAIR_PART * rate)
        pays = min(self._patience, max(fair, WHOLE_SECONDS / self._chunks))
        reader.paid_until = min(max(now, reader.paid_until) + pays, now + 2.0 * self._patience)
        if len(reader.had) >= self._chunks:
            del self._readers[peer]

    def _before(self, peer: PeerId, now: float) -> int:
        """How many wait for longer than `peer`."""
        self._waiting = {each: asked for each, asked in self._waiting.items() if now - asked <= WAIT_SECONDS}
        waiting = list(self._waiting)
        return waiting.index(peer) if peer in self._waiting else len(waiting)

    def _wait(self, peer: PeerId, now: float) -> bool:
        if peer in self._waiting or len(self._waiting) < MOST_WAITING:
            self._waiting[peer] = now
        return False
