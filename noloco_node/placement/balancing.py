"""Which stage a node serves: pure decisions on what the directory says. Nobody is told; everybody decides alone.

A stage's throughput is the sum of its nodes' capacities: tokens/s that each could train if it never had to wait. What
nodes really train would say nothing, for every stage of a pipeline trains at the rate of the slowest one. Work is
relative to the stages' mean, strength is capacity × work: a node keeps its strength when it moves.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import median

from noloco_node.directory.headcount import WELCOME_SHARE, is_there
from noloco_node.directory.records import DirectoryView, PeerRecord, PeerState
from noloco_node.identity.peer_id import PeerId
from noloco_node.transport.acquaintance import Acquaintances

COUNTED = (PeerState.JOINING, PeerState.TRAINING, PeerState.FINISHING)
PRESENT = (PeerState.TRAINING, PeerState.FINISHING)

CREDIBLE_STRENGTH = 8.0
"""A node of which this one has seen work counts at most for this many of the median one: what a record claims is only
a claim. Of a node that has only answered, nothing beyond the median is believed."""
SHORTAGE = 0.03
"""Nobody moves while the poorest stage is within this of what a perfect division would give every stage."""
DAMPING = 0.5
"""Share of a stage's surplus that moves at each look, on average: views are stale, and all look at the same time."""
CLEAR_GAIN = 0.5
"""The poorer of the two stages must gain at least this much of what the moving node brings."""
RESCUE_SLOT_SECONDS = 5.0
"""How much longer each next candidate waits before it moves to a lost stage: long enough to see that another did."""


@dataclass(frozen=True, slots=True)
class Server:
    """A node that serves a stage, or is on its way there (`present` is False then)."""

    peer: PeerId
    stage: int
    strength: float
    present: bool = True
    guards: int | None = None
    """The stage of which it keeps a copy."""
    stands_for: float = 1.0
    """So many of its stage, where only a sample of that is seen."""


@dataclass(frozen=True, slots=True)
class Supply:
    """What each stage has, and what it needs."""

    strength: tuple[float, ...]
    """Sum over its nodes, those on their way included."""
    work: tuple[float, ...]
    """Relative work for a token."""

    @property
    def throughput(self) -> list[float]:
        """Tokens/s of each stage."""
        return [strength / work for strength, work in zip(self.strength, self.work, strict=True)]

    @property
    def level(self) -> float:
        """Tokens/s of every stage if strength could be divided at will: no assignment gives the swarm more."""
        return sum(self.strength) / sum(self.work)


def servers_of(
    view: DirectoryView, work: Sequence[float], now: float, known: Acquaintances, *, without: PeerId | None
) -> list[Server]:
    """All nodes that count at DHT time `now`, but `without`: that answer this node, and did not let it down when it
    gave them work. Whoever has no known speed yet counts like the median; more than that counts only who has worked,
    and nobody for more than `CREDIBLE_STRENGTH` of it."""
    introduced = [r for stage in range(len(work)) for r in view.live(stage, now, *COUNTED) if r.peer_id != without]
    records = [r for r in introduced if is_there(known, r) and not known.failed(PeerId(r.peer_id))]
    worked = {r.peer_id for r in records if known.has_worked(PeerId(r.peer_id))}
    speeds = [(r.capacity * work[r.stage], r.peer_id in worked) for r in records if r.capacity > 0.0]
    usual = median([speed for speed, has in speeds if has or not worked] or [speed for speed, _ in speeds] or [1.0])

    def strength(record: PeerRecord) -> float:
        claimed = record.capacity * work[record.stage] or usual
        return min(claimed, usual * (CREDIBLE_STRENGTH if record.peer_id in worked else 1.0))

    return [
        Server(PeerId(r.peer_id), r.stage, strength(r), r.state in PRESENT, r.guards, view.scale(r.stage).each)
        for r in records
    ]


def as_seen_at_work(
    servers: Sequence[Server], own_stage: int, stage_peers: Collection[PeerId], *, shut: Collection[PeerId] = ()
) -> list[Server]:
    """Those that count for a node that serves `own_stage`: there only the `stage_peers` that count as replicas, and of
    those on their way to it so many as are welcome at once; and no `shut` peer of the next stage, to which nothing gets
    through.

    Where one process answers for many keys, whoever trains beside it knows better, and does not leave the stage to it.
    """
    arriving = sorted(s.peer for s in servers if s.stage == own_stage and not s.present)
    welcome = max(1, int(WELCOME_SHARE * (1 + len(stage_peers))))
    counted = {*stage_peers, *arriving[:welcome]}
    return [s for s in servers if s.peer not in shut and (s.stage != own_stage or s.peer in counted)]


def usual_strength(servers: Sequence[Server]) -> float:
    """What a node of unknown speed counts for."""
    return median([server.strength for server in servers]) if servers else 1.0


