"""Options of the commands that run something in the network, and the settings that they stand for."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from noloco_node.config.node_settings import NodeSettings
    from noloco_node.config.run_spec import RunSpec


OWN_TEXT = "run.data.path=FILE, run.data.tokenizer=DIR where the run's text or tokenizer is each volunteer's own"
PATHS = "run.data.paths="
CONFIG_ARGUMENT = "the run's configuration, where its folders do not say which run it is"


def guest_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments with which an onlooker shows that a run admits it."""
    command.add_argument("--invitation", metavar="FILE", help="for a run that admits only invited nodes")
    identity = "the identity that the run admits, where it admits by name"
    command.add_argument("--identity", metavar="FILE", help=identity)


def set_argument(command: argparse.ArgumentParser, example: str) -> None:
    """`--set NAME=VALUE`, and `--hub-token`, which stands for one of them."""
    help_text = f"override a setting, for example {example} (may be repeated)"
    command.add_argument("--set", metavar="NAME=VALUE", action="append", default=[], help=help_text)
    token = "show the hub your own token where a run's text, tokenizer or weights are fetched from there"
    command.add_argument("--hub-token", action="append_const", dest="set", const="node.hub_token=true", help=token)


class _OwnPath(argparse.Action):
    """`--data-path` as the override that it stands for, among those of `--set`."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        """PATH is that of the run's one text, NAME=PATH of a mixture's source: begin a path with = in it with ./."""
        given = str(values)
        name, equals, path = given.partition("=")
        if not equals or given.startswith(("/", ".", "~")):
            namespace.set = [*namespace.set, f"run.data.path={json.dumps(given)}"]
            return
        if not name or not path:
            parser.error(f"argument {option_string}: '{given}' is neither PATH nor NAME=PATH")
        before = next((each for each in namespace.set if each.startswith(PATHS)), PATHS + "{}")
        try:
            paths = json.loads(before.removeprefix(PATHS)) | {name: path}
        except (TypeError, ValueError):
            parser.error(f"argument {option_string}: --set {before} is no list of names and paths to add '{name}' to")
        namespace.set = [each for each in namespace.set if each != before] + [PATHS + json.dumps(paths)]


def own_text_argument(command: argparse.ArgumentParser) -> None:
    """`--data-path`, beside `--set`."""
    help_text = "where this machine keeps the run's text; of a mixture, one source's (may be repeated)"
    command.add_argument("--data-path", metavar="[NAME=]PATH", action=_OwnPath, dest="set", help=help_text)


def sizing_arguments(command: argparse.ArgumentParser) -> None:
    """What `config validate` is told of volunteers' machines."""
    add = command.add_argument
    add("--device", metavar="NAME", help='say how much of the time it would work: "RTX 4090", or 20TFLOP')
    add("--uplink", metavar="RATE", help="of each node, a second (default: node.uplink_mbit, or else 20Mbit)")
    add("--round-trip", metavar="TIME", help="between two nodes (default: 100ms)")


def node_arguments(command: argparse.ArgumentParser) -> None:
    """The options of `run` and `join`."""
    add = command.add_argument
    add("--name", metavar="NAME", help="what others are shown this node by, 32 plain letters at most")
    add("--stage", metavar="N|auto", help="stage to serve; auto: the one that needs this node most and fits its memory")
    add("--devices", metavar="all|LIST", help="one node on each GPU, or on cuda:0,cuda:1; one that dies stays dead")
    add("--metrics-port", metavar="N", help="show this node to a browser and to Prometheus on this port; 0: any")
    add("--metrics-host", metavar="ADDR", help="address of that port; 0.0.0.0 shows it to other machines")
    add("--end-with-stdin", action="store_true", help=argparse.SUPPRESS)
    network_arguments(command)


