"""Peers seen before, kept in a file with their addresses and states; and peers that vanished, each with the time
when it is asked for next.

By the addresses the next start finds the swarm by another door. By the states of peers that this node has worked with,
a stage is not begun anew while its state is only away.

A network that falls into two halves leaves two directories: each half forgets the other's nodes within a minute. Once
the network is whole again nothing would ever bring the halves together. So a node keeps asking for those that it lost,
ever more rarely; one answer on one node joins the halves.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, NoReturn, Protocol

from pydantic import BaseModel, ConfigDict, Field

from noloco_node import ambient
from noloco_node.aio import some_at_a_time
from noloco_node.ambient import LOOK_SECONDS
from noloco_node.directory.records import DirectoryView, PeerState
from noloco_node.directory.store import Esteem, hearsay
from noloco_node.identity.addresses import MOST_ADDRESSES, dialable
from noloco_node.identity.peer_id import PeerId
from noloco_node.peers.scorecard import PeerStats
from noloco_node.storage import atomic
from noloco_node.tallies import FEW_PEERS, Doubling, PeerTable
from noloco_node.transport.calls import ASKED_AT_ONCE

logger = logging.getLogger(__name__)

MOST_PEERS = 32
LOOKS_BETWEEN = 30
"""All addresses are asked for again after so many looks, since peers may have moved."""

_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9-]{1,128}$")]
"""A peer id as the file has it: it is shown to a person."""
Addresses = Annotated[list[str], Field(max_length=MOST_ADDRESSES)]


class Book(Protocol):
    """What `KnownPeers.keep` needs of p2pd."""

    async def addresses_of(self, peer: PeerId) -> tuple[str, ...]:
        """Where a peer listens."""
        ...


class HeldState(BaseModel):
    """The state that a peer held when it was last seen at work."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    stage: Annotated[int, Field(ge=0, le=255)]
    clock: Annotated[float, Field(ge=0.0, le=1e18, allow_inf_nan=False)]
    """In swarm tokens, as the peer said."""
    seen: Annotated[float, Field(ge=0.0, le=1e12, allow_inf_nan=False)]
    """Seconds since 1970."""


class _File(BaseModel):
    """The file: which run the peers were met in, and where they listened, those seen last first."""

    model_config = ConfigDict(extra="ignore")

    run: Annotated[str, Field(max_length=128)]
    peers: Annotated[dict[_Name, Addresses], Field(max_length=MOST_PEERS)]
    held: Annotated[dict[_Name, HeldState], Field(max_length=MOST_PEERS)] = {}


