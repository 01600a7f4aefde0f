"""Commands that load little: is a node alive, views of a run or of its folder, a pause, an example, completion
for a shell."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import mmap
import os
import textwrap
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from noloco_node.errors import ExitCode, UserError
from noloco_node.process_memory import loading
from noloco_node.storage.held import NODE_LOCK, lock_holder
from noloco_node.telemetry.web import ANSWER_SECONDS, Hangs, ask_page
from noloco_node.telemetry.words import say_asking, say_drawing

if TYPE_CHECKING:
    from noloco_node.node.interrupts import Word
    from noloco_node.report.page import Made


DEFAULT_METRICS_PORT = 9100
"""A node is asked on this port if neither an option nor the environment says where it answers."""
HOST_VARIABLE, PORT_VARIABLE = "NOLOCO_NODE_METRICS_HOST", "NOLOCO_NODE_METRICS_PORT"
FOLDER_VARIABLE, DEFAULT_RUN_FOLDER = "NOLOCO_NODE_RUN_FOLDER", "runs/node"
NAME_FOLDER = (
    "name the run folder of a node that runs on this machine with node.metrics_port set, "
    "or where its pages are, with --metrics-host and --metrics-port"
)
SHELLS = ("bash", "zsh", "fish")
_EVERY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


def health_arguments(command: argparse.ArgumentParser) -> None:
    """The options of `health`."""
    command.add_argument("run_folder", metavar="RUN_FOLDER", type=Path, nargs="?", help="run folder of the node")
    command.add_argument("--metrics-host", metavar="ADDR", help="address of the node's pages (default: 127.0.0.1)")
    port = f"port of the node's pages (default: {PORT_VARIABLE}, or the node's own word, or {DEFAULT_METRICS_PORT})"
    command.add_argument("--metrics-port", metavar="N", type=int, help=port)
    command.set_defaults(call=_health)


def init_arguments(command: argparse.ArgumentParser) -> None:
    """The options of `config init`."""
    command.add_argument("name", metavar="NAME", nargs="?", default="tiny", help="which one (default: tiny)")
    command.add_argument("--to", metavar="FILE", type=Path, help="where it goes, a file that does not exist")
    command.set_defaults(call=_init)


def list_arguments(command: argparse.ArgumentParser) -> None:
    """The options of `config list`."""
    command.set_defaults(call=_list)


def completion_arguments(command: argparse.ArgumentParser) -> None:
    """The options of `completion`."""
    command.add_argument("shell", choices=SHELLS, help="the shell that it is for")
    command.set_defaults(call=_completion)


def health_address(
    options: argparse.Namespace, environ: Mapping[str, str], none_there: ExitCode = ExitCode.FAILURE
) -> tuple[str, int]:
    """Where this machine's node answers.

    The node in the named run folder says it first, then options, then the environment that the node has too. The node
    in this environment's run folder comes next, and the defaults come last.

    Raises UserError: CONFIG if the environment's port is no number, `none_there` if no node that shows itself runs in
    the named folder.
    """
    if options.run_folder is not None and options.metrics_port is None:
        named = address_told(options.run_folder)
        if named is None:
            message = f"no node that shows itself runs in {options.run_folder}"
            raise UserError(none_there, message, NAME_FOLDER)
        return named
    host: str = options.metrics_host or environ.get(HOST_VARIABLE, "").strip()
    if options.metrics_port is not None:
        return _EVERY_ADDRESS.get(host, host), options.metrics_port
    text = environ.get(PORT_VARIABLE, "").strip()
    if text in ("", "0") and not options.metrics_host:
        told = address_told(Path(environ.get(FOLDER_VARIABLE, "").strip() or DEFAULT_RUN_FOLDER))
        if told is not None:
            return told
    text = text or str(DEFAULT_METRICS_PORT)
    if not text.isascii() or not text.isdigit():
        message = f"{PORT_VARIABLE}: '{text}' is no port"
        raise UserError(ExitCode.CONFIG, message, "correct it, or name the port with --metrics-port")
    return _EVERY_ADDRESS.get(host, host), int(text)


def address_told(run_folder: Path) -> tuple[str, int] | None:
    """Where the pages of the node in this run folder now answer, as it has written down at its start. None if no node
    runs there, or if it has no pages. It reads the end of the event file first, however long that is."""
    try:
        if lock_holder(run_folder / NODE_LOCK) is None:
            return None
        with (
            (run_folder / "events.jsonl").open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text,
        ):
            found = text.rfind(b'"event":"node_started"')
            if found < 0:
                return None
            line = text[text.rfind(b"\n", 0, found) + 1 : max(0, text.find(b"\n", found))]
        host, _, port = json.loads(line)["metrics_address"].rpartition(":")
        address: str = host.strip("[]")
        return _EVERY_ADDRESS.get(address, address), int(port)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # a folder may hold anything
        return None


def ask_health(host: str, port: int) -> tuple[bool, str]:
    """Whether the node there says that it is alive, and its words or why there are none."""
    try:
        status, body = ask_page(host, port, "/healthz", most_bytes=1000)
    except Hangs as error:
        return False, f"no answer from {host} port {port} in {ANSWER_SECONDS:.0f} s: {error}"
    except (OSError, http.client.HTTPException, ValueError) as error:
        return False, (
            f"no answer from {host} port {port}: {error}; no node runs here, or it has another port "
            "(node.metrics_port, health --metrics-port)"
        )
    return status == http.client.OK, body.decode(errors="replace").strip() or f"status {status}"


def write_example(name: str, target: Path | None) -> Path:
    """Write a configuration that comes with the package, comments and all, to a new file; the file's path.

    Raises UserError: CONFIG where there is none of that name, RUN_FOLDER where the file exists or cannot be written.
    """
    from noloco_node.config.files import shipped_config

    source = shipped_config(name)
    path = target or Path(source.name)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(source.read_text(encoding="utf-8"))
    except OSError as error:
        if not isinstance(error, FileExistsError):  # what is left of it would be called a file that exists
            with contextlib.suppress(OSError):
                path.unlink()
        message = f"{path} cannot be written: {error.strerror}"
        raise UserError(ExitCode.RUN_FOLDER, message, "name another file with --to") from None
    return path


def completed(top: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Answer a shell that asks how the line goes on, and end the process with that; else the parser as it is."""
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete

        argcomplete.autocomplete(top)
    return top


