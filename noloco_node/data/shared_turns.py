"""Turns at the blocks of a text that stage 0's replicas share: one of them reads a block, and nobody deals them out.

The blocks of all passes are one endless row of slots. Each replica says which slots it has taken (`Claim`) and takes
one of the lowest free ones, at random, so that two seldom take the same. If two did, one yields unless it has begun.
A slot that was claimed stays taken, whatever becomes of its replica: a node that dies leaves some blocks of a pass
unread, and the next pass has them again. Only the node itself goes on with them when it comes back.

Nothing here asks which peers a replica sees: a claim that is not seen costs an overlap, never a halt.
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import count, islice
from statistics import median_low
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from noloco_node.data.sampler import Permutation

MOST_CLAIMS = 4
"""One replica may claim so many slots at a time: what it reads, what its reader holds already, and the next."""
MOST_BEGUN = MOST_CLAIMS - 1
"""The number of blocks that may be begun and not drawn to their end: the claim beside them is for the next one."""
SPREAD = MOST_CLAIMS
"""A replica draws from so many free slots a replica: at a common start all draw at once, and see no claims yet."""
REACH, REACH_AT_LEAST = 32, 64
"""Slots a replica, and beside them: claims further beyond the median claim are not believed, since one far claim must
not draw the others after it. A slot that nobody took is waited for within as many behind the others' claims."""
LOOKS = 2
"""A replica looks so often at the others' claims before it begins a block that it has claimed. At a common start all
draw at once, and each reader takes several."""
FURTHEST = 1 << 40
"""No run comes so far. A peer that says so, even with most of the stage peers, draws nobody to where a slot cannot be
told."""

Outcome = Literal["begun", "finished"]
_Count = Annotated[int, Field(ge=0, le=1 << 48)]


@dataclass(frozen=True, slots=True)
class Claim:
    """A slot that a replica has taken, how many windows of its block are drawn, and whether this replica reads it."""

    slot: int
    position: int = 0
    """Kept for the own next life."""
    begun: bool = False


@dataclass(frozen=True, slots=True)
class Said:
    """What a peer's newest record says."""

    peer: str
    claims: tuple[Claim, ...]


class SharedPosition(BaseModel):
    """What a replica keeps of the row for its next life."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    row: Annotated[int, Field(gt=0)]
    """Blocks of a pass."""
    base: _Count
    taken: Annotated[str, Field(pattern=r"^[0-9a-f]*$")]
    """Slots from `base` on: bits, the lowest first, as a hexadecimal number."""
    own: tuple[tuple[_Count, _Count], ...]
    """Slots that it holds itself, each with the windows that are drawn."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A slot of the endless row of blocks that a replica has taken."""

    slot: int
    block: int
    epoch: int
    """Passes over all blocks that lie before the slot."""
    start: int = 0
    """Windows of the block that were read already."""


@dataclass(frozen=True, slots=True)
class SlotEvent:
    """What became of a slot, and how many windows of its block are drawn."""

    slot: int
    block: int
    epoch: int
    position: int
    what: Outcome


@dataclass(slots=True)
class SlotCounts:
    """What became of the slots of one replica so far."""

    claimed: int = 0
    finished: int = 0
    yielded: int = 0
    """Left before they were begun, for another replica that had claimed them as well."""

    @property
    def by_name(self) -> dict[str, int]:
        """All of them."""
        return asdict(self)


