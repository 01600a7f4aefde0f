"""What tests may take is judged by test and by folder."""

from __future__ import annotations

from pathlib import Path

from tests.budgets import BUDGETS, OTHERS, Budget, Cost, exceeded, folder_of

SMALL = {"tests": Budget(10, 20, 3, 5), "tests/outer": Budget(1, 2, 3, 5)}


def test_a_test_and_a_folder_are_judged_each_by_its_own_budget() -> None:
    """CPU time always; the clock's only where it is asked for. The dearest comes first."""
    costs = {
        "tests/test_cli.py::test_one[a/b]": Cost(cpu=1.0, clock=6.0),
        "tests/outer/test_codec.py::test_two": Cost(cpu=0.9, clock=1.0),
        "tests/outer/test_codec.py::test_three": Cost(cpu=3.1, clock=3.1),
        "tests/nowhere/test_it.py::test_four": Cost(cpu=OTHERS.test_cpu, clock=0.0),
    }
    cpu = [
        "tests/outer: 4.0 s of CPU, 1 s are its budget",
        "tests/outer/test_codec.py::test_three: 3.1 s of CPU, 3 s are its budget",
    ]
    clock = [
        "tests/outer: 4.1 s on the clock, 2 s are its budget",
        "tests/test_cli.py::test_one[a/b]: 6.0 s on the clock, 5 s are its budget",
    ]
    assert exceeded(costs, SMALL, clock=False) == cpu
    assert sorted(exceeded(costs, SMALL, clock=True)) == sorted(cpu + clock)
    assert exceeded({}, SMALL, clock=True) == []


def test_every_folder_with_tests_has_a_budget() -> None:
    """No budget is left behind for one that is gone."""
    here = Path(__file__).parent
    folders = {folder_of(str(file.relative_to(here.parent))) for file in here.rglob("test_*.py")}
    assert folders == set(BUDGETS)
