"""The exchange between two replicas: exact, all or nothing, and safe against a partner that misbehaves."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from noloco_node import aio
from noloco_node.averaging import session as exchange
from noloco_node.averaging import step
from noloco_node.config.run_spec import LimitsSpec, OuterSpec
from noloco_node.directory.records import PeerState
from noloco_node.node.replica import Replica
from noloco_node.outer import CodecName, clipping
from noloco_node.outer.clipping import Judgement
from noloco_node.outer.codec import CODECS
from noloco_node.outer.replica import OuterReplica
from noloco_node.outer.update import OuterRule, contribution, step_, token_weights
from noloco_node.telemetry.events import OuterStep
from noloco_node.transport.calls import ask
from noloco_node.transport.errors import Refusal, Refused
from noloco_node.transport.memory import Fault, FaultKind
from noloco_node.transport.messages import Message
from tests.outer.groups import ERRORS
from tests.support import eventually, one_turn
from tests.worlds import Swarm, World, micro_spec, peer_name, world

RULE = OuterSpec(inner_steps=2, min_inner_steps=1, alpha=0.5, beta=0.5, codec="fp32")


@contextlib.asynccontextmanager
async def trained_replicas(
    outer: OuterSpec, microbatches: Sequence[int], patience: float = 0.4
) -> AsyncIterator[World]:
    """Replicas of the only stage, each trained on so many samples of its own, that can be dialled. `patience`: seconds
    until an exchange that stands still is given up."""
    spec = micro_spec(
        stages=1,
        outer=outer,
        limits=LimitsSpec(chunk_bytes=4096, exchange_progress_seconds=patience, record_seconds=3, grace_seconds=1),
    )
    async with world(spec, replicas=len(microbatches)) as made, asyncio.TaskGroup() as group:
        runs = [replica.averaging.run() for replica in made.replicas]
        running = [group.create_task(each, name=f"averaging {number}") for number, each in enumerate(runs)]
        for replica, count in zip(made.replicas, microbatches, strict=True):
            replica.averaging.open()
            assert replica.pipeline.origin is not None
            for _ in range(count):
                await replica.pipeline.origin.train_one()
        yield made
        for task in running:
            task.cancel()


@contextlib.asynccontextmanager
async def two_replicas(outer: OuterSpec = RULE) -> AsyncIterator[tuple[World, Replica, Replica]]:
    """Two of them that have done equal work."""
    async with trained_replicas(outer, (4, 4)) as made:
        yield made, made.replicas[0], made.replicas[1]


async def state_of(replica: Replica) -> dict[str, Tensor]:
    """Copies of θ, φ and δ."""
    return (await replica.worker.joiner_state())[1]


def outer_steps(made: Swarm, index: int, kind: str) -> list[OuterStep]:
    """Events of one kind that a replica emitted."""
    return [e for e in made.events[index] if isinstance(e, OuterStep) and e.kind == kind]


async def both_committed(made: Swarm) -> None:
    """Wait until both replicas report a paired step."""
    await eventually(lambda: all(outer_steps(made, i, "paired") for i in (0, 1)), what="both commit")


def unchanged(before: dict[str, Tensor], after: dict[str, Tensor]) -> bool:
    """Bitwise equality of the whole state."""
    return all(torch.equal(before[name], after[name]) for name in before)


async def test_training_goes_on_during_an_exchange_and_is_kept() -> None:
    """Inner steps taken between snapshot and commit survive it: θ is what training gave, plus φ_new − θ_snapshot."""
    async with two_replicas() as (made, left, _):
        held, release = asyncio.Event(), asyncio.Event()

        async def wait() -> None:
            held.set()
            await release.wait()

        made.network.inject(Fault(FaultKind.DELAY, method=exchange.CHUNK.name, times=1, wait=wait))
        dialling = asyncio.create_task(left.averaging.dial(peer_name(0, 1)))
        async with asyncio.timeout(60):
            await held.wait()
        snapshot = left.worker.outer.snapshot.clone()
        assert left.pipeline.origin is not None
        await left.pipeline.origin.train_one()
        trained = (await state_of(left))["fast"]
        release.set()
        assert await dialling
        await both_committed(made)
        after = await state_of(left)
        torch.testing.assert_close(after["fast"], trained + (after["slow"] - snapshot), atol=1e-6, rtol=0)
        assert float((trained - snapshot).abs().max()) > 1e-4, "a step was taken meanwhile"
        assert outer_steps(made, 0, "paired")[0].inner_steps_meanwhile == 1
        assert made.network.fired[FaultKind.DELAY] == 1


async def test_an_opening_that_stood_still_while_the_partner_trained_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its snapshot is of before: each side would move by half of what the partner has trained since (a hunt's seed
    2225 went past the target by that). Both sides give it up, and the next one is as ever."""
    monkeypatch.setattr(exchange, "STALE_SECONDS", 0.0)
    async with trained_replicas(RULE, (4, 4), patience=60.0) as made:
        left, right = made.replicas
        held, release = asyncio.Event(), asyncio.Event()

        async def wait() -> None:
            held.set()
            await release.wait()

        made.network.inject(Fault(FaultKind.DELAY, method=exchange.OPEN.name, times=1, wait=wait))
        dialling = asyncio.create_task(left.averaging.dial(peer_name(0, 1)))
        async with asyncio.timeout(60):
            await held.wait()
        assert right.pipeline.origin is not None
        for _ in range(RULE.inner_steps + 1):
            await right.pipeline.origin.train_one()
        before = [await state_of(replica) for replica in (left, right)]
        release.set()
        assert not await dialling
        for index, replica in enumerate((left, right)):
            assert unchanged(before[index], await state_of(replica))
            assert "stale: opened" in outer_steps(made, index, "aborted")[0].reason
        assert await left.averaging.dial(peer_name(0, 1))


