"""Replicas that are held in exchanges on purpose: no key and no crowd of them may have more than its part of the
time."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from functools import cache, partial

import pytest
import torch

from noloco_node import ambient
from noloco_node.aio import cancel_and_wait
from noloco_node.averaging import messages as exchange
from noloco_node.averaging.session import Session, floor_of, overdue, too_slow
from noloco_node.averaging.visits import Visits
from noloco_node.config.run_spec import LimitsSpec, OuterSpec
from noloco_node.identity.peer_id import PeerId
from noloco_node.node.replica import Replica
from noloco_node.outer.replica import Part
from noloco_node.outer.update import believed_tokens, claimed_tokens, token_weights
from noloco_node.simulator.device import SimulatedDevice
from noloco_node.simulator.loop import in_virtual_time
from noloco_node.telemetry.events import OuterStep
from noloco_node.training.compute_thread import Priority
from noloco_node.transport.errors import Refused, TransportError
from noloco_node.transport.memory import MemoryTransport
from noloco_node.transport.messages import Message
from tests.worlds import World, micro_spec, peer_name, world

SECONDS = {Priority.STEP: 0.2, Priority.BACKWARD: 0.2, Priority.FORWARD: 0.2, Priority.DRAW: 8.0}
LIMITS = LimitsSpec(chunk_bytes=4096, exchange_progress_seconds=4.0, record_seconds=20, grace_seconds=1)
OUTER = OuterSpec(inner_steps=2, min_inner_steps=1, codec="int4")
WATCHED = 600.0
"""Seconds for which the attack goes on."""
ONE, OTHER = PeerId("one"), PeerId("other")


class Holder:
    """Dials one victim without end, under one key after the other, and lets each chunk drip to the last moment."""

    def __init__(self, victim: Replica, keys: Iterator[MemoryTransport]) -> None:
        self._victim = victim
        self._keys = keys
        self.held = 0.0

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            began = ambient.monotonic()
            try:
                await self._hold(next(self._keys))
            except (Refused, TransportError):
                await asyncio.sleep(0.2)
            self.held += ambient.monotonic() - began

    async def _hold(self, transport: MemoryTransport) -> None:
        worker = self._victim.worker
        name, progress, outer = ambient.token(16), worker.progress, worker.outer
        proposal = exchange.Proposal(
            exchange=name,
            run=self._victim.context.spec.run_id,
            stage=0,
            contract=worker.contract,
            clock=progress.clock,
            tokens=640,
        )
        await self._call(transport, exchange.PROPOSE.name, proposal.model_dump(mode="json"))
        specs = self._victim.averaging.exchanger.opening_specs(outer.whole)
        opening = {"exchange": name, "clock": progress.clock}
        await self._call(transport, exchange.OPEN.name, opening, *(torch.zeros(spec.shape) for spec in specs))
        for index in range(outer.chunks):
            await asyncio.sleep(0.9 * LIMITS.exchange_progress_seconds)
            size = outer.codec.wire_elements(outer.chunk_size(index))
            chunk = torch.zeros(size, dtype=outer.codec.wire_dtype)
            await self._call(transport, exchange.CHUNK.name, {"exchange": name, "index": index}, chunk)

    async def _call(
        self, transport: MemoryTransport, method: str, header: dict[str, object], *tensors: torch.Tensor
    ) -> None:
        target = self._victim.context.transport.peer_id
        request = Message(header, tensors)
        await transport.call(target, method, request, timeout=10.0, progress=10.0, max_answer_bytes=1 << 20)


async def outer_steps_of_three(keys: Sequence[str], *, known: bool) -> tuple[list[int], int]:
    """Outer steps that each of three replicas takes while all of them are held whenever they let themselves be, and how
    many of them were paired. `known`: the keys have worked with them before."""
    spec = micro_spec(stages=1, layers=1, steps=1_000_000, outer=OUTER, limits=LIMITS)
    async with world(spec, replicas=3, device=partial(SimulatedDevice, SECONDS.__getitem__)) as made:
        tasks = [asyncio.create_task(replica.run()) for replica in made.replicas]
        await asyncio.sleep(60.0)
        strangers = [MemoryTransport(made.network, PeerId(name)) for name in keys]
        if known:
            for replica, key in itertools.product(made.replicas, keys):
                replica.context.transport.acquaintances.worked(PeerId(key))
                replica.averaging.standing._since[PeerId(key)] = None  # pyright: ignore[reportPrivateUsage]
        holders = [Holder(replica, itertools.cycle(strangers)) for replica in made.replicas] if strangers else []
        before = [_outer_steps(made, number) for number in range(3)]
        attack = [asyncio.create_task(holder.run()) for holder in holders]
        await asyncio.sleep(WATCHED)
        after = [_outer_steps(made, number) for number in range(3)]
        await cancel_and_wait(attack)
        for replica in made.replicas:
            replica.stop.set()
        await asyncio.wait(tasks, timeout=5)
        for transport in strangers:
            await transport.close()
    taken = [len(late) - len(early) for early, late in zip(before, after, strict=True)]
    honest = {peer_name(0, number) for number in range(3)}
    return taken, sum(
        e.partner in honest for early, late in zip(before, after, strict=True) for e in late[len(early) :]
    )


def _outer_steps(made: World, number: int) -> list[OuterStep]:
    return [e for e in made.events[number] if isinstance(e, OuterStep) and e.kind in ("paired", "alone")]


@cache
def usual_steps() -> tuple[list[int], int]:
    """Without an attack."""
    return in_virtual_time(lambda: outer_steps_of_three((), known=False), seed=1)


def test_throw_away_keys_that_let_exchanges_drip_do_not_stop_averaging() -> None:
    """Nine keys in rotation against three replicas of a stage: nine tenths of the steps are taken, and of the pairs."""
    keys = [f"throw-away-key-{number}" for number in range(9)]
    usual, pairs = usual_steps()
    held, pairs_held = in_virtual_time(lambda: outer_steps_of_three(keys, known=False), seed=1)
    assert sum(held) >= 0.9 * sum(usual), (usual, held)
    assert pairs_held >= 0.9 * pairs > 0, (pairs, pairs_held)


def test_a_stage_peer_that_counts_and_lets_exchanges_drip_has_its_part_of_the_time() -> None:
    """One that has worked with all three, and now holds them whenever it may: more than half of the steps go on."""
    (usual, pairs), (held, pairs_held) = (
        usual_steps(),
        in_virtual_time(lambda: outer_steps_of_three(["insider-0001"], known=True), seed=1),
    )
    assert sum(held) >= 0.5 * sum(usual), (usual, held)
    assert pairs_held >= 0.5 * pairs > 0, (pairs, pairs_held)


def test_a_home_line_averages_a_large_stage_and_what_drips_is_given_up_on_the_way() -> None:
    """20 Mbit/s each way and 0.2 s, one chunk of 1 MiB after the other, for stages of 50 MB and 500 MB; a chunk at each
    last moment is found out long before the last one."""
    chunk, limit = 1 << 20, 20.0
    for size in (50_000_000, 500_000_000):
        floor, session, now = floor_of(size, chunk, limit), session_of(), 0.0
        while session.sent < size:
            now += 0.2 + 2 * chunk / 2.5e6
            assert too_slow(session, now, limit, floor) is None
            session.sent, session.received, session.last_progress = session.sent + chunk, session.sent + chunk, now
    floor, session, now = floor_of(50_000_000, chunk, limit), session_of(), 0.0
    while overdue(session, now, limit, floor) is None:
        now += 0.9 * limit
        session.sent, session.received, session.last_progress = session.sent + chunk, session.sent + chunk, now
    assert now < 6 * limit
    session = session_of()
    assert "no chunk" in str(overdue(session, 21.0, limit, floor))


def session_of() -> Session:
    """One that began at 0 and in which nothing has moved."""
    part = Part(0, 1)
    return Session("a" * 32, OTHER, "dialled", None, part, started=0.0, last_progress=0.0)


def test_newcomers_together_have_a_twentieth_of_the_time_however_they_go_about_it() -> None:
    """Whether they come to the end or leave at once."""
    for each in (0.01, 3.0, 500.0):
        visits, now, held = Visits(), 0.0, 0.0
        for _ in range(50):
            while not visits.may_give(now):
                now += each / 10
            now, held = now + each, held + each
            visits.gave(each, now)
        assert held / now < 0.06, each


def test_a_visit_that_takes_the_time_of_several_outer_steps_costs_as_many() -> None:
    """Of the whole time that goes by, not of the slowest steps: the usual step is the median."""
    visits, now = Visits(), 0.0
    for took in (10.0, 10.0, 500.0, 10.0, 10.0, 10.0):
        now += took
        visits.stepped(now)
    visits.made(ONE, 2, 40.0)
    for _ in range(6):
        assert visits.too_many(ONE, 2)
        now += 10.0
        visits.stepped(now)
    assert not visits.too_many(ONE, 2)
    assert not visits.too_many(OTHER, 2)


def test_a_partner_that_takes_too_long_is_not_dialled_for_a_while() -> None:
    """What it cost beyond a usual step is made up for by steps with others, or alone."""
    visits, now = Visits(), 0.0
    for _ in range(4):
        now += 10.0
        visits.stepped(now)
    visits.dialled(ONE, 1, 10.0)
    assert not visits.too_slow(ONE, 1)
    visits.dialled(ONE, 1, 60.0)
    taken = 0
    while visits.too_slow(ONE, 1):
        now += 10.0
        visits.stepped(now)
        taken += 1
    assert 3 <= taken <= 5


def test_in_the_last_round_all_may_come_and_only_their_time_counts() -> None:
    """No outer step follows by which a part could grow."""
    visits = Visits()
    for number in range(4):
        visits.stepped(10.0 * number)
    visits.made(ONE, 5)
    visits.made(ONE, 5)
    assert visits.too_many(ONE, 5)
    visits.begin_last_round()
    for _ in range(9):
        assert not visits.too_many(ONE, 5)
        visits.made(ONE, 5, 5.0)
    visits.made(ONE, 5, 40.0)
    assert visits.too_many(ONE, 5)


def test_a_word_on_tokens_counts_as_far_as_own_steps_make_it_possible() -> None:
    """Without the bound a partner that says 2^53 takes half of what a replica's own work weighs."""
    own = claimed_tokens(6400, 100, 50)
    assert own == 3200, "more than H steps' worth is not claimed, since it is not believed"
    assert token_weights((own, 1 << 53)) == pytest.approx((0.5, 1.5))
    believed = believed_tokens(1 << 53, 6400, 100, 50)
    assert believed == 3520
    assert token_weights((own, believed))[0] > 0.95
    assert token_weights((1600, believed_tokens(1 << 53, 1600, 25, 50)))[0] > 0.62, "dialled at H_min"
    assert believed_tokens(3000, 6400, 100, 50) == 3000
    assert believed_tokens(99, 0, 0, 50) == 99, "who has done nothing loses nothing"
