"""The chaos suite: real daemons, faults on schedule that are shown to have fired, a verdict for each scenario.

`python -m tests.chaos` runs the long form and writes a report; `test_short.py` runs the short form with the other
tests. A scenario is a function `async (Lab) -> Verdict` in `scenarios/`, entered in `scenarios.SCENARIOS`.
"""
