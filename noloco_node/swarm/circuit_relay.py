"""A relay: carries encrypted connections to peers that nobody can dial, where its owner wants that.

libp2p's circuit relay v2, served by this node in the place of its p2pd: that one's relay cannot be turned off, serves
every stranger, and ends each connection after 128 KiB (decision 150). So every node runs this one, most of them to say
no. The two ends run TLS with each other through the relay, which can neither read nor change what they say.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter

from noloco_node.aio import cancel_and_wait
from noloco_node.swarm.circuit_messages import (
    CONNECT,
    HOP,
    RESERVE,
    STOP,
    Status,
    hop_answer,
    read_fields,
    reserve_answer,
    stop_request,
    stop_status,
    wanted_peer,
    write_message,
)
from noloco_node.swarm.stream_pool import StreamHost
from noloco_node.swarm.transport import PeerId, PeerUnreachable

logger = logging.getLogger(__name__)

PLACE_SECONDS = 60.0
"""How long a place is kept for a peer that does not ask again."""
MOST_PLACES = 128
MOST_CIRCUITS = 256
MOST_CIRCUITS_OF_ONE = 64
HANDSHAKE_SECONDS = 10.0
COPY_BYTES = 256 * 1024

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class CircuitRelay:
    """Serves circuits on a host between `start` and `close`, or refuses them all where it does not `carry`."""

    def __init__(self, host: StreamHost, *, carry: bool) -> None:
        self._host = host
        self._carry_for_others = carry
        self._places: dict[PeerId, float] = {}
        self._circuits: Counter[PeerId] = Counter()
        self._serving: set[asyncio.Task[None]] = set()
        self.carried_bytes = 0
        """Encrypted bytes passed on so far, both directions."""

    @property
    def circuits(self) -> int:
        """Connections that it carries now."""
        return self._circuits.total() // 2

    @property
    def places(self) -> int:
        """Peers that can be reached through it now."""
        self._forget_expired()
        return len(self._places)

    async def start(self) -> None:
        """Take requests from now on."""
        await self._host.serve_streams(HOP, self._serve)

    async def close(self) -> None:
        """Take no more, and end every circuit."""
        await self._host.stop_serving(HOP)
        await cancel_and_wait(list(self._serving))

    async def _serve(self, peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            await self._answer(peer, (reader, writer))
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            logger.debug("a circuit of %s came to nothing: %r", peer, error)
        finally:
            self._serving.discard(task)
            writer.transport.abort()

    async def _answer(self, peer: PeerId, stream: Stream) -> None:
        reader, writer = stream
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            try:
                request = await read_fields(reader)
                kind = request.get(1, RESERVE)
                wanted = wanted_peer(request) if kind == CONNECT else None
            except ValueError:
                await _send_and_close(writer, hop_answer(Status.MALFORMED_MESSAGE))
                return
        if not self._carry_for_others:
            await _send_and_close(writer, hop_answer(Status.PERMISSION_DENIED))
        elif kind == RESERVE:
            await _send_and_close(writer, self._reserve(peer))
        elif wanted is not None:
            await self._connect(peer, wanted, stream)
        else:
            await _send_and_close(writer, hop_answer(Status.MALFORMED_MESSAGE))

    def _reserve(self, peer: PeerId) -> bytes:
        self._forget_expired()
        if peer not in self._places and len(self._places) >= MOST_PLACES:
            return hop_answer(Status.RESOURCE_LIMIT_EXCEEDED)
        if peer not in self._places:
            logger.info("relays for %s from now on", peer)
        self._places[peer] = time.monotonic() + PLACE_SECONDS
        return reserve_answer(int(time.time() + PLACE_SECONDS))

    def _refusal(self, caller: PeerId, wanted: PeerId) -> Status | None:
        self._forget_expired()
        if wanted not in self._places:
            return Status.NO_RESERVATION
        most = max(self._circuits[caller], self._circuits[wanted])
        if self.circuits >= MOST_CIRCUITS or most >= MOST_CIRCUITS_OF_ONE:
            return Status.RESOURCE_LIMIT_EXCEEDED
        return None

    async def _connect(self, caller: PeerId, wanted: PeerId, stream: Stream) -> None:
        refusal = self._refusal(caller, wanted)
        if refusal is not None:
            await _send_and_close(stream[1], hop_answer(refusal))
            return
        self._circuits.update((caller, wanted))
        try:
            try:
                other = await self._announce(caller, wanted)
            except (PeerUnreachable, OSError, TimeoutError, ValueError, asyncio.IncompleteReadError) as error:
                logger.debug("%s wanted %s, who cannot be reached: %r", caller, wanted, error)
                await _send_and_close(stream[1], hop_answer(Status.CONNECTION_FAILED))
                return
            try:
                await write_message(stream[1], hop_answer(Status.OK))
                await self._carry(stream, other)
            finally:
                other[1].transport.abort()
        finally:
            self._circuits.subtract((caller, wanted))
            self._circuits = +self._circuits

    async def _announce(self, caller: PeerId, wanted: PeerId) -> Stream:
        """A stream to the wanted peer on which it has taken the caller's connection."""
        async with asyncio.timeout(HANDSHAKE_SECONDS):
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
            while data := await reader.read(COPY_BYTES):
                writer.write(data)
                self.carried_bytes += len(data)
                await writer.drain()

    def _forget_expired(self) -> None:
        now = time.monotonic()
        self._places = {peer: until for peer, until in self._places.items() if until > now}


async def _send_and_close(writer: asyncio.StreamWriter, message: bytes) -> None:
    async with asyncio.timeout(HANDSHAKE_SECONDS):
        await write_message(writer, message)
        writer.close()
        await writer.wait_closed()
