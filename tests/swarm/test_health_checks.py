"""The peers that are asked whether they are there: all soon in a small swarm, and no crowd of ghosts starves
anybody."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from noloco_node.directory.health_checks import HealthChecks
from noloco_node.directory.records import PeerRecord
from noloco_node.directory.records_call import FEW_TOLD, MOST_TOLD, RECORDS, serve_records
from noloco_node.identity.peer_id import PeerId
from noloco_node.peers import scorecard as peer_stats
from noloco_node.simulator.loop import in_virtual_time
from noloco_node.transport.calls import ASKED_AT_ONCE
from noloco_node.transport.memory import MemoryNetwork, MemoryTransport
from tests.memory_directory import MemoryDirectory, MemoryDirectoryHub
from tests.support import alongside, eventually
from tests.worlds import record_of

RUN = "run-under-test"
OWN = PeerId("caller-of-rolls")


@dataclass
class Hall:
    """A node that checks on peers, and others that answer as they are told to."""

    network: MemoryNetwork
    transport: MemoryTransport
    records: list[PeerRecord]
    checks: HealthChecks
    changes: list[int]
    others: list[MemoryTransport]

    def there(self, peer: PeerRecord) -> bool:
        return self.transport.peer_stats.serves(PeerId(peer.peer_id), peer.stage)

    def add(self, name: str, *, run: str = RUN, says: int | None = 0, stage: int = 0) -> PeerRecord:
        """A node that is introduced at `stage` and says that it serves `says` of `run`."""
        other = MemoryTransport(self.network, PeerId(name))
        serve_records(other, run, MemoryDirectory(MemoryDirectoryHub(2)), lambda: says)
        self.others.append(other)
        self.records.append(record_of(name, stage))
        return self.records[-1]


@contextlib.asynccontextmanager
async def hall() -> AsyncIterator[Hall]:
    """Nobody is there yet."""
    network, records, changes = MemoryNetwork(), list[PeerRecord](), list[int]()
    transport = MemoryTransport(network, OWN)
    directory = MemoryDirectory(MemoryDirectoryHub(2))
    checks = HealthChecks(
        transport, directory, RUN, lambda: 0, 1.0, lambda: records, lambda: changes.append(1), random.Random(1)
    )
    others: list[MemoryTransport] = []
    try:
        yield Hall(network, transport, records, checks, changes, others)
    finally:
        for each in (transport, *others):
            await each.close()


async def test_who_answers_for_the_run_and_the_stage_is_there_and_nobody_else() -> None:
    """Another run, another stage than the record says, and no answer: none of these serves the stage."""
    async with hall() as made:
        good, far = made.add("peer-that-serves"), made.add("peer-far-away-00", says=1, stage=1)
        bad = [made.add("peer-of-another-run", run="another-run"), made.add("peer-elsewhere-00", says=1)]
        made.records.append(record_of("peer-that-is-none"))
        await made.checks.sweep(5.0)
        assert made.there(good)
        assert made.there(far)
        assert not any(made.there(each) for each in (*bad, made.records[-1]))
        caller = made.others[0].peer_stats
        assert caller.serves(OWN, 0), "who is asked knows the asker, too"


async def test_a_sweep_asks_hundreds_of_ghosts_and_finds_the_one_that_is_there() -> None:
    """No more at once than are allowed, and everybody once."""
    async with hall() as made:
        made.records += [record_of(f"ghost-{number:06d}") for number in range(400)]
        honest = made.add("peer-that-serves")
        await made.checks.sweep(20.0)
        assert made.there(honest)
        ghosts = [made.transport.peer_stats.of(PeerId(f"ghost-{number:06d}")) for number in range(400)]
        assert all(ghost.silences == 1 for ghost in ghosts)


async def test_beside_ghosts_who_calls_this_node_is_asked_first_and_calls_are_few() -> None:
    """A newcomer does not wait behind four hundred records that nobody stands behind."""
    async with hall() as made:
        made.records += [record_of(f"ghost-{number:06d}") for number in range(400)]
        made.checks.look()
        async with alongside(made.checks.run()):
            known = made.transport.peer_stats
            await eventually(lambda: sum(known.of(PeerId(r.peer_id)).silences for r in made.records) >= ASKED_AT_ONCE)
            newcomer = made.add("peer-newly-come")
            known.answered(PeerId("peer-newly-come"))
            made.checks.look()
            await eventually(lambda: made.there(newcomer), what="it is asked next")
            asked = sum(known.of(PeerId(r.peer_id)).silences for r in made.records)
            assert asked <= ASKED_AT_ONCE + 12
            await eventually(lambda: made.changes, what="whoever follows the health check is told")


async def test_who_falls_silent_is_asked_again_soon_and_no_longer_counts() -> None:
    """Two calls that are not answered."""
    async with hall() as made:
        stage_peer = made.add("peer-that-serves")
        async with alongside(made.checks.run()):
            made.checks.look()
            await eventually(lambda: made.there(stage_peer))
            made.network.kill(PeerId("peer-that-serves"))
            made.transport.peer_stats.silent(PeerId("peer-that-serves"))
            await eventually(lambda: not made.there(stage_peer), what="it is asked, and silent again")
            made.network.revive(PeerId("peer-that-serves"))
            await eventually(lambda: made.there(stage_peer), what="it is back")
    assert RECORDS.name in made.transport.traffic.sent


@pytest.mark.parametrize(
    ("has_called", "answers", "most"), [(False, 60.0, MOST_TOLD), (True, 60.0, FEW_TOLD), (True, -1.0, FEW_TOLD)]
)
async def test_who_has_called_and_said_what_it_serves_is_told_few_at_the_first_call(
    monkeypatch: pytest.MonkeyPatch, has_called: bool, answers: float, most: int
) -> None:
    """Of two that meet one had told the other twelve twice over, since each counted its own calls alone. With some
    hundred known, a peer that is called again only when it no longer counts as answering was told twelve each time."""
    told: list[int] = []
    monkeypatch.setattr(MemoryDirectory, "to_tell", lambda _self, most: told.append(most) or ())
    async with hall() as made:
        peer = PeerId(made.add("peer-that-serves").peer_id)
        if has_called:
            made.transport.peer_stats.answered(peer)
            made.transport.peer_stats.said(peer, 0)
        monkeypatch.setattr(peer_stats, "ANSWER_SECONDS", answers)
        made.checks.look()
        async with alongside(made.checks.run()):
            await eventually(lambda: told, what="a call")
            assert told[0] == most


async def test_a_record_that_goes_between_the_choice_and_the_call_ends_no_node() -> None:
    """A call is chosen, and before it begins the directory is read, which shows its peer no more. A ghost whose life is
    over must not end the node that was about to ask it."""
    async with hall() as made:
        made.records.append(record_of("ghost-about-to-go"))
        made.checks.look()
        async with alongside(made.checks.run()) as (running,):
            await asyncio.sleep(0)  # the call is chosen now, and not begun
            made.records.clear()
            honest = made.add("peer-that-serves")
            made.checks.look()
            await eventually(lambda: made.there(honest))
            assert not running.done()


LIFE = 20.0
"""Seconds, of a record in virtual time."""


class Caller:
    """A node that checks on peers, introduced to others by a hub; `asked` has the moments at which it was."""

    def __init__(self, number: int, network: MemoryNetwork, hub: MemoryDirectoryHub) -> None:
        self.record = record_of(f"a-caller-of-rolls-{number}")
        self.network = network
        self.transport = MemoryTransport(network, PeerId(self.record.peer_id))
        self.directory = MemoryDirectory(hub)
        self.asked: list[float] = []
        serve_records(self.transport, RUN, self.directory, self._stage)
        rng = random.Random(number)
        self.checks = HealthChecks(
            self.transport, self.directory, RUN, lambda: 0, LIFE, self.introduced, lambda: None, rng
        )

    def _stage(self) -> int:
        self.asked.append(asyncio.get_running_loop().time())
        return 0

    def introduced(self) -> list[PeerRecord]:
        live = self.directory.view.live(0, self.directory.now())
        return [each for each in live if each.peer_id != self.record.peer_id]

    def sees(self, other: Caller) -> bool:
        return self.transport.peer_stats.serves(other.transport.peer_id, 0)

    async def run(self) -> None:
        """It looks at the directory every two seconds."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.checks.run())
            while True:
                await self.directory.refresh()
                self.checks.look()
                await asyncio.sleep(2.0)


