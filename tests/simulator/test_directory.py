"""The directory in virtual time: the daemon's own, over modelled links.

What is published is found, copies die with their holders, and its bytes are those that real members were measured to
take.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from statistics import median

import pytest

from noloco_node import ambient
from noloco_node.aio import cancel_and_wait
from noloco_node.ambient import LOOK_SECONDS
from noloco_node.directory.dht import DhtDirectory
from noloco_node.directory.dht_node import FIND
from noloco_node.directory.membership import Membership, OwnFigures
from noloco_node.directory.records import PeerRecord, PeerState
from noloco_node.errors import ExitCode, UserError
from noloco_node.identity.peer_id import PeerId
from noloco_node.peers.scorecard import PeerStats
from noloco_node.simulator.directory import SimulatedDht, SimulatedP2P
from noloco_node.simulator.links import Links, PlainWay
from noloco_node.simulator.loop import in_virtual_time
from noloco_node.simulator.node import identity_of, peer_of

TRIP = 0.1


def record(peer: PeerId) -> PeerRecord:
    """The record of a node of stage 0."""
    return PeerRecord(peer_id=peer, stage=0, state=PeerState.TRAINING, protocol=1, version="1")


class Members:
    """Members of one DHT, the first of which is the others' entrance."""

    def __init__(self, life: float = 20.0, stages: int = 1) -> None:
        self.links = Links(PlainWay(lambda *_: TRIP / 2))
        self.dht = SimulatedDht(stages, self.links, "a run", life)
        self.p2p: list[SimulatedP2P] = []
        self.directories: list[DhtDirectory] = []
        self.met: list[PeerStats] = []

    async def __aenter__(self) -> Members:
        return self

    async def __aexit__(self, *_: object) -> None:
        for directory in self.directories:
            await directory.close()

    async def grow(self, count: int) -> list[DhtDirectory]:
        """Until there are so many."""
        while len(self.directories) < count:
            number = len(self.directories)
            self.met.append(PeerStats())
            self.p2p.append(self.dht.daemon(peer_of(number)))
            entrance = [peer_of(0)] if number else []
            self.directories.append(await self.dht.join(self.p2p[-1], identity_of(number), self.met[-1], entrance))
        return self.directories


def membership_of(directory: DhtDirectory, met: PeerStats, number: int, life: float = 20.0) -> Membership:
    """The membership of a node that trains one of two stages, and is asked by nobody."""
    figures = OwnFigures(clock=1e6, tokens_per_second=500.0, outer_rounds=7, capacity=600.0)
    membership = Membership(directory, met, peer_of(number), number % 2, 2, life, lambda: figures, lambda: None)
    membership.state = PeerState.TRAINING
    return membership


def received(links: Links, number: int) -> int:
    """Bytes of the directory."""
    return sum(octets for kind, octets in links.received[peer_of(number)].items() if kind.startswith("dht."))


def test_what_is_published_is_found_and_is_gone_with_those_that_held_it() -> None:
    """A few hold it; a node that asks after all of them died finds nothing."""

    async def work() -> None:
        async with Members() as members:
            writer, *_, reader = await members.grow(40)
            await reader.refresh()
            assert await writer.publish(record(peer_of(0)), 20.0)
            began = ambient.monotonic()
            assert peer_of(0) in (await reader.refresh()).stages[0]
            took = ambient.monotonic() - began
            assert took == pytest.approx(TRIP), "everybody near by: it sees nobody yet"
            holders = [number for number in range(40) if members.links.received[peer_of(number)]["dht.store"]]
            assert 1 <= len(holders) <= 8
            for p2p in members.p2p[:-1]:
                p2p.die()
            await asyncio.sleep(20.0)
            assert not (await reader.refresh()).stages[0].get(peer_of(0))

    in_virtual_time(work)


def test_a_side_that_is_cut_off_reads_and_writes_among_itself() -> None:
    """What the other side publishes comes once they are together again."""

    async def work() -> None:
        async with Members(3600.0) as members:
            every = await members.grow(8)
            members.links.part([peer_of(number) for number in range(4)], [peer_of(number) for number in range(4, 8)])
            await every[0].publish(record(peer_of(0)), 3600.0)
            await every[5].publish(record(peer_of(5)), 3600.0)
            assert set((await every[1].refresh()).stages[0]) == {peer_of(0)}
            assert set((await every[4].refresh()).stages[0]) == {peer_of(5)}
            members.links.part()
            await asyncio.sleep(60.0)
            for number in (0, 5):
                await every[number].publish(record(peer_of(number)), 3600.0)
            await every[1].refresh()
            assert set((await every[1].refresh()).stages[0]) == {peer_of(0), peer_of(5)}

    in_virtual_time(work)


