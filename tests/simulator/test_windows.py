"""The windows of p2pd's streams against what real ones took, and which stream a call has."""

from __future__ import annotations

import asyncio
import random

import pytest

from noloco_node import ambient
from noloco_node.identity.peer_id import PeerId
from noloco_node.simulator.links import KEPT_SECONDS, Attachment, KeptStreams, Links, SharedWay
from noloco_node.simulator.loop import in_virtual_time
from noloco_node.transport.errors import BrokenStream, Refusal, Refused, TransportError
from noloco_node.transport.memory import Parcel

A, B = PeerId("peer-a"), PeerId("peer-b")
KIB = 1024
ROUND_TRIP, BYTES_A_SECOND = 0.1, 12.5e6
BESIDE_SECONDS = 0.02
"""What real transfers took beyond it, on a busy machine, and longer only where they grew."""


def way(rate: float = BYTES_A_SECOND) -> SharedWay:
    """100 Mbit/s, or so many bytes a second, and 100 ms."""
    made = SharedWay([[ROUND_TRIP]], random.Random(1))
    for peer in (A, B):
        made.attach(peer, Attachment(0, rate, 1e9))
    return made


def seconds_of(octets: int, times: int, pause: float, rate: float = BYTES_A_SECOND) -> list[float]:
    """The seconds of each of so many calls one after another, `pause` seconds after the answer to the one before."""

    async def work() -> list[float]:
        links, took = Links(way(rate)), list[float]()
        for _ in range(times):
            with links.lend(A, B) as stream:
                began = ambient.monotonic()
                await links.carry(A, B, Parcel("forward", octets + 16), stream)
                took.append(ambient.monotonic() - began)
                await asyncio.sleep(ROUND_TRIP / 2)
            await asyncio.sleep(pause)
        return took

    return in_virtual_time(work)


@pytest.mark.parametrize(
    ("kib", "pause", "measured"),
    [
        (64, 0.0, [57, 56, 64, 57, 55, 54]),
        (128, 0.6, [61, 60, 60, 59, 60, 61]),
        (256, 0.0, [163, 172, 84, 168, 74, 71, 79, 160, 71, 75]),
        (256, 0.6, [164, 166, 164, 161, 162, 159]),
        (512, 0.0, [277, 185, 91, 192, 92, 92, 92, 192, 92, 92]),
        (1024, 0.0, [419, 237, 146, 229, 136, 242, 139, 227, 139, 252]),
        (1024, 1.0, [427, 228, 227, 228, 229, 226, 249, 232, 227]),
    ],
)
def test_calls_take_as_long_as_real_ones_on_a_stream_of_p2pd(kib: int, pause: float, measured: list[int]) -> None:
    """Milliseconds one way on a new stream over a shaped link of 100 Mbit/s and 100 ms. A window has room for all of
    it, or the sender waits for most of a round trip."""
    simulated = seconds_of(kib * KIB, len(measured), pause)
    late = [real / 1e3 - made for real, made in zip(measured, simulated, strict=True)]
    assert all(-0.01 < each < BESIDE_SECONDS + 0.01 for each in late), (late, simulated)


def test_the_stream_that_was_given_back_last_is_lent_until_it_has_lain_for_too_long() -> None:
    """So one that is warm is used again."""
    kept = KeptStreams()
    first, second = kept.take(0.0), kept.take(0.0)
    assert first is not second
    kept.give_back(first, 1.0)
    kept.give_back(second, 2.0)
    assert kept.take(3.0) is second
    kept.give_back(second, 4.0)
    assert kept.take(2.0 + KEPT_SECONDS) is second  # the first one has gone meanwhile
    assert kept.take(2.0 + KEPT_SECONDS) is not first


@pytest.mark.parametrize(("error", "stays"), [(Refused(Refusal.BUSY, ""), True), (BrokenStream(""), False)])
def test_a_stream_is_kept_after_a_refusal_and_not_after_a_call_that_broke(error: TransportError, stays: bool) -> None:
    """As the nodes' own pool does it."""

    async def work() -> bool:
        links = Links(way())
        with pytest.raises(type(error)), links.lend(A, B) as first:
            raise error
        with links.lend(A, B) as second:
            return second is first

    assert in_virtual_time(work) is stays
