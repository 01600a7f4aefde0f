"""Requests to honest nodes: exchanges that come to nothing or to NaN, microbatches that teach nonsense."""

from __future__ import annotations

import asyncio
import base64
import secrets
import time
from typing import Any

import msgpack
import torch

from noloco_node.averaging import session as exchange_messages
from noloco_node.averaging.session import opening_specs
from noloco_node.directory import records_call
from noloco_node.identity.peer_id import PeerId
from noloco_node.pipeline import messages as microbatch
from noloco_node.pipeline.activations import encode
from noloco_node.state_transfer.fetch import OPEN as STATE_OPEN
from noloco_node.transport.messages import Message
from tests.chaos.attacks.life import Life, Victim, repeat
from tests.chaos.attacks.records import ghost, own_record

IN_FLIGHT = 24
ANSWER_BYTES = 1 << 20
MOST_NEWCOMERS = 8
MOST_TOKENS = 1 << 53
"""What every proposal says of the work behind it."""


async def nan_exchanges(life: Life) -> None:
    """A proposal in order, then a gauge of NaN; where that is taken, chunks of NaN."""

    async def once(victim: Victim) -> None:
        name = await _proposed(life, "exchanges of NaN", victim)
        if name is None:
            return
        opening = {"exchange": name, "clock": life.clock}
        bad = life.rng.random() < 0.5
        tensors = [torch.full(shape, float("nan") if bad else 0.0) for shape in _opening_shapes(life, victim.stage)]
        opened = await _call(life, "exchanges of NaN", victim, exchange_messages.OPEN.name, opening, *tensors)
        if opened is not None:
            await _call(
                life,
                "exchanges of NaN",
                victim,
                exchange_messages.CHUNK.name,
                {"exchange": name, "index": 0},
                _chunk(life, victim.stage),
            )

    await repeat("exchanges of NaN", life, once, 0.5)


async def lying_clocks(life: Life) -> None:
    """Exchanges of noise that are carried to their end, by a partner that says it is at the end of time. Peers whose
    dials this key waits for are spared."""
    attack = "lying clocks"

    async def once(victim: Victim) -> None:
        if not life.waits_for(victim):
            await _carry_to_the_end(life, attack, victim, clock=1e18)

    await repeat(attack, life, once, 0.5)


async def dripping_exchanges(life: Life) -> None:
    """One exchange with each victim at a time, and the next as soon as that is over. Each chunk comes at the last
    moment: a partner that holds a replica keeps all others away."""
    last_moment = 0.9 * life.spec.limits.exchange_progress_seconds

    async def hold(victim: Victim) -> None:
        while True:
            await _carry_to_the_end(life, "dripping exchanges", victim, clock=life.clock, pause=last_moment)
            await asyncio.sleep(0.1)

    async with asyncio.TaskGroup() as group:
        for victim in life.victims:
            group.create_task(hold(victim))


async def _carry_to_the_end(life: Life, attack: str, victim: Victim, *, clock: float, pause: float = 0.0) -> None:
    """An exchange of noise with a victim, with so many seconds before each chunk."""
    name = await _proposed(life, attack, victim)
    if name is None:
        return
    gauge = [1e-3 * torch.randn(shape) for shape in _opening_shapes(life, victim.stage)]
    opening = {"exchange": name, "clock": clock}
    if await _call(life, attack, victim, exchange_messages.OPEN.name, opening, *gauge) is None:
        return
    for index, chunk in enumerate(_chunks(life, victim.stage)):
        await asyncio.sleep(pause)
        named = {"exchange": name, "index": index}
        if await _call(life, attack, victim, exchange_messages.CHUNK.name, named, chunk) is None:
            return
    life.tally.count(attack, "carried to the end")


async def abandoned_proposals(life: Life) -> None:
    """Exchanges that are agreed on, and then nothing comes."""

    async def once(victim: Victim) -> None:
        await _proposed(life, "abandoned proposals", victim)

    await repeat("abandoned proposals", life, once, 0.5)


async def malformed_requests(life: Life) -> None:
    """Headers of the wrong type for every method that has one."""
    methods = (
        *(
            microbatch.MICROBATCH.name,
            exchange_messages.PROPOSE.name,
            exchange_messages.OPEN.name,
            exchange_messages.CHUNK.name,
        ),
        *("copy.open", "copy.chunk", STATE_OPEN.name, "contribution.receipt", "hello.access", "hello.dial_back"),
    )

    async def once(victim: Victim) -> None:
        method = life.rng.choice(methods)
        header = {"run": life.spec.run_id, "stage": "zero", "exchange": 7, "clock": -1.0, "id": [1, 2]}
        await life.call("malformed requests", victim.peer, method, header)

    await repeat("malformed requests", life, once, 2.0)