def test_members_receive_what_real_ones_were_measured_to_receive() -> None:
    """Bytes a second (3,920 of 16 real ones on p2pd, 2026-11-26), within an eighth; each publishes
    and trains nothing."""
    count, real = 16, 3920.0

    async def work() -> float:
        async with AsyncExitStack() as stack:
            members = await stack.enter_async_context(Members(20.0, 2))
            for number, directory in enumerate(await members.grow(count + 1)):
                await asyncio.sleep(0.4)  # a node that starts at the same moment asks in step
                if number:  # the first is a seed
                    membership = membership_of(directory, members.met[number], number)
                    task = asyncio.create_task(membership.run())
                    stack.push_async_callback(cancel_and_wait, (task,))
            await asyncio.sleep(10.0)
            before = [received(members.links, number) for number in range(1, count + 1)]
            await asyncio.sleep(20.0)
            after = [received(members.links, number) for number in range(1, count + 1)]
            assert all(len(directory.view.stages[0]) == count // 2 for directory in members.directories[1:])
            return median(late - early for early, late in zip(before, after, strict=True)) / 20.0

    assert in_virtual_time(work) == pytest.approx(real, rel=0.125)


def test_a_holder_that_vanishes_empties_nobodys_view() -> None:
    """Its machine is gone, so that calls to it end by their deadlines only. Looks and renewals went one after the
    other, each of which waited for it, longer than records of a few seconds live."""
    life = 3.0

    async def work() -> None:
        async with AsyncExitStack() as stack:
            members = await stack.enter_async_context(Members(life, 2))
            every: list[Membership] = []
            for number, directory in enumerate(await members.grow(8)):
                every.append(membership_of(directory, members.met[number], number, life))
                task = asyncio.create_task(every[-1].run())
                stack.push_async_callback(cancel_and_wait, (task,))
            await asyncio.sleep(2.0 * life)
            stored = [members.links.received[peer_of(number)]["dht.store"] for number in range(8)]
            gone = stored.index(max(stored))  # a holder of both stages' keys
            members.links.part([peer_of(gone)])
            for _ in range(round(8.0 * life)):
                await asyncio.sleep(0.25)
                for number, membership in enumerate(every):
                    for stage in (0, 1) if number != gone else ():
                        there = {record.peer_id for record in membership.live(stage)} | {peer_of(number)}
                        assert there >= {peer_of(other) for other in range(stage, 8, 2) if other != gone}

    in_virtual_time(work)


def test_who_has_named_peers_begins_no_swarm_of_its_own_where_all_are_gone() -> None:
    """A daemon does not: it ends. The model had begun one."""

    async def work() -> None:
        async with Members() as members:
            await members.grow(2)
            members.p2p[1].die()
            joiner = members.dht.daemon(peer_of(2))
            members.links.lost = {peer_of(0)}.__contains__  # as one whose machine is gone: nothing has broken
            members.links.part([peer_of(0)])
            with pytest.raises(UserError) as raised:
                async with asyncio.timeout(600.0):
                    await members.dht.join(joiner, identity_of(2), PeerStats(), [peer_of(0), peer_of(1)])
            assert raised.value.exit_code is ExitCode.PEERS_UNREACHABLE

    in_virtual_time(work)


@pytest.mark.parametrize("leaves", [True, False])
def test_who_is_let_in_by_one_that_leaves_just_then_comes_in_by_another(
    monkeypatch: pytest.MonkeyPatch, leaves: bool
) -> None:
    """It knew nobody, asked nobody but the one that was gone, and took the run for one that had not begun. Where one
    request alone was lost nobody is gone."""

    async def work() -> None:
        async with Members() as members:
            for number, directory in enumerate(await members.grow(3)):
                await directory.publish(record(peer_of(number)), 20.0)
            joiner, finds = members.dht.daemon(peer_of(3)), list[str]()
            call = joiner.call_protobuf_handler

            async def called(peer: object, name: str, request: object, answer: object) -> object:
                finds.extend([name] if name == FIND else [])
                if name == FIND and len(finds) == 1:
                    if not leaves:
                        raise TimeoutError
                    members.p2p[0].die()
                return await call(peer, name, request, answer)

            monkeypatch.setattr(joiner, "call_protobuf_handler", called)
            began = ambient.monotonic()
            joined = await members.dht.join(joiner, identity_of(3), PeerStats(), [peer_of(0)])
            members.directories.append(joined)
            assert (ambient.monotonic() - began > LOOK_SECONDS) == leaves
            assert set((await joined.refresh()).stages[0]) >= {peer_of(1), peer_of(2)}

    in_virtual_time(work)
