"""The directory: what it promises in both worlds, and what strangers can do to it (nothing)."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hivemind.dht.routing import DHTID
from hypothesis import given, settings
from hypothesis import strategies as st

from noloco_node.config.node_settings import NodeSettings
from noloco_node.directory.dht import join_directory
from noloco_node.directory.records import MOST_SAID, Directory, OwnWord, PeerState, SlotClaim
from noloco_node.directory.validator import MAX_EXPIRY, RecordValidator, sign_record, stage_key
from noloco_node.identity.invitations import invite
from noloco_node.identity.keys import Identity, load_or_create_identity
from noloco_node.identity.peer_id import PeerId
from noloco_node.libp2p.start import running_p2p
from tests.inside import intake_of, node_of, walker_of
from tests.memory_directory import MemoryDirectory, MemoryDirectoryHub
from tests.support import eventually, nothing_left_behind
from tests.swarm.memory_dht import Member, MemoryP2P
from tests.worlds import record_of

RUN = "run-under-test"
STAGES = 2


@dataclass
class Nodes:
    """Some nodes of one directory: (directory, own peer id) each."""

    members: list[tuple[Directory, PeerId]]


@contextlib.asynccontextmanager
async def dht_nodes(folder: Path, count: int) -> AsyncIterator[list[tuple[Any, Identity]]]:
    """Nodes on p2pd processes of their own; all join through the first."""
    async with contextlib.AsyncExitStack() as stack:
        nodes: list[tuple[Any, Identity]] = []
        addresses: tuple[str, ...] = ()
        for number in range(count):
            identity = load_or_create_identity(folder / f"{number}.key")
            p2p = await stack.enter_async_context(running_p2p(NodeSettings(initial_peers=addresses), identity))
            addresses = addresses or tuple(p2p.visible_addresses())
            directory = await join_directory(p2p, identity, RUN, STAGES)
            stack.push_async_callback(directory.close)
            nodes.append((directory, identity))
        yield nodes


@pytest.fixture(params=["memory", pytest.param("dht", marks=pytest.mark.daemons)])
async def nodes(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Nodes]:
    """Three nodes in either world."""
    if request.param == "memory":
        hub = MemoryDirectoryHub(STAGES)
        yield Nodes([(MemoryDirectory(hub), PeerId(f"peer-number-{number}")) for number in range(3)])
        return
    with nothing_left_behind():
        async with dht_nodes(tmp_path, 3) as made:
            yield Nodes([(directory, identity.peer_id) for directory, identity in made])


def live_ids(directory: Directory, stage: int, *states: PeerState) -> set[str]:
    """Peer ids of the live records of a stage."""
    return {record.peer_id for record in directory.view.live(stage, directory.now(), *states)}


async def test_everyone_sees_everyone_until_a_newer_record_or_the_end_of_one(nodes: Nodes) -> None:
    """Nobody is seen before the first refresh. A newer record wins, also one that was meant to live shorter. A record
    is live until its expiry as the reader judges it, without any further look-up."""
    for number, (directory, peer) in enumerate(nodes.members):
        assert live_ids(directory, 0) == live_ids(directory, 1) == set()
        assert await directory.publish(record_of(peer, number % 2, sequence=1), 30)
    ids = [peer for _, peer in nodes.members]
    for directory, _ in nodes.members:
        await directory.refresh()
        assert live_ids(directory, 0) == {ids[0], ids[2]}
        assert live_ids(directory, 1) == {ids[1]}
    (writer, peer), (reader, _), _ = nodes.members
    now = reader.now()
    assert len(reader.view.live(0, now + 25)) == 2
    assert reader.view.live(0, now + 31) == ()
    for sequence, (state, life) in enumerate(
        [(PeerState.JOINING, 60), (PeerState.TRAINING, 60), (PeerState.GONE, 1)], start=2
    ):
        assert await writer.publish(record_of(peer, 0, state, sequence=sequence), life)
        await reader.refresh()
        record = reader.view.stages[0][peer].record
        assert (record.state, record.sequence) == (state, sequence)
    assert live_ids(reader, 0) == {ids[2]}
    assert live_ids(reader, 0, PeerState.GONE) == {peer}


async def two_members() -> list[Member]:
    """Two nodes of a DHT in memory."""
    network: dict[str, MemoryP2P] = {}
    first = await Member(network).join(RUN, STAGES)
    return [first, await Member(network).join(RUN, STAGES, first.peer)]


async def test_a_clock_that_was_ahead_for_a_moment_hides_its_node_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody holds what it published then, and what it publishes afterwards need not outlive that."""
    one, two = await two_members()
    writer, reader = one.directory, two.directory
    with monkeypatch.context() as patch:
        for clock in (writer, intake_of(writer)):
            patch.setattr(clock, "now", lambda: time.time() + 86_400.0)
        await writer.publish(record_of(one.peer, sequence=1), 30)
        await reader.refresh()
        assert live_ids(reader, 0) == set()
    assert await writer.publish(record_of(one.peer, sequence=2), 30)
    for directory in (reader, writer):
        await directory.refresh()
        [row] = directory.view.stages[0].values()
        assert row.record.sequence == 2
        assert row.expires < time.time() + 60.0


