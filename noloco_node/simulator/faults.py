"""Schedules of faults as data: drawn from a seed, and written down as JSON.

The moment of each fault is a share of the run, so it comes in every run that does not stand still.
"""

from __future__ import annotations

import random
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from noloco_node.node.checks import CLOCK_LIMIT_SECONDS

_Node = Annotated[int, Field(ge=0, lt=4096)]
"""The number of a node, in the order in which they start."""
_Seconds = Annotated[float, Field(gt=0.0, le=86_400.0, allow_inf_nan=False)]

MOST_SKEW_SECONDS = CLOCK_LIMIT_SECONDS - 0.1
"""Nodes whose clock is further off do not start."""


class _Fault(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    at: Annotated[float, Field(ge=0.0, le=1.0)]
    """Share of the run's target that the furthest clock has reached when it strikes."""


class Death(_Fault):
    """A node dies without a word. `silent`: its machine is gone, and nobody is told that streams have broken."""

    kind: Literal["death"] = "death"
    node: _Node
    silent: bool = False


class Freeze(_Fault):
    """A node stands still for so long, its links open."""

    kind: Literal["freeze"] = "freeze"
    node: _Node
    seconds: _Seconds


class Partition(_Fault):
    """These nodes and the others do not reach each other for so long; what was sent arrives afterwards."""

    kind: Literal["partition"] = "partition"
    nodes: tuple[_Node, ...]
    seconds: _Seconds


class SlowLink(_Fault):
    """A node's link takes so many times as long."""

    kind: Literal["slow_link"] = "slow_link"
    node: _Node
    times: Annotated[float, Field(gt=1.0, le=10_000.0)]
    seconds: _Seconds


class LostMessages(_Fault):
    """So many calls to a node come to nothing: `request` before they are there, `answer` on the way back, `dial`
    without a stream."""

    kind: Literal["lost_messages"] = "lost_messages"
    node: _Node
    what: Literal["request", "answer", "dial"]
    calls: Annotated[int, Field(gt=0, le=1000)]


class LateMessages(_Fault):
    """So many calls to a node arrive so much later."""

    kind: Literal["late_messages"] = "late_messages"
    node: _Node
    calls: Annotated[int, Field(gt=0, le=1000)]
    seconds: _Seconds


class RepeatedMessages(_Fault):
    """So many calls to a node arrive twice."""

    kind: Literal["repeated_messages"] = "repeated_messages"
    node: _Node
    calls: Annotated[int, Field(gt=0, le=1000)]


class FullDisk(_Fault):
    """A node's disk takes no checkpoint for so long."""

    kind: Literal["full_disk"] = "full_disk"
    node: _Node
    seconds: _Seconds


class SkewedClock(_Fault):
    """A node's clock is set wrong by so much."""

    kind: Literal["skewed_clock"] = "skewed_clock"
    node: _Node
    by: Annotated[float, Field(ge=-MOST_SKEW_SECONDS, le=MOST_SKEW_SECONDS)]
    """Seconds; positive: ahead."""


class Twin(_Fault):
    """Somebody starts a second node with a node's key."""

    kind: Literal["twin"] = "twin"
    node: _Node


class Liar(_Fault):
    """A node turns hostile.

    Its gradients are `flipped`, `huge` or `nan`, its weights `huge`, its clock `ahead`. Or it answers `busy` to all, or
    agrees to exchanges and is `mute` then.
    """

    kind: Literal["liar"] = "liar"
    node: _Node
    how: Literal["flipped", "huge", "nan", "weights", "ahead", "busy", "mute"]


class Join(_Fault):
    """A node joins, at the stage that needs it most."""

    kind: Literal["join"] = "join"


class Leave(_Fault):
    """A node is told to stop, and comes back after so long, from its checkpoint; never where None."""

    kind: Literal["leave"] = "leave"
    node: _Node
    back_after: _Seconds | None = None


class Crash(_Fault):
    """A node dies and is started again after so long, from its checkpoint."""

    kind: Literal["crash"] = "crash"
    node: _Node
    back_after: _Seconds


class Relocate(_Fault):
    """A node leaves for another stage, as where that one is poor."""

    kind: Literal["relocate"] = "relocate"
    node: _Node
    stage: Annotated[int, Field(ge=0, lt=256)]


class LostStage(_Fault):
    """All nodes that serve a stage die at once."""

    kind: Literal["lost_stage"] = "lost_stage"
    stage: Annotated[int, Field(ge=0, lt=256)]


AnyFault = (
    Death
    | Freeze
    | Partition
    | SlowLink
    | LostMessages
    | LateMessages
    | RepeatedMessages
    | FullDisk
    | SkewedClock
    | Twin
    | Liar
    | Join
    | Leave
    | Crash
    | Relocate
    | LostStage
)
DrawnFault = Annotated[AnyFault, Field(discriminator="kind")]

KINDS: tuple[str, ...] = tuple(each.model_fields["kind"].default for each in get_args(AnyFault))
ENDS_NODES = frozenset({"death", "crash", "leave", "lost_stage", "twin", "liar"})
"""After these kinds of faults a node's samples, or its account, may be gone with it."""


class Schedule(BaseModel):
    """One swarm and what befalls it. The seed also draws devices, links, routes and partners."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seed: int
    replicas: Annotated[tuple[Annotated[int, Field(gt=0, le=64)], ...], Field(min_length=1, max_length=8)]
    """Nodes of each stage at the start."""
    faults: tuple[DrawnFault, ...] = ()
    standby_copies: Annotated[int, Field(ge=0, le=64)] = 0
    """Nodes of other stages that keep a copy of each stage."""

    @property
    def nodes(self) -> int:
        """Nodes at the start."""
        return sum(self.replicas)

    @property
    def stages(self) -> int:
        """Stages of the run."""
        return len(self.replicas)

    @model_validator(mode="after")
    def _of_this_swarm(self) -> Schedule:
        """A fault of nobody would never strike."""
        for fault in self.faults:
            stage = getattr(fault, "stage", None)
            if stage is not None and stage >= self.stages:
                raise ValueError(f"a {fault.kind} is of stage {stage}, and replicas names {self.stages} stages")
            named = fault.nodes if isinstance(fault, Partition) else (getattr(fault, "node", 0),)
            most = self.nodes + len(self.faults)  # each brings one more node at the most
            if any(node >= most for node in named):
                raise ValueError(f"a {fault.kind} is of node {max(named)}, and replicas names {self.nodes} nodes")
        return self

    def with_faults(self, faults: tuple[DrawnFault, ...]) -> Schedule:
        """This swarm under other faults."""
        return self.model_copy(update={"faults": faults})


FAULT: TypeAdapter[DrawnFault] = TypeAdapter(DrawnFault)


def draw(seed: int, fewest: int = 4, most: int = 8, kinds: tuple[str, ...] = KINDS) -> Schedule:
    """The schedule of this seed for a swarm of `fewest` to `most` nodes, of these kinds of faults. There is one fault
    for two nodes on average, of two or three kinds, since what never comes together cannot be found apart. A quarter of
    the swarms of several stages keeps copies."""
    rng = random.Random(f"faults/{seed}")
    nodes = rng.randint(fewest, most)
    stages = rng.choice([count for count in (1, 2, 2, 2, 3, 3) if 2 * count <= nodes])
    replicas = [nodes // stages] * stages
    for _ in range(nodes % stages):
        replicas[rng.randrange(stages)] += 1
    mixed = rng.sample(kinds, min(len(kinds), rng.choice((1, 2, 3, 4))))
    count = 1 + min(rng.randrange(nodes), rng.randrange(nodes))
    faults = [_draw_one(rng, rng.choice(mixed), nodes, stages) for _ in range(count)]
    faults.sort(key=lambda fault: fault.at)
    return Schedule(
        seed=seed, replicas=tuple(replicas), faults=tuple(faults), standby_copies=_draw_standby_copies(seed, stages)
    )


def _draw_standby_copies(seed: int, stages: int) -> int:
    """Apart from the rest, so that a seed's faults are what they were before copies were drawn."""
    return random.Random(f"guards/{seed}").choice((0, 0, 0, 1)) if stages > 1 else 0


def _draw_one(rng: random.Random, kind: str, nodes: int, stages: int) -> DrawnFault:
    drawn: dict[str, object] = {"kind": kind, "at": round(rng.choice((rng.random(), rng.random(), 1.0)), 3)}
    if kind not in ("partition", "join", "lost_stage"):
        drawn["node"] = rng.randrange(nodes)
    seconds = round(10 ** rng.uniform(-0.5, 1.6), 2)
    match kind:
        case "death":
            drawn["silent"] = rng.random() < 0.5
        case "freeze" | "full_disk":
            drawn["seconds"] = seconds
        case "partition":
            drawn["nodes"] = tuple(sorted(rng.sample(range(nodes), rng.randint(1, nodes // 2))))
            drawn["seconds"] = seconds
        case "slow_link":
            drawn |= {"times": round(10 ** rng.uniform(0.5, 3.0), 1), "seconds": seconds}
        case "lost_messages":
            drawn |= {"what": rng.choice(("request", "answer", "dial")), "calls": rng.randint(1, 20)}
        case "late_messages":
            drawn |= {"calls": rng.randint(1, 20), "seconds": seconds}
        case "repeated_messages":
            drawn["calls"] = rng.randint(1, 20)
        case "skewed_clock":
            drawn["by"] = round(rng.uniform(-MOST_SKEW_SECONDS, MOST_SKEW_SECONDS), 2)
        case "liar":
            drawn["how"] = rng.choice(("flipped", "huge", "nan", "weights", "ahead", "busy", "mute"))
        case "leave":
            drawn["back_after"] = rng.choice((None, seconds))
        case "crash":
            drawn["back_after"] = seconds
        case "relocate" | "lost_stage":
            drawn["stage"] = rng.randrange(stages)
        case _:
            pass
    return FAULT.validate_python(drawn)
