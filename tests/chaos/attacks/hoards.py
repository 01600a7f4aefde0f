"""Streams and sockets that are held open: each costs the other side a place."""

from __future__ import annotations

import asyncio
from typing import Any

from noloco_node.transport.errors import TransportError
from noloco_node.transport.libp2p import STREAM_PROTOCOL
from tests.chaos.attacks.life import LOST, Life, Victim

STREAMS = 300
LOOK_SECONDS = 1.0


async def streams(life: Life) -> None:
    """300 streams to every node, on which a byte of a frame comes and then nothing; those that end are opened anew."""
    attack = "300 streams"
    open_now: dict[Victim, list[Any]] = {victim: [] for victim in life.victims}
    try:
        while True:
            for victim, held in open_now.items():
                closed = [writer for reader, writer in held if reader.at_eof()]
                for writer in closed:
                    writer.transport.abort()
                life.tally.count(attack, "refused: closed by the other side", len(closed))
                held[:] = [(reader, writer) for reader, writer in held if not reader.at_eof()]
                await _open_more(life, attack, victim, held)
            await asyncio.sleep(LOOK_SECONDS)
    finally:
        for held in open_now.values():
            for _, writer in held:
                writer.transport.abort()


async def _open_more(life: Life, attack: str, victim: Victim, held: list[Any]) -> None:
    while len(held) < STREAMS:
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                reader, writer = await life.daemon.open_stream(victim.peer, STREAM_PROTOCOL)
                writer.write(b"N")
                await writer.drain()
        except (TransportError, OSError, TimeoutError):
            life.tally.count(attack, LOST)
            return
        life.tally.count(attack, "opened")
        held.append((reader, writer))
