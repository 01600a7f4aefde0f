"""The records of the directory: one DHT key a stage, one subkey a peer, a short life, a signature."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, NamedTuple, Protocol

from pydantic import BaseModel, ConfigDict, Field

from noloco_node.ambient import SOON_SECONDS
from noloco_node.config.data_spec import MOST_ROWS
from noloco_node.config.node_settings import NodeName
from noloco_node.data.shared_turns import MOST_CLAIMS
from noloco_node.identity.invitations import Proof
from noloco_node.identity.peer_id import PeerId
from noloco_node.transport.messages import BirthId


class PeerState(StrEnum):
    """What a node says of itself."""

    JOINING = "joining"
    TRAINING = "training"
    FINISHING = "finishing"
    """Its training is over; it still serves others and averages a last time."""
    DRAINING = "draining"
    GONE = "gone"


MOST_SAID = MOST_CLAIMS * MOST_ROWS
"""A record has at most so many slots: for each source of a mixture as many as for a single text."""


class SlotClaim(NamedTuple):
    """A slot in the row of the text's blocks that a replica of stage 0 has taken."""

    slot: Annotated[int, Field(ge=0, le=1 << 48)]
    position: Annotated[int, Field(ge=0, le=1 << 48)]
    """Windows of its block that are drawn."""
    begun: bool
    """Whether it is being read; else it is the next."""


MOST_SHOWN = 1e12
_Figure = Annotated[float, Field(ge=0.0, le=MOST_SHOWN, allow_inf_nan=False)]


class OwnWord(BaseModel):
    """What a node lets others see of it, by its own word. Nothing is decided by its figures, and onlookers show
    medians."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: NodeName = ""
    """The volunteer's name for it (`node.name`); others may bear the same."""
    tokens: Annotated[int, Field(ge=0, le=1 << 60)] = 0
    """The tokens behind its inner steps, those of earlier lives included."""
    training_loss: _Figure | None = None
    """The mean loss of its last inner steps, nats per token."""
    validation_loss: _Figure | None = None
    """The loss of its last evaluation on the held-out text, nats per token; stage 0 alone takes one."""
    replica_divergence: _Figure | None = None
    """mean((θ_i − θ_j)²)/2 at its last averaging with a stage peer."""
    paused: bool = False
    """It has left for a while (its state is `draining`): its volunteer uses device or line otherwise."""


NOTHING_SHOWN = OwnWord()


class PeerRecord(BaseModel):
    """One node's entry. Tolerant of fields that newer versions add; bounded in those it knows."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    peer_id: Annotated[str, Field(min_length=10, max_length=128)]
    stage: Annotated[int, Field(ge=0, lt=256)]
    state: PeerState
    clock: Annotated[float, Field(ge=0.0, le=1e18, allow_inf_nan=False)] = 0.0
    """Clock in swarm tokens."""
    tokens_per_second: Annotated[float, Field(ge=0.0, le=1e12, allow_inf_nan=False)] = 0.0
    capacity: Annotated[float, Field(ge=0.0, le=1e12, allow_inf_nan=False)] = 0.0
    """Tokens per second that it could train at this stage if it never had to wait; 0 while it does not know."""
    standby_of: Annotated[int, Field(ge=0, lt=256)] | None = None
    """The stage of which it keeps a copy."""
    outer_steps_taken: Annotated[int, Field(ge=0, le=1 << 40)] = 0
    finished: bool = False
    """It has trained to the run's end. It says so after it left, too, for nodes that read the directory every few
    seconds."""
    newcomer: bool = False
    """It has just joined and is not averaged with yet: it dials others."""
    slots: Annotated[tuple[SlotClaim, ...], Field(max_length=MOST_SAID)] = ()
    """The slots that it reads of a text that the replicas share."""
    protocol: Annotated[int, Field(ge=0, le=1 << 16)]
    version: Annotated[str, Field(max_length=32)]
    sequence: Annotated[int, Field(ge=0, le=1 << 53)] = 0
    """Rises with each publication of a node: of two records the higher is newer."""
    invitation: Proof | None = None
    """Shows that the run's owner has invited the peer."""
    birth: BirthId | None = None
    """The life of the run in which it takes part; None for older releases."""
    shown: OwnWord = NOTHING_SHOWN
    """One field, since an older release bears few that it does not know."""

    @property
    def shown_state(self) -> str:
        """What the node does, in a word for a person."""
        return "paused" if self.shown.paused else self.state.value


@dataclass(frozen=True, slots=True)
class LiveRecord:
    """A record and the DHT time at which its life ends."""

    record: PeerRecord
    expires: float
    signed: bytes = b""
    """What the owner signed, as it can be told to others; empty where records are not signed (in memory)."""
    level: int = 0
    """The level of the bucket that it was signed for."""


@dataclass(frozen=True, slots=True)
class SignedRecord:
    """A record as its owner signed it for its place, to be told to others; the node that takes it in checks it."""

    stage: int
    peer: PeerId
    expires: float
    """DHT time, seconds."""
    signed: bytes
    level: int = 0
    """The level of the bucket that it was signed for."""


class Scale(NamedTuple):
    """For how many records of a stage each one in a view stands."""

    each: float = 1.0
    """1 where all are seen."""
    whole: bool = True
    """Whether all records of the stage are in the view."""