class SharedTurns:
    """Hands out the slots of a row of `row` blocks a pass, by what stage peers say. A `position` is gone on from where
    it is one of the same row.

    `take` is called by the reader's thread, the rest by the event loop's, in the order of what is drawn. `heard` brings
    the stage peers' words, `claims` is what the own record is to say. Thread-safe.
    """

    def __init__(self, row: int, seed: int, own: str, rng: random.Random, position: object = None) -> None:
        self._row, self._seed, self._name, self._rng = row, seed, own, rng
        self._lock = threading.Lock()
        self._base = 0
        """Everything below it is settled: taken, or no longer waited for."""
        self._taken: set[int] = set()
        """Slots from there on that somebody claimed."""
        self._own: dict[int, Claim] = {}
        """Slots that this replica holds, in the order in which it reads them; the last may be not begun yet."""
        self._live = 1
        self._looks = self._drawn_at = 0
        """Looks so far, and by when the last slot was drawn."""
        self._events: list[SlotEvent] = []
        self.counts = SlotCounts()
        self._kept = position if isinstance(position, SharedPosition) and position.row == row else None

    def take(self) -> Turn | None:
        """The next slot; None before others must have heard of the claim, and while as many are begun as may be."""
        with self._lock:
            if not self._looks or sum(claim.begun for claim in self._own.values()) >= MOST_BEGUN:
                return None
            self._draw_next()
            if self._live > 1 and self._looks - self._drawn_at < LOOKS:
                return None
            claim = next(claim for claim in self._own.values() if not claim.begun)
            self._own[claim.slot] = Claim(claim.slot, claim.position, begun=True)
            self._note("begun", claim)
            self._draw_next()
            return self._turn(claim)

    def reached(self, slot: int, position: int) -> None:
        """So many windows of the slot's block have been drawn."""
        with self._lock:
            if slot in self._own:
                self._own[slot] = Claim(slot, position, begun=True)

    def finished(self, slot: int) -> None:
        """All of the slot's block has been drawn, or there is none of it."""
        with self._lock:
            claim = self._own.pop(slot, None)
            if claim is not None:
                self.counts.finished += 1
                self._note("finished", claim)

    @property
    def position(self) -> SharedPosition:
        """Where drawing goes on, for a checkpoint: before the first look that is where an earlier life has left."""
        with self._lock:
            if self._kept is not None:
                return self._kept
            bits = sum(1 << slot - self._base for slot in self._taken)
            own = tuple((claim.slot, claim.position) for claim in self._own.values())
            return SharedPosition(row=self._row, base=self._base, taken=f"{bits:x}", own=own)

    @property
    def claims(self) -> tuple[Claim, ...]:
        """What the own record is to say."""
        with self._lock:
            return tuple(self._own.values())

    def heard(self, said: Iterable[Said], live: int) -> None:
        """The newest words of the stage peers that count, of which `live` replicas train in all, this one included."""
        with self._lock:
            self._live, words = max(1, live), [word for word in said if word.peer != self._name and word.claims]
            self._take_in(words)
            if not self._looks:
                self._resume(words)
            self._looks += 1
            for claim in [claim for claim in self._own.values() if not claim.begun]:
                if any(self._goes_first(word, claim.slot) for word in words):
                    del self._own[claim.slot]
                    self.counts.yielded += 1
            self._draw_next()

    def events(self) -> list[SlotEvent]:
        """What became of slots since they were asked for last."""
        with self._lock:
            told, self._events = self._events, []
            return told

    def _take_in(self, words: Sequence[Said]) -> None:
        """A replica that has not begun takes all that the others have reached as taken. What lies far behind them is no
        longer waited for."""
        window = REACH * self._live + REACH_AT_LEAST
        if words:
            highest = sorted(max(claim.slot for claim in word.claims) for word in words)
            reach = max(min(median_low(highest), FURTHEST), self._base) + window
            frontier = min(highest[-1 - len(highest) // 8], reach)  # an eighth of them is left aside
            self._base = max(self._base, frontier - window if self._looks else frontier + 1)
            self._taken |= {claim.slot for word in words for claim in word.claims[:MOST_CLAIMS] if claim.slot <= reach}
        self._settle()

    def _settle(self) -> None:
        while self._base in self._taken:
            self._base += 1
        self._taken = {slot for slot in self._taken if slot >= self._base}

    def _resume(self, words: Sequence[Said]) -> None:
        """Go on from the position of an earlier life, with what it knew of the row. Where nobody else is there yet, the
        row goes on from there, else from where the others are. Its own slots nobody else reads."""
        kept, self._kept = self._kept, None
        if kept is None:
            return
        bits = int(kept.taken or "0", 16)
        self._taken |= {kept.base + place for place in range(bits.bit_length()) if bits >> place & 1}
        self._base = max(self._base, kept.base)
        self._settle()
        others = {claim.slot for word in words for claim in word.claims}
        for slot, position in kept.own[:MOST_CLAIMS]:
            if slot not in others:
                self._claim(slot, position)

    def _claim(self, slot: int, position: int = 0) -> None:
        self._own[slot] = Claim(slot, position)
        self._taken.add(slot)
        self._settle()
        self.counts.claimed += 1

    def _draw_next(self) -> None:
        """Claim one of the lowest slots that are free, if the last one is begun."""
        if len(self._own) < MOST_CLAIMS and all(claim.begun for claim in self._own.values()):
            spread = 1 if self._live == 1 else max(1, min(SPREAD * self._live, self._row // 4))
            free = (slot for slot in count(self._base) if slot not in self._taken)
            self._claim(self._rng.choice(list(islice(free, spread))))
            self._drawn_at = self._looks

    def _goes_first(self, word: Said, slot: int) -> bool:
        """Whether a peer's claim goes before the own one, which is not begun: it is begun, or chance decides, the same
        wherever it is asked."""
        theirs = next((claim for claim in word.claims if claim.slot == slot), None)
        return theirs is not None and (theirs.begun or _lot(word.peer, slot) < _lot(self._name, slot))

    def _turn(self, claim: Claim) -> Turn:
        epoch, place = divmod(claim.slot, self._row)
        block = Permutation(self._row, f"blocks/{self._seed}/{epoch}")[place]
        return Turn(claim.slot, block, epoch, claim.position)

    def _note(self, what: Outcome, claim: Claim) -> None:
        turn = self._turn(claim)
        self._events.append(SlotEvent(turn.slot, turn.block, turn.epoch, claim.position, what))


def _lot(peer: str, slot: int) -> tuple[bytes, str]:
    return hashlib.blake2b(f"{slot}/{peer}".encode(), digest_size=8).digest(), peer