async def test_a_hub_that_is_cut_off_keeps_the_last_rows() -> None:
    """Publication says so, look-ups lose nobody."""
    hub = MemoryDirectoryHub(STAGES)
    one, two = MemoryDirectory(hub), MemoryDirectory(hub)
    assert await one.publish(record_of("peer-number-1"), 30)
    await two.refresh()
    hub.reachable = False
    assert not await one.publish(record_of("peer-number-1", state=PeerState.GONE), 30)
    await two.refresh()
    assert live_ids(two, 0) == {"peer-number-1"}


@pytest.mark.daemons
async def test_a_dead_p2pd_neither_hangs_nor_raises(tmp_path: Path) -> None:
    """Publishing says False, look-ups end in time and keep the last rows."""
    with nothing_left_behind():
        first, second = (load_or_create_identity(tmp_path / name) for name in ("one", "two"))
        async with running_p2p(NodeSettings(), first) as one:
            directory = await join_directory(one, first, RUN, STAGES)
            settings_ = NodeSettings(initial_peers=tuple(one.visible_addresses()))
            async with running_p2p(settings_, second) as two:
                other = await join_directory(two, second, RUN, STAGES)
                await directory.publish(record_of(first.peer_id), 60)
                await other.refresh()
                os.kill(two.pid, signal.SIGKILL)
                await two.wait_until_dead()
                async with asyncio.timeout(60):
                    await other.publish(record_of(second.peer_id), 30)
                    await other.refresh()
                assert first.peer_id in live_ids(other, 0)
                await other.close()
            await directory.close()


async def test_halves_that_forgot_each_other_find_each_other_again() -> None:
    """As after a partition: neither has the other in its routes, and every record of the other has ended. Both go on
    publishing and reading, and nothing else."""
    made = await two_members()
    ids = {member.peer for member in made}

    async def publish_and_read(life: float) -> list[set[str]]:
        for member in made:
            await member.directory.publish(record_of(member.peer), life)
        for member in made:
            await member.directory.refresh()
        return [live_ids(member.directory, 0) for member in made]

    assert await publish_and_read(0.5) == [ids, ids]
    for member in made:
        member.met.met = lambda _: True  # type: ignore[method-assign]
        table = node_of(member.directory).table
        for node_id in list(table.uid_to_peer_id):
            del table[node_id]
        walker_of(member.directory).forget()
        walker_of(member.directory)._reliable.clear()
        member.directory._entrances.clear()
    await eventually(lambda: not any(live_ids(member.directory, 0) for member in made), what="records end")
    alone = await publish_and_read(30.0)
    assert alone == [{member.peer} for member in made]
    async with asyncio.timeout(45):
        seen = alone
        while seen != [ids, ids]:
            await asyncio.sleep(0.2)
            seen = await publish_and_read(30.0)


def sign_payload(identity: Identity, key: str, payload: bytes, expires: float) -> bytes:
    """Like `sign_record`, for any payload."""

    class Dump:
        def model_dump_json(self, *, exclude: set[str], exclude_defaults: bool) -> str:
            del exclude, exclude_defaults
            return payload.decode("latin-1")

    fake: Any = Dump()
    return sign_record(identity, key, fake, expires)


