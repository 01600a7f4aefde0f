"""How much of the time a device works: the model's ends are known exactly."""

from __future__ import annotations

import pytest

from noloco_node.sizing.utilisation import Link, StageLoad, UtilisationOutlook, outlook_of

FAST = Link(1e12, 0.0)


def outlook(
    compute: tuple[float, ...], link: Link, in_flight: int, *, sends: float = 1e5, outer: float = 0.0
) -> UtilisationOutlook:
    """Stages with those times; each sends as much on, or back."""
    stages = [StageLoad(seconds, (sends,), outer) for seconds in compute]
    return outlook_of(stages, link, in_flight=in_flight, h=10, step_microbatches=4)


def test_one_microbatch_at_a_time_takes_the_sum_of_its_way() -> None:
    """Both devices, both messages, one round trip."""
    found = outlook((0.1, 0.05), Link(1e6, 0.2), 1)
    assert found.cycle_seconds == pytest.approx(0.1 + 0.05 + 2 * 0.1 + 0.2, rel=1e-3)
    assert found.device_share[0] == pytest.approx(0.1 / 0.55, rel=1e-3)
    assert found.limit == "latency"


@pytest.mark.parametrize("in_flight", [1, 2, 4, 16])
def test_the_share_lies_between_the_bounds_that_hold_whatever_the_order(in_flight: int) -> None:
    """Never more than what is under way brings, nor than the busiest part bears; at least as if all waited."""
    link = Link(1e6, 0.2)
    found = outlook((0.1, 0.05), link, in_flight)
    rate, parts = found.microbatches_a_second, (0.1, 0.05, 0.1, 0.1)
    assert rate <= min(1.0 / max(parts), in_flight / (sum(parts) + 0.2)) * 1.001
    assert rate >= in_flight / (in_flight * sum(parts) + 0.2) * 0.999


def test_enough_under_way_brings_the_slowest_part_to_its_limit() -> None:
    """The device where the link is quick, the uplink where it is not."""
    assert outlook((0.1, 0.05), Link(1e9, 0.2), 12).share == pytest.approx(1.0, abs=0.01)
    slow = outlook((0.01, 0.01), Link(1e6, 0.0), 12)
    assert slow.uplink_share[0] == pytest.approx(1.0, abs=0.03)
    assert slow.limit == "uplink"


def test_what_limits_is_named() -> None:
    """Each is the answer where nothing else could be."""
    assert outlook((0.1, 0.05), FAST, 8).limit == "device"
    assert outlook((0.01, 0.01), Link(1e9, 1.0), 2).limit == "latency"
    assert outlook((0.01, 0.01), Link(1e6, 0.0), 4).limit == "uplink"
    assert outlook((0.1, 0.1), Link(1e6, 0.0), 2, sends=4e4, outer=4e7).limit == "outer step"


def test_a_device_that_is_quicker_than_its_host_waits_for_it() -> None:
    """A fast card was planned to work all the time, also where its layers' Python takes longer than they do."""
    fast = StageLoad(0.01, (1e3,), 0.0, host_seconds=0.1)
    found = outlook_of([fast, fast], FAST, in_flight=8, h=10, step_microbatches=4)
    assert found.microbatches_a_second == pytest.approx(10.0, rel=0.05)
    assert found.share == pytest.approx(0.1, rel=0.05)
    assert found.limit == "host"


def test_an_uplink_that_stands_idle_does_not_limit() -> None:
    """One microbatch at a time spends its way on two uplinks, each of which is idle half of the time."""
    alone = outlook((0.01, 0.01), Link(1e6, 0.0), 1)
    assert max(alone.uplink_share) < 0.5
    assert alone.limit == "under way"


def test_an_outer_step_that_the_link_does_not_bear_lasts_longer_than_its_turn() -> None:
    """It never takes more than half of what microbatches want too; with one stage nothing else is sent."""
    found = outlook((0.1, 0.1), Link(1e6, 0.0), 2, sends=4e4, outer=4e7)
    assert found.inner_steps > 10
    assert found.microbatches_a_second == pytest.approx(
        outlook((0.1, 0.1), Link(0.5e6, 0.0), 2, sends=4e4).microbatches_a_second, rel=0.1
    )
    alone = outlook_of([StageLoad(0.1, (0.0, 0.0), 4e7)], Link(1e6, 0.1), in_flight=1, h=10, step_microbatches=4)
    assert alone.share == pytest.approx(1.0, abs=1e-3)
    assert alone.inner_steps == pytest.approx(100.0, rel=0.01)


def test_an_outer_step_takes_no_less_than_the_arithmetic_of_its_thread() -> None:
    """However quick the link: 742 million weights by int4 take 24 s of one thread."""
    load = StageLoad(0.1, (1e5,), 4e8, 24.0)
    quick, slow = (outlook_of([load], Link(up, 0.0), in_flight=1, h=8, step_microbatches=4) for up in (1e9, 1e6))
    assert (quick.outer_seconds, quick.outer_by_arithmetic) == (24.0, True)
    assert quick.inner_steps == pytest.approx(60.0, rel=0.01)
    assert slow.outer_seconds > 24.0
    assert not slow.outer_by_arithmetic


def test_more_of_anything_never_makes_it_worse() -> None:
    """Uplink, in flight, a shorter round trip, fewer bytes."""
    base = outlook((0.1, 0.05), Link(1e6, 0.2), 2, outer=1e6).share
    assert outlook((0.1, 0.05), Link(2e6, 0.2), 2, outer=1e6).share > base
    assert outlook((0.1, 0.05), Link(1e6, 0.1), 2, outer=1e6).share > base
    assert outlook((0.1, 0.05), Link(1e6, 0.2), 4, outer=1e6).share > base
    assert outlook((0.1, 0.05), Link(1e6, 0.2), 2, outer=5e5).share > base
