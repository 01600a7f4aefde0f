"""A stage's state is not lost without a word: by damaged checkpoints, by the last replica's leaving, or because its
holder is away for a moment."""

from __future__ import annotations

import asyncio
import io
import time
from pathlib import Path

import pytest
from rich.console import Console

from noloco_node.config.load import load_config
from noloco_node.config.node_settings import NodeSettings
from noloco_node.directory.known_peers import HeldState, KnownPeers
from noloco_node.directory.records import PeerState
from noloco_node.identity.peer_id import PeerId
from noloco_node.launch.local_swarm import LocalSwarm
from noloco_node.node import revival
from noloco_node.node.claiming import unusable_checkpoints
from noloco_node.node.first_state import obtain_state
from noloco_node.node.replica import Replica
from noloco_node.node.stage_lifecycle import StageLifecycle
from noloco_node.node.stay import final_lacks, last_of_stage
from noloco_node.sizing.footprint import footprint_of
from noloco_node.storage.checkpoint import STATE, CheckpointFolder
from noloco_node.storage.weights import MANIFEST
from noloco_node.telemetry.display import LocalSwarmView, plain_line, screen
from noloco_node.telemetry.events import Warned
from tests.memory_directory import MemoryDirectory
from tests.storage.test_checkpoint import RUN, standing, tensors
from tests.storage.test_weights import save
from tests.support import eventually
from tests.test_revival import lose, trained_world
from tests.worlds import World, micro_spec, peer_name, world

MICRO = Path(__file__).parent / "configs" / "micro.yaml"


