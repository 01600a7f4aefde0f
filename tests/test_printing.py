"""What commands print for a person: the words fit the figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from noloco_node.cli.printing import print_finished, print_result
from noloco_node.errors import ExitCode
from noloco_node.laboratory.experiment import Finished
from noloco_node.laboratory.figures import Result
from noloco_node.launch.local_run import MODEL, SwarmResult
from noloco_node.telemetry.words import as_lag, as_long
from tests.telemetry import made_events as made


def test_the_speed_of_a_swarm_is_told_with_what_it_is_of(capsys: pytest.CaptureFixture[str]) -> None:
    """`61,440 tokens in 59 s, 1,033 tokens/s`: a division gives 1,041, since the first step's tokens are no part of
    it."""
    summary = made.summarize(made.whole_run())
    print_result(SwarmResult(summary, ExitCode.OK, {MODEL: Path("runs/it/model")}, {}))
    printed = capsys.readouterr().out
    assert printed.endswith("noloco-node generate runs/it/model --prompt TEXT\n")
    assert "61,440 tokens; from the first inner step on 1,033 tokens/s, over 59 s\n" in printed
    assert f"training loss, last 5 %        {summary.training_loss:.4f} nats per token" in printed


@pytest.mark.parametrize(
    ("seconds", "told"), [(-2.0, "0 s"), (4.2, "4 s"), (59.7, "60 s"), (424.0, "7 min"), (7560.0, "2.1 h"), (None, "?")]
)
def test_a_duration_below_a_minute_is_told_in_seconds(seconds: float | None, told: str) -> None:
    """`0:04 min left` has to be read twice."""
    assert as_long(seconds) == told


def test_what_a_laboratory_has_left_is_told_in_seconds_at_last(capsys: pytest.CaptureFixture[str]) -> None:
    """`about 0.0 min left` of four seconds."""
    result = Result.model_construct(
        variant="noloco",
        options={},
        replicas=2,
        tokens=1000,
        seed=1,
        purpose="report",
        validation_loss=2.0,
        seconds=3.0,
    )
    print_finished(Finished(result, 1, 2, 4.0))
    assert capsys.readouterr().out.endswith("3 s; about 4 s left\n")


def test_who_is_further_is_not_behind_by_less_than_nothing() -> None:
    assert [as_lag(tokens) for tokens in (None, 1200.0, 0.0, -0.3, -300.0)] == ["–", "1,200", "0", "0", "300 ahead"]