@contextlib.asynccontextmanager
async def callers(many: int) -> AsyncIterator[list[Caller]]:
    """So many, whose records live `LIFE` from now on and are not renewed by themselves."""
    network, hub = MemoryNetwork(), MemoryDirectoryHub(1)
    made = [Caller(number, network, hub) for number in range(many)]
    for each in made:
        await each.directory.publish(each.record, LIFE)
    running = [asyncio.create_task(each.run()) for each in made]
    try:
        yield made
    finally:
        for task in running:
            task.cancel()
        await asyncio.wait(running)
        for each in made:
            await each.transport.close()


def test_of_two_that_answer_each_other_one_asks_while_the_directory_brings_both_records() -> None:
    """Six nodes live for twenty lives of a record. Each pair speaks once in about two thirds of a life, not each of the
    two twice, and nobody ceases to count."""

    async def course() -> None:
        async with callers(6) as made:
            for _ in range(60):
                await asyncio.sleep(LIFE / 3)
                for each in made:
                    await each.directory.publish(each.record, LIFE)
                assert all(one.sees(other) and other.sees(one) for one, other in itertools.combinations(made, 2))
            pairs, calls = 15, sum(len(each.asked) for each in made)
            assert 20 * pairs <= calls <= 30 * pairs

    in_virtual_time(course)


