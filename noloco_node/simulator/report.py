"""A simulation's files: results.json, table.md, plots."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from noloco_node import __version__
from noloco_node.config.load import Config
from noloco_node.laboratory.canvas import PALETTE, Sheet, caption
from noloco_node.simulator.course import Simulated


def write_results(config: Config, found: Simulated, command: str, folder: Path) -> dict[str, Path]:
    """Files by name. Raises OSError where `folder` cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {name: folder / name for name in ("results.json", "table.md", "course.png")}
    whole: dict[str, Any] = {
        "version": __version__,
        "command": command,
        "trace": found.trace,
        "virtual_hours": found.virtual_hours,
        "core_hours": found.core_hours,
        "sim": config.sim.model_dump(mode="json"),
        "run": config.run.name,
        "run_id": config.run.run_id,
        "figures": found.figures.as_json(),
    }
    files["results.json"].write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    files["table.md"].write_text(table(found) + "\n", encoding="utf-8")
    _draw(found, files["course.png"])
    return files


def table(found: Simulated) -> str:
    """The figures for a person."""
    figures, rows = found.figures, list[tuple[str, str]]()
    rows.append(("virtual time", f"{found.virtual_hours:.2f} h"))
    rows.append(("virtual hours a core hour", f"{found.virtual_hours / max(found.core_hours, 1e-9):.0f}"))
    rows.append(
        (
            "nodes started / killed / failed",
            f"{figures.nodes_started} / {figures.nodes_killed} / {figures.nodes_failed}",
        )
    )
    rows.append(("devices at work, by stage", ", ".join(f"{share:.0%}" for share in figures.work_share)))
    rows.append(("trained tokens a second", f"{figures.tokens_per_second:,.0f}"))
    rows.append(
        ("outer steps", ", ".join(f"{count:,} {kind}" for kind, count in sorted(figures.outer_steps.items())) or "none")
    )
    rows.append(("of those committed, alone", f"{figures.alone_share:.1%}"))
    for stage, pairing in enumerate(figures.pairing):
        if pairing is not None:
            said = f"{pairing.meetings:,} meetings of {pairing.pairs:,} pairs, "
            said += f"chi-square {pairing.chi_square:.1f}, p {pairing.p_value:.2g}"
            rows.append((f"evenness of pairing, stage {stage}", said))
    received, sent = figures.directory_received, figures.directory_sent
    rows.append(("directory, received a node", f"{received[0] / 1e3:.2f} kB/s, at most {received[1] / 1e3:.2f}"))
    rows.append(("directory, sent a node", f"{sent[0] / 1e3:.2f} kB/s, at most {sent[1] / 1e3:.2f}"))
    for method, octets in sorted(figures.sent_per_node.items(), key=lambda each: -each[1])[:8]:
        rows.append((f"sent a node: {method}", f"{octets / 1e3:.2f} kB/s"))
    rows.append(("trace", found.trace))
    return "\n".join(["| figure | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def _or_gap(value: float | None) -> float:
    return math.nan if value is None else value


def _draw(found: Simulated, path: Path) -> None:
    sheet, samples = Sheet(1, 3, title="a swarm in virtual time"), found.figures.samples
    hours = [sample.hours for sample in samples]
    for panel, name in zip(sheet.panels[0], ("loss (nats per token)", "spread of slow weights", "nodes"), strict=True):
        caption(panel, name)
        panel.set_xlabel("virtual hours")  # pyright: ignore[reportUnknownMemberType]
    loss, spread, nodes = (panel.plot for panel in sheet.panels[0])  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    loss(hours, [_or_gap(sample.loss) for sample in samples], color=PALETTE[0])
    for stage in range(len(found.figures.work_share)):
        spread(hours, [_or_gap(s.spread[stage]) for s in samples], color=PALETTE[stage % 10], label=f"stage {stage}")
    nodes(hours, [sample.nodes for sample in samples], color=PALETTE[2])
    sheet.legend()
    sheet.save(path)
