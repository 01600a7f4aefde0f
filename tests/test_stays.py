"""A node's start: one look at the directory is enough, and who begins alone beside named peers is told so."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from noloco_node.config.node_settings import NodeSettings
from noloco_node.directory import first_look, membership
from noloco_node.directory.first_look import look_for_others
from noloco_node.directory.memory import MemoryDirectory
from noloco_node.directory.records import Directory, DirectoryView, PeerState
from noloco_node.identity.peer_id import PeerId
from noloco_node.node import stage_lifecycle as stays_module
from noloco_node.node.first_state import STARTS_ALONE, obtain_state
from noloco_node.node.stage_lifecycle import StageLifecycle
from noloco_node.placement.migration import Move
from noloco_node.sizing.footprint import footprint_of
from noloco_node.storage.checkpoint import CheckpointFolder
from tests.worlds import NAMED, World, micro_spec, peer_name, world

SECONDS = 0.05
JOINS = NodeSettings(in_flight=1, initial_peers=(NAMED,))


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that each look may take, as they are asked for."""
    found: list[float] = []

    async def look(directory: Directory, own: PeerId, seconds: float) -> DirectoryView:
        found.append(seconds)
        return await look_for_others(directory, own, seconds)

    for module in (stays_module, membership):
        monkeypatch.setattr(module, "look_for_others", look)
    monkeypatch.setattr(stays_module, "FIRST_LOOK_SECONDS", SECONDS)
    return found


@pytest.fixture
def checkpoints(tmp_path: Path) -> CheckpointFolder:
    """An empty folder of them."""
    return CheckpointFolder(tmp_path / "checkpoints", keep=1)


def stays_in(made: World, settings: NodeSettings) -> StageLifecycle:
    """Those of the world's first replica."""
    replica = made.replicas[0]
    transport = replica.context.transport
    return StageLifecycle(
        replica.context.spec, settings, footprint_of(replica.context.spec), transport, MemoryDirectory(made.hub)
    )


async def test_who_is_alone_waits_for_others_once(
    looks: list[float], caplog: pytest.LogCaptureFixture, checkpoints: CheckpointFolder
) -> None:
    """Before a stage is chosen, or else before the state is; then it starts from the seed with a warning."""
    async with world(micro_spec(stages=1), settings=JOINS) as made:
        assert await obtain_state(made.replicas[0], stays_in(made, JOINS), None, checkpoints) == "seed"
        assert looks == [SECONDS]
        assert [r.levelno for r in caplog.records if r.getMessage() == STARTS_ALONE] == [logging.WARNING]
    looks.clear()
    async with world(micro_spec(stages=1), settings=JOINS) as made:
        stays = stays_in(made, JOINS)
        await stays.look_around()
        assert await obtain_state(made.replicas[0], stays, None, checkpoints) == "seed"
        assert looks == [SECONDS, 0.0]
        assert await obtain_state(made.replicas[0], stays, None, checkpoints) == "seed"
        assert looks == [SECONDS, 0.0, SECONDS], "a later stay looks anew"


async def test_who_saw_others_looks_for_them_again(
    looks: list[float], caplog: pytest.LogCaptureFixture, checkpoints: CheckpointFolder
) -> None:
    """One failed look-up after a long build must not make it start alone; and nobody is warned of company."""
    async with world(micro_spec(stages=1), replicas=2, settings=JOINS) as made:
        await made.replicas[1].membership.announce(PeerState.JOINING)
        stays = stays_in(made, JOINS)
        await stays.look_around()
        assert await obtain_state(made.replicas[0], stays, None, checkpoints) == "seed"
        assert looks == [SECONDS, SECONDS]
        assert STARTS_ALONE not in caplog.text


async def test_who_joins_nobody_waits_for_nobody_and_is_not_warned(
    looks: list[float], caplog: pytest.LogCaptureFixture, checkpoints: CheckpointFolder
) -> None:
    """The first node of a run."""
    async with world(micro_spec(stages=1)) as made:
        assert await obtain_state(made.replicas[0], stays_in(made, NodeSettings()), None, checkpoints) == "seed"
    assert looks == [0.0]
    assert STARTS_ALONE not in caplog.text


async def test_a_look_ends_with_the_first_other_node_and_the_own_former_record_is_none() -> None:
    """What this node left in the directory before it was restarted must not be taken for company."""
    async with world(micro_spec(stages=2)) as made:
        own, other = made.replicas
        await own.membership.announce(PeerState.TRAINING)
        looking = asyncio.create_task(look_for_others(MemoryDirectory(made.hub), peer_name(0, 0), 60.0))
        await asyncio.wait((looking,), timeout=3 * first_look.LOOK_AGAIN_SECONDS)
        assert not looking.done()
        await other.membership.announce(PeerState.JOINING)
        async with asyncio.timeout(50.0):
            view = await looking
        assert [list(rows) for rows in view.stages] == [[], [peer_name(1, 0)]]


async def test_a_move_that_is_given_up_is_taken_back() -> None:
    """A node that is told to end while it leaves for another stage must not be waited for there."""
    async with world(micro_spec(stages=2)) as made:
        stays = stays_in(made, NodeSettings())
        arrival = stays.arrival  # pyright: ignore[reportPrivateUsage]
        stays.move = Move(1, "lost")
        assert await arrival.confirmed(1, (1.0, 1.0), lambda _: True)
        assert made.hub.rows[1][peer_name(0, 0)].record.state is PeerState.JOINING
        await stays.give_up_move()
        assert made.hub.rows[1][peer_name(0, 0)].record.state is PeerState.GONE
        assert stays.move is None
