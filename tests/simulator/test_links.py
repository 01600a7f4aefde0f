"""The modelled links against arithmetic: shared capacity, round trips, loss, relays, parting."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable

import pytest

from noloco_node import ambient
from noloco_node.identity.peer_id import PeerId
from noloco_node.simulator.links import MATHIS, SEGMENT_OCTETS, STALL_SECONDS, Attachment, Links, SharedWay
from noloco_node.simulator.loop import in_virtual_time
from noloco_node.transport.errors import PeerUnreachable
from noloco_node.transport.memory import Parcel

A, B, C, RELAY = (PeerId(name) for name in ("peer-a", "peer-b", "peer-c", "relay"))
MEGABYTE = 1_000_000
TRIPS = ((0.02, 0.1), (0.1, 0.04))


def way_of(**ends: Attachment) -> SharedWay:
    """With these peers on it."""
    way = SharedWay(TRIPS, random.Random(1))
    for name, end in ends.items():
        way.attach({"a": A, "b": B, "c": C, "relay": RELAY}[name], end)
    return way


async def when_done(*transfers: Awaitable[None]) -> list[float]:
    """The moments at which they end, which all begin now."""

    async def one(transfer: Awaitable[None]) -> float:
        await transfer
        return ambient.monotonic()

    return list(await asyncio.gather(*map(one, transfers)))


def times(carries: Callable[[SharedWay], list[Awaitable[None]]], **ends: Attachment) -> list[float]:
    """When each of these is through."""

    async def work() -> list[float]:
        return await when_done(*carries(way_of(**ends)))

    return in_virtual_time(work)


def test_a_transfer_takes_half_a_round_trip_and_its_bytes_at_the_narrower_end() -> None:
    """4 MB at 2 MB/s down, from one region to another."""
    ends = {"a": Attachment(0, 8.0 * MEGABYTE, MEGABYTE), "b": Attachment(1, MEGABYTE, 2.0 * MEGABYTE)}
    assert times(lambda way: [way.carry(A, B, 4 * MEGABYTE)], **ends) == [pytest.approx(2.05)]


def test_two_transfers_halve_each_other_at_the_end_that_they_share_and_only_there() -> None:
    """From one sender to two receivers; the second is half as long, so the first has all once that is through. The
    other way round nothing is shared."""
    end = Attachment(0, MEGABYTE, 4.0 * MEGABYTE)
    ends = {"a": end, "b": end, "c": end}
    together = times(lambda way: [way.carry(A, B, 2 * MEGABYTE), way.carry(A, C, MEGABYTE)], **ends)
    assert together == [pytest.approx(3.01), pytest.approx(2.01)]
    apart = times(lambda way: [way.carry(A, B, 2 * MEGABYTE), way.carry(B, A, MEGABYTE)], **ends)
    assert apart == [pytest.approx(2.01), pytest.approx(1.01)]


def test_what_is_given_up_leaves_its_part_to_the_others() -> None:
    """A cancelled transfer takes nothing from that moment on."""
    end = Attachment(0, MEGABYTE, 4.0 * MEGABYTE)

    async def work() -> float:
        way = way_of(a=end, b=end, c=end)
        given_up = asyncio.ensure_future(way.carry(A, C, 9 * MEGABYTE))
        asyncio.get_running_loop().call_later(1.01, given_up.cancel)
        return (await when_done(way.carry(A, B, 2 * MEGABYTE)))[0]

    assert in_virtual_time(work) == pytest.approx(2.51)


def test_a_small_message_neither_waits_for_transfers_nor_slows_them() -> None:
    """A kilobyte beside two megabytes."""
    end = Attachment(0, MEGABYTE, MEGABYTE)
    found = times(lambda way: [way.carry(A, B, 2 * MEGABYTE), way.carry(A, B, 1000)], a=end, b=end)
    assert found == [pytest.approx(2.01), pytest.approx(0.011)]


def test_loss_stalls_small_messages_and_holds_transfers_to_what_a_stream_brings() -> None:
    """A tenth of the packets at either end."""
    loss = 1 - 0.9**2
    end = Attachment(0, 1e9, 1e9, loss=0.1)
    small = times(lambda way: [way.carry(A, B, 0.0) for _ in range(2000)], a=end, b=end)
    stalled = [each for each in small if each > 0.01]
    assert stalled == [pytest.approx(0.01 + STALL_SECONDS + 0.02)] * len(stalled)
    assert len(stalled) / len(small) == pytest.approx(loss, abs=0.03)
    rate = MATHIS * SEGMENT_OCTETS / (0.02 * math.sqrt(loss))
    assert times(lambda way: [way.carry(A, B, MEGABYTE)], a=end, b=end)[0] % 0.22 == pytest.approx(
        (0.01 + MEGABYTE / rate) % 0.22
    )


def test_through_a_relay_it_is_two_hops_and_the_relays_links_count() -> None:
    """A node that nobody can dial is reached at the relay's uplink; from the relay itself there is no detour."""
    fast, slow = Attachment(0, 8.0 * MEGABYTE, 8.0 * MEGABYTE), Attachment(1, MEGABYTE, MEGABYTE)
    hidden = Attachment(0, 8.0 * MEGABYTE, 8.0 * MEGABYTE, relay=RELAY)
    found = times(lambda way: [way.carry(A, B, MEGABYTE)], a=fast, b=hidden, relay=slow) + times(
        lambda way: [way.carry(RELAY, B, MEGABYTE)], b=hidden, relay=slow
    )
    assert found == [pytest.approx(0.1 + 1.0), pytest.approx(0.05 + 1.0)]


def test_bytes_are_weighed_and_counted_for_both_ends_and_the_relay() -> None:
    """As a model of larger tensors says; a dead relay lets no stream open."""
    end, hidden = Attachment(0, 1e9, 1e9), Attachment(0, 1e9, 1e9, relay=RELAY)

    async def work() -> None:
        links = Links(way_of(a=end, b=hidden, relay=end), lambda parcel: 3.0 * parcel.octets)
        await links.carry(A, B, Parcel("outer.chunk", 100))
        assert links.sent == {A: {"outer.chunk": 300}, RELAY: {"relay": 300}}
        assert links.received == {B: {"outer.chunk": 300}}
        links.lost = RELAY.__eq__
        with pytest.raises(PeerUnreachable):
            await links.open(A, B)

    in_virtual_time(work)


def test_what_is_slowed_takes_so_many_times_as_long_and_what_is_parted_waits() -> None:
    """That holds for what is under way, too, until it is undone."""
    end = Attachment(0, MEGABYTE, MEGABYTE)

    async def work() -> list[float]:
        loop, links = asyncio.get_running_loop(), Links(way_of(a=end, b=end))
        loop.call_later(1.01, links.way.slow, A, 2.0)
        done = await when_done(links.way.carry(A, B, 2 * MEGABYTE))
        links.part([A], [B])
        loop.call_later(10.0, links.part)
        return done + await when_done(links.open(A, B))

    assert in_virtual_time(work) == [pytest.approx(3.01), pytest.approx(13.01)]
