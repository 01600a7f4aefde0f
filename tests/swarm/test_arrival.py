"""Joiners that come at the same time: each says where it goes before it downloads, and they spread out."""

from __future__ import annotations

import asyncio
import random

import pytest

from noloco_node.swarm.arrival import Arrival
from noloco_node.swarm.directory import PeerState
from noloco_node.swarm.memory_directory import MemoryDirectory, MemoryDirectoryHub
from noloco_node.swarm.transport import PeerId
from tests.support import eventually

WORK = (1.0, 1.0, 1.0)


class SlowDirectory(MemoryDirectory):
    """Every operation lets the others go first, so that all look before any has announced itself."""

    async def publish(self, record, life):  # type: ignore[no-untyped-def]
        """See `MemoryDirectory.publish`."""
        await asyncio.sleep(0)
        return await super().publish(record, life)

    async def refresh(self):  # type: ignore[no-untyped-def]
        """See `MemoryDirectory.refresh`."""
        await asyncio.sleep(0)
        return await super().refresh()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("count", [2, 3, 6, 12])
async def test_joiners_that_look_at_the_same_time_spread_over_the_stages(count: int, seed: int) -> None:
    """They all found an empty swarm. In the end no stage has more than one node above any other (two where a whole
    crowd came within one look), and every node is announced once."""
    hub = MemoryDirectoryHub(len(WORK))
    arrivals = [Arrival(SlowDirectory(hub), PeerId(f"joiner-{i:06d}"), 20.0) for i in range(count)]
    choices = (a.choose(WORK, range(3), random.Random(100 * seed + i)) for i, a in enumerate(arrivals))
    chosen = await asyncio.gather(*choices)
    counts = [chosen.count(stage) for stage in range(3)]
    assert max(counts) - min(counts) <= (1 if count < 6 else 2)
    view = await MemoryDirectory(hub).refresh()
    announced = [len(view.live(stage, hub.now(), PeerState.JOINING)) for stage in range(3)]
    assert announced == counts


async def test_an_announcement_lives_while_the_node_prepares_and_is_withdrawn_where_it_fails() -> None:
    """It is renewed within its life; a node that gives up does not hold its place."""
    hub = MemoryDirectoryHub(1)
    directory = MemoryDirectory(hub)

    def announced() -> bool:
        return bool(hub.rows[0]) and hub.rows[0][PeerId("joiner-000001")].record.state is PeerState.JOINING

    async def prepare_in_vain() -> None:
        async with Arrival(directory, PeerId("joiner-000001"), 0.3).announced(0):
            first = hub.rows[0][PeerId("joiner-000001")].expires
            await eventually(lambda: hub.rows[0][PeerId("joiner-000001")].expires > first + 0.1, what="renewed")
            assert announced()
            raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        await prepare_in_vain()
    assert not announced()
    assert (await directory.refresh()).live(0, hub.now()) == ()
