"""All that follows one node's events: its file, metrics, state, log and terminal; and the pages that show them."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path

from noloco_node.aio import Heartbeat
from noloco_node.config.node_settings import NodeSettings
from noloco_node.telemetry.events import AnyEvent, Diary, Evaluation, EventFile
from noloco_node.telemetry.logging import LogTail, NodeLog, configure_logging
from noloco_node.telemetry.memory_limit import MemoryWatch, memory_use
from noloco_node.telemetry.metrics import Metrics
from noloco_node.telemetry.node_pages import NodePages
from noloco_node.telemetry.node_state import Surroundings
from noloco_node.telemetry.terminal import NodeDisplay, own_terminal
from noloco_node.telemetry.web import WebServer


class Telemetry:
    """`emit` takes every event of the node. Made by `telemetry_of`."""

    def __init__(self, events: Path, settings: NodeSettings, web: WebServer | None) -> None:
        loop, tail = asyncio.get_running_loop(), LogTail()
        self._log = NodeLog()
        self._diary = Diary(EventFile(events))
        self._metrics = Metrics()
        self._metrics.watch_process(loop, memory_use, partial(free_bytes, events.parent))
        self._memory = MemoryWatch(self.emit)
        self._heartbeat = Heartbeat(loop, self._look_at_memory)
        terminal = own_terminal() if settings.log_format == "text" else None
        self._display = None if terminal is None else NodeDisplay(self._log.view, terminal)
        self.pages = NodePages(self._log.view, tail, self._metrics.page, self._heartbeat)
        self._own_web = WebServer(self.pages.answers())
        self._web = web or self._own_web
        write = None if self._display is None else self._display.line
        configure_logging(settings.log_level, self._log, write, tail, style=settings.log_format)
        self.evaluation: Evaluation | None = None
        """The last one that this node has taken."""

    @property
    def address(self) -> str | None:
        """`host:port` of the pages; None where they are not served."""
        return self._web.address

    def serve(self, host: str, port: int) -> None:
        """Show the pages. UserError as `WebServer.start`."""
        if self._web is self._own_web:
            self._web.start(host, port)
        else:
            self._web.show(self.pages.answers())

    def ends(self) -> None:
        """The node was told to end."""
        self._log.view.leaving = True

    @contextlib.contextmanager
    def showing(self, look: Callable[[], Surroundings]) -> Generator[None]:
        """Show the peers that the node sees, as long as the block lasts."""
        self.pages.look = look
        try:
            yield
        finally:
            self.pages.look = None

    def emit(self, event: AnyEvent) -> None:
        """Tell all that follow this node."""
        self._diary.write(event)
        self._metrics.observe(event)
        self._log.observe(event)
        self.pages.observe(event)
        if isinstance(event, Evaluation):
            self.evaluation = event
        if self._display is not None:
            self._display.observe(event)

    def _look_at_memory(self, beats: int) -> None:
        if beats % 5 == 0:
            self._memory.look()

    def close(self) -> None:
        """Close the file, and take the pages down; on another's server they stand until that is stopped."""
        if self._display is not None:
            self._display.close()
        self._own_web.stop()
        self._heartbeat.stop()
        self._diary.close()


@contextlib.contextmanager
def telemetry_of(events: Path, settings: NodeSettings, web: WebServer | None = None) -> Generator[Telemetry]:
    """The telemetry of a node with this event file, as long as the block lasts. It begins before the node has done
    anything, so that an observer learns that it starts. Its pages are shown on `web` if that is given. UserError if
    they cannot be served."""
    telemetry = Telemetry(events, settings, web)
    try:
        if settings.metrics_port is not None:
            telemetry.serve(settings.metrics_host, settings.metrics_port)
        yield telemetry
    finally:
        telemetry.close()


def free_bytes(folder: Path) -> float:
    """What this process may still write there, in bytes; not a number where the system does not say."""
    try:
        room = os.statvfs(folder)
    except OSError:
        return math.nan
    return float(room.f_bavail * room.f_frsize)
