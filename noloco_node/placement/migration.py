"""When a node moves to another stage: one node's standing decision, a pure function of what it sees, time and chance.

Two reasons: another stage is poor for its work (rare, damped, after a long stay), or it has lost its last node (soon).
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from noloco_node.placement.balancing import (
    Server,
    plan_move,
    rescue_rank,
    rescue_wait,
    supply_of,
    unserved_stages,
    worth_moving,
)

LOOKS_A_STAY = 20
"""A node looks so many times for a poorer stage within the shortest stay."""
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
    _next_look: float = field(init=False)
    _unserved_since: dict[int, float] = field(default_factory=dict[int, float], init=False)
    _empty_since: dict[int, float] = field(default_factory=dict[int, float], init=False)
    _rescues: dict[int, float] = field(default_factory=dict[int, float], init=False)
    _shut: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._next_look = self.standing.since + self.standing.stay_seconds * self.rng.uniform(1.0, 1.0 + self._pause)

    @property
    def next_look(self) -> float:
        """When it looks for a poorer stage again, seconds; for lost ones it looks at every call."""
        return self._next_look

    @property
    def _pause(self) -> float:
        """Time between two looks, in stays."""
        return 1.0 / LOOKS_A_STAY

    def look(self, now: float, here: Server, others: Sequence[Server], *, shut: bool = False) -> Move | None:
        """Move now, or None. `here` is this node, `others` are all others that count. `shut`: nothing gets through to
        the next stage, as the nodes of this one see, even if peers answer there. It is for them to rescue it."""
        self._shut = here.stage + 1 if shut else None
        lost = self._lost(now, [*others, here])
        return self._rescue(now, here, others, lost) or self._balance(now, here, others)

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
        if now < self._next_look:
            return None
        self._next_look = now + self.standing.stay_seconds * self._pause * self.rng.uniform(0.5, 1.5)
        supply = supply_of([*others, here], self.standing.work)
        fitting = [stage for stage in self.standing.fitting if stage not in self._unserved_since]
        target = plan_move(supply, here.stage, here.strength, fitting, self.rng)
        return None if target is None else Move(target, "poor")
