"""The event loop stays free: no vector of a stage's size is made, copied or changed on its thread."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import LimitsSpec, OuterSpec
from noloco_node.model.stage import build_stage
from noloco_node.node.checkpointing import CheckpointKeeper
from noloco_node.node.replica import Replica
from noloco_node.sizing.footprint import footprint_of
from noloco_node.state_transfer.backups import StageCopies
from noloco_node.state_transfer.fetch import Download
from noloco_node.storage.checkpoint import CheckpointFolder
from noloco_node.training.compute_thread import ComputeThread
from noloco_node.training.placing import on_its_device
from noloco_node.transport.memory import MemoryNetwork, MemoryTransport
from tests.memory_directory import MemoryDirectory, MemoryDirectoryHub
from tests.support import alongside
from tests.worlds import Drawn, micro_spec, peer_name, samples_of

SPEC = micro_spec(stages=1, outer=OuterSpec(inner_steps=2, min_inner_steps=1), limits=LimitsSpec(chunk_bytes=4096))
SETTINGS = NodeSettings(in_flight=1)


class Large(TorchDispatchMode):
    """What was done on this thread to tensors of at least so many elements; views are free."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self._elements = elements
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called for every operation of torch."""
        made = func(*args, **(kwargs or {}))
        tensors = [value for value in (*args, made) if isinstance(value, Tensor)]
        if not func.is_view and max((tensor.numel() for tensor in tensors), default=0) >= self._elements:
            self.seen.append(str(func))
        return made


@asynccontextmanager
async def replicas(count: int) -> AsyncIterator[list[Replica]]:
    """Stage peers of the only stage, put on their device as a node does it."""
    network, hub, thread = MemoryNetwork(), MemoryDirectoryHub(1), ComputeThread()
    transports = [MemoryTransport(network, peer_name(0, index)) for index in range(count)]
    try:
        made: list[Replica] = []
        for transport in transports:
            placed = await on_its_device(SPEC, SETTINGS, await asyncio.to_thread(build_stage, SPEC.model, 0), thread)
            samples = samples_of(Drawn())
            made.append(
                Replica(
                    SPEC,
                    SETTINGS,
                    placed,
                    transport,
                    MemoryDirectory(hub),
                    thread,
                    samples=samples,
                    emit=lambda _: None,
                )
            )
            made[-1].serve()
        yield made
    finally:
        for transport in transports:
            await transport.close()
        await thread.close()


async def test_no_vector_of_the_stages_size_is_touched_on_the_event_loop(tmp_path: Path) -> None:
    """Building a replica, training, an exchange, a stage peer's state, a guard's copy, a lost stage, a checkpoint."""
    size = footprint_of(SPEC).parameters[0]
    with Large(size) as large:
        async with replicas(2) as (left, right):
            for replica in (left, right):
                assert replica.pipeline.origin is not None
                assert await replica.pipeline.origin.train_one()
            right.averaging.open()
            left.donor.open()
            async with alongside(right.averaging.run()):
                assert await left.averaging.dial(peer_name(0, 1))
                await right.copier.copy_from(peer_name(0, 0))
                copies = StageCopies(SPEC, [size], left.context.transport, random.Random(0))
                copies._own = 0, left.worker
                half = (await copies._copy_of(0, peer_name(0, 1), "fp16")).weights
                await right.worker.load_slow_weights(1.0, 1, half)
                with CheckpointKeeper(left, CheckpointFolder(tmp_path, 1), lambda _: None, SETTINGS) as keeper:
                    await keeper.save()
        assert large.seen == []
        torch.zeros(size)
    assert large.seen == ["aten.zeros.default"], "the instrument sees what it looks for"


async def test_room_for_a_state_is_made_without_holding_the_interpreter() -> None:
    """Whichever thread does it: the loop goes on meanwhile. One of a few tries is enough, the machine may be busy."""
    for _ in range(10):
        making = asyncio.create_task(asyncio.to_thread(Download, 128 << 20, 1 << 20))
        began = last = time.perf_counter()
        longest = 0.0
        while not making.done():
            await asyncio.sleep(0)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
        if longest < (last - began) / 2:
            return
    raise AssertionError(f"the loop stood for {longest:.3f} of {last - began:.3f} s")
