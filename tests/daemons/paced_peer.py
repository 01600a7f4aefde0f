"""One end of a line with a bound: gives large answers to its peer, or takes them; both beside small questions.

Arguments: `give` or `take`, the own host, the bounds up and down in Mbit/s (0: none), and for `take` the seconds and
the giver's address. The giver prints its address; the taker the bytes it took, and how long each small answer took.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

import torch

from noloco_node.config.node_settings import NodeSettings
from noloco_node.identity.addresses import parse_address
from noloco_node.identity.keys import load_or_create_identity
from noloco_node.identity.peer_id import PeerId
from noloco_node.libp2p.start import running_p2p
from noloco_node.transport.interface import Release
from noloco_node.transport.libp2p import Libp2pTransport
from noloco_node.transport.messages import JsonObject, Message, TensorSpec
from noloco_node.transport.pacing import line_of

LARGE = 1 << 18
AT_ONCE = 4


def _admit(_peer: PeerId, _header: JsonObject, _specs: tuple[TensorSpec, ...]) -> Release | None:
    return None


async def _large(_peer: PeerId, _request: Message) -> Message:
    return Message({}, (torch.zeros(LARGE, dtype=torch.uint8),))


async def _small(_peer: PeerId, _request: Message) -> Message:
    return Message({"here": True})


async def _take(transport: Libp2pTransport, giver: PeerId, seconds: float) -> dict[str, object]:
    until, waits, taken = time.monotonic() + seconds, list[float](), 0

    async def ask(method: str) -> None:
        await transport.call(giver, method, Message({}), timeout=60.0, progress=30.0, max_answer_bytes=LARGE)

    async def take() -> None:
        nonlocal taken
        while time.monotonic() < until:
            await ask("large")
            taken += LARGE

    async def look() -> None:
        while time.monotonic() < until:
            began = time.monotonic()
            await ask("hello.small")
            waits.append(time.monotonic() - began)
            await asyncio.sleep(0.1)

    await asyncio.gather(look(), *(take() for _ in range(AT_ONCE)))
    return {"taken": taken, "waits": sorted(waits)}


async def main() -> None:
    """Give until killed, or take for a while."""
    role, host, up, down = sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4])
    peers = tuple(sys.argv[6:7])
    with tempfile.TemporaryDirectory() as folder:
        identity = load_or_create_identity(Path(folder) / "key")
        async with running_p2p(NodeSettings(host=host, initial_peers=peers, map_port=False), identity) as daemon:
            transport = Libp2pTransport(daemon, line=line_of(up or None, down or None))
            transport.serve("large", _admit, _large, max_concurrent_per_peer=64)
            transport.serve("hello.small", _admit, _small, max_concurrent_per_peer=64)
            await transport.start()
            try:
                print(daemon.visible_addresses()[0], flush=True)
                if role == "take":
                    giver = parse_address(peers[0]).peer
                    print(json.dumps(await _take(transport, giver, float(sys.argv[5]))), flush=True)
                else:
                    await asyncio.to_thread(sys.stdin.read)
            finally:
                await transport.close()


if __name__ == "__main__":
    asyncio.run(main())
