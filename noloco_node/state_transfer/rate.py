"""How fast a node gives its state away: by what that costs its own training.

A joiner's download competes with the donor's microbatches for the uplink, the event loop and the cores. No setting can
know by how much, so it is measured: the donor gives for a while, is silent for a while, and compares its paces.

A reader keeps its place by reading, not by asking: otherwise peers that ask and never read, or drip, keep all joiners
out. Each new chunk pays for some time. Nobody loses a place that nobody else wants.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from noloco_node import ambient
from noloco_node.config.run_spec import LimitsSpec
from noloco_node.identity.peer_id import PeerId
from noloco_node.peers.hop import LITTLE
from noloco_node.tallies import FEW_PEERS, SLACK, FairQueue, moved
from noloco_node.training.progress import LastTrained
from noloco_node.transport.calls import ATTEMPTS, QUESTION_SECONDS

MOST_TRIED = 3
"""At most so many slow donors, or strangers' copies of a stage, are tried before the best is kept."""
WAIT_SECONDS = ATTEMPTS * QUESTION_SECONDS
"""A refused peer keeps its turn for as long as a question may take. Longer turns of absent peers would block places."""
WHOLE_SECONDS = 900.0
"""While others wait, a reader that takes the whole state within so many seconds keeps its place: half of what they
wait. So does one that takes more than `LITTLE` of its share of the donor's rate."""


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
        """When each refused peer asked last, in the order in which they first asked."""
        self._chunks = 0

    def begin(self, chunks: int) -> None:
        """A new snapshot of so many chunks is given from now on: readers of the last one read no more."""
        self._readers.clear()
        self._chunks = chunks

    def clear(self) -> None:
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
        reader = self._readers.get(peer)
        if reader is None or len(reader.had) >= self._chunks:
            reading = self.reading(now)
            if len(reading) + self._before(peer, now) >= self._places:
                return self._wait(peer, now)
            if reader is None and len(self._readers) >= self._places:
                del self._readers[min(self._readers, key=lambda each: self._readers[each].paid_until)]
            self._readers[peer] = _Reader(now + 2.0 * self._patience)
        self._waiting.pop(peer, None)
        return True

    def gave(self, peer: PeerId, index: int, now: float, rate: float) -> None:
        """It was given this chunk. `rate` is the donor's, in bytes per second."""
        reader = self._readers.get(peer)
        if reader is None or index in reader.had:
            return
        reader.had.add(index)
        fair = self._places * self._chunk_bytes / (LITTLE * rate)
        pays = min(self._patience, max(fair, WHOLE_SECONDS / self._chunks))
        reader.paid_until = min(max(now, reader.paid_until) + pays, now + 2.0 * self._patience)
        if len(reader.had) >= self._chunks:
            reader.paid_until = -math.inf  # it reads on until its place is wanted: a broken link may have lost a chunk

    def _before(self, peer: PeerId, now: float) -> int:
        """How many wait for longer than `peer`."""
        self._waiting = {each: asked for each, asked in self._waiting.items() if now - asked <= WAIT_SECONDS}
        waiting = list(self._waiting)
        return waiting.index(peer) if peer in self._waiting else len(waiting)

    def _wait(self, peer: PeerId, now: float) -> bool:
        if peer in self._waiting or len(self._waiting) < FEW_PEERS:
            self._waiting[peer] = now
        return False


KEPT_SHARE = 0.97
"""A donor keeps this share of its undisturbed pace: in an export all stages give at once, and each slows the others."""
FIRST_RATE = 2e6
"""Bytes per second that are given until a measure has told what they cost: they should not fill a home's line."""
FASTER = 3.0
"""The rate rises by at most this factor at once, since what is given costs the training before it is measured."""
LEAST_CHUNKS = 2.0
"""Each reader gets at least so many chunks within a progress deadline, or it would take the donor for dead."""
WINDOW_SECONDS = 4.0
"""A silence lasts so long at least, and the giving before it twice as long."""
AT_ONCE = 0.1
"""A microbatch that ended so many windows before one began belongs to it: this is a small part of the measure."""
MOST_SILENT = 4
"""A silence without two finished microbatches ends after so many windows, before a reader's deadline does."""