async def told_ghosts(life: Life) -> None:
    """This peer's claimed place, and ghosts told as peers that it knows, in every stage and with extreme clocks. A
    later asker is told as well."""
    attack = "told ghosts"

    def header(peer: PeerId) -> dict[str, Any]:
        until, stages = time.time() + 600.0, range(life.spec.stages)
        claimed = life.claimed(peer)
        made = [(claimed, own_record(life, claimed))]
        made += [(stage, ghost(life, stage, until, clock=1e17, capacity=1e12)) for stage in stages for _ in range(6)]
        told = [
            {
                "stage": stage,
                "peer": msgpack.unpackb(record.subkey),
                "expires": record.expires,
                "signed": base64.b64encode(msgpack.unpackb(record.value)).decode(),
            }
            for stage, record in made
        ]
        return {"run": life.spec.run_id, "stage": claimed, "records": told[: records_call.MOST_TOLD]}

    async def handle(peer: PeerId, message: Message) -> Message:
        stage = message.header.get("stage")
        if peer not in victims and isinstance(stage, int) and len(life.newcomers) < MOST_NEWCOMERS:
            life.newcomers[peer] = stage
        told = Message(header(peer))
        life.tally.count(attack, "told as an answer")
        return told

    victims = {victim.peer for victim in life.victims}
    life.serve(attack, records_call.RECORDS.name, handle)

    async def once(victim: Victim) -> None:
        await life.call(attack, victim.peer, records_call.RECORDS.name, header(victim.peer))
        for peer in list(life.newcomers):
            await life.call(attack, peer, records_call.RECORDS.name, header(peer))

    await repeat(attack, life, once, 0.5)


async def random_labels(life: Life) -> None:
    """An origin that teaches noise, with 24 microbatches in flight to every stage after its own."""
    await _endless(life, "random labels", "train")


async def endless_evaluations(life: Life) -> None:
    """Forwards that teach nothing and serve no training, 24 in flight."""
    await _endless(life, "endless evaluations", "evaluate")


async def _endless(life: Life, attack: str, mode: microbatch.Mode) -> None:
    async def one_after_another() -> None:
        while True:
            later = [victim for victim in life.victims if victim.stage > 0 and victim.peer not in life.banned_by]
            if not later:
                await asyncio.sleep(1.0)
                continue
            victim = life.rng.choice(later)
            header, activations, labels = made_microbatch(life, victim.stage)
            answer = await life.call(
                attack,
                victim.peer,
                microbatch.MICROBATCH.name,
                {**header, "mode": mode},
                activations,
                labels,
                answer=activations.nbytes,
            )
            if answer is None:
                await asyncio.sleep(life.rng.uniform(0.02, 0.2))

    async with asyncio.TaskGroup() as group:
        for _ in range(IN_FLIGHT):
            group.create_task(one_after_another())


def made_microbatch(life: Life, stage: int, name: str = "") -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
    """Header, plausible activations and random labels of a microbatch for a stage; beyond stage 1 an honest origin is
    said to have drawn it. It is of the beginning or the end of time."""
    spec = life.spec
    shape = (spec.inner.microbatch_windows, spec.data.sequence_length)
    header = microbatch.MicrobatchHeader(
        id=name or secrets.token_hex(16),
        budget_ms=4000,
        run=spec.run_id,
        stage=stage,
        origin=life.identity.peer_id if stage == 1 else life.rng.choice(life.of_stage(0)).peer,
        origin_clock=life.rng.choice((0.0, 1e17)),
        codec=spec.pipeline.activations[0],
    ).model_dump(mode="json")
    model: dict[str, Any] = dict(spec.model.config)
    activations = encode(torch.randn(*shape, int(model["hidden_size"])), spec.pipeline.activations[0])
    labels = torch.randint(int(model["vocab_size"]), shape, dtype=torch.int32)
    return header, activations, labels


async def _proposed(life: Life, attack: str, victim: Victim) -> str | None:
    """The name of an exchange that the victim accepted."""
    name = secrets.token_hex(16)
    proposal = exchange_messages.Proposal(
        exchange=name,
        run=life.spec.run_id,
        stage=victim.stage,
        contract=life.workers[victim.stage].contract,
        clock=life.clock,
        tokens=MOST_TOKENS,
    )
    answer = await _call(life, attack, victim, exchange_messages.PROPOSE.name, proposal.model_dump(mode="json"))
    return None if answer is None else name


def _opening_shapes(life: Life, stage: int) -> list[tuple[int, ...]]:
    outer = life.workers[stage].outer
    return [spec.shape for spec in opening_specs(outer.codec, outer.size)]


def _chunk(life: Life, stage: int) -> torch.Tensor:
    """A first chunk of the right size: of NaN where the codec can carry it, else of bytes at random."""
    first = _chunks(life, stage)[0]
    return torch.full_like(first, float("nan")) if first.is_floating_point() else first


def _chunks(life: Life, stage: int) -> list[torch.Tensor]:
    """Noise in the shape of a whole exchange."""
    outer = life.workers[stage].outer
    values, size = outer.codec.values_within(life.spec.limits.chunk_bytes), outer.size
    counts = [min(values, size - start) for start in range(0, size, values)]
    sizes = [outer.codec.wire_elements(count) for count in counts]
    dtype = outer.codec.wire_dtype
    if dtype.is_floating_point:
        return [1e-3 * torch.randn(size).to(dtype) for size in sizes]
    return [torch.randint(256, (size,), dtype=dtype) for size in sizes]


async def _call(
    life: Life, attack: str, victim: Victim, method: str, header: dict[str, Any], *tensors: torch.Tensor
) -> Message | None:
    return await life.call(attack, victim.peer, method, header, *tensors, answer=ANSWER_BYTES)