async def test_an_opening_may_take_longer_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is larger, and goes there and back as one message."""
    asked: dict[str, float] = {}

    async def noted(*args: Any, **named: Any) -> Any:
        asked[args[2].name] = named["seconds"]
        return await ask(*args, **named)

    async with two_replicas() as (_, left, _):
        monkeypatch.setattr(step, "ask", noted)
        opening = sum(spec.nbytes for spec in left.averaging.side.opening_specs())
        assert await left.averaging.dial(peer_name(0, 1))
        both_ways = 2 * opening / left.averaging.side.floor
    assert asked[exchange.OPEN.name] - asked[exchange.CHUNK.name] == pytest.approx(both_ways)
    assert both_ways > 0


@pytest.mark.parametrize(
    ("seconds", "steps", "late"), [(4.0, 100, False), (60.0, 2, False), (60.0, 3, True), (5.1, 3, True)]
)
def test_an_opening_is_late_by_time_and_by_steps(seconds: float, steps: int, late: bool) -> None:
    """Many quick steps fit between two answers, few slow ones into a long wait."""
    session = exchange.Session("x", peer_name(0, 1), "dialled", started=100.0)
    session.agreed(7, 1, 1, gives_only=False)
    assert (exchange.opened_late(session, 100.0 + seconds, 7 + steps, 2) is not None) is late


async def test_a_commit_is_waited_for_however_often_its_owner_is_told_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a large stage takes longer than `cancel_and_wait` waits before it tells a task again."""
    monkeypatch.setattr(aio, "STUCK_SECONDS", 0.05)
    async with two_replicas() as (_, left, _):
        outer, averaging, begun = left.worker.outer, left.averaging, threading.Event()
        commit = outer.commit

        def slowly(scale: float = 1.0) -> Tensor:
            begun.set()
            time.sleep(0.3)
            return commit(scale)

        monkeypatch.setattr(outer, "commit", slowly)
        tasks = [asyncio.create_task(averaging.run()), asyncio.create_task(averaging.step_alone())]
        await eventually(begun.is_set, what="the commit is worked out")
        await aio.cancel_and_wait(tasks)
        assert left.worker.progress.outer_rounds == 1


