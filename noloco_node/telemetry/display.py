"""A local swarm while it trains: a live screen on a terminal, elsewhere one plain line every few seconds."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean, median

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from noloco_node import ambient
from noloco_node.telemetry.events import (
    AnyEvent,
    Evaluation,
    NodeReassigned,
    NodeStarted,
    NodeStopped,
    OuterStep,
    Warned,
)
from noloco_node.telemetry.node_state import NodeSeen, NodeState, NodeView
from noloco_node.telemetry.swarm_state import STATES, Middle, StageSeen, SwarmView
from noloco_node.telemetry.terminal import WARNINGS_SHOWN, outer_steps, swarm_screen
from noloco_node.telemetry.words import as_clock_time, as_long, as_loss, as_nodes, as_rate, as_scientific


class LocalSwarmView:
    """Follows the events of all nodes of a local swarm. Times are wall time, seconds since 1970."""

    def __init__(self, *, run_name: str, stages: int, target: int, nodes: Sequence[str]) -> None:
        self.run_name = run_name
        self.stages = stages
        self.target = target
        self.names = tuple(nodes)
        self._views = {name: NodeView() for name in nodes}
        self._up: set[str] = set()
        self._counts = Counter[str]()
        self.notes: list[tuple[float, str]] = []
        self.warnings: deque[str] = deque(maxlen=WARNINGS_SHOWN)
        """The last ones, shown as long as the screen is."""
        self.trouble = ""
        """What is wrong now and makes the figures old; shown until it is over."""
        self.last_pairs: deque[tuple[str, str]] = deque(maxlen=2)
        self._names: dict[str, str] = {}

    def observe(self, name: str, event: AnyEvent) -> None:
        """Take in one event of a node."""
        self._views[name].observe(event)
        match event:
            case NodeStarted():
                self._up.add(name)
                self._counts["joined"] += 1
                self._names[event.peer_id] = name
                self.note(f"{name} is up (…{event.peer_id[-6:]})", event.time)
            case NodeReassigned():
                self._counts["reassigned"] += 1
                self.note(f"{name} reassigned from stage {event.from_stage} to stage {event.stage}", event.time)
            case OuterStep(kind="paired", role="dialler"):
                self.last_pairs.append((name, self.name_of(event.partner)))
            case OuterStep(kind="caught_up"):
                self.note(f"{name} took over the state of {self.name_of(event.partner)}", event.time)
            case Evaluation():
                self.note(f"validation loss {event.loss:.4f} at {event.clock:,.0f} tokens ({name})", event.time)
            case Warned(what="checkpoints_unusable" | "stage_lost" | "state_elsewhere"):
                self.warnings.append(f"{name}: {event.detail}")
                self.note(f"{name} WARNS: {event.detail}", event.time)
            case NodeStopped():
                self._goes(name, "left")
                self.note(f"{name} ended: {event.reason.replace('_', ' ')}", event.time)
            case _:
                pass

    def lost(self, name: str, what: str) -> None:
        """A node's process ended without its last event."""
        self._goes(name, "lost")
        self.note(f"{name} DIED: {what}")

    def _goes(self, name: str, how: str) -> None:
        self._up.discard(name)
        self._counts[how] += 1

    def note(self, line: str, when: float | None = None) -> None:
        """Show a line among the notable events."""
        self.notes.append((ambient.wall() if when is None else when, line))

    def name_of(self, peer: str | None) -> str:
        """A node's name for its peer id; the id's end where it is no node of this swarm."""
        return self._names.get(peer or "", f"…{(peer or '')[-6:]}")

    def pairs(self) -> str:
        """Who averaged with whom last."""
        return ", ".join(f"{one} with {other}" for one, other in self.last_pairs) or "none yet"

    def states(self, now: float) -> dict[str, NodeState]:
        """What each node did last, by name."""
        return {name: view.state(now) for name, view in self._views.items()}

    def swarm(self, now: float) -> SwarmView:
        """The swarm at time `now`. Losses and clock stay as they were when their nodes have gone."""
        states = self.states(now)
        up = {name: state for name, state in states.items() if name in self._up}
        heads = [state for state in states.values() if state.stage == 0 and state.inner_steps]
        rates = [state.tokens_per_second for state in up.values() if state.stage == 0]
        known = [rate for rate in rates if rate is not None]
        clock = fmean(state.clock or 0.0 for state in heads) if heads else 0.0
        over = clock >= self.target
        return SwarmView(
            time=now,
            run_id="",
            run_name=self.run_name,
            target=self.target,
            stages=tuple(_stage(up.values(), stage, clock, over=over) for stage in range(self.stages)),
            nodes=tuple(_node(name, state, clock) for name, state in up.items()),
            introduced=len(up),
            clock=clock,
            training_loss=Middle.of(state.training_loss for state in heads),
            validation_loss=Middle.of(state.validation_loss for state in states.values()),
            replica_divergence=Middle.of(state.replica_divergence for state in states.values()),
            tokens_per_second=sum(known) if known else None,
            joins=self._counts["joined"],
            left=self._counts["left"],
            lost=self._counts["lost"],
            reassignments=self._counts["reassigned"],
            over=over,
        )

    def outer_steps(self, now: float) -> str:
        """Outer steps of all nodes, by kind."""
        return outer_steps(sum((Counter(state.outer_steps) for state in self.states(now).values()), Counter[str]()))

    def step(self, now: float) -> int:
        """Inner steps of the replica that has taken most."""
        return max((state.inner_steps for state in self.states(now).values()), default=0)

    def more(self, now: float) -> Iterator[tuple[str, str, str, str]]:
        """Figures that only nodes of one machine tell."""
        states = self.states(now).values()
        rate = max((state.learning_rate or 0.0 for state in states), default=0.0)
        yield "inner step", f"{self.step(now):,}", "learning rate", as_scientific(rate)
        yield "outer steps", self.outer_steps(now), "last averaged", self.pairs()


