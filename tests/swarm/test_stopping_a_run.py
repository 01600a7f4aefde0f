"""Ways in which one machine with throw-away keys once stopped a run: each as small as it can be."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

from hivemind.proto import dht_pb2

from noloco_node.swarm.acquaintance import Acquaintances
from noloco_node.swarm.directory import PeerRecord
from noloco_node.swarm.guarded_dht import MOST_CALL_BACKS, node_id_of
from noloco_node.swarm.memory_directory import MemoryDirectory, MemoryDirectoryHub
from noloco_node.swarm.memory_transport import MemoryNetwork, MemoryTransport
from noloco_node.swarm.records_call import serve_records
from noloco_node.swarm.roll_call import RollCall
from noloco_node.swarm.transport import PeerId
from tests.support import eventually
from tests.swarm.hostile_dht import PING, throw_away_key
from tests.swarm.memory_dht import Member, MemoryP2P
from tests.swarm.test_directory import RUN as DHT_RUN
from tests.swarm.test_roll_call import OWN, RUN, record
from tests.swarm.virtual_time import in_virtual_time

FAR = PeerId("honest-peer-far-away")


def test_ghosts_at_the_near_stages_do_not_keep_a_far_one_from_being_asked() -> None:
    """They are always due, and the near stages came first: the far one was lost after a minute, and no microbatch was
    drawn any more."""

    async def away(clock: Callable[[], float]) -> int:
        network, seen_away = MemoryNetwork(), 0
        own, far = MemoryTransport(network, OWN), MemoryTransport(network, FAR)
        for node in (own, far):
            node._desk.acquaintances = Acquaintances(clock)
        serve_records(far, RUN, MemoryDirectory(MemoryDirectoryHub(3)), lambda: 2)
        records: list[PeerRecord] = [record(FAR, 2)]
        roll = RollCall(
            own,
            MemoryDirectory(MemoryDirectoryHub(3)),
            RUN,
            lambda: 0,
            20.0,
            lambda: records,
            lambda: None,
            random.Random(1),
        )
        await roll.sweep(5.0)
        records += [record(f"ghost-{number:06d}", number % 2) for number in range(400)]
        running = asyncio.create_task(roll.run())
        for _ in range(100):
            roll.look()
            await asyncio.sleep(1.0)
            seen_away += not own.acquaintances.serves(FAR, 2)
        running.cancel()
        await asyncio.wait((running,))
        await asyncio.gather(own.close(), far.close())
        return seen_away

    assert in_virtual_time(away) == 0


async def test_call_backs_that_hang_turn_no_newcomer_away() -> None:
    """As many as there are places for hang: the newcomer was told that nobody can reach it, and gave up."""
    network: dict[str, MemoryP2P] = {}
    first = await Member(network).join(DHT_RUN, 1)
    asked, free = list[str](), asyncio.Event()

    async def hang(_request: Any, context: Any) -> Any:
        asked.append(str(context.remote_id))
        await free.wait()
        return dht_pb2.PingResponse()

    strangers = [MemoryP2P(network, throw_away_key().peer_id) for _ in range(MOST_CALL_BACKS)]
    pings: list[asyncio.Task[Any]] = []
    for stranger in strangers:
        await stranger.add_protobuf_handler(PING, hang, dht_pb2.PingRequest)
        info = dht_pb2.NodeInfo(node_id=node_id_of(stranger.peer_id).to_bytes())
        request = dht_pb2.PingRequest(peer=info, validate=True)
        call = stranger.call_protobuf_handler(first.p2p.peer_id, PING, request, dht_pb2.PingResponse)
        pings.append(asyncio.create_task(call))
    await eventually(lambda: len(asked) == MOST_CALL_BACKS)
    newcomer = await Member(network).join(DHT_RUN, 1, first.peer)
    assert first.peer in newcomer.directory.neighbours()
    free.set()
    await asyncio.gather(*pings)
    await newcomer.directory.close()
    await first.directory.close()
