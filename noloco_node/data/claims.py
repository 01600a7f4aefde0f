"""The claims of replicas on slots of the endless row of blocks, as one replica knows them: pure functions of what was
said.

Each replica says which slots it has taken (`Claim`), and nobody shares them out. A slot that is claimed is taken for
good, but for two cases. A leaving replica gives its slots back with the place up to which it has read. The slots of a
replica that was not heard of for a while are holes from the place that it last said.

A replica that needs a slot takes one of the lowest free ones, at random, so that two seldom take the same. If two did,
one yields before it begins. Nothing here asks which peers a replica sees: a claim that is not seen is not heeded, and
that costs an overlap, never a halt.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from statistics import median_low
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

MOST_CLAIMS = 4
"""One replica may claim so many slots at a time: what it reads, what its reader holds already, and the next."""
SPREAD = MOST_CLAIMS
"""A replica draws from so many free slots a replica: at a common start all draw at once, and see no claims yet."""
REACH, REACH_AT_LEAST = 32, 64
"""Slots a replica, and beside them: claims further beyond the median claim are not believed, since one far claim must
not draw the others after it. A slot that nobody took is waited for within as many behind the others' claims."""
FURTHEST = 1 << 40
"""No run comes so far. A peer that says so, even with most of the stage peers, draws nobody to where a slot cannot be
told."""


_Count = Annotated[int, Field(ge=0, le=1 << 48)]


@dataclass(frozen=True, slots=True)
class Claim:
    """A slot that a replica has taken, how many windows of its block are drawn, and whether this replica has begun
    it."""

    slot: int
    position: int = 0
    begun: bool = False


class SharedPosition(BaseModel):
    """What a replica keeps of the row for its next life."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    time: float
    """When it was kept, seconds since 1970."""
    row: Annotated[int, Field(gt=0)]
    """Blocks of a pass."""
    base: _Count
    taken: Annotated[str, Field(pattern=r"^[0-9a-f]*$")]
    """Slots from `base` on: bits, the lowest first, as a hexadecimal number."""
    open: tuple[tuple[_Count, _Count], ...]
    """Slots that nobody holds and that were begun, each with the windows that are drawn."""
    own: tuple[tuple[_Count, _Count], ...]
    """Slots that it holds itself, likewise."""
    left: bool = False
    """It has given these back."""


@dataclass(frozen=True, slots=True)
class Said:
    """What a peer's newest record says."""

    peer: str
    claims: tuple[Claim, ...]
    leaving: bool = False
    """It has given back what it claims."""
    overdue: bool = False
    """The record should have been renewed by now."""


@dataclass(slots=True)
class _StagePeer:
    """What was seen of one peer."""

    heard: float
    """When, in seconds on the clock of the observer."""
    said: Said
    claims: dict[int, Claim] = field(default_factory=dict[int, Claim])
    """Those that are believed, by slot."""
    next: frozenset[int] = frozenset()
    """Slots that it claimed before it said that it has begun them, or that it had when first seen. A peer that claims
    as begun what it never claimed as its next takes it from nobody."""


