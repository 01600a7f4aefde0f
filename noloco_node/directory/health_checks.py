"""The health check: the peers that this node asks, and when, whether they are there and which stage they serve.

A record only introduces its peer. Each introduced peer is asked over its own link; in a small swarm all are within
seconds, in a large one a sample is. A silent peer is asked again ever more rarely. A crowd of records without nodes
behind them therefore costs a few calls a second and delays no peer that calls this node itself. Of two that answer one
asks: in a call each tells the other its record. A peer that works with this node is heard without being asked.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from noloco_node import PROTOCOL_VERSION, ambient
from noloco_node.aio import Pulse, some_at_a_time
from noloco_node.ambient import LOOK_SECONDS
from noloco_node.bootstrap.hello import ask_hello
from noloco_node.directory.live_estimate import is_there
from noloco_node.directory.records import REFRESH_SECONDS, Directory, PeerRecord, PeerState
from noloco_node.directory.records_call import FEW_TOLD, MOST_TOLD, tell
from noloco_node.identity.peer_id import PeerId
from noloco_node.peers.scorecard import ANSWER_SECONDS, PeerStats
from noloco_node.tallies import FEW_PEERS, Doubling
from noloco_node.transport.calls import ASKED_AT_ONCE, QUESTION_SECONDS
from noloco_node.transport.errors import Refused, TransportError
from noloco_node.transport.interface import Transport

LONGEST_QUIET = 0.6 * ANSWER_SECONDS
"""A peer that answers is asked again after about a record's life, but at most so many seconds, or its answer would no
longer count. It takes longer if the peer called or worked with this node meanwhile."""
ASK_FOR_RECORD = 0.3
"""A peer is asked for a newer record if less than this part of its record's life is left, since the DHT brings none. It
is also the part of a life between two such calls, and between calls to a peer that answers and has no record."""
PAUSES = Doubling(1.0, 300.0)
"""Seconds between two calls to a peer that has never answered; one that has is asked at least once in a record's life.
"""


class PeerKind(IntEnum):
    """What is known of a peer before it is asked."""

    SAID = 0
    """It has said that it serves what its record says, or none has been read of it."""
    CALLED = 1
    """It answers, or has called."""
    INTRODUCED = 2
    """Only a record tells of it."""


@dataclass(slots=True)
class _Asked:
    """What is to be asked of one peer."""

    record: PeerRecord | None
    next_try: float = 0.0
    in_vain: int = 0
    """Checks since it last answered."""
    silences: int = 0
    """Calls of whatever kind that it had not answered when it was last asked."""
    under_way: bool = False
    has_told: bool = False
    """The peer has told this node which peers it knows."""
    old: bool = False
    """Its record's life is nearly over."""
    asked_at: float = -math.inf
    """When it last answered a check."""
    quiet: float = 0.0
    """Seconds without a word of it after which it is asked again."""


