"""What each folder of tests may take, and which tests and folders have taken more.

A test costs CPU time: that of this process while it runs, and that of every process that it started and waited for. It
also costs time on the clock. CPU time hardly depends on what else the machine does. The clock's does: it is judged only
if that is asked for (`--judge-budgets`, on a machine that does nothing else), by an exit code of its own.
"""

from __future__ import annotations

import resource
import time
from collections import defaultdict
from collections.abc import Generator, Mapping
from pathlib import PurePosixPath
from typing import NamedTuple

import pytest


class Budget(NamedTuple):
    """Seconds: of CPU and on the clock, for the whole folder and for each of its tests."""

    folder_cpu: float
    folder_clock: float
    test_cpu: float
    test_clock: float


BUDGETS: Mapping[str, Budget] = {
    "tests": Budget(150, 220, 20, 60),
    "tests/chaos": Budget(40, 80, 25, 40),
    "tests/config": Budget(8, 12, 2, 4),
    "tests/daemons": Budget(170, 480, 30, 70),
    "tests/data": Budget(25, 45, 5, 10),
    "tests/hunt": Budget(40, 60, 8, 20),
    "tests/model": Budget(30, 45, 8, 12),
    "tests/outer": Budget(25, 45, 5, 10),
    "tests/report": Budget(6, 10, 2, 4),
    "tests/simulator": Budget(40, 60, 8, 30),
    "tests/sizing": Budget(8, 12, 1, 2),
    "tests/storage": Budget(8, 12, 2, 4),
    "tests/swarm": Budget(210, 400, 8, 20),
    "tests/telemetry": Budget(20, 40, 3, 8),
    "tests/training": Budget(35, 50, 8, 18),
    "tests/virtual": Budget(45, 80, 10, 30),
}
"""In all 860 seconds of CPU, of which two cores have 960 in eight minutes; imports (28) and pyright take the rest."""
OTHERS = Budget(5, 10, 1, 2)
"""The budget of a folder that is not named, which a test forbids."""
EXCEEDED = 8
"""Exit code of pytest where all tests passed and a budget was exceeded."""


class Cost(NamedTuple):
    """Seconds."""

    cpu: float = 0.0
    clock: float = 0.0

    def __add__(self, other: tuple[float, ...]) -> Cost:  # type: ignore[override]
        return Cost(self.cpu + other[0], self.clock + other[1])


def _now() -> Cost:
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return Cost(sum(usage.ru_utime + usage.ru_stime for usage in usages), time.monotonic())


def folder_of(test: str) -> str:
    """The budget's name for a test id: its folder, `tests` for what lies beside the folders."""
    parts = PurePosixPath(test.partition("::")[0]).parts
    return "/".join(parts[:2]) if len(parts) > 2 else parts[0]


def exceeded(costs: Mapping[str, Cost], budgets: Mapping[str, Budget], *, clock: bool) -> list[str]:
    """A line for each folder and each test, by test id, that has taken more than it may; the dearest first."""
    folders: dict[str, Cost] = defaultdict(Cost)
    lines: list[tuple[float, str]] = []

    def judge(name: str, cost: Cost, cpu: float, seconds: float) -> None:
        for what, taken, most in (("of CPU", cost.cpu, cpu), ("on the clock", cost.clock, seconds)):
            if taken > most and (clock or what == "of CPU"):
                lines.append((taken - most, f"{name}: {taken:.1f} s {what}, {most:g} s are its budget"))

    for test, cost in costs.items():
        folder = folder_of(test)
        folders[folder] += cost
        budget = budgets.get(folder, OTHERS)
        judge(test, cost, budget.test_cpu, budget.test_clock)
    for folder, cost in folders.items():
        budget = budgets.get(folder, OTHERS)
        judge(folder, cost, budget.folder_cpu, budget.folder_clock)
    return [line for _, line in sorted(lines, reverse=True)]


class Accountant:
    """Looks at the clocks around each test and says at the end what was too dear."""

    def __init__(self, *, judges: bool) -> None:
        self._judges = judges
        self._costs: dict[str, Cost] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Around a test with its fixtures."""
        before = _now()
        result = yield
        self._costs[item.nodeid] = Cost(*(after - start for after, start in zip(_now(), before, strict=True)))
        return result

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """The exit code."""
        if self._judges and exitstatus == pytest.ExitCode.OK and exceeded(self._costs, BUDGETS, clock=True):
            session.exitstatus = EXCEEDED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """What each folder took, where that is judged, and what was too dear."""
        if self._judges:
            folders: dict[str, Cost] = defaultdict(Cost)
            for test, cost in self._costs.items():
                folders[folder_of(test)] += cost
            terminalreporter.section("seconds of CPU and on the clock")
            for folder, cost in sorted(folders.items(), key=lambda row: -row[1].cpu):
                terminalreporter.line(f"{cost.cpu:8.1f} {cost.clock:8.1f}  {folder}")
        if lines := exceeded(self._costs, BUDGETS, clock=self._judges):
            terminalreporter.section("over the budgets of tests/budgets.py")
            for line in lines:
                terminalreporter.line(line)
