"""A run outlives a release: nodes of one protocol version train together, those of another are told what to install."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from typing import Any, Literal

import pytest
from pydantic import create_model

import tests.worlds as worlds
from noloco_node import PROTOCOL_VERSION, __version__
from noloco_node.aio import cancel_and_wait
from noloco_node.bootstrap import spec_fetch
from noloco_node.bootstrap.hello import Hello, check_same_run
from noloco_node.config.model_spec import ModelSpec
from noloco_node.config.run_spec import EvaluationSpec, InnerSpec, LimitsSpec, OuterSpec, RunSpec
from noloco_node.config.settings import Settings
from noloco_node.directory import records_call
from noloco_node.directory.records import PeerRecord, PeerState, SignedRecord
from noloco_node.directory.records_call import serve_records, tell
from noloco_node.errors import ExitCode, UserError
from noloco_node.identity.keys import identity_of_seed
from noloco_node.identity.peer_id import PeerId
from noloco_node.node.checks import CheckOutcome, check_versions
from noloco_node.peers.scorecard import TOLERATED, Bans
from noloco_node.telemetry.events import AnyEvent, OuterStep
from noloco_node.transport.calls import NOTHING, Method, Nothing, call
from noloco_node.transport.errors import Refusal, Refused
from noloco_node.transport.interface import Admit, Handle, Withdraw
from noloco_node.transport.memory import MemoryNetwork, MemoryTransport
from noloco_node.transport.messages import (
    FRAME_VERSION,
    PREFIX_BYTES,
    FrameKind,
    Message,
    decode_prefix,
    decode_refusal,
    encode_envelope,
    encode_frame,
)
from noloco_node.transport.same_machine import SameMachine
from noloco_node.trust.screened_directory import ScreenedDirectory
from tests.memory_directory import MemoryDirectory, MemoryDirectoryHub
from tests.support import eventually
from tests.swarm.test_spec_fetch import OTHER, SPEC, Swarm, claim, swarm
from tests.swarm.worlds import nearby_world
from tests.worlds import micro_spec, world

ONE, TWO = PeerId("peer-number-one"), PeerId("peer-number-two")
ADJACENT = (PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1)

FIXED = RunSpec(
    name="fixed",
    model=ModelSpec(config={"model_type": "llama"}),
    inner=InnerSpec(target_tokens=1_000_000, global_batch_tokens=65_536),
    evaluation=EvaluationSpec(every_tokens=100_000),
)
RUN_ID_OF_FIXED = {5: "ae78f4ccd8e06d75ad52734b85971b9c"}
"""The run id by protocol version. A setting of `run:` that comes, goes, or gets another default makes another run out
of the same file. Then raise PROTOCOL_VERSION, unless this one was not released yet, and put the new id here."""


def other_version(made: Swarm, protocol: int) -> None:
    """One more peer, of a release that speaks `protocol`."""
    claim(made.peer(), Hello(run=SPEC.run_id, name="micro", protocol=protocol, version="9.9", stage=0))


@pytest.mark.parametrize("theirs", ADJACENT)
async def test_who_joins_another_protocol_version_is_told_both_and_what_to_install(theirs: int) -> None:
    """With nothing but an address, with the run's file, and by `doctor`: the same three facts."""
    async with swarm() as made:
        other_version(made, theirs)
        errors = [await made.refusal()]
        with pytest.raises(UserError) as caught:
            await check_same_run(made.joiner, SPEC, made.addresses)
        errors.append(caught.value)
    check = check_versions((PROTOCOL_VERSION, __version__), {"peer": (theirs, "9.9")})
    assert check.outcome is CheckOutcome.FAIL
    assert all(error.exit_code is ExitCode.WRONG_RUN for error in errors)
    side = "newer" if theirs > PROTOCOL_VERSION else "older"
    for found, remedy in [(check.found, check.remedy), *((error.message, error.remedy) for error in errors)]:
        assert {str(theirs), str(PROTOCOL_VERSION)} <= set(found.replace(",", " ").split())
        assert "(noloco-node 9.9)" in found
        assert f"({__version__})" in found
        assert f"the peers are {side}: install noloco-node 9.9 here, or" in remedy


