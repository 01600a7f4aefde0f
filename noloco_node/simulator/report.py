"""A simulation's files: results.json and table.md."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from noloco_node import __version__
from noloco_node.config.experiments import HuntSpec, SimSpec
from noloco_node.config.load import Config
from noloco_node.simulator.course import Simulated
from noloco_node.simulator.hunt import Hunted
from noloco_node.telemetry.words import one_line

_Row = tuple[str, ...]


@dataclass(frozen=True)
class Simulation:
    """What came of a simulation of any kind."""

    kind: str
    sim: dict[str, Any]
    """Its settings."""
    trace: str
    """Hash of its course."""
    virtual_hours: float
    core_hours: float
    figures: dict[str, Any]
    rows: Sequence[_Row]
    """For a person; the first one is the head."""
    run: tuple[str, str] | None = None
    """Name and id of the run, where it is one."""
    node: dict[str, Any] | None = None
    """Its nodes' settings, where these are whole: those that are no defaults."""

    @property
    def table(self) -> str:
        """Markdown."""
        return table_of(self.rows)


def table_of(rows: Sequence[Sequence[str]]) -> str:
    """Markdown; the first row is the head."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], f"|{'---|' * len(rows[0])}", *lines[1:]])


def write_results(result: Simulation, command: str, folder: Path) -> dict[str, Path]:
    """Files by name. Raises OSError where `folder` cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {name: folder / name for name in ("results.json", "table.md")}
    whole: dict[str, Any] = {
        "version": __version__,
        "command": command,
        "kind": result.kind,
        "trace": result.trace,
        "virtual_hours": result.virtual_hours,
        "core_hours": result.core_hours,
        "sim": result.sim,
        **({"run": result.run[0], "run_id": result.run[1]} if result.run else {}),
        **({} if result.node is None else {"node": result.node}),
        "figures": result.figures,
    }
    text = json.dumps(_plain(whole), indent=1, allow_nan=False)
    files["results.json"].write_text(text + "\n", encoding="utf-8")
    head = f"# A simulated {result.kind}: `{one_line(command)}`"
    files["table.md"].write_text(f"{head}\n\n{result.table}\n", encoding="utf-8")
    return files


def of_swarm(config: Config, found: Simulated) -> Simulation:
    """What came of whole nodes."""
    return Simulation(
        kind="swarm",
        sim=_settings_of(config.sim),
        trace=found.trace,
        virtual_hours=found.virtual_hours,
        core_hours=found.core_hours,
        figures=found.figures.as_json(),
        rows=[("figure", "value"), *_swarm_rows(found)],
        run=(config.run.name, config.run.run_id),
        node=config.node.model_dump(mode="json", exclude_defaults=True),
    )


def _settings_of(sim: SimSpec | HuntSpec) -> dict[str, Any]:
    """All that a course goes by: not how many processes carry it out."""
    return sim.model_dump(mode="json", exclude={"workers"})


def of_hunt(hunt: HuntSpec, found: Hunted) -> Simulation:
    """What came of schedules of faults."""
    rows: list[_Row] = [("fault", "drawn", "took effect")]
    rows += [(kind, f"{count:,}", f"{found.fired[kind]:,}") for kind, count in found.drawn.items()]
    rows.append(("schedules / failed", f"{found.schedules:,}", f"{len(found.failed):,}"))
    return Simulation(
        kind="hunt",
        sim=_settings_of(hunt),
        trace=found.trace,
        virtual_hours=found.virtual_hours,
        core_hours=found.cpu_seconds / 3600.0,
        figures={
            "schedules": found.schedules,
            "failed": list(found.failed),
            "drawn": found.drawn,
            "fired": found.fired,
        },
        rows=rows,
    )


def _swarm_rows(found: Simulated) -> Iterable[_Row]:
    figures = found.figures
    yield "virtual time", f"{found.virtual_hours:.2f} h"
    yield "virtual hours a core hour", f"{found.virtual_hours / max(found.core_hours, 1e-9):.0f}"
    counts = (figures.nodes_started, figures.nodes_killed, figures.nodes_failed, figures.moves)
    yield "nodes started / killed / failed, moves", " / ".join(map(str, counts))
    yield "devices at work, by stage", ", ".join(f"{share:.0%}" for share in figures.work_share)
    yield "trained tokens a second", f"{figures.tokens_per_second:,.0f}"
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(figures.outer_steps.items()))
    yield "outer steps", kinds or "none"
    taken = figures.outer_steps.get("paired", 0) + figures.outer_steps.get("no_partner", 0)
    yield "of those committed, alone", f"{figures.alone_share:.1%}" if taken else "-"
    if figures.samples:
        last = figures.samples[-1]
        yield "loss, at the last sample", _shown(last.loss)
        yield "replica divergence then, by stage", ", ".join(map(_shown, last.spread))
    received, sent = figures.directory_received, figures.directory_sent
    yield "directory, received a node", f"{received[0] / 1e3:.2f} kB/s, at most {received[1] / 1e3:.2f}"
    yield "directory, sent a node", f"{sent[0] / 1e3:.2f} kB/s, at most {sent[1] / 1e3:.2f}"
    for method, octets in sorted(figures.sent_per_node.items(), key=lambda each: -each[1])[:8]:
        yield f"sent a node: {method}", f"{octets / 1e3:.2f} kB/s"
    yield "trace", found.trace


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _plain(value: Any) -> Any:
    """The value as JSON has it: what is no number is null."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in cast("dict[str, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in cast("Sequence[Any]", value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value
