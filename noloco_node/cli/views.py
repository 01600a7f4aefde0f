"""Commands that show in a terminal what runs elsewhere: one node, a whole swarm."""

from __future__ import annotations

import argparse
import os

from noloco_node.cli.small import health_address, health_arguments
from noloco_node.collector import loading
from noloco_node.errors import ExitCode
from noloco_node.telemetry.waiting import say_asking


def top_arguments(command: argparse.ArgumentParser) -> None:
    """The options of `top`."""
    health_arguments(command)
    command.add_argument("--once", action="store_true", help="print the node as it is now, and end")
    command.set_defaults(call=_top)


def watch_arguments(command: argparse.ArgumentParser) -> None:
    """The options of `watch`."""
    command.add_argument("initial_peers", metavar="ADDRESS", nargs="+", help="address of a node or a seed of the run")
    command.add_argument("--once", action="store_true", help="print the swarm as it is now, and end")
    command.add_argument("--json", action="store_true", help="the same as one JSON object")
    command.add_argument("--follow", action="store_true", help="with --json: one object a second, until Ctrl-C")
    command.set_defaults(call=_watch)


def _top(options: argparse.Namespace) -> int:
    from rich.console import Console

    from noloco_node.diagnostics.top import follow

    follow(*health_address(options, os.environ, ExitCode.CHECK_FAILED), Console(), once=options.once)
    return int(ExitCode.OK)


def _watch(options: argparse.Namespace) -> int:
    from noloco_node.config.node_settings import NodeSettings
    from noloco_node.node.early_checks import check_peers

    # It listens on this machine only, at any port: what variables say of that is meant for the node that runs here.
    settings = NodeSettings(initial_peers=tuple(options.initial_peers))
    check_peers(settings)
    say_asking(settings.initial_peers)
    with loading():
        import uvloop
        from rich.console import Console

        from noloco_node.diagnostics.watch import watch

    console = Console()
    follows = options.follow if options.json else console.is_terminal and not options.once
    uvloop.run(watch(settings, console, as_json=options.json, follows=follows))
    return int(ExitCode.OK)
