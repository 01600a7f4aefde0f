"""Which stage a node serves, and when it moves to another: pure decisions on what a node sees, time and chance.

Nobody is told; everybody decides alone. A node moves for two reasons: another stage is poor for its work (rare, damped,
after a long stay), or it has lost its last node (soon).

A stage's throughput is the sum of its nodes' capacities: tokens/s that each could train if it never had to wait. What
nodes really train would say nothing, for every stage of a pipeline trains at the rate of the slowest one. Work is
relative to the stages' mean, strength is capacity × work: a node keeps its strength when it moves.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from noloco_node.directory.live_estimate import WELCOME_SHARE, seen_there, unasked
from noloco_node.directory.records import SERVING, DirectoryView, PeerRecord, PeerState
from noloco_node.directory.summary import CREDIBLE_STRENGTH
from noloco_node.identity.peer_id import PeerId
from noloco_node.peers.scorecard import PeerStats

COUNTED = (PeerState.JOINING, PeerState.TRAINING, PeerState.FINISHING)

SHORTAGE, SHORTAGE_IN_PART = 0.03, 0.2
"""Nobody moves to a stage that is within the first part of what a perfect division would give every stage. The second
holds if one of the stages is seen in part: by chance a sample of 128 nodes is off by a tenth."""
DAMPING = 0.5
"""Share of a stage's surplus that moves at each look, on average: views are stale, and all look at the same time."""
CLEAR_GAIN = 0.5
"""The poorer of the two stages must gain at least this much of what the moving node brings."""
ABOUT_AS_POOR = 1.25
"""A joiner whose line has a bound takes stages for equals up to so many times the least throughput. Without it the line
would decide only where nobody serves yet."""
RESCUE_SLOT_SECONDS = 5.0
"""Each next candidate waits so many seconds longer before it moves to a lost stage: long enough to see that another
did."""


@dataclass(frozen=True, slots=True)
class Server:
    """A node that serves a stage, or is on its way there (`present` is False then)."""

    peer: PeerId
    stage: int
    strength: float
    present: bool = True
    standby_of: int | None = None
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
    in_part: bool = False
    """Whether a stage is seen in part."""

    @property
    def throughput(self) -> list[float]:
        """Tokens/s of each stage."""
        return [strength / work for strength, work in zip(self.strength, self.work, strict=True)]

    @property
    def level(self) -> float:
        """Tokens/s of every stage if strength could be divided at will: no assignment gives the swarm more."""
        return sum(self.strength) / sum(self.work)

    def poor(self) -> list[int]:
        """The stages that lack something beside an even division."""
        enough = (1.0 - (SHORTAGE_IN_PART if self.in_part else SHORTAGE)) * self.level
        return [stage for stage, throughput in enumerate(self.throughput) if throughput < enough]


def servers_of(
    view: DirectoryView, work: Sequence[float], now: float, known: PeerStats, *, without: PeerId | None
) -> list[Server]:
    """All nodes that count at DHT time `now`, but `without`: those that answer this node, and did not let it down.

    A node without a known speed counts like the median. Only one that has worked counts for more, and none for more
    than `CREDIBLE_STRENGTH` of it. In a stage that is too large to ask all nodes, the others count with the share of
    asked ones that is there.
    """
    seen = [seen_there(view, known, now, stage, *COUNTED, without=without) for stage in range(len(work))]
    there = [[r for r in records if not known.failed(PeerId(r.peer_id))] for records, _ in seen]
    records = [r for rows in there for r in rows]
    worked = {r.peer_id for r in records if known.has_worked(PeerId(r.peer_id))}
    speeds = [(r.capacity * work[r.stage], r.peer_id in worked) for r in records if r.capacity > 0.0]
    usual = median([speed for speed, has in speeds if has or not worked] or [speed for speed, _ in speeds] or [1.0])

    def strength(record: PeerRecord) -> float:
        claimed = record.capacity * work[record.stage] or usual
        return min(claimed, usual * (CREDIBLE_STRENGTH if record.peer_id in worked else 1.0))

    servers: list[Server] = []
    for stage, (_, each) in enumerate(seen):
        if not there[stage] and each > 1.0:
            # Nobody of these was asked yet: it says no more of the stage than that they may be on their way there.
            unsure = unasked(known, view.live(stage, now, *COUNTED))
            servers += [Server(p, stage, usual, present=False, stands_for=each) for p in unsure if p != without]
        servers += [
            Server(PeerId(r.peer_id), stage, strength(r), r.state in SERVING, r.standby_of, each) for r in there[stage]
        ]
    return servers


def as_far_trained(stage_peers: Sequence[PeerId], clocks: Mapping[PeerId, float], least: float) -> list[PeerId]:
    """The stage peers to which a node could leave the stage: their clock is known to be at `least` tokens or beyond by
    now. What the node has learnt beyond the others would be lost with it."""
    return [peer for peer in stage_peers if clocks.get(peer, least) >= least]


