"""Writes the report of a run folder: the page and its pictures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from noloco_node import ambient
from noloco_node.errors import ExitCode, UserError
from noloco_node.report.folder import ReportedRun, read_folder
from noloco_node.report.page import page
from noloco_node.storage import atomic

PLACE = "report"
"""In the run folder, where nothing else is named."""


@dataclass(frozen=True, slots=True)
class Made:
    """What was written."""

    told: ReportedRun
    page: Path
    pictures: list[Path]


def make_report(run_folder: Path, target: Path | None = None, now: float | None = None) -> Made:
    """Write the report of the run folder into `target`, or into `PLACE` within the run folder. A report that lies
    there is replaced.

    Raises UserError (RUN_FOLDER) as `read_folder` does, and where the target cannot be written.
    """
    told = read_folder(run_folder, ambient.wall() if now is None else now)
    text = page(told)
    from noloco_node.report.pictures import draw  # matplotlib, which no refusal needs to wait for

    folder = target or run_folder / PLACE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        pictures = draw(told, folder)
        written = folder / "report.html"
        atomic.write_bytes(written, text.encode())
    except OSError as error:
        raise UserError(
            ExitCode.RUN_FOLDER,
            f"the report cannot be written to '{folder}': {error.strerror or error}",
            "name another folder with --out",
        ) from None
    return Made(told, written, pictures)