class HealthChecks:
    """Asks peers whether they are there.

    `introduced` gives the records to go by. `on_change` is called when an answer, or its absence, has changed a stage's
    peers. `run` must be running in the owner's task group; `sweep` needs none. A node that serves no `stage`
    only says hello: it takes no part, and has nothing to tell.
    """

    def __init__(
        self,
        transport: Transport,
        directory: Directory,
        run_id: str,
        stage: Callable[[], int | None],
        record_seconds: float,
        introduced: Callable[[], Iterable[PeerRecord]],
        on_change: Callable[[], None],
        rng: random.Random,
        entrances: Iterable[PeerId] = (),
        calls_a_second: float = 4.0,
    ) -> None:
        self._transport = transport
        self._calls_a_second = calls_a_second
        self._entrances = {peer: None for peer in entrances if peer != transport.peer_id}
        """The initial peers, in order: they, and the peers they know, are asked before those that only a record
        introduces."""
        self._named: dict[PeerId, None] = {}
        """The peers that others named when they answered in a sweep, those named by the entrances first."""
        self._directory = directory
        self._run = run_id
        self._stage = stage
        self._life = record_seconds
        self._introduced = introduced
        self._on_change = on_change
        self._rng = rng
        self._asked: dict[PeerId, _Asked] = {}
        self._looked = Pulse()
        self._running = False
        self._found = False
        """Whether anybody that is introduced was there in the last sweep."""
        self._allowance = float(ASKED_AT_ONCE)
        self._allowed_at = 0.0
        self._earliest = -math.inf
        """Before this time nobody is due, unless a call came to nothing since `_silences` of them had."""
        self._silences = 0

    @property
    def _known(self) -> PeerStats:
        return self._transport.peer_stats

    def look(self) -> None:
        """The directory was read: new peers are asked, peers that are gone are forgotten."""
        records = {PeerId(record.peer_id): record for record in self._introduced()}
        workers = [peer for peer in self._known.known_workers() if peer not in records]
        before = self._asked
        kept = () if self._running else [peer for peer in self._entrances if peer in before]
        self._asked = {peer: before.get(peer) or _Asked(None) for peer in (*records, *workers, *kept)}
        now, self._earliest = asyncio.get_running_loop().time(), -math.inf
        stages, dht_time = self._directory.view.stages, self._directory.now()
        for peer, record in records.items():
            asked = self._asked[peer]
            moved = asked.record is not None and asked.record.stage != record.stage
            if moved and self._known.answers(peer):
                asked.next_try = now
            row = stages[record.stage].get(peer) if record.stage < len(stages) else None
            asked.record, asked.old = record, row is not None and row.expires - dht_time < ASK_FOR_RECORD * self._life
            if asked.old and not asked.in_vain:  # a silent peer has no newer one to give
                asked.next_try = min(asked.next_try, asked.asked_at + ASK_FOR_RECORD * self._life)
        self._looked.fire()

    async def run(self) -> None:
        """Goes on until it is cancelled."""
        loop = asyncio.get_running_loop()
        self._running = True
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    now = loop.time()
                    for peer in self._due(now):
                        asked = self._asked[peer]
                        asked.under_way = True
                        group.create_task(self._ask(peer, asked))
                    await self._looked.wait(self._until_next(now))
        finally:
            self._running = False

    async def sweep(self, seconds: float) -> None:
        """Ask every introduced peer that is not known to serve its stage yet, `ASKED_AT_ONCE` at a time.

        It returns when each has answered or fallen silent, or the time is up. While `run` runs, that asks, and this
        returns at once.

        The initial peers and those that have answered this node come first, then the peers that they name. All others
        share `REFRESH_SECONDS` if somebody is there by then: a crowd of ghosts must not hold up a start. Of
        these, peers that were silent before are asked only if nobody is there.
        """
        if self._running:
            return
        self.look()
        loop = asyncio.get_running_loop()
        began = loop.time()
        acquainted = self._acquainted()
        for peer in acquainted:
            self._asked.setdefault(peer, _Asked(None))
        self._found = any(asked.record and self._confirmed(peer) for peer, asked in self._asked.items())
        entrances = [peer for peer in acquainted if peer in self._entrances]
        await self._ask_in_turn(entrances, lambda: began + seconds)
        await self._ask_in_turn([peer for peer in acquainted if peer not in self._entrances], lambda: began + seconds)
        named = [peer for peer in self._named if self._unsure(peer)]
        await self._ask_in_turn(named, lambda: began + seconds)
        asked_now = {*acquainted, *named}
        others = [peer for peer in self._asked if peer not in asked_now and self._unsure(peer)]
        silent = [peer for peer in others if self._known.of(peer).silences and not self._known.met(peer)]
        fresh = [peer for peer in others if not self._known.of(peer).silences or self._known.met(peer)]
        since = loop.time()

        def until() -> float:
            return min(began + seconds, since + REFRESH_SECONDS) if self._found else began + seconds

        await self._ask_in_turn(self._drawn(fresh, len(fresh)), until)
        if not self._found:
            await self._ask_in_turn(self._drawn(silent, len(silent)), until)

    def _acquainted(self) -> list[PeerId]:
        """Initial peers that have not told yet which peers they know, and others that answer and are not known to be
        there."""
        entrances = [peer for peer in self._entrances if (asked := self._asked.get(peer)) is None or not asked.has_told]
        answering = [peer for peer in self._known.answering() if peer not in self._entrances]
        seen = [peer for peer in answering if self._unsure(peer) or not self._known.takes_part(peer)]
        return [*entrances, *seen[-FEW_PEERS:]]

    def _unsure(self, peer: PeerId) -> bool:
        asked = self._asked.get(peer)
        return asked is not None and not asked.under_way and not self._confirmed(peer)

    async def _ask_in_turn(self, peers: Sequence[PeerId], until: Callable[[], float]) -> None:
        """All of them, `ASKED_AT_ONCE` at a time; nobody any more once `until()` is over."""
        loop = asyncio.get_running_loop()

        async def ask(peer: PeerId) -> None:
            seconds = until() - loop.time()
            if seconds > 0.0 and (asked := self._asked.get(peer)) is not None:
                await self._ask(peer, asked, min(QUESTION_SECONDS, max(LOOK_SECONDS, seconds)))
                self._found = self._found or (asked.record is not None and is_there(self._known, asked.record))

        await some_at_a_time(ASKED_AT_ONCE, peers, ask)

    def _due(self, now: float) -> list[PeerId]:
        """The peers to ask now, within the allowance.

        No peer is considered before the earliest one is due, or a call has come to nothing.
        """
        self._allowance = min(float(ASKED_AT_ONCE), self._allowance + (now - self._allowed_at) * self._calls_a_second)
        self._allowed_at = now
        if now < self._earliest and self._silences == self._known.silences_in_all:
            return []
        under_way = sum(asked.under_way for asked in self._asked.values())
        most = min(int(self._allowance), ASKED_AT_ONCE - under_way)
        if most <= 0:
            return []
        self._silences, self._earliest = self._known.silences_in_all, math.inf
        due: list[PeerId] = []
        for peer, asked in self._asked.items():
            if asked.under_way:
                continue
            if self._is_due(peer, asked, now):
                due.append(peer)
            else:
                self._earliest = min(self._earliest, asked.next_try)
        drawn = self._drawn(due, most)
        if len(drawn) < len(due):
            self._earliest = now
        self._allowance -= len(drawn)
        return drawn

    def _drawn(self, due: Sequence[PeerId], most: int) -> list[PeerId]:
        """Draw peers of each kind (`PeerKind`) with the same chance: a crowd of one kind keeps no other from being
        asked."""
        crowds: dict[PeerKind, list[PeerId]] = {}
        for peer in self._rng.sample(due, len(due)):
            crowds.setdefault(self._kind(peer), []).append(peer)
        drawn: list[PeerId] = []
        while crowds and len(drawn) < most:
            kind = self._rng.choice(list(crowds))
            drawn.append(crowds[kind].pop())
            if not crowds[kind]:
                del crowds[kind]
        return drawn

    def _is_due(self, peer: PeerId, asked: _Asked, now: float) -> bool:
        """Its time has come and it was not heard meanwhile, or it has just let another call go unanswered: is it still
        there?"""
        known = self._known.of(peer)
        if known.silences > asked.silences:
            return True
        asked.silences = known.silences  # fewer where it was heard since: the next one counts again
        if asked.next_try > now:
            return False
        left = asked.quiet - (ambient.monotonic() - known.answered_at)
        told = asked.has_told and asked.record is not None and not asked.old
        if left <= 0.0 or not told or not self._confirmed(peer):
            return True
        asked.next_try = now + left
        return False

    def _kind(self, peer: PeerId) -> PeerKind:
        record = self._asked[peer].record
        if record is None or self._known.of(peer).stage == record.stage:
            return PeerKind.SAID
        return PeerKind.CALLED if self._known.answers(peer) else PeerKind.INTRODUCED

    def _confirmed(self, peer: PeerId) -> bool:
        record = self._asked[peer].record
        return record is None or is_there(self._known, record)

    def _until_next(self, now: float) -> float | None:
        if self._earliest == math.inf:
            return None
        return min(LOOK_SECONDS, max(1.0 / self._calls_a_second, self._earliest - now))

    async def _ask(self, peer: PeerId, asked: _Asked, timeout: float = QUESTION_SECONDS) -> None:
        if self._asked.get(peer) is not asked:  # the directory was read since: its record's life is over
            return
        before = self._known.answers(peer), self._known.of(peer).stage
        asked.under_way = True
        try:
            answered = await self._call(peer, asked.record, asked, timeout)
        finally:
            asked.under_way = False
        if answered:
            again = self._life if asked.record is not None else ASK_FOR_RECORD * self._life
            asked.in_vain, wait = 0, min(LONGEST_QUIET, again)
        else:
            longest = self._life if self._known.met(peer) else PAUSES.longest
            wait = min(longest, PAUSES.after(asked.in_vain))
            asked.in_vain += 1
        self._wait(peer, asked, wait * self._rng.uniform(0.75, 1.25), answered=answered)
        if before != (self._known.answers(peer), self._known.of(peer).stage):
            self._on_change()
        self._looked.fire()

    def _wait(self, peer: PeerId, asked: _Asked, seconds: float, *, answered: bool) -> None:
        now = asyncio.get_running_loop().time()
        asked.silences, asked.next_try = self._known.of(peer).silences, now + seconds
        self._earliest = min(self._earliest, asked.next_try)
        if answered:
            asked.asked_at, asked.quiet = now, seconds

    async def _call(self, peer: PeerId, record: PeerRecord | None, asked: _Asked, timeout: float) -> bool:
        """A node that is still on its way to its stage has no records to tell yet, and only says where it goes."""
        own = self._stage()
        if own is not None and (record is None or record.state is not PeerState.JOINING):
            few = not asked.old and self._known.has_taken_part(peer)  # of an old record the directory brings no newer
            most = FEW_TOLD if few else MOST_TOLD
            told = await tell(self._transport, peer, self._run, self._directory, stage=own, most=most, timeout=timeout)
            asked.has_told |= told.stage is not None
            if not self._running:
                self._named.update(dict.fromkeys(told.named[: FEW_PEERS - len(self._named)]))
            return told.answered
        try:
            hello = await ask_hello(self._transport, peer, timeout)
        except Refused:
            return True
        except TransportError as error:
            self._transport.judge(peer, error)
            return False
        ours = hello.run == self._run and hello.protocol == PROTOCOL_VERSION
        self._known.said(peer, hello.stage if ours else None)
        return True
