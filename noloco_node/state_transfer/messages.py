"""What travels when a replica's full state is given: requests, offers, the signed manifest, and chunks with hashes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field, ValidationError
from torch import Tensor

from noloco_node import PROTOCOL_VERSION
from noloco_node.config.settings import canonical_json
from noloco_node.finite import all_finite
from noloco_node.identity.peer_id import PeerId
from noloco_node.storage.disk_memory import DiskMemory
from noloco_node.training.frozen_state import Sizes
from noloco_node.transport.calls import Answer, BadAnswer, Method, Nothing, Reply
from noloco_node.transport.interface import Transport
from noloco_node.transport.messages import ClockValue, ProtocolVersion, Rounds, RunName, StageIndex, WireModel

DIGEST_BYTES = 16


class StateRequest(WireModel):
    """Asks what a donor can give, for a manifest (of the snapshot named, if it is still held), or for a chunk of it."""

    run: RunName
    protocol: ProtocolVersion = PROTOCOL_VERSION
    stage: StageIndex
    contract: Annotated[str, Field(max_length=64)]
    snapshot: Annotated[str, Field(max_length=32)] = ""
    index: Annotated[int, Field(ge=0, le=1 << 32)] = 0


class StateOffer(WireModel):
    """How fresh a donor's state is, and how many read it now."""

    clock: ClockValue
    outer_rounds: Rounds
    readers: Annotated[int, Field(ge=0, le=1 << 16)]
    places: Annotated[int, Field(ge=0, le=1 << 16)]
    """Readers that it serves at once."""


class StateManifest(WireModel):
    """Describes one snapshot of one replica. Its donor signs it; the digests of the chunks travel beside it."""

    source: Annotated[str, Field(max_length=128)]
    run: RunName
    stage: StageIndex
    contract: Annotated[str, Field(max_length=64)]
    snapshot: Annotated[str, Field(max_length=32)]
    clock: ClockValue
    outer_rounds: Rounds
    size: Annotated[int, Field(gt=0, le=1 << 44)]
    """Bytes of the whole state."""
    root: Annotated[str, Field(max_length=64)]
    """Hash over the digests of all chunks in order, as hex."""


class SignedManifest(WireModel):
    """A manifest as text, and its donor's seal over that text as hex. With it travel the digests, u8 [chunks, 16]."""

    manifest: Annotated[str, Field(max_length=4096)]
    seal: Annotated[str, Field(max_length=8192, pattern=r"^([0-9a-f]{2})+$")]


OFFER = Method("state.offer", StateRequest, StateOffer)
OPEN = Method("state.open", StateRequest, SignedManifest)
CHUNK = Method("state.chunk", StateRequest, Nothing, at_once=64)


def digest(data: memoryview | bytes | bytearray) -> bytes:
    """The hash of a chunk."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def root_of(digests: Tensor) -> str:
    """The hash over all digests, u8 [chunks, 16]."""
    return hashlib.blake2b(digests.numpy().tobytes(), digest_size=32).hexdigest()


def sign_manifest(transport: Transport, manifest: StateManifest, digests: Tensor) -> Reply[SignedManifest]:
    """A manifest as it travels: its text, the donor's seal over that text, and the digests u8 [chunks, 16]."""
    text = canonical_json(manifest.model_dump(mode="json"))
    return Reply(SignedManifest(manifest=text, seal=transport.sign(text.encode()).hex()), (digests,))


def read_manifest(
    transport: Transport, donor: PeerId, answer: Answer[SignedManifest], request: StateRequest, *, size: int
) -> tuple[StateManifest, list[bytes]]:
    """The manifest and the digest of each chunk.

    Raises BadAnswer unless `donor` itself signed it, for what was asked, over exactly these digests.
    """
    text, seal = answer.header.manifest, answer.header.seal
    try:
        manifest = StateManifest.model_validate_json(text)
    except ValidationError as error:
        raise BadAnswer(f"bad manifest: {error.error_count()} errors") from None
    signed = transport.signed_by(donor, bytes.fromhex(seal), text.encode())
    if not signed or manifest.source != donor:
        raise BadAnswer("the manifest is not signed by the state source")
    asked = (request.run, request.stage, request.contract)
    if (manifest.run, manifest.stage, manifest.contract) != asked:
        raise BadAnswer("the manifest is of another run, stage or contract")
    if manifest.size != size:
        raise BadAnswer(f"the state source's state has {manifest.size} bytes where {size} belong")
    if manifest.root != root_of(answer.tensors[0]):
        raise BadAnswer("the digests are not those that the manifest was signed for")
    return manifest, [bytes(row.numpy()) for row in answer.tensors[0]]


class PackedState:
    """A state as one run of bytes on the disk, all tensors one after another in the order of their names."""

    def __init__(self, sizes: Sizes, folder: Path | None = None) -> None:
        """Room for a state of these `sizes`, on the disk of `folder`. Raises OSError where that has none."""
        self.size = packed_size(sizes)
        self._starts: dict[str, int] = {}
        offset = 0
        for name in sorted(sizes):
            self._starts[name] = offset
            offset += packed_size({name: sizes[name]})
        self._memory = DiskMemory(self.size, folder)

    def take(self, pieces: Iterable[tuple[str, int, Tensor]]) -> None:
        """Write pieces of the tensors: name, beginning and numbers."""
        for name, start, piece in pieces:
            data = piece.contiguous().reshape(-1).view(torch.uint8).numpy().data
            at = self._starts[name] + start * piece.element_size()
            self._memory.bytes[at : at + len(data)] = data
            self._memory.leave_memory(at, at + len(data))

    def part(self, start: int, end: int) -> bytearray:
        """A copy of the bytes [start, end), cut at the end of the state."""
        found = bytearray(self._memory.bytes[start:end])
        self._memory.leave_memory(start, end)
        return found

    def digests(self, chunk: int) -> Tensor:
        """The digest of each chunk of `chunk` bytes, u8 [chunks, 16]."""
        every = b"".join(digest(self.part(start, start + chunk)) for start in range(0, self.size, chunk))
        return torch.frombuffer(bytearray(every), dtype=torch.uint8).view(-1, DIGEST_BYTES)


def packed_size(sizes: Sizes) -> int:
    """Bytes of a state with these tensors."""
    return sum(math.prod(shape) * dtype.itemsize for dtype, shape in sizes.values())


def unpack(buffer: bytearray | memoryview, sizes: Sizes) -> dict[str, Tensor]:
    """The tensors of a `PackedState`, as views. Raises BadAnswer where one is not finite."""
    state: dict[str, Tensor] = {}
    offset = 0
    for name in sorted(sizes):
        dtype, shape = sizes[name]
        count = math.prod(shape)
        state[name] = torch.frombuffer(buffer, dtype=dtype, count=count, offset=offset).view(shape)
        offset += count * dtype.itemsize
        if state[name].is_floating_point() and not all_finite(state[name]):
            raise BadAnswer("the state source's state holds NaN or infinity")
    return state
