"""The pages of a node before it can say anything: while its libraries are loaded it starts, and its port is open."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Generator
from http import HTTPStatus

from noloco_node import __version__
from noloco_node.config.node_settings import NodeSettings
from noloco_node.telemetry.node_view import NodeView
from noloco_node.telemetry.page import node_page
from noloco_node.telemetry.state import LogTail, NodeState
from noloco_node.telemetry.web import JSON, Page, PageMaker, WebServer


@contextlib.contextmanager
def early_pages(settings: NodeSettings) -> Generator[WebServer | None]:
    """A server at `node.metrics_port` that says that the node starts, until the node shows its own pages there; stopped
    with the block. None where no port is set. UserError as `WebServer.start`."""
    if settings.metrics_port is None:
        yield None
        return
    web = WebServer(_answers())
    web.start(settings.metrics_host, settings.metrics_port)
    try:
        yield web
    finally:
        web.stop()


def _answers() -> dict[str, PageMaker]:
    page, state = node_page(), NodeState(__version__, NodeView(), LogTail())
    return {
        "/": lambda _: page,
        "/metrics": lambda _: Page(b"# TYPE noloco_up gauge\nnoloco_up 0.0\n"),
        "/healthz": lambda _: Page(b"ok\n"),
        "/readyz": lambda _: Page(f"{state.readiness()[1]}\n".encode(), status=HTTPStatus.SERVICE_UNAVAILABLE),
        "/api/state": lambda _: Page(json.dumps(state.document(None), allow_nan=False).encode(), JSON),
    }
