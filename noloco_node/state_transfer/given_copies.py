"""The choice of the copy of its own stage that a node gives to keepers of copies: never an old one to a new keeper.

It is a pure account of the readers. A copy takes memory, so there are two at most: the one that newcomers get, and one
before it for earlier readers. Those in full precision, twice as large and seldom asked for, are one at most.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from noloco_node.identity.peer_id import PeerId
from noloco_node.state_transfer.copy_manifest import StageCopy
from noloco_node.state_transfer.rate import MOST_WAITING, WHOLE_SECONDS


@dataclass(slots=True)
class _Reader:
    progress: float
    """When it came, or asked for weights beyond those before."""
    beyond: int = -1


@dataclass(slots=True)
class _Given:
    copy: StageCopy
    since: float
    readers: dict[PeerId, _Reader] = field(default_factory=dict[PeerId, _Reader])


class GivenCopies:
    """The copies that are given. Times are in monotonic seconds.

    A copy goes to newcomers for `fresh_seconds`. A peer that asks for nothing new in `idle_seconds` reads no more. At
    most `most` are held, one or two. Each is held for `reading_seconds` at most after it stops going to newcomers.
    """

    def __init__(
        self, fresh_seconds: float, idle_seconds: float, most: int = 2, reading_seconds: float = WHOLE_SECONDS
    ) -> None:
        self._fresh = fresh_seconds
        self._idle = idle_seconds
        self._reading = reading_seconds
        self._most = most
        self._current: _Given | None = None
        self._older: _Given | None = None

    def clear(self) -> None:
        """Nothing is given any more."""
        self._current = self._older = None

    def tend(self, now: float) -> None:
        """Let go of what nobody reads and newcomers do not get."""
        self._older = self._older if self._is_read(self._older, now) else None
        if self._current is not None and now - self._current.since > self._fresh:
            self._current = self._current if self._is_read(self._current, now) else None

    def reading(self, now: float) -> set[PeerId]:
        """Peers that read one of the copies now."""
        self.tend(now)
        return {peer for given in (self._current, self._older) if given is not None for peer in given.readers}

    def fresh(self, peer: PeerId, now: float) -> StageCopy | None:
        """The copy for this newcomer, where there is one that is young enough."""
        self.tend(now)
        if self._current is None or now - self._current.since > self._fresh:
            return None
        self._read(self._current, peer, now)
        return self._current.copy

    def room(self, now: float) -> bool:
        """Whether a new copy may be taken: not while as many are read as there may be."""
        self.tend(now)
        return (self._current is not None) + (self._older is not None) < self._most

    def add(self, copy: StageCopy, peer: PeerId, taken: float, now: float) -> None:
        """A new copy, begun to be taken at `taken`, for this newcomer and the peers that come after it."""
        self.tend(now)
        self._older = self._current or self._older
        self._current = _Given(copy, taken)
        self._read(self._current, peer, now)

    def asked(self, root: str, peer: PeerId, at: int, end: int, now: float) -> StageCopy | None:
        """The copy of which this peer asks for the weights from `at` to `end`, where it may have it."""
        for given in (self._current, self._older):
            if given is None or given.copy.manifest.root != root:
                continue
            if now - given.since <= self._fresh and peer not in given.readers:
                self._read(given, peer, now)
            reader = given.readers.get(peer)
            if reader is None:
                return None
            if reader.beyond < at < given.copy.manifest.size:
                reader.beyond, reader.progress = at, now
            if end >= given.copy.manifest.size:
                del given.readers[peer]
            return given.copy
        return None

    def _read(self, given: _Given, peer: PeerId, now: float) -> None:
        if peer not in given.readers and len(given.readers) < MOST_WAITING:
            given.readers[peer] = _Reader(now)

    def _is_read(self, given: _Given | None, now: float) -> bool:
        if given is None or now - given.since > self._fresh + self._reading:
            return False
        for peer, reader in list(given.readers.items()):
            if now - reader.progress > self._idle:
                del given.readers[peer]
        return bool(given.readers)
