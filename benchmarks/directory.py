"""What the directory costs one node: bytes and CPU on real p2pd, and microseconds of what is asked of it by size.

    python -m benchmarks.directory members --counts 25 50 100 --bucket 8 --out benchmarks/results/directory-buckets.json

`members` are members of one DHT of two stages, each on a p2pd of its own: they publish their record and read the
directory as a node does, and train nothing. Bytes are those of the DHT's messages. With `--bucket` so many records make
a bucket in place of 64: then views of so few members are samples already. What is decided from what was read is in
`benchmarks.decisions`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

from benchmarks.command import command, positive, results_file, whole
from noloco_node import PROTOCOL_VERSION
from noloco_node.config.node_settings import NodeSettings
from noloco_node.directory import buckets, sampled_view
from noloco_node.directory.buckets import TARGET, Place, bucket_of, levels_to_write, prefix_of
from noloco_node.directory.dht import DhtDirectory, join_directory
from noloco_node.directory.membership import REFRESH_SECONDS, Membership, OwnFigures
from noloco_node.directory.memory import MemoryDirectory, MemoryDirectoryHub
from noloco_node.directory.records import SERVING, LiveRecord, PeerRecord, PeerState
from noloco_node.directory.validator import RecordValidator, sign_record, stage_key
from noloco_node.errors import UserError
from noloco_node.identity.keys import load_or_create_identity
from noloco_node.identity.peer_id import PeerId
from noloco_node.libp2p.start import running_p2p
from noloco_node.pipeline.routing import RoutingBook
from noloco_node.transport.acquaintance import Acquaintances

LOOKS = 200
"""Of one node, before its decisions are measured."""
RUN, STAGES, RECORD_SECONDS = "benchmark-of-the-directory", 2, 20.0
SETTLING_SECONDS = 20.0
SIGNED = 64
"""Records that are signed and read."""
REPEATS = 7


class CountedP2P:
    """hivemind's `P2P`, whose messages of the DHT are counted: what is sent and received, by kind."""

    def __init__(self, p2p: Any) -> None:
        self._p2p = p2p
        self.peer_id = p2p.peer_id
        self.sent, self.received, self.calls = 0, 0, 0

    async def call_protobuf_handler(self, peer: Any, name: str, request: Any, answer: Any) -> Any:
        """See hivemind."""
        self.calls += 1
        self.sent += request.ByteSize()
        response = await self._p2p.call_protobuf_handler(peer, name, request, answer)
        self.received += response.ByteSize()
        return response

    async def add_protobuf_handler(self, name: str, handler: Any, kind: Any) -> None:
        """See hivemind."""

        async def counted(request: Any, context: Any) -> Any:
            self.received += request.ByteSize()
            response = await handler(request, context)
            self.sent += response.ByteSize()
            return response

        await self._p2p.add_protobuf_handler(name, counted, kind)

    async def remove_protobuf_handler(self, name: str) -> None:
        """See hivemind."""
        await self._p2p.remove_protobuf_handler(name)


@dataclass(frozen=True)
class MembersPoint:
    """A second of one member among so many."""

    members: int
    received_median: float
    """Bytes a second."""
    received_most: float
    sent_median: float
    sent_most: float
    calls: float
    looks: float
    """Times a second that it read the directory: fewer than it means to where the cores are full."""
    python_ms: float
    """CPU milliseconds a second in the node's own process, and in p2pd."""
    p2pd_ms: float
    levels: str
    """The lowest and the highest that members have found for their own stage."""
    seen_least: int
    """Records in the view of its own stage of whoever sees fewest."""
    seen_median: float
    estimate_median: float
    """Of the number of records of its own stage."""
    estimate_error: float
    """Root of the mean square over the members, relative to their true number."""
    renewed: float
    """Share of the records of the own stage in view that were not in view a minute before."""
    load: float


@dataclass
class Member:
    """One member: its directory, what it sends, and its p2pd."""

    counted: CountedP2P
    directory: DhtDirectory
    p2pd: psutil.Process
    stage: int
    looks: list[int]
    """One number, which grows with each look."""


async def one_member(stack: contextlib.AsyncExitStack, folder: Path, number: int, entrance: tuple[str, ...]) -> Member:
    """Joins through `entrance` and behaves as a node's membership does until the stack is closed."""
    identity = load_or_create_identity(folder / f"{number}.key")
    p2p = await stack.enter_async_context(running_p2p(NodeSettings(initial_peers=entrance), identity))
    counted: Any = CountedP2P(p2p.hivemind_p2p)
    daemon: Any = SimpleNamespace(hivemind_p2p=counted, joined_peers=p2p.joined_peers)
    known, stage = Acquaintances(), number % STAGES
    directory = await join_directory(daemon, identity, RUN, STAGES, acquaintances=known, record_seconds=RECORD_SECONDS)
    stack.push_async_callback(directory.close)
    figures, looks = OwnFigures(clock=1e6, tokens_per_second=500.0, outer_rounds=7, capacity=600.0), [0]

    def looked() -> None:
        looks[0] += 1

    membership = Membership(directory, known, identity.peer_id, stage, STAGES, RECORD_SECONDS, lambda: figures, looked)
    membership.state = PeerState.TRAINING
    running = asyncio.create_task(membership.run())
    stack.push_async_callback(_ended, running)
    return Member(counted, directory, psutil.Process(p2p.pid), stage, looks)


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait((task,))


