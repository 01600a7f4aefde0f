"""Drawn schedules of faults on whole swarms in virtual time: nothing is against the invariants, and each fault fires.

A seed that fails is repeated, and its schedule shortened, by `noloco-node simulate sim/hunt --out DIR --set
sim.first=SEED --seeds 1`.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from noloco_node.config.experiments import HuntSpec
from noloco_node.config.load import HuntConfig, load_simulation
from noloco_node.errors import UserError
from noloco_node.simulator import invariants
from noloco_node.simulator.faults import (
    KINDS,
    Crash,
    Death,
    Freeze,
    FullDisk,
    Join,
    LateMessages,
    Leave,
    Liar,
    LostMessages,
    LostStage,
    Partition,
    Relocate,
    RepeatedMessages,
    Schedule,
    SkewedClock,
    SlowLink,
    Twin,
    draw,
)
from noloco_node.simulator.hunt import HuntOutcome, carry_out, command_of, go_hunting, schedules_of, shortest_failing
from noloco_node.simulator.invariants import Run
from tests.profiles import tries

SEEDS = tries(198, one_of=66)
EACH = 3


def carried_out(first: int, count: int) -> list[HuntOutcome]:
    """So many drawn schedules. AssertionError for those that fail, with what repeats them."""
    outcomes = [carry_out(draw(seed)) for seed in range(first, first + count)]
    failed = {outcome.schedule.model_dump_json(): outcome.breaches for outcome in outcomes if outcome.breaches}
    assert failed == {}
    return outcomes


@pytest.mark.parametrize("first", range(0, SEEDS, EACH))
def test_no_schedule_of_faults_breaks_an_invariant(first: int) -> None:
    """A few seeds each; most of what is scheduled comes to pass."""
    outcomes = carried_out(first, EACH)
    fired = [each for outcome in outcomes for each in outcome.fired]
    assert sum(fired) > len(fired) / 2


OF_EVERY_KIND = (
    Schedule(
        seed=1000,
        replicas=(2, 2),
        faults=(
            SkewedClock(at=0.0, node=1, by=2.0),
            SlowLink(at=0.1, node=2, times=20.0, seconds=5.0),
            LostMessages(at=0.15, node=3, what="answer", calls=3),
            RepeatedMessages(at=0.2, node=2, calls=5),
            LateMessages(at=0.25, node=3, calls=3, seconds=1.0),
            Freeze(at=0.3, node=0, seconds=2.0),
            Join(at=0.4),
        ),
    ),
    Schedule(
        seed=1001,
        replicas=(3, 2),
        faults=(
            Leave(at=0.1, node=0, back_after=5.0),
            Crash(at=0.2, node=4, back_after=5.0),
            FullDisk(at=0.3, node=1, seconds=60.0),
            Partition(at=0.5, nodes=(1,), seconds=5.0),
        ),
    ),
    Schedule(
        seed=1002,
        replicas=(3, 3),
        faults=(
            Liar(at=0.1, node=5, how="flipped"),
            Twin(at=0.2, node=1),
            Relocate(at=0.3, node=0, stage=1),
            Death(at=0.5, node=3),
        ),
    ),
    Schedule(seed=1003, replicas=(2, 2), faults=(LostStage(at=0.3, stage=1),)),
)


@pytest.mark.parametrize("schedule", OF_EVERY_KIND, ids=lambda schedule: schedule.seed)
def test_faults_of_every_kind_fire(schedule: Schedule) -> None:
    """Each does something, and nothing is against the invariants."""
    outcome = carry_out(schedule)
    assert outcome.breaches == ()
    assert all(outcome.fired), outcome.fired


def test_no_kind_of_fault_is_left_out() -> None:
    assert {fault.kind for schedule in OF_EVERY_KIND for fault in schedule.faults} == set(KINDS)


def test_who_is_never_asked_tells_no_lie() -> None:
    """A gradient is flipped in an answer, and nobody asks an origin for one; a partition with nobody on one side parts
    nobody."""
    faults = (Liar(at=0.1, node=0, how="flipped"), Partition(at=0.2, nodes=(0, 1, 2, 3), seconds=1.0))
    assert carry_out(Schedule(seed=3, replicas=(2, 2), faults=faults)).fired == (False, False)


def test_what_fails_is_told_with_the_command_that_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortened to the one fault that matters. Here it is an invariant that no liar may be there."""

    def nobody_lies(run: Run) -> Iterator[str]:
        if run.hostile:
            yield "lies: somebody"

    monkeypatch.setattr(invariants, "INVARIANTS", (nobody_lies,))
    drawn = (draw(seed, 2, 3) for seed in range(199))
    fitting = (made for made in drawn if len(made.faults) > 1 and "liar" in str(made.faults[-1]))
    schedule = min(fitting, key=lambda made: (made.nodes, len(made.faults)))
    told: list[str] = []
    given = HuntSpec(kind="hunt", first=schedule.seed, seeds=1, fewest=2, most=3)
    found = go_hunting(given, told.append, lambda _done, _all: None)
    shortest = Schedule.model_validate(found.failed[0]["schedule"])
    assert [fault.kind for fault in shortest.faults] == ["liar"]
    assert command_of(shortest) in told[0]
    assert "lies: somebody" in told[0]
    words = shlex.split(command_of(shortest))
    again = load_simulation(Path(words[2]), words[words.index("--set") + 1 :])
    assert isinstance(again, HuntConfig)
    assert list(schedules_of(again.sim)) == [shortest]


