"""Walks through the DHT: nodes near some keys are asked for their records and for nodes that are nearer still.

All nodes near are asked at once and each answer counts as it comes, so one that stalls holds nobody up. Nodes that it
introduced are asked last and least.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from noloco_node import ambient
from noloco_node.aio import cancel_and_wait
from noloco_node.directory.dht_node import BUCKET_SIZE, REPLICAS, DhtNode, Nearest, node_id_of
from noloco_node.pauses import NO_REST, Doubling, Rest
from noloco_node.peer_table import PeerTable

WALK_SECONDS = 5.0
STRANGERS_SECONDS = 2.0
"""A walk waits so many seconds for nodes that did not answer when they were asked last, or never were."""
PATIENCE = 0.1
"""A walk waits at most so many record lives for nodes that stall, and half as long before it asks a second holder. A
walk that nobody answers takes no more than `WALK_PATIENCE`, or views would empty if records are short-lived."""
WALK_PATIENCE = 0.25
MOST_INTRODUCED = 40
"""One walk asks at most so many nodes on the word of others."""
MOST_BY_ONE = 8
"""One walk asks at most so many nodes on the word of one."""
PAUSES = Doubling(5.0, 300.0)
GLANCED = 2
"""So many nodes are asked at once for one bucket."""
SECOND_SECONDS = 0.5
"""A look at the stages waits so many seconds for the first of two holders before it asks the second beside it."""
FEW_NEIGHBOURS = 8
"""A node names so many neighbours of each key in its answer if the nearest to it are known."""
MOST_GLANCED = 12
ROUNDING = 1e-3
"""A clock may be off by so many seconds when a wait is over."""
HOLDERS_SECONDS = 60.0
"""After so many seconds the nodes nearest to a bucket's key are sought anew. The former ones are gone in the end, and
others have come between."""
RELIABLE_ASKED = 4
"""So many nodes that answered when they were last asked are drawn for each walk and asked whatever their places. A node
that later takes the places near a key then does not take the others out of sight."""


@dataclass(frozen=True, slots=True)
class _Near:
    """The nodes that answered in the last walk to a key, the nearest first, and the time of it."""

    nodes: tuple[Any, ...]
    at: float


@dataclass(slots=True)
class _Walk:
    """One walk: the candidates of each key by node id, and the nodes that have been asked and have answered."""

    keys: tuple[Any, ...]
    candidates: dict[Any, dict[Any, Any]]
    asked: set[Any] = field(default_factory=set[Any])
    answered: set[Any] = field(default_factory=set[Any])
    introduced: int = 0
    over: bool = False
    neighbours: int = BUCKET_SIZE


class _Seeking:
    """The nodes that are asked in one search for the nearest to a key, and those of them that are late."""

    def __init__(self, soon: float) -> None:
        self.soon = soon
        """Seconds after which one is late: twice what others took, if that is more."""
        self._began: dict[asyncio.Task[dict[Any, Nearest] | None], tuple[Any, float]] = {}
        self.late: set[Any] = set()

    @property
    def under_way(self) -> Collection[asyncio.Task[dict[Any, Nearest] | None]]:
        """All that have not answered, those that are late too."""
        return self._began.keys()

    @property
    def waited_for(self) -> list[float]:
        """When each was asked that is not late."""
        return [began for peer, began in self._began.values() if peer not in self.late]

    def begin(self, peer: Any, asking: Coroutine[Any, Any, dict[Any, Nearest] | None], now: float) -> None:
        """One more is asked."""
        self._began[asyncio.create_task(asking, name="ask for nodes near a bucket's key")] = peer, now

    async def next_answers(
        self, seconds: float, clock: Callable[[], float]
    ) -> list[tuple[Any, dict[Any, Nearest] | None]]:
        """What has come once one has answered, or none where one has become late, or after so long."""
        soonest = min(self.waited_for) + self.soon - clock()
        patience = max(ROUNDING, min(seconds, soonest))
        done, _ = await asyncio.wait(self._began, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
        now, answers = clock(), list[tuple[Any, dict[Any, Nearest] | None]]()
        for task in [task for task in self._began if task in done]:
            peer, began = self._began.pop(task)
            self.late.discard(peer)
            answers.append((peer, task.result()))
            if task.result() is not None:
                self.soon = max(self.soon, 2.0 * (now - began))
        self.late |= {peer for peer, began in self._began.values() if began + self.soon - now < ROUNDING}
        return answers


class _Candidates:
    """The nodes that may be nearest to a key, in one search, and the peers that named them.

    Names cost nothing. The other nodes that only the namer of a silent node has named are therefore asked when nobody
    else is left.
    """

    def __init__(self, key: Any, known: dict[Any, Any], silent: Collection[Any]) -> None:
        self._key = key
        self._peers = known
        self._named_by: dict[Any, set[Any]] = {}
        """None for those that this node knew itself."""
        self._doubted, self._gone = set[Any](), set[Any]()
        self._asked, self._spent, self._on_trust = set[Any](silent), len(silent), set[Any]()
        self.answered: dict[Any, Any] = {}

    def due(self, late: Collection[Any], most: int) -> list[Any]:
        """The nodes to ask next, so many at most."""
        there = {node_id: peer for node_id, peer in self._peers.items() if peer not in late}
        trusted = [node_id for node_id in there if not self._is_doubtful(node_id)]
        for some in (trusted, there):
            nearest = sorted(some, key=self._key.xor_distance)[:REPLICAS]
            due = [there[node_id] for node_id in nearest if there[node_id] not in self._asked]
            if due:
                break
        return due[: max(0, min(most, MOST_GLANCED - self._spent))]

    def is_asked(self, peer: Any) -> None:
        """The peer is being asked; the first one that somebody names is asked on trust."""
        node_id = node_id_of(peer)
        self._asked.add(peer)
        self._spent += 1
        if node_id in self._named_by and not self._is_doubtful(node_id):
            self._on_trust.add(node_id)

    def is_silent(self, peer: Any) -> None:
        """The peer has not answered, or not yet. One that was asked on trust in vain takes nobody's turn."""
        node_id = node_id_of(peer)
        self._doubted |= self._named_by.get(node_id, set())
        if node_id in self._on_trust:
            self._on_trust.discard(node_id)
            self._spent -= 1

    def has_answered(self, peer: Any, named: Iterable[tuple[Any, Any]]) -> None:
        """It is there, and has named others."""
        for node_id, other in named:
            if node_id in self._gone:  # else another that names it gives it a place among the nearest again
                continue
            if node_id not in self._peers or node_id in self._named_by:
                self._named_by.setdefault(node_id, set()).add(peer)
            self._peers[node_id] = other
        self._peers[node_id_of(peer)] = self.answered[node_id_of(peer)] = peer

    def drop(self, peer: Any) -> None:
        """It is not there."""
        self.is_silent(peer)
        self._peers.pop(node_id_of(peer), None)
        self._gone.add(node_id_of(peer))

    def _is_doubtful(self, node_id: Any) -> bool:
        return node_id in self._named_by and self._named_by[node_id] <= self._doubted


