"""This node's place in the swarm: its record, renewed by heartbeat, and what the directory says of the others.

Each of two lives of one key takes messages that were meant for the other. A start finds a twin that can be dialled; one
behind a router is found here.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median_low

from noloco_node import PROTOCOL_VERSION, __version__, ambient
from noloco_node.aio import all_of
from noloco_node.ambient import SOON_SECONDS
from noloco_node.directory.live_estimate import LiveReplicaEstimate, is_there, seen_there, unasked
from noloco_node.directory.records import (
    NOTHING_SHOWN,
    REFRESH_SECONDS,
    SERVING,
    WITHDRAWAL_SECONDS,
    Directory,
    DirectoryView,
    LiveRecord,
    OwnWord,
    PeerRecord,
    PeerState,
    look_for_others,
)
from noloco_node.directory.shared_text import SharedText
from noloco_node.identity.peer_id import PeerId
from noloco_node.peers.scorecard import PeerStats

logger = logging.getLogger(__name__)


class DuplicateIdentityWatch:
    """Looks at the records under the own name. `first` is the sequence below which this life published nothing;
    `oldest` the DHT time by which all records of earlier lives have ended."""

    def __init__(self, own: PeerId, first: int, oldest: float) -> None:
        self._own, self._first, self._oldest = own, first, oldest
        self._foreign: int | None = None
        self.seen = asyncio.Event()
        """Set once there is one."""

    def look(self, view: DirectoryView, last: int) -> None:
        """This life's records so far are those up to the sequence `last`.

        A clock that was ahead in an earlier life may explain one record. A node that renews its record lives. Where
        this node comes or goes, `Arrival` gives its records numbers of their own; a twin soon trains.
        """
        for row in (rows[self._own] for rows in view.stages if self._own in rows):
            if self._is_anothers(row, last):
                if self._foreign not in (None, row.record.sequence):
                    self.seen.set()
                self._foreign = row.record.sequence

    def _is_anothers(self, row: LiveRecord, last: int) -> bool:
        arrives = row.record.state in (PeerState.JOINING, PeerState.GONE)
        return not arrives and row.expires > self._oldest and not self._first < row.record.sequence <= last


@dataclass(frozen=True, slots=True)
class OwnFigures:
    """What a node's record says besides its state."""

    clock: float
    tokens_per_second: float
    outer_rounds: int
    capacity: float = 0.0
    standby_of: int | None = None
    steps: int = 0
    """Inner steps of this replica; not in the record."""
    newcomer: bool = False
    """It is on probation."""
    shown: OwnWord = NOTHING_SHOWN


async def asked_already() -> None:
    """Where nobody has to be asked."""


def too_few(nodes: int, stages: int) -> str:
    """What is to be said beside a stage that nobody serves: nothing where there are nodes enough for all stages."""
    return f", and {nodes} of the {stages} nodes that it takes are there" if nodes < stages else ""


def _in_short(value: float) -> float:
    """In a record, which everybody reads a few times in its life."""
    return float(f"{value:.5g}")


