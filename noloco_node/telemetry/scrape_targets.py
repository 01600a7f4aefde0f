"""Where nodes of this machine show their metrics, in the form of Prometheus' file service discovery."""

from __future__ import annotations

from collections.abc import Mapping

from noloco_node.telemetry.events import NodeStarted

TARGETS = "targets.json"
"""The name of this file in the run folder of a local swarm, or of a machine's devices."""
_OF_THIS_MACHINE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def scrape_targets(started: Mapping[str, NodeStarted]) -> list[dict[str, object]]:
    """The targets of the nodes that are up, by name; those that show none are left out. Which stage a node serves is
    no label of its address: it may move."""
    up = [(name, event.metrics_address, event.run_name) for name, event in started.items()]
    return [
        {"targets": [_reached(address)], "labels": {"node": name, "run": run}}
        for name, address, run in up
        if address is not None
    ]


def _reached(address: str) -> str:
    """A server that listens on every address is found on this machine's own."""
    host, _, port = address.rpartition(":")
    bare = host.strip("[]")
    own = _OF_THIS_MACHINE.get(bare)
    return address if own is None else f"[{own}]:{port}" if ":" in own else f"{own}:{port}"