async def test_who_leaves_as_a_complete_exchange_is_judged_commits_it_as_its_partner_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It left the exchange open, told of no outer step, and had moved nothing, where the other side had (hunt seed
    2243)."""
    async with two_replicas() as (_, left, right):
        averaging, begun, go_on = right.averaging, threading.Event(), threading.Event()
        bound = averaging.side.bound
        judge = bound.judge

        def slowly(outer: OuterReplica, partner: str, *, stage_peers: int) -> Judgement:
            begun.set()
            assert go_on.wait(20)
            return judge(outer, partner, stage_peers=stage_peers)

        monkeypatch.setattr(bound, "judge", slowly)
        running = next(task for task in asyncio.all_tasks() if task.get_name() == "averaging 1")
        dialling = asyncio.create_task(left.averaging.dial(peer_name(0, 1)))
        await eventually(begun.is_set, what="it is judged")
        running.cancel()
        await one_turn()
        go_on.set()
        await aio.cancel_and_wait([running])
        assert await dialling
        assert not averaging.under_way
        assert [replica.worker.progress.outer_rounds for replica in (left, right)] == [1, 1]


async def test_who_is_told_to_end_while_it_dials_sets_its_partner_free() -> None:
    """A pause left the partner engaged until its progress deadline had passed."""
    async with trained_replicas(RULE, (4, 4), patience=60.0) as made:
        left, right = made.replicas
        never = asyncio.Event().wait
        made.network.inject(Fault(FaultKind.DELAY, method=exchange.CHUNK.name, wait=never))
        dialling = asyncio.create_task(left.averaging.dial(peer_name(0, 1)))
        await eventually(lambda: made.network.fired[FaultKind.DELAY], what="the openings have crossed")
        await aio.cancel_and_wait([dialling])
        assert not left.averaging.under_way
        assert not right.averaging.under_way
        assert [step.reason for step in outer_steps(made, 1, "aborted")] == ["left: the partner left"]


async def test_a_lost_answer_costs_one_more_request_and_adds_nothing_twice() -> None:
    """A chunk whose answer is lost is asked for again; the partner adds it once, both commit the same mean."""
    async with two_replicas() as (made, left, right):
        made.network.inject(Fault(FaultKind.LOSE_ANSWER, method=exchange.CHUNK.name, times=1))
        before = [await state_of(replica) for replica in (left, right)]
        assert await left.averaging.dial(peer_name(0, 1))
        await both_committed(made)
        after = [await state_of(replica) for replica in (left, right)]
        assert made.network.fired[FaultKind.LOSE_ANSWER] == 1
        mean_before = (before[0]["fast"] + before[1]["fast"]) / 2
        slow_before = (before[0]["slow"] + before[1]["slow"]) / 2
        expected = slow_before + 0.5 * (mean_before - slow_before)
        torch.testing.assert_close((after[0]["slow"] + after[1]["slow"]) / 2, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("codec", CODECS)
async def test_an_exchange_by_any_codec_is_the_textbook_step_and_keeps_the_mean(
    codec: CodecName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With uneven work. Each side is within the codec's error of the rule with token weights, and the mean over both
    to fp32 rounding. Clocks meet in the middle, and both sides say the same of their divergence."""
    monkeypatch.setattr(clipping, "_TALLEST", 1e6)  # a single value beyond its bound is held back on one side only
    outer = RULE.model_copy(update={"codec": codec, "inner_steps": 6})
    async with trained_replicas(outer, (3, 5)) as made:
        left, right = made.replicas
        before = [await state_of(replica) for replica in (left, right)]
        middle = sum(replica.worker.progress.clock for replica in (left, right)) / 2
        assert await left.averaging.dial(peer_name(0, 1))
        await both_committed(made)
        after = [await state_of(replica) for replica in (left, right)]
        assert [replica.worker.progress.clock for replica in (left, right)] == pytest.approx([middle, middle])
        events = [outer_steps(made, index, "paired")[0] for index in (0, 1)]
        since = [replica.worker.progress.steps_since_outer for replica in (left, right)]
    rule = OuterRule(0.5, 0.5, 0.5, "averaged")
    weights = token_weights((3, 5))
    assert weights[0] < 0.8
    s = [
        contribution(rule, fast=was["fast"], slow=was["slow"], momentum=was["momentum"], weight=weight)
        for was, weight in zip(before, weights, strict=True)
    ]
    apart = float((s[0] - s[1]).norm() / 2)
    expected: list[Tensor] = []
    for was, now in zip(before, after, strict=True):
        slow, momentum = was["slow"].clone(), was["momentum"].clone()
        step_(rule, (s[0] + s[1]) / 2, slow=slow, momentum=momentum)
        assert float((now["slow"] - slow).norm()) <= ERRORS[codec].of_a_difference * apart + 1e-5
        torch.testing.assert_close(now["fast"], now["slow"], atol=1e-6, rtol=0)
        expected.append(slow)
    mean = (after[0]["slow"] + after[1]["slow"]) / 2
    torch.testing.assert_close(mean, (expected[0] + expected[1]) / 2, atol=1e-6, rtol=0)
    assert since == [0, 0]
    spread = float((before[0]["fast"] - before[1]["fast"]).square().mean() / 2)
    assert events[0].replica_divergence == events[1].replica_divergence
    assert spread / 3 < (events[0].replica_divergence or 0.0) < spread * 3, "an estimate from 1/512 of the weights"
    if codec == "fp32":
        size = before[0]["fast"].numel()
        assert events[0].bytes_sent == pytest.approx(4 * size * (1 + 1 / 512), rel=0.002), "one tensor and the gauge"


