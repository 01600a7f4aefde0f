"""How a donor's bytes are shared among peers that read at the same time."""

from __future__ import annotations

import asyncio
import random

import pytest

from noloco_node import ambient
from noloco_node.aio import cancel_and_wait
from noloco_node.config.run_spec import LimitsSpec
from noloco_node.identity.peer_id import PeerId
from noloco_node.simulator.loop import in_virtual_time
from noloco_node.state_transfer.backups import StageCopies
from noloco_node.state_transfer.rate import DonorRate, least_rate
from noloco_node.training.progress import LastTrained
from noloco_node.transport.memory import MemoryNetwork, MemoryTransport
from tests.worlds import micro_spec

CHUNK = 1 << 20
AT_ONCE = 64


def donor() -> DonorRate:
    """One that gives a chunk in a second."""
    made = DonorRate(lambda: LastTrained(0, 0.0), lowest=1.0)
    made.rate = float(CHUNK)
    return made


def test_a_reader_that_asks_for_sixty_four_chunks_at_once_has_its_turn_like_others() -> None:
    """A reader that asks for one at a time gets every other chunk, and no time is lost."""

    async def work() -> tuple[float, int]:
        rate, given = donor(), 0

        async def hog() -> None:
            nonlocal given
            while True:
                await rate.take(CHUNK, "hog")
                given += 1

        hogs = [asyncio.create_task(hog()) for _ in range(AT_ONCE)]
        await asyncio.sleep(0)
        for _ in range(10):
            await rate.take(CHUNK, "honest")
        took, beside = ambient.monotonic(), given
        await cancel_and_wait(hogs)
        return took, beside

    took, beside = in_virtual_time(work)
    assert took <= 22.0
    assert took - 3.0 <= 10 + beside


def test_chunks_that_nobody_waits_for_any_more_delay_nobody() -> None:
    """A reader that asks and hangs up, again and again: its chunks were never given, so their time is not used up."""

    async def work() -> float:
        rate = donor()
        for _ in range(10):
            asked = [asyncio.create_task(rate.take(CHUNK, "hangs up")) for _ in range(AT_ONCE)]
            await asyncio.sleep(0)
            await cancel_and_wait(asked)
        before = ambient.monotonic()
        await rate.take(CHUNK, "honest")
        await rate.take(CHUNK, "honest")
        return ambient.monotonic() - before

    assert in_virtual_time(work) <= 4.0


def test_a_donor_that_has_no_work_any_more_is_silent_once() -> None:
    """Silence ends with a microbatch, or after 20 s. From a donor whose first stage had died a joiner got something for
    8 of each 28 s, and the copy took 85 s in place of 4. As soon as there is work it is measured again."""

    async def work() -> tuple[float, float]:
        trained, works = LastTrained(0, 0.0), True
        rate = DonorRate(lambda: trained, lowest=least_rate(LimitsSpec()))
        given, longest, last = 0, 0.0, 0.0

        async def live() -> None:
            nonlocal trained
            while True:
                await asyncio.sleep(0.5)
                trained = LastTrained(trained.tokens + 100, ambient.monotonic()) if works else trained
                rate.tend()

        async def read() -> None:
            nonlocal given, longest, last
            while True:
                await rate.take(CHUNK, "joiner")
                given, longest, last = given + 1, max(longest, ambient.monotonic() - last), ambient.monotonic()

        tasks = [asyncio.create_task(each) for each in (live(), read())]
        await asyncio.sleep(30.0)
        works = False
        await asyncio.sleep(40.0)
        longest = 0.0
        await asyncio.sleep(100.0)
        idle, longest, works = longest, 0.0, True
        await asyncio.sleep(60.0)
        await cancel_and_wait(tasks)
        return idle, longest

    idle, at_work = in_virtual_time(work)
    assert idle < 2.0
    assert at_work > 3.0


