"""The command `lab`: from a configuration to a folder with results.json, table.md and plots."""

from __future__ import annotations

import platform
import shlex
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from noloco_node import __version__
from noloco_node.config.load import Config
from noloco_node.errors import ExitCode, UserError
from noloco_node.laboratory.expansion import check_points, expand
from noloco_node.laboratory.experiment import Experiment, Journal, OnFinished, planned
from noloco_node.laboratory.figures import Result, Results
from noloco_node.laboratory.report import markdown
from noloco_node.storage import atomic


def plan_lab(config: Config) -> tuple[int, int]:
    """The trainings of an experiment, and their tokens together. Raises UserError (CONFIG) as `expand` does."""
    phases = planned(config.lab, expand(config))
    return sum(phase.trainings for phase in phases), sum(phase.tokens for phase in phases)


def run_lab(config: Config, out: Path, command: str, progress: OnFinished) -> dict[str, Path]:
    """Run the experiment, or what is missing of it, and write its results; returns the files by name. `command` repeats
    it. Raises UserError: CONFIG before anything is trained, DATA where the text cannot be read, RUN_FOLDER if `out`
    cannot be written, and what the training raises."""
    from noloco_node.data.prepared import fingerprint_of

    cells = expand(config)
    check_points(cells)
    _create(out)
    text = fingerprint_of(config.run.data)
    results = Experiment(config.lab, cells, Journal(out / "runs.jsonl", text), progress).run()
    return write_results(config, results, text, out, command)


def write_results(config: Config, results: Sequence[Result], text: str, out: Path, command: str) -> dict[str, Path]:
    """Write results.json, table.md and the plots that the lab file asks for; returns the files by name."""
    from noloco_node.laboratory.plots import draw

    record = Results(
        command=command,
        versions={
            "noloco_node": __version__,
            "torch": metadata.version("torch"),
            "python": platform.python_version(),
        },
        text=text,
        run=config.run.model_dump(mode="json"),
        lab=config.lab.model_dump(mode="json"),
        results=list(results),
    )
    files = {"results": out / "results.json", "table": out / "table.md"}
    atomic.write_bytes(files["results"], record.as_json().encode())
    atomic.write_bytes(files["table"], markdown(record).encode())
    for plot in config.lab.plots:
        files[f"plot, {plot}"] = draw(plot, record, out / f"{plot}.png")
    return files


def command_line(config: Path, out: Path, overrides: Sequence[str]) -> str:
    """The command that repeats an experiment, as a shell takes it."""
    parts = ["noloco-node", "lab", str(config), "--out", str(out)]
    for override in overrides:
        parts += ["--set", override]
    return shlex.join(parts)


def _create(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        atomic.write_bytes(out / ".probe", b"")
        (out / ".probe").unlink()
    except OSError as error:
        raise UserError(
            ExitCode.RUN_FOLDER,
            f"--out is '{out}', which cannot be written: {error.strerror or error}",
            "name a folder that does not exist yet or that you may write to",
        ) from None