async def test_a_paused_stage_peer_is_no_partner_of_the_last_step() -> None:
    """One that came to the run's end proposed to it 116 times, for its whole grace time, and stepped alone then."""
    async with two_replicas() as (_, left, right):
        left.averaging.side.begin_last_round()
        for paused in (False, True):
            right.rested = paused
            await right.membership.announce(PeerState.DRAINING)
            await left.membership.refresh()
            dialled = [] if paused else [right.context.transport.peer_id]
            assert list(left.outer_steps.pairing_state(0.0).stage_peers()) == dialled


async def test_a_step_alone_says_what_came_of_the_proposals_before_it() -> None:
    """A replica that was refused and could not reach its partner names both; after a step it counts anew."""
    async with two_replicas() as (made, left, _):
        gone = made.network.inject(Fault(FaultKind.LOSE_REQUEST, method=exchange.PROPOSE.name))
        assert not await left.averaging.dial(peer_name(0, 1))
        made.network.lift(gone)
        assert await left.averaging.dial(peer_name(0, 1))
        await both_committed(made)
        for _ in range(2):
            assert not await left.averaging.dial(peer_name(0, 1)), "too early"
        await left.averaging.step_alone()
        await left.averaging.step_alone()
        said = [event.reason for event in outer_steps(made, 0, "no_partner")]
        assert said == ["refused: too_early 2", "nobody: no other replica of the stage could be asked"]


@pytest.mark.parametrize(("method", "codec"), [(exchange.OPEN.name, "fp32"), (exchange.CHUNK.name, "int4")])
async def test_a_partner_that_vanishes_changes_nothing(method: str, codec: Literal["fp32", "int4"]) -> None:
    """The stream breaks for good: both sides give up, every weight is bitwise as before, and both can pair again."""
    async with two_replicas(RULE.model_copy(update={"codec": codec})) as (made, left, right):
        before = [await state_of(replica) for replica in (left, right)]
        fault = made.network.inject(Fault(FaultKind.LOSE_REQUEST, method=method))
        silent = made.network.inject(Fault(FaultKind.LOSE_REQUEST, method=exchange.LEAVE.name))
        assert not await left.averaging.dial(peer_name(0, 1))
        await eventually(lambda: not right.averaging.under_way, what="the dialled side gives up")
        assert unchanged(before[0], await state_of(left))
        assert unchanged(before[1], await state_of(right))
        assert outer_steps(made, 0, "aborted")
        assert outer_steps(made, 1, "aborted")[0].reason.startswith("stalled: no chunk")
        assert made.network.fired[FaultKind.LOSE_REQUEST] > 0
        made.network.lift(fault)
        made.network.lift(silent)
        assert await left.averaging.dial(peer_name(0, 1))


