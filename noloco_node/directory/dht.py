"""The directory in hivemind's DHT: one key a stage, one subkey a peer, signed records with a short life."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

from hivemind.dht.routing import DHTID  # pyright: ignore[reportMissingTypeStubs]
from hivemind.p2p import PeerID  # pyright: ignore[reportMissingTypeStubs]
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError  # pyright: ignore[reportMissingTypeStubs]

from noloco_node import ambient
from noloco_node.aio import cancel_and_wait
from noloco_node.directory.asked_key import TICKS
from noloco_node.directory.buckets import MOST_LEVEL, READ_AGAIN_AT_LAST, Place, bucket_of, prefix_of
from noloco_node.directory.dht_node import REPLICAS, CannotBeReached, ClocksDiffer, DhtNode, Stored, peer_name
from noloco_node.directory.dht_walk import Walker
from noloco_node.directory.known_peers import LostPeers
from noloco_node.directory.records import (
    EVERYBODY,
    MAX_LIFE_SECONDS,
    WITHDRAWAL_SECONDS,
    DirectoryView,
    LiveRecord,
    PeerRecord,
    PeerState,
    SignedRecord,
)
from noloco_node.directory.sampled_view import USUAL_LIFE, SampledView
from noloco_node.directory.store import RecordStore, esteem_by
from noloco_node.directory.validator import Intake, RecordValidator, bucket_key, sign_record
from noloco_node.errors import ExitCode, UserError
from noloco_node.identity.addresses import parse_address, peers_unreachable
from noloco_node.identity.keys import Identity
from noloco_node.identity.peer_id import PeerId
from noloco_node.peers.scorecard import PeerStats
from noloco_node.tallies import PeerTable
from noloco_node.transport.calls import QUESTION_SECONDS

logger = logging.getLogger(__name__)


class Joined(Protocol):
    """What the DHT runs on: p2pd, or a model of it."""

    @property
    def hivemind_p2p(self) -> Any:
        """hivemind's `P2P`, or what answers as it does."""
        ...

    @property
    def joined_peers(self) -> Sequence[str]:
        """Addresses of the initial peers that it is connected to."""
        ...


