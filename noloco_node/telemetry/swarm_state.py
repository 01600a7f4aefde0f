"""A whole swarm as an onlooker sees it: what a seed's pages and `noloco-node watch` show."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Literal

from noloco_node.errors import SHOWN
from noloco_node.telemetry.node_state import NodeSeen, seconds_to

STATES = ("joining", "training", "finishing", "draining")
"""A node may say this of itself while it is there."""
SERVING = ("training", "finishing")
OTHER_VERSIONS = "other"

SwarmDocument = dict[str, Any]
NodeChange = Literal["joined", "left", "lost", "reassigned"]


@dataclass(frozen=True, slots=True)
class Departed:
    """A node that has gone, as it was last seen."""

    peer_id: str
    stage: int
    name: str
    tokens: int
    """Its last word."""
    seen_seconds: float
    until: float
    """Wall time at which it was missed."""


@dataclass(frozen=True, slots=True)
class Middle:
    """The median of what nodes say."""

    value: float
    nodes: int
    """The nodes that say anything."""

    @classmethod
    def of(cls, words: Iterable[float | None]) -> Middle | None:
        """The median of these words; None is a node that says nothing, or that none says anything."""
        said = [word for word in words if word is not None]
        return cls(median(said), len(said)) if said else None


@dataclass(frozen=True, slots=True)
class StageSeen:
    """A stage. Only `unreachable` is of nodes that do not answer."""

    nodes: Mapping[str, int]
    """Nodes by what they say they do; all of `STATES` are there."""
    unreachable: int
    """The number of live records without an answering peer that says the same."""
    capacity: float
    """Tokens/s that its nodes say they could train, no word believed beyond a multiple of the median."""
    clock: float | None
    """Median of its serving nodes, swarm tokens; None where there is none."""
    lag: float | None
    """Swarm tokens by which the last of them is behind the swarm's count."""
    missing: bool
    """No answering peer serves it, and the run is not over."""
    replica_divergence: Middle | None = None
    """Variance of a weight of it across its replicas that train."""

    @property
    def serving(self) -> int:
        """Nodes that train, or serve others to the end."""
        return sum(self.nodes[state] for state in SERVING)

    @property
    def present(self) -> int:
        """All that answer."""
        return sum(self.nodes.values())


@dataclass(frozen=True, slots=True)
class Happening:
    """A node came, went or moved."""

    time: float
    """Wall time at which it was seen."""
    what: NodeChange
    peer_id: str
    stage: int
    name: str = ""


@dataclass(frozen=True, slots=True)
class Followed:
    """What is remembered of a peer from one look to the next."""

    stage: int
    state: str
    finished: bool
    counted: bool
    """It has answered, and was counted as a node."""
    points: tuple[tuple[float, float], ...]
    """Its clock (swarm tokens) at the times at which it published it, the oldest first."""
    name: str = ""
    tokens: int = 0
    seen_seconds: float = 0.0
    """For which it was seen to train."""


