"""A machine that slept for a while: it works for nobody with its old weights, and has a stage peer's state at once."""

from __future__ import annotations

import asyncio
import random

import pytest

from noloco_node.aio import cancel_and_wait
from noloco_node.averaging.matchmaking import Dial, PairingState, Window, decide
from noloco_node.config.run_spec import OuterSpec
from noloco_node.directory.clocks import STANDS_BACK_SECONDS, FarBehind, PeerClocks
from noloco_node.directory.records import PeerState
from noloco_node.identity.peer_id import PeerId
from noloco_node.telemetry.events import OuterStep
from noloco_node.transport.errors import Refusal, Refused
from tests.support import eventually
from tests.swarm.test_pipeline import ask, request
from tests.worlds import micro_spec, peer_name, run_ahead, world

LAG = 1000
WINDOW = Window(inner_steps=10, min_inner_steps=3)


async def test_who_wakes_far_behind_refuses_work_until_it_has_a_stage_peers_state_which_it_fetches_by_itself() -> None:
    """It need not wait until somebody dials it, nor until it has taken as many steps as an outer step takes."""
    async with world(micro_spec(outer=OuterSpec(max_lag_tokens=LAG)), replicas=3) as made:
        sleeper, *stage_peers = made.of_stage(1)
        for replica in made.replicas:
            for participant in replica.participants:
                participant.open()
        for stage_peer in stage_peers:
            await run_ahead(stage_peer, 5 * LAG)
        for replica in made.replicas:
            await replica.membership.announce(PeerState.TRAINING)
        await sleeper.membership.refresh()
        with pytest.raises(Refused, match="far behind") as refused:
            await ask(made, request(made))
        assert refused.value.reason is Refusal.BUSY, "no failure: the sender tries another at once"
        for replica in made.replicas:
            await replica.membership.refresh()
        steps = asyncio.create_task(sleeper.outer_steps.run())
        await eventually(
            lambda: any(isinstance(e, OuterStep) and e.kind == "caught_up" for e in made.events[3]), what="a state"
        )
        assert sleeper.worker.progress.clock == stage_peers[0].worker.progress.clock
        assert (await ask(made, request(made))).header["tokens"] > 0
        await cancel_and_wait([steps])
        assert made.replicas[3].context.transport.peer_id == peer_name(1, 0)


def test_who_is_given_no_state_works_again_after_a_while_and_stands_back_once_only() -> None:
    """Stage peers' records may be lies: they keep nobody from working for longer than a bounded time."""
    now, own, stage_peers = [0.0], [0.0], [5000.0, 6000.0, 100.0]
    clocks = PeerClocks(LAG, own=lambda: own[0], estimated=lambda: stage_peers, recorded=lambda: stage_peers)
    behind = FarBehind(clocks, lambda: now[0])
    assert not behind.stands_back, "nothing is known yet"
    behind.look()
    assert behind.stands_back
    now[0] = STANDS_BACK_SECONDS - 1
    behind.look()
    assert behind.stands_back
    now[0] = STANDS_BACK_SECONDS
    behind.look()
    assert not behind.stands_back
    own[0] = 4500.0
    behind.look()
    own[0] = 0.0
    behind.look()
    assert behind.stands_back, "it was with the others in between"


def test_who_is_far_behind_dials_whatever_the_counts_and_never_steps_alone_for_it() -> None:
    """Any peer that answers tells it to take its state."""
    stage_peer = PeerId("stage_peer")

    def state(*stage_peers: PeerId, behind: bool) -> PairingState:
        return PairingState(0, 0, stage_peers=lambda: stage_peers, engaged=False, next_try=0.0, behind=behind)

    rng = random.Random(0)
    assert decide(state(stage_peer, behind=True), WINDOW, now=1.0, rng=rng) == Dial(stage_peer)
    assert decide(state(stage_peer, behind=False), WINDOW, now=1.0, rng=rng) is None
    assert decide(state(behind=True), WINDOW, now=1.0, rng=rng) is None
