"""The holders of a bucket of the directory: found anew as nodes come and go, and nobody that stalls holds a look up."""

import asyncio
import random
from collections.abc import Sequence
from typing import Any, cast

import pytest
from hivemind.dht.routing import DHTID  # pyright: ignore[reportMissingTypeStubs]
from hivemind.p2p import PeerID  # pyright: ignore[reportMissingTypeStubs]

from noloco_node.directory.dht_node import REPLICAS, DhtNode, Nearest, node_id_of
from noloco_node.directory.dht_walk import Walker
from noloco_node.directory.records import REFRESH_SECONDS
from noloco_node.directory.store import HeldRecord
from noloco_node.identity.peer_id import PeerId
from noloco_node.peers.scorecard import ANSWER_SECONDS
from noloco_node.simulator.loop import in_virtual_time
from tests.inside import intake_of, node_of, records_of, walker_of
from tests.swarm.test_guarded_dht import members
from tests.swarm.test_look_ups import KEY as TOLD_KEY
from tests.swarm.test_look_ups import fill
from tests.worlds import record_of

KEY = DHTID.generate(source="a bucket")


def peers(first: int, last: int) -> list[Any]:
    return [PeerID(b"\x12\x20" + number.to_bytes(32, "big")) for number in range(first, last)]


class Net:
    """Every node knows all that live; those that stall never answer."""

    def __init__(self, live: Sequence[Any]) -> None:
        self.live = set(live)
        self.stall = False
        self.asked = list[tuple[Any, bool]]()

    def nearest(self, key: Any) -> Nearest:
        return sorted(((node_id_of(peer), peer) for peer in self.live), key=lambda each: key.xor_distance(each[0]))[:20]

    async def find(
        self, peer: Any, keys: Sequence[Any], neighbours: int = 20, *, records: bool = True
    ) -> dict[Any, Nearest] | None:
        self.asked.append((peer, records))
        if self.stall:
            await asyncio.sleep(3.0)
            return None
        return {key: self.nearest(key)[:neighbours] for key in keys} if peer in self.live else None

    def true_holders(self) -> tuple[Any, ...]:
        return tuple(peer for _, peer in self.nearest(KEY)[:REPLICAS])


def test_holders_of_a_bucket_are_those_that_are_nearest_now() -> None:
    async def scenario() -> None:
        net = Net(peers(0, 30))
        walker = Walker(cast("DhtNode", net), random.Random(1), asyncio.get_running_loop().time)
        assert await walker.glance(KEY)
        assert walker.near(KEY) == net.true_holders()
        net.live |= set(peers(30, 300))
        await asyncio.sleep(ANSWER_SECONDS)
        assert await walker.glance(KEY)
        assert walker.near(KEY) == net.true_holders()
        net.live -= set(net.true_holders())
        await asyncio.sleep(ANSWER_SECONDS)
        assert walker.near(KEY) == ()  # a publisher does not store at those for ever
        await walker.walk([KEY], records=False)
        assert walker.near(KEY) == net.true_holders()

    in_virtual_time(scenario)


def test_nobody_that_stalls_holds_up_a_look_at_a_bucket() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        net = Net(peers(0, 30))
        walker = Walker(cast("DhtNode", net), random.Random(1), loop.time)
        assert await walker.glance(KEY)
        net.stall, began = True, loop.time()
        assert not await walker.glance(KEY)
        assert loop.time() - began <= 2 * REFRESH_SECONDS + 0.01

    in_virtual_time(scenario)


@pytest.mark.parametrize("trip", [0.1, 0.6], ids=["near", "far"])
@pytest.mark.parametrize("stalling", [(0,), (0, 2), (0, 1, 2, 3)], ids=str)
def test_those_near_a_key_that_stall_hide_no_bucket(stalling: tuple[int, ...], trip: float) -> None:
    """They were waited for, three seconds each two of them, until the look was over. Two of the five nearest were
    enough to keep a bucket from every first look."""

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        net = Net(peers(0, 120))
        stalled = [net.true_holders()[index] for index in stalling]
        walker, find = Walker(cast("DhtNode", net), random.Random(1), loop.time), net.find
        walker.life = 20.0

        async def slow(peer: Any, keys: Sequence[Any], neighbours: int = 20, *, records: bool = True) -> Any:
            await asyncio.sleep(3.0 if peer in stalled else trip)
            return None if peer in stalled else await find(peer, keys, neighbours, records=records)

        net.find = slow  # type: ignore[method-assign]
        began = loop.time()
        assert await walker.glance(KEY)
        assert loop.time() - began < 4.0
        left = [peer for _, peer in net.nearest(KEY) if peer not in stalled]
        assert set(left[: REPLICAS - len(stalled)]) <= set(walker.near(KEY))
        await walker.close()
        assert len(asyncio.all_tasks()) == 1

    in_virtual_time(scenario)


