"""Turns that stage 0's replicas share: a block is read by one of them at a time, and nobody shares them out."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass
from typing import Literal

from noloco_node import ambient
from noloco_node.data.claims import MOST_CLAIMS, Claim, Said, SharedPosition, SlotBook
from noloco_node.data.sampler import Permutation

PATIENCE_LIVES = 3.0
"""A silent replica keeps its slots for so many record lives. A replica that sees the others in part hears of each of
them only now and then. A node that starts again goes on with its own slots."""
SETTLED_LIVES = 2.0
"""After so many record lives a claim is known to every replica that would claim the same slot."""
FIRST_WAIT_LIVES = 0.2
"""A claim stands for so many record lives before its block is begun, if others are there: two looks."""


MOST_BEGUN = MOST_CLAIMS - 1
"""The number of blocks that may be begun and not drawn to their end: the claim beside them is for the next one."""

Outcome = Literal["begun", "finished", "yielded", "given_back"]


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
    """What became of a slot: how many windows of its block are drawn, and why it is told."""

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
    given_back: int = 0
    yielded: int = 0
    """Given up for another replica that had claimed them as well."""
    repeated: int = 0
    """Windows of blocks that it had begun before it yielded them: another reads them again."""

    @property
    def by_name(self) -> dict[str, int]:
        """All of them."""
        return asdict(self)


class SharedTurns:
    """Hands out the slots, by what stage peers say. `count`: blocks of a pass; `life`: seconds that a record lives. A
    `position` is gone on from where it is one of the same row.

    `take` is called by the reader's thread, the rest by the event loop's, in the order of what is drawn. `heard` brings
    the stage peers' words, `claims` is what the own record is to say, `published` that it has said so. Waits go by
    `clock`, which is monotonic; by `wall` only what a next life must know. Thread-safe.
    """

    def __init__(
        self,
        count: int,
        seed: int,
        own: str,
        life: float,
        rng: random.Random,
        position: object = None,
        clock: Callable[[], float] = ambient.monotonic,
        wall: Callable[[], float] = ambient.wall,
    ) -> None:
        self._count, self._seed, self._life, self._rng = count, seed, life, rng
        self._clock, self._wall = clock, wall
        self._book = SlotBook(own, PATIENCE_LIVES * life, count)
        self._lock = threading.Lock()
        self._own: dict[int, Claim] = {}
        """Slots that this replica holds, in the order in which it reads them; the last may be not begun yet."""
        self._published: dict[int, tuple[Claim, float]] = {}
        """What others were told of each, and when they were told of it first."""
        self._looked = self._leaving = False
        self._began = clock()
        self._events: list[SlotEvent] = []
        self.counts = SlotCounts()
        self._kept = position if isinstance(position, SharedPosition) and position.row == count else None

    def take(self) -> Turn | None:
        """The next slot; None before others were heard, while the claim on it is not known to them, and once this
        replica leaves."""
        with self._lock:
            begun = sum(claim.begun for claim in self._own.values())
            if not self._looked or self._leaving or begun >= MOST_BEGUN:
                return None
            self._draw_next()
            claim = next((claim for claim in self._own.values() if not claim.begun), None)
            if claim is None or not self._stands(claim):
                return None
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
        """All of the slot's block has been drawn."""
        with self._lock:
            claim = self._own.pop(slot, None)
            if claim is not None:
                self.counts.finished += 1
                self._note("finished", claim)

    def empty(self, slot: int) -> None:
        """No window of the slot's block is there: it need not be held until what was read before it is drawn."""
        self.finished(slot)

    def holds(self, slot: int) -> bool:
        """Whether the slot is still this replica's: another may have it."""
        with self._lock:
            return slot in self._own

    @property
    def position(self) -> SharedPosition:
        """Where drawing goes on, for a checkpoint."""
        with self._lock:
            return self._book.kept(self._own.values(), self._wall(), left=self._leaving)

    @property
    def claims(self) -> tuple[Claim, ...]:
        """What the own record is to say."""
        with self._lock:
            return tuple(self._own.values())[:MOST_CLAIMS]

    @property
    def news(self) -> bool:
        """Whether the slots that it holds are others than the record says."""
        with self._lock:
            said = self._published
            return any(
                slot not in said or said[slot][0].begun != claim.begun for slot, claim in self._own.items()
            ) or any(slot not in self._own for slot in said)

    def published(self, claims: Collection[Claim]) -> None:
        """A record that says so is out."""
        with self._lock:
            now, before = self._clock(), self._published
            self._published = {claim.slot: (claim, before.get(claim.slot, (claim, now))[1]) for claim in claims}

    def heard(self, said: Iterable[Said], live: int) -> None:
        """The newest words of the stage peers that count, of which `live` replicas train in all, this one included."""
        with self._lock:
            self._book.look(said, self._clock(), live)
            if not self._looked:
                self._looked = True
                self._resume()
            for slot, claim in list(self._own.items()):
                known, since = self._published.get(slot, (claim, self._clock()))
                settled = self._clock() - since >= SETTLED_LIVES * self._life
                if not self._book.keeps(known, settled=settled):
                    self._yield(claim)
            if not self._leaving:
                self._draw_next()

    def leave(self) -> tuple[Claim, ...]:
        """Hand out no more; what it held, each up to where it was drawn, is for others from now on."""
        with self._lock:
            held = tuple(self._own.values())
            if not self._leaving:
                self._leaving = True
                self.counts.given_back += len(held)
                for claim in held:
                    if claim.begun:
                        self._note("given_back", claim)
            return held[:MOST_CLAIMS]

    def events(self) -> list[SlotEvent]:
        """What became of slots since they were asked for last."""
        with self._lock:
            told, self._events = self._events, []
            return told

    def _resume(self) -> None:
        """Go on from the position of an earlier life, with what it knew of the row. It goes on with its own slots that
        nobody else has taken, unless one of the others has come further since. It also does so while they wait for a
        replica that has not left."""
        kept, self._kept = self._kept, None
        if kept is None:
            return
        newest = self._book.restore(kept)
        if newest or (not kept.left and self._wall() - kept.time <= self._book.patience):
            for slot, start in kept.own:
                if not self._book.is_held(slot):
                    self._claim(slot, start)

    def _claim(self, slot: int, start: int) -> None:
        self._own[slot] = Claim(slot, start)
        self._book.claimed(slot)
        self.counts.claimed += 1

    def _draw_next(self) -> None:
        if all(claim.begun for claim in self._own.values()) and len(self._own) < MOST_CLAIMS:
            slot, start = self._book.choose(self._own, self._rng)
            self._claim(slot, start)

    def _stands(self, claim: Claim) -> bool:
        """Tell whether a replica that claims the same slot at about the same time must have heard of the claim."""
        if not self._book.stage_peers and self._book.live == 1:
            return True
        said = self._published.get(claim.slot)
        return said is not None and self._clock() - said[1] >= FIRST_WAIT_LIVES * self._life

    def _yield(self, claim: Claim) -> None:
        del self._own[claim.slot]
        self._book.yielded(claim.slot)
        self._published.pop(claim.slot, None)
        self.counts.yielded += 1
        if claim.begun:
            self.counts.repeated += claim.position
            self._note("yielded", claim)

    def _turn(self, claim: Claim) -> Turn:
        epoch, place = divmod(claim.slot, self._count)
        block = Permutation(self._count, f"blocks/{self._seed}/{epoch}")[place]
        return Turn(claim.slot, block, epoch, claim.position)

    def _note(self, what: Outcome, claim: Claim) -> None:
        turn = self._turn(claim)
        self._events.append(SlotEvent(turn.slot, turn.block, turn.epoch, claim.position, what))