class DhtDirectory:
    """Implements `Directory` on the DHT. Made by `join_directory`."""

    def __init__(
        self,
        node: DhtNode,
        intake: Intake,
        records: RecordStore,
        identity: Identity,
        run_id: str | None,
        stages: int,
        peer_stats: PeerStats,
        *,
        only_asks: bool = False,
    ) -> None:
        self._node = node
        self._only_asks = only_asks
        self._intake = intake
        self._records = records
        self._identity = identity
        self._run_id = run_id or ""
        self._stages = stages
        self._ids = PeerTable[Place, Any]()
        self._peer_stats = peer_stats
        self._last_expiry: dict[int, float] = {}
        self._written: dict[Place, float] = {}
        """Ends of what this node has published."""
        self._entrances: list[PeerId] = []
        self._rng = ambient.chance()
        self._walker = Walker(node, self._rng)
        self._view = DirectoryView(tuple({} for _ in range(stages)))
        self._sampled = SampledView(stages, ambient.chance())
        self._lost = LostPeers(identity.peer_id, ambient.chance(), peer_stats)
        self._seeking: asyncio.Task[None] | None = None
        self._storing: dict[asyncio.Task[bool], None] = {}
        self._life = USUAL_LIFE
        """Seconds that the last own record lives."""
        self._walked_at: dict[Any, float] = {}
        """DHT time of the last walk to each stage's key: not all are looked at equally often."""

    @property
    def view(self) -> DirectoryView:
        """The last view read; empty before the first `refresh`."""
        return self._view

    @property
    def records_held(self) -> int:
        """Records that this node holds, for itself and for others."""
        return len(self._records)

    @property
    def no_room(self) -> Mapping[str, int]:
        """See `Directory.no_room`."""
        return {reason.value: count for reason, count in self._records.no_room.items()}

    def now(self) -> float:
        """DHT time, seconds."""
        return ambient.wall()

    async def enter(self, peers: Sequence[str]) -> None:
        """Make this node known to the peers at these addresses, and to those near it.

        Raises UserError if none of them takes it, with the reason, or if they are gone before it knows anybody. It
        would be alone, and take the run for one that has not begun.
        """
        self._entrances = [parse_address(text).peer for text in peers]
        if not peers:
            return
        answers: list[bool | BaseException] = []
        # One lost request does not decide that the nodes that let this one in are gone.
        for _ in range(2):
            answers = await self._introduce_itself()
            if True not in answers:
                break
            if self.neighbours():
                return
        else:
            raise peers_unreachable(dict.fromkeys(peers, "it let this node in, and does not answer any more"))
        for answer in answers:
            if isinstance(answer, ClocksDiffer | CannotBeReached):
                raise UserError(
                    ExitCode.CONFIG,
                    f"node.initial_peers: a peer does not accept this node ({answer})",
                    "set this machine's clock (NTP), and see that others can reach the announced address",
                )
            if isinstance(answer, BaseException):
                raise answer
        raise peers_unreachable(dict.fromkeys(peers, "connected, but it does not answer in the directory"))

    async def _introduce_itself(self) -> list[bool | BaseException]:
        """To the entrances, and where one of them answers to those near this node; what each entrance made of it."""
        asked = [self._node.ping(_peer(peer), introduce=not self._only_asks) for peer in self._entrances]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        if True in answers:
            self._walker.forget()
            await self._walker.walk([self._node.node_id])
        return answers

    async def publish(self, record: PeerRecord, life: float) -> bool:
        """Sign and store this node's record for `life` seconds, or a little longer if its last one would outlive it.

        The record that expires later is kept, so a withdrawal always wins over what it withdraws. This node always
        holds and serves its own record.
        """
        assert record.peer_id == self._identity.peer_id, "a node can only publish its own record"
        own, stage = self._identity.peer_id, record.stage
        self._life = self._walker.life = life
        places = self._to_write(record, life)
        last = self._last_expiry.get(stage, 0.0)
        if last > self._intake.latest_expiry:  # this clock was ahead for a moment: nobody else holds that record
            for place in places:
                self._records.forget(self._id_of(place).to_bytes(), own)
            last = 0.0
        expires = max(self.now() + life, last + 1.0 / TICKS)
        self._last_expiry[stage] = expires
        rows: list[tuple[Any, Stored]] = []
        for place in places:
            key_id, self._written[place] = self._id_of(place), expires
            signed = sign_record(self._identity, bucket_key(self._run_id, place), record, expires)
            rows.append((key_id, Stored(key_id.to_bytes(), own, signed, expires)))
            self._intake.take(own, *rows[-1][1])
        try:
            async with asyncio.timeout(QUESTION_SECONDS):
                answers = await asyncio.gather(*(self._store(key_id, row) for key_id, row in rows))
        except TimeoutError:
            logger.debug("publishing at stage %d took more than %g s", stage, QUESTION_SECONDS)
            return False
        return any(answers)

    def _to_write(self, record: PeerRecord, life: float) -> tuple[Place, ...]:
        """Where a record goes; a farewell to all places where an earlier one still lives."""
        places, now = self._sampled.to_write(self._identity.peer_id, record.stage, life), self.now()
        self._written = {place: end for place, end in self._written.items() if end > now}
        if record.state is not PeerState.GONE:
            return places
        return tuple(dict.fromkeys((*places, *(place for place in self._written if place.stage == record.stage))))

    async def _store(self, key_id: Any, row: Stored) -> bool:
        """Store an own record at the nodes nearest to its key; True if one took it soon, or there is none to ask.

        A node that stalls holds up nothing, and may take it later.
        """
        if not self._walker.near(key_id):
            await self._walker.walk([key_id], self._also(), records=False)

        async def taken(peer: Any) -> bool:
            answer = await self._node.store(peer, [row])
            if answer is None:
                self._walker.silent(peer)
            return answer is not None and any(answer)

        peers = dict.fromkeys((*self._walker.near(key_id), *self._also()))
        tasks = [asyncio.create_task(taken(peer), name="store a record") for peer in peers]
        for task in tasks:
            self._storing[task] = None
            task.add_done_callback(lambda task: self._storing.pop(task, None))
        if tasks:
            await asyncio.wait(tasks, timeout=self._walker.patience)
        return not tasks or any(task.done() and not task.cancelled() and task.result() for task in tasks)

    async def refresh(self) -> DirectoryView:
        """Read the directory once: all stages, or some buckets of large ones (`SampledView`).

        A row stays until a newer one is found, its life ends, or there are too many strangers' rows for all to have a
        place. A look-up that fails, or sees only some of the records, loses nobody.
        """
        places = self._sampled.to_read(self.now())
        roots = [place for place in places if place.level == 0]
        others = [place for place in places if place.level]
        _, *answered = await asyncio.gather(
            self._look_at_stages([self._id_of(place) for place in roots]),
            *(self._walker.glance(self._id_of(place)) for place in others),
        )
        now = self.now()
        for place in (*roots, *(place for place, found in zip(others, answered, strict=True) if found)):
            self._sampled.took(place, self._rows(place, now), now)
        view = self._sampled.view(now)
        self._lost.seen(_whole(self._view, view), _whole(view, view), now)
        self._view = view
        if self._seeking is None or self._seeking.done():
            self._seeking = asyncio.create_task(self._seek_a_lost_peer(), name="seek a lost peer")
        return self._view

    async def _look_at_stages(self, keys: Sequence[Any]) -> None:
        """Ask two of the holders of each key for what is new.

        All nodes near it are asked once in half a record's life, so that whatever those two leave out is found before
        its life ends. They are also asked if none of the two answers, or if this node sees nobody else.
        """
        now, own, soon = self.now(), self._identity.peer_id, READ_AGAIN_AT_LAST * self._life
        alone = not any(peer != own for rows in self._view.stages for peer in rows)
        walked = () if alone else [key for key in keys if 0.0 <= now - self._walked_at.get(key, -math.inf) < soon]
        answered = await asyncio.gather(*map(self._walker.glance, walked))
        fresh = {key for key, found in zip(walked, answered, strict=True) if found}
        if due := [key for key in keys if key not in fresh]:
            self._walked_at |= dict.fromkeys(due, now)
            await self._walker.walk(due, self._also())

    def _id_of(self, place: Place) -> Any:
        """The DHT's name of a key."""
        found = self._ids.get(place)
        if found is None:
            found = self._ids[place] = DHTID.generate(source=bucket_key(self._run_id, place))
        return found

    def _rows(self, place: Place, now: float) -> dict[PeerId, LiveRecord]:
        key = self._id_of(place).to_bytes()
        live = sorted(self._records.live(key, now).items())  # once, not at every question to the view
        return {peer: LiveRecord(held.record, held.expires, held.signed, place.level) for peer, held in live}

    def to_tell(self, most: int) -> tuple[SignedRecord, ...]:
        """See `Directory.to_tell`. The others are some that have answered this node, first those that it has seen work.

        Nobody's word is passed on.
        """
        now, known = self.now(), self._peer_stats
        own = self._own_to_tell(now)[:most]
        if most <= len(own):
            return tuple(own)
        others = [
            SignedRecord(stage, peer, row.expires, row.signed, row.level)
            for stage, rows in enumerate(self._view.stages)
            for peer, row in rows.items()
            if peer != self._identity.peer_id and row.expires > now and known.answers(peer)
        ]
        self._rng.shuffle(others)
        others.sort(key=lambda row: not known.works(row.peer))
        return (*own, *others[: most - len(own)])

    def _own_to_tell(self, now: float) -> list[SignedRecord]:
        """This node's own live record of each stage, the newest first, at one of its places."""
        newest: dict[int, SignedRecord] = {}
        for place in sorted(self._written):
            held = self._records.held(self._id_of(place).to_bytes(), self._identity.peer_id)
            if held is not None and held.expires > now:
                told = SignedRecord(place.stage, self._identity.peer_id, held.expires, held.signed, place.level)
                if place.stage not in newest or newest[place.stage].expires < told.expires:
                    newest[place.stage] = told
        return sorted(newest.values(), key=lambda row: -row.expires)

    def read(self, row: SignedRecord) -> PeerRecord | None:
        """See `Directory.read`."""
        known = row.stage < self._stages and row.level <= MOST_LEVEL
        return self._intake.read(self._id_of(_place_of(row)).to_bytes(), row) if known else None

    def told(self, teller: PeerId, records: Sequence[SignedRecord]) -> int:
        """See `Directory.told`."""
        return sum(
            self._intake.take(teller, self._id_of(_place_of(row)).to_bytes(), row.peer, row.signed, row.expires)
            for row in records
            if row.stage < self._stages
        )

    def neighbours(self) -> list[PeerId]:
        """Peers in the routing table of the DHT."""
        return [peer_name(peer) for peer in self._node.table.peer_id_to_uid]

    async def rejoin(self, peers: Iterable[PeerId]) -> int:
        """Find back into the DHT after p2pd was started anew; how many of `peers` answered.

        While it was away every look-up failed, and took the peers that it asked out of the routing table.
        """
        self._walker.forget()
        self._walked_at.clear()
        return sum(await asyncio.gather(*(self._node.ping(_peer(peer)) for peer in peers)))

    async def close(self) -> None:
        """Stop serving the DHT. The p2pd it runs on stays."""
        await cancel_and_wait((*self._storing, *(() if self._seeking is None else (self._seeking,))))
        await self._walker.close()
        await _leave(self._node)

    def _also(self) -> list[Any]:
        """As many peers as hold a record, whatever their places: some of the view that have answered this node, and
        some that it entered by.

        A newcomer knows nobody else. A stranger that took all places near a key does not come between nodes that know
        each other.
        """
        known = {peer for rows in self._view.stages for peer in rows if self._peer_stats.answers(peer)}
        known.discard(self._identity.peer_id)
        some = [self._rng.sample(peers, min(REPLICAS, len(peers))) for peers in (sorted(known), self._entrances)]
        return [_peer(peer) for peer in dict.fromkeys(peer for peers in some for peer in peers)]

    async def _seek_a_lost_peer(self) -> None:
        """Ask for one that vanished: a node that fails to answer is dropped from the routes, and never asked again."""
        peer = self._lost.due(self.now())
        if peer is not None and await self._node.ping(_peer(peer)):
            logger.info("%s, which had vanished, answers again", peer)


