"""The pages of one node, read only: one for a browser, metrics, liveness, readiness, and its state as JSON."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import math
from collections.abc import Callable, Generator, Mapping
from http import HTTPStatus
from typing import Any

from noloco_node import ambient
from noloco_node.aio import STUCK_SECONDS, Heartbeat
from noloco_node.ambient import LOOK_SECONDS
from noloco_node.config.node_settings import NodeSettings
from noloco_node.telemetry.events import Account, AnyEvent, Evaluation, InnerStep, OuterStep
from noloco_node.telemetry.logging import LogTail
from noloco_node.telemetry.node_state import POINTS, NodeView, Surroundings
from noloco_node.telemetry.web import JSON, Page, PageMaker, WebServer, state_page

Headers = Mapping[str, str]


class Curve:
    """Values over wall time, thinned as time goes on: `POINTS` at most, evenly spread over the whole life."""

    def __init__(self) -> None:
        self._points: list[tuple[float, float]] = []
        self._apart = 0.0
        self._last: tuple[float, float] | None = None

    def add(self, when: float, value: float) -> None:
        """One more value; what is not finite is left out."""
        if not math.isfinite(value):
            return
        self._last = when, value
        if self._points and 0.0 <= when - self._points[-1][0] < self._apart:  # the clock may be set back
            return
        self._points.append(self._last)
        if len(self._points) >= POINTS:
            self._points = self._points[::2]
            self._apart = (when - self._points[0][0]) / (POINTS / 2)

    def points(self) -> list[tuple[float, float]]:
        """From the oldest to the newest."""
        points = tuple(self._points)  # another thread may add to it
        last = [self._last] if self._last and points and points[-1] != self._last else []
        return [(round(when, 1), float(f"{value:.5g}")) for when, value in (*points, *last)]


class StatePage:
    """A state as JSON, with curves of its figures over wall time; on the thread of `WebServer`."""

    def __init__(self, *curves: str) -> None:
        self.curves = {name: Curve() for name in curves}
        self.made: tuple[float, Page] | None = None

    def page(self, state: Callable[[], dict[str, Any]]) -> Page:
        """The state as it is now, or was within `LOOK_SECONDS`."""
        now = ambient.monotonic()
        if self.made is None or now - self.made[0] >= LOOK_SECONDS:
            said = state() | {"curves": {name: curve.points() for name, curve in self.curves.items()}}
            self.made = now, Page(json.dumps(said, separators=(",", ":"), allow_nan=False).encode(), JSON)
        return self.made[1]


class NodePages:
    """Answers for `WebServer`, on its thread. The node's own loop is asked for nothing while nobody looks.

    Without a heartbeat it is a node that cannot say anything yet, and has no loop.
    """

    def __init__(self, view: NodeView, log: LogTail, metrics: PageMaker, heartbeat: Heartbeat | None = None) -> None:
        self._view = view
        self._log = log
        self._metrics = metrics
        self._heartbeat = heartbeat
        self._loop = asyncio.get_running_loop() if heartbeat else None
        self._around: Surroundings | None = None
        names = (
            "loss",
            "validation_loss",
            "replica_divergence",
            "learning_rate",
            "tokens_per_second",
            "swarm_tokens_per_second",
        )
        self.shown = StatePage(*names)
        self.look: Callable[[], Surroundings] | None = None
        """The surroundings that the node sees now; called on its own loop. None while it has no stage."""

    def observe(self, event: AnyEvent) -> None:
        """Take in one event of this node, which its view has seen."""
        curves, when = self.shown.curves, event.time
        match event:
            case InnerStep():
                curves["loss"].add(when, event.loss)
                curves["learning_rate"].add(when, event.learning_rate)
            case Account():
                state = self._view.state(when)
                curves["tokens_per_second"].add(when, state.tokens_per_second or 0.0)
                curves["swarm_tokens_per_second"].add(when, state.swarm_tokens_per_second or 0.0)
            case OuterStep(kind="paired" | "no_partner" | "caught_up") if event.replica_divergence is not None:
                curves["replica_divergence"].add(when, event.replica_divergence)
            case Evaluation():
                curves["validation_loss"].add(when, event.loss)
            case _:
                pass

    def answers(self) -> dict[str, PageMaker]:
        """By path."""
        page = state_page()
        return {
            "/": lambda _: page,
            "/metrics": self._metrics,
            "/healthz": liveness(self._heartbeat),
            "/readyz": self._readiness,
            "/api/state": lambda _: self.shown.page(self._state),
        }

    def _readiness(self, headers: Headers) -> Page:
        alive, state = liveness(self._heartbeat)(headers), self._view.state()
        if not state.ready:
            return _unavailable(state.detail)
        return Page(b"training\n") if alive.status is HTTPStatus.OK else alive

    def _state(self) -> dict[str, Any]:
        lag = self._heartbeat.age if self._heartbeat else 0.0
        state = self._view.state(around=self._look_around(), lag=lag)
        changes: dict[str, Any] = {"log": self._log.lines()}
        if state.state == "paused":  # the speeds behind these were those before
            changes |= dict.fromkeys(("tokens_per_second", "swarm_tokens_per_second", "seconds_left"))
        said: dict[str, Any] = json.loads(state.model_copy(update=changes).model_dump_json(by_alias=True))
        return said

    def _look_around(self) -> Surroundings | None:
        look, loop = self.look, self._loop
        if look is None or loop is None:
            return None  # with no stage, as in a pause, nobody is looked at: what was seen before does not stand
        seen: concurrent.futures.Future[None] = concurrent.futures.Future()

        def see() -> None:
            try:
                self._around = look()
            finally:
                seen.set_result(None)

        try:
            loop.call_soon_threadsafe(see)
            # A loop that is busy for longer has said before which peers the node sees: that stands.
            seen.result(0.2)
        except (TimeoutError, RuntimeError):
            pass  # it hangs, or has ended
        return self._around


def liveness(heartbeat: Heartbeat | None) -> PageMaker:
    """What `/healthz` answers: that the process should be left alone, not that it does anything of use."""

    def answer(_: Headers) -> Page:
        age = heartbeat.age if heartbeat else 0.0
        if age < STUCK_SECONDS:
            return Page(b"ok\n")
        return _unavailable(f"the event loop has not come round for {age:.0f} s")

    return answer


def _unavailable(why: str) -> Page:
    line = " ".join(why.split())
    return Page(f"{line}\n".encode(), status=HTTPStatus.SERVICE_UNAVAILABLE)


@contextlib.contextmanager
def early_pages(settings: NodeSettings) -> Generator[WebServer | None]:
    """A server at `node.metrics_port` that says that the node starts, while its libraries are loaded. The node shows
    its own pages there later; it is stopped with the block. None where no port is set. UserError as
    `WebServer.start`."""
    if settings.metrics_port is None:
        yield None
        return
    metrics = Page(b"# TYPE noloco_up gauge\nnoloco_up 0.0\n")
    web = WebServer(NodePages(NodeView(), LogTail(), lambda _: metrics).answers())
    web.start(settings.metrics_host, settings.metrics_port)
    try:
        yield web
    finally:
        web.stop()
