"""Microbatches of a crowd on their way there and back, in parcels.

The code of the node decides. It chooses the next peer (`LoadBalancer`), the time of the draw (`InFlight`), the places
(`MicrobatchLimiter`), and what a device does first (`CallOrder`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from noloco_node.identity.peer_id import PeerId
from noloco_node.peers.latency import RequestOutcome
from noloco_node.pipeline.admission import ASKS_TO_WAIT, MicrobatchLimiter
from noloco_node.pipeline.in_flight import InFlight
from noloco_node.pipeline.microbatch import BUSY_BACKOFF_SECONDS, ROUNDS_TO_DESPAIR
from noloco_node.pipeline.routing import LoadBalancer
from noloco_node.simulator.crowd_nodes import PROGRESS_SECONDS, Nodes, Pairs
from noloco_node.simulator.crowd_records import CrowdDirectory
from noloco_node.training.compute_thread import OWN, CallOrder, DeviceLoad, Priority, QueueTurn
from noloco_node.transport.errors import Refused
from noloco_node.transport.interface import Release

BACKWARDS = 2.0
"""A backward takes so many times as long as a forward."""
VIEW_SECONDS = 60.0
"""A book is told the seen peers anew after so many seconds; at once if the one that it chooses has gone."""


class Passage:
    """One parcel at one node."""

    __slots__ = (
        "asks",
        "began",
        "busy_since",
        "excluded",
        "life",
        "node",
        "parent",
        "peer",
        "put_at",
        "release",
        "rounds",
        "since",
        "waited",
    )

    def __init__(self, node: int, life: int, parent: Passage | None, since: float) -> None:
        self.node = node
        self.life = life
        """The stay of the node, among its stays at a stage, in which it has the parcel."""
        self.parent = parent
        self.since = since
        """When it was drawn, or came."""
        self.peer = -1
        """The peer that has it next."""
        self.began = 0.0
        self.excluded: tuple[PeerId, ...] = ()
        self.rounds = 0
        self.asks = 0
        """That came to nothing."""
        self.busy_since = math.inf
        """When the first one was asked that was busy, as microbatches have it."""
        self.release: Release | None = None
        self.put_at = since
        """When it was last given to the device."""
        self.waited = 0.0
        """Seconds for which it waited for devices, this one's and those further on; its draw is not counted."""


