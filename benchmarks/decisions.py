"""What each decision of a node costs by the size of the swarm: microseconds of CPU, everything in memory.

    python -m benchmarks.decisions --out benchmarks/results/decisions.json

Two tables. `in a swarm`: one node among so many replicas a stage, which holds of their records what it would hold, a
sample of large stages. `handed so many`: the pure decisions themselves, given that many peers, whoever may hold them.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.command import command, parser_of, save, whole
from noloco_node import PROTOCOL_VERSION
from noloco_node.averaging.matchmaking import PairingState, Window, answer_proposal, decide
from noloco_node.directory.buckets import TARGET, Place, StageLevel, bucket_of, levels_to_write, prefix_of
from noloco_node.directory.membership import REFRESH_SECONDS, Membership, OwnFigures
from noloco_node.directory.memory import MemoryDirectory, MemoryDirectoryHub
from noloco_node.directory.peer_clocks import PeerClocks
from noloco_node.directory.records import SERVING, LiveRecord, PeerRecord, PeerState
from noloco_node.directory.validator import RecordValidator, sign_record, stage_key
from noloco_node.identity.keys import load_or_create_identity
from noloco_node.identity.peer_id import PeerId
from noloco_node.pipeline.limiter import MicrobatchLimiter
from noloco_node.pipeline.routing import Candidate, LoadBalancer, choose_peer
from noloco_node.placement.balancing import Server, choose_stage, plan_move, rescue_rank, supply_of
from noloco_node.state_transfer.donor_choice import rank_donors
from noloco_node.state_transfer.messages import StateOffer
from noloco_node.transport.peer_stats import PeerStats

RUN, STAGES, RECORD_SECONDS = "benchmark-of-decisions", 2, 20.0
LOOKS = 200
"""Reads of the directory by one node, before its decisions are measured."""
SIGNED = 64
"""Records that are signed and read."""
REPEATS = 7
COUNTS = (10, 100, 1_000, 10_000, 100_000)
WORK = (1.0, 1.3)
FULLEST = 96
"""Records of a bucket beyond which its stage's level is raised."""


@dataclass(frozen=True)
class DecisionsPoint:
    """Microseconds a call for one node in a swarm of so many replicas a stage: medians of some repeats."""

    replicas: int
    in_view: int
    """Records of its own stage that it holds."""
    estimate: int
    """Of how many there are."""
    refresh: float
    """Reading the directory once, without the network and signatures."""
    live: float
    there: float
    live_replicas: float
    next_stage_peers: float
    unserved: float
    update: float
    """What changes where the directory was read: the book's peers."""
    choose: float
    """A microbatch's next-stage peer."""


def median_us(call: Callable[[], object], most_seconds: float = 0.3) -> float:
    """Microseconds of one call, the median of repeats."""
    began = time.process_time()
    call()
    once = max(1e-7, time.process_time() - began)
    turns = max(1, int(most_seconds / REPEATS / once))
    figures: list[float] = []
    for _ in range(REPEATS):
        began = time.process_time()
        for _ in range(turns):
            call()
        figures.append(1e6 * (time.process_time() - began) / turns)
    return statistics.median(figures)


def named(stage: int, number: int) -> PeerId:
    """A peer id of the usual length."""
    return PeerId(f"12D3KooW{random.Random(f'{stage}/{number}').getrandbits(200):044d}"[:52])


def record_of(peer: PeerId, stage: int) -> PeerRecord:
    """A replica at work."""
    return PeerRecord(
        peer_id=peer,
        stage=stage,
        state=PeerState.TRAINING,
        clock=1e6,
        tokens_per_second=500.0,
        capacity=600.0,
        outer_rounds=7,
        protocol=PROTOCOL_VERSION,
        version="0",
    )


class RenewedHub(MemoryDirectoryHub):
    """One whose records are always of middle age."""

    def live(self, place: Place, now: float) -> dict[PeerId, LiveRecord]:
        """See `MemoryDirectoryHub.live`."""
        ends = now + 0.8 * RECORD_SECONDS
        return {peer: LiveRecord(row.record, ends) for peer, row in super().live(place, now).items()}


def fill(hub: MemoryDirectoryHub, stage: int, replicas: int) -> None:
    """The records of so many replicas, where those that have found their level write them."""
    level = 0 if replicas <= TARGET else max(0, round(math.log2(replicas / TARGET)))
    ends = hub.now() + 1e6
    for number in range(replicas):
        peer = named(stage, number)
        row = LiveRecord(record_of(peer, stage), ends)
        for at in levels_to_write(prefix_of(peer), level, replicas / (1 << level)):
            hub.at(Place(stage, at, bucket_of(prefix_of(peer), at)))[peer] = row