class Membership:
    """Publishes this node's record and answers questions about the others.

    A live record introduces its peer, an answer over an own link makes it count as there, and only work as a replica
    (`live_estimate`). `describe` gives the figures for the record. `ask` asks the peers that a look at the directory
    shows and that are not known to be there. `on_change` is called after every look.
    """

    def __init__(
        self,
        directory: Directory,
        known: PeerStats,
        own: PeerId,
        stage: int,
        stages: int,
        record_seconds: float,
        describe: Callable[[], OwnFigures],
        on_change: Callable[[], None],
        ask: Callable[[], Awaitable[None]] = asked_already,
        text: SharedText | None = None,
    ) -> None:
        self._directory = directory
        self._known = known
        self._heads = LiveReplicaEstimate(known)
        self._own = own
        self.stage = stage
        self.stages = stages
        self._record_seconds = record_seconds
        self._describe = describe
        self._on_change = on_change
        self._ask = ask
        self._sequence = int(directory.now() * 1000)
        earlier = directory.now() + 2.0 * record_seconds + WITHDRAWAL_SECONDS
        self.twin = DuplicateIdentityWatch(own, self._sequence, earlier)
        self._announced_speed = 0.0
        self._announced_newcomer = False
        self.state = PeerState.JOINING
        self._finished = False
        self._read_at = ambient.monotonic()
        self._hurried = False
        self.text = text
        """What the replicas of stage 0 tell each other of a text that they share."""

    def now(self) -> float:
        """The directory's time (seconds), by which records live; it goes on while a machine sleeps."""
        return self._directory.now()

    def live(self, stage: int, *states: PeerState) -> tuple[PeerRecord, ...]:
        """Live records of a stage, this node's own included if it has been read back: all peers that are introduced."""
        return self._directory.view.live(stage, self._directory.now(), *states)

    def number(self, stage: int, *states: PeerState) -> int:
        """How many live records a stage has: an estimate where it is too large to be read whole."""
        return self._directory.view.number(stage, self._directory.now(), *states)

    def there(self, stage: int, *states: PeerState) -> list[PeerRecord]:
        """Records of the others at a stage that answer this node and say themselves that they serve it."""
        return list(self._those_there(stage, *states))

    def _those_there(self, stage: int, *states: PeerState) -> Iterator[PeerRecord]:
        known, own = self._known, self._own
        return (r for r in self.live(stage, *states) if r.peer_id != own and is_there(known, r))

    def stage_peers(self, *states: PeerState) -> list[PeerId]:
        """Peers of the own stage that are there, without this one."""
        return [PeerId(r.peer_id) for r in self.there(self.stage, *states)]

    def willing_stage_peers(self, *states: PeerState) -> list[PeerId]:
        """Stage peers that are there, without such as have had all their chances to work with this node and did not."""
        return [peer for peer in self.stage_peers(*states) if not self._known.failed(peer)]

    def _reached(self, stage: int, *states: PeerState) -> list[PeerId]:
        """Peers at a stage that are there, or if there are none, those that once were. Paused peers never count."""
        there = [PeerId(record.peer_id) for record in self.there(stage, *states) if not record.shown.paused]
        live = [PeerId(record.peer_id) for record in self.live(stage, *states) if not record.shown.paused]
        return there or [peer for peer in live if peer != self._own and self._known.met(peer)]

    def partners(self, *states: PeerState) -> list[PeerId]:
        """Stage peers to average with. Peers that have had their chance and did not work are left out while there are
        others."""
        stage_peers = self._reached(self.stage, *states)
        return [peer for peer in stage_peers if not self._heads.idles(peer)] or stage_peers

    def counted_stage_peers(self) -> list[PeerId]:
        """Stage peers that count as replicas beside this one: as many as `live_estimate` says, those first that have
        worked."""
        stage_peers = [peer for peer in self.stage_peers(*SERVING) if not self._heads.idles(peer)]
        many = round(self._heads.replicas(stage_peers, sampled=self.scale(self.stage) > 1.0)) - 1
        return sorted(stage_peers, key=lambda peer: (not self._heads.works(peer), peer))[:many]

    def newcomers(self) -> set[PeerId]:
        """Stage peers that say they are on probation."""
        return {PeerId(r.peer_id) for r in self.live(self.stage) if r.newcomer}

    def next_stage_peers(self) -> list[PeerId]:
        """Peers of the next stage that train or finish, are not paused and answer; if none answers, those once met."""
        return self._reached(self.stage + 1, *SERVING) if self.stage + 1 < self.stages else []

    def own_rank(self) -> int:
        """This peer's place by peer id among the replicas of its stage that are there, or among those that it sees."""
        return sum(peer < self._own for peer in self.stage_peers(*SERVING))

    def live_replicas(self) -> int:
        """Replicas of the own stage that train, this one included: by what they have shown (`live_estimate`). Where
        only a sample is seen, as many as its records stand for, at the share of them that counts."""
        there, each = self._seen_there(self.stage, PeerState.TRAINING)
        peers = [PeerId(record.peer_id) for record in there]
        return round(1.0 + (self._heads.replicas(peers, sampled=self.scale(self.stage) > 1.0) - 1.0) * each)

    def _seen_there(self, stage: int, *states: PeerState) -> tuple[list[PeerRecord], float]:
        view, now = self._directory.view, self._directory.now()
        return seen_there(view, self._known, now, stage, *states, without=self._own)

    def scale(self, stage: int) -> float:
        """For how many of a stage each peer that is seen of it stands."""
        return self._directory.view.scale(stage).each

    def recorded_clocks(self) -> list[float]:
        """Clocks of the own stage's live stage peers as their records say: never ahead of the true ones. A newcomer's
        clock is that of its copy, and tells nobody the time."""
        return [record.clock for record in self._timekeepers()]

    def _timekeepers(self) -> list[PeerRecord]:
        """Stage peers whose clocks are heard: those that have worked with this replica, or if none has, those that are
        there."""
        old = [record for record in self.there(self.stage, *SERVING) if not record.newcomer]
        there = [record for record in old if not self._heads.idles(PeerId(record.peer_id))]
        return [record for record in there if self._heads.works(PeerId(record.peer_id))] or there

    def stage_peer_clocks(self) -> list[float]:
        """Present clocks of the same stage peers: what each record says, moved on by its age.

        A record is renewed a few times in its life only, in which a fast swarm's clocks run far. Without this, partners
        would be held to the past and the swarm's time would stand still.
        """
        replicas = self.live_replicas()
        return [self.present_clock(record, replicas) for record in self._timekeepers()]

    def present_clock(self, record: PeerRecord, replicas: int) -> float:
        """What a record says of its peer's clock, moved on by its age, where so many replicas train the stage."""
        row = self._directory.view.stages[record.stage].get(PeerId(record.peer_id))
        if row is None or record.state is not PeerState.TRAINING:
            return record.clock
        age = self._directory.now() - (row.expires - self._record_seconds)
        return record.clock + min(max(0.0, age), self._record_seconds) * record.tokens_per_second * replicas

    def others(self, *states: PeerState) -> list[PeerRecord]:
        """Live records of all stages without this node's own, which its former life may have left there."""
        records = [record for stage in range(self.stages) for record in self.live(stage, *states)]
        return [record for record in records if record.peer_id != self._own]

    def others_there(self, *states: PeerState) -> list[PeerRecord]:
        """Records of all stages' nodes that are there."""
        return [record for stage in range(self.stages) for record in self.there(stage, *states)]

    @property
    def deserted(self) -> bool:
        """Whether peers have answered this node, and none does any more."""
        return self._known.deserted

    def unrecorded(self) -> list[PeerId]:
        """Peers that answer and have said that they serve the run, of which no record has been read yet."""
        rows = self._directory.view.stages
        answering = [peer for peer in self._known.answering() if self._known.takes_part(peer)]
        return [peer for peer in answering if not any(peer in stage for stage in rows)]

    def unserved(self) -> list[int]:
        """Stages other than the own one at which no serving peer is there, whatever the records say.

        In a stage that is seen in part other nodes are drawn by and by (`buckets`). While none of those in view was
        asked, nothing is known.
        """
        others = [
            stage
            for stage in range(self.stages)
            if stage != self.stage and next(self._those_there(stage, *SERVING), None) is None
        ]
        return [s for s in others if self.scale(s) == 1.0 or not unasked(self._known, self.live(s, *SERVING))]

    def paused(self) -> set[int]:
        """Stages with a node that says that it is paused."""
        return {s for s in range(self.stages) if any(r.shown.paused for r in self.live(s, PeerState.DRAINING))}

    def replicas_per_stage(self) -> list[int]:
        """Replicas of each stage that are there, this one included; of a large one an estimate."""
        return self._counts(*SERVING, own=1)

    def usual_clock(self) -> float:
        """The lower median clock in the records of other nodes that are there, newcomers aside; 0 where there is none.
        One of them that claims any clock moves it no further than to another's."""
        return median_low([record.clock for record in self.others_there() if not record.newcomer] or [0.0])

    def nodes_per_stage(self) -> list[int]:
        """Nodes of each stage that are there; this one counts even where its record has not been read back."""
        return self._counts(own=int(self.state is not PeerState.GONE))

    def _counts(self, *states: PeerState, own: int) -> list[int]:
        """The number of other nodes of each stage that are there, and `own` at this one's."""
        seen = [self._seen_there(stage, *states) for stage in range(self.stages)]
        counts = [round(len(there) * each) for there, each in seen]
        counts[self.stage] += own
        return counts

    def hurry(self, hurried: bool = True) -> None:
        """From now on look at the others more often, or no longer: whatever this node waits for, the others wait for as
        well."""
        self._hurried = hurried

    async def announce(self, state: PeerState) -> bool:
        """Publish the own record in a new state now. False when no peer took it."""
        self.state = state
        self._finished |= state is PeerState.FINISHING
        life = self._record_seconds
        if state is PeerState.GONE:
            life += WITHDRAWAL_SECONDS
        figures = self._describe()
        self._sequence += 1
        self._announced_speed, self._announced_newcomer = figures.tokens_per_second, figures.newcomer
        record = PeerRecord(
            peer_id=self._own,
            stage=self.stage,
            state=state,
            clock=math.floor(figures.clock),
            tokens_per_second=_in_short(figures.tokens_per_second),
            capacity=_in_short(figures.capacity),
            standby_of=figures.standby_of,
            outer_steps_taken=figures.outer_rounds,
            finished=self._finished,
            newcomer=figures.newcomer,
            slots=self.text.to_say() if self.text else (),
            protocol=PROTOCOL_VERSION,
            version=__version__,
            sequence=self._sequence,
            shown=figures.shown,
        )
        stored = await self._directory.publish(record, life)
        if not stored:
            logger.debug("no peer took this node's record (state %s)", state)
        return stored

    async def refresh(self) -> None:
        """Read the directory once, and ask the peers that it shows."""
        await self._directory.refresh()
        await self._ask()
        self._take_in()

    async def look_for_others(self, seconds: float) -> None:
        """Look until another node is seen, `seconds` at most (`first_look`)."""
        await look_for_others(self._directory, self._own, seconds)
        await self._ask()
        self._take_in()

    @property
    def directory_age(self) -> float:
        """Seconds since the directory was last read."""
        return ambient.monotonic() - self._read_at

    @property
    def no_room(self) -> Mapping[str, int]:
        """See `Directory.no_room`."""
        return self._directory.no_room

    def _take_in(self) -> None:
        self._read_at = ambient.monotonic()
        self.twin.look(self._directory.view, self._sequence)
        stage_peers = [record for record in self.live(self.stage, PeerState.TRAINING) if record.peer_id != self._own]
        sampled = self.scale(self.stage) > 1.0
        self._heads.look(stage_peers, self._describe().steps, self._record_seconds, sampled=sampled)
        if self.text:
            self.text.heard(self.counted_stage_peers(), self.live_replicas())
        self._on_change()

    async def run(self) -> None:
        """Renew the record in time, and read the directory every two seconds.

        Neither waits for the other, since either may take seconds if somebody has vanished.
        """
        works = {"renew the own record": self._renew(), "look at the others": self._look()}
        await all_of([asyncio.create_task(work, name=name) for name, work in works.items()])

    async def _look(self) -> None:
        while True:
            await self.refresh()
            await asyncio.sleep(self._pause())

    def _pause(self) -> float:
        usual = min(REFRESH_SECONDS, self._record_seconds / 5)
        return min(usual, SOON_SECONDS) if self._hurried else usual

    async def _renew(self) -> None:
        """Renew the record three times within its life, and at once as soon as this node knows its speed.

        Without its speed stage peers take its clock to stand still. It is also renewed at once when the node ceases to
        be a newcomer, or reads another block.
        """
        loop = asyncio.get_running_loop()
        renew_at = loop.time()
        while True:
            figures = self._describe()
            speed_known = self._announced_speed == 0.0 and figures.tokens_per_second > 0.0
            said_already = self._announced_newcomer == figures.newcomer and not (self.text and self.text.news)
            if loop.time() >= renew_at or speed_known or not said_already:
                await self.announce(self.state)
                renew_at = loop.time() + self._record_seconds / 3
            await asyncio.sleep(self._pause())
