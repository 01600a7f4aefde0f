"""The scenarios by name, in the order in which they are run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from tests.chaos.lab import Lab
from tests.chaos.report import Verdict
from tests.chaos.scenarios.hostile import hostile_peer
from tests.chaos.scenarios.kills import kills_in_waves
from tests.chaos.scenarios.partition import partition
from tests.chaos.scenarios.soak import soak
from tests.chaos.scenarios.stranger import stranger

Scenario = Callable[[Lab], Awaitable[Verdict]]

SCENARIOS: Mapping[str, Scenario] = {
    "kills": kills_in_waves,
    "partition": partition,
    "hostile": hostile_peer,
    "soak": soak,
    "stranger": stranger,
}