def _stage(states: Iterable[NodeState], stage: int, clock: float, *, over: bool) -> StageSeen:
    nodes = [state for state in states if state.stage == stage]
    doing = Counter("training" if s.state not in STATES else s.state for s in nodes)
    clocks = [state.clock or 0.0 for state in nodes]
    return StageSeen(
        nodes={state: doing[state] for state in STATES},
        unreachable=0,
        capacity=sum(state.tokens_per_second or 0.0 for state in nodes),
        clock=median(clocks) if clocks else None,
        lag=max(0.0, clock - min(clocks)) if clocks else None,
        missing=not nodes and not over,
    )


def _node(name: str, state: NodeState, clock: float) -> NodeSeen:
    names = ("state", "version", "clock", "tokens_per_second", "outer_steps_taken", "training_loss", "validation_loss")
    return NodeSeen(
        peer_id=state.peer_id or "",
        stage=state.stage or 0,
        answers=True,
        lag=clock - (state.clock or 0.0),
        name=name,
        tokens=state.contribution.tokens if state.contribution else 0,
        replica_divergence=state.replica_divergence,
        seen_seconds=state.uptime_seconds,
        **{each: getattr(state, each) for each in names},
    )


def plain_line(view: LocalSwarmView, now: float) -> str:
    """The swarm in one line of plain text."""
    swarm, nodes = view.swarm(now), len(view.names)
    if not swarm.clock and swarm.present < nodes and not swarm.left and not swarm.lost:
        return (
            f"starting: {swarm.present} of {nodes} nodes are up; each loads torch first, and the others follow the "
            "first one"
        )
    loss, held_out, spread = (
        middle and middle.value for middle in (swarm.training_loss, swarm.validation_loss, swarm.replica_divergence)
    )
    share = 100.0 * min(1.0, swarm.clock / swarm.target)
    return (
        f"step {view.step(now)} · {swarm.clock:,.0f}/{swarm.target:,} tokens ({share:.0f} %)"
        f" · loss {as_loss(loss)} · validation {as_loss(held_out)} · {as_rate(swarm.tokens_per_second)} tokens/s"
        f" · nodes {as_nodes([stage.present for stage in swarm.stages])} · outer steps {view.outer_steps(now)}"
        f" · replica divergence {as_scientific(spread)} · {as_long(swarm.seconds_left)} left"
    )


def screen(view: LocalSwarmView, now: float, height: int) -> RenderableType:
    """The swarm on one screen of a terminal."""
    warnings = [*view.warnings, *([view.trouble] if view.trouble else [])]
    notes = [
        Text(
            f"{as_clock_time(when)} {line}",
            no_wrap=True,
            style="bold red" if _MARKED.search(line) else "",
            overflow="ellipsis",
        )
        for when, line in view.notes[-height:]
    ]
    foot = "Ctrl-C ends the swarm"
    return swarm_screen(view.swarm(now), height, troubles=warnings, foot=foot, more=view.more(now), happened=notes)


_MARKED = re.compile("DIED|WARNS")


class Display:
    """Shows a view: live on a terminal, else as lines. Use as a context manager and call `refresh` often."""

    def __init__(self, view: LocalSwarmView, console: Console) -> None:
        self._view = view
        self._console = console
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._next_line = 0.0
        self._notes_shown = 0

    def __enter__(self) -> Display:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.refresh(last=True)
        if self._live:
            self._live.stop()

    def refresh(self, *, last: bool = False) -> None:
        """Redraw, or print a line if it is time for one."""
        now = ambient.wall()
        if self._live:
            self._live.update(screen(self._view, now, self._console.height), refresh=True)
            return
        for when, line in self._view.notes[self._notes_shown :]:
            self._line(f"{as_clock_time(when)} {line}")
        self._notes_shown = len(self._view.notes)
        if last or now >= self._next_line:
            self._next_line = now + 5.0
            self._line(f"{as_clock_time(now)} {plain_line(self._view, now)}")
            if self._view.trouble:
                self._line(f"{as_clock_time(now)} {self._view.trouble}")

    def _line(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)
