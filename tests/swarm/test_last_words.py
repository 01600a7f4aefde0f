"""What a seed remembers of a run's end: records say that it is over, work takes it back, silence changes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from noloco_node import PROTOCOL_VERSION
from noloco_node.config.load import load_config
from noloco_node.config.run_spec import AccessSpec
from noloco_node.directory.last_words import LOOKS_A_LIFE, is_over
from noloco_node.directory.memory import MemoryDirectory, MemoryDirectoryHub
from noloco_node.directory.records import DirectoryView, LiveRecord, PeerRecord, PeerState
from noloco_node.identity.invitations import invite
from noloco_node.identity.keys import load_or_create_identity
from noloco_node.identity.peer_id import PeerId
from noloco_node.node.seed import last_words
from noloco_node.storage.run_folder import MARK, RunFolder

SPEC = load_config(Path(__file__).parent.parent / "configs" / "micro.yaml").run
LIFE = 60.0
GONE, TRAINING, JOINING, FINISHING = PeerState.GONE, PeerState.TRAINING, PeerState.JOINING, PeerState.FINISHING


def record(number: int, state: PeerState, *, stage: int = 0, finished: bool = False, clock: float = 1.0) -> PeerRecord:
    """Of a made-up peer."""
    return PeerRecord(
        peer_id=f"12D3KooWpeer{number}",
        stage=stage,
        state=state,
        finished=finished,
        clock=clock,
        protocol=PROTOCOL_VERSION,
        version="1",
    )


@pytest.mark.parametrize(
    ("records", "before", "after"),
    [
        ((), False, False),
        ((), True, True),
        ((record(1, TRAINING),), True, False),
        ((record(1, TRAINING, stage=1), record(2, GONE, finished=True)), True, True),
        ((record(1, TRAINING, stage=1), record(2, GONE, finished=True)), False, False),
        ((record(1, TRAINING, stage=1), record(2, TRAINING)), True, False),
        ((record(1, GONE, finished=True), record(2, GONE, finished=True, stage=1)), False, True),
        ((record(1, FINISHING, finished=True), record(2, GONE, finished=True)), False, True),
        ((record(1, FINISHING, finished=True), record(2, TRAINING)), False, False),
        ((record(1, GONE), record(2, GONE), record(3, GONE, finished=True)), True, False),
        ((record(1, GONE), record(2, GONE, finished=True)), False, True),
        ((record(1, GONE), record(2, GONE)), True, False),
        ((record(1, GONE, finished=True, stage=1),), False, False),
        ((record(1, GONE, clock=0.0), record(2, GONE, clock=0.0)), True, True),
        ((record(1, GONE, clock=0.0), record(2, GONE, finished=True, clock=0.0)), False, True),
        ((record(1, JOINING),), True, True),
        ((record(1, JOINING),), False, False),
    ],
)
def test_the_last_words_of_the_first_stage_decide(records: tuple[PeerRecord, ...], before: bool, after: bool) -> None:
    """As long as nobody of that stage says that it trains. One of a later stage neither ends a run nor begins it again:
    a node that had come home to one made a seed forget the end for good. Who joins says nothing, nor who was sent away
    as it came: its farewell did the same."""
    rows: tuple[dict[PeerId, LiveRecord], ...] = ({}, {})
    for each in records:
        rows[each.stage][PeerId(each.peer_id)] = LiveRecord(each, 100.0)
    assert is_over(DirectoryView(rows), 50.0, before) is after


async def test_who_leaves_by_hand_as_the_run_ends_does_not_hide_its_end_from_the_seed(tmp_path: Path) -> None:
    """Of two at the first stage. The other's last word stands alone for two seconds, between two looks of the seed."""
    now = 1000.0
    hub = MemoryDirectoryHub(2, lambda: now)
    nodes = MemoryDirectory(hub)
    last = last_words(MemoryDirectory(hub), RunFolder.create(tmp_path), SPEC)
    await nodes.publish(record(1, GONE), LIFE)
    now += 2.0
    await nodes.publish(record(2, GONE, finished=True), LIFE)
    for _ in range(30):
        await last.look()
        now += LIFE / LOOKS_A_LIFE
    assert last.over


async def test_a_seed_remembers_the_end_when_all_records_are_gone_and_when_it_comes_back(tmp_path: Path) -> None:
    """The nodes have left, their records have died, the seed is another process: it knows, until somebody trains."""
    now = 1000.0
    hub = MemoryDirectoryHub(2, lambda: now)
    nodes, folder = MemoryDirectory(hub), RunFolder.create(tmp_path)
    last = last_words(MemoryDirectory(hub), folder, SPEC)
    await nodes.publish(record(0, JOINING), LIFE)
    await last.look()
    assert not last.knows
    for stage in (0, 1):
        await nodes.publish(record(stage, TRAINING, stage=stage), LIFE)
    await last.look()
    assert last.knows
    assert not last.over
    assert not (tmp_path / MARK).exists()
    for stage in (0, 1):
        await nodes.publish(record(stage, GONE, stage=stage, finished=True), LIFE)
    await last.look()
    assert last.over
    now += 2 * LIFE
    await last.look()
    assert last.over
    again = last_words(MemoryDirectory(hub), folder, SPEC)
    assert again.over
    assert again.knows
    await nodes.publish(record(7, TRAINING), LIFE)
    await again.look()
    assert not again.over
    assert not last_words(MemoryDirectory(hub), folder, SPEC).over
    (tmp_path / MARK).write_text(json.dumps({"run_id": "another", "run_name": "x", "ended": True}), encoding="utf-8")
    assert not last_words(MemoryDirectory(hub), folder, SPEC).over


async def test_strangers_tell_the_seed_of_an_invited_run_nothing(tmp_path: Path) -> None:
    """Any key made it say that the run is over, or forget that it is, to everybody who came."""
    owner = load_or_create_identity(tmp_path / "owner.key")
    access = AccessSpec(mode="invited", owner=owner.peer_id)
    spec = SPEC.model_copy(update={"access": access})
    hub = MemoryDirectoryHub(2, lambda: 1000.0)
    nodes = MemoryDirectory(hub)
    last = last_words(MemoryDirectory(hub), RunFolder.create(tmp_path / "seed"), spec)
    await nodes.publish(record(0, GONE, finished=True), LIFE)
    await last.look()
    assert not last.over
    assert not last.knows
    guest = record(1, GONE, finished=True)
    proof = invite(owner, spec.run_id, 1 << 40, PeerId(guest.peer_id)).proof_for(PeerId(guest.peer_id))
    await nodes.publish(guest.model_copy(update={"invitation": proof}), LIFE)
    await last.look()
    assert last.over
    await nodes.publish(record(2, TRAINING), LIFE)
    await last.look()
    assert last.over
