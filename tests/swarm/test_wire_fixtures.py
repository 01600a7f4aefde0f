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
from noloco_node.transport.calls import Reply, ask, on_tensors
from noloco_node.transport.memory import MemoryNetwork, MemoryTransport
from noloco_node.transport.messages import FrameKind, Message, TensorSpec, WireModel, decode_envelope, parse, specs_of
from noloco_node.transport.streams import FramedStream
from tests.swarm.wire_examples import Example, examples, on_the_wire, served_methods

FOLDER = Path(__file__).parents[1] / "fixtures" / "wire"
EXAMPLES = examples()


def file_of(example: Example) -> Path:
    """Where an example's bytes lie."""
    return FOLDER / f"{example.name.replace(' ', '-')}.json"


async def sent(example: Example) -> dict[str, tuple[str, Message]]:
    """What arrives at either side of the one typed call, with the method's name as it travels."""
    network = MemoryNetwork()
    asker, asked = (MemoryTransport(network, PeerId(f"peer-number-{number}")) for number in (1, 2))
    seen: dict[str, tuple[str, Message]] = {}

    def admit(_peer: PeerId, request: WireModel, _specs: tuple[TensorSpec, ...]) -> None:
        assert request == example.request

    async def handle(_peer: PeerId, request: WireModel, tensors: tuple[torch.Tensor, ...]) -> Reply[WireModel]:
        assert request == example.request
        assert all(map(torch.equal, tensors, example.request_tensors))
        return Reply(example.answer, example.answer_tensors)

    on_tensors(asked, example.method, handle, admit)
    raw = asker.call

    async def looked_at(peer: PeerId, method: str, request: Message, **limits: Any) -> Message:
        answer = await raw(peer, method, request, **limits)
        seen.update(request=(method, request), answer=("", answer))
        return answer

    asker.call = looked_at  # type: ignore[method-assign]
    specs = () if example.method.text_bytes else specs_of(example.answer_tensors)
    tensors = example.request_tensors
    got = await ask(asker, asked.peer_id, example.method, example.request, tensors=tensors, specs=specs, seconds=5.0)
    assert got.header == example.answer
    assert all(map(torch.equal, got.tensors, example.answer_tensors))
    for transport in (asker, asked):
        await transport.close()
    return seen


async def frozen(example: Example) -> dict[str, Any]:
    """What the example's file holds: what a person reads, and the bytes."""
    return {
        which: {
            "header": dict(message.header),
            "tensors": [[spec.dtype, list(spec.shape)] for spec in message.specs],
            "bytes": (await on_the_wire(method, message)).hex(),
        }
        for which, (method, message) in (await sent(example)).items()
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
    await stream.wait_for_end()  # nothing follows
    return envelope.method, Message(envelope.header, tensors)


@pytest.mark.parametrize("name", EXAMPLES)
async def test_a_message_is_these_bytes_and_these_bytes_are_the_message(name: str) -> None:
    """Written as today, and read into what was written: by the models, with every tensor."""
    example = EXAMPLES[name]
    written = json.loads(file_of(example).read_text())
    assert await frozen(example) == written, __doc__
    method, request = await read_back(written["request"]["bytes"])
    assert method == example.method.name
    assert parse(example.method.request, request.header) == example.request
    none, answer = await read_back(written["answer"]["bytes"])
    assert none == ""
    assert example.method.answer.model_validate(answer.header) == example.answer
    for message, tensors in ((request, example.request_tensors), (answer, example.answer_tensors)):
        assert len(message.tensors) == len(tensors)
        assert all(map(torch.equal, message.tensors, tensors))


def test_every_method_that_is_served_has_its_bytes() -> None:
    """A new method needs an example of it; no file is left of one that went."""
    assert {example.method.name for example in EXAMPLES.values()} == served_methods()
    assert {path.name for path in FOLDER.iterdir()} == {file_of(example).name for example in EXAMPLES.values()}


async def _write() -> None:
    for example in EXAMPLES.values():
        file_of(example).write_text(json.dumps(await frozen(example), indent=1) + "\n")


if __name__ == "__main__":
    asyncio.run(_write())
