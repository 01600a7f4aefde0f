"""Verdicts and the report: Markdown for people, JSON for machines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

Figure = str | int | float | bool | None | list[float] | dict[str, float]


@dataclass(frozen=True)
class Fault:
    """One fault that was injected."""

    at: float
    """Wall time."""
    what: str
    evidence: str
    """What shows that it took effect; a fault without evidence fails its scenario."""


@dataclass(frozen=True)
class Check:
    """One demand, and whether it held."""

    demand: str
    held: bool
    found: str


@dataclass
class Verdict:
    """What a scenario found."""

    scenario: str
    faults: list[Fault] = field(default_factory=list[Fault])
    checks: list[Check] = field(default_factory=list[Check])
    figures: dict[str, Figure] = field(default_factory=dict[str, Figure])
    skipped: str = ""
    """Why it could not run here; empty where it ran."""

    @property
    def passed(self) -> bool:
        """At least one fault fired, each with its evidence, and every demand held."""
        fired = bool(self.faults) and all(fault.evidence for fault in self.faults)
        return bool(self.skipped) or (fired and bool(self.checks) and all(check.held for check in self.checks))

    def fault(self, at: float, what: str, evidence: str) -> None:
        """Note a fault with its evidence."""
        self.faults.append(Fault(at, what, evidence))

    def demand(self, demand: str, held: bool, found: object) -> None:
        """Note a demand and what was found."""
        self.checks.append(Check(demand, held, str(found)))

    def complaint(self) -> str:
        """What did not hold, for a person; empty where it passed."""
        lines = [f"{check.demand}: {check.found}" for check in self.checks if not check.held]
        lines += [f"did not fire: {fault.what}" for fault in self.faults if not fault.evidence]
        return "\n".join(lines) or ("" if self.passed else "no fault or no demand was noted")


def markdown(verdicts: Sequence[Verdict], heading: str) -> str:
    """The report for people."""
    lines = [f"# {heading}", "", "| scenario | verdict | demands held | faults fired |", "|---|---|---|---|"]
    for verdict in verdicts:
        held = f"{sum(check.held for check in verdict.checks)} of {len(verdict.checks)}"
        lines.append(f"| {verdict.scenario} | {_word(verdict)} | {held} | {len(verdict.faults)} |")
    for verdict in verdicts:
        lines += ["", f"## {verdict.scenario}: {_word(verdict)}", ""]
        lines += [f"not run here: {verdict.skipped}"] if verdict.skipped else []
        lines += [f"- {'held' if c.held else '**not held**'}: {c.demand} ({c.found})" for c in verdict.checks]
        if verdict.faults:
            began = verdict.faults[0].at
            lines += ["", "Faults (seconds after the first one):", ""]
            lines += [f"- {fault.at - began:.1f}: {fault.what}; {fault.evidence}" for fault in verdict.faults]
        if verdict.figures:
            lines += ["", "| figure | value |", "|---|---|"]
            lines += [f"| {name} | {_shown(value)} |" for name, value in verdict.figures.items()]
    return "\n".join(lines) + "\n"


def write_report(folder: Path, verdicts: Sequence[Verdict], heading: str, facts: Mapping[str, Figure]) -> None:
    """`report.md` and `report.json` in `folder`."""
    (folder / "report.md").write_text(markdown(verdicts, heading), encoding="utf-8")
    data = {**facts, "scenarios": [{**asdict(verdict), "passed": verdict.passed} for verdict in verdicts]}
    (folder / "report.json").write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _word(verdict: Verdict) -> str:
    return "skipped" if verdict.skipped else "passed" if verdict.passed else "FAILED"


def _shown(value: Figure) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return ", ".join(f"{number:.4g}" for number in value)
    if isinstance(value, dict):
        return ", ".join(f"{name} {number:.4g}" for name, number in value.items())
    return str(value)
