"""Reads what the nodes in a run folder wrote, whatever kind of folder it is, and also while they write on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import cast

from pydantic import BaseModel, ConfigDict, ValidationError

from noloco_node import __version__
from noloco_node.diagnostics.status import node_folders, said_now
from noloco_node.errors import ExitCode, UserError
from noloco_node.report.chronicle import Chronicle
from noloco_node.storage.run_folder import RunFolder
from noloco_node.telemetry.events import MAX_LINE_BYTES, AnyEvent, EventReader, NodeStarted
from noloco_node.telemetry.summary import Summary, summarize_histories
from noloco_node.telemetry.words import printable

_VERSION = re.compile(rb'"version": ?"([0-9A-Za-z.+-]{1,32})"')

DIVERGING = ("loss", "gradient_norm", "difference_norm", "replica_divergence")
MOST, MOST_BELOW = 1e18, 1e-60
"""A number in an event is at most the first and at least the second, or 0."""


class _Merged(BaseModel):
    """The part of `summary.json` that no event tells."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)

    validation_loss_merged: float | None = None


@dataclass(frozen=True, slots=True)
class ReportedRun:
    """What a run folder tells at one moment."""

    path: Path
    chronicles: tuple[Chronicle, ...]
    summary: Summary
    now: dict[str, str]
    """By node: what it does, or how it ended, as `noloco-node status` says it."""
    running: frozenset[str]
    """Nodes whose process holds their folder."""
    passed_over: int
    """Lines that are no events of this version, or hold numbers that no node writes."""
    read_at: float
    """Wall time, seconds since 1970."""


def read_folder(path: Path, now: float) -> ReportedRun:
    """Read the folder of a node, of a local swarm or of a machine's devices at wall time `now`. Raises UserError
    (RUN_FOLDER) if no node has run there, or none has been up yet. It does so too if another version wrote what lies
    there, and if it cannot be read."""
    chronicles: list[Chronicle] = []
    said: dict[str, str] = {}
    running: set[str] = set()
    passed_over = 0
    try:
        for member in node_folders(path):
            folder = RunFolder(member)
            reader, chronicle = EventReader(folder.events), Chronicle(printable(member.resolve().name))
            for event in reader.new_events():
                if is_plausible(event):
                    chronicle.observe(event)
                else:
                    passed_over += 1
            passed_over += reader.passed_over
            chronicles.append(chronicle)
            said[chronicle.name] = said_now(folder, now)
            if folder.in_use:
                running.add(chronicle.name)
    except OSError as error:
        raise UserError(
            ExitCode.RUN_FOLDER,
            f"'{error.filename or path}' cannot be read: {error.strerror or error}",
            "read it as the user whose node wrote it, or copy the folder",
        ) from None
    if not any(chronicle.history.started for chronicle in chronicles):
        raise _nothing_to_tell(path, passed_over)
    histories = [chronicle.history for chronicle in chronicles]
    _check_one_run(path, [history.started for history in histories if history.started is not None])
    summary = summarize_histories(histories, _merged_loss(path))
    return ReportedRun(path, tuple(chronicles), summary, said, frozenset(running), passed_over, now)


def _check_one_run(path: Path, starts: Sequence[NodeStarted]) -> None:
    runs = {started.run_id: started.run_name for started in starts}
    if len(runs) > 1:
        named = ", ".join(sorted({printable(name)[:40] for name in runs.values()}))
        raise UserError(
            ExitCode.RUN_FOLDER,
            f"the nodes in '{path}' are of {len(runs)} runs: {named}",
            "name the folder of one node, or move those of one run into a folder of their own",
        )


def is_plausible(event: AnyEvent) -> bool:
    """Tell whether all its numbers are such as a node may write: a folder may come from anybody. A time without end has
    no place on an axis. Losses and norms may be infinite, or no numbers."""
    return all(_of_a_node(value, may_diverge=name in DIVERGING) for name, value in event)


def _of_a_node(value: object, *, may_diverge: bool = False) -> bool:
    if isinstance(value, int | float):
        return MOST_BELOW <= abs(value) <= MOST or value == 0 or (may_diverge and not isfinite(value))
    if isinstance(value, BaseModel):
        return all(_of_a_node(inner, may_diverge=name in DIVERGING) for name, inner in value)
    if isinstance(value, dict):
        return all(_of_a_node(inner) for inner in cast("dict[str, object]", value).values())
    if isinstance(value, list | tuple):
        return all(_of_a_node(inner) for inner in cast("Sequence[object]", value))
    return True


def _merged_loss(path: Path) -> float | None:
    try:
        return _Merged.model_validate_json((path / "summary.json").read_bytes()).validation_loss_merged
    except (OSError, ValidationError):  # there is none yet, or another version's
        return None


def _nothing_to_tell(path: Path, passed_over: int) -> UserError:
    if not passed_over:
        return UserError(
            ExitCode.RUN_FOLDER,
            f"there is nothing to report of '{path}' yet: no node has been up there",
            f"try again when one is; noloco-node status {path} says what it does",
        )
    written = _version_of(path)
    return UserError(
        ExitCode.RUN_FOLDER,
        f"the events in '{path}' are of {f'noloco-node {written}' if written else 'another version of noloco-node'}: "
        f"this one ({__version__}) cannot read them",
        f"make the report with that version: pip install noloco-node=={written or 'VERSION'}",
    )


def _version_of(path: Path) -> str:
    for member in node_folders(path):
        with RunFolder(member).events.open("rb") as file:
            while line := file.readline(MAX_LINE_BYTES):
                found = _VERSION.search(line)
                if found and found.group(1).decode() != __version__:
                    return found.group(1).decode()
    return ""
