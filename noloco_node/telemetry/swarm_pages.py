"""The pages of a seed, read only: the swarm's picture for a browser, the same as JSON, metrics, liveness."""

from __future__ import annotations

from collections.abc import Callable

from noloco_node import __version__, ambient
from noloco_node.aio import Heartbeat
from noloco_node.telemetry.node_pages import StatePage, liveness
from noloco_node.telemetry.page import state_page
from noloco_node.telemetry.swarm_metrics import SwarmMetrics
from noloco_node.telemetry.swarm_state import Middle, SwarmDocument, SwarmView, document
from noloco_node.telemetry.web import PageMaker


class SwarmPages:
    """Answers for `WebServer`, on its thread; `saw` is called on the seed's own."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat
        self._since = ambient.wall()
        self._view: SwarmView | None = None
        self._seen_at: float | None = None
        self.shown = StatePage("nodes", "tokens_per_second", "clock", "training_loss", "validation_loss", "spread")
        self._evaluated: Middle | None = None
        self._metrics = SwarmMetrics(lambda: self._view, lambda: self.records(), lambda: self._age)
        self.records: Callable[[], int] = lambda: 0
        """How many records the seed holds."""
        self.detail = "starting: not in the network yet"
        """What the seed does, in one line, where there is no swarm to show."""

    def saw(self, view: SwarmView) -> None:
        """The swarm was looked at."""
        self._view, self._seen_at, curves = view, ambient.monotonic(), self.shown.curves
        curves["nodes"].add(view.time, view.present)
        curves["clock"].add(view.time, view.clock)
        if view.speed_from == "clocks" and view.tokens_per_second is not None:
            curves["tokens_per_second"].add(view.time, view.tokens_per_second)
        for name in ("training_loss", "validation_loss", "spread"):
            middle: Middle | None = getattr(view, name)
            # Held-out losses are few: each is a point of its own.
            if middle is not None and (name != "validation_loss" or middle != self._evaluated):
                curves[name].add(view.time, middle.value)
        self._evaluated = view.validation_loss

    def answers(self) -> dict[str, PageMaker]:
        """By path."""
        page = state_page()
        return {
            "/": lambda _: page,
            "/metrics": self._metrics.page,
            "/healthz": liveness(self._heartbeat),
            "/api/state": lambda _: self.shown.page(self._document),
        }

    @property
    def _age(self) -> float | None:
        return None if self._seen_at is None else ambient.monotonic() - self._seen_at

    def _document(self) -> SwarmDocument:
        """The swarm, and the seed that shows it."""
        view = self._view
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
        return document(view) | {"seed": seed}
