"""The loop whose clock jumps, and the device on it: order, time, chance, and ends that are told."""

from __future__ import annotations

import asyncio
import threading
import time
from weakref import WeakSet

import pytest
import torch

from noloco_node import ambient
from noloco_node.ambient import OneByOne
from noloco_node.identity.peer_id import PeerId
from noloco_node.simulator import loop as simulated_loop
from noloco_node.simulator.links import Links, PlainWay
from noloco_node.simulator.loop import WALL, Stuck, in_virtual_time
from noloco_node.simulator.node import SimulatedDevice
from noloco_node.training.compute_thread import Priority
from noloco_node.transport.errors import Refusal, Refused, TransportError
from noloco_node.transport.memory import MemoryNetwork, MemoryTransport
from noloco_node.transport.messages import Message
from tests.support import eventually

CALLER, SERVER = PeerId("caller-in-memory"), PeerId("server-in-memory")


class Ended(Exception):
    """How a call ended, and when."""


def test_an_hour_passes_at_once_for_every_clock() -> None:
    """The loop's, and those of `ambient`; afterwards they are the machine's again."""

    async def hour() -> tuple[float, float, float]:
        await asyncio.sleep(3600)
        return asyncio.get_running_loop().time(), ambient.monotonic(), ambient.wall() - WALL

    assert in_virtual_time(hour) == pytest.approx((3600.0, 3600.0, 3600.0))

    async def real() -> float:
        return ambient.monotonic() - time.monotonic()

    assert asyncio.run(real()) == pytest.approx(0.0, abs=1.0)
    assert ambient.monotonic() == pytest.approx(time.monotonic(), abs=1.0)
    assert ambient.wall() == pytest.approx(time.time(), abs=1.0)


