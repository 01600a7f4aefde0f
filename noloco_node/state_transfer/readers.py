"""A pure account of the readers of a donor's snapshot, and of the peers that wait for a place.

A place is kept by reading, not by asking: only chunks that a reader has not had yet count. Time in which such a chunk
waits for the donor's own rate is not the reader's. Nobody loses a place that nobody else wants.
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
    seen: float
    progress: float
    """When it entered, or was given its last new chunk."""
    had: set[int] = field(default_factory=set[int])
    asked: dict[int, int] = field(default_factory=dict[int, int])
    """New chunks that are under way, and in how many requests."""
    free: float = 0.0
    """Since when none is."""
    idle: float = 0.0
    """Seconds before that without one, since somebody waits."""
    taken: int = 0
    """New chunks since then."""

    def idle_until(self, now: float) -> float:
        return self.idle + (0.0 if self.asked else now - self.free)


@dataclass(slots=True)
class _Waiting:
    since: float
    seen: float


class Readers:
    """The readers of one donor's snapshots. All times in monotonic seconds; `patience` is the progress deadline."""

    def __init__(self, places: int, patience: float, chunk_bytes: int) -> None:
        self._places = places
        self._patience = patience
        self._chunk_bytes = chunk_bytes
        self._readers: dict[PeerId, _Reader] = {}
        self._waiting: dict[PeerId, _Waiting] = {}
        self._chunks = 0

    def begin(self, chunks: int) -> None:
        """A new snapshot of so many chunks is given from now on: readers of the last one read no more."""
        self._readers.clear()
        self._chunks = chunks

    def clear(self) -> None:
        """Nothing is given any more."""
        self._readers.clear()
        self._waiting.clear()

    def reading(self, now: float, rate: float) -> list[PeerId]:
        """The peers that have a place and keep it if another wants it. `rate` is the donor's, in bytes per second."""
        self._forget(now)
        return [peer for peer, reader in self._readers.items() if not self._lags(reader, now, rate)]

    def has_place(self, peer: PeerId) -> bool:
        """Whether this peer reads; one that lags does until somebody takes its place."""
        return peer in self._readers

    def renew(self, peer: PeerId, now: float, rate: float) -> bool:
        """Whether a new snapshot may be taken for `peer`: nobody else reads as it should, and nobody came before."""
        others = [each for each in self.reading(now, rate) if each != peer]
        if others or self._before(peer) >= self._places:
            self._wait(peer, now)
            return False
        return True

    def enter(self, peer: PeerId, now: float, rate: float) -> bool:
        """Give `peer` a place, or keep it at its own; False where there is none for it, and then it waits."""
        reading = self.reading(now, rate)
        if peer not in self._readers:
            if len(reading) + self._before(peer) >= self._places:
                self._wait(peer, now)
                return False
            if len(self._readers) >= self._places:
                del self._readers[next(each for each in self._readers if each not in reading)]
            self._readers[peer] = _Reader(now, now, free=now)
        self._waiting.pop(peer, None)
        self._readers[peer].seen = now
        return True

    def ask(self, peer: PeerId, index: int, now: float) -> None:
        """A reader asks for this chunk; to be followed by `gave` or `broke_off`."""
        reader = self._readers[peer]
        reader.seen = now
        if index not in reader.had:
            reader.idle = reader.idle_until(now)
            reader.free = now
            reader.asked[index] = reader.asked.get(index, 0) + 1

    def gave(self, peer: PeerId, index: int, now: float) -> None:
        """It was given the chunk."""
        reader = self._readers.get(peer)
        if reader is None:
            return
        reader.seen = now
        if index not in reader.had:
            reader.had.add(index)
            reader.asked.pop(index, None)
            reader.progress = reader.free = now
            reader.taken += 1
        if len(reader.had) >= self._chunks:
            del self._readers[peer]

    def broke_off(self, peer: PeerId, index: int, now: float) -> None:
        """The request for that chunk ended without it. It is new no more: asking and hanging up is no reading."""
        reader = self._readers.get(peer)
        if reader is not None and index in reader.asked:
            reader.asked[index] -= 1
            if not reader.asked[index]:
                del reader.asked[index]
                reader.had.add(index)
                reader.free = now

    def _lags(self, reader: _Reader, now: float, rate: float) -> bool:
        if reader.asked:
            return False
        if now - reader.seen > self._patience or now - reader.progress > 2.0 * self._patience:
            return True
        return bool(self._waiting) and reader.idle_until(now) > 2.0 * self._patience + reader.taken * self._step(rate)

    def _step(self, rate: float) -> float:
        """Seconds of its own that a reader may take for a chunk while others wait."""
        whole = self._chunks * self._chunk_bytes / WHOLE_SECONDS
        pace = min(FAIR_PART * rate / self._places, whole)
        return min(self._patience, self._chunk_bytes / pace) if pace else self._patience

    def _before(self, peer: PeerId) -> int:
        """How many wait for longer than `peer`."""
        own = self._waiting.get(peer)
        return sum(each is not own and (own is None or each.since < own.since) for each in self._waiting.values())

    def _wait(self, peer: PeerId, now: float) -> None:
        if not self._waiting:
            for reader in self._readers.values():
                reader.idle, reader.free, reader.taken = 0.0, now, 0
        if peer in self._waiting:
            self._waiting[peer].seen = now
        elif len(self._waiting) < MOST_WAITING:
            self._waiting[peer] = _Waiting(now, now)

    def _forget(self, now: float) -> None:
        for peer, each in list(self._waiting.items()):
            if now - each.seen > WAIT_SECONDS:
                del self._waiting[peer]
