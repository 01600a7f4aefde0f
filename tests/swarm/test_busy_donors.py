"""A joiner between donors that are busy and one that drips."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from noloco_node.config.run_spec import LimitsSpec
from noloco_node.identity.peer_id import PeerId
from noloco_node.node.first_state import FirstState, become_current
from noloco_node.node.replica import Replica
from noloco_node.state_transfer import donor_choice as late_join
from noloco_node.state_transfer import fetch as state_messages
from noloco_node.telemetry.events import StateSourceFailed
from noloco_node.transport.errors import Refusal
from noloco_node.transport.memory import Fault, FaultKind
from noloco_node.transport.messages import Message
from tests.inside import served_by
from tests.swarm.test_late_join import FIRST, OUTER, SECOND, is_copy_of, make_veteran
from tests.worlds import World, micro_spec, world

LIMITS = LimitsSpec(chunk_bytes=1 << 17, exchange_progress_seconds=0.2, record_seconds=20)
"""A state is a few chunks, and two of them take longer than a look at a donor's pace."""
DRIP_SECONDS = 0.12


def drip(replica: Replica, seconds: float) -> None:
    """From now on this donor gives one chunk in so many seconds."""
    method = served_by(replica.context.transport)[state_messages.CHUNK.name]
    honest, turn = method.handle, asyncio.Lock()

    async def slowly(peer: PeerId, message: Message) -> Message:
        async with turn:
            await asyncio.sleep(seconds)
            return await honest(peer, message)

    method.handle = slowly


@contextlib.asynccontextmanager
async def one_busy_and_one_dripping(
    monkeypatch: pytest.MonkeyPatch, times: int | None
) -> AsyncIterator[tuple[World, Replica]]:
    """The first donor is busy so many times (None: always), the second one drips, the third replica joins."""
    monkeypatch.setattr(late_join, "BUSY_PAUSE_SECONDS", (0.01, 0.02))
    async with world(micro_spec(stages=1, layers=4, outer=OUTER, limits=LIMITS), 3) as made:
        for veteran in made.replicas[:-1]:
            await make_veteran(veteran)
        drip(made.replicas[1], DRIP_SECONDS)
        made.network.inject(
            Fault(FaultKind.REFUSE, target=FIRST, method=state_messages.OPEN.name, times=times, reason=Refusal.BUSY)
        )
        yield made, made.replicas[-1]


async def test_a_donor_that_drips_does_not_keep_a_joiner_from_one_that_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that reads at the honest donors, and offers a state of its own, would hold a joiner for hours. If the slow
    one is all that gives, the busy one is asked again after each look at the slow one's pace."""
    async with one_busy_and_one_dripping(monkeypatch, times=1) as (made, joiner):
        assert await become_current(joiner) == FIRST
        assert await is_copy_of(joiner, made.replicas[0])


async def test_where_the_others_are_busy_for_ever_the_slow_donor_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has come of its state stays; that it is slow is told once."""
    async with one_busy_and_one_dripping(monkeypatch, times=None) as (made, joiner):
        donor, _ = await joiner.copier.copy_best(FirstState(joiner).possible_donors)
        assert donor == SECOND
        assert await is_copy_of(joiner, made.replicas[1])
        slow = [e for e in made.events[-1] if isinstance(e, StateSourceFailed) and PeerId(e.source) == SECOND]
        assert len(slow) <= 1


async def test_a_joiner_whose_patience_with_busy_donors_is_over_stays_with_the_slow_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is not left for one that does not give."""
    async with one_busy_and_one_dripping(monkeypatch, times=None) as (_, joiner):
        donor, _ = await joiner.copier.copy_best(FirstState(joiner).possible_donors, patience=0.0)
        assert donor == SECOND