async def join_directory(
    p2p: Joined,
    identity: Identity,
    run_id: str | None,
    stages: int,
    *,
    peer_stats: PeerStats | None = None,
    record_seconds: float = MAX_LIFE_SECONDS,
    only_asks: bool = False,
    validator: RecordValidator | None = None,
) -> DhtDirectory:
    """Join the DHT through the initial peers that `p2p` is connected to, or start a new one if there are none.

    If `run_id` is None this node only holds the records of whatever runs come by, and looks up none (`stages` is 0).
    Records that claim to live much longer than `record_seconds` are not held. With `only_asks` this node has no place
    in the DHT. `validator` is for many nodes in one process, which need not each judge the same record.

    Raises UserError: PEERS_UNREACHABLE if none of them answers in the DHT, CONFIG if clocks differ too much.
    """
    met = peer_stats or PeerStats()

    longest = min(MAX_LIFE_SECONDS, record_seconds) + WITHDRAWAL_SECONDS
    records = RecordStore(identity.peer_id, esteem_by(met), ambient.chance(), longest=longest)
    validator = validator or RecordValidator(run_id, stages)
    intake = Intake(identity.peer_id, validator, records, met.answers, ambient.wall, longest)
    node = await DhtNode.open(p2p.hivemind_p2p, intake, records, only_asks=only_asks)
    looked_up = 0 if run_id is None else stages
    directory = DhtDirectory(node, intake, records, identity, run_id, looked_up, met, only_asks=only_asks)
    try:
        await directory.enter(p2p.joined_peers)
    except BaseException:
        await directory.close()
        raise
    return directory


def _place_of(row: SignedRecord) -> Place:
    return Place(row.stage, row.level, bucket_of(prefix_of(row.peer), row.level))


def _whole(view: DirectoryView, as_of: DirectoryView) -> DirectoryView:
    """Keep only stages that are seen whole in `as_of`: a peer that is missing in a sample has not vanished."""
    stages = enumerate(view.stages)
    return DirectoryView(tuple(rows if as_of.scale(stage) == EVERYBODY else {} for stage, rows in stages))


async def _leave(node: DhtNode) -> None:
    try:
        async with asyncio.timeout(QUESTION_SECONDS):
            await node.close()
    except (TimeoutError, OSError, P2PDaemonError):
        logger.debug("the DHT did not shut down in order")


@lru_cache(maxsize=4096)
def _peer(peer: PeerId) -> Any:
    return PeerID.from_base58(peer)
