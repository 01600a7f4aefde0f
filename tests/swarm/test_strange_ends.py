"""Ghosts, hung origins and late comers at a run's end and its beginning: whole replicas, in memory.

A ghost is a record of a key with no node behind it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from noloco_node.config.run_spec import LimitsSpec, OuterSpec, PipelineSpec, RunSpec
from noloco_node.errors import ExitCode, UserError
from noloco_node.replica import Replica
from noloco_node.swarm import ending
from noloco_node.swarm.directory import PeerRecord, PeerState
from noloco_node.swarm.memory_directory import MemoryDirectory
from noloco_node.swarm.memory_transport import Fault, FaultKind
from tests.support import eventually
from tests.worlds import World, micro_spec, peer_name, run_to_the_end, world

GRACE = 0.3
LIMITS = LimitsSpec(record_seconds=1.0, grace_seconds=GRACE, chunk_bytes=4096, exchange_progress_seconds=0.5)
QUICK = PipelineSpec(budget_seconds=0.5, progress_seconds=0.2)
OUTER = OuterSpec(inner_steps=4, min_inner_steps=1)


def short_run(**changes: object) -> RunSpec:
    """A run of a fraction of a second."""
    settings: dict[str, object] = {"stages": 2, "steps": 30, "limits": LIMITS, "pipeline": QUICK, "outer": OUTER}
    return micro_spec(**(settings | changes))  # pyright: ignore[reportArgumentType]


async def haunt(made: World, state: PeerState, *, stage: int = 0, name: str = "ghost-gggg", **says: object) -> None:
    """Put a ghost's record into the directory."""
    figures: dict[str, object] = {"clock": 320.0, "outer_rounds": 1, "sequence": 1, "protocol": 1, "version": "0"}
    record = PeerRecord.model_validate({"peer_id": name, "stage": stage, "state": state, **figures, **says})
    await MemoryDirectory(made.hub).publish(record, 3600.0)


@asynccontextmanager
async def lives(*replicas: Replica) -> AsyncIterator[list[asyncio.Task[None]]]:
    """They run; whoever still does is cancelled at the end of the block."""
    tasks = [asyncio.create_task(replica.run()) for replica in replicas]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def ended(tasks: list[asyncio.Task[None]], within: float) -> None:
    """All of them end in time, in order."""
    async with asyncio.timeout(within):
        await asyncio.gather(*tasks)


async def never(*_: object, **__: object) -> None:
    """A device that hangs."""
    await asyncio.Event().wait()


async def test_a_ghost_that_says_it_trains_keeps_nobody_from_ending() -> None:
    """Neither the later stage nor the origin waits for one whose work nobody has seen and who answers nobody."""
    async with world(short_run()) as made:
        await haunt(made, PeerState.TRAINING)
        await run_to_the_end(made, within=30)


async def test_a_ghost_that_says_finished_ends_nobody_while_the_origin_is_away() -> None:
    """Far from the target: the later stage waits, and the origin finds it when it comes back."""
    async with world(short_run()) as made:
        origin, last = made.replicas
        await haunt(made, PeerState.FINISHING, finished=True)
        async with lives(last) as (waiting,):
            await eventually(
                lambda: last.membership.live(0, PeerState.FINISHING), what="it has read the ghost's record"
            )
            await asyncio.wait((waiting,), timeout=3 * GRACE)
            assert not waiting.done()
            async with lives(origin) as (training,):
                await ended([training, waiting], 30)
        assert last.worker.progress.clock >= 0.9 * last.spec.inner.target_tokens


@pytest.mark.parametrize("origins", [1, 2, 3])
async def test_an_origin_whose_device_hangs_does_not_keep_the_others(
    origins: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half-way through the run. Beside others they reach the target and end in order; where it is the only one, the
    later stage gives up, saying why."""
    if origins == 1:
        monkeypatch.setattr(ending, "ORPHAN_GRACES", 4)
    async with world(short_run(), replicas=origins) as made:
        hung, last = made.replicas[0], made.of_stage(1)
        others = [replica for replica in made.replicas if replica is not hung]
        async with lives(*made.replicas) as tasks:
            await eventually(lambda: hung.worker.progress.steps > 5, what="it has trained")
            hung.worker.forward = never  # type: ignore[method-assign,assignment]
            rest = [task for replica, task in zip(made.replicas, tasks, strict=True) if replica in others]
            if origins > 1:
                await ended(rest, 20)
            else:
                with pytest.raises(UserError) as raised:
                    await flat(rest[0], 20)
                assert raised.value.exit_code is ExitCode.PEERS_UNREACHABLE
        target = made.replicas[0].spec.inner.target_tokens
        assert origins == 1 or all(replica.worker.progress.clock > 0.9 * target for replica in last)


async def flat(task: asyncio.Task[None], within: float) -> None:
    """Await a replica's life; what ends it comes alone."""
    try:
        await asyncio.wait_for(asyncio.shield(task), within)
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None


async def test_an_origin_that_is_cut_off_near_the_end_learns_that_the_run_is_over() -> None:
    """From all peers, but not from the directory. The others end, and so does it."""
    async with world(short_run(steps=60), replicas=2) as made:
        lost = made.replicas[0]
        target = lost.spec.inner.target_tokens
        async with lives(*made.replicas) as tasks:
            await eventually(lambda: lost.worker.progress.clock > 0.92 * target, 20, what="it is near the end")
            for side in ("source", "target"):
                made.network.inject(Fault(FaultKind.UNREACHABLE, **{side: peer_name(0, 0)}))
            await ended(tasks[1:], 20)
            await ended(tasks[:1], 20)
