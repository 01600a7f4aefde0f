"""Open streams to peers, kept for the next request: opening one costs more than a small request does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from noloco_node.identity.peer_id import PeerId
from noloco_node.transport.errors import PeerUnreachable
from noloco_node.transport.pacing import UNBOUNDED, Line
from noloco_node.transport.streams import FramedStream

Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]
"""This end of a stream: what is read from it, and written to it."""
StreamHandler = Callable[[PeerId, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
"""A function that serves one incoming stream of an authenticated peer until it returns."""


class StreamHost(Protocol):
    """What the transport needs of libp2p. Implementation: `PrivateP2P`."""

    @property
    def own_id(self) -> PeerId:
        """This node's peer id."""
        ...

    async def open_stream(self, peer: PeerId, protocol: str) -> Ends:
        """Open a stream; `PeerUnreachable` if that fails. Cancelling leaves nothing open."""
        ...

    async def serve_streams(self, protocol: str, handler: StreamHandler) -> None:
        """Hand incoming streams of `protocol` to `handler`, each in a task of its own."""
        ...

    async def stop_serving(self, protocol: str) -> None:
        """Take no more streams of `protocol`. Never fails."""
        ...


@dataclass(slots=True)
class Lease:
    """A stream lent to one request. It goes back to the pool only where `reusable` was set."""

    stream: FramedStream
    fresh: bool
    """Opened for this request, not taken from the pool."""
    reusable: bool = False


@dataclass(slots=True)
class _Idle:
    stream: FramedStream
    expiry: asyncio.TimerHandle


@dataclass(slots=True)
class _PeerStreams:
    slots: asyncio.Semaphore
    idle: list[_Idle] = field(default_factory=list[_Idle])
    users: int = 0


class StreamPool:
    """Lends streams. At most `per_peer` to one peer at a time; an idle one is closed after `idle_seconds`."""

    def __init__(
        self,
        host: StreamHost,
        protocol: str,
        per_peer: int,
        idle_seconds: float,
        line: Line = UNBOUNDED,
        nearby: Callable[[PeerId], Awaitable[Ends | None]] | None = None,
    ) -> None:
        """`nearby` opens streams to peers of this machine, and says None to all others."""
        self._host = host
        self._nearby = nearby
        self._line = line
        self._protocol = protocol
        self._per_peer = per_peer
        self._idle_seconds = idle_seconds
        self._peers: dict[PeerId, _PeerStreams] = {}
        self._lent: set[FramedStream] = set()
        self._closed = False
        self._nothing_lent = asyncio.Event()
        self._nothing_lent.set()

    @contextlib.asynccontextmanager
    async def lend(self, peer: PeerId, open_until: float, fresh: bool) -> AsyncGenerator[Lease]:
        """A stream to `peer` for one request, open by loop time `open_until`. PeerUnreachable if there is none."""
        streams = self._peers.get(peer)
        if streams is None:
            streams = self._peers[peer] = _PeerStreams(asyncio.Semaphore(self._per_peer))
        streams.users += 1
        try:
            lease = await self._take(peer, streams, open_until, fresh)
            try:
                yield lease
            finally:
                self._give_back(streams, lease)
        finally:
            streams.users -= 1
            self._forget_unused(peer, streams)

    async def _take(self, peer: PeerId, streams: _PeerStreams, open_until: float, fresh: bool) -> Lease:
        lease = None if fresh or streams.slots.locked() else self._from_idle(streams)
        if lease is None:
            lease = await self._wait_for_one(peer, streams, open_until, fresh)
        else:
            await streams.slots.acquire()  # there is one: nothing waits
        self._lent.add(lease.stream)
        self._nothing_lent.clear()
        return lease

    async def _wait_for_one(self, peer: PeerId, streams: _PeerStreams, open_until: float, fresh: bool) -> Lease:
        acquired = False
        try:
            async with asyncio.timeout_at(open_until):
                await streams.slots.acquire()
                acquired = True
                return (None if fresh else self._from_idle(streams)) or await self._open(peer)
        except BaseException as error:
            if acquired:
                streams.slots.release()
            if isinstance(error, TimeoutError):
                raise PeerUnreachable(f"no stream to {peer} opened in time") from None
            raise

    async def _open(self, peer: PeerId) -> Lease:
        if self._closed:
            raise PeerUnreachable("this transport is closed")
        ends = await self._nearby(peer) if self._nearby is not None else None
        there = ends or await self._host.open_stream(peer, self._protocol)
        stream = FramedStream(*there, self._line, nearby=ends is not None)
        if self._closed:
            stream.abort()
            raise PeerUnreachable("this transport is closed")
        return Lease(stream, fresh=True)

    def _from_idle(self, streams: _PeerStreams) -> Lease | None:
        while streams.idle:
            entry = streams.idle.pop()
            entry.expiry.cancel()
            if not entry.stream.ended:
                return Lease(entry.stream, fresh=False)
            entry.stream.abort()
        return None

    def _give_back(self, streams: _PeerStreams, lease: Lease) -> None:
        streams.slots.release()
        self._lent.discard(lease.stream)
        if not self._lent:
            self._nothing_lent.set()
        if not lease.reusable or self._closed or lease.stream.ended:
            lease.stream.abort()
            return
        timer = asyncio.get_running_loop().call_later(self._idle_seconds, self._expire, streams, lease.stream)
        streams.idle.append(_Idle(lease.stream, timer))

    def _expire(self, streams: _PeerStreams, stream: FramedStream) -> None:
        stream.abort()
        streams.idle = [entry for entry in streams.idle if entry.stream is not stream]
        for peer, known in list(self._peers.items()):
            if known is streams:
                self._forget_unused(peer, streams)

    def _forget_unused(self, peer: PeerId, streams: _PeerStreams) -> None:
        if not streams.users and not streams.idle and self._peers.get(peer) is streams:
            del self._peers[peer]

    async def close(self) -> None:
        """Close every stream; requests under way see theirs end. Returns when none is lent any more."""
        self._closed = True
        for streams in self._peers.values():
            for entry in streams.idle:
                entry.expiry.cancel()
                entry.stream.abort()
            streams.idle.clear()
        for stream in self._lent:
            stream.abort()
        await self._nothing_lent.wait()
