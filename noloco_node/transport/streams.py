"""Messages on a byte stream: reads and writes frames with a deadline on every wait.

Bytes that are there are read at once, and a deadline is set only for bytes that are not. Most frames of a small message
come together. One timer of a stream watches the deadlines of its reader. Setting and lifting one for each wait costs
more than reading a frame.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import zlib
from collections.abc import Awaitable, Iterator, Sequence

import torch

from noloco_node.transport.messages import (
    AT_WORK_FRAME,
    BODY_FRAME_BYTES,
    END_FRAME,
    PREFIX_BYTES,
    WIRE_DTYPES,
    FrameError,
    FrameKind,
    Prefix,
    TensorSpec,
    decode_prefix,
    encode_frame,
    encode_prefix,
    frame_lengths,
    tensor_bytes,
)
from noloco_node.transport.pacing import UNBOUNDED, Line

READ_AHEAD_BYTES = 4096
"""The bytes that may be read beyond what is needed now: a header, or the END frame behind a body."""
MOST_UNSENT_BYTES = 64 * 1024
"""A writer waits if more bytes than this are written and not taken by the system yet."""


class StreamEnded(Exception):
    """The other side closed the stream, died, or the link broke."""


class StreamStalled(Exception):
    """No whole frame moved within the progress deadline."""


class FramedStream:
    """One stream to one peer. Not safe for two readers or two writers at once; one of each is fine."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        line: Line = UNBOUNDED,
        *,
        nearby: bool = False,
    ) -> None:
        """`line` bounds what goes over it, with all other streams of this node. A stream to a peer `nearby`, on this
        machine, does not cross it."""
        self._reader = reader
        self._writer = writer
        self._line = UNBOUNDED if nearby else line
        self.nearby = nearby
        self.at_once = 0
        """Messages of up to so many bytes do not wait for their turn on the line."""
        self._ahead = bytearray()
        """Read, and not taken yet."""
        self._due = self._until = math.inf
        """When the reader has waited for too long, and when a whole body has, in the loop's time."""
        self._look: asyncio.TimerHandle | None = None
        self.bytes_sent = 0
        """Payload bytes written so far: headers and bodies."""
        self.bytes_received = 0
        self.message_complete = False
        """Whether all of the message being written was handed to the system: from then on it may have been received."""

    @property
    def ended(self) -> bool:
        """True once the stream is known to be of no more use."""
        if self._reader.exception() is not None:  # its deadline and its last bytes came in the same turn of the loop
            return True
        return self._writer.is_closing() or (self._reader.at_eof() and not self._ahead)

    @property
    def flushed(self) -> bool:
        """Whether all that was written has been taken by the system."""
        return self._writer.transport.get_write_buffer_size() == 0

    def abort(self) -> None:
        """Close at once; what is not yet sent is lost. The other side sees the stream end."""
        if self._look is not None:
            self._look.cancel()
            self._look = None
        self._writer.transport.abort()

    async def read_prefix(self, progress: float, idle: float | None = None) -> Prefix:
        """Wait up to `idle` seconds (None: for ever) for a frame to begin, then `progress` for its prefix to be whole.

        Raises StreamEnded, StreamStalled, or FrameError.
        """
        if not self._ahead:
            await self._in_time(math.inf if idle is None else idle, self._read_ahead(1))
        return decode_prefix(await self._take(PREFIX_BYTES, progress))

    async def read_payload(self, prefix: Prefix, progress: float) -> bytes:
        """The payload of a small frame (HEADER, REFUSE, END), its checksum verified."""
        payload = await self._take(prefix.length, progress)
        prefix.check(zlib.crc32(payload, prefix.checksum_start))
        self.bytes_received += prefix.length
        self._line.received(prefix.length)
        return payload

    async def read_body(
        self, specs: Sequence[TensorSpec], progress: float, at_most: float = math.inf
    ) -> tuple[torch.Tensor, ...]:
        """The tensors that the envelope announced, and the END frame, all of it within `at_most` seconds. Bounds must
        have been checked before.

        Memory is touched only as bytes arrive, so a peer that announces much and sends nothing costs nothing.
        """
        self._until = asyncio.get_running_loop().time() + at_most
        try:
            return await self._read_tensors(specs, progress)
        finally:
            self._until = math.inf

    async def _read_tensors(self, specs: Sequence[TensorSpec], progress: float) -> tuple[torch.Tensor, ...]:
        tensors: list[torch.Tensor] = []
        for spec in specs:
            tensor = torch.empty(spec.shape, dtype=WIRE_DTYPES[spec.dtype])
            view = tensor_bytes(tensor)
            for start, end in frame_lengths(spec.nbytes):
                await self._read_piece(view[start:end], progress)
            tensors.append(tensor)
        await self._read_end(progress)
        return tuple(tensors)

    async def discard_body(self, specs: Sequence[TensorSpec], progress: float) -> None:
        """Read the announced body and throw it away."""
        scratch = memoryview(bytearray(BODY_FRAME_BYTES))
        for spec in specs:
            for start, end in frame_lengths(spec.nbytes):
                await self._read_piece(scratch[: end - start], progress)
        await self._read_end(progress)

    async def discard_until_end(self, at_most: float) -> None:
        """Throw away whatever comes, until the other side closes or `at_most` seconds have passed."""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(at_most):
                while await self._reader.read(BODY_FRAME_BYTES):
                    pass

    async def write_message(self, envelope: bytes, tensors: Sequence[torch.Tensor], progress: float) -> None:
        """Write HEADER (none without an envelope), BODY and END frames. The tensors must stay unchanged until the other
        side has answered.

        Raises StreamEnded or StreamStalled.
        """
        self.message_complete = False
        if self.is_small(len(envelope) + sum(tensor.nbytes for tensor in tensors)):
            self.put_message(envelope, tensors)
            await self._sent(progress)
            return
        parts, waiting = _head(envelope), len(envelope)
        for piece in _pieces(tensors):
            parts += (encode_prefix(FrameKind.BODY, piece), piece)
            waiting += len(piece)
            if waiting >= BODY_FRAME_BYTES:
                await self._write(parts, waiting, progress)
                parts, waiting = [], 0
        parts.append(END_FRAME)
        self.message_complete = not self._writer.is_closing()
        await self._write(parts, waiting, progress)

    def is_small(self, count: int) -> bool:
        """Whether a message of so many bytes may be put out at once (`put_message`)."""
        return count <= (BODY_FRAME_BYTES if self._line.up is None else self.at_once)

    def put_message(self, envelope: bytes, tensors: Sequence[torch.Tensor]) -> None:
        """Write a small message at once: by the time that it is answered it has gone."""
        pieces = list(_pieces(tensors))
        parts = _head(envelope)
        for piece in pieces:
            parts += (encode_prefix(FrameKind.BODY, piece), piece)
        parts.append(END_FRAME)
        self.message_complete = not self._writer.is_closing()
        self._writer.writelines(parts)
        count = len(envelope) + sum(map(len, pieces))
        self.bytes_sent += count
        self._line.sent(count)

    def put_header(self, envelope: bytes) -> None:
        """Write a HEADER frame alone, to ask. The message with no envelope that follows on a yes is its body."""
        self.message_complete = False
        self._writer.writelines(_head(envelope))
        self.bytes_sent += len(envelope)
        self._line.sent(len(envelope))

    async def write_refusal(self, frame: bytes, progress: float) -> None:
        """Write an encoded REFUSE frame."""
        self._writer.write(frame)
        self._line.sent(len(frame))
        await self._sent(progress)
        self.bytes_sent += len(frame)

    async def write_at_work(self, progress: float) -> None:
        """Write an AT_WORK frame: the caller's patience begins anew."""
        self._writer.write(AT_WORK_FRAME)
        await self._sent(progress)

    async def wait_for_end(self) -> None:
        """Return when the other side closes; FrameError if it sends something instead. Cancelling loses no byte."""
        try:
            if self._ahead or await self._reader.read(1):
                raise FrameError("a request came before the last one was answered")
        except OSError:
            return

    async def _read_piece(self, view: memoryview, progress: float) -> None:
        prefix = decode_prefix(await self._take(PREFIX_BYTES, progress))
        if prefix.kind is not FrameKind.BODY or prefix.length != len(view):
            raise FrameError(f"expected a BODY frame of {len(view)} bytes, got {prefix.kind.name} of {prefix.length}")
        if prefix.length > self.at_once:
            await self._line.receive(prefix.length)
        else:
            self._line.received(prefix.length)
        there = min(len(view), len(self._ahead))
        view[:there] = self._ahead[:there]
        del self._ahead[:there]
        if there < len(view):
            await self._in_time(progress, self._read_into(view[there:]))
        prefix.check(zlib.crc32(view, prefix.checksum_start))
        self.bytes_received += prefix.length

    async def _read_into(self, view: memoryview) -> None:
        filled = 0
        while filled < len(view):
            data = memoryview(await self._reader.read(len(view) - filled + READ_AHEAD_BYTES))
            if not data:
                raise StreamEnded("the stream ended within a frame")
            used = min(len(data), len(view) - filled)
            view[filled : filled + used] = data[:used]
            self._ahead += data[used:]
            filled += used

    async def _take(self, count: int, progress: float) -> bytes:
        """The next bytes, of which there must be so many within that time."""
        if len(self._ahead) < count:
            await self._in_time(progress, self._read_ahead(count))
        taken = bytes(self._ahead[:count])
        del self._ahead[:count]
        return taken

    async def _read_ahead(self, count: int) -> None:
        while (lacking := count - len(self._ahead)) > 0:
            data = await self._reader.read(lacking + READ_AHEAD_BYTES)
            if not data:
                raise StreamEnded("the stream ended within a frame")
            self._ahead += data

    async def _read_end(self, progress: float) -> None:
        prefix = decode_prefix(await self._take(PREFIX_BYTES, progress))
        if prefix.kind is not FrameKind.END:
            raise FrameError(f"expected an END frame, got {prefix.kind.name}")
        prefix.check(prefix.checksum_start)

    async def _write(self, parts: Sequence[bytes | memoryview], payload_bytes: int, progress: float) -> None:
        if self._line.up is None or payload_bytes <= self.at_once:
            self._writer.writelines(parts)
            self._line.sent(payload_bytes)
            await self._sent(progress)
        else:
            for part in self._line.slices(parts):
                if self._writer.is_closing():  # what goes nowhere has no share of the line
                    raise StreamEnded("the other side has gone")
                await self._line.send(len(part))
                self._writer.write(part)
                await self._sent(progress)
        self.bytes_sent += payload_bytes

    async def _sent(self, progress: float) -> None:
        if self._writer.transport.get_write_buffer_size() > MOST_UNSENT_BYTES:
            try:
                async with asyncio.timeout(progress):
                    await self._writer.drain()
            except TimeoutError:
                raise StreamStalled(f"nothing was taken for {progress:g} s") from None
            except OSError as error:
                raise StreamEnded(str(error)) from None

    async def _in_time(self, seconds: float, reading: Awaitable[None]) -> None:
        """Read, for so long at the most, and not beyond what the whole body may take."""
        loop = asyncio.get_running_loop()
        self._due = due = min(loop.time() + seconds, self._until)
        if due < math.inf and (self._look is None or self._look.when() > due):
            if self._look is not None:
                self._look.cancel()
            self._look = loop.call_at(due, self._look_after)
        try:
            await reading
        except OSError as error:
            raise StreamEnded(str(error)) from None
        finally:
            self._due = math.inf

    def _look_after(self) -> None:
        """End a reader's wait that has been too long. The timer was set for an earlier one, mostly."""
        self._look = None
        loop = asyncio.get_running_loop()
        if loop.time() >= self._due:
            self._reader.set_exception(StreamStalled("nothing moved in time"))
        elif self._due < math.inf:
            self._look = loop.call_at(self._due, self._look_after)


def _head(envelope: bytes) -> list[bytes | memoryview]:
    return [encode_frame(FrameKind.HEADER, envelope)] if envelope else []


def _pieces(tensors: Sequence[torch.Tensor]) -> Iterator[memoryview]:
    for tensor in tensors:
        view = tensor_bytes(tensor)
        for start, end in frame_lengths(len(view)):
            yield view[start:end]
