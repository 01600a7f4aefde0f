"""Hostile bytes: more than 10,000 random and mutated messages, against the reader alone and against a live node.

A mutated message starts as a valid one. If only its envelope is changed its checksum is made right again, so that the
changes reach the parser behind it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import struct
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from noloco_node.peers import scorecard as conduct
from noloco_node.tallies import BANS
from noloco_node.transport.errors import Refusal, Refused
from noloco_node.transport.interface import TransportLimits
from noloco_node.transport.libp2p import Libp2pTransport
from noloco_node.transport.messages import (
    BODY_FRAME_BYTES,
    END_FRAME,
    MAX_PAYLOAD,
    MAX_TENSORS,
    PREFIX_BYTES,
    WIRE_DTYPES,
    Envelope,
    FrameError,
    FrameKind,
    Message,
    TensorSpec,
    decode_envelope,
    decode_prefix,
    decode_refusal,
    encode_envelope,
    encode_frame,
    encode_refusal,
    frame_lengths,
    tensor_bytes,
)
from noloco_node.transport.streams import FramedStream, StreamEnded
from tests.inside import incoming_streams_of
from tests.profiles import tries
from tests.support import eventually
from tests.swarm.test_stopping_a_run import Socket

MAX_BODY = 1 << 20
ALL = (5000, 1500, 2500, 500)
MUTATED, RANDOM, ENVELOPES, REFUSALS = map(tries, ALL)
ALL_LIVE_BATCHES, LIVE_BATCH = 15, 40
LIVE_BATCHES = tries(ALL_LIVE_BATCHES)
LIMITS = TransportLimits(max_body_bytes=MAX_BODY, progress_seconds=0.5, idle_seconds=0.6, min_bytes_per_second=MAX_BODY)


def frames_of(envelope: bytes, tensors: tuple[torch.Tensor, ...]) -> list[bytes]:
    """The frames of a message."""
    frames = [encode_frame(FrameKind.HEADER, envelope)]
    for tensor in tensors:
        view = tensor_bytes(tensor)
        frames += [encode_frame(FrameKind.BODY, bytes(view[a:b])) for a, b in frame_lengths(len(view))]
    return [*frames, END_FRAME]


def any_value(rng: Random, depth: int = 3) -> Any:
    """Something that JSON can say, odd numbers and nesting included."""
    match rng.randrange(7 if depth else 5):
        case 0:
            return rng.choice((None, True, False))
        case 1:
            return rng.choice((0, -1, rng.randint(-9, 9), 1 << rng.randrange(200), -(1 << rng.randrange(70))))
        case 2:
            return rng.choice((0.0, -0.0, math.nan, math.inf, -math.inf, 5e-324, 1.7e308, rng.gauss(0.0, 1e3)))
        case 3 | 4:
            return any_text(rng)
        case 5:
            return [any_value(rng, depth - 1) for _ in range(rng.randrange(5))]
        case _:
            return {any_text(rng): any_value(rng, depth - 1) for _ in range(rng.randrange(5))}


def any_text(rng: Random) -> str:
    """Letters, control characters, and what lies beyond two and four bytes; single surrogates now and then."""
    points = (range(0x20), range(0x20, 0x7F), range(0x80, 0xD800), range(0xD800, 0xE000), range(0x10000, 0x110000))
    kinds = rng.choices(points, (1, 6, 2, 0.1, 1), k=rng.randrange(9))
    return "".join(chr(rng.choice(kind)) for kind in kinds)


def message(rng: Random) -> list[bytes]:
    """The frames of a valid message to the method `echo`."""
    kinds = rng.choices(sorted(WIRE_DTYPES), k=rng.randrange(4))
    tensors = tuple(
        torch.zeros([rng.randrange(10) for _ in range(rng.randrange(5))], dtype=WIRE_DTYPES[kind]) for kind in kinds
    )
    header = {name: rng.choice((rng.randint(-9, 9), "some text")) for name in "abc"[: rng.randrange(4)]}
    return frames_of(encode_envelope("echo", header, [TensorSpec.of(tensor) for tensor in tensors]), tensors)


def changed_bytes(rng: Random, data: bytes) -> bytes:
    """A few bytes flipped, cut, repeated or put in."""
    result = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        position = rng.randrange(max(len(result), 1))
        match rng.choice(("flip", "cut", "insert", "end")):
            case "flip" if result:
                result[position] ^= rng.randint(1, 255)
            case "cut":
                del result[position : position + rng.randint(1, 20)]
            case "insert":
                result[position:position] = rng.randbytes(rng.randint(1, 20))
            case _:
                del result[position:]
    return bytes(result)


def changed_envelope(rng: Random) -> bytes:
    """An envelope that is plausible JSON with something wrong, or valid JSON text with bytes changed."""
    value: dict[str, Any] = {"m": "echo", "h": {"x": 1}, "t": [["fp32", [2, 3]]]}
    match rng.randrange(6):
        case 0:
            value[rng.choice("mhtz")] = any_value(rng)
        case 1:
            odd = rng.random() < 0.5
            value["t"] = [any_value(rng) if odd else ["u8", [1]] for _ in range(rng.randrange(MAX_TENSORS + 3))]
        case 2:
            odd = (-2, -1, 0, 1, 2, (1 << 31) - 1, 1 << 31, 1 << 70, True, 1.5, math.nan)
            value["t"] = [[rng.choice([*WIRE_DTYPES, "fp64", ""]), rng.choices(odd, k=rng.randrange(7))]]
        case 3:
            depth = rng.choice((1, 11, 12, 13, rng.randint(1, 9000)))
            return ('{"m":"echo","t":[],"h":' + '{"a":' * depth + "1" + "}" * depth + "}").encode()
        case 4:
            return b'{"m":"echo","h":{"a":' + b"9" * rng.choice((15, 16, 19, rng.randint(1, 30_000))) + b'},"t":[]}'
        case _:
            return changed_bytes(rng, json.dumps(value).encode())
    return json.dumps(value).encode()[:60_000]


def hostile(rng: Random) -> bytes:
    """A valid message, then changed: in its envelope (with a right checksum), in its frames, or in its bytes."""
    frames = message(rng)
    match rng.randrange(4):
        case 0:
            frames[0] = encode_frame(FrameKind.HEADER, changed_envelope(rng))
        case 1:
            position = rng.randint(1, len(frames) - 1)
            frames[position] = changed_bytes(rng, frames[position])
        case 2:
            position, kind = rng.randint(0, len(frames)), rng.choice(list(FrameKind))
            extra = rng.randbytes(rng.randrange(41)) if MAX_PAYLOAD[kind] else b""
            frames[position : position + rng.randrange(3)] = [encode_frame(kind, extra)]
        case _:
            return changed_bytes(rng, b"".join(frames))
    return b"".join(frames)


async def read_request(data: bytes) -> str:
    """Read one request as a node does, with everything at once and then the end; how far it came."""
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    stream = FramedStream(reader, None)  # type: ignore[arg-type]
    reached = "prefix"
    try:
        prefix = await stream.read_prefix(1.0, 1.0)
        if prefix.kind is not FrameKind.HEADER:
            return "not a header"
        reached = "header"
        envelope = decode_envelope(await stream.read_payload(prefix, 1.0))
        check_bounds(envelope)
        if envelope.body_bytes > MAX_BODY:
            return "too large"
        reached = "body"
        tensors = await stream.read_body(envelope.specs, 1.0)
        assert tuple(TensorSpec.of(tensor) for tensor in tensors) == envelope.specs
    except (FrameError, StreamEnded):
        return reached
    return "whole"


def check_bounds(envelope: Envelope) -> None:
    """What the parser lets through can be handled without surprises."""
    assert len(envelope.specs) <= MAX_TENSORS
    assert all(spec.nbytes >= 0 and len(spec.shape) <= 4 for spec in envelope.specs)
    json.dumps(dict(envelope.header), allow_nan=False).encode()
    for text in (envelope.method, *envelope.header):
        text.encode()


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """One loop for all examples."""
    with asyncio.Runner() as made:
        yield made


def test_mutated_messages_are_read_whole_or_end_in_a_reason(runner: asyncio.Runner) -> None:
    """At least a fifth of them get as far as the body; none crashes or hangs the reader."""
    outcomes: Counter[str] = Counter()

    async def read_all() -> None:
        for number in range(MUTATED):
            with told(number):
                outcomes[await read_request(hostile(Random(number)))] += 1

    runner.run(read_all())
    assert outcomes.total() == MUTATED
    assert (outcomes["body"] + outcomes["whole"]) / outcomes.total() >= 0.2, outcomes
    assert all(outcomes[stage] > 0 for stage in ("prefix", "header", "body", "whole", "not a header")), outcomes


def test_random_bytes_are_no_message(runner: asyncio.Runner) -> None:
    """With and without the right magic and checksum in front."""

    async def read_all() -> None:
        for number in range(RANDOM):
            rng = Random(number)
            data, kind = rng.randbytes(rng.randrange(301)), rng.randrange(7)
            length = rng.choice((len(data), rng.randrange(301), rng.randrange(1 << 32)))
            fields = struct.pack(">2sBBI", b"NL", 1, kind, length)
            whole = fields + zlib.crc32(data[:length], zlib.crc32(fields)).to_bytes(4, "big") + data
            with told(number):
                assert await read_request(data) == "prefix"
                assert await read_request(b"NL\x01" + data) in ("prefix", "header", "not a header")
                assert await read_request(whole) in ("prefix", "header", "not a header")

    runner.run(read_all())


def test_envelopes_parse_or_end_in_a_reason() -> None:
    """Deep nesting, huge integers, NaN, repeated keys, wrong types: FrameError or an envelope within bounds."""
    parsed = 0
    for number in range(ENVELOPES):
        rng = Random(number)
        made = (changed_envelope(rng), rng.randbytes(rng.randrange(101)), json.dumps(any_value(rng)).encode())
        with told(number), contextlib.suppress(FrameError):
            check_bounds(decode_envelope(made[number % 3 if number % 2 else 0]))
            parsed += 1
    assert parsed > ENVELOPES // 50


@contextlib.contextmanager
def told(number: int) -> Iterator[None]:
    """Whatever goes wrong with an example says which one it was."""
    try:
        yield
    except Exception as error:
        error.add_note(f"example {number}")
        raise


@pytest.mark.parametrize(
    "text",
    [
        '{"m":"a","h":{},"t":[],"m":"b"}',
        '{"m":"a","h":{"x":NaN},"t":[]}',
        '{"m":"a","h":{"x":-Infinity},"t":[]}',
        '{"m":"a","h":{"x":1e999},"t":[]}',
        '{"m":"a","h":{"x":99999999999999999999},"t":[]}',
        '{"m":"a","h":{"x":"\\ud800"},"t":[]}',
        '{"m":"a","h":{"\\udfff":1},"t":[]}',
        '{"m":"a","h":{"x":' + "[" * 13 + "]" * 13 + '},"t":[]}',
        '{"m":"a","h":' + '{"x":' * 10_000 + "1" + "}" * 10_000 + ',"t":[]}',
        '{"m":"a","h":[],"t":[]}',
        '{"m":1,"h":{},"t":[]}',
        '{"m":"a","h":{},"t":[["fp64",[1]]]}',
        '{"m":"a","h":{},"t":[["fp32",[-1]]]}',
        '{"m":"a","h":{},"t":[["fp32",[true]]]}',
        '{"m":"a","h":{},"t":[["fp32",[1.0]]]}',
        '{"m":"a","h":{},"t":[["fp32",[1,1,1,1,1]]]}',
        '{"m":"a","h":{},"t":[["fp32",[0,2147483647,2147483647,2147483647]]]}',
        '{"m":"a","h":{},"t":[["\\u001b[2J\\n12:00",[1]]]}',
        "[]",
        "",
    ],
)
def test_each_trap_in_an_envelope_is_refused(text: str) -> None:
    """One by one, so that none depends on luck; in words that a log may hold."""
    with pytest.raises(FrameError) as refused:
        decode_envelope(text.encode())
    assert str(refused.value).isprintable()


def test_refusals_survive_the_wire_and_hostile_ones_do_no_harm() -> None:
    """Any reason comes back, and its detail as one printable line; an unknown reason becomes `internal`; anything else
    is a FrameError."""

    @settings(max_examples=REFUSALS)
    @given(reason=st.sampled_from(Refusal), detail=st.text(max_size=400), noise=st.binary(max_size=80))
    def check(reason: Refusal, detail: str, noise: bytes) -> None:
        frame = encode_refusal(Refused(reason, detail))
        prefix, payload = decode_prefix(frame[:PREFIX_BYTES]), frame[PREFIX_BYTES:]
        assert prefix.length == len(payload)
        told = decode_refusal(payload)
        assert told.reason is reason
        assert told.detail.isprintable(), "it is logged, and must not speak to the terminal or make up a line"
        with contextlib.suppress(FrameError):
            decode_refusal(noise)

    check()
    newer = decode_refusal(b'{"reason":"from_the_\\nfuture","detail":"x"}')
    assert (newer.reason, newer.detail) == (Refusal.INTERNAL, "from_the_ future: x")


class LiveNode:
    """A node that serves `echo`, and a hostile peer that opens raw streams to it."""

    def __init__(self, host: Socket, transport: Libp2pTransport) -> None:
        self.host = host
        self.transport = transport

    async def send(self, *pieces: bytes, pause: float = 0.0) -> str:
        """Send bytes on a stream of their own, piece by piece; what the node does about it."""
        reader, writer = await asyncio.open_unix_connection(self.host.path)

        async def send() -> None:
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(pause)

        sending = asyncio.create_task(send())
        try:
            async with asyncio.timeout(60):
                start = await reader.readexactly(PREFIX_BYTES)
                prefix = decode_prefix(start)
                payload = await reader.readexactly(prefix.length)
        except (OSError, asyncio.IncompleteReadError):
            return "closed"
        finally:
            sending.cancel()
            writer.transport.abort()
        if prefix.kind is FrameKind.REFUSE:
            return str(decode_refusal(payload).reason)
        assert prefix.kind is FrameKind.HEADER
        return "answered"

    async def send_all(self, batch: list[bytes]) -> list[str]:
        """All at once, each on its own stream."""
        return list(await asyncio.gather(*(self.send(data) for data in batch)))

    async def good_call(self) -> None:
        """The node still does its work."""
        frames = frames_of(encode_envelope("echo", {}, [TensorSpec("u8", (3,))]), (torch.zeros(3, dtype=torch.uint8),))
        assert await self.send(b"".join(frames)) == "answered"


@pytest.fixture
def live(runner: asyncio.Runner, tmp_path: Path) -> Iterator[LiveNode]:
    """The live node, on the examples' loop. It gives up slow peers quickly."""
    host: Any = Socket(tmp_path / "s")
    transport = Libp2pTransport(host, LIMITS)

    async def echo(_: Any, message: Message) -> Message:
        return message

    transport.serve("echo", lambda peer, header, specs: None, echo, max_concurrent_per_peer=LIVE_BATCH)
    runner.run(transport.start())
    yield LiveNode(host, transport)
    runner.run(transport.close())


