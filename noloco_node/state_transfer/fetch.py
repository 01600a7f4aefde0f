"""What travels when a replica's full state is given, and the receiving side of it.

Requests, offers, the signed manifest, and chunks with hashes. A joiner takes one donor's snapshot, chunk by chunk, each
held to the manifest.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import math
import mmap
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import torch
from pydantic import Field, ValidationError
from torch import Tensor

from noloco_node import PROTOCOL_VERSION, ambient
from noloco_node.config.run_spec import LimitsSpec, RunSpec
from noloco_node.config.settings import canonical_json
from noloco_node.errors import ExitCode, UserError
from noloco_node.finite import all_finite
from noloco_node.identity.peer_id import PeerId
from noloco_node.training.frozen_state import FrozenState, Sizes, Thawed
from noloco_node.training.stage_worker import StageWorker
from noloco_node.transport.calls import (
    ATTEMPTS,
    Answer,
    BadAnswer,
    Method,
    Nothing,
    Reply,
    Width,
    ask,
    judging,
    side_by_side,
)
from noloco_node.transport.errors import DeadlinePassed, Refusal, Refused
from noloco_node.transport.interface import Transport
from noloco_node.transport.messages import (
    ClockValue,
    PeerName,
    ProtocolVersion,
    Rounds,
    RunName,
    StageIndex,
    TensorSpec,
    WireModel,
)

M = TypeVar("M", bound="ReplicaManifest")

DIGEST_BYTES = 16
LARGEST = torch.finfo(torch.float16).max
"""The largest number in half precision."""


class StateRequest(WireModel):
    """Asks what a donor can give, for a manifest (of the snapshot named, if it is still held), or for a chunk of it."""

    run: RunName
    protocol: ProtocolVersion = PROTOCOL_VERSION
    stage: StageIndex
    contract: Annotated[str, Field(max_length=64)]
    snapshot: Annotated[str, Field(max_length=32)] = ""
    index: Annotated[int, Field(ge=0, le=1 << 32)] = 0


class StateOffer(WireModel):
    """How fresh a donor's state is, and how many others read it now."""

    clock: ClockValue
    outer_rounds: Rounds
    readers: Annotated[int, Field(ge=0, le=1 << 16)]
    places: Annotated[int, Field(ge=0, le=1 << 16)]
    """Readers that it serves at once."""


class ReplicaManifest(WireModel):
    """Describes what a replica gives of itself at one moment. It signs this."""

    source: PeerName
    run: RunName
    stage: StageIndex
    clock: ClockValue
    outer_rounds: Rounds
    size: Annotated[int, Field(gt=0, le=1 << 44)]
    root: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class StateManifest(ReplicaManifest):
    """Describes one snapshot of a whole state, of `size` bytes. The digests of the chunks travel beside it; `root` is
    the hash over them in order, as hex."""

    contract: Annotated[str, Field(max_length=64)]
    snapshot: Annotated[str, Field(max_length=32)]


class SignedManifest(WireModel):
    """A manifest as text, and its source's seal over that text as hex."""

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


def sealed(transport: Transport, manifest: ReplicaManifest) -> SignedManifest:
    """This node's own manifest as it travels."""
    text = canonical_json(manifest.model_dump(mode="json"))
    return SignedManifest(manifest=text, seal=transport.sign(text.encode()).hex())


def opened(transport: Transport, kind: type[M], signed: SignedManifest) -> M:
    """The manifest of an answer. Raises BadAnswer unless the source that it names has signed it."""
    try:
        manifest = kind.model_validate_json(signed.manifest)
    except ValidationError as error:
        raise BadAnswer(f"bad manifest: {error.error_count()} errors") from None
    if not transport.signed_by(PeerId(manifest.source), bytes.fromhex(signed.seal), signed.manifest.encode()):
        raise BadAnswer("the manifest is not signed by its source")
    return manifest


def sign_manifest(transport: Transport, manifest: StateManifest, digests: Tensor) -> Reply[SignedManifest]:
    """The answer that gives a manifest and the digests u8 [chunks, 16]."""
    return Reply(sealed(transport, manifest), (digests,))


def read_manifest(
    transport: Transport, donor: PeerId, answer: Answer[SignedManifest], request: StateRequest, *, size: int
) -> tuple[StateManifest, list[bytes]]:
    """The manifest and the digest of each chunk.

    Raises BadAnswer unless `donor` itself signed it, for what was asked, over exactly these digests.
    """
    manifest = opened(transport, StateManifest, answer.header)
    if manifest.source != donor:
        raise BadAnswer("the manifest is another peer's and not the state source's")
    asked = (request.run, request.stage, request.contract)
    if (manifest.run, manifest.stage, manifest.contract) != asked:
        raise BadAnswer("the manifest is of another run, stage or contract")
    if manifest.size != size:
        raise BadAnswer(f"the state source's state has {manifest.size} bytes where {size} belong")
    if manifest.root != root_of(answer.tensors[0]):
        raise BadAnswer("the digests are not those that the manifest was signed for")
    return manifest, [bytes(row.numpy()) for row in answer.tensors[0]]