@pytest.fixture(scope="module")
def signer(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    """One identity for the tests of the validator."""
    return load_or_create_identity(tmp_path_factory.mktemp("signer") / "key")


@dataclasses.dataclass(frozen=True)
class Brought:
    """A record as somebody brings it."""

    key: bytes
    signer: str
    signed: bytes
    expires: float

    def passes(self, validator: RecordValidator) -> bool:
        """Whether it is what its owner signed for its place."""
        return validator.read(self.key, self.signer, self.signed, self.expires) is not None


def stored(signer: Identity, *, stage: int = 0, expires: float = 2e9) -> Brought:
    """A valid record."""
    signed = sign_record(signer, stage_key(RUN, stage), record_of(signer.peer_id, stage), expires)
    return Brought(DHTID.generate(source=stage_key(RUN, stage)).to_bytes(), signer.peer_id, signed, expires)


def test_the_fullest_record_that_a_guest_may_have_to_publish_is_valid(signer: Identity) -> None:
    """Invited by key, in a run of weeks, with all the blocks in hand that it may have of as many sources as may be."""
    run, expires, third = "0123456789abcdef" * 2, 2e9, 1 / 3
    record = record_of(
        signer.peer_id,
        clock=1e12 + third,
        tokens_per_second=1e4 + third,
        capacity=1e4 + third,
        standby_of=1,
        outer_steps_taken=10**6,
        slots=tuple(SlotClaim(10**7 + number, 10**4, number % 2 == 0) for number in range(MOST_SAID)),
        sequence=10**6,
        invitation=invite(signer, run, 2 * 10**9, None).proof_for(signer.peer_id),
        shown=OwnWord(
            name="W" * 32, tokens=10**12, training_loss=2.3456, validation_loss=2.3456, replica_divergence=1.2345e-05
        ),
    )
    key = stage_key(run, 0)
    signed, place = sign_record(signer, key, record, expires), DHTID.generate(source=key).to_bytes()
    assert RecordValidator(run, 1).read(place, signer.peer_id, signed, expires) == record


def test_a_record_is_valid_at_its_own_place_only(signer: Identity) -> None:
    """Any change of key, signer, bytes or expiry is refused."""
    validator = RecordValidator(RUN, STAGES)
    good = stored(signer)
    assert good.passes(validator)
    assert good.passes(validator), "the cached verdict differs"
    assert not good.passes(RecordValidator("another-run", STAGES))
    for change in (
        {"key": stored(signer, stage=1).key},
        {"key": b"x" * 20},
        {"signer": ""},
        {"signer": "\ud800"},
        {"signer": "12D3KooWsomebodyelse"},
        {"expires": good.expires + 1e-3},
        {"expires": float("nan")},
        {"expires": float("inf")},
        {"expires": 2 * MAX_EXPIRY},
        {"signed": b""},
        {"signed": good.signed + b"\xc0"},
    ):
        assert not dataclasses.replace(good, **change).passes(validator), change


def test_the_verdict_does_not_depend_on_the_clock(signer: Identity) -> None:
    """Long expired and far in the future alike: readers judge life."""
    validator = RecordValidator(RUN, STAGES)
    assert stored(signer, expires=1.0).passes(validator)
    assert stored(signer, expires=9e9).passes(validator)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_no_changed_byte_passes_and_nothing_raises(data: st.DataObject) -> None:
    """One to four bytes of a valid value changed, or pieces cut out or put in."""
    validator = RecordValidator(RUN, STAGES)
    good = stored(_SIGNER)
    value = bytearray(good.signed)
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(value) - 1))
        match data.draw(st.integers(0, 2)):
            case 0:
                value[position] ^= data.draw(st.integers(1, 255))
            case 1:
                del value[position : position + data.draw(st.integers(1, 40))]
                value += b"\0" * (not value)
            case _:
                value[position:position] = data.draw(st.binary(min_size=1, max_size=40))
    changed = bytes(value)
    assert dataclasses.replace(good, signed=changed).passes(validator) == (changed == good.signed)


@settings(max_examples=300, deadline=None)
@given(name=st.text(max_size=60), value=st.binary(max_size=400), expires=st.floats())
def test_random_bytes_never_pass_and_never_raise(name: str, value: bytes, expires: float) -> None:
    """At a stage key, with and without the frame of a signed value around them."""
    validator = RecordValidator(RUN, STAGES)
    key = DHTID.generate(source=stage_key(RUN, 0)).to_bytes()
    assert not Brought(key, name, value, expires).passes(validator)
    assert not Brought(key, _SIGNER.peer_id, value, expires).passes(validator)
    signed = sign_payload(_SIGNER, stage_key(RUN, 0), value, 5.0)
    assert not Brought(key, _SIGNER.peer_id, signed, 5.0).passes(validator)


@pytest.fixture(scope="module", autouse=True)
def _signer_for_hypothesis(signer: Identity) -> None:
    global _SIGNER
    _SIGNER = signer


_SIGNER: Identity