@dataclass(slots=True)
class SlotBook:
    """What one replica knows of the row. After `patience` seconds without a word a peer has vanished; `row` is the
    slots of a pass.

    `look` takes in what was said, `choose` names a slot to claim, `keeps` says whether to hold on to one.
    """

    own: str
    patience: float
    row: int
    base: int = 0
    """Everything below it is settled: taken, or no longer waited for."""
    taken: dict[int, str] = field(default_factory=dict[int, str])
    """Slots that somebody claimed, those long below `base` aside, and who may give each back: the first that did."""
    holes: dict[int, int] = field(default_factory=dict[int, int])
    """Slots that were begun and given up, and where to go on in each."""
    stage_peers: dict[str, _StagePeer] = field(default_factory=dict[str, _StagePeer])
    frontier: int = -1
    """The highest slot that stage peers claim, an eighth of them left aside."""
    live: int = 1
    started: bool = False
    """It has claimed a slot of its own."""

    def look(self, said: Iterable[Said], now: float, live: int) -> None:
        """Take in the newest word of each stage peer that counts, of which `live` replicas train in all, own
        included."""
        self.live, words = max(1, live), [word for word in said if word.peer != self.own]
        for peer, seen in list(self.stage_peers.items()):
            if now - seen.heard > self.patience:
                # One whose last word was not seen may have read on: others that saw it give its slots back.
                self._end(peer, seen.claims.values() if seen.said.overdue else ())
        reach = self._reach(words)
        dropped = [(w.peer, claim) for w in words if not w.leaving for claim in self._take_in(w, now, reach)]
        for peer, claim in dropped:
            # It has read it, unless it left it to another: then it has told of nothing that it read.
            if self.taken.get(claim.slot) == peer and claim.position == 0 and not self._goes_first(peer, claim):
                self._pass_on(claim.slot)
        for word in words:  # last: a peer that left a slot to one that leaves has not finished it
            seen = self.stage_peers.get(word.peer)
            if word.leaving and seen is not None:
                self._end(word.peer, (claim for claim in word.claims if claim.slot in seen.claims))
        self._settle()

    def choose(self, own: Collection[int], rng: random.Random) -> tuple[int, int]:
        """A slot to claim beside those that it holds: one of the lowest that are free; and where to begin in it."""
        spread = 1 if self.live == 1 else max(1, min(SPREAD * self.live, self.row // 4))
        slot = rng.choice(list(islice(self._free(own), spread)))
        self.started = True
        return slot, self.holes.get(slot, 0)

    def claimed(self, slot: int) -> None:
        """This replica has taken a slot."""
        self._take(slot, self.own)

    def yielded(self, slot: int) -> None:
        """This replica has left a slot to another."""
        self._pass_on(slot)

    def keeps(self, claim: Claim, *, settled: bool) -> bool:
        """Tell whether to hold on to an own claim as it was last said to others. `settled` says that they have known of
        it for so long that a peer that claims the slot now came later."""
        return settled or self._goes_first(self.own, claim)

    def kept(self, own: Iterable[Claim], time: float, *, left: bool) -> SharedPosition:
        """What to keep for this replica's next life, where it holds `own`, or held it until it `left`."""
        bits = sum(1 << slot - self.base for slot in self.taken if slot >= self.base)
        return SharedPosition(
            time=time,
            row=self.row,
            base=self.base,
            taken=f"{bits:x}",
            open=tuple(self.holes.items()),
            own=tuple((claim.slot, claim.position) for claim in own),
            left=left,
        )

    def restore(self, kept: SharedPosition) -> bool:
        """Go on from what was kept. False where others have claimed beyond it since: what was open then they know."""
        bits = int(kept.taken or "0", 16)
        taken = {kept.base + place for place in range(bits.bit_length()) if bits >> place & 1}
        self.base = max(self.base, kept.base)
        self.taken = dict.fromkeys((slot for slot in taken if slot >= self.base), "") | self.taken
        self.started |= not self.stage_peers
        if self.frontier > max(taken, default=kept.base - 1):
            return False
        for slot, position in kept.open:
            if not self.is_held(slot):
                self._open(Claim(slot, position))
        return True

    def _reach(self, words: Iterable[Said]) -> int:
        """The highest slot that is believed of a stage peer."""
        highest = [max(claim.slot for claim in word.claims) for word in words if word.claims]
        median = median_low(highest) if highest else self.base
        return max(min(median, FURTHEST), self.base) + REACH * self.live + REACH_AT_LEAST

    def _take_in(self, word: Said, now: float, reach: int) -> list[Claim]:
        """The claims of which this stage peer has ceased to speak."""
        new = word.peer not in self.stage_peers
        seen = self.stage_peers.setdefault(word.peer, _StagePeer(now, word))
        before, seen.heard, seen.said = seen.claims, now, word
        if not new and before and tuple(before.values()) == word.claims:
            return []
        some = word.claims[:MOST_CLAIMS]
        seen.claims = {claim.slot: claim for claim in some if claim.slot in before or claim.slot <= reach}
        seen.next = frozenset(
            slot for slot, claim in seen.claims.items() if new or not claim.begun or slot in seen.next
        )
        for slot in seen.claims.keys() - before.keys():
            self._take(slot, word.peer)
        return [claim for slot, claim in before.items() if slot not in seen.claims]

    def _end(self, peer: str, given_back: Iterable[Claim]) -> None:
        """A stage peer is gone, and what it `given_back` others may read."""
        some = list(given_back)
        del self.stage_peers[peer]
        for claim in some:
            if self.taken.get(claim.slot) != peer:
                continue
            self._pass_on(claim.slot)
            if not self.is_held(claim.slot):
                self._open(claim)

    def _take(self, slot: int, peer: str) -> None:
        if not self.taken.get(slot):
            # A slot that was read before this replica came nobody gives back, or a stranger's word had it read again.
            open_to_it = slot >= self.base or slot in self.holes or not self.started
            self.taken[slot] = peer if peer == self.own or open_to_it else ""
        self.holes.pop(slot, None)

    def _open(self, claim: Claim) -> None:
        """This slot has no holder any more."""
        if claim.position > 0 or claim.slot < self.base:
            self.holes[claim.slot] = claim.position
        self.taken.pop(claim.slot, None)

    def is_held(self, slot: int) -> bool:
        """Whether this replica took the slot, or a stage peer claims it now."""
        return self.taken.get(slot) == self.own or any(slot in seen.claims for seen in self.stage_peers.values())

    def _pass_on(self, slot: int) -> None:
        """Its holder left this slot to another that claims it as well, if there is one."""
        other = next((peer for peer, seen in self.stage_peers.items() if slot in seen.claims), None)
        if other is not None:
            self.taken[slot] = other

    def _goes_first(self, peer: str, claim: Claim) -> bool:
        """Whether no stage peer's claim on the same slot goes before it."""
        for other, seen in self.stage_peers.items():
            theirs = seen.claims.get(claim.slot)
            if theirs is None or other == peer:
                continue
            known = replace(theirs, begun=theirs.begun and theirs.slot in seen.next)
            if not _first(claim, peer, known, other):
                return False
        return True

    def _settle(self) -> None:
        """A replica that has not begun takes all that the others have reached as taken. What lies far behind them is no
        longer waited for."""
        highest = sorted(max(seen.claims) for seen in self.stage_peers.values() if seen.claims)
        self.frontier = top = highest[-1 - len(highest) // 8] if highest else -1
        if not self.started:
            self.base = max(self.base, top + 1)
        window = REACH * self.live + REACH_AT_LEAST
        self.base = max(self.base, top - window)
        while self.base in self.taken:
            self.base += 1
        if max(len(self.taken), len(self.holes)) > 4 * window:
            self.taken = {slot: peer for slot, peer in self.taken.items() if slot >= self.base - window}
            self.holes = {slot: start for slot, start in self.holes.items() if slot >= self.base - window}

    def _free(self, held: Collection[int]) -> Iterator[int]:
        """Holes, then free slots, the lowest first."""
        yield from (slot for slot in sorted(self.holes) if slot not in held)
        slot = self.base
        while True:
            if slot not in self.taken and slot not in self.holes:
                yield slot
            slot += 1


def _first(claim: Claim, peer: str, other: Claim, other_peer: str) -> bool:
    """Tell whether the first of two claims on a slot stands. A begun claim goes before one that is not, else chance
    decides, the same wherever it is asked."""
    if claim.begun != other.begun:
        return claim.begun
    return (_lot(peer, claim.slot), peer) < (_lot(other_peer, claim.slot), other_peer)


def _lot(peer: str, slot: int) -> bytes:
    return hashlib.blake2b(f"{slot}/{peer}".encode(), digest_size=8).digest()
