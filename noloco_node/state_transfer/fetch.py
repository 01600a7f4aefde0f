"""The receiving side of a state transfer: one donor's snapshot, chunk by chunk, each held to the signed manifest."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from noloco_node import ambient
from noloco_node.config.run_spec import RunSpec
from noloco_node.errors import ExitCode, UserError
from noloco_node.identity.peer_id import PeerId
from noloco_node.state_transfer.messages import (
    CHUNK,
    DIGEST_BYTES,
    OPEN,
    StateManifest,
    StateRequest,
    digest,
    packed_size,
    read_manifest,
    unpack,
)
from noloco_node.storage.disk_memory import DiskMemory
from noloco_node.training.stage_worker import StageWorker
from noloco_node.transport.calls import CHUNK_ATTEMPTS, BadAnswer, ask, judging
from noloco_node.transport.errors import DeadlinePassed
from noloco_node.transport.interface import Transport
from noloco_node.transport.messages import TensorSpec
from noloco_node.transport.calls import Width, side_by_side


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
        """Bytes of a chunk."""
        return min(self.chunk, self.size - index * self.chunk)

    def put(self, index: int, digest_of_it: bytes, data: memoryview) -> None:
        """Take in a verified chunk."""
        start = index * self.chunk
        self.buffer[start : start + len(data)] = data
        self._memory.leave_memory(start, start + len(data))
        self._have[index] = digest_of_it


def new_download(spec: RunSpec, worker: StageWorker, folder: Path | None = None) -> Download:
    """Room for a state of this stage, on the disk of `folder`. UserError (RUN_FOLDER) where that has none."""
    size = packed_size(worker.state_sizes())
    try:
        return Download(size, spec.limits.chunk_bytes, folder)
    except OSError as error:
        raise UserError(
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
    manifest, digests = await _open(transport, donor, request, download, limit)
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
            attempts=CHUNK_ATTEMPTS,
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


async def _open(
    transport: Transport, donor: PeerId, request: StateRequest, download: Download, limit: float
) -> tuple[StateManifest, list[bytes]]:
    """What the donor says of its copy, and the digests of its chunks."""
    answer = await ask(
        transport,
        donor,
        OPEN,
        request,
        specs=(TensorSpec("u8", (download.chunks, DIGEST_BYTES)),),
        # The donor's snapshot and its hashing come before the answer.
        seconds=3 * limit,
        progress=limit,
    )
    with judging(transport, donor, OPEN.name):
        return read_manifest(transport, donor, answer, request, size=download.size)


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
