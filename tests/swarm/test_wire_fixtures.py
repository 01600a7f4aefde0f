"""What travels between nodes is frozen: one request and one answer of each method, byte by byte.

After a deliberate change of the protocol: `python -m tests.swarm.test_wire_fixtures`, and look at what git says.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from noloco_node.identity.peer_id import PeerId
from noloco_node.transport.calls import ask
from noloco_node.transport.frames import FrameKind, decode_envelope
from noloco_node.transport.headers import parse
from noloco_node.transport.memory import MemoryNetwork, MemoryTransport
from noloco_node.transport.messages import JsonObject, Message, TensorSpec
from noloco_node.transport.streams import FramedStream
from tests.swarm.wire_examples import Example, examples, on_the_wire, served_methods

FOLDER = Path(__file__).parents[1] / "fixtures" / "wire"
EXAMPLES = examples()


def file_of(example: Example) -> Path:
    """Where an example's bytes lie."""
    return FOLDER / f"{example.name.replace(' ', '-')}.json"


async def sent(example: Example) -> tuple[Message, Message]:
    """The request as it arrives at a peer that is asked by `ask`, and the answer that `ask` accepts."""
    network = MemoryNetwork()
    asker, asked = (MemoryTransport(network, PeerId(f"peer-number-{number}")) for number in (1, 2))
    arrived: list[Message] = []

    def admit(_peer: PeerId, _header: JsonObject, _specs: tuple[TensorSpec, ...]) -> None:
        """Everybody."""

    async def handle(_peer: PeerId, message: Message) -> Message:
        arrived.append(message)
        return example.answered

    asked.serve(example.method, admit, handle, max_concurrent_per_peer=1)
    text = example.method == "hello.spec"
    got = await ask(
        asker,
        asked.peer_id,
        example.method,
        example.request,
        type(example.answer),
        tensors=example.request_tensors,
        specs=() if text else example.answered.specs,
        text_bytes=1024 if text else None,
        timeout=5.0,
        progress=5.0,
    )
    assert got.header == example.answer
    assert all(map(torch.equal, got.tensors, example.answer_tensors))
    for transport in (asker, asked):
        await transport.close()
    return arrived[0], example.answered


async def frozen(example: Example) -> dict[str, Any]:
    """What the example's file holds: what a person reads, and the bytes."""
    request, answer = await sent(example)
    wire = {"request": (example.method, request), "answer": ("", answer)}
    return {
        which: {
            "header": dict(message.header),
            "tensors": [[spec.dtype, list(spec.shape)] for spec in message.specs],
            "bytes": (await on_the_wire(method, message)).hex(),
        }
        for which, (method, message) in wire.items()
    }


async def read_back(written: str) -> tuple[str, Message]:
    """The method and the message in these bytes, read as the transport on libp2p reads them."""
    reader = asyncio.StreamReader()
    reader.feed_data(bytes.fromhex(written))
    reader.feed_eof()
    stream = FramedStream(reader, None)  # type: ignore[arg-type]
    prefix = await stream.read_prefix(1.0)
    assert prefix.kind is FrameKind.HEADER
    envelope = decode_envelope(await stream.read_payload(prefix, 1.0))
    tensors = await stream.read_body(envelope.specs, 1.0)
    assert not await reader.read(), "nothing follows"
    return envelope.method, Message(envelope.header, tensors)


@pytest.mark.parametrize("name", EXAMPLES)
async def test_a_message_is_these_bytes_and_these_bytes_are_the_message(name: str) -> None:
    """Written as today, and read into what was written: by the models, with every tensor."""
    example = EXAMPLES[name]
    written = json.loads(file_of(example).read_text())
    assert await frozen(example) == written, __doc__
    method, request = await read_back(written["request"]["bytes"])
    assert method == example.method
    assert example.request is None or parse(type(example.request), request.header) == example.request
    none, answer = await read_back(written["answer"]["bytes"])
    assert none == ""
    assert type(example.answer).model_validate(answer.header) == example.answer
    for message, tensors in ((request, example.request_tensors), (answer, example.answer_tensors)):
        assert len(message.tensors) == len(tensors)
        assert all(map(torch.equal, message.tensors, tensors))


def test_every_method_that_is_served_has_its_bytes() -> None:
    """Who adds a method adds an example of it; no file is left of one that went."""
    assert {example.method for example in EXAMPLES.values()} == served_methods()
    assert {path.name for path in FOLDER.iterdir()} == {file_of(example).name for example in EXAMPLES.values()}


async def _write() -> None:
    for example in EXAMPLES.values():
        file_of(example).write_text(json.dumps(await frozen(example), indent=1) + "\n")


if __name__ == "__main__":
    asyncio.run(_write())
