"""Walks through the DHT: nodes near some keys are asked for their records and for nodes that are nearer still.

All nodes near are asked at once and each answer counts as it comes, so one that stalls holds nobody up. Nodes that it
introduced are asked last and least.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from noloco_node import ambient
from noloco_node.aio import cancel_and_wait
from noloco_node.directory.dht_node import BUCKET_SIZE, REPLICAS, DhtNode, Nearest, node_id_of
from noloco_node.directory.records import REFRESH_SECONDS
from noloco_node.peers.scorecard import ANSWER_SECONDS
from noloco_node.tallies import NO_REST, Doubling, PeerTable, Rest

PATIENCE = 0.1
"""A walk waits at most so many record lives for nodes that stall, half as long before it asks a second holder, and
twice as long if nobody answers. Otherwise views would empty if records are short-lived."""
MOST_INTRODUCED = 2 * BUCKET_SIZE
"""One walk asks at most so many nodes on the word of others."""
MOST_BY_ONE = MOST_INTRODUCED // 5
"""One walk asks at most so many nodes on the word of one."""
PAUSES = Doubling(5.0, 300.0)
GLANCED = 2
"""The number of nodes that are asked for one key between two walks."""


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
    tasks: dict[asyncio.Task[None], Any] = field(default_factory=dict[asyncio.Task[None], Any])
    """By the peer that is asked."""
    introduced: int = 0
    over: bool = False
    neighbours: int = BUCKET_SIZE
    records: bool = True
    """Whether records are wanted, and not only nodes."""


class Walker:
    """Walks of one node. What is found goes through the node's intake."""

    def __init__(self, node: DhtNode, rng: random.Random, clock: Callable[[], float] = ambient.monotonic) -> None:
        self._node = node
        self._rng = rng
        self._clock = clock
        self._asking = set[asyncio.Task[None]]()
        self._pauses = PeerTable[Any, Rest]()
        self._reliable = PeerTable[Any, None]()
        self._near = PeerTable[Any, _Near]()
        """By key; none where nobody answered."""
        self.life = math.inf
        """Seconds that records live, as far as this node knows."""

    @property
    def patience(self) -> float:
        """Seconds to wait for a node that stalls: one that did not answer when it was asked last, or never was."""
        return min(REFRESH_SECONDS, PATIENCE * self.life)

    async def walk(self, keys: Sequence[Any], also: Sequence[Any] = (), *, records: bool = True) -> None:
        """Ask the nodes near the keys, and the peers in `also` whatever their places, until nobody nearer turns up.

        Without `records` they are asked for nodes alone.
        """
        walk = _Walk(tuple(keys), {key: {node_id: peer for node_id, peer in self._node.nearest(key)} for key in keys})
        walk.records = records
        if all(map(self.near, keys)):
            walk.neighbours = REPLICAS
        first: dict[Any, list[Any]] = {}
        for key, nodes in walk.candidates.items():
            for peer in nodes.values():
                first.setdefault(peer, []).append(key)
        first |= {peer: list(keys) for peer in also}
        for peer, wanted in first.items():
            self._ask(walk, peer, wanted)
        started = self._clock()
        try:
            while waiting := self._waited_for(walk, self._clock() - started):
                left = started + 2.0 * self.patience - self._clock()
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

    async def _ask_near(self, key: Any, most: int) -> _Walk:
        """Ask one of the nodes nearest to a key, and soon up to `most` in all for what that did not have."""
        walk, began, near = _Walk((key,), {key: {}}, over=True, neighbours=0), self._clock(), self.near(key)
        drawn = self._rng.sample(near, min(most, len(near)))
        for until, turn in ((self.patience / 2.0, slice(0, 1)), (self.patience, slice(1, None))):
            for peer in drawn[turn]:
                self._ask(walk, peer, [key])
            if walk.tasks:
                await asyncio.wait(walk.tasks, timeout=max(0.0, began + until - self._clock()))
        return walk

    def near(self, key: Any) -> tuple[Any, ...]:
        """The nearest to a key that answered in its last walk, unless others may have come between since."""
        near = self._near.get(key)
        return near.nodes if near is not None and self._clock() - near.at < ANSWER_SECONDS else ()

    async def glance(self, key: Any) -> bool:
        """Ask two nodes that hold a key's records, the second for what the first did not have; True if one answered.

        If none is known those nearest to its key are found, and all of them asked. A node that stalls beside others is
        not waited for.
        """
        known = bool(self.near(key))
        if not known:
            await self.walk([key], records=False)  # holders asked at once would send theirs twice
        walk = await self._ask_near(key, GLANCED if known else REPLICAS)
        for peer in walk.asked - walk.answered:
            self.silent(peer)
        return bool(walk.answered)

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
        await cancel_and_wait(self._asking)

    def _waited_for(self, walk: _Walk, elapsed: float) -> list[asyncio.Task[None]]:
        patient = elapsed < self.patience or not walk.answered
        return [t for t, peer in walk.tasks.items() if not t.done() and (patient or peer in self._reliable)]

    def _ask(self, walk: _Walk, peer: Any, keys: list[Any]) -> None:
        if self._pauses.get(peer, NO_REST).holds(self._clock()):
            return
        walk.asked.add(peer)
        task = asyncio.create_task(self._asked(walk, peer, keys), name="ask a node of the DHT")
        walk.tasks[task] = peer
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def _asked(self, walk: _Walk, peer: Any, keys: list[Any]) -> None:
        found = await self._node.find(peer, keys, walk.neighbours, records=walk.records)
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
