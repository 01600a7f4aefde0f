"""The pages of one node, read only: one for a browser, metrics, liveness, readiness, and its state as JSON."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
from collections.abc import Callable, Mapping
from http import HTTPStatus

from noloco_node import ambient
from noloco_node.aio import Heartbeat
from noloco_node.telemetry.metrics import Metrics
from noloco_node.telemetry.page import node_page
from noloco_node.telemetry.state import NodeState, Surroundings
from noloco_node.telemetry.web import JSON, Page, PageMaker

BEATEN_WITHIN_SECONDS = 10.0
"""An event loop that has not come round for more seconds is stuck."""
CACHED_SECONDS = 1.0
"""The state is made at most once in so many seconds, however many ask for it."""
LOOK_SECONDS = 0.2
"""The event loop has so many seconds to say which peers the node sees; else what it said last stands."""

Headers = Mapping[str, str]


class NodePages:
    """Answers for `WebServer`, on its thread. The node's own loop is asked for nothing while nobody looks."""

    def __init__(self, metrics: Metrics, state: NodeState, heartbeat: Heartbeat) -> None:
        self._metrics = metrics
        self._state = state
        self._heartbeat = heartbeat
        self._health = liveness(heartbeat)
        self._loop = asyncio.get_running_loop()
        self._around: Surroundings | None = None
        self.made: tuple[float, Page] | None = None
        self.look: Callable[[], Surroundings] | None = None
        """The surroundings that the node sees now; called on its own loop. None while it has no stage."""

    def answers(self) -> dict[str, PageMaker]:
        """By path."""
        page = node_page()
        return {
            "/": lambda _: page,
            "/metrics": self._metrics.page,
            "/healthz": self._health,
            "/readyz": self._readiness,
            "/api/state": self._state_page,
        }

    def _readiness(self, _: Headers) -> Page:
        ready, why = self._state.readiness()
        if ready and self._heartbeat.age >= BEATEN_WITHIN_SECONDS:
            return self._health(_)
        return Page(b"training\n") if ready else _unavailable(why)

    def _state_page(self, _: Headers) -> Page:
        now = ambient.monotonic()
        if self.made is None or now - self.made[0] >= CACHED_SECONDS:
            document = self._state.document(self._look_around(), lag=self._heartbeat.age)
            body = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
            self.made = now, Page(body, JSON)
        return self.made[1]

    def _look_around(self) -> Surroundings | None:
        told: concurrent.futures.Future[None] = concurrent.futures.Future()

        def look() -> None:
            try:
                if self.look is not None:
                    self._around = self.look()
            finally:
                told.set_result(None)

        try:
            self._loop.call_soon_threadsafe(look)
            told.result(LOOK_SECONDS)
        except (TimeoutError, RuntimeError):
            pass  # it hangs, or has ended
        return self._around


def liveness(heartbeat: Heartbeat) -> PageMaker:
    """What `/healthz` answers: that the process should be left alone, not that it does anything of use."""

    def answer(_: Headers) -> Page:
        age = heartbeat.age
        if age < BEATEN_WITHIN_SECONDS:
            return Page(b"ok\n")
        return _unavailable(f"the event loop has not come round for {age:.0f} s")

    return answer


def _unavailable(why: str) -> Page:
    line = " ".join(why.split())
    return Page(f"{line}\n".encode(), status=HTTPStatus.SERVICE_UNAVAILABLE)
