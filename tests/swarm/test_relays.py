"""Circuits: which peer gets a place with a relay, what crosses it, what it refuses, and what outlives it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from noloco_node.config.node_settings import NodeSettings
from noloco_node.errors import ExitCode, UserError
from noloco_node.identity.addresses import parse_address
from noloco_node.identity.keys import Identity, load_or_create_identity
from noloco_node.identity.peer_id import PeerId
from noloco_node.libp2p import relay_places
from noloco_node.libp2p import relay_server as circuit_relay
from noloco_node.libp2p import start as p2pd_start
from noloco_node.libp2p.daemon import PrivateP2P, to_dial
from noloco_node.libp2p.relay_messages import (
    HOP,
    Status,
    hop_answer,
    hop_status,
    read_fields,
    reserve_answer,
    reserve_request,
    stop_request,
    wanted_peer,
    write_message,
)
from noloco_node.libp2p.relay_places import ask_for_place, connected_by_relay, only_relayed
from noloco_node.libp2p.relay_server import CircuitRelay
from noloco_node.libp2p.start import reached_by_a_stranger, running_p2p, start_p2p
from noloco_node.tallies import Rest
from noloco_node.transport.libp2p import Libp2pTransport
from noloco_node.transport.messages import Message
from tests.inside import handshakes_of, held_by
from tests.support import eventually, p2pd_children
from tests.worlds import no_tensors

pytestmark = pytest.mark.usefixtures("temporary")

ONE = PeerId("12D3KooWKrCeA5nCWnQ5gm5FLAszTb6cDMk2hX8BH7Hj8MhGeFx9")
OTHER = PeerId("12D3KooWFWEkWNrcf5ddYVUkSwFZ244QyVXmGQx4dezxX5qXpKVh")
CIRCUIT = f"/ip4/203.0.113.7/tcp/4001/p2p/{ONE}/p2p-circuit/p2p/{OTHER}"


def fed(data: bytes) -> asyncio.StreamReader:
    """A stream that brings these bytes and ends."""
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    return reader


async def test_messages_are_those_of_the_specification() -> None:
    """Field by field, as protobuf writes them; a peer is named by the bytes of its id."""
    assert reserve_request().hex() == "0800"
    assert hop_answer(Status.NO_RESERVATION).hex() == "080228cc01"
    assert reserve_answer(300).hex() == "08021a0308ac022864"
    assert stop_request(ONE)[:6].hex() == "080012280a26"
    connect = bytes((1 << 3, 1)) + stop_request(ONE)[2:]
    assert wanted_peer(await read_fields(fed(bytes((len(connect),)) + connect))) == ONE
    answer = hop_answer(Status.OK)
    assert hop_status(await read_fields(fed(bytes((len(answer),)) + answer))) == Status.OK


@given(st.binary(max_size=64))
def test_bytes_that_are_no_message_are_refused_and_nothing_else(data: bytes) -> None:
    """A stranger's bytes end in a value, in ValueError, or where the stream ends."""

    async def read() -> None:
        with contextlib.suppress(ValueError, asyncio.IncompleteReadError):
            fields = await read_fields(fed(data))
            hop_status(fields)
            wanted_peer(fields)

    asyncio.run(read())


def test_an_address_through_a_relay_says_who_is_dialled_and_who_is_meant() -> None:
    """Its bytes for p2pd name the relay by the bytes of its id, not as hivemind writes it."""
    address = parse_address(CIRCUIT)
    assert (address.host, address.port, address.dialled, address.peer) == ("203.0.113.7", 4001, ONE, OTHER)
    raw = to_dial(CIRCUIT).to_bytes().hex()
    assert raw.startswith("04cb007107060fa1a503260024080112")
    assert raw.endswith("a202")
    assert to_dial(CIRCUIT.partition("/p2p-circuit")[0]).to_bytes().hex() == "04cb007107060fa1"
    with pytest.raises(ValueError, match="is no peer id"):
        parse_address(CIRCUIT.replace(ONE, "nobody"))
    assert only_relayed([CIRCUIT])
    assert not only_relayed([CIRCUIT, "/ip4/203.0.113.7/tcp/1"])
    assert not only_relayed([])