class KnownPeers:
    """Peers by id with their addresses, those met last first; at most `MOST_PEERS`."""

    def __init__(self, path: Path) -> None:
        self._path, self._refused = path, False
        self._rng = ambient.chance()
        self.run: str | None = None
        """The run in which they were met; None where the file says nothing."""
        self.addresses: dict[PeerId, tuple[str, ...]] = {}
        self.held: dict[PeerId, HeldState] = {}
        """What those held that this node has worked with, seen last first."""
        self._load()

    def texts(self, run: str | None = None) -> tuple[str, ...]:
        """All addresses, those of the peers met last first; none if they belong to another run than `run`."""
        if run is not None and run != self.run:
            return ()
        return tuple(text for texts in self.addresses.values() for text in texts)

    def learn(self, peer: PeerId, addresses: Iterable[str]) -> None:
        """Take in where a peer listens now. Nothing changes where that is nowhere."""
        usable = dialable(addresses)
        if usable:
            self.addresses = {peer: usable} | {other: known for other, known in self.addresses.items() if other != peer}
        while len(self.addresses) > MOST_PEERS:
            self.addresses.popitem()

    def worked_with(self, holders: Mapping[PeerId, HeldState]) -> None:
        """Take in what peers hold now of which this node has seen work."""
        kept = {**holders, **{peer: held for peer, held in self.held.items() if peer not in holders}}
        of_stage, places = Counter[int](), list[tuple[int, PeerId]]()
        for peer, held in sorted(kept.items(), key=lambda item: -item[1].seen):
            places.append((of_stage[held.stage], peer))  # the last of each stage before a second of any
            of_stage[held.stage] += 1
        first = {peer for _, peer in sorted(places, key=lambda place: place[0])[:MOST_PEERS]}
        self.held = {peer: kept[peer] for _, peer in places if peer in first}

    def holders(self, run: str, stage: int) -> list[tuple[PeerId, HeldState]]:
        """The peers that held the state of a stage of the run when this node saw it at work, the furthest first."""
        found = [(peer, held) for peer, held in self.held.items() if held.stage == stage and held.clock > 0.0]
        return sorted(found, key=lambda item: -item[1].clock) if run == self.run else []

    def save(self, run: str) -> None:
        """Write the file; a failure is logged once until it works again, since the training can do without it."""
        if run != self.run:
            self.held = {}
        self.run = run
        content = {
            "run": run,
            "peers": {peer: list(texts) for peer, texts in self.addresses.items()},
            "held": {peer: held.model_dump() for peer, held in self.held.items()},
        }
        try:
            atomic.write_json(self._path, content)
            self._refused = False
        except OSError as error:
            if not self._refused:
                logger.warning("the peers seen cannot be kept in %s: %s", self._path, error.strerror or error)
            self._refused = True

    async def keep(
        self,
        book: Book,
        run: str,
        live: Callable[[], Iterable[PeerId]],
        holders: Callable[[], Mapping[PeerId, HeldState]] = dict,
        esteem: Callable[[PeerId], Esteem] = hearsay,
    ) -> NoReturn:
        """Learn where the live peers listen and what working peers hold, and keep the file up to date.

        Each address is learnt as soon as the peer is seen (a short run may be over before long) and again from time to
        time. If there are more peers than places, those of which this node knows most stay (`worth_keeping`).
        """
        look, asked = 0, set[PeerId]()
        while True:
            before = dict(self.addresses)
            if again := look % LOOKS_BETWEEN == 0:
                asked.clear()
            peers = [peer for peer in self.worth_keeping(live(), esteem) if peer not in asked]
            asked.update(peers)
            await some_at_a_time(ASKED_AT_ONCE, peers, partial(self._ask, book))
            known = self.held.keys()
            self.worked_with(holders())
            grown = self.held.keys() != known or (self.held and again)
            if self.addresses != before or self.run != run or grown:
                await ambient.elsewhere(self.save, run)
            await asyncio.sleep(LOOK_SECONDS)
            look += 1

    def worth_keeping(self, live: Iterable[PeerId], esteem: Callable[[PeerId], Esteem]) -> list[PeerId]:
        """As many of these peers as the file has places for, those first of which this node knows most.

        Among equals come the peers that the file has already, then chance decides. By their ids all nodes would keep
        the same few, and an attacker that sought ids for it would be all that they keep.
        """
        peers = list(live)
        if len(peers) <= MOST_PEERS:
            return peers
        self._rng.shuffle(peers)
        return sorted(peers, key=lambda peer: (-esteem(peer), peer not in self.addresses))[:MOST_PEERS]

    async def _ask(self, book: Book, peer: PeerId) -> None:
        self.learn(peer, await book.addresses_of(peer))

    def _load(self) -> None:
        try:
            parsed = _File.model_validate(json.loads(self._path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return
        except (OSError, ValueError, RecursionError) as error:
            logger.warning("%s is no list of peers (%s): passed over", self._path, str(error).splitlines()[0])
            return
        self.run = parsed.run
        self.held = {PeerId(peer): held for peer, held in parsed.held.items()}
        self.addresses = {PeerId(peer): usable for peer, texts in parsed.peers.items() if (usable := dialable(texts))}


def live_peers(view: DirectoryView, now: float, own: PeerId) -> list[PeerId]:
    """All peers that live at DHT time `now`, whatever their stage, without this one."""
    stages: Sequence[int] = range(len(view.stages))
    return sorted({PeerId(record.peer_id) for stage in stages for record in view.live(stage, now)} - {own})


def holders_in(view: DirectoryView, now: float, works: Callable[[PeerId], bool]) -> dict[PeerId, HeldState]:
    """What the live peers hold of which work has been seen, as their records say at DHT time `now`."""
    return {
        PeerId(record.peer_id): HeldState(stage=stage, clock=record.clock, seen=ambient.wall())
        for stage in range(len(view.stages))
        for record in view.live(stage, now)
        if record.outer_steps_taken and works(PeerId(record.peer_id))
    }


LOST_PAUSES = Doubling(5.0, 60.0)


@dataclass(slots=True)
class _Lost:
    next_try: float
    asked_for: int = 0


class LostPeers:
    """The missed peers, at most `FEW_PEERS`, of those that have answered this node; pure state, no clock of its own."""

    def __init__(self, own: PeerId, rng: random.Random, known: PeerStats) -> None:
        self._own = own
        self._rng = rng
        self._known = known
        self._lost = PeerTable[PeerId, _Lost](FEW_PEERS)

    @property
    def missed(self) -> tuple[PeerId, ...]:
        """Those that are asked for, the one lost longest ago first."""
        return tuple(self._lost)

    def seen(self, old: DirectoryView, new: DirectoryView, now: float) -> None:
        """Compare two views: a peer that is gone from the second without having said so is missed, one that is in it is
        not."""
        present = {peer for rows in new.stages for peer in rows} | {self._own}
        farewells = {peer for rows in old.stages for peer, row in rows.items() if row.record.state is PeerState.GONE}
        self._forget(present | farewells)
        for rows in old.stages:
            for peer in rows.keys() - present - farewells - self._lost.keys():
                if self._known.met(peer):
                    self._lost[peer] = _Lost(now + LOST_PAUSES.about(0, self._rng))

    def due(self, now: float) -> PeerId | None:
        """The peer to ask for now, or None; the next time for it is set."""
        for lost in self._lost.values():  # no pause is longer, unless the clock has gone back since
            lost.next_try = min(lost.next_try, now + 1.5 * LOST_PAUSES.longest)
        waiting = [peer for peer, lost in self._lost.items() if lost.next_try <= now]
        if not waiting:
            return None
        peer = self._rng.choice(waiting)
        lost = self._lost[peer]
        lost.next_try = now + LOST_PAUSES.about(lost.asked_for, self._rng)
        lost.asked_for += 1
        return peer

    def _forget(self, peers: Iterable[PeerId]) -> None:
        for peer in peers:
            self._lost.pop(peer, None)