def supply_of(servers: Sequence[Server], work: Sequence[float]) -> Supply:
    """Sum the nodes up by stage."""
    totals = [0.0] * len(work)
    for server in servers:
        totals[server.stage] += server.strength * server.stands_for
    return Supply(tuple(totals), tuple(work))


def choose_stage(supply: Supply, fitting: Collection[int], rng: random.Random) -> int:
    """For a joiner: of the stages that fit its memory the one with the smallest throughput; at random among equals."""
    throughput = supply.throughput
    least = min(throughput[stage] for stage in fitting)
    return rng.choice([stage for stage in sorted(fitting) if throughput[stage] <= least])


def settle_among(
    servers: Sequence[Server],
    seen_first: Collection[PeerId],
    own: PeerId,
    chosen: int,
    work: Sequence[float],
    fitting: Collection[int],
) -> int:
    """For a joiner that has announced itself at `chosen` and looks again: the stage to take in the end.

    Its rivals are the joiners at the same stage that it had not seen before it chose (`seen_first`), for they had not
    seen it either. In the order of their peer ids they and this node take the poorest stage one after another; all of
    them reckon alike, so they spread out without a word. `servers` are all others that count.
    """
    rivals = [s for s in servers if not s.present and s.stage == chosen and s.peer not in seen_first]
    strengths = [0.0] * len(work)
    for server in servers:
        if server not in rivals:
            strengths[server.stage] += server.strength * server.stands_for

    def poorest(stages: Collection[int]) -> int:
        return min(stages, key=lambda stage: (strengths[stage] / work[stage], stage != chosen, stage))

    for rival in sorted(rivals, key=lambda rival: rival.peer):
        if rival.peer < own:
            strengths[poorest(range(len(work)))] += rival.strength
    return poorest(fitting)


def plan_move(
    supply: Supply, own_stage: int, own_strength: float, fitting: Collection[int], rng: random.Random
) -> int | None:
    """The stage to move to, or None to stay. `supply` counts this node at its own stage.

    Each node of a stage with a surplus moves with a probability at which half of the surplus moves on average, to a
    poor stage drawn by how much it lacks. So thousands that decide alone, on views that are old, move about as many as
    are needed; and none moves where the poorer of the two stages would gain less than half of what it brings.
    """
    level, throughput = supply.level, supply.throughput
    surplus = supply.strength[own_stage] - level * supply.work[own_stage]
    if surplus <= 0.0 or min(throughput) >= (1.0 - SHORTAGE) * level:
        return None
    if rng.random() >= DAMPING * surplus / supply.strength[own_stage]:
        return None
    poor = [s for s in sorted(fitting) if s != own_stage and worth_moving(supply, own_stage, own_strength, s)]
    if not poor:
        return None
    lacks = [level * supply.work[stage] - supply.strength[stage] for stage in poor]
    return rng.choices(poor, weights=[max(lack, 1e-9 * level) for lack in lacks])[0]


def worth_moving(supply: Supply, own_stage: int, own_strength: float, to: int) -> bool:
    """Whether the poorer of the two stages gains clearly by this node's move. A move back is never worth it then."""
    before = supply.throughput
    brings = own_strength / supply.work[to]
    after = min(before[own_stage] - own_strength / supply.work[own_stage], before[to] + brings)
    return after - min(before[to], before[own_stage]) >= CLEAR_GAIN * brings


def unserved_stages(servers: Sequence[Server], stages: int) -> list[int]:
    """Stages that nobody serves, whoever may be on the way to them."""
    return sorted(set(range(stages)) - {server.stage for server in servers if server.present})


def rescue_rank(
    servers: Sequence[Server], work: Sequence[float], own: PeerId, lost: int, among: int | None = None
) -> int | None:
    """This node's place in the order of those that may move to a `lost` stage; None where it is not one of them.

    They are the nodes of the richest stage, or those of the stage `among` where only these know that it is lost, if it
    has another replica left. First comes who keeps a copy of the lost stage, then who leaves the poorer of the two
    stages with the most throughput.
    """
    present = [server for server in servers if server.present]
    counts = [sum(server.stage == stage for server in present) for stage in range(len(work))]
    throughput = supply_of(present, work).throughput
    richest = among
    if richest is None:
        richest = max(range(len(work)), key=lambda stage: (counts[stage] > 1, throughput[stage], -stage))
    if counts[richest] < 2:
        return None

    def merit(server: Server) -> tuple[bool, float, PeerId]:
        left = throughput[richest] - server.strength / work[richest]
        return server.guards != lost, -min(left, server.strength / work[lost]), server.peer

    order = [server.peer for server in sorted((s for s in present if s.stage == richest), key=merit)]
    return order.index(own) if own in order else None


def rescue_wait(rank: int, rng: random.Random, stands_for: float = 1.0) -> float:
    """Seconds that the candidate of this rank waits, at random within its slot, before it looks again and moves. Of a
    stage that is seen in part so many as each one there `stands_for` think that they have this rank, and share as many
    slots."""
    return (rank + rng.random()) * stands_for * RESCUE_SLOT_SECONDS
