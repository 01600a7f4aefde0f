"""Streams between the nodes of one user on one machine: the system's own sockets, and no p2pd in between.

The frames, bounds and checks are those of any other stream. Both ends prove their peer ids with their keys, as p2pd has
them do, and the kernel says whether the other process is of the same user. Where any of this fails, the stream goes by
p2pd instead.

A node listens under a name that follows from its peer id. The name is Linux's abstract kind: it is no file, ends with
the process, and is known in its own network namespace only. The temporary folder is part of it, so nodes with
temporary folders of their own (TMPDIR) deal with each other as if they were on two machines.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import socket
import struct
import sys
import tempfile
from functools import partial

from noloco_node import ambient
from noloco_node.identity.keys import Identity, sign_statement, signed_by
from noloco_node.identity.peer_id import PeerId
from noloco_node.tallies import FEW_PEERS
from noloco_node.transport.messages import BODY_FRAME_BYTES
from noloco_node.transport.pool import Ends, StreamHandler

logger = logging.getLogger(__name__)

STATEMENT = b"noloco stream on one machine 1"
"""A proof begins so: no other statement of a node does."""

_LENGTH = struct.Struct(">H")
_CREDENTIALS = struct.Struct("iII")
"""Process, user and group, as SO_PEERCRED gives them."""
_CALLER, _ANSWERER = b"caller", b"answerer"


class _NotProven(Exception):
    """The other end is of another user, or does not hold the key of the peer that it says it is."""


class SameMachine:
    """Opens and takes streams of nodes on this machine, as the node of this identity."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._server: asyncio.Server | None = None
        self._unproven: set[asyncio.StreamWriter] = set()
        self.given_up = 0
        """Streams so far that somebody here would have taken, and that went by p2pd since no proof came."""

    async def serve(self, handler: StreamHandler, within: float) -> None:
        """Hand streams to `handler`, each in a task of its own, once their peer has proven itself `within` so many
        seconds. Where the system has no such names, or another process has this node's, nobody comes."""
        if sys.platform != "linux":
            return
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            listener.bind(_name_of(self._identity.peer_id))
        except OSError as error:
            listener.close()
            logger.debug("nodes of this machine come by p2pd: %s", error)
            return
        taken = partial(self._taken, handler, within)
        self._server = await asyncio.start_unix_server(
            taken, sock=listener, limit=2 * BODY_FRAME_BYTES, backlog=FEW_PEERS
        )

    def close(self) -> None:
        """Take no more streams, and hang up on those whose peer is not proven."""
        if self._server is not None:
            self._server.close()
        for writer in self._unproven:
            writer.transport.abort()

    async def open(self, peer: PeerId) -> Ends | None:
        """A stream to `peer`; None where it is not found here, or does not prove itself. Cancelling leaves nothing
        open."""
        if sys.platform != "linux":
            return None
        try:
            link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except OSError:  # this process has no descriptor left
            return None
        try:
            link.connect(_name_of(peer))
            reader, writer = await asyncio.open_unix_connection(sock=link, limit=2 * BODY_FRAME_BYTES)
        except OSError:
            link.close()
            return None
        except BaseException:
            link.close()
            raise
        try:
            await self._agree(peer, reader, writer)
        except (_NotProven, OSError, asyncio.IncompleteReadError) as error:
            writer.transport.abort()
            self.given_up += 1
            logger.debug("%s is asked by p2pd although somebody answers for it on this machine: %r", peer, error)
            return None
        except BaseException:
            writer.transport.abort()
            raise
        return reader, writer

    async def _agree(self, peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Prove ourselves to `peer`, and see its proof."""
        _of_this_user(writer)
        own, nonce = self._identity.peer_id, _fresh()
        _put(writer, nonce, own.encode())
        nonces = nonce + await _take(reader)
        if not signed_by(peer, await _take(reader), _statement(_ANSWERER, own, peer, nonces)):
            raise _NotProven("its seal does not hold")
        _put(writer, sign_statement(self._identity, _statement(_CALLER, own, peer, nonces)))
        await _take(reader)  # it has seen ours

    async def _taken(
        self, handler: StreamHandler, within: float, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        # One more is ended, and its caller goes by p2pd: 5,000 that said nothing held as many descriptors of a node.
        if len(self._unproven) >= FEW_PEERS:
            writer.transport.abort()
            return
        self._unproven.add(writer)
        try:
            async with asyncio.timeout(within):
                peer = await self._caller(reader, writer)
        except (_NotProven, OSError, asyncio.IncompleteReadError) as error:  # a timeout is an OSError
            logger.debug("a stream of this machine is not taken: %r", error)
            writer.transport.abort()
            return
        finally:
            self._unproven.discard(writer)
        await handler(peer, reader, writer)

    async def _caller(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> PeerId:
        """The peer that proves itself on this stream."""
        _of_this_user(writer)
        theirs, name = await _take(reader), await _take(reader)
        own, nonce = self._identity.peer_id, _fresh()
        try:
            peer = PeerId(name.decode("ascii"))
        except ValueError:
            raise _NotProven("its name is no peer id") from None
        nonces = theirs + nonce
        _put(writer, nonce, sign_statement(self._identity, _statement(_ANSWERER, peer, own, nonces)))
        if not signed_by(peer, await _take(reader), _statement(_CALLER, peer, own, nonces)):
            raise _NotProven("its seal does not hold")
        _put(writer, b"")
        return peer


def _name_of(peer: PeerId) -> str:
    place = f"{os.getuid()} {os.path.realpath(tempfile.gettempdir())} {peer}"
    return f"\0noloco-1-{hashlib.sha256(place.encode()).hexdigest()}"


def _fresh() -> bytes:
    """What nobody has signed yet, of one length on both ends."""
    return ambient.token(32).encode()


def _statement(role: bytes, caller: PeerId, answerer: PeerId, nonces: bytes) -> bytes:
    """What one end seals: both numbers were made for this stream alone, so no seal serves twice, nor for the other
    end."""
    return b"\0".join((STATEMENT, role, caller.encode(), answerer.encode(), nonces))


def _of_this_user(writer: asyncio.StreamWriter) -> None:
    """_NotProven where the other end's process is of another user."""
    link = writer.get_extra_info("socket")
    _, user, _ = _CREDENTIALS.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if user != os.getuid():
        raise _NotProven(f"it is a process of user {user}")


def _put(writer: asyncio.StreamWriter, *parts: bytes) -> None:
    writer.writelines(_LENGTH.pack(len(part)) + part for part in parts)


async def _take(reader: asyncio.StreamReader) -> bytes:
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return await reader.readexactly(length)
