"""The transport on libp2p: requests and answers as frames on pooled streams, one request at a time on each.

There is no half-close on these streams, and refusal, cancellation and death all look like an end of file. So every
message ends with an END frame, a refusal is a frame of its own, and closing its stream cancels a request.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from noloco_node import ambient
from noloco_node.aio import cancel_and_wait
from noloco_node.identity.keys import Identity, sign_statement, signed_by
from noloco_node.identity.peer_id import PeerId
from noloco_node.tallies import EXAMINED
from noloco_node.transport.errors import BrokenStream, DeadlinePassed, ProtocolViolation, Refusal, Refused
from noloco_node.transport.interface import DIRECTORY, RELAYED, Transport, TransportLimits
from noloco_node.transport.messages import (
    BODY_FRAME_BYTES,
    Envelope,
    FrameError,
    FrameKind,
    Message,
    OtherFrameVersion,
    Prefix,
    check_sendable,
    decode_envelope,
    decode_refusal,
    encode_envelope,
    encode_refusal,
)
from noloco_node.transport.pacing import UNBOUNDED, BodyTurn, Line, at_once
from noloco_node.transport.pool import Lease, StreamHost, StreamPool
from noloco_node.transport.same_machine import SameMachine
from noloco_node.transport.streams import FramedStream, StreamEnded, StreamStalled

logger = logging.getLogger(__name__)

STREAM_PROTOCOL = "noloco/1"
"""The one libp2p protocol that carries every method."""

LINGER_SECONDS = 1.0
"""A stream that will be closed is still read for so many seconds, so that the refusal reaches the other side."""

MOST_AT_WORK = 4096
"""The most AT_WORK frames that may come before an answer; a peer that sends more only wants to keep this node busy."""

T = TypeVar("T")


class _RequestNotSent(Exception):
    """A stream from the pool turned out dead before the request was complete: it cannot have been carried out."""


class Libp2pTransport(Transport):
    """The transport on a `StreamHost`. `start` must be awaited before peers can be served. It signs with
    `identity`, which must be the one behind the host's peer id; a node that signs nothing needs none. Streams to peers
    `nearby` do without the host."""

    def __init__(
        self,
        host: StreamHost,
        limits: TransportLimits | None = None,
        identity: Identity | None = None,
        line: Line = UNBOUNDED,
        nearby: SameMachine | None = None,
    ) -> None:
        super().__init__(limits)
        self._host = host
        self._nearby = nearby
        self._line = line
        self._identity = identity
        self._pool = StreamPool(
            host,
            STREAM_PROTOCOL,
            self.limits.max_streams_per_peer // 2,
            self.limits.idle_seconds / 2,
            line,
            nearby and nearby.open,
        )
        self._incoming: Counter[PeerId] = Counter()
        self._held: dict[FramedStream, PeerId] = {}
        """Streams of other peers that have a place."""
        self._answering: set[FramedStream] = set()
        """Those on which a request has come in whole."""
        self._rng = ambient.chance()
        self._serving: set[asyncio.Task[Any]] = set()
        self._closed = False

    @property
    def peer_id(self) -> PeerId:
        """This node's own id."""
        return self._host.own_id

    def sign(self, statement: bytes) -> bytes:
        """See `Transport.sign`."""
        assert self._identity is not None, "a transport that signs needs an identity"
        return sign_statement(self._identity, statement)

    def signed_by(self, peer: PeerId, seal: bytes, statement: bytes) -> bool:
        """See `Transport.signed_by`."""
        return signed_by(peer, seal, statement)

    async def start(self) -> None:
        """Take streams of other peers from now on."""
        if self._nearby is not None:
            await self._nearby.serve(partial(self._serve_stream, nearby=True), self.limits.progress_seconds)
        await self._host.serve_streams(STREAM_PROTOCOL, self._serve_stream)

    async def close(self) -> None:
        """See `Transport.close`."""
        self._closed = True
        if self._nearby is not None:
            self._nearby.close()
        await self._host.stop_serving(STREAM_PROTOCOL)
        await cancel_and_wait(list(self._serving))
        await self._pool.close()

    def count_directory(self, sent: int, received: int) -> None:
        """Bytes of hivemind's own messages, which go beside this transport and wait for nothing."""
        self.traffic.add_sent(DIRECTORY, sent)
        self.traffic.add_received(DIRECTORY, received)
        if sent:
            self._line.sent(sent)
        if received:
            self._line.received(received)

    async def carry(self, count: int) -> None:
        """Wait until so many bytes that others send each other through this node may be received and sent on."""
        await self._line.receive(count)
        await self._line.send(count)
        self.traffic.add_received(RELAYED, count)
        self.traffic.add_sent(RELAYED, count)

    async def _call(
        self, peer: PeerId, method: str, request: Message, timeout: float, progress: float, max_answer_bytes: int
    ) -> Message:
        check_sendable(request.tensors)
        payload = encode_envelope(method, request.header, request.specs, asks_first=request.asks_first)
        deadline = asyncio.get_running_loop().time() + timeout
        turn = self._line.turn(waits=request.asks_first)
        sending = _Sending(method, payload, request, progress, max_answer_bytes, turn)
        try:
            await _come(turn, deadline, f"{method} of {peer}")
            return await self._try(peer, sending, deadline, fresh=False)
        except _RequestNotSent:
            return await self._try(peer, sending, deadline, fresh=True)
        finally:
            turn.over()

    async def _try(self, peer: PeerId, sending: _Sending, deadline: float, *, fresh: bool) -> Message:
        open_until = min(deadline, asyncio.get_running_loop().time() + sending.progress)
        async with self._pool.lend(peer, open_until, fresh) as lease:
            stream = lease.stream
            stream.at_once = at_once(sending.method)
            sent, received = stream.bytes_sent, stream.bytes_received
            try:
                async with asyncio.timeout_at(deadline):
                    return await _exchange(lease, sending)
            except TimeoutError:
                raise DeadlinePassed(f"{sending.method} of {peer}: no answer in time") from None
            except StreamStalled as error:
                raise DeadlinePassed(f"{sending.method} of {peer}: {error}") from None
            except StreamEnded as error:
                raise BrokenStream(f"{sending.method} of {peer}: {error}") from None
            except OtherFrameVersion as error:
                raise Refused(Refusal.WRONG_PROTOCOL, str(error)) from None
            except FrameError as error:
                raise ProtocolViolation(f"{sending.method} of {peer}: {error}") from None
            finally:
                self._count(sending.method, stream, sent, received)

    def _count(self, name: str, stream: FramedStream, sent: int, received: int) -> None:
        """Book what went over a stream since it had sent and received so many bytes."""
        sent, received = stream.bytes_sent - sent, stream.bytes_received - received
        self.traffic.add_sent(name, sent)
        self.traffic.add_received(name, received)
        if stream.nearby:
            self.traffic.nearby += sent + received

    async def _serve_stream(
        self, peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, nearby: bool = False
    ) -> None:
        """Answer one peer's requests on one stream until it ends, idles too long, or breaks the protocol."""
        stream = FramedStream(reader, writer, self._line, nearby=nearby)
        if self._closed or self._incoming[peer] >= self.limits.max_streams_per_peer or not self._make_room(peer):
            stream.abort()
            return
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        self._incoming[peer] += 1
        self._held[stream] = peer
        try:
            self.refuse_banned(peer)
            while await self._serve_request(stream, peer):
                pass
        except (StreamEnded, StreamStalled) as error:
            logger.debug("a stream of %s is over: %s", peer, error)
        except FrameError as error:
            reason = Refusal.WRONG_PROTOCOL if isinstance(error, OtherFrameVersion) else Refusal.MALFORMED
            await self._refuse_and_linger(stream, peer, Refused(reason, str(error)))
        except Refused as refused:
            await self._refuse_and_linger(stream, peer, refused)
        except asyncio.CancelledError:
            # The task is asyncio's own, which reports a cancelled one as a failure: `close` only wants it to end.
            if not self._closed:
                raise
        finally:
            stream.abort()
            self._held.pop(stream, None)
            self._serving.discard(task)
            self._incoming[peer] -= 1
            if not self._incoming[peer]:
                del self._incoming[peer]

    def _make_room(self, peer: PeerId) -> bool:
        """Tell whether there is a place for one more stream of `peer`, after closing another stream if need be.

        The closed stream is one on which nothing has come, of a peer that this node has not seen work. The peer that
        holds most comes first. It costs an honest caller nothing, which opens another. Without it a few keys could hold
        all places and keep everybody out.
        """
        if len(self._held) < self.limits.max_streams:
            return True
        free = [stream for stream in self._held if stream not in self._answering]
        looked_at = self._rng.sample(free, min(EXAMINED, len(free)))

        def claim(stream: FramedStream) -> tuple[bool, int]:
            holder = self._held[stream]
            return self.peer_stats.works(holder), -self._incoming[holder]

        victim = min(looked_at, key=claim, default=None)
        if victim is None or claim(victim) >= (self.peer_stats.works(peer), -self._incoming[peer]):
            return False
        del self._held[victim]
        victim.abort()
        return True

    async def _refuse_and_linger(self, stream: FramedStream, peer: PeerId, refused: Refused) -> None:
        """The last word on a stream that will be closed."""
        self.count_refusal(peer, refused)
        try:
            await stream.write_refusal(encode_refusal(refused), self.limits.progress_seconds)
            await stream.discard_until_end(LINGER_SECONDS)
        except (StreamEnded, StreamStalled):
            return

    async def _serve_request(self, stream: FramedStream, peer: PeerId) -> bool:
        """Answer or refuse the next request. False where the stream must be closed."""
        progress = self.limits.progress_seconds
        prefix = await stream.read_prefix(progress, self.limits.idle_seconds)
        if prefix.kind is not FrameKind.HEADER:
            raise FrameError(f"a request begins with a HEADER frame, not {prefix.kind.name}")
        received = stream.bytes_received
        sent = stream.bytes_sent
        envelope = decode_envelope(await stream.read_payload(prefix, progress))
        stream.at_once = at_once(envelope.method)
        body_read, turn = False, self._line.turn(waits=envelope.asks_first)
        try:
            with self.admitted(peer, envelope) as place:
                if envelope.asks_first:
                    await stream.write_at_work(progress)
                at_most = self.seconds_for(envelope.body_bytes)
                request = Message(envelope.header, await stream.read_body(envelope.specs, progress, at_most))
                body_read = True
                self._answering.add(stream)
                answering = _then_come(self.answer(peer, envelope.method, request, place), turn)
                payload, answer = await _while_open(stream, answering, progress)
                await self._write_answer(stream, payload, answer)
            return True
        except Refused as refused:
            if refused.reason is Refusal.BANNED:
                raise
            self.count_refusal(peer, refused)
            await stream.write_refusal(encode_refusal(refused), progress)
            return body_read or envelope.asks_first or await self._drain(stream, envelope)
        finally:
            turn.over()
            self._answering.discard(stream)
            self._count(self.traffic_name(envelope.method), stream, sent, received)

    async def _write_answer(self, stream: FramedStream, payload: bytes, answer: Message) -> None:
        progress, size = self.limits.progress_seconds, sum(tensor.nbytes for tensor in answer.tensors)
        if size <= BODY_FRAME_BYTES:
            await stream.write_message(payload, answer.tensors, progress)
            return
        seconds = self.seconds_for(size)  # not for longer than a slow link would take
        try:
            async with asyncio.timeout(seconds):
                await stream.write_message(payload, answer.tensors, progress)
        except TimeoutError:
            raise StreamStalled(f"{size} bytes took more than {seconds:.0f} s") from None

    async def _drain(self, stream: FramedStream, envelope: Envelope) -> bool:
        """Throw a refused request's body away so that the stream can be used again; False if that takes too long.

        Closing with bytes unread would destroy the refusal on its way. A large body is therefore read for a moment too:
        its sender stops as soon as it sees the refusal.
        """
        small = envelope.body_bytes <= self.limits.drain_bytes
        try:
            async with asyncio.timeout(self.seconds_for(envelope.body_bytes) if small else LINGER_SECONDS):
                await stream.discard_body(envelope.specs, self.limits.progress_seconds)
        except TimeoutError:
            return False
        return True


