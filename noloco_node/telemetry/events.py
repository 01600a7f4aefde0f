"""The event file: what a node did, as typed JSON lines. Tests, live display and report read these, never log text.

A node's file keeps all events, but of the accounts the fewer the longer it has been running.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, cast

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator

from noloco_node import ambient
from noloco_node.config.files import SMALL_BYTES, is_plain

logger = logging.getLogger(__name__)

WarningKind = Literal[
    "checkpoints_unusable",
    "stage_lost",
    "state_elsewhere",
    "last_of_stage",
    "memory_short",
    "text_damaged",
    "invitation_ends",
    "clock_wrong",
    "identity_shared",
    "another_life",
]
"""Warnings for the user that runs a node."""

TrainedTokens = Annotated[
    float, Field(validation_alias=AliasChoices("trained_tokens", "clock"), serialization_alias="trained_tokens")
]
"""Tokens that the whole swarm has trained, as this replica counts them. It is `trained_tokens` for readers, and was
`clock` in the release before this one."""


class Event(BaseModel):
    """Base of all events. `time` is wall time in seconds since 1970."""

    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_inf_nan="strings")  # null would not be read back

    time: float = Field(default_factory=ambient.wall)

    @field_validator("detail", "error", "path", check_fields=False)
    @classmethod
    def _encodable(cls, text: str | None) -> str | None:
        # They may name a file, and a name that is not UTF-8 holds lone surrogates, which no event file takes.
        return text and text.encode(errors="replace").decode()


class NodeStarted(Event):
    """The daemon is up: its p2pd listens, its stage is built, it is about to advertise itself."""

    event: Literal["node_started"] = "node_started"
    peer_id: str
    stage: int
    stages: int
    run_id: str
    run_name: str
    version: str
    pid: int
    addresses: list[str]
    metrics_address: str | None
    parameters: int
    """Parameters of this stage."""
    origin: Literal["seed", "peer", "standby", "checkpoint"]
    """`seed`: weights from the RunSpec's seed; `peer`: copied from a stage peer; `checkpoint`: this node's own.
    `standby`: nobody served the stage, and they are a copy that a node of another stage kept."""
    resumed: bool = False
    """True where books and data position go on from an earlier life of this node."""
    device: str = ""
    """What the stage computes on: `cpu`, or the name of the GPU."""
    peak_flop_per_second: float | None = None
    """Peak of the device at the run's precision; None if it is not known."""
    flop_per_token: float = 0.0
    """Forward and backward of this stage."""
    codec: str = ""
    """Codec of the run's outer steps."""
    outer_steps_taken: int = 0
    """Of the state that it begins with."""
    invites: list[str] = Field(default_factory=list[str])
    """The commands that others join with, one for each address."""
    founded: bool = False
    """It was given no peer to enter by: it began a swarm, or is to be found by others."""


class NodeReassigned(Event):
    """The daemon has left its stage and is about to advertise itself at another."""

    event: Literal["node_reassigned"] = "node_reassigned"
    from_stage: int
    stage: int
    why: Literal["poor", "lost"]
    """`poor`: the stage had too little throughput; `lost`: nobody served it any more, or nothing got through to it."""
    origin: Literal["seed", "peer", "standby", "checkpoint"]
    """Source of the weights: the RunSpec's seed, a stage peer, a copy that a node of another stage kept, or an own
    earlier checkpoint."""
    clock: TrainedTokens
    parameters: int
    """Parameters of the new stage."""
    outer_steps_taken: int = 0
    """Of that state."""
    seconds: float
    """From the decision to the new stage's state."""
    flop_per_token: float = 0.0


class InnerStep(Event):
    """One inner step."""

    event: Literal["inner_step"] = "inner_step"
    step: int
    """Inner steps taken by this replica."""
    clock: TrainedTokens
    """After the step."""
    tokens: int
    """Tokens behind the step's gradient."""
    loss: float
    """Training loss of those tokens, nats per token."""
    learning_rate: float
    gradient_norm: float
    skipped: bool
    """True where the accumulated gradient was not finite and the weights were left alone."""
    live_replicas: int