class Walker:
    """Walks of one node. What is found goes through the node's intake."""

    def __init__(self, node: DhtNode, rng: random.Random, clock: Callable[[], float] = ambient.monotonic) -> None:
        self._node = node
        self._rng = rng
        self._clock = clock
        self._asking: dict[Any, asyncio.Task[None]] = {}
        self._pauses = PeerTable[Any, Rest]()
        self._reliable = PeerTable[Any, None]()
        self._near = PeerTable[Any, _Near]()
        """By key; none where nobody answered."""
        self.life = math.inf
        """Seconds that records live, as far as this node knows."""

    @property
    def patience(self) -> float:
        """Seconds to wait for a node that stalls."""
        return min(STRANGERS_SECONDS, PATIENCE * self.life)

    async def walk(self, keys: Sequence[Any], also: Sequence[Any] = ()) -> None:
        """Ask the nodes near the keys, and the peers in `also` whatever their places, until nobody nearer turns up."""
        walk = _Walk(tuple(keys), {key: {node_id: peer for node_id, peer in self._node.nearest(key)} for key in keys})
        if all(map(self.near, keys)):
            walk.neighbours = FEW_NEIGHBOURS
        first: dict[Any, list[Any]] = {}
        for key, nodes in walk.candidates.items():
            for peer in nodes.values():
                first.setdefault(peer, []).append(key)
        drawn = self._rng.sample(list(self._reliable), min(RELIABLE_ASKED, len(self._reliable)))
        first |= {peer: list(keys) for peer in (*drawn, *also)}
        for peer, wanted in first.items():
            self._ask(walk, peer, wanted)
        started = self._clock()
        longest = min(WALK_SECONDS, WALK_PATIENCE * self.life)
        try:
            while waiting := self._waited_for(walk, self._clock() - started):
                left = started + longest - self._clock()
                if left <= 0:
                    break
                patience = min(left, max(0.01, started + self.patience - self._clock()) if walk.answered else left)
                await asyncio.wait(waiting, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
        finally:
            walk.over = True
        for key in keys:
            answered = [node_id for node_id, peer in walk.candidates[key].items() if peer in walk.answered]
            answered.sort(key=key.xor_distance)
            self._found(key, [walk.candidates[key][node_id] for node_id in answered])

    async def look(self, keys: Sequence[Any]) -> bool:
        """Ask two of the nodes nearest to each key in its last walk, the second for what the first did not have.

        Returns False if not every key has two that answer.
        """
        pairs: list[tuple[Any, list[Any]]] = []
        for key in keys:
            near = self.near(key)
            if len(near) < GLANCED:
                return False
            pairs.append((key, self._rng.sample(near, GLANCED)))
        walk, began = _Walk(tuple(keys), {key: {} for key in keys}, over=True, neighbours=0), self._clock()
        first, second = (_by_peer((key, peers[turn]) for key, peers in pairs) for turn in range(GLANCED))
        for peer, asked in first.items():
            self._ask(walk, peer, asked)
        await self._wait_for(walk.asked, min(SECOND_SECONDS, self.patience / 2.0))
        while second and (left := began + self.patience - self._clock()) > 0.0:
            for peer in [peer for peer in second if peer not in self._asking]:
                self._ask(walk, peer, second.pop(peer))
            await self._wait_for(second, left, asyncio.FIRST_COMPLETED)  # each is asked one thing at a time
        await self._wait_for(walk.asked, max(0.0, began + self.patience - self._clock()))
        return all(node_id_of(peer) in walk.candidates[key] for key, peers in pairs for peer in peers)

    async def _wait_for(self, peers: Iterable[Any], seconds: float, until: str = asyncio.ALL_COMPLETED) -> None:
        """Wait for the answers of those peers that are being asked."""
        under_way = [self._asking[peer] for peer in peers if peer in self._asking]
        if under_way:
            await asyncio.wait(under_way, timeout=seconds, return_when=until)

    def near(self, key: Any) -> tuple[Any, ...]:
        """The nearest to a key that answered in its last walk."""
        return self._near[key].nodes if key in self._near else ()

    def holders(self, key: Any) -> tuple[Any, ...]:
        """The nodes nearest to a key, unless they were found too long ago."""
        recent = key in self._near and self._clock() - self._near[key].at < HOLDERS_SECONDS
        return self.near(key) if recent else ()

    async def glance(self, key: Any, only: Collection[str] | None = None) -> bool:
        """Ask two nodes that hold a bucket's records, the second for what the first did not have; True if one answered.

        If none is known it finds those nearest to its key, a few at a time, and asks them. In a large stage with many
        buckets a node cannot ask all nodes near each. `only` names the signers whose records are wanted, None means
        all.
        """
        known = list(self.holders(key))
        self._rng.shuffle(known)
        answered = False
        try:
            async with asyncio.timeout(WALK_SECONDS):
                for peer in known[:GLANCED]:
                    if await self._node.find(peer, [key], 0, only) is not None:
                        answered = True
                    else:
                        self.silent(peer)
                return answered or await self._seek_and_ask(key, known[:GLANCED], only)
        except TimeoutError:  # a node that stalls holds up this bucket alone
            return answered

    async def _seek_and_ask(self, key: Any, silent: Sequence[Any], only: Collection[str] | None) -> bool:
        """Find the nodes nearest to a key, ask one for its records, and soon all others for what it lacked; True if one
        answered. A node that stalls beside others is not waited for."""
        soon = await self.seek(key, silent)
        near, asked = self.near(key), list[asyncio.Task[Any]]()
        try:
            for some, seconds in ((near[:1], soon), (near[1:], max(soon, self.patience))):
                found = (self._node.find(peer, [key], 0, only) for peer in some)
                asked += [asyncio.create_task(each, name="ask a holder of a bucket") for each in found]
                if asked:
                    await asyncio.wait(asked, timeout=seconds)
            if not any(task.done() and task.result() is not None for task in asked):
                await asyncio.gather(*asked)
            answered = [task.done() and task.result() is not None for task in asked]
            for peer, has in zip(near, answered, strict=True):
                if not has:
                    self.silent(peer)
            return any(answered)
        finally:
            await cancel_and_wait(asked)

    async def seek(self, key: Any, silent: Sequence[Any] = ()) -> float:
        """Find the nodes nearest to a key now, a few at a time, without those that were `silent`; returns the seconds
        in which answers come.

        Nobody is asked for records: two holders asked at once would send theirs twice. A node that stalls keeps no
        other from being asked; it counts as near again once it answers.
        """
        candidates = _Candidates(key, dict(self._node.nearest(key)), silent)
        seeking = _Seeking(min(SECOND_SECONDS, self.patience / 2.0))
        ends = self._clock() + WALK_SECONDS
        try:
            while (left := ends - self._clock()) > 0.0:
                for peer in candidates.due(seeking.late, GLANCED - len(seeking.waited_for)):
                    candidates.is_asked(peer)
                    seeking.begin(peer, self._node.find(peer, [key], MOST_BY_ONE, only=()), self._clock())
                if not seeking.waited_for:
                    break
                late = set(seeking.late)
                for peer, answer in await seeking.next_answers(left, self._clock):
                    if answer is None:
                        candidates.drop(peer)
                    else:
                        candidates.has_answered(peer, answer.get(key, ())[:MOST_BY_ONE])
                for peer in seeking.late - late:
                    candidates.is_silent(peer)
        finally:
            await cancel_and_wait(seeking.under_way)
        answered = candidates.answered
        self._found(key, [answered[node_id] for node_id in sorted(answered, key=key.xor_distance)])
        return seeking.soon

    def _found(self, key: Any, nearest: Sequence[Any]) -> None:
        self._near.pop(key, None)
        if nearest:
            self._near[key] = _Near(tuple(nearest[:REPLICAS]), self._clock())

    def silent(self, peer: Any) -> None:
        """This node did not answer: it is nobody's holder until it is found again."""
        self._reliable.pop(peer, None)
        for key, near in [(key, near) for key, near in self._near.items() if peer in near.nodes]:
            self._near[key] = _Near(tuple(other for other in near.nodes if other != peer), near.at)

    def forget(self) -> None:
        """Ask everyone again: that nobody answered was this node's own doing."""
        self._pauses.clear()
        self._near.clear()

    async def close(self) -> None:
        """End what is under way."""
        await cancel_and_wait(self._asking.values())

    def _waited_for(self, walk: _Walk, elapsed: float) -> list[asyncio.Task[None]]:
        patient = elapsed < self.patience or not walk.answered
        return [
            task
            for peer, task in self._asking.items()
            if peer in walk.asked and (patient or peer in self._reliable) and not task.done()
        ]

    def _ask(self, walk: _Walk, peer: Any, keys: list[Any]) -> None:
        if peer in self._asking or self._pauses.get(peer, NO_REST).holds(self._clock()):
            return
        walk.asked.add(peer)
        self._asking[peer] = asyncio.create_task(self._asked(walk, peer, keys), name="ask a node of the DHT")

    async def _asked(self, walk: _Walk, peer: Any, keys: list[Any]) -> None:
        try:
            found = await self._node.find(peer, keys, walk.neighbours)
        finally:
            self._asking.pop(peer, None)
        if found is None:
            self._reliable.pop(peer, None)
            self._pause(peer)
            return
        self._pauses.pop(peer, None)
        self._reliable[peer] = None
        walk.answered.add(peer)
        node_id = node_id_of(peer)
        for key in keys:
            walk.candidates[key][node_id] = peer
        if not walk.over:
            self._go_on(walk, found)

    def _go_on(self, walk: _Walk, found: dict[Any, Nearest]) -> None:
        """Ask those that an answer introduced and that are among the nearest known to a key."""
        nearer: dict[Any, list[Any]] = {}
        for key, introduced in found.items():
            known = walk.candidates[key]
            new = [(node_id, peer) for node_id, peer in introduced if node_id not in known and peer not in walk.asked]
            if not new:
                continue
            distances = sorted(key.xor_distance(node_id) for node_id in known)
            furthest = distances[BUCKET_SIZE - 1] if len(distances) >= BUCKET_SIZE else None
            for node_id, peer in new:
                if furthest is None or key.xor_distance(node_id) < furthest:
                    nearer.setdefault(peer, []).append(key)
        for peer, keys in list(nearer.items())[:MOST_BY_ONE]:
            if walk.introduced >= MOST_INTRODUCED:
                break
            walk.introduced += 1
            for key in keys:
                walk.candidates[key][node_id_of(peer)] = peer
            self._ask(walk, peer, keys)

    def _pause(self, peer: Any) -> None:
        self._pauses[peer] = self._pauses.get(peer, NO_REST).again(PAUSES, self._clock())


def _by_peer(wanted: Iterable[tuple[Any, Any]]) -> dict[Any, list[Any]]:
    """Keys that each peer is to be asked for."""
    keys: dict[Any, list[Any]] = {}
    for key, peer in wanted:
        keys.setdefault(peer, []).append(key)
    return keys