@dataclass(frozen=True, slots=True)
class _Sending:
    """A request as it goes out."""

    method: str
    payload: bytes
    request: Message
    progress: float
    max_answer_bytes: int
    turn: BodyTurn


async def _come(turn: BodyTurn, deadline: float, what: str) -> None:
    """Wait for the turn of a request. DeadlinePassed."""
    try:
        async with asyncio.timeout_at(deadline):
            await turn.come()
    except TimeoutError:
        raise DeadlinePassed(f"{what}: others were on the line all the time") from None


async def _then_come(answering: Coroutine[Any, Any, T], turn: BodyTurn) -> T:
    """The answer, once it may go."""
    answer = await answering
    await turn.come()
    return answer


async def _exchange(lease: Lease, sending: _Sending) -> Message:
    """Write the request and read the answer."""
    stream, request, payload = lease.stream, sending.request, sending.payload
    try:
        if request.asks_first:
            await _ask(lease, sending)
            payload = b""
        if not stream.is_small(len(payload) + sum(tensor.nbytes for tensor in request.tensors)):
            return await _exchange_at_length(lease, payload, sending)
        stream.put_message(payload, request.tensors)
        prefix = await _answer_begins(partial(stream.read_prefix, sending.progress, sending.progress), stream, sending)
        return await _answered(lease, prefix, sending)
    except StreamEnded:
        if lease.fresh or stream.message_complete:
            raise
        raise _RequestNotSent from None


