"""Moves by what is seen of a stage in part: chance sends nobody away, and a stage that lacks much is mended.

A stage whose nodes were not asked yet is neither poor nor lost.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from noloco_node.directory.records import DirectoryView, LiveRecord, Scale
from noloco_node.identity.peer_id import PeerId
from noloco_node.peers.scorecard import SILENCES_TOLERATED, PeerStats
from noloco_node.placement.balancing import (
    RESCUE_SLOT_SECONDS,
    MigrationStanding,
    Move,
    Relocation,
    Server,
    Supply,
    servers_of,
    supply_of,
)
from tests.worlds import record_of

OWN = PeerId("peer-own-00000")
LIFE, STAY = 20.0, 300.0


def view_of(*stages: Sequence[PeerId], scales: tuple[Scale, ...] = (), capacity: float = 5.0) -> DirectoryView:
    """All train until time 100."""

    def row(peer: PeerId, stage: int) -> LiveRecord:
        said = record_of(peer, stage, capacity=capacity)
        return LiveRecord(said, 100.0)

    return DirectoryView(tuple({p: row(p, stage) for p in peers} for stage, peers in enumerate(stages)), scales)


def names(stage: int, many: int) -> list[PeerId]:
    """So many ids."""
    return [PeerId(f"peer-{stage}-{i:07d}") for i in range(many)]


def knowing(*asked: tuple[int, Sequence[PeerId]]) -> PeerStats:
    """The peers' history of a node that has heard from these that they serve those stages."""
    known = PeerStats(lambda: 50.0)
    for stage, peers in asked:
        for peer in peers:
            known.answered(peer)
            known.said(peer, stage)
    return known


def test_who_was_not_asked_yet_in_a_stage_seen_in_part_counts_as_far_as_the_others_are_there() -> None:
    """A node calls a few a second, and of a further stage it sees another bucket every dozen of seconds. Of 64 that it
    sees there it has asked eight. The stage is no poorer for that."""
    near, far = names(0, 64), names(1, 64)
    view = view_of(near, far, scales=(Scale(4.0, False), Scale(4.0, False)))
    supply = supply_of(servers_of(view, (1.0, 1.0), 50.0, knowing((0, near), (1, far[:8])), without=None), (1.0, 1.0))
    assert supply.strength[0] == pytest.approx(supply.strength[1]) == pytest.approx(64 * 4 * 5.0)
    assert supply.in_part
    known = knowing((0, near), (1, far[:2]))
    for silent in far[2:32]:
        for _ in range(SILENCES_TOLERATED + 1):
            known.silent(silent)
    ghosts = supply_of(servers_of(view, (1.0, 1.0), 50.0, known, without=None), (1.0, 1.0))
    assert ghosts.strength[1] < 0.07 * ghosts.strength[0], "of 32 that were asked two are there"


def test_records_alone_count_nothing_in_a_stage_that_is_seen_whole() -> None:
    """Everybody there is asked soon."""
    known = knowing((0, names(0, 20)))
    assert len(servers_of(view_of(names(0, 40)), (1.0,), 50.0, known, without=None)) == 20
    supply = supply_of(servers_of(view_of(names(0, 40)), (1.0,), 50.0, known, without=None), (1.0,))
    assert supply == Supply((100.0,), (1.0,))


def moves_of(relocation: Relocation, here: Server, others: Sequence[Server], seconds: int) -> list[tuple[int, Move]]:
    """When it would go, looking every second."""
    looks = ((now, relocation.look(float(now), here, others)) for now in range(seconds))
    return [(now, move) for now, move in looks if move is not None]


