"""What one node wrote, sorted by kind, over all its lives and stays; and what its device did with its time."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from noloco_node.telemetry.events import (
    TOLD_SECONDS,
    Account,
    AnyEvent,
    CheckpointTaken,
    Evaluation,
    InnerStep,
    NodeReassigned,
    NodeStarted,
    NodeStopped,
    OuterStep,
)


@dataclass(frozen=True, slots=True)
class PastStay:
    """A node's time at a stage that it has left for another."""

    stage: int
    steps: int
    """Inner steps in the node's history until it left."""
    account: Account | None
    """Its books then: at another stage they begin anew."""


@dataclass(slots=True)
class NodeHistory:
    """What one node wrote so far, sorted by kind; grows by `observe`."""

    name: str
    started: NodeStarted | None = None
    moved: NodeReassigned | None = None
    """Its last move to another stage."""
    inner: list[InnerStep] = field(default_factory=list[InnerStep])
    outer: list[OuterStep] = field(default_factory=list[OuterStep])
    """Committed outer steps only."""
    aborted: int = 0
    evaluations: list[Evaluation] = field(default_factory=list[Evaluation])
    account: Account | None = None
    worst_loop_lag_seconds: float = 0.0
    """The worst lag of all accounts: each says the worst since the one before."""
    checkpoints: int = 0
    """Written, not tried."""
    stopped: NodeStopped | None = None
    """Its last word; None while it lives, and where it died."""
    starts: list[float] = field(default_factory=list[float])
    """When each of its lives began."""
    past: list[PastStay] = field(default_factory=list[PastStay])
    earlier: list[Account] = field(default_factory=list[Account])
    """The last one of each process before the last: transport and compute thread count anew in the next, and go on
    counting through a move."""

    @classmethod
    def of(cls, name: str, events: Iterable[AnyEvent]) -> NodeHistory:
        """The history that these events make."""
        history = cls(name)
        for event in events:
            history.observe(event)
        return history

    def observe(self, event: AnyEvent) -> None:
        """Take one more event in."""
        match event:
            case NodeStarted():
                self._leave_for(event.stage)
                self._begin_anew()
                self.started, self.stopped, self.moved = event, None, None
                self.starts.append(event.time)
            case NodeReassigned():
                self._leave_for(event.stage)
                self.moved = event
            case InnerStep():
                self.inner.append(event)
            case OuterStep(kind="aborted"):
                self.aborted += 1
            case OuterStep():
                self.outer.append(event)
            case Evaluation():
                self.evaluations.append(event)
            case Account():
                self.account = event
                self.worst_loop_lag_seconds = max(self.worst_loop_lag_seconds, event.loop_lag_seconds)
            case CheckpointTaken():
                self.checkpoints += not event.error
            case NodeStopped():
                self.stopped = event
            case _:
                pass

    @property
    def stage(self) -> int | None:
        """The stage that it served last; None where it died before it was up."""
        if self.moved is not None:
            return self.moved.stage
        return self.started.stage if self.started else None

    def _leave_for(self, stage: int) -> None:
        if self.stage is not None and self.stage != stage:
            self.past.append(PastStay(self.stage, len(self.inner), self._account_here))

    def _begin_anew(self) -> None:
        if self._account_now is not None:
            self.earlier.append(self._account_now)

    @property
    def _account_now(self) -> Account | None:
        """The last account, where it is of the last process."""
        return None if self.earlier and self.earlier[-1] is self.account else self.account

    @property
    def of_processes(self) -> list[Account]:
        """The last account of each of its processes."""
        return [*self.earlier, *filter(None, [self._account_now])]

    @property
    def sent(self) -> dict[str, int]:
        """Bytes by kind, of all its processes."""
        return summed(account.bytes_sent for account in self.of_processes)

    @property
    def received(self) -> dict[str, int]:
        """Bytes by kind, of all its processes."""
        return summed(account.bytes_received for account in self.of_processes)

    @property
    def _account_here(self) -> Account | None:
        """The last account, where it is of the present stage."""
        return None if any(stay.account is self.account for stay in self.past) else self.account

    def at(self, stage: int) -> NodeHistory:
        """This history with only the inner steps that it took at this stage."""
        if not self.past and self.stage == stage:
            return self
        ends = [*((stay.stage, stay.steps) for stay in self.past), (self.stage, len(self.inner))]
        begins = [0, *(end for _, end in ends)]
        inner = [
            step
            for begin, (served, end) in zip(begins, ends, strict=False)
            if served == stage
            for step in self.inner[begin:end]
        ]
        return replace(self, inner=inner)

    def books_at(self, stage: int) -> list[Account]:
        """The last account of each of its stays at this stage."""
        stays = [*((stay.stage, stay.account) for stay in self.past), (self.stage, self._account_here)]
        return [account for served, account in stays if served == stage and account is not None]

    @property
    def paired(self) -> list[OuterStep]:
        """Outer steps that averaged with a stage peer."""
        return [step for step in self.outer if step.kind == "paired"]


def summed(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Counts by name, added up."""
    totals = Counter[str]()
    for each in counts:
        totals.update(each)
    return dict(totals)


@dataclass(frozen=True, slots=True)
class Idle:
    """Seconds in which the compute thread had nothing to do."""

    seconds: float
    reason: str
    """`answers`: its microbatches were with others; `microbatches`: there was none; `no_replica`: a stage next to its
    own has none; `joining`, `ending`, `paused`."""


class Utilization:
    """Follows one node's accounts. Idle time is put down to what the node waited for at the account that ends it."""

    def __init__(self) -> None:
        self.peak: float | None = None
        """FLOP per second of the device; None where it is not known."""
        self.flop_per_token = 0.0
        self.doing = "training"
        self._flop = 0.0
        self._busy: tuple[float, float] | None = None
        self._work: deque[tuple[float, float]] = deque()

    def step(self, tokens: int) -> float:
        """An inner step on so many tokens; its work."""
        flop = tokens * self.flop_per_token
        self._flop += flop
        return flop

    def account(self, event: Account) -> Idle | None:
        """The idle time since the last account; None at the first."""
        before, self._busy = self._busy, (event.time, event.busy_seconds)
        self._work.append((event.time, self._flop))
        while len(self._work) > 2 and self._work[1][0] <= event.time - TOLD_SECONDS:
            self._work.popleft()
        if before is None:
            return None
        idle = (event.time - before[0]) - (event.busy_seconds - before[1])
        return Idle(max(0.0, idle), self._reason(event))

    @property
    def ratio(self) -> float | None:
        """The model's FLOP per second over the peak, in about the last minute; None where the peak is not known."""
        (began, before), (ended, after) = (self._work[0], self._work[-1]) if self._work else ((0.0, 0.0), (0.0, 0.0))
        if self.peak is None or ended <= began:
            return None
        return (after - before) / (ended - began) / self.peak

    def _reason(self, event: Account) -> str:
        match self.doing:
            case "joining" | "downloading":
                return "joining"
            case "finishing" | "draining":
                return "ending"
            case "paused":
                return "paused"
            case "waiting_for_peers":
                return "no_replica"
            case _:
                return "answers" if event.in_hand else "microbatches"
