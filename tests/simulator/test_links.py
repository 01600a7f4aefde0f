"""The modelled links against arithmetic: shared capacity, round trips, parting."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from noloco_node import ambient
from noloco_node.identity.peer_id import PeerId
from noloco_node.simulator.links import Attachment, Links, SharedWay
from noloco_node.simulator.loop import in_virtual_time
from noloco_node.transport.memory import Parcel

A, B, C = (PeerId(name) for name in ("peer-a", "peer-b", "peer-c"))
MEGABYTE = 1_000_000
TRIPS = ((0.02, 0.1), (0.1, 0.04))


def way_of(**ends: Attachment) -> SharedWay:
    """With these peers on it."""
    way = SharedWay(TRIPS)
    for name, end in ends.items():
        way.attach({"a": A, "b": B, "c": C}[name], end)
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


def test_bytes_are_counted_by_what_a_parcel_stands_for() -> None:
    """At both ends, by method."""
    end = Attachment(0, 1e9, 1e9)

    async def work() -> None:
        links = Links(way_of(a=end, b=end), lambda parcel: 3.0 * parcel.octets)
        await links.carry(A, B, Parcel("outer.chunk", 100))
        assert links.sent == {A: {"outer.chunk": 300}}
        assert links.received == {B: {"outer.chunk": 300}}

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
