"""Messages of libp2p's circuit relay v2, as far as a relay and the peers that reserve a place with it need them.

Each is a length and a protobuf message (`HopMessage`, `StopMessage` of the specification), of which only numbers and
byte strings occur.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from enum import IntEnum

import base58

from noloco_node.identity.peer_id import PeerId

HOP = "/libp2p/circuit/relay/0.2.0/hop"
"""The protocol spoken to a relay: reserve a place with it, or be connected to a peer that has one."""
STOP = "/libp2p/circuit/relay/0.2.0/stop"
"""The protocol a relay speaks to a peer that has a place: somebody wants to be connected to it."""

MAX_MESSAGE_BYTES = 4096
PLACE_SECONDS = 60.0
"""A relay keeps a place for so many seconds for a peer that does not ask again."""
RESERVE, CONNECT = 0, 1
HOP_ANSWER = 2
STOP_CONNECT, STOP_ANSWER = 0, 1
BYTES_FIELD, NUMBER_FIELD = 2, 0

Fields = Mapping[int, int | bytes]
"""A message by field number. A repeated field keeps its last value."""


class Status(IntEnum):
    """How a request to a relay ended. The specification's numbers."""

    OK = 100
    RESOURCE_LIMIT_EXCEEDED = 201
    PERMISSION_DENIED = 202
    CONNECTION_FAILED = 203
    NO_RESERVATION = 204
    MALFORMED_MESSAGE = 400


def varint(number: int) -> bytes:
    """A number in seven bits a byte, the lowest first; all but the last byte have the highest bit set."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*out, number))


def reserve_request() -> bytes:
    """Asks a relay for a place."""
    return _encode((1, RESERVE))


def reserve_answer(expire: int) -> bytes:
    """Grants a place until `expire`, seconds since 1970."""
    return _encode((1, HOP_ANSWER), (3, _encode((1, expire))), (5, Status.OK))


def hop_answer(status: Status) -> bytes:
    """Answers a request to a relay. It names no limit: then libp2p treats the connection as any other."""
    return _encode((1, HOP_ANSWER), (5, status))


def stop_request(caller: PeerId) -> bytes:
    """Announces a caller to a peer that has a place."""
    return _encode((1, STOP_CONNECT), (2, _encode((1, base58.b58decode(caller)))))


def wanted_peer(fields: Fields) -> PeerId:
    """The peer that a request to connect names. Raises ValueError if it names none."""
    named = fields.get(2)
    if not isinstance(named, bytes):
        raise ValueError("no peer is named")
    raw = _decode(named).get(1)
    if not isinstance(raw, bytes) or raw[:2] not in (b"\x00\x24", b"\x12\x20"):
        raise ValueError("no peer id")
    return PeerId(base58.b58encode(raw).decode())


def hop_status(fields: Fields) -> int:
    """How a relay answered."""
    status = fields.get(5)
    return status if isinstance(status, int) and fields.get(1) == HOP_ANSWER else Status.MALFORMED_MESSAGE


def is_limited(fields: Fields) -> bool:
    """Whether a relay says that it ends connections after some time or bytes."""
    return 4 in fields


def stop_status(fields: Fields) -> int:
    """How a peer answered a relay that announced a caller."""
    status = fields.get(4)
    return status if isinstance(status, int) and fields.get(1) == STOP_ANSWER else Status.MALFORMED_MESSAGE


async def read_fields(reader: asyncio.StreamReader) -> Fields:
    """The next message. ValueError where it is none or too long, IncompleteReadError where the stream ends."""
    length, shift = 0, 0
    while True:
        [byte] = await reader.readexactly(1)
        length |= (byte & 0x7F) << shift
        if not byte & 0x80:
            break
        shift += 7
        if shift > 14:
            raise ValueError("too long a message")
    if length > MAX_MESSAGE_BYTES:
        raise ValueError("too long a message")
    return _decode(await reader.readexactly(length))


async def write_message(writer: asyncio.StreamWriter, message: bytes) -> None:
    """Send one message."""
    writer.write(varint(len(message)) + message)
    await writer.drain()


def _encode(*fields: tuple[int, int | bytes]) -> bytes:
    parts: list[bytes] = []
    for number, value in fields:
        if isinstance(value, bytes):
            parts += [varint(number << 3 | BYTES_FIELD), varint(len(value)), value]
        else:
            parts += [varint(number << 3 | NUMBER_FIELD), varint(value)]
    return b"".join(parts)


def _decode(message: bytes) -> dict[int, int | bytes]:
    """ValueError where a field is cut off or of another kind."""
    fields: dict[int, int | bytes] = {}
    at = 0
    while at < len(message):
        key, at = _number(message, at)
        value, at = _number(message, at)
        if key & 7 == BYTES_FIELD:
            if at + value > len(message):
                raise ValueError("a field is cut off")
            fields[key >> 3] = message[at : at + value]
            at += value
        elif key & 7 == NUMBER_FIELD:
            fields[key >> 3] = value
        else:
            raise ValueError("a field of another kind")
    return fields


def _number(message: Sequence[int], at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 64, 7):
        if at >= len(message):
            raise ValueError("a number is cut off")
        value |= (message[at] & 0x7F) << shift
        at += 1
        if not message[at - 1] & 0x80:
            return value, at
    raise ValueError("too large a number")