def make_buckets_small(records: int) -> None:
    """So many records a bucket, and what follows from it."""
    ratio = records / TARGET
    buckets.TARGET = records
    sampled_view.WHOLE = int(sampled_view.WHOLE * ratio)
    buckets.CROWDED = sampled_view.CROWDED = int(buckets.CROWDED * ratio)
    sampled_view.PLACES = int(sampled_view.PLACES * ratio)
    sampled_view.KNOWN_PLACES = int(sampled_view.KNOWN_PLACES * ratio)


async def measure_members(counts: Sequence[int], seconds: float) -> list[MembersPoint]:
    """Grow one swarm to each of the counts in turn, and follow it for so long at each."""
    points: list[MembersPoint] = []
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        first = await running_entrance(stack, folder)
        members: list[Member] = []
        for count in counts:
            try:
                while len(members) < count:
                    members.append(await one_member(stack, folder, len(members), first))
            except UserError as error:  # the cores are full, and the entrance answers nobody in time
                print(f"not borne: {len(members) + 1} members ({error})", flush=True)
                return points
            await asyncio.sleep(SETTLING_SECONDS)
            points.append(await follow(members, seconds))
            print(points[-1], flush=True)
    return points


async def running_entrance(stack: contextlib.AsyncExitStack, folder: Path) -> tuple[str, ...]:
    """A seed that all members join through; it holds records for others and publishes none."""
    identity = load_or_create_identity(folder / "entrance.key")
    p2p = await stack.enter_async_context(running_p2p(NodeSettings(), identity))
    directory = await join_directory(p2p, identity, RUN, STAGES)
    stack.push_async_callback(directory.close)
    return tuple(p2p.visible_addresses())


async def follow(members: Sequence[Member], seconds: float) -> MembersPoint:
    """What each of the members takes for so many seconds."""

    def taken() -> list[tuple[float, ...]]:
        return [(m.counted.received, m.counted.sent, m.counted.calls, _cpu(m.p2pd), m.looks[0]) for m in members]

    own, began, before, views = psutil.Process(), time.monotonic(), taken(), [_seen(m) for m in members]
    cpu_before = _cpu(own)
    await asyncio.sleep(seconds)
    took, after = time.monotonic() - began, taken()
    python = (_cpu(own) - cpu_before) / took / len(members)
    received, sent, calls, p2pd, looks = (
        [(late[place] - early[place]) / took for early, late in zip(before, after, strict=True)] for place in range(5)
    )
    seen, numbers = [_seen(m) for m in members], [m.directory.view.number(m.stage, m.directory.now()) for m in members]
    true = Counter(m.stage for m in members)
    levels = [m.directory._sampled.level_of(m.stage).level for m in members]
    new = [len(late - early) / max(1, len(late)) for early, late in zip(views, seen, strict=True)]
    return MembersPoint(
        levels=f"{min(levels)} to {max(levels)}",
        seen_median=statistics.median(map(len, seen)),
        estimate_median=statistics.median(numbers),
        estimate_error=statistics.mean((n / true[m.stage] - 1.0) ** 2 for n, m in zip(numbers, members, strict=True))
        ** 0.5,
        renewed=statistics.mean(new) * min(1.0, 60.0 / took),
        members=len(members),
        received_median=statistics.median(received),
        received_most=max(received),
        sent_median=statistics.median(sent),
        sent_most=max(sent),
        calls=statistics.mean(calls),
        looks=statistics.mean(looks),
        python_ms=1e3 * python,
        p2pd_ms=1e3 * statistics.mean(p2pd),
        seen_least=min(map(len, seen)),
        load=os.getloadavg()[0],
    )


def _seen(member: Member) -> set[str]:
    """Peers of its own stage."""
    return {record.peer_id for record in member.directory.view.live(member.stage, member.directory.now())}


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


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
    hub, known = RenewedHub(STAGES, lambda: now[0]), Acquaintances(lambda: 1000.0)
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
    book = RoutingBook("balanced", random.Random(7), lambda: 1000.0)
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


def main() -> None:
    """Measure, print the table, write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("members",))
    parser.add_argument("--counts", type=whole, nargs="+", default=[25, 50], help="members")
    parser.add_argument("--seconds", type=positive, default=30.0, help="for which members are followed")
    parser.add_argument("--bucket", type=whole, help="records of a bucket, in place of 64")
    parser.add_argument("--out", type=results_file)
    options = parser.parse_args()
    content: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "cores": os.cpu_count(), "load": os.getloadavg()[0]}
    if options.bucket:
        content["bucket"] = options.bucket
        make_buckets_small(options.bucket)
    points = asyncio.run(measure_members(options.counts, options.seconds))
    if not points:
        raise SystemExit(f"benchmarks.directory: not even {options.counts[0]} members were borne")
    print(as_table(points))
    content["points"] = [asdict(point) for point in points]
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    command(main)