class OuterStep(Event):
    """One outer step, or an exchange that was agreed and came to nothing (`aborted`)."""

    event: Literal["outer_step"] = "outer_step"
    kind: Literal["paired", "no_partner", "aborted", "caught_up"]
    outer_steps_taken: int
    """Outer steps this replica has committed, this one included (`aborted` does not count)."""
    step: int
    """Inner steps taken by this replica at the snapshot."""
    clock: TrainedTokens
    learning_rate: float
    partner: str | None
    role: Literal["dialler", "dialled", "none"]
    reason: str
    """Why it was aborted, or taken without a partner, as `word: what was said`; empty for pairs. A word is a refusal's,
    or `left`, `stale`, `stalled`, `slow`, `not_finite`, `unreachable`, `broken_stream`, `deadline_passed`,
    `protocol_violation`, `link`. A step without a partner has `nobody`, or `refused` with the proposals since the last
    step, by word."""
    replica_divergence: float | None
    """mean((θ_i − θ_j)²)/2 over the sampled weights: estimates the variance across replicas."""
    difference_norm: float | None
    """Norm of the difference to the partner, before clipping."""
    clipped: bool
    bytes_sent: int
    bytes_received: int
    seconds: float
    """From the proposal to the commit; training goes on meanwhile."""
    held_seconds: float
    """Time for which snapshot and apply kept the device from training."""
    inner_steps_meanwhile: int
    """Inner steps taken during the exchange, which the commit kept."""
    one_sided: bool = False
    """The partner gave only, as to a newcomer: it took no step with this one, and the mean over replicas moved."""


class SourceLoss(BaseModel):
    """Held-out loss on one source of a mixture."""

    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_inf_nan="strings")

    source: str
    """Name of the source, as `run.data` shows it."""
    loss: float
    """Nats per token."""
    tokens: int


class Evaluation(Event):
    """Held-out loss through the swarm, over the run's fixed windows."""

    event: Literal["evaluation"] = "evaluation"
    clock: TrainedTokens
    step: int
    loss: float
    """Nats per token."""
    tokens: int
    final: bool
    """True for the one taken after the last inner step."""
    sources: list[SourceLoss] = []
    """Held-out losses of a mixture, for each source with windows held out."""


class Strangers(BaseModel):
    """What peers have done to this node so far, and what became of it."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    offences: dict[str, int] = {}
    """By kind (`peers.scorecard.Offence`)."""
    bans: dict[str, int] = {}
    """By the offence that brought them."""
    banned_now: int = 0
    audits: dict[str, int] = {}
    """Audits of next-stage peers, by finding (`pipeline.audit.Finding`)."""
    set_aside_now: int = 0
    """Next-stage peers that are set aside, because audits went against them."""
    bounded: dict[str, int] = {}
    """What went beyond a bound on norms: `activations` refused for their scale, gradients `returned` by the next stage
    and `caused` by others' microbatches scaled down."""
    no_room: dict[str, int] = {}
    """Records of others in the directory that were not taken in, or gave way to another, by what was full.
    `places`: those of its key, or of all. `bringer`: as many of others as one peer may bring. `checks`: new signatures
    to check."""