@pytest.mark.parametrize("hostile", ["dialler", "dialled"])
@pytest.mark.parametrize("value", [float("nan"), 0.0, 3e38])
async def test_a_hostile_sketch_is_refused_or_its_step_is_bounded(
    hostile: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random codes follow it. Not finite: refused, bitwise no change. Zeros or huge: the codes' steps are useless, the
    weights stay finite and move by no more than own motion and bound."""
    outer = RULE.model_copy(update={"codec": "int4"})
    async with two_replicas(outer) as (made, left, right):
        liar, honest = (left, right) if hostile == "dialler" else (right, left)
        index = made.replicas.index(honest)
        size = liar.worker.outer.codec.sketch_elements(liar.worker.outer.size)
        monkeypatch.setattr(liar.worker.outer, "sketch", lambda: torch.full((size,), value))

        def random_codes(index: int) -> Tensor:
            count = liar.worker.outer.codec.wire_elements(liar.worker.outer.chunk_size(index))
            return torch.randint(256, (count,), dtype=torch.uint8)

        monkeypatch.setattr(liar.worker.outer, "encoded_chunk", random_codes)
        if not math.isfinite(value):
            monkeypatch.setattr(liar.worker.outer, "agree", lambda _others: None)
        before = await state_of(honest)
        own_motion = float((0.5 * (before["fast"] - before["slow"])).norm())
        await left.averaging.dial(peer_name(0, 1))
        await eventually(lambda: outer_steps(made, index, "paired") or outer_steps(made, index, "aborted"))
        await eventually(lambda: not honest.averaging.under_way)
        after = await state_of(honest)
        aborted = outer_steps(made, index, "aborted")
    assert bool(torch.isfinite(torch.stack([after[name] for name in ("slow", "momentum", "fast")])).all())
    if not math.isfinite(value):
        assert aborted[0].reason.startswith(("not_finite: ", "protocol_violation: "))
        assert "NaN" in aborted[0].reason
    if aborted:
        assert value != 0.0
        assert unchanged(before, after)
    else:
        assert float((after["slow"] - before["slow"]).norm()) <= (3.0 + 1.0) * own_motion * 1.001


async def test_a_chunk_that_is_no_number_ends_no_exchange_that_is_being_committed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The liar sends its last chunk twice. Given up as it is applied, the next opening would be copied into its
    buffers, and the weights came out twice as large."""
    async with two_replicas() as (made, liar, honest):
        side, looked_at, go_on = honest.averaging.side, asyncio.Event(), asyncio.Event()
        judged, apply = threading.Event(), threading.Event()
        bound = side.bound
        judge, lies = bound.judge, list[asyncio.Future[Any]]()

        async def looks() -> bool:
            looked_at.set()
            return await go_on.wait()

        def slowly(outer: OuterReplica, partner: str, *, stage_peers: int) -> Judgement:
            judged.set()
            assert apply.wait(20)
            return judge(outer, partner, stage_peers=stage_peers)

        async def twice(*args: Any, **named: Any) -> Any:
            if args[2] is exchange.CHUNK and args[3].index == liar.worker.outer.chunks - 1:
                lie = {**named, "tensors": (torch.full_like(named["tensors"][0], math.nan),)}
                lies.append(asyncio.ensure_future(ask(*args, **lie)))
                await looked_at.wait()
            return await ask(*args, **named)

        monkeypatch.setattr(side.arithmetic, "own_is_finite", looks)
        monkeypatch.setattr(bound, "judge", slowly)
        monkeypatch.setattr(step, "ask", twice)
        assert await liar.averaging.dial(peer_name(0, 1))
        await eventually(judged.is_set, what="it is being committed")
        go_on.set()
        with pytest.raises(Refused, match="not_finite"):
            await lies[0]
        still_under_way = honest.averaging.under_way
        apply.set()
        await both_committed(made)
    assert still_under_way
    assert not outer_steps(made, 1, "aborted")


async def test_who_dials_without_end_is_told_that_others_have_their_part_too() -> None:
    """After two visits in a row; then others may come as ever, and it may be dialled. In the last round it may come."""
    async with trained_replicas(RULE, (4, 4, 4)) as made:
        eager, dialled, other = made.replicas
        for replica in made.replicas:
            replica.worker.live_replicas = 6

        async def visit(dialler: Replica, target: int) -> bool:
            for replica in made.replicas:
                assert replica.pipeline.origin is not None
                await replica.pipeline.origin.train_one()
            done = await dialler.averaging.dial(peer_name(0, target))
            await eventually(lambda: not any(replica.averaging.under_way for replica in made.replicas))
            return done

        assert [await visit(eager, 1) for _ in range(4)] == [True, True, False, False]
        assert await visit(other, 1)
        assert await visit(dialled, 0)
        assert not await visit(eager, 1)
        dialled.averaging.side.begin_last_round()
        assert await visit(eager, 1)


UNFIT: list[tuple[dict[str, object], Refusal]] = [
    ({"run": "f" * 32}, Refusal.WRONG_RUN),
    ({"stage": 5}, Refusal.WRONG_STAGE),
    ({"protocol": 9}, Refusal.WRONG_PROTOCOL),
    ({"contract": "other"}, Refusal.WRONG_CONTRACT),
    ({"clock": float("1e300")}, Refusal.MALFORMED),
]


async def test_proposals_that_do_not_fit_are_refused() -> None:
    """Run, stage, protocol and tensor contract are compared before a byte of weights moves."""
    async with two_replicas() as (_, left, right):
        proposal = exchange.Proposal(
            exchange="a" * 32,
            run=left.context.spec.run_id,
            stage=0,
            contract=left.worker.contract,
            clock=1.0,
            tokens=64,
        )
        for changes, reason in UNFIT:
            message = Message({**proposal.model_dump(mode="json"), **changes})
            with pytest.raises(Refused) as refused:
                await left.context.transport.call(
                    peer_name(0, 1), exchange.PROPOSE.name, message, timeout=5, progress=5, max_answer_bytes=0
                )
            assert refused.value.reason is reason, changes
            assert not right.averaging.under_way


async def test_no_exchange_opens_while_a_state_is_taken_over_and_none_is_disturbed_by_a_lag() -> None:
    """A replica that catches up answers `busy`; one in an exchange does too, even to a stage peer far ahead."""
    async with two_replicas() as (_, left, right):
        with right.averaging.taking_state():
            assert not await left.averaging.dial(peer_name(0, 1))
            assert right.averaging.under_way
        assert await left.averaging.dial(peer_name(0, 1))


def test_on_a_slow_link_chunks_go_one_by_one() -> None:
    """Each must arrive within the deadline, so they must not share too little bandwidth; on a quick link all streams
    are used."""
    assert exchange.streams_for(0.02, 20.0, 4) == 4
    assert exchange.streams_for(3.0, 20.0, 4) == 3
    assert exchange.streams_for(16.0, 20.0, 4) == exchange.streams_for(1000.0, 20.0, 4) == 1
    assert exchange.streams_for(0.0, 20.0, 64) == 64
    for seconds in (0.1, 1.0, 2.5, 4.0, 9.9):
        assert exchange.streams_for(seconds, 20.0, 64) * seconds <= 10.0, "together they take half the deadline"
