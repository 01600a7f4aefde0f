"""Work that need not be done again is not: counted, since a clock would tell it from a busy machine's noise badly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
from hivemind.dht.routing import DHTID

from noloco_node import PROTOCOL_VERSION, __version__, peer_table
from noloco_node.averaging.matchmaking import WAIT, PairingState, Window, decide
from noloco_node.config import run_spec
from noloco_node.config.settings import canonical_json
from noloco_node.directory import validator as record_validator
from noloco_node.directory.memory import MemoryDirectory, MemoryDirectoryHub
from noloco_node.directory.records import LiveRecord, PeerRecord, PeerState
from noloco_node.directory.validator import RecordValidator, sign_record, stage_key
from noloco_node.identity.keys import load_or_create_identity
from noloco_node.identity.keys import verify as identity_verify
from noloco_node.identity.peer_id import PeerId
from noloco_node.node.outer_steps import OuterSteps
from noloco_node.pauses import BANS
from noloco_node.simulator.loop import in_virtual_time
from noloco_node.simulator.node import SimulatedDevice
from noloco_node.training.compute_thread import Priority
from noloco_node.transport import bans as conduct
from noloco_node.transport.bans import Bans, Offence
from noloco_node.trust.admission import Access
from noloco_node.trust.filtered_directory import ScreenedDirectory
from tests.worlds import micro_spec, run_to_the_end, world

SECONDS = {Priority.STEP: 0.002, Priority.BACKWARD: 0.02, Priority.FORWARD: 0.01, Priority.DRAW: 0.001}
"""What a modelled device takes for each kind of work: how many views a run builds hangs on how long it is."""
PEERS = tuple(PeerId(f"peer-of-a-stage-{number}") for number in range(3))


class CountedConduct(Bans):
    """Counts how often it is asked about a record."""

    asked = 0

    def deals(self, peer: PeerId, _: object = None, /) -> bool:
        self.asked += 1
        return super().deals(peer)


def test_hardly_more_records_than_verdicts_are_kept_cost_hardly_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look takes all records in the same order: of a twentieth too many not all are judged anew."""
    monkeypatch.setattr(record_validator, "CACHED_VERDICTS", 100)
    identity, judged = load_or_create_identity(tmp_path / "key"), Counter[str]()
    record = PeerRecord(
        peer_id=identity.peer_id, stage=0, state=PeerState.TRAINING, protocol=PROTOCOL_VERSION, version=__version__
    )
    signed = [sign_record(identity, stage_key("run", 0), record, 1000.0 + number) for number in range(105)]

    def verified(public_key: bytes, signature: bytes, statement: bytes) -> bool:
        judged["signatures"] += 1
        return identity_verify(public_key, signature, statement)

    monkeypatch.setattr(record_validator, "verify", verified)
    validator = RecordValidator("run", 1)
    key, looks = DHTID.generate(source=stage_key("run", 0)).to_bytes(), 20
    for _ in range(looks):
        for number, value in enumerate(signed):
            assert validator.read_at(key, identity.peer_id, value, 1000.0 + number) == record
    again = (judged["signatures"] - len(signed)) / (looks - 1)
    assert 5 <= again < 0.4 * len(signed)
    assert len(validator._verdicts) == 100


async def crowded(hub: MemoryDirectoryHub) -> None:
    """Three peers at the only stage."""
    for peer in PEERS:
        record = PeerRecord(
            peer_id=peer, stage=0, state=PeerState.TRAINING, protocol=PROTOCOL_VERSION, version=__version__
        )
        await MemoryDirectory(hub).publish(record, 600)