@pytest.mark.parametrize("silence", [0.05, 3.0], ids=["refused", "stalled"])
@pytest.mark.parametrize("invented", [10, 200])
def test_who_names_invented_nodes_near_a_key_hides_no_bucket(invented: int, silence: float) -> None:
    """A few quick ones near a key took all twelve turns of a look with eight names each that nobody answers under."""
    invented_first = sorted(peers(10_000, 20_000), key=lambda peer: KEY.xor_distance(node_id_of(peer)))
    names, lying = invented_first[:invented], invented_first[invented : invented + 4]

    async def scenario() -> None:
        loop, rng = asyncio.get_running_loop(), random.Random(1)
        net = Net(peers(0, 120))
        true = net.true_holders()
        net.live |= set(lying)
        walker, find, told = Walker(cast("DhtNode", net), rng, loop.time), net.find, set[Any]()
        walker.life = 20.0

        async def answer(peer: Any, keys: Sequence[Any], neighbours: int = 20, *, records: bool = True) -> Any:
            await asyncio.sleep(0.03 if peer in lying else 0.1 if peer in net.live else silence)
            if peer in lying:
                return {key: [(node_id_of(each), each) for each in rng.sample(names, 8)] for key in keys}
            if records:
                told.add(peer)
            return await find(peer, keys, neighbours, records=records)

        net.find = answer  # type: ignore[method-assign]
        assert await walker.glance(KEY)
        assert told & set(true)

    in_virtual_time(scenario)


async def test_records_of_a_bucket_whose_holders_are_sought_come_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All six hold the same forty, and each of the five nearest is asked. A node that only stores there is told
    none."""
    reader, *holders = await members(7)
    for holder in holders:
        fill(holder, 40)
    told, take, walker = list[str](), intake_of(reader.directory).take, walker_of(reader.directory)

    def noted(teller: PeerId, key: bytes, signer: object, signed: object, expires: object) -> bool:
        told.append(str(signer))
        records_of(node_of(reader.directory)).put(key, PeerId(str(signer)), held_as(str(signer)), 0.0)
        return take(teller, key, signer, signed, expires)

    def held_as(signer: str) -> HeldRecord:
        return HeldRecord(record_of(PeerId(signer)), b"", intake_of(reader.directory).now() + 50.0, PeerId(signer))

    monkeypatch.setattr(intake_of(reader.directory), "take", noted)
    own = {holder.peer for holder in holders}
    walker.forget()
    await walker.walk([TOLD_KEY], records=False)
    assert not set(told) - own
    walker.forget()
    assert await walker.glance(TOLD_KEY)
    strangers = [signer for signer in told if signer not in own]
    assert len(strangers) == len(set(strangers)) == 40
    assert len(set(walker.near(TOLD_KEY))) == REPLICAS


def test_a_holder_that_stalls_first_hides_nothing_of_a_bucket_that_is_sought() -> None:
    """The others are asked a second later."""

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        net = Net(peers(0, 30))
        walker, find = Walker(cast("DhtNode", net), random.Random(1), loop.time), net.find
        first, at = net.true_holders()[0], dict[Any, float]()

        async def slow(peer: Any, keys: Sequence[Any], neighbours: int = 20, *, records: bool = True) -> Any:
            if records:
                at[peer] = loop.time()
                await asyncio.sleep(3.0 if peer == first else 0.1)
            return await find(peer, keys, neighbours, records=records)

        net.find = slow  # type: ignore[method-assign]
        began = loop.time()
        assert await walker.glance(KEY)
        assert set(at) == set(net.true_holders())
        assert max(at.values()) - began <= REFRESH_SECONDS / 2 + 0.01
        assert loop.time() - began <= REFRESH_SECONDS + 0.01, "nor is it waited for"

    in_virtual_time(scenario)