class Distribution(BaseModel):
    """How often values fell below each of `bounds` and above the one before, the last beyond all; and their sum."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float


MICROBATCH_OUTCOMES = ("drawn", "trained", "dropped", "requeued", "retried", "repeated", "served")
"""These counts of `Account` only ever rise, and a node that comes home goes on with them."""


class Account(Event):
    """The books of a node so far. On stage 0: drawn = trained + dropped + held_at_end."""

    event: Literal["account"] = "account"
    clock: TrainedTokens
    target: int
    tokens: int
    """Tokens trained by this replica."""
    drawn: int
    """Samples that stage 0 took from the text."""
    trained: int
    """Samples of stage 0."""
    dropped: int
    """Samples given up after `run.pipeline.requeues`."""
    held_at_end: int
    """Samples drawn and neither trained nor dropped at this moment: under way, or requeued and waiting."""
    requeued: int
    """Times that a sample was put back."""
    retried: int
    """Asks that came to nothing, and were followed by another."""
    repeated: int
    """Asks that broke off, so that nobody knows whether the microbatch was trained there. Also an id that was trained
    here before, under another sender or with another content."""
    served: int
    """Microbatches of other peers trained here, counted before the answer goes out. Repeats and evaluations are not."""
    refused: dict[str, int]
    """Refusals given, by reason."""
    bytes_sent: dict[str, int]
    """By kind: microbatches (activations and labels one way, gradients the other), exchange, state, directory, relayed
    (what others send each other through this node), other."""
    bytes_received: dict[str, int]
    bytes_nearby: int = 0
    """Of both, what stayed on this machine, between nodes of one user: it crossed no line."""
    nodes_per_stage: list[int]
    """Live nodes as this one sees them."""
    missing_stages: list[int] = []
    """Stages that nobody serves: microbatches are held back for them."""
    loop_lag_seconds: float
    """Worst lag of the event loop since the last account."""
    busy_seconds: float
    """Time the compute thread has worked since the start."""
    busy_by_work: dict[str, float] = {}
    """Seconds that the compute thread has worked, by `Priority`: step, backward, forward, draw."""
    in_hand: int = 0
    """Microbatches that this node holds: on stage 0 its own under way, elsewhere other nodes'."""
    queued: int = 0
    """Calls that wait for the compute thread."""
    hop_seconds: Distribution | None = None
    """From sending a microbatch on to its gradient; None on the last stage."""
    data_wait_seconds: float = 0.0
    """Time that stage 0 waited for windows of its text."""
    directory_records: int = 0
    """Live records of other nodes."""
    directory_age_seconds: float = 0.0
    """Since the directory was last read."""
    device_memory: dict[str, int] = {}
    """Bytes of a GPU: allocated, reserved, free, total; empty for the processor."""
    strangers: Strangers = Strangers()
    text_slots: dict[str, int] = {}
    """Blocks of a shared text by what became of them here: claimed, finished, yielded (left to another, not begun)."""


class TextBlock(Event):
    """A block of a text that the replicas share: this node has begun or finished it."""

    event: Literal["text_block"] = "text_block"
    source: int | None = None
    """Number of the source in `run.data.mixture`, for a mixture. Each source has blocks and slots of its own."""
    slot: int
    """Its place in the endless row of blocks."""
    block: int
    epoch: int
    """Passes over the whole text before it."""
    position: int
    """Windows of it that are drawn."""
    what: Literal["begun", "finished", "yielded", "given_back"]
    """The last two are of older releases."""


class CheckpointTaken(Event):
    """This node's state was saved, or could not be."""

    event: Literal["checkpoint"] = "checkpoint"
    path: str | None
    """Its folder; None where it could not be written."""
    clock: TrainedTokens
    outer_steps_taken: int
    step: int
    size: int
    """Bytes of its tensors."""
    held_seconds: float
    """Time the compute thread was held by the snapshot."""
    seconds: float
    """From the snapshot until it was on the disk; training goes on meanwhile."""
    error: str
    """Why it could not be written; empty otherwise."""


class StateDownload(Event):
    """A late joiner copies a stage peer's state; about once a second, and at its beginning and end."""

    event: Literal["state_download"] = "state_download"
    source: str
    """Peer id of the stage peer."""
    received: int
    """Bytes that lie here; those of an earlier state source that still fit are among them."""
    total: int
    seconds: float
    """Since this state source was first asked."""


class StateSourceFailed(Event):
    """A stage peer did not give its state; another one is asked."""

    event: Literal["state_source_failed"] = "state_source_failed"
    source: str
    """Peer id of the stage peer."""
    reason: str


class ProbationEnded(Event):
    """A late joiner counts from now on: its stage peers average with it."""

    event: Literal["probation_ended"] = "probation_ended"
    reason: Literal["in_line", "time"]
    """`in_line`: loss and distance are like those of its stage peers; `time`: the bound in inner steps was reached."""
    steps: int
    """Inner steps that it lasted."""


class Doing(Event):
    """What a node does, or waits for; written when that changes."""

    event: Literal["doing"] = "doing"
    what: Literal[
        "joining", "downloading", "training", "waiting_for_work", "waiting_for_peers", "finishing", "draining", "paused"
    ]
    detail: str
    """One line for a person."""
    since: float
    """Wall time at which it began."""