class CrowdPipeline:
    """All devices, books and parcels. `trained` is told whenever a node has a parcel's gradient; `missing` says how
    many a node lacks for its next inner step.
    """

    def __init__(
        self,
        nodes: Nodes,
        directory: CrowdDirectory,
        trained: Callable[[int], None],
        missing: Callable[[int], float],
    ) -> None:
        self.nodes = nodes
        self.directory = directory
        self.agenda = nodes.agenda
        self._trained = trained
        self._missing = missing
        self._settings = nodes.settings
        self._parcel = float(nodes.settings.parcel)
        self._unit_seconds = self._parcel * nodes.settings.devices.forward_seconds
        self._last = nodes.settings.work.stages - 1
        self._octets = float(nodes.settings.work.microbatch_bytes)
        self._books: list[LoadBalancer | None] = []
        self._book_told: list[float] = []
        self._places: list[MicrobatchLimiter | None] = []
        self._order: list[CallOrder[Passage]] = []
        self._in_flight: list[InFlight | None] = []
        """The limits of the nodes that draw."""
        self.under_way: list[int] = []
        """Parcels that each origin has drawn and not yet trained."""
        self._working: list[bool] = []
        self._life: list[int] = []
        self._held: list[dict[Passage, None]] = []
        self._turn: list[QueueTurn] = []
        """The accounts under which each node's parcels wait elsewhere."""
        self.busy: list[float] = []
        """Seconds that each device has worked."""
        self.finished = 0
        """Parcels trained by all stages."""
        self.lost = 0
        """The number of asks of nodes that died or were cut off."""
        self.refused = 0
        self.hops = 0
        self.away = 0.0
        """Seconds, as microbatches have them, from sending to the answer, summed over all answers."""
        self.routes = Pairs()
        """Sender and receiver of parcels that came through, where they are kept."""
        self.keep_routes = False

    def clock(self) -> float:
        """Seconds as microbatches have them: a parcel's are longer."""
        return self.agenda.now / self._parcel

    def joined(self, i: int) -> None:
        """A node that `Nodes.add` gave its number to."""
        assert i == len(self._books)
        self._books.append(None)
        self._book_told.append(-math.inf)
        self._places.append(None)
        self._order.append(CallOrder())
        self._in_flight.append(None)
        self.under_way.append(0)
        self._working.append(False)
        self._life.append(0)
        self._held.append({})
        self._turn.append(QueueTurn((self.nodes.peer[i],), 1.0))
        self.busy.append(0.0)

    def begin(self, i: int) -> None:
        """A node serves from now on; one of stage 0 draws."""
        if self.nodes.stage[i] == 0:
            missing, many = partial(self._missing, i), self._settings.work.in_flight
            self.under_way[i], in_flight = 0, InFlight(many, lambda: many, missing, self.clock)
            self._in_flight[i] = in_flight
            self._draw_all(i, in_flight)

    def left(self, i: int) -> None:
        """A node is gone, or leaves its stage: the nodes that wait for it find out."""
        self._life[i] += 1
        self._working[i] = False
        for child in self._held[i]:
            self._fail_later(child)
        self._held[i] = {}
        self._order[i] = CallOrder()
        self._books[i] = self._places[i] = self._in_flight[i] = None

    def _here(self, passage: Passage) -> bool:
        """Whether the node that has it lives and is still where it was."""
        return self._life[passage.node] == passage.life

    def _draw_all(self, i: int, in_flight: InFlight) -> None:
        """Draw as many as may be drawn now."""
        while in_flight.open_to(self.under_way[i], self.under_way[i]):
            self.under_way[i] += 1
            self._put(Priority.DRAW, Passage(i, self._life[i], None, self.agenda.now), OWN)

    def _ended(self, passage: Passage) -> None:
        """An origin has trained what it drew."""
        i, in_flight = passage.node, self._in_flight[passage.node]
        assert in_flight is not None
        self.finished += 1
        self.under_way[i] -= 1
        in_flight.carried(self.agenda.now - passage.since, passage.waited)
        self._draw_all(i, in_flight)

    def _put(self, priority: Priority, passage: Passage, turn: QueueTurn) -> None:
        i = passage.node
        if not self._working[i]:  # nothing waits there
            self._work(i, passage)
            return
        passage.put_at = self.agenda.now
        self._order[i].put(priority, passage, turn)

    def _next(self, i: int) -> None:
        order = self._order[i]
        if not len(order):
            self._working[i] = False
            return
        passage = order.take()
        if passage.peer >= 0 or passage.parent is not None:
            passage.waited += self.agenda.now - passage.put_at
        self._work(i, passage)

    def _work(self, i: int, passage: Passage) -> None:
        self._working[i] = True
        units = 1.0 + BACKWARDS if self.nodes.stage[i] == self._last else BACKWARDS if passage.peer >= 0 else 1.0
        seconds = units * self._unit_seconds / self.nodes.speed[i]
        self.nodes.works_until[i] = self.agenda.now + seconds
        self.agenda.after(seconds, self._worked, passage, seconds)

    def _worked(self, passage: Passage, seconds: float) -> None:
        i = passage.node
        if not self._here(passage):
            return
        self.busy[i] += seconds
        if passage.peer >= 0 or self.nodes.stage[i] == self._last:
            self._trained(i)
            if passage.parent is None:
                self._ended(passage)
            else:
                self._answer(passage)
        else:
            self._send(passage)
        self._next(i)

    def _book(self, i: int) -> LoadBalancer:
        book = self._books[i]
        if book is None:
            book = self._books[i] = LoadBalancer("balanced", self.nodes.rng, self.clock)
        if self.agenda.now - self._book_told[i] >= VIEW_SECONDS:
            self._tell(i, book)
        return book

    def _tell(self, i: int, book: LoadBalancer) -> None:
        book.update(self.directory.seen(i, 1), 0)
        self._book_told[i] = self.agenda.now

    def _send(self, passage: Passage) -> None:
        i = passage.node
        if not self._here(passage):
            return
        book = self._book(i)
        peer = book.choose(passage.excluded, desperate=passage.rounds >= ROUNDS_TO_DESPAIR)
        if peer is not None and not self.nodes.alive[int(peer)] and self._expired(int(peer)):
            self._tell(i, book)
            peer = book.choose(passage.excluded, desperate=passage.rounds >= ROUNDS_TO_DESPAIR)
        if peer is None and passage.excluded and passage.asks < ASKS_TO_WAIT:
            passage.asks, passage.excluded = ASKS_TO_WAIT, ()
            peer = book.choose()
        if peer is None:
            pause = self._parcel * self.nodes.rng.uniform(*BUSY_BACKOFF_SECONDS)
            passage.rounds += bool(passage.excluded)
            if not passage.excluded:
                pause = max(pause, self._settings.directory.look_seconds)
                self._book_told[i] = -math.inf
            passage.excluded = ()
            self.agenda.after(pause, self._send, passage)
            return
        passage.asks = max(passage.asks, book.asks_for(peer))
        passage.peer, passage.began = int(peer), book.sent(peer)
        self.hops += 1
        self.nodes.count("microbatches", self._parcel * self._octets)
        seconds = self.nodes.carry(i, passage.peer, self._octets, self._parcel)
        self.agenda.after(seconds, self._arrive, passage)

    def _expired(self, j: int) -> bool:
        """Whether the record of one that died is gone as well."""
        return self.agenda.now - self.nodes.died[j] >= self._settings.directory.record_seconds

    def _arrive(self, passage: Passage) -> None:
        i, j, nodes = passage.node, passage.peer, self.nodes
        if not self._here(passage):
            return
        if not nodes.reach(i, j):
            self._fail_later(passage)
            return
        if not nodes.serving[j] or nodes.stage[j] != nodes.stage[i] + 1:
            self.agenda.after(self._parcel * self.nodes.latency(j, i), self._refuse, passage)
            return
        places = self._places[j]
        if places is None:
            load = partial(self._load, j)
            places = self._places[j] = MicrobatchLimiter(self._settings.work.max_pending, self.clock, load)
        try:
            release = places.take(self.nodes.peer[i], passage.asks)
        except Refused:
            self.refused += 1
            self.agenda.after(self._parcel * self.nodes.latency(j, i), self._refuse, passage)
            return
        child = Passage(j, self._life[j], passage, self.agenda.now)
        child.release = release
        self._held[j][passage] = None
        self._put(Priority.FORWARD, child, self._turn[i])

    def _load(self, j: int) -> DeviceLoad:
        return DeviceLoad(self._order[j].forwards, self.busy[j] / self._parcel)

    def _refuse(self, passage: Passage) -> None:
        book, peer = self._books[passage.node], self.nodes.peer[passage.peer]
        if book is None or not self._here(passage):
            return
        book.done(peer, passage.began, RequestOutcome.UNTOLD)
        book.full(peer)
        passage.busy_since = min(passage.busy_since, passage.began)
        passage.excluded += (peer,)
        passage.peer = -1
        passage.asks += 1
        self._send(passage)

    def _fail_later(self, passage: Passage) -> None:
        self.lost += 1
        self.agenda.after(PROGRESS_SECONDS, self._fail, passage, passage.peer)

    def _fail(self, passage: Passage, of: int) -> None:
        book = self._books[passage.node]
        if book is None or passage.peer != of or not self._here(passage):
            return
        peer = self.nodes.peer[passage.peer]
        book.done(peer, passage.began, RequestOutcome.FAILED)
        book.failed(peer)
        passage.excluded += (peer,)
        passage.peer = -1
        passage.asks += 1
        self._send(passage)

    def _answer(self, passage: Passage) -> None:
        """A node gives back the gradient of what it was asked for, and its place is free."""
        parent, j = passage.parent, passage.node
        places = self._places[j]
        assert parent is not None
        assert places is not None
        assert passage.release is not None
        self._held[j].pop(parent, None)
        places.answered(self.nodes.peer[parent.node])
        passage.release()
        load = places.taken
        if not self.nodes.reach(j, parent.node) or parent.peer != j:
            if self.nodes.alive[parent.node] and parent.peer == j:
                self._fail_later(parent)
            return
        self.nodes.count("microbatches", self._parcel * self._octets)
        seconds = self.nodes.carry(j, parent.node, self._octets, self._parcel)
        self.agenda.after(seconds, self._returned, parent, j, load, passage.waited)

    def _returned(self, passage: Passage, j: int, load: int, waited: float) -> None:
        i = passage.node
        book = self._books[i]
        if book is None or passage.peer != j or not self._here(passage):
            return
        peer = self.nodes.peer[j]
        book.done(peer, passage.began, RequestOutcome.CAME)
        book.reported(peer, load)
        self.away += self.clock() - passage.began
        if self.keep_routes:
            self.routes.append(i, j)
        passage.waited += waited + self._parcel * max(0.0, passage.began - passage.busy_since)
        self._put(Priority.BACKWARD, passage, OWN)