def network_arguments(command: argparse.ArgumentParser) -> None:
    """Where a node keeps its files and listens."""
    add = command.add_argument
    add("--run-folder", metavar="DIR", help="where events, identity and final weights go")
    add("--host", metavar="ADDR", help="address to listen on; 0.0.0.0 to be reachable from other machines")
    add("--port", metavar="N", help="TCP port to listen on; 0: any free one")
    add("--announce", metavar="ADDR", nargs="+", help="addresses under which others reach this node, behind a NAT")
    relayed = "be reached through initial peers that relay only; where it is not given, if nobody can dial this node"
    add("--relay", action=argparse.BooleanOptionalAction, help=relayed)
    relaying = "carry connections of nodes that nobody can dial, at this one's expense"
    add("--relay-for-others", action=argparse.BooleanOptionalAction, help=relaying)
    add("--identity", metavar="FILE", help="private key of this node, made when missing")
    add("--log-format", metavar="text|json", help="log lines for a person, or each as one JSON object")
    add("--invitation", metavar="FILE", help="invitation by the run's owner; no other run is accepted with it")


def seed_arguments(command: argparse.ArgumentParser) -> None:
    """The options of `seed`."""
    command.add_argument("config", metavar="CONFIG", type=Path, nargs="?", help="the run that others join through it")
    set_argument(command, "node.log_level=DEBUG")
    command.add_argument("--initial-peers", metavar="ADDR", nargs="+", help="nodes or seeds to join")
    add = command.add_argument
    add("--metrics-port", metavar="N", help="show the swarm to a browser and to Prometheus on this port; 0: any")
    add("--metrics-host", metavar="ADDR", help="address of that port; 0.0.0.0 shows it to other machines")
    add(
        "--model",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="with CONFIG: keep the newest weights of each stage, and a model made of them, in its run folder",
    )
    network_arguments(command)
    command.set_defaults(name=None, stage=None)


def seed_settings(options: argparse.Namespace) -> tuple[RunSpec | None, NodeSettings]:
    """What `seed` was told: the run, where one was named, and its own settings. UserError as loading them does."""
    from noloco_node.config.environment import variable_of
    from noloco_node.config.load import load_config, load_join

    if not os.environ.get(variable_of("run_folder")):
        options.run_folder = options.run_folder or "runs/seed"
    if options.config is None:
        return None, load_join(node_overrides(options), os.environ).node
    config = load_config(options.config, node_overrides(options), os.environ)
    return config.run, config.node


def doctor_arguments(command: argparse.ArgumentParser) -> None:
    """The options of `doctor`."""
    command.add_argument("initial_peers", metavar="ADDRESS", nargs="*", help="address of a node or a seed")
    command.add_argument("--json", action="store_true", help="print the checks as JSON")
    set_argument(command, "node.device=cuda")
    network_arguments(command)
    command.set_defaults(name=None, stage=None, metrics_port=None, metrics_host=None)


def doctor_settings(options: argparse.Namespace) -> NodeSettings:
    """The settings that `doctor` is to check. UserError as loading them does."""
    from noloco_node.config.load import load_join

    return load_join(node_overrides(options), os.environ).node


NODE_OPTIONS = (
    "initial_peers",
    "name",
    "stage",
    "run_folder",
    "host",
    "port",
    "announce",
    "relay",
    "relay_for_others",
    "metrics_port",
    "metrics_host",
    "log_format",
    "identity",
    "invitation",
)
"""These options of `run` and `join` stand for the setting of the same name in `node:`."""


def node_overrides(options: argparse.Namespace) -> list[str]:
    """The options of `run` and `join` as overrides, before those of --set."""
    # An empty list is what argparse makes of no address at all; it must not hide what the environment says.
    given = {name: getattr(options, name) for name in NODE_OPTIONS if getattr(options, name) not in (None, [])}
    if "relay" in given:
        given["relay"] = "always" if given["relay"] else "never"
    plain = {"stage", "port", "metrics_port"}
    quoted = {name: value if name in plain else json.dumps(value, default=str) for name, value in given.items()}
    return [f"node.{name}={value}" for name, value in quoted.items()] + list(options.set)