def test_whose_record_grows_old_is_asked_for_a_newer_one_and_who_works_is_not_asked_before() -> None:
    """The other works with this node every second, and its record is not renewed in the directory."""

    async def course() -> None:
        async with callers(2) as (asking, working):
            for _ in range(19):
                await asyncio.sleep(1.0)
                asking.transport.peer_stats.worked(working.transport.peer_id)
                working.transport.peer_stats.worked(asking.transport.peer_id)
            asked = sorted(asking.asked + working.asked)
            assert len([at for at in asked if at < 1.0]) == 2, "neither has heard of the other yet"
            assert not [at for at in asked if 1.0 < at < 14.0]
            assert [at for at in working.asked if 14.0 < at < 19.0]

    in_virtual_time(course)


def test_who_falls_silent_after_it_called_is_asked_again_all_the_same() -> None:
    """That it was heard of late is no reason to wait."""

    async def course() -> None:
        async with callers(2) as (asking, silent):
            await asyncio.sleep(3.0)
            assert asking.sees(silent)
            known = asking.transport.peer_stats
            known.answered(silent.transport.peer_id)
            asking.network.kill(silent.transport.peer_id)
            known.silent(silent.transport.peer_id)
            await asyncio.sleep(4.0)
            assert not asking.sees(silent)

    in_virtual_time(course)


def test_ghosts_whose_records_are_always_nearly_over_are_asked_ever_more_rarely_all_the_same() -> None:
    """A stranger renews records that live a few seconds: to ask for a newer one is for peers that answer."""

    async def course() -> None:
        async with callers(2) as (asking, ghost):
            asking.network.kill(ghost.transport.peer_id)
            for _ in range(60):
                await ghost.directory.publish(ghost.record, LIFE / 5)
                await asyncio.sleep(1.0)
            assert 4 <= asking.transport.peer_stats.of(ghost.transport.peer_id).silences <= 9

    in_virtual_time(course)


def test_who_called_after_a_silence_is_asked_at_once_at_the_next_one() -> None:
    """What it did not answer before it was heard again hides nothing of what it does not answer now."""

    async def course() -> None:
        async with callers(2) as (asking, silent):
            await asyncio.sleep(3.0)
            known, peer = asking.transport.peer_stats, silent.transport.peer_id
            asking.network.kill(peer)
            known.silent(peer)
            await asyncio.sleep(0.5)
            assert not asking.sees(silent)
            known.answered(peer)  # it called, and the checks has noticed
            await asyncio.sleep(5.0)
            assert asking.sees(silent)
            known.silent(peer)
            await asyncio.sleep(2.0)
            assert not asking.sees(silent)

    in_virtual_time(course)
