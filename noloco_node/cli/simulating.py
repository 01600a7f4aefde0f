"""`noloco-node simulate`: a swarm in virtual time."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from noloco_node.cli.node_options import set_argument
from noloco_node.errors import ExitCode

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console


SIMULATE_HELP = """\
Run a swarm in virtual time, in this process: the node's own code on modelled devices, links and directory. The `sim:`
part of CONFIG says how many nodes, on what, for how long. DIR gets results.json, table.md and a plot. The same command
gives the same course, whose hash is printed. What is modelled, and how far to trust it: docs/simulator.md.

example:
  noloco-node simulate sim/swarm --out results/sim --set sim.nodes=64 --set sim.hours=0.5"""


def simulate_arguments(command: argparse.ArgumentParser) -> None:
    """The options of `simulate`."""
    command.add_argument("config", metavar="CONFIG", type=Path, help="YAML file, or a name from `config list`")
    command.add_argument("--out", metavar="DIR", type=Path, required=True, help="where the results go")
    set_argument(command, "sim.nodes=64")
    command.set_defaults(call=_simulate)


def _simulate(options: argparse.Namespace) -> int:
    from rich.console import Console

    from noloco_node.config.load import load_config
    from noloco_node.simulator.course import simulate
    from noloco_node.simulator.report import table, write_results

    config = load_config(options.config, options.set)
    console = Console()
    sim = config.sim
    print(
        f"{sim.nodes} nodes of {config.run.stages} stages, {sim.hours:g} virtual hours, seed {sim.seed}, {sim.tensors}"
    )
    found = simulate(config, _bar(console))
    sets = [word for each in options.set for word in ("--set", each)]
    command = shlex.join(["noloco-node", "simulate", str(options.config), "--out", str(options.out), *sets])
    files = write_results(config, found, command, options.out)
    print(table(found))
    for name, path in files.items():
        print(f"{name:<30} {path}")
    print(f"trace {found.trace}: the same command gives the same one")
    return int(ExitCode.OK)


def _bar(console: Console) -> Callable[[float, float], None]:
    """Shows how far it is, where somebody watches."""
    from rich.progress import Progress

    if not console.is_terminal:
        return lambda _done, _all: None
    bar = Progress(console=console, transient=True)
    task = bar.add_task("virtual hours", total=1.0)
    bar.start()

    def show(done: float, every: float) -> None:
        bar.update(task, completed=done / every)
        if done >= every:
            bar.stop()

    return show