@pytest.mark.parametrize("release", ["9.9", __version__])
async def test_another_run_under_another_release_may_be_the_same_file(release: str) -> None:
    """Then the remedy names both releases; under the same one it blames the file alone."""
    async with swarm() as made:
        claim(made.peer(), Hello(run=OTHER.run_id, name="x", protocol=PROTOCOL_VERSION, version=release, stage=0))
        with pytest.raises(UserError) as caught:
            await check_same_run(made.joiner, SPEC, made.addresses)
    assert caught.value.exit_code is ExitCode.WRONG_RUN
    assert (f"noloco-node 9.9 as the peer (here {__version__})" in caught.value.remedy) == (release != __version__)


@pytest.mark.parametrize("knows", ["no optimizer", "adamw alone"])
async def test_a_joiner_of_a_release_that_knows_no_muon_is_told_the_setting_and_both_releases(
    knows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With nothing but an address. It was told that extra inputs are not permitted."""
    fields: dict[str, Any] = {name: (field.annotation, field) for name, field in InnerSpec.model_fields.items()}
    fields["optimizer"] = (Literal["adamw"], "adamw")
    if knows == "no optimizer":
        del fields["optimizer"]
    inner = create_model("InnerSpec", __base__=Settings, **fields)
    monkeypatch.setattr(spec_fetch, "RunSpec", create_model("RunSpec", __base__=RunSpec, inner=(inner, ...)))
    async with swarm() as made:
        adamw = json.loads(SPEC.agreed_json)
        made.says(json.dumps({**adamw, "inner": {**adamw["inner"], "optimizer": "muon"}}).encode())
        error = await made.refusal()
    assert error.exit_code is ExitCode.WRONG_RUN
    mistake = {"no optimizer": "there is no setting run.inner.optimizer here", "adamw alone": "inner.optimizer: Input"}
    assert mistake[knows] in error.message
    assert f"(noloco-node 9.9 there, {__version__} here)" in error.message
    assert "install the version of noloco-node that its nodes have" in error.remedy


def record(peer: PeerId, protocol: int) -> PeerRecord:
    """What a node of a release that speaks `protocol` publishes."""
    return PeerRecord(peer_id=peer, stage=0, state=PeerState.TRAINING, protocol=protocol, version="9.9")


async def test_records_of_another_protocol_version_are_dealt_with_by_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """They lie under the same key, since the run is the same; a node with no other peer to ask would be routed to. It
    is said once, however many there are."""
    hub = MemoryDirectoryHub(1)
    directory = ScreenedDirectory(MemoryDirectory(hub), Bans())
    await directory.publish(record(ONE, PROTOCOL_VERSION), 60.0)
    for theirs in ADJACENT:
        await MemoryDirectory(hub).publish(record(PeerId(f"speaks-version-{theirs}"), theirs), 60.0)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert set((await directory.refresh()).stages[0]) == {ONE}
    assert len(caplog.records) == 1
    assert f"this node speaks {PROTOCOL_VERSION}" in caplog.text


@pytest.mark.parametrize("theirs", ADJACENT)
async def test_whoever_speaks_another_version_serves_no_stage_of_this_run(theirs: int) -> None:
    """Called, and calling: it answers, it is there, and none of its records is taken."""
    network = MemoryNetwork()
    ours, other = MemoryTransport(network, ONE), MemoryTransport(network, TWO)
    said: dict[str, Any] = {"run": "run", "stage": 0, "protocol": theirs, "records": []}

    class Book(MemoryDirectory):
        def told(self, teller: PeerId, records: Sequence[SignedRecord]) -> int:
            raise AssertionError("a record of another version was taken")

    async def answer(_peer: PeerId, _message: Message) -> Message:
        return Message(said)

    book = Book(MemoryDirectoryHub(1))
    serve_records(ours, "run", book)
    other.serve(records_call.RECORDS.name, lambda *_: None, answer, max_concurrent_per_peer=1)
    with pytest.raises(Refused) as refused:
        await other.call(ONE, records_call.RECORDS.name, Message(said), timeout=5, progress=5, max_answer_bytes=0)
    assert refused.value.reason is Refusal.WRONG_PROTOCOL
    told = await tell(ours, TWO, "run", book)
    assert told.answered
    assert told.stage is None
    assert not ours.peer_stats.takes_part(TWO)


def of_version(version: int, frame: bytes) -> bytes:
    """A frame as a release with another frame version sends it."""
    return frame[:2] + bytes([version]) + frame[3:]


@pytest.mark.parametrize("theirs", [FRAME_VERSION - 1, FRAME_VERSION + 1])
async def test_frames_of_another_version_are_refused_and_bring_no_ban(theirs: int) -> None:
    """A node that was upgraded first asks and is asked: the older ones had banned it for broken frames, and it them."""
    one, two = (identity_of_seed(bytes([number]) * 32) for number in (1, 2))
    asked = Method("asked", Nothing, Nothing)
    async with nearby_world() as made:
        other = SameMachine(one)
        for _ in range(int(TOLERATED) + 2):
            ends = await other.open(made.server.peer_id)
            assert ends is not None
            reader, writer = ends
            writer.write(of_version(theirs, encode_frame(FrameKind.HEADER, encode_envelope("echo", {}, ()))))
            prefix = decode_prefix(await reader.readexactly(PREFIX_BYTES))
            refused = decode_refusal(await reader.readexactly(prefix.length))
            assert refused.reason is Refusal.WRONG_PROTOCOL
            writer.close()
        assert made.server.conduct.offences.total() == 0

        async def answer(_peer: PeerId, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(of_version(theirs, encode_frame(FrameKind.HEADER, encode_envelope("", {}, ()))))

        newer = SameMachine(two)
        await newer.serve(answer, 5.0)
        for _ in range(int(TOLERATED) + 2):
            with pytest.raises(Refused) as told:
                await call(made.caller, two.peer_id, asked, NOTHING, seconds=5.0)
            assert told.value.reason is Refusal.WRONG_PROTOCOL
        assert made.caller.conduct.offences.total() == 0
        newer.close()


class NewerTransport(MemoryTransport):
    """What a later release with the same protocol version sends: each header has a field that is not known here."""

    async def _call(
        self, peer: PeerId, method: str, request: Message, timeout: float, progress: float, max_answer_bytes: int
    ) -> Message:
        return await super()._call(peer, method, _newer(request), timeout, progress, max_answer_bytes)

    def serve(self, method: str, admit: Admit, handle: Handle, *, max_concurrent_per_peer: int) -> Withdraw:
        async def newer(peer: PeerId, message: Message) -> Message:
            return _newer(await handle(peer, message))

        return super().serve(method, admit, newer, max_concurrent_per_peer=max_concurrent_per_peer)


def _newer(message: Message) -> Message:
    return Message({**message.header, "added_later": {"of": [1, 2.5, None]}}, message.tensors)


def averaged(event: AnyEvent) -> bool:
    """Whether it tells of an outer step with a partner."""
    return isinstance(event, OuterStep) and event.partner is not None


@worlds.virtually
async def test_two_releases_of_one_protocol_version_train_in_one_swarm(monkeypatch: pytest.MonkeyPatch) -> None:
    """One replica of each stage is of the later release, and each averages with its stage peer of the other.
    Microbatches go between all, and nobody is blamed for what is not known here."""

    def transport(network: MemoryNetwork, peer: PeerId) -> MemoryTransport:
        return (NewerTransport if peer.endswith("-1") else MemoryTransport)(network, peer)

    monkeypatch.setattr(worlds, "MemoryTransport", transport)
    quick = LimitsSpec(record_seconds=0.5, grace_seconds=0.2, chunk_bytes=16384)
    outer = OuterSpec(inner_steps=2, alpha=0.5, beta=0.7)
    async with world(micro_spec(steps=10_000, outer=outer, limits=quick), replicas=2) as made:
        running = [asyncio.create_task(replica.run()) for replica in made.replicas]
        try:
            await eventually(lambda: all(any(map(averaged, events)) for events in made.events))
        finally:
            await cancel_and_wait(running)
        for replica in made.replicas:
            assert replica.context.transport.conduct.offences.total() == 0


def test_one_protocol_version_makes_one_run_of_one_file() -> None:
    """A user that upgrades must find the run again, and its folder."""
    assert RUN_ID_OF_FIXED.get(PROTOCOL_VERSION) == FIXED.run_id