def as_seen_at_work(
    servers: Sequence[Server], own_stage: int, stage_peers: Collection[PeerId], *, shut: Collection[PeerId] = ()
) -> list[Server]:
    """The servers that count for a node that serves `own_stage`.

    At its own stage only the `stage_peers` that count as replicas do. Of those on their way to it, as many count as are
    welcome at once. No `shut` peer of the next stage counts, to which nothing gets through. If one process answers for
    many keys, a node that trains beside it knows better, and does not leave the stage to it.
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
    return Supply(tuple(totals), tuple(work), any(server.stands_for > 1.0 for server in servers))


def choose_stage(
    supply: Supply, fitting: Collection[int], rng: random.Random, line_seconds: Sequence[float] = ()
) -> int:
    """For a joiner: of the stages that fit it the one with the smallest throughput; at random among equals.

    `line_seconds` says what a microbatch takes of the joiner's line at each stage, if its line has a bound. Stages that
    are about as poor as the poorest are equals then, and the one that costs the line least is taken.
    """
    throughput, stages = supply.throughput, sorted(fitting)
    if any(line_seconds):
        poor = ABOUT_AS_POOR * min(throughput[stage] for stage in stages)
        stages = [stage for stage in stages if throughput[stage] <= poor]
        cheapest = min(line_seconds[stage] for stage in stages)
        stages = [stage for stage in stages if line_seconds[stage] <= cheapest]
    least = min(throughput[stage] for stage in stages)
    return rng.choice([stage for stage in stages if throughput[stage] <= least])


def settle_among(
    servers: Sequence[Server],
    seen_first: Collection[PeerId],
    own: PeerId,
    chosen: int,
    work: Sequence[float],
    fitting: Collection[int],
) -> int:
    """The stage to take in the end, for a joiner that has announced itself at `chosen` and looks again.

    Its rivals are the joiners at the same stage that it had not seen before it chose (`seen_first`), for they had not
    seen it either. In the order of their peer ids they and this node take the poorest stage one after another. All of
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

    Each node of a stage with a surplus moves with a probability by which half of the surplus moves on average. It goes
    to a poor stage drawn by how much it lacks. Thousands that decide alone, on views that are old, therefore move about
    as many as are needed. None moves if the poorer of the two stages would gain less than half of what it brings.
    """
    level = supply.level
    surplus = supply.strength[own_stage] - level * supply.work[own_stage]
    if surplus <= 0.0 or rng.random() >= DAMPING * surplus / supply.strength[own_stage]:
        return None
    poor = [s for s in supply.poor() if s in fitting and worth_moving(supply, own_stage, own_strength, s)]
    if not poor:
        return None
    return rng.choices(poor, weights=[level * supply.work[stage] - supply.strength[stage] for stage in poor])[0]


def worth_moving(supply: Supply, own_stage: int, own_strength: float, to: int) -> bool:
    """Whether the poorer of the two stages gains clearly by this node's move. A move back is never worth it then."""
    before = supply.throughput
    brings = own_strength / supply.work[to]
    after = min(before[own_stage] - own_strength / supply.work[own_stage], before[to] + brings)
    return after - min(before[to], before[own_stage]) >= CLEAR_GAIN * brings


def unserved_stages(servers: Sequence[Server], stages: int) -> list[int]:
    """The stages that nobody serves, even if nodes are on the way to them."""
    return sorted(set(range(stages)) - {server.stage for server in servers if server.present})


def rescue_rank(
    servers: Sequence[Server], work: Sequence[float], own: PeerId, lost: int, among: int | None = None
) -> int | None:
    """This node's place in the order of those that may move to a `lost` stage; None if it is not one of them.

    They are the nodes of all stages that have another replica left. If only the nodes of the stage `among` know that it
    is lost, they are these. The stages take turns, the one with the most throughput first: its nodes may be too small,
    or be told to stay. Of a stage first come keepers of a copy of the lost one, then nodes that leave the poorer of the
    two with the most throughput.
    """
    present = [server for server in servers if server.present]
    counts = [sum(server.stage == stage for server in present) for stage in range(len(work))]
    throughput = supply_of(present, work).throughput
    sources = [stage for stage in range(len(work)) if counts[stage] > 1 and among in (None, stage)]
    sources.sort(key=lambda stage: -throughput[stage])
    here = next((server.stage for server in present if server.peer == own), None)
    if here not in sources:
        return None

    def merit(server: Server) -> tuple[bool, float, PeerId]:
        left = throughput[server.stage] - server.strength / work[server.stage]
        return server.standby_of != lost, -min(left, server.strength / work[lost]), server.peer

    order = [server.peer for server in sorted((s for s in present if s.stage == here), key=merit)]
    return order.index(own) * len(sources) + sources.index(here)


def rescue_wait(rank: int, rng: random.Random) -> float:
    """Seconds that the candidate of this rank waits, at random within its slot, before it looks again and moves."""
    return (rank + rng.random()) * RESCUE_SLOT_SECONDS


