"""Ghosts in a real directory: records of throw-away keys that a stranger renews all the time, over p2pd and the DHT."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from noloco_node import PROTOCOL_VERSION
from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import LimitsSpec, OuterSpec, RunSpec
from noloco_node.directory.dht import join_directory
from noloco_node.directory.records import PeerRecord, PeerState
from noloco_node.identity.keys import Identity, load_or_create_identity
from noloco_node.libp2p.start import running_p2p
from noloco_node.node import stage_lifecycle as stays_module
from noloco_node.node.stage_lifecycle import StageLifecycle
from noloco_node.placement.migration import Move
from noloco_node.sizing.footprint import footprint_of
from noloco_node.telemetry.events import InnerStep
from tests.chaos.paced_node import OPERATION_SECONDS, PacedThread
from tests.inside import directory_of, host_of, signs_as
from tests.support import eventually
from tests.worlds import Swarm, libp2p_world, micro_spec

GHOSTS = 12
"""At each stage."""
LIFE = 6.0
LIMITS = LimitsSpec(record_seconds=LIFE, grace_seconds=2, chunk_bytes=4096, exchange_progress_seconds=2)
STEPS = 4000
SETTINGS = NodeSettings(in_flight=1, drain_seconds=1, moves="always", min_stay_seconds=1.0, start_replicas=2)


def claim(spec: RunSpec, ghost: Identity, stage: int, sequence: int) -> PeerRecord:
    """A node faster than any, and further than the run's end."""
    return PeerRecord(
        peer_id=ghost.peer_id,
        stage=stage,
        state=PeerState.TRAINING,
        clock=100.0 * spec.inner.target_tokens,
        tokens_per_second=1e9,
        capacity=1e12,
        outer_rounds=1,
        protocol=PROTOCOL_VERSION,
        version="0",
        sequence=sequence,
    )


@contextlib.asynccontextmanager
async def haunted(made: Swarm, folder: Path) -> AsyncIterator[None]:
    """One stranger with a p2pd of its own stores and renews the ghosts' records while the block runs."""
    spec, host = made.replicas[0].context.spec, host_of(made.replicas[0].context.transport)
    ghosts = [
        (load_or_create_identity(folder / f"ghost-{stage}-{number}.key"), stage)
        for stage in range(spec.stages)
        for number in range(GHOSTS)
    ]
    stranger = load_or_create_identity(folder / "stranger.key")
    settings = NodeSettings(initial_peers=tuple(host.visible_addresses()[:1]))
    async with running_p2p(settings, stranger) as daemon:
        directory = await join_directory(daemon, stranger, spec.run_id, spec.stages)

        async def store(ghost: Identity, stage: int, sequence: int) -> None:
            signs_as(directory, ghost)
            await directory.publish(claim(spec, ghost, stage, sequence), LIFE)

        async def renew() -> None:
            for sequence in itertools.count(1):
                await asyncio.gather(*(store(ghost, stage, sequence) for ghost, stage in ghosts))
                await asyncio.sleep(LIFE / 4)

        renewing = asyncio.create_task(renew())
        try:
            yield
        finally:
            renewing.cancel()
            await asyncio.wait((renewing,))
            signs_as(directory, stranger)
            await directory.close()


def steps_of(made: Swarm) -> list[InnerStep]:
    """Inner steps of all replicas."""
    return [event for events in made.events for event in events if isinstance(event, InnerStep)]


@pytest.mark.long
@pytest.mark.daemons
@pytest.mark.timeout(240)
async def test_ghosts_in_a_real_directory_change_no_count_move_nobody_and_put_no_rescue_off(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are two replicas a stage. Ghosts of both stages claim the speed of a thousand nodes and a clock far beyond
    the end. Counts and clocks stay as they were, and nobody leaves its stage for that. When stage 1 has lost both
    replicas, one of stage 0 goes there although its ghosts live."""
    monkeypatch.setenv(OPERATION_SECONDS, "0.03")
    monkeypatch.setattr(stays_module, "LOOK_SECONDS", 0.5)
    monkeypatch.setattr("noloco_node.placement.balancing.RESCUE_SLOT_SECONDS", 1.0)
    spec = micro_spec(steps=STEPS, microbatches_a_step=2, outer=OuterSpec(inner_steps=4), limits=LIMITS)
    async with libp2p_world(spec, tmp_path, replicas=2, settings=SETTINGS, device=PacedThread) as made:
        stays = [
            StageLifecycle(spec, SETTINGS, footprint_of(spec), each.context.transport, directory_of(each.membership))
            for each in made.replicas
        ]
        running = [asyncio.create_task(replica.run()) for replica in made.replicas]
        await eventually(lambda: len(steps_of(made)) > 20, 60.0, "training has begun")
        watches = [asyncio.create_task(s.accompany(r)) for s, r in zip(stays, made.replicas, strict=True)]
        try:
            async with haunted(made, tmp_path):
                seen = [replica.membership for replica in made.replicas]
                await eventually(
                    lambda: all(len(m.live(s, PeerState.TRAINING)) >= 6 for m in seen for s in (0, 1)), 60.0, "seen"
                )
                before = len(steps_of(made))
                await eventually(lambda: len(steps_of(made)) > before + 40, 60.0, "training goes on")
                counted = [step.live_replicas for step in steps_of(made)[before + 8 :]]
                assert max(counted) == 2, "a busy machine may miss a renewal of a real record, and no ghost ever counts"
                assert max(step.clock for step in steps_of(made)) < spec.inner.target_tokens
                await eventually(lambda: [m.replicas_per_stage() for m in seen] == [[2, 2]] * 4, 60.0, "all counted")
                looks = asyncio.get_running_loop().time() + 4 * SETTINGS.min_stay_seconds
                await eventually(
                    lambda: any(s.move for s in stays) or asyncio.get_running_loop().time() > looks, 60.0, "looks"
                )
                assert [s.move for s in stays] == [None] * 4
                for replica in made.replicas[2:]:
                    replica.stop.set()
                await asyncio.wait(running[2:], timeout=30.0)
                await eventually(lambda: any(s.move for s in stays[:2]), 60.0, "one of stage 0 goes")
                assert {s.move for s in stays[:2]} <= {None, Move(1, "lost")}
                assert len(seen[0].live(1, PeerState.TRAINING)) >= 3, "the ghosts live"
        finally:
            for task in (*watches, *running):
                task.cancel()
            await asyncio.wait((*watches, *running))