async def decide_among(replicas: int) -> DecisionsPoint:
    """Everybody that this node sees answers it, and says that it serves its stage."""
    now = [1000.0]
    hub, known = RenewedHub(STAGES, lambda: now[0]), PeerStats(lambda: 1000.0)
    for stage in range(STAGES):
        fill(hub, stage, replicas)
    directory, own = MemoryDirectory(hub), named(0, 0)
    figures = OwnFigures(clock=1e6, tokens_per_second=500.0, outer_rounds=7, capacity=600.0)
    membership = Membership(directory, known, own, 0, STAGES, RECORD_SECONDS, lambda: figures, lambda: None)
    refreshed: list[float] = []
    for _ in range(LOOKS):
        now[0] += REFRESH_SECONDS
        if not len(refreshed) % 3:
            await membership.announce(PeerState.TRAINING)
        began = time.process_time()
        await directory.refresh()
        refreshed.append(1e6 * (time.process_time() - began))
    await membership.refresh()
    for record in membership.others():
        known.answered(PeerId(record.peer_id))
        known.said(PeerId(record.peer_id), record.stage)
    book = LoadBalancer("balanced", random.Random(7), lambda: 1000.0)
    peers = membership.next_stage_peers()
    book.update(peers, 0)
    for peer in random.Random(7).sample(peers, min(64, len(peers))):
        book.reported(peer, 1)
    turn = iter(range(1 << 60))

    def updated() -> None:  # one peer more or less, as at most looks
        book.update(peers[: len(peers) - next(turn) % 2], 0)

    return DecisionsPoint(
        replicas=replicas,
        in_view=len(membership.live(0)),
        refresh=statistics.mean(refreshed[LOOKS // 2 :]),
        estimate=directory.view.number(0, now[0]),
        live=median_us(lambda: membership.live(0, *SERVING)),
        there=median_us(lambda: membership.there(0, *SERVING)),
        live_replicas=median_us(membership.live_replicas),
        next_stage_peers=median_us(membership.next_stage_peers),
        unserved=median_us(membership.unserved),
        update=median_us(updated),
        choose=median_us(book.choose),
    )


def reading() -> dict[str, float]:
    """Bytes of a signed record, and microseconds of judging one the first time and again."""
    key, expires, first = stage_key(RUN, 0), 2e9, list[float]()
    with tempfile.TemporaryDirectory() as folder:
        identities = [load_or_create_identity(Path(folder) / f"{number}.key") for number in range(SIGNED)]
        signed = [sign_record(i, key, record_of(i.peer_id, 0), expires) for i in identities]
    digest, validator = _digest_of(key), RecordValidator(RUN, STAGES)
    rows = list(zip(identities, signed, strict=True))
    for identity, value in rows:
        began = time.process_time()
        found = validator.read_at(digest, identity.peer_id, value, expires)
        first.append(1e6 * (time.process_time() - began))
        assert found is not None
    turn = iter(range(1 << 60))

    def again() -> object:
        identity, value = rows[next(turn) % SIGNED]
        return validator.read_at(digest, identity.peer_id, value, expires)

    return {
        "bytes": statistics.median(map(len, signed)),
        "first_us": statistics.median(first),
        "again_us": median_us(again),
    }


def _digest_of(key: str) -> bytes:
    from hivemind.dht.routing import DHTID

    identifier: Any = DHTID.generate(source=key)
    return bytes(identifier.to_bytes())


def _cell(value: object) -> str:
    if isinstance(value, str):
        return value
    assert isinstance(value, int | float)
    return f"{value:.3g}" if isinstance(value, float) and value < 100 else f"{value:,.0f}"


def as_table(points: Sequence[Any]) -> str:
    """Markdown, a row for each of some dataclasses of one kind."""
    names = list(asdict(points[0]))
    rows = [[_cell(value) for value in each] for each in (asdict(point).values() for point in points)]
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


@dataclass(frozen=True)
class HandedPoint:
    """Microseconds a call of decisions that are given so many peers: medians of some repeats."""

    peers: int
    book_choose: float
    """A microbatch's next-stage peer, of a book that knows so many."""
    choose_peer: float
    """The same where each is described: what a book does for few."""
    limiter: float
    """A place for a microbatch of one of so many, and given back."""
    decide: float
    """Whom to dial for an outer step."""
    answer_proposal: float
    met: float
    """A partner's clock, believed by those of so many."""
    supply: float
    """What each stage has."""
    choose_stage: float
    plan_move: float
    rescue_rank: float
    rank_donors: float
    bucket: float
    """A bucket that was read, of a stage of so many: its level and its estimate."""


def names_of(count: int) -> list[PeerId]:
    """So many peer ids, quickly made."""
    return [PeerId(f"12D3KooW{number:044d}") for number in range(count)]


def book_of(peers: list[PeerId]) -> LoadBalancer:
    """A book in which some have said what they hold."""
    book = LoadBalancer("balanced", random.Random(7), lambda: 1000.0)
    book.update(peers, 0)
    for peer in random.Random(7).sample(peers, min(64, len(peers))):
        book.reported(peer, 1)
    return book


def for_each_microbatch(count: int, peers: list[PeerId]) -> dict[str, Callable[[], object]]:
    """Decisions that are taken for every microbatch, of a node that knows so many peers."""
    limiter, turn = MicrobatchLimiter(8, lambda: 1000.0), iter(range(1 << 60))
    for peer in peers[:2048]:
        place = limiter.take(peer)
        limiter.answered(peer)
        place()
    book = book_of(peers)
    return {"book_choose": book.choose, "limiter": lambda: limiter.take(peers[next(turn) % count])()}


def of_a_bucket(count: int) -> Callable[[], object]:
    """What is made of a bucket of a stage of so many: its level and how many there are."""
    level = 0 if count <= FULLEST else max(0, round(math.log2(count / TARGET)))
    stage, rng = StageLevel(random.Random(5), level), random.Random(6)
    held = min(count, max(1, count >> level))
    shift = 32 - level
    buckets = [[(b << shift) + rng.getrandbits(shift) for _ in range(held)] for b in range(min(16, 1 << level))]
    turn = iter(range(1 << 60))

    def take() -> object:
        bucket = next(turn) % len(buckets)
        stage.took(level, bucket, buckets[bucket])
        return stage.estimate

    return take


def handed(count: int) -> HandedPoint:
    """Every decision, given so many."""
    return HandedPoint(peers=count, **{name: median_us(call) for name, call in decisions_of(count).items()})


def decisions_of(count: int) -> dict[str, Callable[[], object]]:
    """Each decision by its name, to be taken once more with each call, given so many."""
    peers, rng = names_of(count), random.Random(3)
    candidates = [Candidate(peer, 0, rng.randrange(4)) for peer in peers]
    window = Window(inner_steps=8, min_inner_steps=4)
    pairing = PairingState((9,), 0, lambda: peers, engaged=False, next_try=0.0)
    clocks = [1e6 + rng.random() for _ in peers]
    seen = PeerClocks(1e5, lambda: 1e6, lambda: clocks, lambda: clocks)
    servers = [Server(peer, number % 2, 400.0 + rng.random()) for number, peer in enumerate(peers)]
    supply = supply_of(servers, WORK)
    offers = {peer: StateOffer(clock=1e6, outer_rounds=3, readers=0, places=2) for peer in peers}
    return for_each_microbatch(count, peers) | {
        "choose_peer": lambda: choose_peer("balanced", candidates, own_rank=0, now=1000.0, rng=rng),
        "decide": lambda: decide(pairing, window, now=1000.0, rng=rng),
        "answer_proposal": lambda: answer_proposal(
            own=peers[0],
            dialler=peers[-1],
            dialling=None,
            exchange_open=False,
            too_often=False,
            steps_since_outer=9,
            window=window,
            last_round=False,
        ),
        "met": lambda: seen.met(1e6),
        "supply": lambda: supply_of(servers, WORK),
        "choose_stage": lambda: choose_stage(supply, (0, 1), rng),
        "plan_move": lambda: plan_move(supply, 0, 400.0, (0, 1), rng),
        "rescue_rank": lambda: rescue_rank(servers, WORK, peers[0], 1),
        "rank_donors": lambda: rank_donors(offers, 1e5, rng),
        "bucket": of_a_bucket(count),
    }


def main() -> None:
    """Measure, print the tables, write the JSON file."""
    parser = parser_of(__doc__)
    parser.add_argument("--counts", type=whole, nargs="+", default=list(COUNTS), help="replicas of a stage, or peers")
    options = parser.parse_args()
    if min(options.counts) < 2:
        parser.error("--counts: there is nothing to decide among fewer than 2")
    signed = reading()
    print(
        "a signed record: {bytes:.0f} bytes, {first_us:.0f} µs the first time, {again_us:.1f} again\n".format(**signed)
    )
    pure = [handed(count) for count in options.counts]
    print(f"handed so many, µs\n\n{as_table(pure)}\n", flush=True)
    placed = [asyncio.run(decide_among(count)) for count in options.counts]
    print(f"in a swarm of so many replicas a stage, µs\n\n{as_table(placed)}")
    machine = {"date": time.strftime("%Y-%m-%d"), "cores": os.cpu_count(), "load": os.getloadavg()[0]}
    points = {"handed": [asdict(point) for point in pure], "in_a_swarm": [asdict(point) for point in placed]}
    found = machine | {"reading": signed} | points
    save(options.out, found)


if __name__ == "__main__":
    command(main)
