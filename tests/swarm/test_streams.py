"""Frames on a stream: read in whatever pieces they come, small ones written at once, and nothing piles up unsent."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import write_pbmsg
from hivemind.proto import p2pd_pb2

from noloco_node.identity.peer_id import PeerId
from noloco_node.transport.errors import Refusal, Refused
from noloco_node.transport.libp2p import STREAM_PROTOCOL
from noloco_node.transport.messages import (
    BODY_FRAME_BYTES,
    FrameError,
    Message,
    decode_envelope,
    encode_envelope,
    encode_refusal,
)
from noloco_node.transport.streams import READ_AHEAD_BYTES, FramedStream, StreamEnded
from tests.support import nothing_left_behind
from tests.swarm.wire_examples import on_the_wire
from tests.swarm.worlds import World, real_world

MESSAGES = (
    Message({"number": 1}, (torch.arange(60_000), torch.empty(0), torch.arange(3))),
    Message({"number": 2}),
    Message({"number": 3}, (torch.arange(BODY_FRAME_BYTES // 8),)),
    Message({"text": "x" * 3 * READ_AHEAD_BYTES}, (torch.tensor(5.0),)),
)


async def read_message(stream: FramedStream) -> Message:
    """The next message, as the transport on libp2p reads it."""
    envelope = decode_envelope(await stream.read_payload(await stream.read_prefix(5.0), 5.0))
    return Message(envelope.header, await stream.read_body(envelope.specs, 5.0))


@pytest.mark.parametrize("piece", [1, 11, READ_AHEAD_BYTES, BODY_FRAME_BYTES, 1 << 30])
async def test_messages_are_the_same_in_whatever_pieces_they_come(piece: int) -> None:
    """One after the other on one stream; then it ends."""
    messages = MESSAGES[1:2] + MESSAGES[3:] if piece < READ_AHEAD_BYTES else MESSAGES
    data = b"".join([await on_the_wire("echo", message) for message in messages])
    reader = asyncio.StreamReader()

    async def come() -> None:
        for start in range(0, len(data), piece):
            reader.feed_data(data[start : start + piece])
            await asyncio.sleep(0)
        reader.feed_eof()

    coming = asyncio.create_task(come())
    stream = FramedStream(reader, cast("asyncio.StreamWriter", None))
    for message in messages:
        got = await read_message(stream)
        assert got.header == message.header
        assert all(map(torch.equal, got.tensors, message.tensors))
    assert stream.bytes_received == sum(
        len(encode_envelope("echo", message.header, message.specs)) + sum(spec.nbytes for spec in message.specs)
        for message in messages
    )
    await stream.wait_for_end()
    await coming


async def test_what_was_read_with_a_message_is_not_taken_for_the_callers_end() -> None:
    """It is a request before its time; and a stream that ends within a frame says so."""
    data = await on_the_wire("echo", MESSAGES[1])
    reader = asyncio.StreamReader()
    reader.feed_data(data + data[:5])
    reader.feed_eof()
    stream = FramedStream(reader, cast("asyncio.StreamWriter", None))
    await read_message(stream)
    with pytest.raises(FrameError, match="before the last one"):
        await stream.wait_for_end()
    with pytest.raises(StreamEnded):
        await stream.read_prefix(5.0)


class _Writes:
    """A writer that counts."""

    def __init__(self) -> None:
        self.writes = 0
        self.transport = self

    def writelines(self, parts: list[Any]) -> None:
        self.writes += bool(parts)

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0


@pytest.mark.parametrize(("elements", "writes"), [(0, 1), (16_000, 1), (32_700, 1), (80_000, 3)])
async def test_what_fits_into_one_piece_is_one_write(elements: int, writes: int) -> None:
    written = _Writes()
    stream = FramedStream(asyncio.StreamReader(), cast("asyncio.StreamWriter", written))
    message = Message({}, (torch.zeros(elements),))
    await stream.write_message(encode_envelope("", message.header, message.specs), message.tensors, 5.0)
    assert (written.writes, stream.message_complete) == (writes, True)


@pytest.fixture
async def world(tmp_path: Path) -> Any:
    """Two nodes on real p2pd."""
    with nothing_left_behind():
        async with real_world(tmp_path) as made:
            yield made


@pytest.mark.daemons
async def test_a_stream_on_which_much_is_still_to_be_sent_is_lent_to_no_other_call(world: World) -> None:
    """A peer that refuses whatever comes without ever reading it has no more than some pieces pile up here."""
    server, _ = world.daemons
    opened = 0
    over = asyncio.Event()

    async def refuses_unread(_peer: PeerId, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened
        opened += 1
        writer.write(100 * encode_refusal(Refused(Refusal.BUSY)))
        await over.wait()
        writer.transport.abort()

    await world.server.close()
    await server.serve_streams(STREAM_PROTOCOL, refuses_unread)
    for _ in range(40):
        with pytest.raises(Refused):
            await world.call("echo", torch.zeros(25_000))
    over.set()
    await server.stop_serving(STREAM_PROTOCOL)
    assert opened > 1


async def test_a_stream_whose_last_bytes_came_with_its_deadline_serves_no_other_call() -> None:
    """The loop stood still while they came: the message is whole, but the reader is at its end."""
    near, far = socket.socketpair()
    stream = FramedStream(*await asyncio.open_connection(sock=near))
    with far:
        reading = asyncio.create_task(stream.read_prefix(0.05, 0.05))
        await asyncio.sleep(0)
        far.sendall(await on_the_wire("echo", MESSAGES[1]))
        time.sleep(0.1)  # noqa: ASYNC251 - what is tested
        prefix = await reading
        await stream.read_payload(prefix, 0.05)
        await stream.read_body((), 0.05)
        assert stream.ended
    stream.abort()


async def test_a_stream_that_p2pd_was_bringing_when_serving_stopped_is_hung_up_on(world: World) -> None:
    server, _ = world.daemons
    await world.server.close()
    late: Any = cast("Any", p2pd_pb2).StreamInfo(
        peer=PeerID.from_base58(server.own_id).to_bytes(), addr=b"", proto=STREAM_PROTOCOL
    )
    listening = cast("Any", server.hivemind_p2p)._client.control.listen_maddr.value_for_protocol("unix")
    unheard: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, failure: unheard.append(failure))
    reader, writer = await asyncio.open_unix_connection(listening)
    await write_pbmsg(writer, late)
    assert await asyncio.wait_for(reader.read(), 5.0) == b""
    writer.transport.abort()
    await asyncio.sleep(0)
    assert unheard == []
