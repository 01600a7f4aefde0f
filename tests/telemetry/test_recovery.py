"""The time back to 90 % of the speed after a loss, by made-up steps and accounts: the clock is theirs, nobody waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from noloco_node.telemetry.events import Account, AnyEvent, Doing, InnerStep
from noloco_node.telemetry.metrics import Metrics
from noloco_node.telemetry.recovery import GIVEN_UP_SECONDS, Recovery, slow_since, speed_before, time_back
from tests.telemetry import made_events as made

BEGIN, TARGET = 10_000.0, 10**9


def life(
    pace: Callable[[float], float], nodes: Callable[[float], list[int]], seconds: float, *, clock: float = 0.0
) -> Iterator[AnyEvent]:
    """A node that takes an inner step of 512 tokens every `pace(t)` seconds, and writes its books every two."""
    step_at, number = 0.0, 0
    for tick in range(int(seconds / 2) + 1):
        while step_at <= 2.0 * tick:
            number += 1
            yield made.inner_step(number, time=BEGIN + step_at, clock=clock)
            step_at += pace(step_at)
        now = 2.0 * tick
        yield made.account(time=BEGIN + now, clock=clock, target=TARGET, nodes_per_stage=nodes(now))


def times_back(events: Iterator[AnyEvent], stage: int = 0) -> tuple[list[float], Recovery]:
    """What each return took, and the follower at the end."""
    recovery, found = Recovery(stage), list[float]()
    for event in events:
        match event:
            case InnerStep():
                recovery.step(event)
            case Doing():
                recovery.doing(event)
            case Account():
                seconds = recovery.account(event)
                found += [] if seconds is None else [seconds]
            case _:
                pass
    return found, recovery


def lost_at(when: float, stage: int = 1) -> Callable[[float], list[int]]:
    """Three nodes of two stages each, of which one is seen to be gone."""
    return lambda now: [3 - (now >= when and stage == 0), 3 - (now >= when and stage == 1)]


@pytest.mark.parametrize("seen_late", [0.0, 30.0])
@pytest.mark.parametrize("stage", [0, 1])
def test_the_time_is_that_from_the_fall_of_the_speed_to_its_return(seen_late: float, stage: int) -> None:
    """That holds also if the loss is seen half a minute after the speed has fallen, as a killed peer's record lives
    on."""

    def pace(now: float) -> float:
        return 4.0 if 300.0 <= now < 360.0 else 1.0

    found, recovery = times_back(life(pace, lost_at(300.0 + seen_late, stage), 500.0))
    (seconds,) = found
    assert seconds == pytest.approx(60.0, abs=12.0), "the speed is counted over ten seconds"
    assert recovery.slow_for == 0.0


def test_a_loss_that_costs_no_speed_takes_no_time_and_a_slower_time_without_a_loss_is_none() -> None:
    """One is 0, after it has settled; the other is not counted."""
    found, _ = times_back(life(lambda _: 1.0, lost_at(300.0), 400.0))
    assert found == [0.0]
    found, _ = times_back(life(lambda now: 4.0 if 300 <= now < 360 else 1.0, lambda _: [3, 3], 500.0))
    assert found == []


def test_a_node_that_stays_slower_says_for_how_long_and_is_given_up_at_last() -> None:
    """Then its speed is the one that it has: it counts in the last bucket, and the next loss is measured by it."""
    found, recovery = times_back(life(lambda now: 1.0 if now < 300 else 2.0, lost_at(300.0), 900.0))
    assert found == []
    assert recovery.slow_for == pytest.approx(600.0, abs=12.0)
    found, recovery = times_back(life(lambda now: 1.0 if now < 300 else 2.0, lost_at(300.0), 2400.0))
    assert found == [pytest.approx(GIVEN_UP_SECONDS, abs=3.0)]
    assert recovery.slow_for == 0.0


def test_a_second_loss_before_the_return_is_part_of_the_first() -> None:
    """The speed before is that before both."""

    def nodes(now: float) -> list[int]:
        return [3, 3 - (now >= 300) - (now >= 450)]

    found, _ = times_back(life(lambda now: 3.0 if 300 <= now < 500 else 1.0, nodes, 600.0))
    assert found == [pytest.approx(200.0, abs=12.0)]


def test_nobody_is_lost_to_a_stage_that_has_no_dealings_with_it_nor_at_the_runs_end() -> None:
    """Losses of the stage before, of a stage two further on, at the end, while it leaves itself: none is one."""

    def pace(now: float) -> float:
        return 4.0 if now >= 300.0 else 1.0

    assert times_back(life(pace, lost_at(300.0, 0), 500.0), stage=1)[1].slow_for == 0.0
    ending = life(pace, lost_at(300.0), 500.0, clock=0.97 * TARGET)
    assert times_back(ending)[1].slow_for == 0.0

    def leaving() -> Iterator[AnyEvent]:
        for event in life(pace, lost_at(300.0), 500.0):
            if isinstance(event, Account) and event.time == BEGIN + 310.0:
                yield Doing(what="draining", detail="leaves", since=event.time, time=event.time)
            yield event

    found, recovery = times_back(leaving())
    assert (found, recovery.slow_for) == ([], 0.0)


def test_a_clock_that_is_set_back_leaves_nothing_to_wait_for() -> None:
    """By a day: what is told afterwards counts as in a new life."""
    one = life(lambda _: 1.0, lost_at(1e9), 900.0)
    again = life(lambda now: 4.0 if 400.0 <= now < 450.0 else 1.0, lost_at(400.0), 900.0)
    back = [event.model_copy(update={"time": event.time - 86_400.0}) for event in again]
    assert times_back(iter([*one, *back]))[0] == times_back(iter(back))[0] != []


def test_the_pure_parts() -> None:
    """A median of three minutes, the first of the slow figures before a loss, and the first that is not slow after."""
    rates = [(float(at), 10.0 if at < 200 or at >= 260 else 5.0) for at in range(0, 300, 10)]
    assert speed_before(rates, 190.0) == 10.0
    assert speed_before(rates[:4], 190.0) is None
    assert slow_since(rates, 220.0, 10.0) == 200.0
    assert slow_since(rates, 190.0, 10.0) == 190.0
    assert time_back(rates, 220.0, 10.0) == (60.0, True)
    assert time_back(rates[:24], 220.0, 10.0) == (30.0, False)
    assert time_back(rates[:20], 190.0, 10.0) == (0.0, True)


def test_the_metrics_show_it() -> None:
    """The histogram counts the return, the gauge says for how long it has been slower."""
    metrics = Metrics()
    metrics.observe(made.started("s0-r0"))
    events = list(life(lambda now: 4.0 if 300 <= now < 360 else 1.0, lost_at(300.0), 500.0))
    slow = 0.0
    for event in events:
        metrics.observe(event)
        if isinstance(event, InnerStep):
            continue
        slow = max(slow, metrics.registry.get_sample_value("noloco_recovering_seconds") or 0.0)
    assert slow == pytest.approx(58.0, abs=12.0)
    assert metrics.registry.get_sample_value("noloco_recovery_duration_seconds_count") == 1.0
    assert metrics.registry.get_sample_value("noloco_recovery_duration_seconds_sum") == pytest.approx(60.0, abs=12.0)