async def _ask(lease: Lease, sending: _Sending) -> None:
    """Write the request without its tensors, and return once it is admitted. Refused where it is not."""
    stream, progress = lease.stream, sending.progress
    stream.put_header(sending.payload)
    prefix = await stream.read_prefix(progress, progress)
    said = await stream.read_payload(prefix, progress)
    if prefix.kind is FrameKind.REFUSE:
        lease.reusable = stream.flushed
        raise decode_refusal(said)
    if prefix.kind is not FrameKind.AT_WORK:
        raise FrameError(f"a request is admitted by an AT_WORK frame, not {prefix.kind.name}")


async def _exchange_at_length(lease: Lease, payload: bytes, sending: _Sending) -> Message:
    """Exchange a request that takes a while: the stream is read while it is written, since a refusal may come early."""
    stream, progress = lease.stream, sending.progress
    writing = asyncio.create_task(stream.write_message(payload, sending.request.tensors, progress))
    writing.add_done_callback(lambda _: sending.turn.over())
    try:
        prefix = await _answer_begins(partial(_next_prefix, stream, writing, progress), stream, sending)
        if prefix.kind is not FrameKind.REFUSE:
            await writing
        return await _answered(lease, prefix, sending)
    finally:
        await cancel_and_wait((writing,))


async def _answered(lease: Lease, prefix: Prefix, sending: _Sending) -> Message:
    """The answer that begins so; Refused where it is a refusal. The stream can be lent again where it is read to its
    end and nothing of the request is still to be sent."""
    stream = lease.stream
    if prefix.kind is FrameKind.REFUSE:
        refused = decode_refusal(await stream.read_payload(prefix, sending.progress))
        lease.reusable = stream.message_complete and stream.flushed
        raise refused
    answer = await _read_answer(stream, prefix, sending)
    lease.reusable = stream.flushed
    return answer