def _health(options: argparse.Namespace) -> int:
    alive, words = ask_health(*health_address(options, os.environ))
    print(words)
    return int(ExitCode.OK if alive else ExitCode.FAILURE)


def _init(options: argparse.Namespace) -> int:
    path = write_example(options.name, options.to)
    check = (f"noloco-node config validate {path}", "checks it")
    if options.name.startswith("sim/"):
        then = [(f"noloco-node simulate {path} --out results", "runs it")]
    elif options.name.startswith("lab/"):
        then = [check, (f"noloco-node lab {path} --out results", "runs it")]
    else:
        here, others = f"noloco-node swarm {path}", f"noloco-node seed {path} --host 0.0.0.0 --port 31337"
        then = [check, (here, "trains on this machine"), (others, "lets others join")]
    width = max(len(command) for command, _ in then)
    print("\n".join([f"wrote {path}: edit it, then", *(f"  {command:<{width}}  {what}" for command, what in then)]))
    return int(ExitCode.OK)


def _list(_: argparse.Namespace) -> int:
    from noloco_node.config.files import first_sentence, shipped_configs

    configs = shipped_configs()
    width = max(map(len, configs))
    for name, path in configs.items():
        print(f"{name:<{width}}  {textwrap.shorten(first_sentence(path), 150, placeholder=' …')}")
    return int(ExitCode.OK)


def _completion(options: argparse.Namespace) -> int:
    from argcomplete.shell_integration import shellcode

    print(shellcode(["noloco-node"], shell=options.shell))
    return int(ExitCode.OK)


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


def status_arguments(command: argparse.ArgumentParser) -> None:
    """The options of `status`."""
    command.add_argument("run_folder", metavar="RUN_FOLDER", type=Path, nargs="?", help="run folder of the node")
    command.set_defaults(call=_status)


def pause_arguments(command: argparse.ArgumentParser, word: Word) -> None:
    """The options of `pause` and of `resume`, which `word` says."""
    command.add_argument("run_folder", metavar="RUN_FOLDER", type=Path, nargs="?", help="of a node, or of several")
    command.set_defaults(call=partial(_tell, word))


def report_arguments(command: argparse.ArgumentParser) -> None:
    """The options of `report`."""
    command.add_argument("run_folder", metavar="RUN_FOLDER", type=Path, nargs="?", help="of a node, or of several")
    command.add_argument("--out", metavar="DIR", type=Path, help="where the page goes (default: RUN_FOLDER/report)")
    command.set_defaults(call=_report)


def print_report(made: Made) -> None:
    """What a report was made of, and where it lies."""
    from noloco_node.telemetry.words import printable

    told, summary = made.told, made.told.summary
    nodes = "one node" if summary.nodes == 1 else f"{summary.nodes} nodes"
    still = "still running" if summary.nodes == 1 else f"{len(told.running)} of them still running"
    going_on = f", {still}" if told.running else ""
    print(f"run {printable(summary.run_name)}, {nodes}{going_on}: {summary.tokens:,} tokens in this folder")
    if told.passed_over:
        print(f"{told.passed_over:,} lines hold no event that this version writes: passed over")
    print(f"page      {made.page}")


def _run_folder_of(options: argparse.Namespace) -> Path:
    """The one that was named, else that of the node that would run here."""
    if options.run_folder is not None:
        return options.run_folder
    from noloco_node.config.load import load_join  # a named folder needs no settings, which take a while to load

    return load_join((), os.environ).node.run_folder


def _status(options: argparse.Namespace) -> int:
    from noloco_node.diagnostics.status import status_lines

    print("\n".join(status_lines(_run_folder_of(options))))
    return int(ExitCode.OK)


def _tell(word: Word, options: argparse.Namespace) -> int:
    from noloco_node.diagnostics.pausing import tell_nodes

    for line in tell_nodes(_run_folder_of(options), word):
        print(line)
    return int(ExitCode.OK)


def _report(options: argparse.Namespace) -> int:
    say_drawing()
    from noloco_node.report.page import make_report

    print_report(make_report(_run_folder_of(options), options.out))
    return int(ExitCode.OK)
