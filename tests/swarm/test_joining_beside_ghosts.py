"""A node that comes to a swarm whose directory is full of records without nodes: it finds those that are there soon."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Sequence

import pytest

from noloco_node import ambient
from noloco_node.directory.health_checks import HealthChecks
from noloco_node.directory.records import FIRST_LOOK_SECONDS, SignedRecord
from noloco_node.directory.records_call import serve_records
from noloco_node.identity.peer_id import PeerId
from noloco_node.simulator.loop import in_virtual_time
from noloco_node.transport.memory import Fault, FaultKind, MemoryNetwork, MemoryTransport
from tests.memory_directory import MemoryDirectory, MemoryDirectoryHub
from tests.worlds import record_of

GHOSTS = 1000
RUN = "run-under-test"
JOINER, STAGE_PEER, ENTRANCE = PeerId("peer-that-joins"), PeerId("peer-of-the-stage"), PeerId("peer-at-the-door")


class Telling(MemoryDirectory):
    """Tells the stage peer's record, as a node that has met it does."""

    def to_tell(self, most: int) -> tuple[SignedRecord, ...]:
        return (SignedRecord(0, STAGE_PEER, 1e9, b"signed"),)[:most]


async def found_after(ghosts: int, entrances: Sequence[PeerId], seed: int) -> float:
    """Seconds of sweeps until the stage peer is there, beside ghosts that hang until each call's deadline."""
    network = MemoryNetwork()
    transports = [MemoryTransport(network, peer) for peer in (JOINER, STAGE_PEER, ENTRANCE)]
    joiner, stage_peer, entrance = transports
    for other, stage in ((stage_peer, 0), (entrance, 1)):
        serve_records(other, RUN, Telling(MemoryDirectoryHub(2)), lambda stage=stage: stage)
    records = [record_of(f"ghost-{number:06d}", number % 2) for number in range(ghosts)]
    for each in records:
        transports.append(MemoryTransport(network, PeerId(each.peer_id)))
        network.inject(Fault(FaultKind.DELAY, target=PeerId(each.peer_id), wait=asyncio.Event().wait))
    records += [record_of(STAGE_PEER), record_of(ENTRANCE, 1)]
    random.Random(seed).shuffle(records)
    own, rng = MemoryDirectory(MemoryDirectoryHub(2)), random.Random(seed)
    checks = HealthChecks(joiner, own, RUN, lambda: 0, 60.0, lambda: records, lambda: None, rng, entrances)
    try:
        for _ in itertools.takewhile(lambda _: not joiner.peer_stats.serves(STAGE_PEER, 0), range(100)):
            await checks.sweep(FIRST_LOOK_SECONDS)
        return ambient.monotonic()
    finally:
        for transport in transports:
            await transport.close()


@pytest.mark.parametrize("seed", range(3))
def test_who_entered_by_a_peer_that_knows_a_stage_peer_finds_it_beside_a_thousand_ghosts_within_seconds(
    seed: int,
) -> None:
    """The sweep in which it does is over soon, too: ghosts hold up nobody's start."""
    assert in_virtual_time(lambda: found_after(GHOSTS, [ENTRANCE], seed)) <= 4.0


def test_each_ghost_is_asked_once_in_a_start() -> None:
    """One look after another asks others, while anybody is there."""

    async def calls() -> list[int]:
        network = MemoryNetwork()
        joiner, stage_peer = MemoryTransport(network, JOINER), MemoryTransport(network, STAGE_PEER)
        serve_records(stage_peer, RUN, MemoryDirectory(MemoryDirectoryHub(2)), lambda: 0)
        records = [record_of(f"ghost-{number:06d}") for number in range(50)] + [record_of(STAGE_PEER)]
        own = MemoryDirectory(MemoryDirectoryHub(2))
        for _ in range(3):  # a node's stays and its replica check on peers one after the other
            checks = HealthChecks(joiner, own, RUN, lambda: 0, 60.0, lambda: records, lambda: None, random.Random(1))
            await checks.sweep(FIRST_LOOK_SECONDS)
        await joiner.close()
        await stage_peer.close()
        return [joiner.peer_stats.of(PeerId(each.peer_id)).silences for each in records[:-1]]

    assert set(in_virtual_time(calls)) == {1}