class Warned(Event):
    """A warning for the user that runs this node, which may call for action."""

    event: Literal["warned"] = "warned"
    what: WarningKind
    """`checkpoints_unusable`: all of its checkpoints are damaged. `stage_lost`: its stage begins anew.
    `state_elsewhere`: a peer that is away held the state of its stage. `last_of_stage`: it leaves, and no other replica
    is known. `memory_short`: the system may soon kill it. `text_damaged`: a shard of the text is passed over.
    `invitation_ends`: peers deal with it until its invitation ends, soon or just now. `clock_wrong`: its machine's
    clock is not that of others, and they lose sight of it. `identity_shared`: another node runs with its key.
    `another_life`: somebody else has begun the same run."""
    detail: str
    """What it means and what can be done, for a person."""


class P2pdRestarted(Event):
    """hivemind's p2pd was started again under this node."""

    event: Literal["p2pd_restarted"] = "p2pd_restarted"
    cause: Literal["died", "frozen"]
    """`died`: its process ended; `frozen`: it answered nothing any more, and was killed."""
    restarts: int
    """So far in this life of the node, this one included."""


class Reachability(Event):
    """How others reach the node from now on, as far as peers that dialled it could tell."""

    event: Literal["reachability"] = "reachability"
    way: Literal["unknown", "direct", "relayed", "unreached"]
    words: str
    """How others reach the node, for a person."""


class NodeStopped(Event):
    """A node's last event, also where it ends with an error for its user. A crash or a kill leaves none."""

    event: Literal["node_stopped"] = "node_stopped"
    reason: Literal["target_reached", "interrupted", "failed"]
    detail: str
    outer_steps_taken: int
    partners: dict[str, int]
    """Committed outer steps by partner."""
    final_weights: str | None
    """Folder of the saved state, relative to the run folder."""
    seconds: float


AnyEvent = Annotated[
    NodeStarted
    | NodeReassigned
    | InnerStep
    | OuterStep
    | Evaluation
    | Account
    | TextBlock
    | CheckpointTaken
    | StateDownload
    | StateSourceFailed
    | ProbationEnded
    | Doing
    | Warned
    | P2pdRestarted
    | Reachability
    | NodeStopped,
    Field(discriminator="event"),
]
_ADAPTER: TypeAdapter[AnyEvent] = TypeAdapter(AnyEvent)

OLD_NAMES = {
    "donor": "source",
    "donor_failed": "state_source_failed",
    "node_moved": "node_reassigned",
    "outer_rounds": "outer_steps_taken",
    "put_back": "requeued",
    "round": "outer_steps_taken",
    "spread": "replica_divergence",
}
"""Names of events and of their fields in files of the release before this one, and what each is called now."""
OLD_VALUES = {("origin", "guard"): "standby", ("kind", "alone"): "no_partner"}
"""Values of fields that had another name in the release before this one."""
_OLD = re.compile("|".join(f'"{name}"' for name in (*OLD_NAMES, *(value for _, value in OLD_VALUES))).encode())


class EventFile:
    """Appends events to `path`, one JSON object a line, so that a killed node loses none.

    A half-written last line of an earlier life is cut off. If the disk refuses a line (it is full, say), the line is
    lost whole. One warning comes until it works again: a node goes on training without its diary.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("ab+", buffering=0)
        self._refused = False
        self._size = _whole_lines(path)
        self._cut()

    def write(self, event: Event) -> None:
        """Append one event."""
        line = (event.model_dump_json(by_alias=True) + "\n").encode()
        try:
            if self._refused:
                self._cut()
            written = self._file.write(line)
            if written != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._size = self._file.tell()
        except OSError as error:
            if not self._refused:
                logger.warning("events are lost, %s takes no more: %s", self._path, error.strerror or error)
            self._refused = True
        else:
            self._refused = False

    def close(self) -> None:
        """Close the file; further writes are an error. A disk of the network may say only now that it took no more."""
        try:
            self._file.close()
        except OSError as error:
            logger.warning("the last events may be lost, %s took no more: %s", self._path, error.strerror or error)

    def _cut(self) -> None:
        """Take off what is written beyond the last whole line."""
        if os.fstat(self._file.fileno()).st_size > self._size:
            self._file.truncate(self._size)


def _whole_lines(path: Path) -> int:
    """Bytes up to the end of the last whole line."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - (1 << 16))
            file.seek(start)
            last = file.read(end - start).rfind(b"\n")
            if last >= 0:
                return start + last + 1
            end = start
    return 0