def test_chance_repeats_with_the_seed_and_only_there() -> None:
    """Tokens and new sources alike; of two sources of one simulation each is its own."""

    async def draw() -> tuple[str, float, float]:
        return ambient.token(16), ambient.chance().random(), ambient.chance().random()

    first, again, other = (in_virtual_time(draw, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert len({*first, *other}) == 6
    assert len(first[0]) == 32
    assert ambient.token(16) != ambient.token(16)
    assert ambient.chance().random() != ambient.chance().random()


async def _of_three(shared: bool) -> tuple[list[int], float]:
    """What three pieces of work elsewhere that are begun at once do in which order, and how long they take."""
    done, bench = list[int](), OneByOne("bench")

    async def piece(number: int) -> None:
        await (bench.do(lambda: done.append(number)) if shared else ambient.elsewhere(done.append, number))

    await asyncio.gather(*(piece(number) for number in range(3)))
    bench.stop()
    return done, ambient.monotonic()


@pytest.mark.parametrize(("shared", "seconds"), [(True, 6.0), (False, 2.0)])
def test_work_elsewhere_takes_its_modelled_time(shared: bool, seconds: float) -> None:
    """One after another on one thread, else side by side; in the order of asking also where it takes no time."""
    done, took = in_virtual_time(lambda: _of_three(shared), elsewhere_seconds=lambda _: 2.0)
    assert took == pytest.approx(seconds)
    assert sorted(done) == [0, 1, 2]
    assert in_virtual_time(lambda: _of_three(shared)) == ([0, 1, 2], 0.0)


@pytest.mark.parametrize("simulated", [True, False])
def test_work_elsewhere_raises_where_it_was_asked_for_and_begins_no_more_once_stopped(simulated: bool) -> None:
    """On threads as in virtual time."""

    async def work() -> int:
        bench = OneByOne("bench")
        with pytest.raises(ZeroDivisionError):
            await bench.do(lambda: 1 // 0)
        begun, let_go, done = threading.Event(), threading.Event(), list[int]()
        if simulated:
            let_go.set()

        def first() -> None:
            begun.set()
            assert let_go.wait(10)

        pieces = [asyncio.ensure_future(bench.do(first)), asyncio.ensure_future(bench.do(lambda: done.append(1)))]
        await eventually(begun.is_set)
        bench.stop()
        let_go.set()
        await asyncio.wait(pieces)
        assert pieces[1].cancelled()
        return len(done)

    if simulated:
        assert in_virtual_time(work, elsewhere_seconds=lambda _: 2.0) == 0
    else:
        assert asyncio.run(work()) == 0


def test_who_waits_for_nothing_is_told_with_its_place() -> None:
    """Nothing is ready and no timer runs: a real loop would hang for ever."""

    async def waits_for_nobody() -> None:
        await asyncio.Event().wait()

    async def work() -> None:
        await asyncio.sleep(5)
        async with asyncio.TaskGroup() as group:
            group.create_task(waits_for_nobody(), name="the lost one")

    with pytest.raises(Stuck, match=r"(?s)^at 5 s nothing is ready.*  the lost one: .*wait, line \d+ of locks\.py"):
        in_virtual_time(work)


def test_who_turns_without_end_at_one_moment_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clock would never move any more."""
    monkeypatch.setattr(simulated_loop, "TURNS_AT_ONE_MOMENT", 100)

    async def work() -> None:
        await asyncio.sleep(5)
        for _ in range(1000):
            await asyncio.sleep(0)

    with pytest.raises(Stuck, match="at 5 s 100 turns at one moment"):
        in_virtual_time(work)


def test_another_thread_is_refused() -> None:
    """Its work would come at a moment that no seed decides."""
    refused: list[str] = []

    async def work() -> None:
        loop = asyncio.get_running_loop()

        def call() -> None:
            try:
                loop.call_soon_threadsafe(print)
            except RuntimeError as error:
                refused.append(str(error))

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    in_virtual_time(work)
    assert refused == ["a simulation has one thread"]


def test_tasks_and_futures_are_hashed_by_when_they_were_made() -> None:
    """So that a set of them, and asyncio and task groups have some, has the same order in every simulation."""

    async def work() -> list[int]:
        async with asyncio.TaskGroup() as group:
            made = [group.create_task(asyncio.sleep(0)), asyncio.ensure_future(asyncio.sleep(0))]
            future = asyncio.get_running_loop().create_future()
        await asyncio.wait(made)
        return [hash(each) for each in (*made, future)]

    hashes = in_virtual_time(work)
    assert hashes == sorted(set(hashes)) == in_virtual_time(work)


def test_a_device_takes_its_time_in_the_order_of_the_compute_thread() -> None:
    """A step before a backward before a forward before a draw; what was cancelled takes none, and a failure is raised
    where it was asked for."""
    seconds = {Priority.STEP: 1.0, Priority.BACKWARD: 10.0, Priority.FORWARD: 100.0, Priority.DRAW: 1000.0}

    async def work() -> tuple[list[tuple[str, float]], float, int]:
        device, done = SimulatedDevice(seconds.__getitem__), list[tuple[str, float]]()

        def note(what: str) -> None:
            done.append((what, ambient.monotonic()))

        kinds = (Priority.DRAW, Priority.FORWARD, Priority.BACKWARD, Priority.STEP)
        calls = [asyncio.ensure_future(device.run(kind, lambda kind=kind: note(kind.name))) for kind in kinds]
        dropped = asyncio.ensure_future(device.run(Priority.BACKWARD, lambda: note("dropped")))
        await asyncio.sleep(0)
        waiting = device.waiting
        dropped.cancel()
        await asyncio.gather(*calls)
        with pytest.raises(ZeroDivisionError):
            await device.run(Priority.STEP, lambda: 1 // 0)
        left = asyncio.ensure_future(device.run(Priority.STEP, lambda: note("last")))
        await asyncio.sleep(0)
        await device.close()
        await left
        assert device.busy_by_work == {"step": 3.0, "backward": 10.0, "forward": 100.0, "draw": 1000.0}
        return done, device.busy_seconds, waiting

    done, busy, waiting = in_virtual_time(work)
    assert done == [("STEP", 1.0), ("BACKWARD", 11.0), ("FORWARD", 111.0), ("DRAW", 1111.0), ("last", 1113.0)]
    assert busy == 1113.0
    assert waiting == 5


async def _ask(network: MemoryNetwork, answer: Message | Refusal, patience: float = 60.0) -> float:
    """When the answer to ten bytes was there; what the call raises, with that time as its second argument."""
    caller, server = MemoryTransport(network, CALLER), MemoryTransport(network, SERVER)

    async def handle(peer: PeerId, request: Message) -> Message:
        del peer, request
        if isinstance(answer, Refusal):
            raise Refused(answer)
        return answer

    server.serve("ask", lambda *_: None, handle, max_concurrent_per_peer=1)
    request, limits = Message({}, (torch.zeros(10, dtype=torch.uint8),)), {"progress": 1.0, "max_answer_bytes": 100}
    try:
        await caller.call(SERVER, "ask", request, timeout=patience, **limits)
        return ambient.monotonic()
    except (Refused, TransportError) as error:
        raise Ended(type(error), ambient.monotonic()) from None
    finally:
        await caller.close()
        await server.close()


def test_what_is_sent_in_memory_takes_the_time_of_its_link() -> None:
    """There and back, refusals too; without a link it takes none."""
    carried: list[tuple[PeerId, int]] = []

    def link(source: PeerId, target: PeerId, octets: int) -> float:
        assert {source, target} == {CALLER, SERVER}
        carried.append((source, octets))
        return 2.0 if source == CALLER else 3.0

    answer = Message({}, (torch.zeros(20, dtype=torch.uint8),))
    assert in_virtual_time(lambda: _ask(MemoryNetwork(Links(PlainWay(link))), answer)) == 5.0
    assert [source for source, _ in carried] == [CALLER, SERVER]
    assert carried[0][1] > 10
    assert carried[1][1] > 20
    assert in_virtual_time(lambda: _ask(MemoryNetwork(), answer)) == 0.0
    with pytest.raises(Ended, match=r"Refused.*5\.0"):
        in_virtual_time(lambda: _ask(MemoryNetwork(Links(PlainWay(link))), Refusal.BUSY))
    with pytest.raises(Ended, match=r"DeadlinePassed.*4\.0"):
        in_virtual_time(lambda: _ask(MemoryNetwork(Links(PlainWay(link))), answer, 4.0))


def test_who_dies_while_bytes_are_on_their_way_breaks_the_call() -> None:
    """At once, on the way there as on the way back."""

    async def work(dies_at: float) -> float:
        network = MemoryNetwork(Links(PlainWay(lambda *_: 2.0)))
        asyncio.get_running_loop().call_later(dies_at, network.kill, SERVER)
        return await _ask(network, Message())

    for moment in (1.0, 3.0):
        with pytest.raises(Ended, match=rf"BrokenStream.*{moment}"):
            in_virtual_time(lambda moment=moment: work(moment))


def test_each_task_is_filed_by_its_own_number() -> None:
    """asyncio keeps all that there are in a set: filed as alike, each new one would be compared with all others."""
    every = getattr(asyncio.tasks, "_scheduled_tasks", None) or getattr(asyncio.tasks, "_all_tasks", None)
    if not isinstance(every, WeakSet):
        pytest.skip("this Python keeps them otherwise")

    async def many() -> int:
        tasks = [asyncio.create_task(asyncio.sleep(1.0)) for _ in range(50)]
        filed = {hash(reference) for reference in vars(every)["data"]}
        await asyncio.gather(*tasks)
        return len(filed)

    assert in_virtual_time(many) > 50
