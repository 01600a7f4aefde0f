"""The modelled DHT: what is published is found, copies grow stale and die with who held them, bytes are counted."""

from __future__ import annotations

import asyncio

from noloco_node import ambient
from noloco_node.directory.dht_node import BUCKET_SIZE
from noloco_node.directory.records import PeerRecord, PeerState
from noloco_node.identity.peer_id import PeerId
from noloco_node.simulator.directory import FIND, FORGOTTEN_SECONDS, SimulatedDht, SimulatedDirectory
from noloco_node.simulator.links import Links, PlainWay
from noloco_node.simulator.loop import in_virtual_time
from noloco_node.simulator.node import peer_of
from noloco_node.transport.acquaintance import Acquaintances


def record(peer: PeerId) -> PeerRecord:
    """Of a node of stage 0."""
    return PeerRecord(peer_id=peer, stage=0, state=PeerState.TRAINING, protocol=1, version="1")


def made(count: int, links: Links) -> list[SimulatedDirectory]:
    """Members that have not met."""
    dht = SimulatedDht(1, links)
    return [SimulatedDirectory(dht, peer_of(number), Acquaintances()) for number in range(count)]


def test_what_is_published_is_found_a_round_trip_later_until_its_life_ends() -> None:
    """And nothing of it where all that held it died before they were asked."""

    async def work() -> None:
        links = Links(PlainWay(lambda *_: 0.05))
        writer, *others, reader = made(60, links)
        assert await writer.publish(record(peer_of(0)), 20.0)
        began = ambient.monotonic()
        assert peer_of(0) in (await reader.refresh()).stages[0]
        assert ambient.monotonic() - began == 0.1
        assert links.sent[peer_of(59)][FIND] > 0
        holders = [peer for peer, sent in links.received.items() if "dht.store" in sent]
        assert 1 <= len(holders) <= 8
        for other in (writer, *others):
            other.die()
        await asyncio.sleep(FORGOTTEN_SECONDS)
        assert reader.view.stages[0]
        assert not (await reader.refresh()).stages[0]

    in_virtual_time(work)


def test_a_side_that_is_cut_off_reads_and_writes_among_itself() -> None:
    """What the other side publishes comes once they are together again."""

    async def work() -> None:
        links = Links(PlainWay(lambda *_: 0.05))
        every = made(8, links)
        links.part([peer_of(number) for number in range(4)], [peer_of(number) for number in range(4, 8)])
        await every[0].publish(record(peer_of(0)), 3600.0)
        await every[5].publish(record(peer_of(5)), 3600.0)
        assert set((await every[1].refresh()).stages[0]) == {peer_of(0)}
        assert set((await every[4].refresh()).stages[0]) == {peer_of(5)}
        links.heal()
        await asyncio.sleep(60.0)
        assert set((await every[1].refresh()).stages[0]) == {peer_of(0), peer_of(5)}

    in_virtual_time(work)


def test_bytes_of_a_look_are_those_of_all_that_are_asked() -> None:
    """20 nodes near the key with 10 rows each, which their writers brought there."""

    async def work() -> None:
        links = Links()
        every = made(BUCKET_SIZE + 1, links)
        for number in range(10):
            await every[number].publish(record(peer_of(number)), 3600.0)
        before = links.received[peer_of(20)][FIND]
        await every[20].refresh()
        read = links.received[peer_of(20)][FIND] - before
        rows = sum(sent["dht.store"] > 0 for sent in links.sent.values())
        assert rows == 10
        assert read > 10 * 391

    in_virtual_time(work)
