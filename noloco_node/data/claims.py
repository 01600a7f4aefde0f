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
import math
import random
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from statistics import median_low
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

MOST_CLAIMS = 4
"""One replica may claim so many slots at a time: what it reads, what its reader holds already, and the next."""
CREDIBLE_PACE = 8.0
"""Slots of one peer count for at most so many times the median of its stage peers', and a few at once."""
ALLOWED_AT_ONCE = 4
REACH = 16
"""Claims are believed up to so many slots a replica beyond the median claim: a far claim must not draw the others after
it."""
REACH_AT_LEAST = 64
FURTHEST = 1 << 40
"""No run comes so far. A peer that says so, even with most of the stage peers, draws nobody to where a slot cannot be
told."""
HORIZON = 32
"""A slot that nobody took is waited for within so many slots a replica behind the others' claims."""
FIRST_SPREAD = 4
"""First claims are spread over so many slots a replica."""
LEAST_SPREAD = 8
LEAST_SHARE = 0.125
WHOLE_VIEW = 0.75
"""A replica that sees this share of its stage peers sees all that they say, in their order."""
SHARE_STEP = 0.25
JUDGED_IN_PATIENCE = 12
"""While a replica waits for a silent one, it judges all of them so many times within its patience."""
PACE_SECONDS = 30.0
"""A peer that was first seen just now is taken to have been there for so many seconds."""


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
    """What was seen of one peer. Times are seconds on the clock of the observer."""

    since: float
    heard: float
    said: Said
    overdue: bool
    """Its last word should have been followed by another when it was last seen."""
    claims: tuple[Claim, ...] = ()
    """Those that are believed."""
    highest: int = -1
    """The highest of these."""
    taken: int = 0
    """Slots it has claimed so far."""
    earlier: frozenset[int] = frozenset()
    """The slots that the peer claimed before it said that it has begun them, and those that it had when first seen. A
    peer that claims as begun what it never claimed as its next has no right to it."""
    left: bool = False


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
    taken: set[int] = field(default_factory=set[int])
    """Slots from `base` on that any peer claimed and did not give back."""
    holes: dict[int, int] = field(default_factory=dict[int, int])
    """Slots that were begun and given up, and where to go on in each."""
    stage_peers: dict[str, _StagePeer] = field(default_factory=dict[str, _StagePeer])
    closed: set[int] = field(default_factory=set[int])
    """Slots that this replica holds or has finished. Also slots that stage peers have ceased to speak of without
    leaving them to another."""
    holders: dict[int, set[str]] = field(default_factory=dict[int, set[str]])
    """Which stage peers claim a slot."""
    frontier: int = -1
    """The highest slot that stage peers claim, an eighth of them left aside."""
    reach: int = 0
    """The highest slot that is believed of a stage peer."""
    pace: float = 0.0
    """Slots a second that the median stage peer claims."""
    since: float = math.inf
    """When this replica looked first."""
    own_taken: int = 0
    """Slots it has claimed since."""
    judged: float = -math.inf
    """The time when these were last examined for peers that have vanished."""
    live: int = 1
    share: float = 1.0
    """The share of its stage peers that a look shows, smoothed."""
    started: bool = False
    """It has claimed a slot of its own."""

    def look(self, said: Iterable[Said], now: float, live: int) -> None:
        """Take in the newest word of each stage peer that counts, of which `live` replicas train in all, own
        included."""
        self.live, words = max(1, live), [_each_slot_once(word) for word in said if word.peer != self.own]
        self._note_share(len(words))
        news = [word for word in words if self._is_news(word, now)]
        if now - self.judged >= self.patience / JUDGED_IN_PATIENCE or not self.started:
            self.judged, self.since = now, min(self.since, now)
            self._forget_vanished(now)
            self.reach = self._reach(news)
            self.pace = self._usual_pace(now)
        dropped = [(word.peer, claim) for word in news if not word.leaving for claim in self._take_in(word, now)]
        self.closed.update(claim.slot for peer, claim in dropped if not self._was_yielded(peer, claim))
        for word in news:  # last: a peer that left a slot to one that leaves has not finished it
            if word.leaving:
                self._leave(word, now)
        if news:
            self._settle()

    def choose(self, own: Collection[int], rng: random.Random) -> tuple[int, int]:
        """A slot to claim beside those that it holds: one of the lowest that are free; and where to begin in it."""
        slot = rng.choice(list(islice(self._free(own), self._spread())))
        self.started = True
        return slot, self.holes.get(slot, 0)

    def claimed(self, slot: int) -> None:
        """This replica has taken a slot."""
        self._close(slot)
        self.closed.add(slot)
        self.own_taken += 1

    def yielded(self, slot: int) -> None:
        """This replica has left a slot to another."""
        self.closed.discard(slot)

    def keeps(self, claim: Claim, *, settled: bool) -> bool:
        """Tell whether to hold on to an own claim as it was last said to others. `settled` says that they have known of
        it for so long that a peer that claims the slot now came later."""
        if settled and (claim.begun or self.share >= WHOLE_VIEW):
            return True
        return self._goes_first(self.own, claim)

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
        self.taken |= {slot for slot in taken if slot >= self.base}
        self.started |= not self.stage_peers
        if self.frontier > max(taken, default=kept.base - 1):
            return False
        for slot, position in kept.open:
            self._give_back([Claim(slot, position)])
        return True

    def _note_share(self, words: int) -> None:
        """A look shows so many stage peers: fewer than there are where this replica sees the swarm in part."""
        if self.live > 1:
            share = min(1.0, max(LEAST_SHARE, words / (self.live - 1)))
            self.share += (share - self.share) * SHARE_STEP

    def _forget_vanished(self, now: float) -> None:
        """Treat peers that are no longer heard of as vanished. A vanished peer's slots are open from its last word on,
        if that word was seen to be its last. A replica that has seen only earlier words leaves them to others that have
        seen more."""
        for peer in [peer for peer, seen in self.stage_peers.items() if now - seen.heard > self.patience]:
            seen = self.stage_peers.pop(peer)
            self._hold(peer, seen.claims, ())
            if seen.overdue:
                self._give_back(seen.claims)
            else:
                self.closed.update(claim.slot for claim in seen.claims)

    def _is_news(self, word: Said, now: float) -> bool:
        seen = self.stage_peers.get(word.peer)
        if seen is None:
            return bool(word.claims)
        seen.heard, seen.overdue = now, word.overdue
        if seen.said is word or seen.said == word:
            return False
        if seen.left or word.leaving or len(seen.said.claims) != len(word.claims):
            return True
        same = all(a.slot == b.slot for a, b in zip(seen.said.claims, word.claims, strict=True))
        if same:  # only further on
            believed = {claim.slot for claim in seen.claims}
            seen.said = word
            seen.claims = tuple(claim for claim in word.claims if claim.slot in believed)
        return not same

    def _reach(self, news: list[Said]) -> int:
        highest = [seen.highest for seen in self.stage_peers.values() if seen.claims]
        highest += [max(c.slot for c in w.claims) for w in news if w.claims and w.peer not in self.stage_peers]
        beyond = REACH * self.live + REACH_AT_LEAST
        median = median_low(highest) if highest else self.base
        return max(min(median, FURTHEST), self.base) + beyond

    def _usual_pace(self, now: float) -> float:
        """Slots a second that stage peers claim, and this replica, at the median."""
        paces = [seen.taken / (now - seen.since + PACE_SECONDS) for seen in self.stage_peers.values() if not seen.left]
        return median_low([*paces, self.own_taken / (now - self.since + PACE_SECONDS)])

    def _goes_first(self, peer: str, claim: Claim) -> bool:
        """Whether no stage peer's claim on the same slot goes before it."""
        for holder in self.holders.get(claim.slot, ()):
            seen = self.stage_peers[holder]
            other = next(other for other in seen.claims if other.slot == claim.slot)
            known = replace(other, begun=other.begun and other.slot in seen.earlier)
            if not _first(claim, peer, known, holder):
                return False
        return True

    def _was_yielded(self, peer: str, claim: Claim) -> bool:
        """Tell whether a stage peer that ceased to speak of this claim left the slot to another, and was not at its
        end. It had then read nothing that it told of, and the other's claim goes before its own."""
        return claim.position == 0 and not self._goes_first(peer, claim)

    def _leave(self, word: Said, now: float) -> None:
        """This stage peer gives back what it was known to claim."""
        seen = self._seen(word, now)
        before, seen.said = seen.claims, word
        if not seen.left:
            known = {claim.slot for claim in before}
            seen.claims, seen.left = (), True
            self._hold(word.peer, before, ())
            self._give_back(claim for claim in word.claims if claim.slot in known)

    def _seen(self, word: Said, now: float) -> _StagePeer:
        return self.stage_peers.setdefault(word.peer, _StagePeer(now, now, word, word.overdue))

    def _take_in(self, word: Said, now: float) -> Iterable[Claim]:
        """Claims of which this stage peer has ceased to speak."""
        new = word.peer not in self.stage_peers
        seen = self._seen(word, now)
        before, seen.said, seen.left = seen.claims, word, False
        held = {claim.slot for claim in before}
        allowance = ALLOWED_AT_ONCE + CREDIBLE_PACE * self.pace * (now - seen.since) - seen.taken
        believed, earlier = list[Claim](), set[int]()
        for claim in word.claims[:MOST_CLAIMS]:
            if claim.slot not in held:
                if claim.slot > self.reach or allowance < 1.0:
                    continue
                allowance -= 1.0
                seen.taken += 1
                self._close(claim.slot)
            believed.append(claim)
            if claim.slot in seen.earlier or not claim.begun or new or self.share < WHOLE_VIEW:
                earlier.add(claim.slot)
        seen.earlier = frozenset(earlier)
        seen.claims = tuple(believed)
        seen.highest = max((claim.slot for claim in believed), default=-1)
        self._hold(word.peer, before, believed)
        kept = {claim.slot for claim in believed}
        return [claim for claim in before if claim.slot not in kept]

    def _close(self, slot: int) -> None:
        self.taken.add(slot)
        self.holes.pop(slot, None)

    def _hold(self, peer: str, before: Iterable[Claim], now: Iterable[Claim]) -> None:
        for claim in before:
            holders = self.holders[claim.slot]
            holders.discard(peer)
            if not holders:
                del self.holders[claim.slot]
        for claim in now:
            self.holders.setdefault(claim.slot, set()).add(peer)

    def _give_back(self, claims: Iterable[Claim]) -> None:
        """These have no holder any more, unless another claims them."""
        for claim in claims:
            if claim.slot in self.holders or claim.slot in self.closed:
                continue
            if claim.position > 0 or claim.slot < self.base:
                self.holes[claim.slot] = claim.position
            self.taken.discard(claim.slot)

    def _settle(self) -> None:
        """A replica that has not begun takes all that the others have reached as taken. What lies far behind them is no
        longer waited for."""
        highest = sorted(seen.highest for seen in self.stage_peers.values() if seen.claims)
        self.frontier = top = highest[-1 - len(highest) // 8] if highest else -1
        if not self.started:
            self.base = max(self.base, top + 1)
        self.base = max(self.base, top - HORIZON * self.live - REACH_AT_LEAST)
        while self.base in self.taken:
            self.base += 1
        if len(self.taken) > 2 * HORIZON * self.live + REACH_AT_LEAST or (self.taken and min(self.taken) < self.base):
            self.taken = {slot for slot in self.taken if slot >= self.base}
        if len(self.closed) > 4 * (HORIZON * self.live + REACH_AT_LEAST):
            oldest = self.base - HORIZON * self.live - REACH_AT_LEAST
            self.closed = {slot for slot in self.closed if slot >= oldest}

    def _spread(self) -> int:
        """The number of free slots to draw from. There are enough that peers that draw at about the same time seldom
        meet, and no more, so that no gap stays open for long."""
        if self.live == 1:
            return 1
        wanted = FIRST_SPREAD * self.live if self._is_first() else int(self.live / 2 / self.share)
        return max(1, min(max(LEAST_SPREAD, wanted), self.row // 4))

    def _free(self, held: Collection[int]) -> Iterator[int]:
        """Holes, then free slots, lowest first, up to a few beyond the highest that others claim."""
        yield from (slot for slot in sorted(self.holes) if slot not in held)
        room = FIRST_SPREAD * self.live if self._is_first() else max(LEAST_SPREAD // 2, self.live // 16)
        top, slot, beyond = self.frontier, self.base, 0
        while beyond < room:
            if slot not in self.taken and slot not in self.holes:
                yield slot
                beyond += slot > top
            slot += 1

    def _is_first(self) -> bool:
        """Others are there, and none of them has claimed any yet."""
        return not self.stage_peers and self.live > 1


def _each_slot_once(word: Said) -> Said:
    """This word with each slot named once; of claims on one slot the last counts."""
    once = {claim.slot: claim for claim in word.claims}
    return word if len(once) == len(word.claims) else replace(word, claims=tuple(once.values()))


def _first(claim: Claim, peer: str, other: Claim, other_peer: str) -> bool:
    """Tell whether the first of two claims on a slot stands. A begun claim goes before one that is not, else chance
    decides, the same wherever it is asked."""
    if claim.begun != other.begun:
        return claim.begun
    return (_lot(peer, claim.slot), peer) < (_lot(other_peer, claim.slot), other_peer)


def _lot(peer: str, slot: int) -> bytes:
    return hashlib.blake2b(f"{slot}/{peer}".encode(), digest_size=8).digest()
