"""What those worked with said last of their clocks: for who wakes when nobody is left. Pure bookkeeping."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median_low

from noloco_node.directory.records import PeerRecord, PeerState


@dataclass(frozen=True, slots=True)
class _Word:
    clock: float
    rate: float
    """Tokens by which the clock rose in a second."""
    at: float
    ended: bool
    """It had trained to the run's end."""


class ClocksLastHeard:
    """Those that were heard together last. Times are seconds of the directory, which go on while a machine sleeps."""

    def __init__(self) -> None:
        self._words: tuple[_Word, ...] = ()

    def note(self, records: Iterable[PeerRecord], replicas: Sequence[int], now: float) -> None:
        """These are seen now, where each stage has so many replicas; nothing changes where nobody is."""
        words = tuple(
            _Word(
                record.clock,
                record.tokens_per_second * replicas[record.stage] if record.state is PeerState.TRAINING else 0.0,
                now,
                record.finished,
            )
            for record in records
        )
        self._words = words or self._words

    def have_come_to(self, target: float, now: float) -> bool:
        """Whether most of them have trained to `target` (tokens) by now, at the pace of which they spoke."""
        clocks = [target if w.ended else w.clock + max(0.0, now - w.at) * w.rate for w in self._words]
        return bool(clocks) and median_low(clocks) >= target
