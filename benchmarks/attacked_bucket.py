"""A stage in which somebody has sought ids for one bucket, in virtual time: the world of `benchmarks.attacks bucket`.

The ids are there first. Some of the honest observe: they know nobody at their start, look and publish by the
directory's own code over a hub in memory in place of the DHT, and check on peers as a node does. The others' records
lie where nodes of the right level write them. Nobody trains, and who does not observe calls nobody.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from statistics import fmean, median

from noloco_node import PROTOCOL_VERSION
from noloco_node.aio import all_of, cancel_and_wait, run_to_end
from noloco_node.directory.buckets import TARGET, Place, bucket_of, levels_to_write, prefix_of
from noloco_node.directory.health_checks import HealthChecks
from noloco_node.directory.membership import Membership, OwnFigures
from noloco_node.directory.memory import MemoryDirectory, MemoryDirectoryHub
from noloco_node.directory.records import LiveRecord, PeerRecord, PeerState
from noloco_node.directory.records_call import serve_records
from noloco_node.directory.store import MOST_RECORDS
from noloco_node.errors import ExitCode, UserError
from noloco_node.identity.peer_id import PeerId
from noloco_node.simulator.loop import in_virtual_time
from noloco_node.transport.memory import MemoryNetwork, MemoryTransport

RUN, LIFE = "benchmark-of-attacks", 20.0
SETTLING_SECONDS = 240.0
"""In which those that observe find the level and ask whom they see first: views count from then on."""
SAMPLE_SECONDS = 20


@dataclass(frozen=True, slots=True)
class Attack:
    """Who attacks whom, for how long."""

    honest: int
    ids: int
    """Sought for one bucket."""
    silent: bool
    """They answer nobody; else they answer as a node that serves the stage does."""
    observers: int
    seconds: float
    seed: int


@dataclass(frozen=True, slots=True)
class BucketFigures:
    """One bucket in an attack."""

    honest: int
    """Nodes that lie in it by chance."""
    in_view: float
    """Of them, the share that an observer has in view, on average."""
    error: float | None
    """Root of the mean square of `off`, and its mean; None where no view held the bucket."""
    bias: float | None
    met: float
    """Share of the pairs of an observer and one of them that have met by the end."""
    met_half_by: float | None
    """Seconds until an observer has met half of them, the median over observers; None where most never have."""
    all_met_by: float | None
    """Seconds until each of them has been met by one observer at least; None where that did not come."""


@dataclass(frozen=True, slots=True)
class AttackFigures:
    """What an attack came to."""

    attack: Attack
    level: int
    attacked: BucketFigures
    unharmed: BucketFigures
    attackers_part: float
    """Of all that observers see, on average."""
    attackers_most: float
    """The same of the one view of which it is the largest part."""
    elsewhere: float
    """Share of the views in which the stage is taken to be at another level than without the attack."""


@dataclass(slots=True)
class Sighting:
    """What became of one bucket's honest nodes, among those that observe. Seconds are since they came."""

    honest: set[PeerId]
    """Who lies in it by chance."""
    in_view: list[float] = field(default_factory=list[float])
    """Share of them in a view, by moment and observer."""
    off: list[float] = field(default_factory=list[float])
    """By how much the stage's number is wrong in the views that hold the bucket: a part of the true one."""
    met: dict[tuple[PeerId, PeerId], float] = field(default_factory=dict[tuple[PeerId, PeerId], float])
    """When an observer first had an answer of one of them."""

    def figures(self, observers: Sequence[PeerId]) -> BucketFigures:
        """What it came to."""
        pairs = sum(len(self.honest - {observer}) for observer in observers)
        halves = [self._half_by(observer) for observer in observers]
        firsts = {peer: min(at for (_, met), at in self.met.items() if met == peer) for _, peer in self.met}
        half = median(halves)
        return BucketFigures(
            honest=len(self.honest),
            in_view=fmean(self.in_view),
            error=math.sqrt(fmean(off * off for off in self.off)) if self.off else None,
            bias=fmean(self.off) if self.off else None,
            met=len(self.met) / pairs,
            met_half_by=None if math.isinf(half) else half,
            all_met_by=max(firsts.values()) if firsts.keys() == self.honest else None,
        )

    def _half_by(self, observer: PeerId) -> float:
        """When it had met half of them; never is without end."""
        at = sorted(at for (who, _), at in self.met.items() if who == observer)
        needed = -(-len(self.honest - {observer}) // 2)
        return at[needed - 1] if len(at) >= needed else math.inf


class RenewedHub(MemoryDirectoryHub):
    """One whose records are always of middle age: all who have one there renew it in time."""

    def live(self, place: Place, now: float) -> dict[PeerId, LiveRecord]:
        """See `MemoryDirectoryHub.live`."""
        rows = islice(self.at(place).items(), MOST_RECORDS)
        return {peer: LiveRecord(row.record, now + 0.8 * LIFE) for peer, row in rows}


class Swarm:
    """The honest nodes, those of them that observe, and the attacker's ids."""

    def __init__(self, attack: Attack) -> None:
        self.attack = attack
        self.rng = random.Random(f"attack/{attack.seed}")
        self.hub = RenewedHub(1)
        self.network = MemoryNetwork()
        self.honest = [PeerId(f"honest-{self.rng.getrandbits(64):016x}") for _ in range(attack.honest)]
        self.level = 0 if attack.honest <= TARGET else max(0, round(math.log2(attack.honest / TARGET)))
        self.transports: dict[PeerId, MemoryTransport] = {}
        self.directories: dict[PeerId, MemoryDirectory] = {}
        for peer in self.honest:
            self.write(peer, attack.honest / (1 << self.level))
            self.answer(peer)
        self.watching = self.rng.sample(self.honest, attack.observers)
        self.bucket = self.rng.randrange(1 << self.level)
        self.of_buckets = self.in_bucket(self.bucket), self.in_bucket(self.bucket ^ 1)
        """The attacked one, and one beside it that nobody attacks."""
        self.sought = self.seek()
        self.parts: list[float] = []
        """The attacker's of each view."""
        self.elsewhere: list[bool] = []
        """Whether an observer believed the stage at another level, once it had settled."""

    def write(self, peer: PeerId, fullness: float) -> None:
        """Its record lies, and is renewed, wherever a node writes it that has found the level."""
        for level in levels_to_write(prefix_of(peer), self.level, fullness):
            rows = self.hub.at(Place(0, level, bucket_of(prefix_of(peer), level)))
            rows[peer] = LiveRecord(record_of(peer), math.inf)
            if len(rows) > MOST_RECORDS and level:
                raise UserError(
                    ExitCode.CONFIG,
                    f"{self.attack.ids} ids: which records of more than {MOST_RECORDS} the holders of a key keep is not"
                    " modelled here",
                    "name fewer",
                )

    def answer(self, peer: PeerId) -> None:
        """It answers as a node that serves the stage does."""
        transport = self.transports[peer] = MemoryTransport(self.network, peer)
        directory = self.directories[peer] = MemoryDirectory(self.hub, transport.peer_stats)
        serve_records(transport, RUN, directory, lambda: 0)

    def in_bucket(self, bucket: int) -> Sighting:
        """Nothing was seen yet of those that lie there by chance."""
        return Sighting({peer for peer in self.honest if bucket_of(prefix_of(peer), self.level) == bucket})

    async def run(self) -> AttackFigures:
        """Those that observe come, and know nobody."""
        works = [*(self.observe(peer) for peer in self.watching), self.course()]
        tasks = [asyncio.create_task(work) for work in works]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            await run_to_end(cancel_and_wait(tasks))
            for transport in self.transports.values():
                await transport.close()
        return self.figures()

    async def observe(self, peer: PeerId) -> None:
        """One node's membership and its health check."""
        directory, transport = self.directories[peer], self.transports[peer]
        figures = OwnFigures(clock=1e6, tokens_per_second=500.0, outer_rounds=7, capacity=600.0)

        async def ask() -> None:
            checks.look()

        membership = Membership(directory, transport.peer_stats, peer, 0, 1, LIFE, lambda: figures, lambda: None, ask)
        membership.state = PeerState.TRAINING
        checks = HealthChecks(
            transport,
            directory,
            RUN,
            lambda: 0,
            LIFE,
            membership.others,
            lambda: None,
            random.Random(f"roll/{peer}"),
        )
        await all_of([asyncio.create_task(membership.run()), asyncio.create_task(checks.run())])

    async def course(self) -> None:
        """What is noted."""
        for passed in range(SAMPLE_SECONDS, round(self.attack.seconds) + 1, SAMPLE_SECONDS):
            await asyncio.sleep(SAMPLE_SECONDS)
            self.note(passed)

    def seek(self) -> list[PeerId]:
        """Ids of one bucket, by trying names as an attacker tries keys; they are written at the level above, too."""
        sought, number = list[PeerId](), 0
        while len(sought) < self.attack.ids:
            number += 1
            peer = PeerId(f"sought-{number:08}")
            if bucket_of(prefix_of(peer), self.level) != self.bucket:
                continue
            sought.append(peer)
            self.write(peer, TARGET)
            if not self.attack.silent:
                self.answer(peer)
        return sought

    def note(self, passed: float) -> None:
        """What those that observe see now."""
        now, sought = self.hub.now(), set(self.sought)
        for observer in self.watching:
            directory, known = self.directories[observer], self.transports[observer].peer_stats
            for each in self.of_buckets:
                for peer in each.honest - {observer}:
                    if (observer, peer) not in each.met and known.met(peer):
                        each.met[observer, peer] = passed
            if passed < SETTLING_SECONDS:
                continue
            seen = {peer for peer, row in directory.view.stages[0].items() if row.expires > now}
            self.parts.append(len(seen & sought) / max(1, len(seen)))
            self.elsewhere.append(directory._sampled.level_of(0).level != self.level)
            off = directory.view.number(0, now) / len(self.honest) - 1.0
            for each in self.of_buckets:
                victims = each.honest - {observer}
                each.in_view.append(len(seen & victims) / len(victims))
                each.off += [off] if len(seen & victims) > 1 else []

    def figures(self) -> AttackFigures:
        """What it came to."""
        attacked, unharmed = (each.figures(self.watching) for each in self.of_buckets)
        parts, elsewhere = self.parts, fmean(self.elsewhere)
        return AttackFigures(self.attack, self.level, attacked, unharmed, fmean(parts), max(parts), elsewhere)


def record_of(peer: PeerId) -> PeerRecord:
    """Of a replica at work."""
    return PeerRecord(peer_id=peer, stage=0, state=PeerState.TRAINING, protocol=PROTOCOL_VERSION, version="0")


def attacked(attack: Attack) -> AttackFigures:
    """One attack in virtual time. UserError where holders would have to choose what they keep."""

    async def work() -> AttackFigures:
        return await Swarm(attack).run()

    return in_virtual_time(work, seed=attack.seed)