@dataclass(frozen=True, slots=True)
class SwarmView:
    """A swarm at one moment."""

    time: float
    """Wall time."""
    run_id: str
    run_name: str
    target: int
    """Swarm tokens."""
    stages: tuple[StageSeen, ...]
    nodes: tuple[NodeSeen, ...] = ()
    """`MOST_NODES` at most, those that answer first; by stage and peer id."""
    introduced: int = 0
    """The number of peers with a live record; more than `nodes` in a large swarm."""
    clock: float = 0.0
    """Median of the first stage's nodes that train, newcomers aside, swarm tokens; as it last was where nobody is
    there. It runs back only where theirs stay behind it."""
    looked: float = 0.0
    """DHT time of this look."""
    behind_since: float | None = None
    """DHT time since which that median is behind `clock`."""
    training_loss: Middle | None = None
    """The training loss of the last stage's nodes that train, nats per token. This and the next two stay as they last
    were if no node says anything."""
    validation_loss: Middle | None = None
    """The last evaluations on the held-out text by the first stage's nodes that train."""
    replica_divergence: Middle | None = None
    """Variance of a weight across replicas, over the nodes of all stages that train."""
    tokens_per_second: float | None = None
    """Tokens a second of the whole swarm; None if nothing is known."""
    speed_from: Literal["progress", "records"] | None = None
    """Whether that is measured by how its tokens grow, or what the nodes of the first stage say together."""
    versions: Mapping[str, int] = field(default_factory=dict[str, int])
    """Nodes that answer, by version; `OTHER_VERSIONS` for those without a name of their own."""
    named_versions: tuple[str, ...] = ()
    """Those that have one, from the first look on."""
    joins: int = 0
    """Nodes that have come since this was first looked at, those found then included."""
    left: int = 0
    """Nodes that went with a farewell."""
    lost: int = 0
    """Nodes that vanished without one."""
    reassignments: int = 0
    """To another stage."""
    happenings: tuple[Happening, ...] = ()
    """The last ones, the oldest first."""
    over: bool = False
    """The run has come to its end."""
    departed: tuple[Departed, ...] = ()
    """`MOST_NODES` at most, those that were seen at work for the longest time; the last ones to go first."""
    followed: Mapping[str, Followed] = field(default_factory=dict[str, Followed])
    """For the next look."""

    @property
    def present(self) -> int:
        """Nodes that answer."""
        return sum(stage.present for stage in self.stages)

    @property
    def missing(self) -> tuple[int, ...]:
        """Stages that nobody serves."""
        return tuple(number for number, stage in enumerate(self.stages) if stage.missing)

    @property
    def seconds_left(self) -> float | None:
        """To the target at this speed; None where that is not known, or a stage is missing."""
        return None if self.over or self.missing else seconds_to(self.target, self.clock, self.tokens_per_second)


def document(view: SwarmView) -> SwarmDocument:
    """The view as JSON can say it."""
    named = (
        "time",
        "target",
        "introduced",
        "tokens_per_second",
        "speed_from",
        "joins",
        "reassignments",
        "over",
    )
    return {
        **{name: getattr(view, name) for name in named},
        "trained_tokens": view.clock,
        "run": {"id": view.run_id, "name": view.run_name},
        "state": state_of(view),
        "seconds_left": view.seconds_left,
        "nodes_answering": view.present,
        "missing_stages": list(view.missing),
        "stages": [_stage(stage) for stage in view.stages],
        "versions": dict(view.versions),
        "departures": {"left": view.left, "lost": view.lost},
        **{name: _middle(getattr(view, name)) for name in ("training_loss", "validation_loss", "replica_divergence")},
        "nodes": [node.model_dump(by_alias=True, exclude_unset=True) for node in view.nodes],
        "departed": [asdict(one) for one in view.departed],
        "happenings": [asdict(one) for one in view.happenings],
    }


def state_of(view: SwarmView) -> str:
    """The swarm in one word."""
    if view.over:
        return "over"
    if not view.present:
        return "empty"
    if view.missing:
        return "missing_stage"
    return "training" if any(stage.nodes["training"] for stage in view.stages) else "finishing"


def version_labels(known: Sequence[str], found: Mapping[str, int]) -> tuple[str, ...]:
    """Versions to be counted by name: those already `known`, then the most frequent that were found, as far as there
    is room. A stranger that changes its version each minute does not add a name each minute."""
    by_number = sorted((version for version in found if version not in known), key=lambda each: (-found[each], each))
    return (*known, *by_number)[:SHOWN]


def _stage(stage: StageSeen) -> SwarmDocument:
    names = ("unreachable", "capacity", "lag", "missing", "serving")
    told = {name: getattr(stage, name) for name in names}
    return {
        "nodes": dict(stage.nodes),
        "trained_tokens": stage.clock,
        **told,
        "replica_divergence": _middle(stage.replica_divergence),
    }


def _middle(middle: Middle | None) -> SwarmDocument | None:
    return None if middle is None else asdict(middle)