async def asked(relay: CircuitRelay, peer: PeerId, sent: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """This end of a stream on which a peer has sent a relay these bytes."""
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_unix_connection(sock=theirs)
    asyncio.create_task(relay.serve_stream(peer, reader, writer))  # noqa: RUF006 - it ends with the stream
    asking, asker = await asyncio.open_unix_connection(sock=ours)
    asker.write(sent)
    return asking, asker


async def test_the_asker_ends_the_stream_not_the_relay() -> None:
    """p2pd may throw away an answer whose stream is closed behind it, so each is followed by waiting for the other
    end: granted, refused and malformed alike."""
    for carry, message in ((True, reserve_request()), (False, reserve_request()), (True, b"\x08\x07")):
        relay = CircuitRelay(cast("Any", None), carry=carry)
        asking, asker = await asked(relay, ONE, bytes((len(message),)) + message)
        await read_fields(asking)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await asking.read()
        assert handshakes_of(relay)[ONE] == 1
        asker.close()
        await eventually(lambda relay=relay: not handshakes_of(relay))


async def test_who_leaves_its_requests_unfinished_gets_no_more_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """That holds even on a node that relays for nobody: beyond a few the next is dropped, while another peer is
    answered. The peer may ask again once it has ended them."""
    monkeypatch.setattr(circuit_relay, "MOST_HANDSHAKES_OF_ONE", 3)
    relay, message = CircuitRelay(cast("Any", None), carry=False), bytes((2,)) + reserve_request()
    held = [await asked(relay, ONE, b"\x7f") for _ in range(3)]
    await eventually(lambda: handshakes_of(relay)[ONE] == 3, what="they are being read")
    surplus, _ = await asked(relay, ONE, message)
    with contextlib.suppress(ConnectionError):
        assert await surplus.read() == b""
    for peer, ended in ((OTHER, ()), (ONE, held)):
        for _, asker in ended:
            asker.close()
        await eventually(lambda peer=peer: handshakes_of(relay)[peer] == 0)
        asking, _ = await asked(relay, peer, message)
        assert hop_status(await read_fields(asking)) == Status.PERMISSION_DENIED


@pytest.mark.parametrize("what", ["_go_direct", "_ask_all"])
async def test_places_are_asked_for_again_whatever_fails(
    what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A direct connection to a caller, or the request for the place, fails in a way that nobody foresaw. It is said."""
    failures = Counter[str]()

    async def fails(*_: object) -> None:
        failures[what] += 1
        raise ZeroDivisionError(what)

    async def succeeds(*_: object) -> None:
        return

    for name in ("_go_direct", "_ask_all"):
        monkeypatch.setattr(relay_places, name, fails if name == what else succeeds)
    monkeypatch.setattr(relay_places, "LOOK_SECONDS", 0.001)
    host: Any = SimpleNamespace(relays=(parse_address(CIRCUIT),), lost_relays=set())
    keeping = asyncio.create_task(relay_places.keep_places(host))
    await eventually(lambda: failures[what] > 2)
    keeping.cancel()
    assert f"ZeroDivisionError: {what}" in caplog.text


@contextlib.asynccontextmanager
async def relay_node(identity: Identity, port: int = 0) -> AsyncIterator[tuple[PrivateP2P, CircuitRelay]]:
    """A node that relays for others, and ends without a failure in a task or callback of asyncio's own."""
    failures: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, failure: failures.append(failure))
    async with running_p2p(NodeSettings(port=port), identity) as daemon:
        relay = CircuitRelay(daemon, carry=True)
        await relay.start()
        try:
            yield daemon, relay
        finally:
            await relay.close()
    assert not failures


def entering(daemon: PrivateP2P, *, relay: bool) -> NodeSettings:
    """Settings of a node that joins through this one."""
    return NodeSettings(initial_peers=tuple(daemon.visible_addresses()), relay="always" if relay else "never")


@pytest.mark.daemons
@pytest.mark.timeout(90)
async def test_what_crosses_a_relay_arrives_as_it_was_sent(tmp_path: Path) -> None:
    """Two nodes that tell others no address of their own send 16 MB there and back, in one connection that the relay
    carries. libp2p alone would have ended it after 128 KiB."""
    keys = [load_or_create_identity(tmp_path / name) for name in "rab"]
    async with relay_node(keys[0]) as (middle, relay):
        settings = entering(middle, relay=True)
        async with running_p2p(settings, keys[1]) as one, running_p2p(settings, keys[2]) as other:
            assert all("/p2p-circuit/p2p/" in text for text in [*one.visible_addresses(), *other.visible_addresses()])
            calling, serving = Libp2pTransport(one), Libp2pTransport(other)
            await asyncio.gather(calling.start(), serving.start())

            async def doubled(_peer: PeerId, message: Message) -> Message:
                return Message({}, (message.tensors[0] * 2,))

            serving.serve("double", lambda *_: None, doubled, max_concurrent_per_peer=1)
            async with asyncio.timeout(60):
                while not await one.addresses_of(other.own_id):  # noqa: ASYNC110 - p2pd gives no sign of it
                    await asyncio.sleep(0.05)
            sent = torch.randn(1 << 22)
            answer = await calling.call(
                other.own_id, "double", Message({}, (sent,)), timeout=60, progress=20, max_answer_bytes=1 << 24
            )
            assert torch.equal(answer.tensors[0], sent * 2)
            assert relay.circuits >= 1, "both may have dialled"
            assert relay.carried_bytes > 2 * sent.nbytes
            assert await connected_by_relay(one, other.own_id)
            assert not await connected_by_relay(one, middle.own_id)
            await asyncio.gather(calling.close(), serving.close())
        await eventually(lambda: relay.circuits == 0, what="a circuit ends with its ends")


@pytest.mark.daemons
@pytest.mark.timeout(60)
async def test_a_node_relays_for_nobody_unless_it_is_told_to(tmp_path: Path) -> None:
    """An asker is told so, and a start that needs a relay ends with the reason for each peer and a remedy. p2pd by
    itself would relay, whatever its arguments say; such a relay is none to build on."""
    keys = [load_or_create_identity(tmp_path / name) for name in "pq"]
    async with running_p2p(NodeSettings(), keys[0]) as plain:
        async with running_p2p(entering(plain, relay=False), keys[1]) as asker:
            assert "few bytes" in str(await ask_for_place(asker, plain.own_id))
        refusing = CircuitRelay(plain, carry=False)
        await refusing.start()
        with pytest.raises(UserError) as caught:
            await start_p2p(entering(plain, relay=True), keys[1])
        assert caught.value.exit_code is ExitCode.PEERS_UNREACHABLE
        assert f"{plain.own_id}: it relays for nobody" in caught.value.message
        assert "--relay-for-others" in caught.value.remedy
        assert refusing.places == 0
        await refusing.close()


@pytest.mark.daemons
@pytest.mark.timeout(90)
async def test_a_relay_that_comes_back_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Started anew at the same address it knows nobody; the node has its place again after the next request, without a
    restart of its own."""
    monkeypatch.setattr(relay_places, "RENEW_SECONDS", 0.5)
    monkeypatch.setattr(relay_places, "LOOK_SECONDS", 0.1)
    keys = [load_or_create_identity(tmp_path / name) for name in "rb"]
    async with contextlib.AsyncExitStack() as stack:
        async with relay_node(keys[0]) as (middle, _):
            port = parse_address(middle.visible_addresses()[0]).port
            hidden = await stack.enter_async_context(running_p2p(entering(middle, relay=True), keys[1]))
            assert await reached_by_a_stranger(NodeSettings(), hidden) is None
        assert await reached_by_a_stranger(NodeSettings(), hidden) is not None
        async with relay_node(keys[0], port) as (_, relay):
            await eventually(lambda: relay.places == 1, what="the node has asked for a place again")
            assert await reached_by_a_stranger(NodeSettings(), hidden) is None


@pytest.mark.daemons
@pytest.mark.timeout(90)
async def test_a_hidden_node_whose_p2pd_was_started_again_is_reached_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks for its place while p2pd is dead, in vain, and with the new one."""
    monkeypatch.setattr(relay_places, "RENEW_SECONDS", 0.2)
    monkeypatch.setattr(relay_places, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(circuit_relay, "PLACE_SECONDS", 1.0)
    keys = [load_or_create_identity(tmp_path / name) for name in "rb"]
    async with relay_node(keys[0]) as (middle, relay), running_p2p(entering(middle, relay=True), keys[1]) as hidden:
        await eventually(lambda: hidden.own_id in held_by(relay), what="its place")
        os.kill(hidden.pid, signal.SIGKILL)
        await hidden.wait_until_dead()
        await eventually(lambda: relay.places == 0, what="the place has lapsed")
        assert not hidden.lost_relays, "the silence was of its own p2pd"
        await hidden.restart(60)
        hidden.back()
        await eventually(lambda: relay.places == 1, what="it has asked again")
        assert await reached_by_a_stranger(NodeSettings(), hidden) is None


@pytest.mark.daemons
@pytest.mark.timeout(90)
async def test_places_and_circuits_are_bounded_and_a_place_lapses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One more than there is room for is refused, and a place that is not asked for again is forgotten. A request that
    is none is answered as such."""
    monkeypatch.setattr(circuit_relay, "MOST_PLACES", 1)
    monkeypatch.setattr(circuit_relay, "MOST_CIRCUITS_OF_ONE", 0)
    keys = [load_or_create_identity(tmp_path / name) for name in "rab"]
    async with relay_node(keys[0]) as (middle, relay):
        nowhere = entering(middle, relay=False).model_copy(update={"announce": ("127.0.0.1:9",)})
        async with running_p2p(nowhere, keys[1]) as one, running_p2p(nowhere, keys[2]) as other:
            circuit = f"{middle.visible_addresses()[0]}/p2p-circuit/p2p/{other.own_id}"
            assert await ask_for_place(other, middle.own_id) is None
            assert await ask_for_place(other, middle.own_id) is None, "who has a place keeps it"
            assert "status 201" in str(await ask_for_place(one, middle.own_id))
            async with running_p2p(NodeSettings(), load_or_create_identity(tmp_path / "c")) as far:
                assert "RESOURCE_LIMIT_EXCEEDED" in str(await far.connect(other.own_id, [circuit]))
            monkeypatch.setattr(circuit_relay, "PLACE_SECONDS", 0.0)
            assert await ask_for_place(other, middle.own_id) is None
            assert relay.places == 0
            async with running_p2p(NodeSettings(), load_or_create_identity(tmp_path / "d")) as far:
                assert "NO_RESERVATION" in str(await far.connect(other.own_id, [circuit]))
            for nonsense in (b"\xff" * 8, b"\x08\x01", b"\x08\x07", b"\x08\x01\x12\x02\x0a\x00"):
                reader, writer = await one.open_stream(middle.own_id, HOP)
                await write_message(writer, nonsense)
                assert hop_status(await read_fields(reader)) == Status.MALFORMED_MESSAGE, nonsense
                writer.transport.abort()


@pytest.mark.daemons
@pytest.mark.timeout(90)
async def test_who_has_gone_holds_no_place_that_another_wants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One machine that reserves under one throw-away key after another, one connection at a time, cannot take all."""
    monkeypatch.setattr(circuit_relay, "MOST_PLACES", 2)
    keys = [load_or_create_identity(tmp_path / name) for name in "rabcd"]
    async with relay_node(keys[0]) as (middle, relay):
        for key in keys[1:3]:
            async with running_p2p(entering(middle, relay=False), key) as thrown_away:
                assert await ask_for_place(thrown_away, middle.own_id) is None
        assert relay.places == 2
        settings = entering(middle, relay=False)
        async with running_p2p(settings, keys[3]) as one, running_p2p(settings, keys[4]) as other, asyncio.timeout(60):
            while await ask_for_place(one, middle.own_id) is not None:  # its p2pd may not have noticed the departure
                assert relay.places == 2
            assert await ask_for_place(other, middle.own_id) is None
            assert {one.own_id, other.own_id} == set(held_by(relay)), "who is there keeps its place"


def connect_request(peer: PeerId) -> bytes:
    """Asks a relay for a connection to a peer."""
    return bytes((1 << 3, 1)) + stop_request(peer)[2:]


@pytest.mark.daemons
@pytest.mark.timeout(90)
async def test_one_caller_cannot_use_up_the_circuits_of_whom_it_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets a few and no more, so others go on reaching that peer. And a relay that ends with circuits open ends
    them in silence."""
    monkeypatch.setattr(circuit_relay, "MOST_CIRCUITS_OF_ONE", circuit_relay.MOST_CIRCUITS_OF_A_PAIR + 1)
    keys = [load_or_create_identity(tmp_path / name) for name in "rabc"]
    async with (
        relay_node(keys[0]) as (middle, relay),
        running_p2p(entering(middle, relay=True), keys[1]) as hidden,
        running_p2p(entering(middle, relay=False), keys[2]) as greedy,
        running_p2p(NodeSettings(), keys[3]) as other,
    ):
        await eventually(lambda: hidden.own_id in held_by(relay), what="its place")
        held: list[asyncio.StreamWriter] = []
        statuses: list[int] = []
        for _ in range(circuit_relay.MOST_CIRCUITS_OF_ONE):
            reader, writer = await greedy.open_stream(middle.own_id, HOP)
            await write_message(writer, connect_request(hidden.own_id))
            statuses.append(hop_status(await read_fields(reader)))
            held.append(writer)
        assert statuses[0] == Status.OK
        assert statuses[-1] == Status.RESOURCE_LIMIT_EXCEEDED, "p2pd may have dialled too, so where it begins varies"
        assert await other.connect(hidden.own_id, hidden.visible_addresses()) is None
        assert relay.circuits > 1
        await relay.close()
        assert relay.circuits == 0
        for writer in held:
            writer.transport.abort()


@pytest.mark.daemons
@pytest.mark.timeout(60)
async def test_a_second_cancellation_leaves_no_p2pd_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes while the task that keeps the places is still ending."""
    ending, up = asyncio.Event(), asyncio.Event()

    async def slow_to_end(*_: object) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ending.set()
            await asyncio.sleep(0.2)

    async def live() -> None:
        async with running_p2p(NodeSettings(), load_or_create_identity(tmp_path / "key")):
            up.set()
            await asyncio.Event().wait()

    monkeypatch.setattr(p2pd_start, "keep_places", slow_to_end)
    running = set(p2pd_children())
    node = asyncio.create_task(live())
    for reached in (up, ending):
        await reached.wait()
        node.cancel()
    with pytest.raises(asyncio.CancelledError):
        await node
    assert set(p2pd_children()) == running


@pytest.mark.daemons
@pytest.mark.timeout(90)
async def test_a_relayed_connection_gives_way_to_one_that_the_hidden_node_can_make(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer with an address of its own was first to dial: the hidden node dials it, and only then is it connected
    without the relay."""
    keys = [load_or_create_identity(tmp_path / name) for name in "rbc"]
    async with relay_node(keys[0]) as (middle, relay):
        go_direct = relay_places._go_direct

        async def not_yet(_host: object, _tried: dict[PeerId, Rest]) -> None:
            """The node's own look, which must not come before the first connection has been seen."""

        monkeypatch.setattr(relay_places, "_go_direct", not_yet)
        async with (
            running_p2p(entering(middle, relay=True), keys[1]) as hidden,
            running_p2p(entering(middle, relay=False), keys[2]) as open_one,
        ):
            assert await open_one.connect(hidden.own_id, hidden.visible_addresses()) is None
            async with asyncio.timeout(60):
                while not await connected_by_relay(hidden, open_one.own_id):  # the dialled side learns of it later
                    pass
            assert relay.circuits == 1
            async with asyncio.timeout(60):
                while await connected_by_relay(hidden, open_one.own_id):
                    await go_direct(hidden, {})
            asked = Libp2pTransport(open_one)
            asking = Libp2pTransport(hidden)
            await asyncio.gather(asked.start(), asking.start())

            async def there(_peer: PeerId, _message: Message) -> Message:
                return Message()

            asked.serve("there", no_tensors, there, max_concurrent_per_peer=1)
            await asking.call(open_one.own_id, "there", Message(), timeout=20, progress=20, max_answer_bytes=0)
            await asyncio.gather(asked.close(), asking.close())


@pytest.mark.daemons
@pytest.mark.timeout(90)
async def test_a_hidden_node_comes_straight_back_under_its_identity(tmp_path: Path) -> None:
    """The relay still keeps a place for it, which must not pass for the node itself."""
    keys = [load_or_create_identity(tmp_path / name) for name in "rb"]
    async with relay_node(keys[0]) as (middle, relay):
        for _ in range(2):
            async with running_p2p(entering(middle, relay=True), load_or_create_identity(tmp_path / "b")) as hidden:
                assert hidden.own_id == keys[1].peer_id
                await eventually(lambda: hidden.own_id in held_by(relay), what="its place")