JOINER_PATIENCE = 15.0
"""A lost stage waits for announced joiners for so many times as long as it takes to confirm that it is empty. All
joiners count together, from when it was first seen empty. One that never comes, or one after another, must not keep it
from being rescued."""


@dataclass(frozen=True, slots=True)
class Move:
    """Leave for this stage: it is poor, or nobody serves it."""

    stage: int
    why: Literal["poor", "lost"]


@dataclass(frozen=True, slots=True)
class MigrationStanding:
    """What does not change while a node stays at a stage."""

    work: Sequence[float]
    fitting: Collection[int]
    """Stages that fit this machine's memory."""
    since: float
    """When the stay began, seconds."""
    stay_seconds: float
    """Shortest stay before a move to a poor stage: the cool-down."""
    confirm_seconds: float
    """How long a stage must be seen empty before it is lost: one failed look-up is not enough."""

    def cut_short(self, now: float, began: float, clock: float, target: float) -> bool:
        """Whether the run's end would cut the next stay short, at the pace of this one. Clocks are in tokens: `began`
        as the stay began, `clock` now."""
        return (target - clock) * (now - self.since) < self.stay_seconds * (clock - began)


@dataclass(slots=True)
class Relocation:
    """The decision of one node during one stay; `look` is called again and again, a few times a minute or more."""

    standing: MigrationStanding
    rng: random.Random
    next_look: float = field(init=False)
    """When it looks for a poorer stage again, seconds; for lost ones it looks at every call."""
    _unserved_since: dict[int, float] = field(default_factory=dict[int, float], init=False)
    _empty_since: dict[int, float] = field(default_factory=dict[int, float], init=False)
    _rescues: dict[int, float] = field(default_factory=dict[int, float], init=False)
    _shut: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.next_look = self.standing.since + self.standing.stay_seconds + self._about_a_look()

    def look(self, now: float, here: Server, others: Sequence[Server], *, shut: bool = False) -> Move | None:
        """Move now, or None. `here` is this node, `others` are all others that count. `shut`: nothing gets through to
        the next stage, as the nodes of this one see, even if peers answer there. It is for them to rescue it."""
        self._shut = here.stage + 1 if shut else None
        lost = self._lost(now, [*others, here])
        return self._rescue(now, here, others, lost) or self._balance(now, here, others)

    def _about_a_look(self) -> float:
        """Seconds to the next look for a poorer stage: as long as an empty stage is looked at."""
        return self.standing.confirm_seconds * self.rng.uniform(0.5, 1.5)

    def _lost(self, now: float, servers: Sequence[Server]) -> list[int]:
        """Stages that nobody serves, and to which nobody is on the way or has been for too long."""
        unserved = unserved_stages(servers, len(self.standing.work))
        self._unserved_since = {stage: self._unserved_since.get(stage, now) for stage in unserved}
        awaited = {server.stage for server in servers if not server.present}
        patience = JOINER_PATIENCE * self.standing.confirm_seconds
        return [stage for stage in unserved if stage not in awaited or now - self._unserved_since[stage] > patience]

    def still_worth(self, move: Move, here: Server, others: Sequence[Server]) -> bool:
        """Tell whether a move to a poor stage gains as much beside these others. A move to a lost stage waits for
        nobody, for its candidates take turns. A poor stage that meanwhile lost its last node has candidates, too, once
        that is confirmed. That holds even if a node says that it is on the way there."""
        if move.why == "lost":
            return True
        supply = supply_of([*others, here], self.standing.work)
        left = any(server.stage == move.stage and server.present for server in others)
        return left and worth_moving(supply, here.stage, here.strength, move.stage)

    def _rescue(self, now: float, here: Server, others: Sequence[Server], lost: Sequence[int]) -> Move | None:
        self._empty_since = {stage: self._empty_since.get(stage, now) for stage in lost}
        self._rescues = {stage: due for stage, due in self._rescues.items() if stage in lost}
        for stage in lost:
            if stage not in self.standing.fitting or now - self._empty_since[stage] < self.standing.confirm_seconds:
                continue
            among = here.stage if stage == self._shut else None
            rank = rescue_rank([*others, here], self.standing.work, here.peer, stage, among)
            if rank is None:
                self._rescues.pop(stage, None)
            elif stage not in self._rescues:
                self._rescues[stage] = now + rescue_wait(rank, self.rng)
            elif now >= self._rescues[stage]:
                return Move(stage, "lost")
        return None

    def _balance(self, now: float, here: Server, others: Sequence[Server]) -> Move | None:
        if now < self.next_look:
            return None
        self.next_look = now + self._about_a_look()
        supply = supply_of([*others, here], self.standing.work)
        fitting = [stage for stage in self.standing.fitting if stage not in self._unserved_since]
        target = plan_move(supply, here.stage, here.strength, fitting, self.rng)
        return None if target is None else Move(target, "poor")
