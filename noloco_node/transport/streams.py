"""Messages on a byte stream: reads and writes frames with a deadline on every wait."""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import Awaitable, Iterator, Sequence
from typing import TypeVar

import torch

from noloco_node.transport.frames import (
    AT_WORK_FRAME,
    BODY_FRAME_BYTES,
    END_FRAME,
    PREFIX_BYTES,
    FrameError,
    FrameKind,
    Prefix,
    decode_prefix,
    encode_frame,
    encode_prefix,
    frame_lengths,
    tensor_bytes,
)
from noloco_node.transport.messages import WIRE_DTYPES, TensorSpec

T = TypeVar("T")


class StreamEnded(Exception):
    """The other side closed the stream, died, or the link broke."""


class StreamStalled(Exception):
    """No whole frame moved within the progress deadline."""


class FramedStream:
    """One stream to one peer. Not safe for two readers or two writers at once; one of each is fine."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.bytes_sent = 0
        """Payload bytes written so far: headers and bodies."""
        self.bytes_received = 0
        self.message_complete = False
        """Whether all of the message being written was handed to the system: from then on it may have been received."""

    @property
    def ended(self) -> bool:
        """True once the stream is known to be of no more use."""
        return self._writer.is_closing() or self._reader.at_eof()

    def abort(self) -> None:
        """Close at once; what is not yet sent is lost. The other side sees the stream end."""
        self._writer.transport.abort()

    async def read_prefix(self, progress: float, idle: float | None = None) -> Prefix:
        """Wait up to `idle` seconds (None: for ever) for a frame to begin, then `progress` for its prefix to be whole.

        Raises StreamEnded, StreamStalled, or FrameError.
        """
        first = await self._within(idle, self._reader.readexactly(1))
        return decode_prefix(first + await self._within(progress, self._reader.readexactly(PREFIX_BYTES - 1)))

    async def read_payload(self, prefix: Prefix, progress: float) -> bytes:
        """The payload of a small frame (HEADER, REFUSE, END), its checksum verified."""
        payload = await self._within(progress, self._reader.readexactly(prefix.length)) if prefix.length else b""
        prefix.check(zlib.crc32(payload, prefix.checksum_start))
        self.bytes_received += prefix.length
        return payload

    async def read_body(self, specs: Sequence[TensorSpec], progress: float) -> tuple[torch.Tensor, ...]:
        """The tensors that the envelope announced, and the END frame. Bounds must have been checked before.

        Memory is touched only as bytes arrive, so a peer that announces much and sends nothing costs nothing.
        """
        tensors: list[torch.Tensor] = []
        for spec in specs:
            tensor = torch.empty(spec.shape, dtype=WIRE_DTYPES[spec.dtype])
            view = tensor_bytes(tensor)
            for start, end in frame_lengths(spec.nbytes):
                await self._within(progress, self._read_piece(view[start:end]))
            tensors.append(tensor)
        await self._read_end(progress)
        return tuple(tensors)

    async def discard_body(self, specs: Sequence[TensorSpec], progress: float) -> None:
        """Read the announced body and throw it away."""
        scratch = memoryview(bytearray(BODY_FRAME_BYTES))
        for spec in specs:
            for start, end in frame_lengths(spec.nbytes):
                await self._within(progress, self._read_piece(scratch[: end - start]))
        await self._read_end(progress)

    async def discard_until_end(self, at_most: float) -> None:
        """Throw away whatever comes, until the other side closes or `at_most` seconds have passed."""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(at_most):
                while await self._reader.read(BODY_FRAME_BYTES):
                    pass

    async def write_message(self, envelope: bytes, tensors: Sequence[torch.Tensor], progress: float) -> None:
        """Write HEADER, BODY and END frames. The tensors must stay unchanged until the other side has answered.

        Raises StreamEnded or StreamStalled.
        """
        self.message_complete = False
        parts: list[bytes | memoryview] = [encode_frame(FrameKind.HEADER, envelope)]
        waiting = len(envelope)
        for piece in _pieces(tensors):
            parts += (encode_prefix(FrameKind.BODY, piece), piece)
            waiting += len(piece)
            if waiting >= BODY_FRAME_BYTES:
                await self._write(parts, waiting, progress)
                parts, waiting = [], 0
        parts.append(END_FRAME)
        self.message_complete = not self._writer.is_closing()
        await self._write(parts, waiting, progress)

    async def write_refusal(self, frame: bytes, progress: float) -> None:
        """Write an encoded REFUSE frame."""
        await self._write([frame], len(frame), progress)

    async def write_at_work(self, progress: float) -> None:
        """Write an AT_WORK frame: the caller's patience begins anew."""
        await self._write([AT_WORK_FRAME], 0, progress)

    async def wait_for_end(self) -> None:
        """Return when the other side closes; FrameError if it sends something instead. Cancelling loses no byte."""
        try:
            if await self._reader.read(1):
                raise FrameError("a request came before the last one was answered")
        except OSError:
            return

    async def _read_piece(self, view: memoryview) -> None:
        prefix = decode_prefix(await self._reader.readexactly(PREFIX_BYTES))
        if prefix.kind is not FrameKind.BODY or prefix.length != len(view):
            raise FrameError(f"expected a BODY frame of {len(view)} bytes, got {prefix.kind.name} of {prefix.length}")
        checksum, filled = prefix.checksum_start, 0
        while filled < len(view):
            data = await self._reader.read(len(view) - filled)
            if not data:
                raise StreamEnded("the stream ended within a frame")
            view[filled : filled + len(data)] = data
            checksum = zlib.crc32(data, checksum)
            filled += len(data)
        prefix.check(checksum)
        self.bytes_received += prefix.length

    async def _read_end(self, progress: float) -> None:
        prefix = await self.read_prefix(progress, progress)
        if prefix.kind is not FrameKind.END:
            raise FrameError(f"expected an END frame, got {prefix.kind.name}")
        await self.read_payload(prefix, progress)

    async def _write(self, parts: Sequence[bytes | memoryview], payload_bytes: int, progress: float) -> None:
        self._writer.writelines(parts)
        await self._within(progress, self._writer.drain())
        self.bytes_sent += payload_bytes

    async def _within(self, seconds: float | None, wait: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(seconds):
                return await wait
        except TimeoutError:
            raise StreamStalled(f"nothing moved for {seconds:g} s") from None
        except (asyncio.IncompleteReadError, OSError) as error:
            raise StreamEnded(str(error)) from None


def _pieces(tensors: Sequence[torch.Tensor]) -> Iterator[memoryview]:
    for tensor in tensors:
        view = tensor_bytes(tensor)
        for start, end in frame_lengths(len(view)):
            yield view[start:end]
