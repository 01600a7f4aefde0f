"""The instruments of the chaos suite measure what they say: the figures follow from the events."""

from __future__ import annotations

from pathlib import Path

import pytest

from noloco_node.launch.local_swarm import Observer, SwarmNode
from noloco_node.telemetry.events import InnerStep
from tests.chaos.observe import rate, seconds_to_recover
from tests.chaos.vitals import Vitals, growths


def _node(*tokens_at: tuple[float, int]) -> SwarmNode:
    node = SwarmNode("s0-n0", 0, Path("nowhere"), Observer())
    node.events += [
        InnerStep(
            time=time, step=1, clock=0, tokens=tokens, loss=1, learning_rate=1, gradient_norm=1, skipped=False,
            live_replicas=1,
        )
        for time, tokens in tokens_at
    ]  # fmt: skip
    return node


def test_throughput_and_recovery_follow_from_the_events() -> None:
    """A hundred tokens a second, nothing for four seconds, then a hundred again."""
    node = _node(*((float(second), 100) for second in range(20) if not 10 <= second < 14))
    assert rate([node], 0, 10) == 100
    assert seconds_to_recover([node], 10.0, 20.0, wanted=90) == pytest.approx(3.25)
    assert seconds_to_recover([node], 10.0, 16.0, wanted=90) is None


def test_what_creeps_is_not_flat() -> None:
    """One descriptor a look is a leak; a fixed number is none, and what warms up at first is forgiven."""
    steady = [Vitals(time, 100 + 50 * (time > 2), 40, 10, 30, 50, 20) for time in range(50)]
    assert all(growth.flat for growth in growths(steady))
    leaking = [Vitals(time, 100, 40 + time, 10, 30, 50, 20) for time in range(50)]
    assert [growth.name for growth in growths(leaking) if not growth.flat] == ["descriptors"]
