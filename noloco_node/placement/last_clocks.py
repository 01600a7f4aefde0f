"""What those worked with said last of their clocks: for who wakes when they are gone. Pure bookkeeping."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from statistics import median_low

from noloco_node.directory.records import PeerRecord, PeerState
from noloco_node.identity.peer_id import PeerId


@dataclass(frozen=True, slots=True)
class _Word:
    clock: float
    rate: float
    """Tokens by which the clock rose in a second."""
    at: float
    ended: bool
    """It had trained to the run's end."""


class ClocksLastHeard:
    """Those that were heard together last; from when this machine has slept until a clock of theirs moves again, those
    of before. Times are seconds of the directory, which go on while a machine sleeps; `grace` too."""

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._words: dict[PeerId, _Word] = {}
        self._woke_at: float | None = None
        self._stand_at: dict[PeerId, float] = {}
        """Clocks of those seen since it woke; what was under way may come to its end within a grace."""
        self._here: Collection[PeerId] = ()
        self._left: Collection[PeerId] = ()
        """Those that have said farewell: it is seen for a while after them, and they answer while they end."""

    def note(self, records: Iterable[PeerRecord], replicas: Sequence[int], now: float, *, slept: bool) -> None:
        """These are seen now, where each stage has so many replicas; nothing changes where nobody is. `slept`: since
        the last time this machine did, or its clock was set: by the two clocks that it has they are one."""
        words, clocks = dict[PeerId, _Word](), dict[PeerId, float]()
        newest = newest_of_each(records)
        for peer, record in newest.items():
            rate = record.tokens_per_second * replicas[record.stage] if record.state is PeerState.TRAINING else 0.0
            words[peer], clocks[peer] = _Word(record.clock, rate, now, record.finished), record.clock
        self._here = {peer for peer, record in newest.items() if record.state is not PeerState.GONE}
        self._left = newest.keys() - self._here
        if slept:
            self._woke_at, self._stand_at = now, {}
        if self._woke_at is not None and self._moves(clocks, now - self._woke_at):
            self._woke_at = None
        if self._woke_at is None:
            self._words = words or self._words
        else:
            self._words |= words

    def _moves(self, clocks: dict[PeerId, float], awake: float) -> bool:
        """Whether somebody trains on. Another that slept does not, whom this one would keep waiting as it keeps it."""
        if awake <= self._grace:
            self._stand_at |= clocks
        before = {peer: self._stand_at.setdefault(peer, clock) for peer, clock in clocks.items()}
        return any(clock > before[peer] for peer, clock in clocks.items())

    def have_come_to(self, target: float, now: float, answers: Callable[[PeerId], bool]) -> bool:
        """Whether this machine has slept, and of those that it heard before at least half are gone, most of whom have
        trained to `target` (tokens) by now, at the pace of which they spoke. Who `answers` and has not said farewell is
        not gone: where the clock was set all records are old at once."""
        gone = {peer: word for peer, word in self._words.items() if peer not in self._here}
        if (
            self._woke_at is None
            or any(map(answers, gone.keys() - self._left))
            or 2 * len(gone) < max(1, len(self._words))
        ):
            return False
        return (
            median_low(target if w.ended else w.clock + max(0.0, now - w.at) * w.rate for w in gone.values()) >= target
        )


def newest_of_each(records: Iterable[PeerRecord]) -> dict[PeerId, PeerRecord]:
    """One of each peer, of those that it has at several stages: where it is, before where it has said farewell, and of
    farewells the one that says that the run is over."""

    def tells(record: PeerRecord) -> tuple[bool, bool, int]:
        return record.state is not PeerState.GONE, record.finished, record.sequence

    return {PeerId(record.peer_id): record for record in sorted(records, key=tells)}