ZEROS = bytes(1 << 20)


def take_room(descriptor: int, size: int) -> None:
    """Make a new file `size` bytes long, all of them on the disk. A map of a file for which the disk has no room ends
    the process that writes to it. Raises OSError where there is none."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
        return
    there = os.fstatvfs(descriptor)  # macOS
    if size > there.f_bavail * there.f_frsize:  # a laggard asks every few seconds, and would fill the disk each time
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    while size > 0:
        size -= os.write(descriptor, ZEROS[:size])


class DiskMemory:
    """Zeroed bytes on the disk of a folder, since a state that travels is several times a stage's weights.

    A file without a name is mapped. The machine keeps of it in memory what it has room for, and the file is gone with
    the last use of it, also where the process is killed.
    """

    def __init__(self, size: int, folder: Path | None = None) -> None:
        """`folder` says which disk; where it is missing, that of temporary files. Raises OSError where the disk has no
        room for `size` bytes: all are taken at once, since a write to a mapped file that finds none ends the
        process."""
        there = folder if folder is not None and folder.is_dir() else None
        with tempfile.TemporaryFile(dir=there) as file:
            take_room(file.fileno(), max(1, size))
            self._map = mmap.mmap(file.fileno(), max(1, size))
        self.size = size
        self.bytes = memoryview(self._map)[:size]
        """All of it, to be read and written."""

    def tensor(self, dtype: torch.dtype) -> Tensor:
        return torch.frombuffer(self.bytes, dtype=dtype)

    def leave_memory(self, start: int = 0, end: int | None = None) -> None:
        """This process looks at bytes [start, end) no more for now: the machine may have their memory."""
        end = self.size if end is None else min(end, self.size)
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        if end > first:
            self._map.madvise(mmap.MADV_DONTNEED, first, end - first)


class PackedState:
    """A state as one run of bytes on the disk, all tensors one after another in the order of their names."""

    def __init__(self, sizes: Sizes, folder: Path | None = None) -> None:
        """Room for a state of these `sizes`, on the disk of `folder`. Raises OSError where that has none."""
        self.size = packed_size(sizes)
        self._starts: dict[str, tuple[int, torch.dtype]] = {}
        offset = 0
        for name in sorted(sizes):
            self._starts[name] = offset, sizes[name][0]
            offset += packed_size({name: sizes[name]})
        self.memory = DiskMemory(self.size, folder)

    def take(self, pieces: Iterable[tuple[str, int, Tensor]]) -> None:
        """Write pieces of the tensors: name, beginning and numbers. Half precision holds none beyond `LARGEST`."""
        for name, start, piece in pieces:
            offset, dtype = self._starts[name]
            kept = piece.clamp(-LARGEST, LARGEST).to(dtype) if dtype is torch.float16 else piece
            data = kept.contiguous().reshape(-1).view(torch.uint8).numpy().data
            at = offset + start * kept.element_size()
            self.memory.bytes[at : at + len(data)] = data
            self.memory.leave_memory(at, at + len(data))

    def part(self, start: int, end: int) -> bytearray:
        """A copy of the bytes [start, end), cut at the end of the state."""
        found = bytearray(self.memory.bytes[start:end])
        self.memory.leave_memory(start, end)
        return found

    def digests(self, chunk: int) -> Tensor:
        """The digest of each chunk of `chunk` bytes, u8 [chunks, 16]."""
        every = b"".join(digest(self.part(start, start + chunk)) for start in range(0, self.size, chunk))
        return torch.frombuffer(bytearray(every), dtype=torch.uint8).view(-1, DIGEST_BYTES)


async def pack(worker: StageWorker, sizes: Sizes, folder: Path | None) -> tuple[PackedState, FrozenState, float]:
    """What `worker` holds under these names at one moment, on the disk of `folder`, and the monotonic time of that.
    Raises Refused (BUSY) where the disk has no room, or takes too long."""
    try:
        packed = await ambient.elsewhere(PackedState, sizes, folder)
    except OSError as error:
        size = packed_size(sizes)
        raise Refused(Refusal.BUSY, f"no room for a copy of this node's state, {size} bytes: {error}") from None
    try:
        async with worker.frozen(*sizes) as state:
            at = ambient.monotonic()
            await ambient.elsewhere(lambda: packed.take(state.pieces()))
    except Thawed:
        raise Refused(Refusal.BUSY, "the disk took too long for a copy of this node's state") from None
    return packed, state, at


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


class Download:
    """What has come of a state so far. It outlives a broken stream and a dead donor: a chunk is fetched only where its
    digest differs from what lies here already."""

    def __init__(self, size: int, chunk: int, folder: Path | None = None) -> None:
        """Room for `size` bytes on the disk of `folder`. Raises OSError where that has none."""
        self.size = size
        self.chunk = chunk
        self.chunks = math.ceil(size / chunk)
        self._memory = DiskMemory(size, folder)
        self.buffer = self._memory.bytes
        self.snapshot = ""
        """Name of the snapshot that was read last: a donor that still holds it goes on with it."""
        self._have = [b""] * self.chunks
        self.most = 0
        """Bytes of one snapshot that lay here at once, at the most."""

    def missing(self, digests: Sequence[bytes]) -> list[int]:
        """Chunks that must still come for a state with these digests."""
        return [index for index, wanted in enumerate(digests) if self._have[index] != wanted]

    def length(self, index: int) -> int:
        return min(self.chunk, self.size - index * self.chunk)

    def put(self, index: int, digest_of_it: bytes, data: memoryview) -> None:
        start = index * self.chunk
        self.buffer[start : start + len(data)] = data
        self._memory.leave_memory(start, start + len(data))
        self._have[index] = digest_of_it


class DiskFull(UserError):
    """The disk has no room for a state."""


def new_download(spec: RunSpec, worker: StageWorker, folder: Path | None = None) -> Download:
    """Room for a state of this stage, on the disk of `folder`. Raises DiskFull (RUN_FOLDER) where that has none."""
    size = packed_size(worker.state_sizes())
    try:
        return Download(size, spec.limits.chunk_bytes, folder)
    except OSError as error:
        raise DiskFull(
            ExitCode.RUN_FOLDER,
            f"there is no room for a stage peer's state, {size:,} bytes: {error.strerror or error}",
            "make room on the disk of node.run_folder, or choose another run_folder",
        ) from None


async def fetch_state(
    spec: RunSpec,
    stage: int,
    transport: Transport,
    worker: StageWorker,
    donor: PeerId,
    download: Download,
    *,
    on_progress: Callable[[int], None],
    after_a_stop: bool = False,
) -> StateManifest:
    """Bring `download` to a whole, verified state of `donor`. Nothing of this replica changes.

    There is no deadline on the whole, only on progress: no chunk for `limits.exchange_progress_seconds` ends it.
    `on_progress` is told the bytes that lie
    here. `after_a_stop`: nothing came in time last. It begins with one chunk then, for several that share a slow line
    all come too late. Raises Refused or TransportError; what has come so far stays.
    """
    request = StateRequest(run=spec.run_id, stage=stage, contract=worker.contract, snapshot=download.snapshot)
    limit = spec.limits.exchange_progress_seconds
    manifest, digests = await open_state(transport, donor, request, download.size, spec.limits)
    download.snapshot = manifest.snapshot
    pending = download.missing(digests)
    width = Width(limit, 1) if after_a_stop else Width(limit)
    here = download.size - sum(map(download.length, pending))
    on_progress(here)

    async def fetch(index: int) -> None:
        nonlocal here
        named = request.model_copy(update={"snapshot": manifest.snapshot, "index": index})
        size = download.length(index)
        answer = await ask(
            transport,
            donor,
            CHUNK,
            named,
            specs=(TensorSpec("u8", (size,)),),
            seconds=(width.most + 1) * limit,
            progress=limit,
            attempts=ATTEMPTS,
        )
        data = answer.tensors[0].numpy().data
        with judging(transport, donor, CHUNK.name):
            if await ambient.elsewhere(digest, data) != digests[index]:
                raise BadAnswer(f"chunk {index} of its state does not match the manifest")
        download.put(index, digests[index], data)
        here += size
        download.most = max(download.most, here)
        deadline.reschedule(asyncio.get_running_loop().time() + limit)
        on_progress(here)

    try:
        async with asyncio.timeout(limit) as deadline:
            await side_by_side(pending, width, fetch)
    except TimeoutError:
        raise DeadlinePassed(f"no part of its state came for {limit:g} s") from None
    return manifest


async def open_state(
    transport: Transport, donor: PeerId, request: StateRequest, size: int, limits: LimitsSpec
) -> tuple[StateManifest, list[bytes]]:
    """What the donor says of its copy, `size` bytes, and the digests of its chunks. A donor that refuses as busy has
    this node wait for a place from then on."""
    answer = await ask(
        transport,
        donor,
        OPEN,
        request,
        specs=(TensorSpec("u8", (math.ceil(size / limits.chunk_bytes), DIGEST_BYTES)),),
        # The donor's snapshot and its hashing come before the answer.
        seconds=3 * limits.exchange_progress_seconds,
        progress=limits.exchange_progress_seconds,
    )
    with judging(transport, donor, OPEN.name):
        return read_manifest(transport, donor, answer, request, size=size)


async def load_download(
    transport: Transport,
    worker: StageWorker,
    download: Download,
    manifest: StateManifest,
    believe: Callable[[float], float],
) -> StateManifest:
    """Become a copy: load a whole download at once, or nothing of it. `believe` turns the donor's claimed clock into
    the one to take over. Raises ProtocolViolation where the state is not finite."""
    with judging(transport, PeerId(manifest.source), OPEN.name):
        state = await ambient.elsewhere(unpack, download.buffer, worker.state_sizes())
    manifest = manifest.model_copy(update={"clock": believe(manifest.clock)})
    await worker.load_full_state(manifest.clock, manifest.outer_rounds, state)
    return manifest