def test_a_live_node_refuses_or_closes_and_goes_on(
    runner: asyncio.Runner, live: LiveNode, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing hangs beyond the deadlines, no handler fails, memory stays, and good calls work all along. Bans, which
    would end this at once, have tests of their own."""
    monkeypatch.setattr(conduct, "TOLERATED", math.inf)
    outcomes: Counter[str] = Counter()
    process = psutil.Process()
    runner.run(live.good_call())
    before = process.memory_info().rss

    for number in range(LIVE_BATCHES):
        batch = [hostile(Random(f"{number}/{index}")) for index in range(LIVE_BATCH)]
        with told(number):
            outcomes.update(runner.run(live.send_all(batch)))
            runner.run(live.good_call())
    assert outcomes.total() == LIVE_BATCHES * LIVE_BATCH
    assert outcomes["malformed"] > 0, outcomes
    assert outcomes["closed"] > 0, outcomes
    assert set(outcomes) <= {"answered", "closed", *map(str, Refusal)}
    assert Refusal.INTERNAL not in live.transport.refusals_given
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []
    assert process.memory_info().rss - before < 100 << 20
    runner.run(eventually(lambda: incoming_streams_of(live.transport) == 0, what="every stream is closed"))


def test_half_a_frame_is_not_waited_for(runner: asyncio.Runner, live: LiveNode) -> None:
    """A peer that stops within prefix, header, body or before the end is closed after the progress deadline."""
    tensor = torch.zeros(BODY_FRAME_BYTES + 5, dtype=torch.uint8)
    whole = b"".join(frames_of(encode_envelope("echo", {}, [TensorSpec.of(tensor)]), (tensor,)))
    cuts = (1, PREFIX_BYTES - 1, PREFIX_BYTES + 3, 500, BODY_FRAME_BYTES, len(whole) - PREFIX_BYTES, len(whole) - 1)
    assert runner.run(live.send_all([whole[:cut] for cut in cuts])) == ["closed"] * len(cuts)
    assert runner.run(live.send(whole)) == "answered"


def test_who_sends_broken_frames_is_banned_at_the_opening_of_a_stream(runner: asyncio.Runner, live: LiveNode) -> None:
    """Corrupt, truncated and foreign bytes; the ban answers before a byte is sent, and ends."""
    clock, book = [0.0], live.transport.conduct
    book.clock = lambda: clock[0]
    whole = b"".join(frames_of(encode_envelope("echo", {}, ()), ()))

    def heard(*pieces: bytes) -> str:
        return runner.run(live.send(*pieces))

    assert heard(whole) == "answered"
    assert heard(whole[:-9]) == "closed", "truncated: given up, and no offence, for links break"
    assert book.offences.total() == 0
    corrupt = bytearray(whole)
    corrupt[PREFIX_BYTES + 4] ^= 1
    for _ in range(int(conduct.TOLERATED)):
        assert heard(bytes(corrupt)) == "malformed"
    assert heard(whole) == "answered"
    assert heard(b"GET / HTTP/1.1\r\n\r\n" + bytes(64)) == "malformed"
    assert heard() == heard(whole) == "banned"
    assert book.bans == {"malformed": 1}
    clock[0] = BANS.first
    assert heard(whole) == "answered"


def test_a_slow_loris_loses_its_place_though_every_frame_comes_in_time(runner: asyncio.Runner, live: LiveNode) -> None:
    """One frame now and then would hold the place for minutes; after the time of a slow link it is free again."""
    tensor = torch.zeros(MAX_BODY, dtype=torch.uint8)
    pieces = frames_of(encode_envelope("echo", {}, [TensorSpec.of(tensor)]), (tensor,))
    assert runner.run(live.send(*pieces, pause=0.3)) == "closed"
    runner.run(live.good_call())
    assert live.transport.conduct.offences.total() == 0, "slow is no offence"