@pytest.mark.long
def test_two_processes_hunt_as_one_does() -> None:
    """The schedules are told in the order of their seeds, and have the same course."""
    told: list[str] = []
    hunts = [HuntSpec(kind="hunt", seeds=2, fewest=2, most=2, faults=("leave",), workers=each) for each in (1, 2)]
    alone, together = (go_hunting(each, told.append, lambda _done, _all: None) for each in hunts)
    assert alone.trace == together.trace
    assert told == ["2 of 2 schedules, 0 failed"] * 2


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("sim.faults=[death, flood]", "sim.faults names flood"),
        ('sim.schedule={"seed": 1, "replicas": [2], "faults": [{"kind": "flood", "at": 0.5}]}', "the version that"),
        ('sim.schedule={"seed": 1}', "replicas"),
        ("sim.schedule={seed: 2026-11-24, replicas: [2]}", "seed: Input should be a valid integer"),
        ("sim.schedule={seed: 1, replicas: [2], faults: [{2026-11-24: death}]}", "faults.0"),
        ("sim.schedule={seed: 1, replicas: !!binary aGVsbG8=}", "replicas"),
        (
            'sim.schedule={"seed": 1, "replicas": [2, 2], "faults": [{"kind": "lost_stage", "at": 0.5, "stage": 2}]}',
            "carry out: a lost_stage is of stage 2, and replicas names 2 stages",
        ),
        (
            'sim.schedule={"seed": 1, "replicas": [2], "faults": [{"kind": "death", "at": 0.5, "node": 9}]}',
            "a death is of node 9, and replicas names 2 nodes",
        ),
    ],
)
def test_what_cannot_be_hunted_is_refused(override: str, said: str) -> None:
    """A schedule of another version among it, with the setting and what to do."""
    given = load_simulation(Path("sim/hunt"), [override])
    assert isinstance(given, HuntConfig)
    with pytest.raises(UserError) as refused:
        schedules_of(given.sim)
    assert said in f"{refused.value} {refused.value.remedy}"


def test_one_seed_is_one_course() -> None:
    """A schedule gives the same trace, bit for bit, wherever its checkpoints lie."""
    schedule = draw(0, 4, 4, ("crash",))
    assert carry_out(schedule) == carry_out(Schedule.model_validate_json(schedule.model_dump_json()))


def test_schedules_are_drawn_alike_and_each_kind_often() -> None:
    """By their seed, from 4 to 8 nodes unless other numbers are named."""
    drawn = [draw(seed) for seed in range(300)]
    assert drawn == [draw(seed) for seed in range(300)]
    assert {schedule.nodes for schedule in drawn} == {4, 5, 6, 7, 8}
    kinds = Counter(fault.kind for schedule in drawn for fault in schedule.faults)
    assert kinds.keys() == set(KINDS)
    assert min(kinds.values()) > 20
    assert max(draw(seed, 4, 64).nodes for seed in range(100)) > 50
    copies = [schedule.standby_copies for schedule in drawn if schedule.stages > 1]
    assert 0.15 < sum(copies) / len(copies) < 0.35
    assert {schedule.standby_copies for schedule in drawn if schedule.stages == 1} == {0}


def test_what_fails_is_found_in_the_shortest_part_that_fails() -> None:
    """Faults that fail only together are found among many; a part that nothing can be taken from stays."""
    items = list(range(40))
    assert shortest_failing(items, lambda part: {3, 17, 31} <= set(part)) == [3, 17, 31]
    assert len(shortest_failing(items, lambda part: len(part) > 7)) == 8
    assert shortest_failing([1], lambda part: 1 in part) == [1]
    assert shortest_failing([1, 2], lambda _: True) == []
