"""Commands on a run folder: `status`, `report`; `pause` and `resume` for the node that runs there."""

from __future__ import annotations

import argparse
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from noloco_node.errors import ExitCode
from noloco_node.telemetry.waiting import say_drawing

if TYPE_CHECKING:
    from noloco_node.node.pause import Word
    from noloco_node.report.page import Made


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