def damaged(path: Path, run: str = RUN) -> CheckpointFolder:
    """A folder whose checkpoints have lost the half of their state."""
    folder = CheckpointFolder(path, keep=2)
    for clock in range(2):
        folder.write(standing(float(clock), run_id=run), tensors(1.0))
    for state in path.rglob(STATE):
        state.write_bytes(state.read_bytes()[: state.stat().st_size // 2])
    return folder


def test_damaged_checkpoints_are_told_from_none_and_the_remedy_is_named(tmp_path: Path) -> None:
    """With the newest one's path and reason. A sound one among them, or one of another stage, is no such case."""
    folder = damaged(tmp_path)
    assert folder.newest(RUN, 1) is None
    warning = unusable_checkpoints(folder)
    assert warning is not None
    assert "ALL 2 CHECKPOINTS ARE DAMAGED" in warning.detail
    assert str(tmp_path / "00000002") in warning.detail
    assert "put it back" in warning.detail
    folder.write(standing(5.0), tensors(5.0))
    assert folder.newest(RUN, 1) is not None
    assert folder.newest(RUN, 0) is None
    assert unusable_checkpoints(CheckpointFolder(tmp_path / "nowhere", 1)) is None


def test_the_screen_shows_it_until_the_end() -> None:
    """On a terminal above the figures; elsewhere as a line."""
    view = LocalSwarmView(run_name="r", stages=1, target=10, nodes=["s0-r0"])
    view.observe("s0-r0", Warned(what="checkpoints_unusable", detail="ALL 2 CHECKPOINTS ARE DAMAGED"))
    for number in range(50):
        view.note(f"other news {number}")
    console = Console(width=100, file=io.StringIO())
    with console.capture() as shown:
        console.print(screen(view, time.time(), 40))
    assert "ALL 2 CHECKPOINTS ARE DAMAGED" in shown.get()
    assert any("s0-r0 WARNS: ALL 2" in line for _, line in view.notes)
    assert plain_line(view, time.time())


def test_a_local_swarm_begins_with_a_node_whose_checkpoint_is_whole(tmp_path: Path) -> None:
    """The first one up has nobody to take a state from: with damaged checkpoints it began the run from the seed."""
    config = load_config(MICRO)
    swarm = LocalSwarm(config, tmp_path)
    names = [node.name for node in swarm.nodes]
    assert [node.name for node in swarm.in_order_of_start()] == names
    for node in swarm.nodes[:2]:
        damaged(node.folder / "checkpoints", config.run.run_id)
    CheckpointFolder(swarm.nodes[2].folder / "checkpoints", 1).write(
        standing(9.0, run_id=config.run.run_id), tensors(9.0)
    )
    assert [node.name for node in swarm.in_order_of_start()] == [names[2], names[0], names[1], names[3]]


async def test_who_leaves_a_stage_alone_is_told_as_far_as_answers_tell() -> None:
    """Not while a stage peer answers, nor where nobody else trains; a stage peer that is only a record is none."""
    async with world(micro_spec(stages=2), replicas=2) as made:
        for replica in made.replicas:
            await replica.membership.announce(PeerState.TRAINING)
        leaver = next(replica for replica in made.replicas if replica.stage == 1)
        await leaver.membership.refresh()
        stage_peers = set(leaver.membership.stage_peers())
        assert last_of_stage(leaver.membership, lambda _: True, 0) is None
        assert last_of_stage(leaver.membership, lambda _: False, 0) is None
        warning = last_of_stage(leaver.membership, lambda peer: peer not in stage_peers, 0)
        assert warning is not None
        assert "THE LAST REPLICA OF STAGE 1 LEAVES" in warning.detail
        assert "run.standby_copies is 0" in warning.detail
        kept = last_of_stage(leaver.membership, lambda peer: peer not in stage_peers, 1)
        assert kept is not None
        assert "copies that nodes of other stages keep" in kept.detail
        assert "checkpoint holds everything" in kept.detail
        full = last_of_stage(leaver.membership, lambda peer: peer not in stage_peers, 1, kept=False)
        assert full is not None
        assert "holds everything" not in full.detail, "its disk is full"
        assert "make room" in full.detail


def stays_of(made: World, replica: Replica, warnings: list[Warned]) -> StageLifecycle:
    """The stays of a node with this replica."""
    transport = replica.context.transport
    stays = StageLifecycle(
        replica.context.spec, NodeSettings(), footprint_of(replica.context.spec), transport, MemoryDirectory(made.hub)
    )
    stays.emit = warnings.append
    return stays


@pytest.mark.parametrize("comes_back", [True, False])
async def test_who_comes_without_a_state_waits_once_for_who_held_it(
    comes_back: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names the holder and takes its state where it comes back in time; else the stage begins anew, loudly."""
    monkeypatch.setattr(revival, "DOUBT_SECONDS", 5.0 if comes_back else 0.1)
    monkeypatch.setattr(revival, "LOOK_SECONDS", 0.05)
    warnings: list[Warned] = []
    async with trained_world(keepers=0, giving=0) as (made, (_, _, holder, newcomer), _):
        holder.donor.open()
        await lose(made, 2)
        held = HeldState(stage=1, clock=holder.worker.progress.clock, seen=time.time())
        stays = stays_of(made, newcomer, warnings)
        beginning = asyncio.create_task(
            obtain_state(newcomer, stays, None, CheckpointFolder(tmp_path, 1), [(peer_name(1, 0), held)])
        )
        await eventually(lambda: warnings)
        if comes_back:
            await holder.membership.announce(PeerState.TRAINING)
        assert await beginning == ("peer" if comes_back else "seed")
    assert [warning.what for warning in warnings] == ["state_elsewhere", *([] if comes_back else ["stage_lost"])]
    assert peer_name(1, 0) in warnings[0].detail
    assert "STAGE 1 STARTS AGAIN" in warnings[-1].detail or comes_back


def test_what_peers_held_is_kept_with_their_addresses(tmp_path: Path) -> None:
    """Of the run, the furthest first, bounded; a file that says otherwise is passed over as a whole."""
    path = tmp_path / "peers.json"
    known = KnownPeers(path)
    known.save("run")
    held = {PeerId(f"p{n}"): HeldState(stage=n % 2, clock=float(n), seen=float(n)) for n in range(50)}
    known.worked_with(held)
    known.save("run")
    again = KnownPeers(path)
    assert len(again.held) == 32
    assert [peer for peer, _ in again.holders("run", 1)][:2] == ["p49", "p47"]
    assert again.holders("other", 1) == []
    again.save("other")
    assert KnownPeers(path).held == {}
    for hostile in (
        '"held": {"p": {"stage": 1e9}}',
        '"held": [1]',
        '"held": {"p": {"clock": NaN}}',
        '"held": ' + "[" * 10**5,
    ):
        path.write_text('{"run": "run", "peers": {}, ' + hostile + "}")
        assert KnownPeers(path).holders("run", 1) == []


def test_final_weights_of_an_earlier_stay_are_none_of_the_runs_end(tmp_path: Path) -> None:
    """Those of who was once stopped by hand stayed for good where it was killed at the end, or found its disk full."""
    assert final_lacks(tmp_path / "final", 0.0)
    save(tmp_path / "final", clock=500.0)
    assert final_lacks(tmp_path / "final", 1000.0)
    save(tmp_path / "final", clock=1000.0)
    assert not final_lacks(tmp_path / "final", 1000.0)
    (tmp_path / "final" / MANIFEST).write_text("{}")
    assert final_lacks(tmp_path / "final", 1000.0)
