"""Who holds a bucket of the directory: found anew as nodes come and go, and nobody that stalls holds a look up."""

import asyncio
import random
from collections.abc import Collection, Sequence
from typing import Any, cast

from hivemind.dht.routing import DHTID  # pyright: ignore[reportMissingTypeStubs]
from hivemind.p2p import PeerID  # pyright: ignore[reportMissingTypeStubs]

from noloco_node.directory.dht_node import REPLICAS, DhtNode, Nearest, node_id_of
from noloco_node.directory.dht_walk import HOLDERS_SECONDS, WALK_SECONDS, Walker
from noloco_node.simulator.loop import in_virtual_time

KEY = DHTID.generate(source="a bucket")


def peers(first: int, last: int) -> list[Any]:
    return [PeerID(b"\x12\x20" + number.to_bytes(32, "big")) for number in range(first, last)]


class Net:
    """Every node knows all that live; those that stall never answer."""

    def __init__(self, live: Sequence[Any]) -> None:
        self.live = set(live)
        self.stall = False
        self.asked = list[tuple[Any, Collection[str] | None]]()

    def nearest(self, key: Any) -> Nearest:
        return sorted(((node_id_of(peer), peer) for peer in self.live), key=lambda each: key.xor_distance(each[0]))[:20]

    async def find(
        self, peer: Any, keys: Sequence[Any], neighbours: int = 20, only: Collection[str] | None = None
    ) -> dict[Any, Nearest] | None:
        del neighbours
        self.asked.append((peer, only))
        if self.stall:
            await asyncio.sleep(3.0)
            return None
        return {key: self.nearest(key) for key in keys} if peer in self.live else None

    def true_holders(self) -> tuple[Any, ...]:
        return tuple(peer for _, peer in self.nearest(KEY)[:REPLICAS])


def test_holders_of_a_bucket_are_those_that_are_nearest_now() -> None:
    async def scenario() -> None:
        net = Net(peers(0, 30))
        walker = Walker(cast("DhtNode", net), random.Random(1), asyncio.get_running_loop().time)
        assert await walker.glance(KEY)
        assert walker.holders(KEY) == net.true_holders()
        net.live |= set(peers(30, 300))
        await asyncio.sleep(HOLDERS_SECONDS)
        assert await walker.glance(KEY)
        assert walker.holders(KEY) == net.true_holders()
        net.live -= set(net.true_holders())
        await asyncio.sleep(HOLDERS_SECONDS)
        assert walker.holders(KEY) == ()  # who publishes does not store at those for ever
        assert await walker.seek(KEY)
        assert walker.holders(KEY) == net.true_holders()

    in_virtual_time(scenario)


def test_nobody_that_stalls_holds_up_a_look_at_a_bucket() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        net = Net(peers(0, 30))
        walker = Walker(cast("DhtNode", net), random.Random(1), loop.time)
        assert await walker.glance(KEY)
        net.stall, began = True, loop.time()
        assert not await walker.glance(KEY)
        assert loop.time() - began <= WALK_SECONDS + 0.01

    in_virtual_time(scenario)
