"""Attacks by answers do what they say to any asker, in memory: if none fired, that must be the honest nodes' doing."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from noloco_node.config.run_spec import LimitsSpec, RunSpec
from noloco_node.identity.peer_id import PeerId
from noloco_node.sizing.footprint import footprint_of
from noloco_node.state_transfer import fetch as state_messages
from noloco_node.state_transfer.backups import StageCopies
from noloco_node.state_transfer.copies import ask_for_copy
from noloco_node.state_transfer.fetch import StateRequest, packed_size
from noloco_node.transport.calls import ask
from noloco_node.transport.interface import Transport
from noloco_node.transport.memory import MemoryNetwork, MemoryTransport
from noloco_node.transport.messages import TensorSpec
from tests.chaos.attacks import ATTACKS, Attack
from tests.chaos.attacks.life import BROKEN, Life, Tally, Victim, make_workers, throw_away_key
from tests.chaos.scenarios.stranger import ANSWERS, passed_over
from tests.support import alongside, eventually
from tests.worlds import micro_spec, peer_name, world

ASKER = PeerId("an-honest-peer")
SPEC = micro_spec(limits=LimitsSpec(chunk_bytes=4096, exchange_progress_seconds=0.05)).model_copy(
    update={"standby_copies": 1}
)
"""With deadlines of which the stranger uses up a share, but nobody here keeps them."""


@contextlib.asynccontextmanager
async def alive(
    spec: RunSpec, network: MemoryNetwork, attack: Attack | None = None, victims: list[Victim] | None = None
) -> AsyncIterator[Life]:
    """A stranger's life in memory, in which it carries out one attack."""
    identity = throw_away_key()
    transport = MemoryTransport(network, identity.peer_id)
    in_memory: dict[str, Any] = {"daemon": None, "transport": transport}
    life = Life(
        spec, victims or [], identity, tally=Tally(), rng=random.Random(0), workers=make_workers(spec), **in_memory
    )
    task = asyncio.ensure_future(attack(life)) if attack else None
    try:
        if task:
            await eventually(lambda: life.served)
        yield life
        assert not task or not task.done(), "an attack goes on"
    finally:
        if task:
            task.cancel()
            await asyncio.wait((task,))
        await life.close_workers()
        await transport.close()


async def test_a_dial_of_the_stranger_is_answered_badly_each_time() -> None:
    """Proposals and openings are each an offence to the dialler."""
    attack = "bad answers to exchanges"
    async with (
        world(micro_spec(stages=1)) as made,
        alive(made.replicas[0].context.spec, made.network, ATTACKS[attack]) as life,
    ):
        [honest] = made.replicas
        for dials in range(1, 9):
            assert not await honest.averaging.dial(life.transport.peer_id)
            assert honest.context.transport.conduct.offences == {"bad_answer": dials}
        counts = life.tally.counts[attack]
        assert counts["proposals answered"] == 8
        assert 0 < counts["openings answered"] < 8
        assert not counts[BROKEN]


async def test_who_asks_the_dripping_donor_gets_an_offer_a_manifest_and_chunks_that_fit_it() -> None:
    """It looks like an idle donor in every way but its pace."""
    attack, network = "dripping donor", MemoryNetwork()
    transport: Transport = MemoryTransport(network, ASKER)
    async with alive(SPEC, network, ATTACKS[attack]) as life:
        donor, worker = life.transport.peer_id, life.workers[1]
        patient: dict[str, Any] = {"seconds": 30.0}
        request = StateRequest(run=SPEC.run_id, stage=1, contract=worker.contract)
        offer = (await ask(transport, donor, state_messages.OFFER, request, **patient)).header
        assert offer.readers == 0
        size = packed_size(worker.state_sizes())
        chunks = -(-size // SPEC.limits.chunk_bytes)
        specs = (TensorSpec("u8", (chunks, state_messages.DIGEST_BYTES)),)
        answer = await ask(transport, donor, state_messages.OPEN, request, specs=specs, **patient)
        manifest, digests = state_messages.read_manifest(transport, donor, answer, request, size=size)
        first = request.model_copy(update={"snapshot": manifest.snapshot})
        specs = (TensorSpec("u8", (SPEC.limits.chunk_bytes,)),)
        chunk = await ask(transport, donor, state_messages.CHUNK, first, specs=specs, **patient)
        assert state_messages.digest(chunk.tensors[0].numpy().data) == digests[0]
        assert life.tally.counts[attack] == {"offers made": 1, "manifests given": 1, "chunks dripped": 1}
    await cast("MemoryTransport", transport).close()


async def test_a_hostile_copy_is_taken_by_a_guard_that_asks_for_it() -> None:
    """Signed, and of the size that belongs: only whose work was seen, and what others offer, speaks against it."""
    attack, network = "hostile copies of a stage", MemoryNetwork()
    transport = MemoryTransport(network, ASKER)
    async with alive(SPEC, network, ATTACKS[attack]) as life:
        parameters, keeper = footprint_of(SPEC).parameters, life.transport.peer_id
        offered = (keeper, *await ask_for_copy(SPEC, 1, transport, keeper, parameters[1], seconds=10.0))
        copies = StageCopies(SPEC, parameters, transport, random.Random(0))
        taken = await cast("Any", copies)._fetch(offered, idle_share=0.0)
        assert taken.manifest.source == life.transport.peer_id
        assert bool((taken.weights == 3e4).all())
        counts = life.tally.counts[attack]
        assert counts["copies offered"] == 1
        assert counts["chunks given"] > 1
        assert not counts[BROKEN]
    await transport.close()


@pytest.mark.parametrize("method", ANSWERS.values())
def test_an_attack_that_nobody_asked_for_is_met_only_where_it_shows(method: str) -> None:
    """A key that carries it out must have been there, honest nodes must have asked others, and such a key never.
    Another key of the stranger may be asked: it has other answers."""
    there, asked = {"strangers": ["stranger", "late"]}, {"asked": method, "peer": "honest"}
    keys, honest = {"stranger"}, {"honest", "late"}
    another = {"asked": method, "peer": "another stranger"}
    assert passed_over([there, asked, asked, another], keys, honest, method) == (
        "never asked: there in 1 looks of honest nodes, which asked each other 2 times"
    )
    assert not passed_over([{"strangers": ["late"]}, asked], keys, honest, method)
    assert not passed_over([there, another], keys, honest, method)
    assert not passed_over([there, asked, {"asked": method, "peer": "stranger"}], keys, honest, method)


async def test_endless_evaluations_arrive_and_are_rationed() -> None:
    """The attack fires, and all that is left of it are refusals: no weight moves and the ration ends."""
    attack = "endless evaluations"
    async with world(micro_spec()) as made:
        [_, later] = made.replicas
        later.pipeline.open()
        victims = [Victim(later.context.transport.peer_id, 1, ""), Victim(peer_name(0, 0), 0, "")]
        async with alive(later.context.spec, made.network, None, victims) as life:
            async with alongside(ATTACKS[attack](life)):
                await eventually(lambda: life.tally.counts.get(attack, {}).get("refused: busy", 0) > 30)
            answered = life.tally.counts[attack]["answered"]
    spec = later.context.spec
    assert 0 < answered * spec.microbatch_tokens <= 4 * spec.evaluation.windows * spec.data.sequence_length
