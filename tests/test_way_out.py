"""A way out has one bound; what is still waited for is named; and signals are heard whatever the event loop does."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from queue import SimpleQueue

import pytest

from noloco_node.aio import Pulse
from noloco_node.ambient import OneByOne
from noloco_node.config.node_settings import NodeSettings
from noloco_node.errors import ExitCode, UserError
from noloco_node.node import way_out as bounds
from noloco_node.node.interrupts import Interrupts, interruptible
from noloco_node.node.way_out import WayOut, standing
from tests.support import eventually, one_turn

SOON, LATE, PATIENCE = 0.05, 3600.0, 20.0


class Ended:
    """Takes the place of the process's end."""

    def __init__(self) -> None:
        self.codes = SimpleQueue[int]()
        self.way_out = WayOut(self.codes.put)
        self.words = list[str]()
        self.way_out.say = self.words.append

    async def with_code(self) -> int:
        """What it ended with, once it has."""
        await eventually(lambda: not self.codes.empty(), PATIENCE, "it ends")
        return self.codes.get()


async def test_a_way_out_that_takes_too_long_ends_with_the_code_that_was_known_last() -> None:
    """The sooner of two ends counts: told again to leave, a node has no more time than before."""
    ended = Ended()
    ended.way_out.begin(LATE, ExitCode.FAILURE)
    ended.way_out.begin(SOON, ExitCode.INTERRUPTED)
    ended.way_out.begin(LATE, ExitCode.OK)
    assert await ended.with_code() == ExitCode.OK
    assert "is given up" in ended.words[0]


async def test_who_has_left_or_stays_is_not_ended_and_has_its_whole_time_again() -> None:
    """A node that moves to another stage leaves twice."""
    ended = Ended()
    ended.way_out.begin(SOON, ExitCode.FAILURE)
    ended.way_out.over()
    await asyncio.sleep(4 * SOON)
    assert ended.codes.empty()
    ended.way_out.begin(SOON, ExitCode.INTERRUPTED)
    assert await ended.with_code() == ExitCode.INTERRUPTED


async def test_last_words_that_nobody_takes_hold_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal that is stopped, a disk that hangs."""
    monkeypatch.setattr(bounds, "SAY_SECONDS", SOON)
    ended, for_ever = Ended(), threading.Event()

    def say(words: str) -> None:
        for_ever.wait()

    ended.way_out.say = say
    ended.way_out.begin(SOON, ExitCode.INTERRUPTED)
    assert await ended.with_code() == ExitCode.INTERRUPTED
    for_ever.set()


EXHAUSTED = """
import os, threading, resource
from noloco_node.errors import ExitCode
from noloco_node.node.way_out import bounded_way_out
with bounded_way_out() as way_out:
    threading.stack_size(1 << 47)  # more than there are addresses: no thread can be made any more
    way_out.begin(0.1, ExitCode.INTERRUPTED)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    print("has begun", flush=True)
    threading.Event().wait()
"""


def test_who_has_no_thread_and_no_descriptor_left_ends_as_well() -> None:
    """It may be what the node hangs at. Nothing can be said then, nor can its children be looked for."""
    done = subprocess.run([sys.executable, "-c", EXHAUSTED], capture_output=True, timeout=3 * PATIENCE, check=False)
    assert (done.returncode, done.stdout) == (ExitCode.INTERRUPTED, b"has begun\n")


async def test_what_is_waited_for_is_named_through_contexts_and_threads() -> None:
    """A task within the end of an asynchronous context, and work on a thread; not the threads that have nothing to
    do."""
    go_on = threading.Event()

    @contextlib.asynccontextmanager
    async def place() -> AsyncIterator[None]:
        try:
            yield
        finally:
            await Pulse().wait()

    async def travels() -> None:
        async with place():
            pass

    disk = OneByOne("a disk")
    writing = asyncio.ensure_future(disk.do(go_on.wait))
    leaving = asyncio.create_task(travels(), name="the way")
    await eventually(lambda: threading.active_count() > 1)
    for _ in range(3):
        await one_turn()
    lines = standing(asyncio.get_running_loop())
    assert any(line.startswith("task the way: Pulse.wait (aio.py:") for line in lines)
    assert any(line.startswith("thread a disk_0: OneByOne._begin (ambient.py:") for line in lines)
    go_on.set()
    await writing
    leaving.cancel()
    await asyncio.wait((leaving,))
    assert not any("a disk" in line for line in standing(asyncio.get_running_loop()))
    disk.stop()


async def test_a_signal_is_heard_while_the_event_loop_hangs() -> None:
    """Nothing but a thread could: here the loop's own is asleep until the process would have ended."""
    ended = Ended()
    with interruptible(ended.way_out, SOON) as interrupts:
        interrupts.graceful(stop := asyncio.Event())
        os.kill(os.getpid(), signal.SIGTERM)
        until = time.monotonic() + PATIENCE
        while ended.codes.empty() and time.monotonic() < until:
            time.sleep(SOON)  # noqa: ASYNC251 - it is what hangs
        assert ended.codes.get(timeout=0) == ExitCode.INTERRUPTED
        assert not stop.is_set()
        await eventually(stop.is_set, what="the loop hears of it as well")
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


async def cancelled(told: Callable[[Interrupts], None]) -> bool:
    """Whether a node is cancelled that waits for the state of its next stage."""

    async def moves() -> None:
        interrupts = Interrupts()
        interrupts.graceful(asyncio.Event())
        told(interrupts)
        await asyncio.sleep(LATE)

    moving = asyncio.create_task(moves())
    await asyncio.wait((moving,), timeout=PATIENCE)
    return moving.cancelled()


@pytest.mark.parametrize("before", [False, True])
async def test_who_is_told_to_leave_on_its_way_to_another_stage_waits_for_no_state(before: bool) -> None:
    """The signal comes while it is on its way, or while it left its former stage."""

    def told(interrupts: Interrupts) -> None:
        if before:
            interrupts.on_signal()
        interrupts.moves_on()
        if not before:
            interrupts.on_signal()

    assert await cancelled(told)


async def test_who_is_told_to_leave_as_it_moves_on_keeps_the_bound_of_its_way_out() -> None:
    """The thread has heard the signal, the event loop has not yet: the cancellation is still to come."""
    ended = Ended()
    interrupts = Interrupts(ended.way_out, SOON)
    interrupts.graceful(asyncio.Event())
    interrupts.heard()
    interrupts.moves_on()
    assert await ended.with_code() == ExitCode.INTERRUPTED


def test_a_way_out_begins_with_a_failure_and_ends_with_its_code() -> None:
    """It is that of the person's mistake, of a defect, or of nothing: then it is the node's own end."""
    ended = Ended()

    async def leaves(error: Exception | None) -> int:
        interrupts = Interrupts(ended.way_out, LATE)
        with contextlib.suppress(ValueError, UserError), interrupts.leaving():
            if error is not None:
                raise error
        return ended.way_out.code

    for error, code in (
        (UserError(ExitCode.NO_STATE_SOURCE, "", ""), ExitCode.NO_STATE_SOURCE),
        (ValueError(), ExitCode.FAILURE),
        (None, ExitCode.OK),
    ):
        assert asyncio.run(leaves(error)) == code
    ended.way_out.over()


def test_a_node_has_time_to_leave_after_it_has_finished_what_is_under_way() -> None:
    """Otherwise every node would be ended before it is saved."""
    with pytest.raises(ValueError, match=r"node.leave_seconds \(5\) must exceed node.drain_seconds \(5\)"):
        NodeSettings(leave_seconds=5.0, drain_seconds=5.0)
