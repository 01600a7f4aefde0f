"""States and exchanges over lines that are thin, or dead now and then, in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import cast

import pytest
import torch
from torch import Tensor

from noloco_node import ambient
from noloco_node.aio import Pulse, cancel_and_wait
from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import LimitsSpec
from noloco_node.identity.peer_id import PeerId
from noloco_node.model.cut import StageCut
from noloco_node.participant import ReplicaContext
from noloco_node.simulator.loop import in_virtual_time
from noloco_node.state_transfer.donor import StateDonor
from noloco_node.state_transfer.donor_choice import NoDonor, StateCopier
from noloco_node.state_transfer.fetch import StateRequest
from noloco_node.training.frozen_state import FrozenState
from noloco_node.training.progress import LastTrained, Progress
from noloco_node.training.stage_worker import StageWorker
from noloco_node.transport.calls import Nothing, Reply
from noloco_node.transport.interface import Transport
from noloco_node.transport.memory import MemoryNetwork, MemoryTransport, Parcel
from tests.worlds import micro_spec

CHUNK = 1 << 14
STEP = 0.5
"""Seconds in which what is under way moves on."""
LIMITS = LimitsSpec(chunk_bytes=CHUNK)
LIMIT = LIMITS.exchange_progress_seconds


class Line:
    """Carries so many bytes a second at each moment, which all that is under way shares: pieces that began together
    come together."""

    def __init__(self, rate: Callable[[float], float]) -> None:
        self._rate = rate
        self._under_way: dict[asyncio.Event, float] = {}
        self.carried = 0.0

    async def open(self, source: PeerId, target: PeerId) -> None:
        """See `Carrier`."""

    async def carry(self, source: PeerId, target: PeerId, parcel: Parcel) -> None:
        """See `Carrier`."""
        there = asyncio.Event()
        self._under_way[there] = float(parcel.octets)
        try:
            await there.wait()
        finally:
            self._under_way.pop(there, None)

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(STEP)
            share = self._rate(ambient.monotonic()) * STEP / max(1, len(self._under_way))
            for there, left in list(self._under_way.items()):
                self.carried += min(share, left)
                self._under_way[there] = left - share
                if left <= share:
                    there.set()


class _Holder:
    """Stands for a `StageWorker` with a state of so many chunks, all of one number, another at each snapshot."""

    contract = "contract"
    last_trained = LastTrained(0, 0.0)
    progress = Progress()

    def __init__(self, chunks: int, number: float) -> None:
        self.state: dict[str, Tensor] = {"fast": torch.full((chunks * CHUNK // 4,), number)}

    def state_sizes(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in self.state.items()}

    @asynccontextmanager
    async def frozen(self, *_names: str) -> AsyncGenerator[FrozenState]:
        self.state = {"fast": self.state["fast"] + 1.0}
        state = FrozenState()
        state.freeze({"fast": [(0, self.state["fast"])]}, lambda piece: piece)
        yield state

    async def load_full_state(self, _clock: float, _rounds: int, state: dict[str, Tensor]) -> None:
        self.state = state


class _Faithless(StateDonor):
    """Gives a good part of a state, falls silent, and has forgotten it when it is asked to go on."""

    given = 0

    async def handle_chunk(self, peer: PeerId, request: StateRequest) -> Reply[Nothing]:
        self.given += 1
        if self.given % 100 == 0:
            self.close()
            await asyncio.Event().wait()
        return await super().handle_chunk(peer, request)


def copied(
    line: Line, chunks: int, donors: int = 1, kind: Callable[[int], type[StateDonor]] = lambda _: StateDonor
) -> tuple[float, int]:
    """Seconds in which a joiner is a copy of one of them, all behind one line, and of which. Raises NoDonor."""
    spec, network = micro_spec(stages=1, layers=4, limits=LIMITS), MemoryNetwork(line)

    def context(transport: Transport, worker: StageWorker) -> ReplicaContext:
        cut, rng = StageCut(0, 1, 0, 1), random.Random(1)
        return ReplicaContext(spec, NodeSettings(), cut, transport, worker, rng, Pulse(), lambda _: None)

    async def work() -> tuple[float, int]:
        givers: list[StateDonor] = []
        holders = [_Holder(chunks, 1000.0 * index) for index in range(donors + 1)]
        workers = [cast("StageWorker", holder) for holder in holders]
        names = [PeerId(f"donor-number-{index}") for index in range(donors)]
        for index, (name, worker) in enumerate(zip(names, workers[1:], strict=True)):
            transport = MemoryTransport(network, name)
            giver = kind(index)(context(transport, worker))
            giver.open()
            giver.serve()
            givers.append(giver)
        copier = StateCopier(context(MemoryTransport(network, PeerId("joiner")), workers[0]), lambda claimed: claimed)

        async def tend() -> None:
            while True:
                await asyncio.sleep(1.0)
                for giver in givers:
                    giver.tend()

        tasks = [asyncio.create_task(each) for each in (line.run(), tend())]
        try:
            donor, _ = await copier.copy_best(lambda: asyncio.sleep(0, names))
        finally:
            await cancel_and_wait(tasks)
        assert torch.equal(holders[0].state["fast"], holders[1 + names.index(donor)].state["fast"])
        return ambient.monotonic(), names.index(donor)

    return in_virtual_time(work)


def test_a_line_that_brings_one_chunk_in_time_but_not_four_brings_a_state() -> None:
    """Four that share it all come after the deadline, again and again: it begins anew with one."""
    line = Line(lambda _: 2.4 * CHUNK / LIMIT)
    assert copied(line, 30)[0] < LIMIT + 1.3 * 30 * LIMIT / 2.4


def test_a_line_that_falls_a_hundredfold_on_the_way_brings_the_rest() -> None:
    """What was under way is lost; what had come before is not."""
    line = Line(lambda now: (240.0 if now < 8.0 else 2.4) * CHUNK / LIMIT)
    copied(line, 150)
    assert line.carried < 200 * CHUNK


def test_a_line_that_is_dead_now_and_then_brings_a_state_of_half_an_hour() -> None:
    """A dozen times the line is dead for longer than a part may take. Each time more has come, so nobody gives up. No
    donor is left for one whose state must be read from the beginning."""
    line = Line(lambda now: 16.0 * CHUNK / LIMIT if now % 85.0 < 60.0 else 0.0)
    assert copied(line, 600, 3)[0] > 10 * 85.0
    assert line.carried < 750 * CHUNK


def test_a_line_that_stays_dead_is_given_up() -> None:
    """However much had come before."""
    line = Line(lambda now: 16.0 * CHUNK / LIMIT if now < 60.0 else 0.0)
    with pytest.raises(NoDonor):
        copied(line, 600)


@pytest.mark.parametrize("faithless", [0, 1])
def test_who_breaks_off_and_begins_anew_each_time_is_left(faithless: int) -> None:
    """What a donor gives of one state after another is no progress, however fast it comes."""
    line = Line(lambda _: 320.0 * CHUNK / LIMIT)
    took, donor = copied(line, 300, 2, kind=lambda index: _Faithless if index == faithless else StateDonor)
    assert donor != faithless
    assert took < 10 * LIMIT
