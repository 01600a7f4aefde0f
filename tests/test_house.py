"""The house does not grow unseen: whatever makes it larger than these figures changes the figure, too, and says why."""

from __future__ import annotations

from tests.house import journeys, sizes

BOUNDS = {
    "lines of the package": 59_512,
    "lines of the tests": 61_229,
    "lines of benchmarks and deploy": 4_915,
    "module-level numbers": 330,
    "files of the package": 278,
    "files of the package below 60 lines": 33,
    "kB of Markdown": 300,
    "kB of results in docs": 139,
    "decision records": 40,
}
WAYS = {"a microbatch": 32, "an outer step": 35, "a joiner": 58}
"""Files of the package on each way. An outer step may meet one more, as its two halves run beside each other."""


def test_no_figure_of_the_house_is_beyond_its_bound() -> None:
    """`python -m tests.house` prints them all."""
    found = sizes()
    assert found.keys() == BOUNDS.keys()
    beyond = {name: figure for name, figure in found.items() if figure > BOUNDS[name]}
    assert not beyond, "raise the bounds in the same commit, and say why it is worth it"


def test_each_journey_visits_few_files() -> None:
    """A reader goes through these files, from a trace of each."""
    found = journeys()
    assert found.keys() == WAYS.keys()
    assert not {name: files for name, files in found.items() if len(files) > WAYS[name]}