class EventReader:
    """Reads an event file while it grows. A half-written last line is left for the next call; what is no event, another
    version's or a tampered one, is passed over."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.passed_over = 0
        """Lines so far that are no events of this version."""

    def new_events(self) -> Iterator[AnyEvent]:
        """Yield the events appended since the last call; none while the file does not exist."""
        if not is_plain(self._path):
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            while line := file.readline(SMALL_BYTES):  # a file without line ends fills no memory
                if not line.endswith(b"\n") and len(line) < SMALL_BYTES:
                    return
                self._offset += len(line)
                event = self._parsed(line)
                if event is not None:
                    yield event

    def _parsed(self, line: bytes) -> AnyEvent | None:
        try:
            return parse_event(line)
        except ValidationError:
            if not self.passed_over:
                logger.warning("%s holds lines that are no events of this version: passed over", self._path)
            self.passed_over += 1
            return None


def parse_event(line: bytes) -> AnyEvent:
    """One line of an event file, also of the release before this one. Raises pydantic's ValidationError."""
    if _OLD.search(line) is None:
        return _ADAPTER.validate_json(line)
    try:
        old: object = json.loads(line)
    except (ValueError, RecursionError):
        old = None  # pydantic says what is wrong with it
    if not isinstance(old, dict):
        return _ADAPTER.validate_json(line)
    fields = cast("dict[str, object]", old)
    renamed = {OLD_NAMES.get(name, name): _renamed(name, value) for name, value in fields.items()}
    return _ADAPTER.validate_python(renamed)


def _renamed(name: str, value: object) -> object:
    """A field's value by its name of today."""
    if not isinstance(value, str):
        return value
    return OLD_NAMES.get(value, value) if name == "event" else OLD_VALUES.get((name, value), value)


def read_events(path: Path) -> list[AnyEvent]:
    """All complete events of a file."""
    return list(EventReader(path).new_events())


OF_A_LIFE = 1.0 / 1800.0
"""Two accounts in a node's file lie this part of its life apart: within the first hour all are there."""
TOLD_SECONDS = 60.0
"""A node's last account in its file, its log's last line, and the steps behind its speeds are at most so many seconds
old. One account in two seconds, as they are made, would be 41 MB a day."""


class Diary:
    """Writes a node's events to its file. The last account before it stops or moves is in it, and after a kill -9 one
    that is at most `TOLD_SECONDS` old."""

    def __init__(self, file: EventFile) -> None:
        self._file = file
        self._began: float | None = None
        self._last: Account | None = None
        self._withheld: Account | None = None

    def write(self, event: AnyEvent) -> None:
        """Take in one event, in the order of their times."""
        if self._began is None:
            self._began = event.time
        if isinstance(event, Account):
            self._withhold(event)
            if self._is_due(event):
                self._write_withheld()
            return
        if isinstance(event, NodeStopped | NodeReassigned) or (
            isinstance(event, Doing) and event.what in ("joining", "paused")
        ):
            self._write_withheld()
        self._file.write(event)

    def close(self) -> None:
        """Close the file."""
        self._write_withheld()
        self._file.close()

    def _withhold(self, account: Account) -> None:
        worst = max(account.loop_lag_seconds, self._withheld.loop_lag_seconds if self._withheld else 0.0)
        self._withheld = account.model_copy(update={"loop_lag_seconds": worst})

    def _is_due(self, account: Account) -> bool:
        last = self._last
        if last is None or account.time < last.time:  # this machine's clock has been set back
            return True
        life = abs(account.time - (self._began or 0.0))
        return account.time - last.time >= min(TOLD_SECONDS, OF_A_LIFE * life)

    def _write_withheld(self) -> None:
        if self._withheld is not None:
            self._file.write(self._withheld)
            self._last, self._withheld = self._withheld, None