def next_rate(rate: float, given: float, lost: float, lowest: float) -> float:
    """Bytes a second at which `KEPT_SHARE` of the pace would be left: down at once, up in bounded steps.

    Where `given` bytes a second went out, the share `lost` was missing. A rate that the readers did not take rises no
    further. Never below `lowest`.
    """
    factor = (1.0 - KEPT_SHARE) * given / lost / rate if lost > 0.0 else math.inf
    if factor > 1.0:
        factor = min(FASTER, math.sqrt(factor)) if given >= rate / FASTER else 1.0
    return max(lowest, factor * rate)


class DonorRate:
    """Paces the chunks that a node gives; readers take turns. `tend` must be called every second or two, also while
    nothing is given."""

    def __init__(
        self,
        trained: Callable[[], LastTrained],
        *,
        lowest: float,
        places: int = 1,
        window: float = WINDOW_SECONDS,
        now: Callable[[], float] = ambient.monotonic,
    ) -> None:
        """`lowest`: bytes a second that each joiner at `places` is given at least; `window` in seconds."""
        self.rate = max(lowest, FIRST_RATE)
        """Bytes a second."""
        self.giving = asyncio.Event()
        """It is cleared during a silence."""
        self._lowest, self._places, self._window = lowest, places, window
        self._trained = trained
        self._now = now
        self.free_at = 0.0
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue()
        self._busy = False
        """Somebody's turn has come, and is not over."""
        self._silent_pace: float | None = None
        """Tokens a second while nothing is given."""
        self._begin(giving=True)

    def _begin(self, *, giving: bool) -> None:
        self._since, self._before, self._taken = self._now(), self._trained(), 0
        at_once = self._since - self._before.at <= AT_ONCE * self._window
        self._first: LastTrained | None = self._before if at_once else None
        """The first end of a microbatch since then, or just before: the pace is measured from there."""
        self._readers: set[str] = set()
        if giving:
            self.giving.set()
        else:
            self.giving.clear()

    async def take(self, size: int, reader: str = "") -> None:
        """Wait until `size` bytes may be given to `reader`; all waiting readers get as much as each other."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.push((reader,), float(size), turn)
        if not self._busy:
            self._next_turn()
        try:
            await turn
            while not self.giving.is_set() or self.free_at > self._now():
                await self.giving.wait()
                await asyncio.sleep(self.free_at - self._now())
            self.free_at = max(self._now(), self.free_at) + size / self.rate
            self._taken += size
            self._readers.add(reader)
        finally:
            if not turn.cancelled():
                self._next_turn()

    def _next_turn(self) -> None:
        self._busy = False
        while len(self._waiting) and not self._busy:
            turn = self._waiting.pop()
            if not turn.done():
                self._busy = True
                turn.set_result(None)

    def tend(self) -> None:
        """After a while of giving set the rate anew and fall silent; after a silence give again."""
        now, ended, silent = self._now(), self._trained(), not self.giving.is_set()
        if self._first is None:
            self._first = ended if ended.at > self._before.at else None
        if self._first and ended.at - self._first.at >= self._window * (1 if silent else 2):
            pace = (ended.tokens - self._first.tokens) / (ended.at - self._first.at)
            if not self._taken:
                self._silent_pace = moved(self._silent_pace, pace)
            elif self._silent_pace:
                lowest = self._lowest * min(self._places, len(self._readers))
                given, lost = self._taken / (now - self._since), 1.0 - pace / self._silent_pace
                self.rate = next_rate(self.rate, given, lost, lowest)
            self._begin(giving=not self._taken)
        elif silent and now - self._since >= MOST_SILENT * self._window:
            self._begin(giving=True)


def least_rate(limits: LimitsSpec) -> float:
    """Bytes a second with which a reader gets so many chunks in a progress deadline."""
    return LEAST_CHUNKS * limits.chunk_bytes / limits.exchange_progress_seconds


def longest_reading(limits: LimitsSpec, size: int) -> float:
    """Seconds in which a copy of so many bytes is read: its donor holds it no longer, and no reader waits longer."""
    return max(WHOLE_SECONDS, SLACK * size / least_rate(limits))