class Trainer:
    """A node whose device and whose uplink of so many bytes a second do one thing at a time; pieces of whatever it
    sends leave in their order."""

    def __init__(self, uplink: float) -> None:
        self._device, self._uplink, self._free_at = asyncio.Lock(), uplink, 0.0
        self.trained = LastTrained(0, 0.0)
        limits = LimitsSpec()
        self.rate = DonorRate(lambda: self.trained, lowest=least_rate(limits), places=2)

    async def work(self, seconds: float, tokens: int = 0) -> None:
        """An operation, and the tokens that are trained with it."""
        async with self._device:
            await asyncio.sleep(seconds)
        self.trained = LastTrained(self.trained.tokens + tokens, ambient.monotonic()) if tokens else self.trained

    async def send(self, size: int) -> None:
        """Over the uplink, and 40 ms on."""
        for _ in range(0, size, PIECE):
            self._free_at = max(self._free_at, ambient.monotonic()) + PIECE / self._uplink
            await asyncio.sleep(self._free_at - ambient.monotonic())
        await asyncio.sleep(0.04)

    async def tend(self) -> None:
        """As a replica does."""
        while True:
            await asyncio.sleep(1.0)
            self.rate.tend()

    async def be_exported(self) -> None:
        """Chunk by chunk, without a pause."""
        while True:
            await asyncio.sleep(0.04)
            await self.rate.take(CHUNK, "outsider")
            await self.send(CHUNK)


@pytest.mark.parametrize("look", [1.0, 2.0, 1.7])
def test_a_donor_that_has_readers_from_its_first_moment_learns_its_silent_pace(look: float) -> None:
    """Chunks that waited for the end of a silence leave before anybody looks at the window. They were counted as given
    in it, so it was taken for none, and another followed, for ever."""

    async def work() -> float:
        trained = LastTrained(0, 0.0)
        rate = DonorRate(lambda: trained, lowest=least_rate(LimitsSpec()))

        async def train() -> None:
            nonlocal trained
            while True:
                await asyncio.sleep(0.05)
                trained = LastTrained(trained.tokens + 100, ambient.monotonic())

        async def tend() -> None:
            while True:
                await asyncio.sleep(look)
                rate.tend()

        async def read() -> None:
            while True:
                await rate.take(CHUNK, "joiner")

        tasks = [asyncio.create_task(each) for each in (train(), tend(), *(read() for _ in range(4)))]
        await asyncio.sleep(60.0)
        await cancel_and_wait(tasks)
        return rate.rate

    assert in_virtual_time(work) > 10e6, "it loses nothing"


PIECE = 1 << 16
MICROBATCH_BYTES, MICROBATCH_TOKENS = 1 << 18, 512


def left_of_the_pace(uplink: float, operation: float) -> float:
    """The part of the pace that is left to two stages exported for five minutes, both at once and from the beginning.
    Two microbatches are under way; `uplink` is in bytes a second of each, `operation` in seconds."""

    async def work() -> float:
        rng, head, tail = random.Random(3), Trainer(uplink), Trainer(uplink)

        async def train() -> None:
            while True:
                await head.work(operation * rng.uniform(0.9, 1.1))
                await head.send(MICROBATCH_BYTES)
                await tail.work(2.0 * operation * rng.uniform(0.9, 1.1), MICROBATCH_TOKENS)
                await tail.send(MICROBATCH_BYTES)
                await head.work(operation * rng.uniform(0.9, 1.1), MICROBATCH_TOKENS)

        async def pace(seconds: float) -> float:
            before = head.trained.tokens
            await asyncio.sleep(seconds)
            return (head.trained.tokens - before) / seconds

        tasks = [asyncio.create_task(each) for each in (train(), train(), head.tend(), tail.tend())]
        await asyncio.sleep(20.0)
        silent = await pace(200.0)
        tasks += [asyncio.create_task(each.be_exported()) for each in (head, tail)]
        fetched = await pace(300.0)
        await cancel_and_wait(tasks)
        return fetched / silent

    return in_virtual_time(work)


@pytest.mark.parametrize("operation", [0.3, 0.05])
def test_an_export_behind_a_slow_uplink_costs_less_than_a_twentieth_of_the_pace(operation: float) -> None:
    """20 Mbit/s, of which training takes a part, or all: with what the first seconds cost, in which nobody knows the
    line."""
    assert left_of_the_pace(20 * 125e3, operation) > 0.95


def test_a_copy_is_held_for_as_long_as_its_donors_least_rate_needs() -> None:
    """A reader of a billion weights that takes each chunk as soon as it may is not told after a quarter of an hour that
    the copy is gone."""
    spec, size = micro_spec(), 10**9
    copies = StageCopies(spec, [size, size], MemoryTransport(MemoryNetwork(), PeerId("donor")), random.Random(0))
    assert copies.reading_seconds > 4 * size / least_rate(spec.limits)
