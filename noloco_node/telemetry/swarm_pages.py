"""The pages of a seed, read only: the swarm's picture for a browser, the same as JSON, metrics, liveness."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable

from noloco_node import __version__, ambient
from noloco_node.aio import Heartbeat
from noloco_node.telemetry.node_pages import CACHED_SECONDS, Curve, Headers, liveness
from noloco_node.telemetry.page import state_page
from noloco_node.telemetry.swarm_metrics import SwarmMetrics
from noloco_node.telemetry.swarm_state import Middle, SwarmDocument, SwarmView, document
from noloco_node.telemetry.web import JSON, Page, PageMaker


class SwarmPages:
    """Answers for `WebServer`, on its thread; `saw` is called on the seed's own."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._lock = threading.Lock()
        self._heartbeat = heartbeat
        self._since = ambient.wall()
        self._view: SwarmView | None = None
        self._seen_at: float | None = None
        self._curves = {
            name: Curve()
            for name in ("nodes", "tokens_per_second", "clock", "training_loss", "validation_loss", "spread")
        }
        self._evaluated: Middle | None = None
        self._metrics = SwarmMetrics(lambda: self._view, lambda: self.records(), lambda: self._age)
        self.made: tuple[float, Page] | None = None
        self.records: Callable[[], int] = lambda: 0
        """How many records the seed holds."""
        self.detail = "starting: not in the network yet"
        """What the seed does, in one line, where there is no swarm to show."""

    def saw(self, view: SwarmView) -> None:
        """The swarm was looked at."""
        with self._lock:
            self._view, self._seen_at = view, ambient.monotonic()
            self._curves["nodes"].add(view.time, view.present)
            self._curves["clock"].add(view.time, view.clock)
            if view.speed_from == "clocks" and view.tokens_per_second is not None:
                self._curves["tokens_per_second"].add(view.time, view.tokens_per_second)
            for name in ("training_loss", "validation_loss", "spread"):
                middle: Middle | None = getattr(view, name)
                # Held-out losses are few: each is a point of its own.
                if middle is not None and (name != "validation_loss" or middle != self._evaluated):
                    self._curves[name].add(view.time, middle.value)
            self._evaluated = view.validation_loss

    def answers(self) -> dict[str, PageMaker]:
        """By path."""
        page = state_page()
        return {
            "/": lambda _: page,
            "/metrics": self._metrics.page,
            "/healthz": liveness(self._heartbeat),
            "/api/state": self._state_page,
        }

    @property
    def _age(self) -> float | None:
        return None if self._seen_at is None else ambient.monotonic() - self._seen_at

    def _state_page(self, _: Headers) -> Page:
        now = ambient.monotonic()
        if self.made is None or now - self.made[0] >= CACHED_SECONDS:
            body = json.dumps(self._document(), separators=(",", ":"), allow_nan=False).encode()
            self.made = now, Page(body, JSON)
        return self.made[1]

    def _document(self) -> SwarmDocument:
        """The swarm, and the seed that shows it."""
        with self._lock:
            view, curves = self._view, {name: curve.points() for name, curve in self._curves.items()}
        seed = {
            "version": __version__,
            "uptime_seconds": ambient.wall() - self._since,
            "records": self.records(),
            "event_loop_age_seconds": self._heartbeat.age,
            "look_age_seconds": self._age,
            "detail": self.detail,
        }
        if view is None:
            return {"time": ambient.wall(), "state": "no_swarm", "seed": seed}
        return document(view) | {"seed": seed, "curves": curves}
