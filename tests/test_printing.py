"""What commands print for a person: the words fit the figures."""

from __future__ import annotations

import pytest

from noloco_node.cli.printing import print_result
from noloco_node.errors import ExitCode
from noloco_node.launch.local_run import SwarmResult
from noloco_node.telemetry.summary import summarize
from tests.telemetry import made_events as made


def test_the_speed_of_a_swarm_is_told_with_what_it_is_of(capsys: pytest.CaptureFixture[str]) -> None:
    """`61,440 tokens in 59 s, 1,033 tokens/s`: who divides gets 1,041, since the first step's tokens are no part of
    it."""
    summary = summarize(made.whole_run())
    print_result(SwarmResult(summary, ExitCode.OK, {}, {}))
    printed = capsys.readouterr().out
    assert "61,440 tokens; from the first inner step on 1,033 tokens/s, over 59 s\n" in printed
    assert f"training loss, last 5 %        {summary.training_loss:.4f} nats per token" in printed