EVERYBODY = Scale()
SERVING = (PeerState.TRAINING, PeerState.FINISHING)
NOT_GONE = tuple(state for state in PeerState if state is not PeerState.GONE)


def _no_rows() -> dict[int, tuple[LiveRecord, ...]]:
    return {}


@dataclass(frozen=True, slots=True)
class DirectoryView:
    """The directory as it was read last: for each stage, its records by peer id.

    The reader judges the life of each record. A stage that is too large to be read whole is a sample, drawn at random
    by the hash of the peer id.
    """

    stages: tuple[Mapping[PeerId, LiveRecord], ...]
    scales: tuple[Scale, ...] = ()
    """By stage; where there is none, everybody is seen."""
    _ordered: dict[int, tuple[LiveRecord, ...]] = field(default_factory=_no_rows, init=False, repr=False, compare=False)
    """Rows by peer id, of the stages that were asked for: the same view is asked many questions."""

    def live(self, stage: int, now: float, *states: PeerState) -> tuple[PeerRecord, ...]:
        """Records of `stage` that live at DHT time `now` and are in one of `states`, ordered by peer id.

        If no state is named, it is any but GONE.
        """
        wanted = states or NOT_GONE
        return tuple(row.record for row in self._rows(stage) if row.expires > now and row.record.state in wanted)

    def _rows(self, stage: int) -> tuple[LiveRecord, ...]:
        ordered = self._ordered.get(stage)
        if ordered is None:
            rows = self.stages[stage]
            ordered = self._ordered[stage] = tuple(rows[peer] for peer in sorted(rows))
        return ordered

    def scale(self, stage: int) -> Scale:
        """For how many of a stage each of its records here stands."""
        return self.scales[stage] if stage < len(self.scales) else EVERYBODY

    def number(self, stage: int, now: float, *states: PeerState) -> int:
        """The number of records of `stage` that live at DHT time `now` in one of `states` (see `live`).

        It is an estimate if only a sample of them is here.
        """
        return round(len(self.live(stage, now, *states)) * self.scale(stage).each)

    def anyone(self, now: float) -> bool:
        """Whether anybody lives at DHT time `now`, at whatever stage."""
        return any(self.live(stage, now) for stage in range(len(self.stages)))

    def everyone(self, now: float) -> list[PeerRecord]:
        """Records of all that live at DHT time `now`, stage by stage."""
        return [record for stage in range(len(self.stages)) for record in self.live(stage, now)]

    def without(self, peer: PeerId) -> DirectoryView:
        """This view without one peer: a node that comes back finds its former life's record still there.

        It must not take itself for somebody else.
        """
        rest = tuple({p: row for p, row in rows.items() if p != peer} for rows in self.stages)
        return DirectoryView(rest, self.scales)


class Directory(Protocol):
    """Where nodes find each other. Implementations: `DhtDirectory`, `ScreenedDirectory`; in tests `MemoryDirectory`."""

    @property
    def view(self) -> DirectoryView:
        """The last view read; empty before the first `refresh`."""
        ...

    @property
    def no_room(self) -> Mapping[str, int]:
        """Records of others so far that had no room here, by what was full (`store.NoRoom`)."""
        ...

    def now(self) -> float:
        """The time in which records expire (DHT time), seconds."""
        ...

    async def publish(self, record: PeerRecord, life: float) -> bool:
        """Store this node's record for `life` seconds. False when no peer took it (never raises for that)."""
        ...

    async def refresh(self) -> DirectoryView:
        """Read all stages anew, each look-up with a deadline of its own; one that fails keeps the stage's last rows."""
        ...

    def to_tell(self, most: int) -> tuple[SignedRecord, ...]:
        """The records to tell a peer, `most` in all.

        First come this node's own live records, the newest first, then others, those that work before those that only
        answer.
        """
        ...

    def read(self, row: SignedRecord) -> PeerRecord | None:
        """The record, if its owner signed it for its place and this node deals with it; its life may be over."""
        ...

    def told(self, teller: PeerId, records: Sequence[SignedRecord]) -> int:
        """Take in what `teller` told: what its owner signed, and lives, is in the view from the next `refresh` on. How
        many were taken. Never raises."""
        ...


REFRESH_SECONDS = 2.0
"""The directory is read every so many seconds, or more often where records live shorter. A look that finds somebody
waits at most as long for nodes that stall."""
MAX_LIFE_SECONDS = 3600.0
"""A record that claims to live more than so many seconds from now is not held: its owner could never leave. Each node
reads level 0 of a large stage as often."""
WITHDRAWAL_SECONDS = 5.0
"""A withdrawal lives so many seconds longer than a record, or earlier ones would come back to life."""
FIRST_LOOK_SECONDS = 10.0
"""A newcomer looks for others, and asks those that it sees, for so many seconds each before anything is decided."""


async def look_for_others(directory: Directory, own: PeerId, seconds: float) -> DirectoryView:
    """The directory without `own`'s former record, as soon as it shows another node, after `seconds` at the latest."""
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    while True:
        view = (await directory.refresh()).without(own)
        if view.anyone(directory.now()) or loop.time() >= until:
            return view
        # The directory gives no sign of a change: asking again is the only way.
        await asyncio.sleep(SOON_SECONDS)