async def _answer_begins(
    next_prefix: Callable[[], Awaitable[Prefix]], stream: FramedStream, sending: _Sending
) -> Prefix:
    """The prefix of the answer or refusal.

    While the request goes out, its own deadline holds. From then on something must come within `progress` seconds,
    again and again: the answer, or word that the other side is at work on it.
    """
    for _ in range(MOST_AT_WORK):
        prefix = await next_prefix()
        if prefix.kind is not FrameKind.AT_WORK:
            return prefix
        await stream.read_payload(prefix, sending.progress)
    raise FrameError(f"more than {MOST_AT_WORK} frames that only say that an answer will come")


async def _next_prefix(stream: FramedStream, writing: asyncio.Task[None], progress: float) -> Prefix:
    """The next prefix; only a stalled writer stops the wait for it.

    A stream that ends while it is written ends for the reader too, and the refusal that explains it may be on its way.
    """
    reading = asyncio.create_task(stream.read_prefix(progress))
    try:
        await asyncio.wait((writing, reading), return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            if isinstance(error := writing.exception(), StreamStalled):
                raise error
            await asyncio.wait((reading,), timeout=progress)
        if not reading.done():
            raise StreamStalled(f"neither an answer nor word of work on it for {progress:g} s")
        return reading.result()
    finally:
        await cancel_and_wait((reading,))


async def _read_answer(stream: FramedStream, prefix: Prefix, sending: _Sending) -> Message:
    if prefix.kind is not FrameKind.HEADER:
        raise FrameError(f"an answer begins with a HEADER frame, not {prefix.kind.name}")
    envelope = decode_envelope(await stream.read_payload(prefix, sending.progress))
    if envelope.body_bytes > sending.max_answer_bytes:
        raise FrameError(f"an answer of {envelope.body_bytes} bytes exceeds {sending.max_answer_bytes}")
    return Message(envelope.header, await stream.read_body(envelope.specs, sending.progress))


async def _while_open(stream: FramedStream, answering: Coroutine[Any, Any, T], progress: float) -> T:
    """Run a handler for as long as its caller is there, and tell the caller now and then that it is being worked on.

    Raises StreamEnded once the caller has gone.
    """
    handling = asyncio.create_task(answering)
    try:
        # Most take less than the time before the caller's presence is checked.
        await asyncio.wait((handling,), timeout=0.02)
        if not handling.done():
            await _watched(stream, handling, progress)
        if handling.cancelled():
            raise Refused(Refusal.INTERNAL)
        return handling.result()
    finally:
        await cancel_and_wait((handling,))


async def _watched(stream: FramedStream, handling: asyncio.Task[Any], progress: float) -> None:
    """Return when the handler has ended."""
    watching = asyncio.create_task(stream.wait_for_end())
    both = (handling, watching)
    try:
        # The caller hears that its request is still in hand, far below any progress deadline.
        while not (await asyncio.wait(both, timeout=1.0, return_when=asyncio.FIRST_COMPLETED))[0]:
            await stream.write_at_work(progress)
        if watching.done():
            watching.result()
            raise StreamEnded("the caller went away")
    finally:
        await cancel_and_wait((watching,))
