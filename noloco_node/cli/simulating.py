"""`noloco-node simulate`: a swarm in virtual time, or a hunt by drawn faults."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from noloco_node.cli.node_options import set_argument
from noloco_node.errors import ExitCode
from noloco_node.telemetry.words import say_loading

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from rich.console import Console

    from noloco_node.config.load import Config, HuntConfig
    from noloco_node.simulator.report import Simulation


def simulate_arguments(command: argparse.ArgumentParser) -> None:
    """The options of `simulate`."""
    command.add_argument("config", metavar="CONFIG", type=Path, help="YAML file, or a name from `config list`")
    command.add_argument("--out", metavar="DIR", type=Path, required=True, help="where the results go")
    command.add_argument("--seeds", metavar="N", type=int, help="of a hunt, how many schedules: --set sim.seeds=N")
    set_argument(command, "sim.nodes=64")
    command.set_defaults(call=_simulate)


def _simulate(options: argparse.Namespace) -> int:
    from rich.console import Console

    from noloco_node.config.load import Config, load_simulation

    sets = [*options.set, *([f"sim.seeds={options.seeds}"] if options.seeds is not None else [])]
    config = load_simulation(options.config, sets)
    say_loading()
    from noloco_node.simulator.report import write_results

    _can_be_written(options.out)
    words = [word for each in sets for word in ("--set", each)]
    command = shlex.join(["noloco-node", "simulate", str(options.config), "--out", str(options.out), *words])
    with _progress(Console()) as told:
        result = _swarm(config, told) if isinstance(config, Config) else _hunt(config, told)
    files = write_results(result, command, options.out)
    print(result.table)
    for name, path in files.items():
        print(f"{name:<30} {path}")
    print(f"trace {result.trace}: the same command gives the same one")
    return int(ExitCode.CHECK_FAILED if result.kind == "hunt" and result.figures["failed"] else ExitCode.OK)


def _can_be_written(folder: Path) -> None:
    """Before hours of work that would have no place. UserError (RUN_FOLDER)."""
    from noloco_node.errors import UserError

    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            ExitCode.RUN_FOLDER,
            f"--out {folder} cannot be written: {error.strerror or error}",
            "name a folder that this user can write",
        ) from None


def _swarm(config: Config, told: Callable[[float, float], None]) -> Simulation:
    from noloco_node.simulator.course import simulate
    from noloco_node.simulator.report import of_swarm

    sim = config.sim
    print(f"{sim.nodes} nodes of {config.run.stages} stages, {sim.hours:g} virtual hours, seed {sim.seed}")
    return of_swarm(config, simulate(config, told))


def _hunt(config: HuntConfig, told: Callable[[float, float], None]) -> Simulation:
    from noloco_node.simulator.hunt import go_hunting
    from noloco_node.simulator.report import of_hunt

    return of_hunt(config.sim, go_hunting(config.sim, print, told))


@contextlib.contextmanager
def _progress(console: Console) -> Generator[Callable[[float, float], None]]:
    """Shows how far it is: a bar on a terminal, and lines beside the results where there is none."""
    from rich.progress import Progress

    if not console.is_terminal:
        yield _lines()
        return
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("simulated", total=1.0)
        yield lambda done, every: bar.update(task, completed=done / every)


def _lines() -> Callable[[float, float], None]:
    said = 0

    def show(done: float, every: float) -> None:
        nonlocal said
        percent = int(100.0 * done / every)
        if said + 5 <= percent < 100:
            said = percent
            print(f"{percent} % simulated", file=sys.stderr, flush=True)

    return show
