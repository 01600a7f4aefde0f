"""A fellow's full state for a replica that starts late or fell behind: one consistent snapshot, in hashed chunks."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field, ValidationError
from torch import Tensor

from noloco_node.config.run_spec import RunSpec
from noloco_node.swarm.transport import (
    JsonObject,
    Message,
    PeerId,
    ProtocolViolation,
    Refusal,
    Refused,
    TensorSpec,
    Transport,
    TransportError,
)
from noloco_node.swarm.wire import ClockValue, RunName, StageIndex, WireModel, check_addressed, no_tensors, parse
from noloco_node.training.progress import Progress
from noloco_node.training.stage_worker import StageWorker

logger = logging.getLogger(__name__)

OPEN = "state.open"
CHUNK = "state.chunk"

DIGEST_BYTES = 16
SNAPSHOT_LIFE_SECONDS = 60.0
SNAPSHOT_SHARED_SECONDS = 10.0
CHUNK_ATTEMPTS = 3


class StateRequest(WireModel):
    """Asks for a manifest (no snapshot named) or for a chunk of a snapshot."""

    run: RunName
    stage: StageIndex
    contract: Annotated[str, Field(max_length=64)]
    snapshot: Annotated[str, Field(max_length=32)] = ""
    index: Annotated[int, Field(ge=0, le=1 << 32)] = 0


class StateManifest(WireModel):
    """Describes one snapshot. The hash of every chunk travels with it as a tensor u8 [chunks, 16]."""

    snapshot: Annotated[str, Field(max_length=32)]
    clock: ClockValue
    outer_rounds: Annotated[int, Field(ge=0, le=1 << 40)]
    size: Annotated[int, Field(gt=0, le=1 << 44)]
    """Bytes of the whole state."""


@dataclass(slots=True)
class _Held:
    name: str
    taken: float
    used: float
    progress: Progress
    payload: memoryview
    digests: Tensor


class StateDonor:
    """Gives this replica's state to fellows: one snapshot at a time, shared by those who ask at the same time."""

    def __init__(self, spec: RunSpec, stage: int, transport: Transport, worker: StageWorker) -> None:
        self._spec = spec
        self._stage = stage
        self._transport = transport
        self._worker = worker
        self._held: _Held | None = None
        self._taking = asyncio.Lock()
        self.accepting = False

    def serve(self) -> None:
        """Register with the transport."""
        self._transport.serve(OPEN, self._admit, self._handle_open, max_concurrent_per_peer=1)
        self._transport.serve(CHUNK, self._admit, self._handle_chunk, max_concurrent_per_peer=8)

    def forget_unused(self) -> None:
        """Free a snapshot that nobody has asked for lately."""
        if self._held is not None and time.monotonic() - self._held.used > SNAPSHOT_LIFE_SECONDS:
            self._held = None

    def _admit(self, peer: PeerId, header: JsonObject, specs: tuple[TensorSpec, ...]) -> None:
        request = parse(StateRequest, header)
        no_tensors(peer, header, specs)
        if not self.accepting:
            raise Refused(Refusal.DRAINING)
        check_addressed(run=request.run, stage=request.stage, own_run=self._spec.run_id, own_stage=self._stage)
        if request.contract != self._worker.contract:
            raise Refused(Refusal.WRONG_CONTRACT)

    async def _handle_open(self, _peer: PeerId, _message: Message) -> Message:
        async with self._taking:
            held = self._held
            now = time.monotonic()
            if held is None or now - held.taken > SNAPSHOT_SHARED_SECONDS:
                if held is not None and now - held.used < SNAPSHOT_SHARED_SECONDS:
                    raise Refused(Refusal.BUSY, "an older snapshot is being read")
                progress, state = await self._worker.full_state()
                payload, digests = await asyncio.to_thread(_pack, state, self._spec.limits.chunk_bytes)
                held = self._held = _Held(secrets.token_hex(8), now, now, progress, payload, digests)
        manifest = StateManifest(
            snapshot=held.name,
            clock=held.progress.clock,
            outer_rounds=held.progress.outer_rounds,
            size=held.payload.nbytes,
        )
        return Message(manifest.model_dump(mode="json"), (held.digests,))

    async def _handle_chunk(self, _peer: PeerId, message: Message) -> Message:
        request = StateRequest.model_validate(message.header)
        held = self._held
        if held is None or held.name != request.snapshot:
            raise Refused(Refusal.UNKNOWN_SNAPSHOT)
        if request.index >= len(held.digests):
            raise Refused(Refusal.MALFORMED, f"chunk {request.index} of {len(held.digests)}")
        held.used = time.monotonic()
        size = self._spec.limits.chunk_bytes
        part = held.payload[request.index * size : (request.index + 1) * size]
        return Message({}, (torch.frombuffer(part, dtype=torch.uint8),))