def test_a_stage_seen_in_part_of_which_nobody_was_asked_yet_is_not_lost_and_one_that_is_lost_is_rescued_at_once() -> (
    None
):
    """Its records speak for it as long as those count that are on their way to a stage. Where they have ended, a node
    goes there as soon as where everybody is seen."""
    near = names(0, 64)
    known, scales = knowing((0, near)), (Scale(4.0, False), Scale(4.0, False))
    standing = MigrationStanding((1.0, 1.0), range(2), 0.0, 1e6, LIFE)
    here = Server(PeerId("a-peer-first-of-all"), 0, 5.0)
    unknown = servers_of(view_of(near, names(1, 64), scales=scales), (1.0, 1.0), 50.0, known, without=None)
    assert moves_of(Relocation(standing, random.Random(1)), here, unknown, 280) == []
    lost = servers_of(view_of(near, [], scales=(scales[0], Scale())), (1.0, 1.0), 50.0, known, without=None)
    found = moves_of(Relocation(standing, random.Random(1)), here, lost, 60)
    assert found[0][1] == Move(1, "lost")
    assert LIFE <= found[0][0] <= LIFE + 4.0 * RESCUE_SLOT_SECONDS + 1.0


@dataclass
class Stage:
    """What the nodes of a swarm see of one: another sample each, renewed within four minutes."""

    strength: float
    error: float
    """Relative, one standard deviation of what each node sees."""


@dataclass
class Watcher:
    """A node that looks."""

    stage: int
    rng: random.Random
    relocation: Relocation
    seen: dict[int, tuple[int, float]] = field(default_factory=dict[int, tuple[int, float]])

    def others(self, stages: Sequence[Stage], now: float) -> list[Server]:
        """The stages as this node sees them."""
        servers: list[Server] = []
        for number, stage in enumerate(stages):
            epoch = int(now // 240)
            if self.seen.get(number, (-1, 0.0))[0] != epoch:
                self.seen[number] = epoch, self.rng.gauss(1.0, stage.error)
            mine = float(number == self.stage)
            peer = PeerId(f"part {epoch} of stage {number}")
            strength = max(1e-9, (stage.strength - mine) * self.seen[number][1])
            each = 4.0 if stage.error else 1.0
            servers.append(Server(peer, number, strength / each, stands_for=each))
        return servers


def town(strengths: Sequence[float], error: float, seconds: float, *, said: bool = True) -> tuple[int, list[float]]:
    """How many of nodes of strength 1 move in so long, and what the stages have in the end. Where it is not `said`
    they take what they see for all."""
    rng = random.Random(3)
    stages = [Stage(float(strength), error) for strength in strengths]
    standing = MigrationStanding((1.0,) * len(stages), range(len(stages)), -STAY, STAY, LIFE)
    nodes = [
        Watcher(number, random.Random(rng.random()), Relocation(standing, random.Random(rng.random())))
        for number, stage in enumerate(stages)
        for _ in range(int(stage.strength))
    ]
    moves, now = 0, 0.0
    while now < seconds:
        now += 15.0
        for node in [node for node in nodes if node.relocation.next_look <= now]:
            others = node.others(stages, now)
            seen = others if said else [Server(s.peer, s.stage, s.strength * s.stands_for) for s in others]
            move = node.relocation.look(now, Server(OWN, node.stage, 1.0), seen)
            if move is not None:
                moves += 1
                stages[node.stage].strength -= 1.0
                stages[move.stage].strength += 1.0
                nodes.remove(node)  # it has to stay where it goes
    return moves, [stage.strength for stage in stages]


def test_even_stages_that_are_seen_in_part_keep_their_nodes() -> None:
    """Each is known to 9 %: what one look shows is no reason to go. Taken for what there is, it sends many away."""
    moves, _ = town((60, 60, 60), 0.09, 900.0)
    assert moves <= 9
    careless, _ = town((60, 60, 60), 0.09, 900.0, said=False)
    assert careless > 50


def test_a_stage_that_has_lost_half_is_mended_by_as_many_as_it_lacks() -> None:
    """Though each node knows each stage to 9 % only: in a quarter of an hour most of it has come, and no crowd."""
    moves, strengths = town((60, 30, 60), 0.09, 900.0)
    assert 8 <= moves <= 25
    assert min(strengths) > 0.75 * sum(strengths) / 3
    assert town((60, 30, 60), 0.0, 900.0)[0] <= 25
