"""A relay: carries encrypted connections to peers that nobody can dial, if its owner wants that.

libp2p's circuit relay v2 is served by this node in the place of its p2pd. That one's relay cannot be turned off, serves
every stranger, and ends each connection after 128 KiB (decision 23). So every node runs this one, most of them to say
no. The two ends run TLS with each other through the relay, which can neither read nor change what they say.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable

from noloco_node import ambient
from noloco_node.aio import cancel_and_wait
from noloco_node.identity.addresses import REACH_SECONDS
from noloco_node.identity.peer_id import PeerId
from noloco_node.libp2p.daemon import PrivateP2P
from noloco_node.libp2p.relay_messages import (
    CONNECT,
    HOP,
    PLACE_SECONDS,
    RESERVE,
    STOP,
    Fields,
    Status,
    hop_answer,
    read_fields,
    reserve_answer,
    stop_request,
    stop_status,
    wanted_peer,
    write_message,
)
from noloco_node.transport.errors import PeerUnreachable

logger = logging.getLogger(__name__)

MOST_PLACES = 128
MOST_CIRCUITS = 2 * MOST_PLACES
MOST_CIRCUITS_OF_ONE = MOST_PLACES // 2
MOST_CIRCUITS_OF_A_PAIR = 4
"""The most circuits that may run from one caller to one peer. p2pd wants one; a second stands while the first has died
unnoticed. With more, one caller could use up all circuits of the peer that it calls."""
MOST_HANDSHAKES = 2 * MOST_PLACES
MOST_HANDSHAKES_OF_ONE = MOST_PLACES // 8
"""If so many requests of one peer are being read or refused, the next is dropped. A node may call many peers at once,
each in an instant. Only a peer that never finishes its requests has as many open."""

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def carried_freely(_count: int) -> None:
    """For a relay whose line has no bound."""


class CircuitRelay:
    """Serves circuits on a host between `start` and `close`, or refuses them all where it does not `carry`."""

    def __init__(
        self, host: PrivateP2P, *, carry: bool, count: Callable[[int], Awaitable[None]] = carried_freely
    ) -> None:
        """`count` is told how many bytes are to be passed on, and waits until they may be."""
        self._host = host
        self._count = count
        self._carry_for_others = carry
        self._places: dict[PeerId, float] = {}
        self._circuits: Counter[tuple[PeerId, PeerId]] = Counter()
        """The number of circuits by caller and called peer."""
        self._handshakes: Counter[PeerId] = Counter()
        self._serving: set[asyncio.Task[None]] = set()
        self._closed = False
        self.carried_bytes = 0
        """Encrypted bytes passed on so far, both directions."""

    @property
    def circuits(self) -> int:
        """Connections that it carries now."""
        return self._circuits.total()

    @property
    def places(self) -> int:
        """Peers that can be reached through it now."""
        self._forget_expired()
        return len(self._places)

    async def start(self) -> None:
        """Take requests from now on."""
        await self._host.serve_streams(HOP, self.serve_stream)

    async def close(self) -> None:
        """Take no more, and end every circuit."""
        self._closed = True
        await self._host.stop_serving(HOP)
        await cancel_and_wait(list(self._serving))
        if self.carried_bytes:
            logger.info("relayed %d MB for others", self.carried_bytes // 10**6)

    async def serve_stream(self, peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        full = self._handshakes[peer] >= MOST_HANDSHAKES_OF_ONE or self._handshakes.total() >= MOST_HANDSHAKES
        if self._closed or full:
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            wanted = await self._handshake(peer, (reader, writer))
            if wanted is not None:
                await self._connect(peer, wanted, (reader, writer))
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            logger.debug("a circuit of %s came to nothing: %r", peer, error)
        except asyncio.CancelledError:
            # The task is asyncio's own, which reports a cancelled one as a failure: `close` only wants it to end.
            if not self._closed:
                raise
        finally:
            self._serving.discard(task)
            writer.transport.abort()

    async def _handshake(self, peer: PeerId, stream: Stream) -> PeerId | None:
        """The peer that another wants to be connected to; None if its request has been answered."""
        self._handshakes[peer] += 1
        try:
            async with asyncio.timeout(REACH_SECONDS):
                try:
                    answer = await self._answer(peer, await read_fields(stream[0]))
                except ValueError:
                    answer = hop_answer(Status.MALFORMED_MESSAGE)
            if not isinstance(answer, bytes):
                return answer
            await _answer_and_wait(stream, answer)
            return None
        finally:
            self._handshakes.subtract((peer,))
            self._handshakes = +self._handshakes

    async def _answer(self, peer: PeerId, request: Fields) -> bytes | PeerId:
        """The answer to give at once, or the peer that another wants to be connected to. Raises ValueError if it asks
        for neither."""
        kind = request.get(1, RESERVE)
        if not self._carry_for_others:
            return hop_answer(Status.PERMISSION_DENIED)
        if kind == RESERVE:
            return await self._reserve(peer)
        if kind != CONNECT:
            raise ValueError("neither a reservation nor a connection")
        wanted = wanted_peer(request)
        refusal = self._refusal(peer, wanted)
        return wanted if refusal is None else hop_answer(refusal)

    async def _reserve(self, peer: PeerId) -> bytes:
        if peer not in self._places and self.places >= MOST_PLACES:
            await self._forget_disconnected()
        taken = self.places
        if peer not in self._places:
            if taken >= MOST_PLACES:
                return hop_answer(Status.RESOURCE_LIMIT_EXCEEDED)
            logger.info("relays for %s from now on (%d of %d places taken)", peer, taken + 1, MOST_PLACES)
        self._places[peer] = ambient.monotonic() + PLACE_SECONDS
        return reserve_answer(int(ambient.wall() + PLACE_SECONDS))

    def _refusal(self, caller: PeerId, wanted: PeerId) -> Status | None:
        self._forget_expired()
        if wanted not in self._places:
            return Status.NO_RESERVATION
        full = (
            self.circuits >= MOST_CIRCUITS
            or max(self._circuits_of(caller), self._circuits_of(wanted)) >= MOST_CIRCUITS_OF_ONE
            or self._circuits[caller, wanted] >= MOST_CIRCUITS_OF_A_PAIR
        )
        return Status.RESOURCE_LIMIT_EXCEEDED if full else None

    def _circuits_of(self, peer: PeerId) -> int:
        return sum(count for pair, count in self._circuits.items() if peer in pair)

    async def _connect(self, caller: PeerId, wanted: PeerId, stream: Stream) -> None:
        self._circuits[caller, wanted] += 1
        try:
            other = await self._reach(caller, wanted)
            if other is None:  # it counts until the answer has been taken: what is waited for must be bounded
                await _answer_and_wait(stream, hop_answer(Status.CONNECTION_FAILED))
                return
            try:
                await write_message(stream[1], hop_answer(Status.OK))
                await self._carry(stream, other)
            finally:
                other[1].transport.abort()
        finally:
            self._circuits.subtract(((caller, wanted),))
            self._circuits = +self._circuits

    async def _reach(self, caller: PeerId, wanted: PeerId) -> Stream | None:
        """A stream to the wanted peer on which it has taken the caller's connection; None where that fails."""
        try:
            return await self._announce(caller, wanted)
        except (PeerUnreachable, OSError, TimeoutError, ValueError, asyncio.IncompleteReadError) as error:
            logger.debug("%s wanted %s, which cannot be reached: %r", caller, wanted, error)
            return None

    async def _announce(self, caller: PeerId, wanted: PeerId) -> Stream:
        async with asyncio.timeout(REACH_SECONDS):
            reader, writer = await self._host.open_stream(wanted, STOP)
            try:
                await write_message(writer, stop_request(caller))
                status = stop_status(await read_fields(reader))
                if status != Status.OK:
                    raise ValueError(f"it answered {status}")
            except BaseException:
                writer.transport.abort()
                raise
            return reader, writer

    async def _carry(self, one: Stream, other: Stream) -> None:
        """Copy both ways until either end is gone."""
        copies = [asyncio.create_task(self._copy(one[0], other[1])), asyncio.create_task(self._copy(other[0], one[1]))]
        try:
            await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel_and_wait(copies)

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(256 * 1024):  # bytes: a quarter of a chunk of weights
                await self._count(len(data))
                writer.write(data)
                self.carried_bytes += len(data)
                await writer.drain()

    async def _forget_disconnected(self) -> None:
        """Drop the places of peers whose connection has gone; nobody is reached through it.

        Otherwise such a peer would hold its place for a while yet, and one machine with a key after another could hold
        them all.
        """
        with contextlib.suppress(OSError, TimeoutError):
            connected = await self._host.connections()
            self._places = {peer: until for peer, until in self._places.items() if peer in connected}

    def _forget_expired(self) -> None:
        now = ambient.monotonic()
        self._places = {peer: until for peer, until in self._places.items() if until > now}


async def _answer_and_wait(stream: Stream, answer: bytes) -> None:
    """Send an answer and let the asker end the stream. p2pd resets a stream that is closed at this end. Now and then
    what is still on its way is lost with it (decision 155)."""
    async with asyncio.timeout(REACH_SECONDS):
        await write_message(stream[1], answer)
        await stream[0].read(1)