async def fetch_state(
    spec: RunSpec,
    stage: int,
    transport: Transport,
    worker: StageWorker,
    donor: PeerId,
    *,
    streams: int,
    believe: Callable[[float], float],
) -> StateManifest:
    """Become a copy of `donor`: fetch its state chunk by chunk, verify each, and load it as a whole at the end.

    `believe` turns the donor's claimed clock into the one to take over. Raises Refused or TransportError; the replica
    is unchanged then.
    """
    request = StateRequest(run=spec.run_id, stage=stage, contract=worker.contract)
    sizes = worker.state_sizes()
    expected = sum(math.prod(shape) * dtype.itemsize for dtype, shape in sizes.values())
    chunk = spec.limits.chunk_bytes
    chunks = math.ceil(expected / chunk)
    limit = spec.limits.exchange_progress_seconds
    answer = await transport.call(
        donor,
        OPEN,
        Message(request.model_dump(mode="json")),
        timeout=3 * limit,
        progress=limit,
        max_answer_bytes=chunks * DIGEST_BYTES,
    )
    manifest, digests = _checked_manifest(answer, expected, chunks)
    buffer = await asyncio.to_thread(bytearray, expected)
    pending = list(reversed(range(chunks)))

    async def stripe() -> None:
        while pending:
            index = pending.pop()
            named = request.model_copy(update={"snapshot": manifest.snapshot, "index": index})
            data = await _fetch_chunk(
                transport, donor, named, digests[index], min(chunk, expected - index * chunk), limit
            )
            buffer[index * chunk : index * chunk + len(data)] = data

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(streams, chunks)):
                group.create_task(stripe())
    except* (Refused, TransportError) as failures:
        raise failures.exceptions[0] from None
    state = await asyncio.to_thread(_unpack, buffer, sizes)
    manifest = manifest.model_copy(update={"clock": believe(manifest.clock)})
    await worker.load_full_state(manifest.clock, manifest.outer_rounds, state)
    return manifest


async def fetch_from_any(
    donors: Sequence[PeerId], fetch: Callable[[PeerId], Awaitable[StateManifest]], rng: random.Random
) -> tuple[PeerId, StateManifest] | None:
    """Try `donors` in random order; the first that gives its state, or None. Each failure is logged with its reason."""
    order = list(donors)
    rng.shuffle(order)
    for donor in order:
        try:
            return donor, await fetch(donor)
        except (Refused, TransportError) as error:
            logger.warning("could not copy the state of %s: %s", donor, error or repr(error))
    return None


async def _fetch_chunk(
    transport: Transport, donor: PeerId, request: StateRequest, digest: bytes, size: int, limit: float
) -> memoryview:
    for attempt in range(CHUNK_ATTEMPTS):
        try:
            answer = await transport.call(
                donor,
                CHUNK,
                Message(request.model_dump(mode="json")),
                timeout=limit,
                progress=limit,
                max_answer_bytes=size,
            )
            if answer.specs != (TensorSpec("u8", (size,)),):
                raise ProtocolViolation(f"chunk {request.index} does not have {size} bytes")
            data = answer.tensors[0].numpy().data
            if await asyncio.to_thread(_digest, data) != digest:
                raise ProtocolViolation(f"chunk {request.index} does not match the manifest")
            return data
        except TransportError as error:
            if attempt + 1 == CHUNK_ATTEMPTS:
                raise
            logger.debug("chunk %d from %s failed: %r", request.index, donor, error)
    raise AssertionError("unreachable")


def _checked_manifest(answer: Message, expected: int, chunks: int) -> tuple[StateManifest, list[bytes]]:
    try:
        manifest = StateManifest.model_validate(answer.header)
    except ValidationError as error:
        raise ProtocolViolation(f"bad manifest: {error.error_count()} errors") from None
    if manifest.size != expected or answer.specs != (TensorSpec("u8", (chunks, DIGEST_BYTES)),):
        raise ProtocolViolation(f"the donor's state has {manifest.size} bytes where {expected} belong")
    return manifest, [bytes(row.numpy()) for row in answer.tensors[0]]


def _pack(state: dict[str, Tensor], chunk: int) -> tuple[memoryview, Tensor]:
    """All tensors one after another in the order of their names, and the digest of each chunk, u8 [chunks, 16]."""
    payload = memoryview(bytearray(sum(tensor.nbytes for tensor in state.values())))
    offset = 0
    for name in sorted(state):
        tensor = state[name]
        payload[offset : offset + tensor.nbytes] = tensor.reshape(-1).view(torch.uint8).numpy().data
        offset += tensor.nbytes
    digests = b"".join(_digest(payload[start : start + chunk]) for start in range(0, len(payload), chunk))
    return payload, torch.frombuffer(bytearray(digests), dtype=torch.uint8).view(-1, DIGEST_BYTES)


def _unpack(buffer: bytearray, sizes: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> dict[str, Tensor]:
    """The tensors that `_pack` put in, as views. Raises ProtocolViolation where one is not finite."""
    state: dict[str, Tensor] = {}
    offset = 0
    for name in sorted(sizes):
        dtype, shape = sizes[name]
        count = math.prod(shape)
        state[name] = torch.frombuffer(buffer, dtype=dtype, count=count, offset=offset).view(shape)
        offset += count * dtype.itemsize
        if not bool(torch.isfinite(state[name]).all()):
            raise ProtocolViolation("the donor's state holds NaN or infinity")
    return state


def _digest(data: memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()