async def test_a_view_is_screened_once_for_each_refresh_and_each_change_of_the_screen() -> None:
    """However often it is asked for; a ban counts from its first moment, and its end from its first moment."""
    clock = [0.0]
    hub, book = MemoryDirectoryHub(1), CountedConduct(lambda: clock[0])
    await crowded(hub)
    directory = ScreenedDirectory(MemoryDirectory(hub), book)
    await directory.refresh()
    for _ in range(5):
        assert set(directory.view.stages[0]) == set(PEERS)
    assert book.asked == len(PEERS)
    for _ in range(int(conduct.TOLERATED) + 1):
        book.offended(PEERS[0], Offence.MALFORMED)
    for _ in range(5):
        assert set(directory.view.stages[0]) == set(PEERS[1:])
    assert book.asked == 2 * len(PEERS)
    clock[0] = BANS.first
    for _ in range(5):
        assert set(directory.view.stages[0]) == set(PEERS)
    assert book.asked == 3 * len(PEERS)
    await directory.refresh()
    assert directory.view is directory.view
    assert book.asked == 4 * len(PEERS)


async def test_a_ban_forgotten_for_others_ends_in_the_view_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The accounts are bounded: a peer that drops out of them is dealt with again."""
    monkeypatch.setattr(peer_table, "MOST_PEERS", 1)
    hub, book = MemoryDirectoryHub(1), Bans()
    await crowded(hub)
    directory = ScreenedDirectory(MemoryDirectory(hub), book)
    await directory.refresh()
    for _ in range(int(conduct.TOLERATED) + 1):
        book.offended(PEERS[0], Offence.MALFORMED)
    assert set(directory.view.stages[0]) == set(PEERS[1:])
    book.offended(PEERS[1], Offence.MALFORMED)
    assert set(directory.view.stages[0]) == set(PEERS)


def test_an_open_run_never_changes_who_is_admitted() -> None:
    """So that its views are screened once for each refresh."""
    access = Access(micro_spec())
    before = access.changes
    assert all(access.deals(peer, LiveRecord(None, 0.0)) for peer in PEERS)  # pyright: ignore[reportArgumentType]
    assert access.changes == before


def test_the_run_id_is_hashed_once_and_a_changed_copy_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each microbatch asks for it three times a hop."""
    hashed: list[object] = []

    def counted(value: object) -> str:
        hashed.append(value)
        return canonical_json(value)

    monkeypatch.setattr(run_spec, "canonical_json", counted)
    spec = micro_spec()
    assert len({spec.run_id for _ in range(9)}) == 1
    assert len(hashed) == 1
    for deep in (False, True):
        other = spec.model_copy(update={"name": "another"}, deep=deep)
        assert other.run_id != spec.run_id
        assert other.model_copy(update={"name": spec.name}, deep=deep).run_id == spec.run_id
    assert "run_id" not in spec.model_dump()


def test_stage_peers_are_asked_for_only_once_a_step_is_due() -> None:
    """The decision is taken at every pulse, and takes all records."""

    def nobody_asks() -> Sequence[PeerId]:
        raise AssertionError("asked")

    early = PairingState(steps_since_outer=(9,), steps_free=9, stage_peers=nobody_asks, engaged=False, next_try=0.0)
    assert decide(early, Window(10, 5), now=1.0, rng=None) is WAIT  # pyright: ignore[reportArgumentType]


def test_a_whole_run_neither_looks_for_partners_too_early_nor_builds_views_by_the_microbatch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No outer step is due before the last round here; views are built at refreshes, however many microbatches pass."""
    done: Counter[str] = Counter()
    partners, screened = OuterSteps.worth_dialling, Bans.deals

    def looked(self: OuterSteps, *states: PeerState) -> list[PeerId]:
        done["looked for partners"] += not self._side.last_round
        return partners(self, *states)

    def asked(self: Bans, peer: PeerId, _: object = None, /) -> bool:
        done["asked the screen"] += 1
        return screened(self, peer)

    monkeypatch.setattr(OuterSteps, "worth_dialling", looked)
    monkeypatch.setattr(Bans, "deals", asked)

    async def whole_run() -> None:
        async with world(
            micro_spec(layers=2, steps=50), replicas=1, device=partial(SimulatedDevice, SECONDS.__getitem__)
        ) as made:
            await run_to_the_end(made)
            assert made.replicas[0].pipeline.ledger.trained >= 50

    in_virtual_time(whole_run)
    assert done["looked for partners"] == 0
    assert done["asked the screen"] < 50
