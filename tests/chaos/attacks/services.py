"""Answers to honest nodes that take this stranger for a replica: malformed, late, garbled, or not at all."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

import torch

from noloco_node.averaging import session as exchange_messages
from noloco_node.bootstrap import hello
from noloco_node.identity.peer_id import PeerId
from noloco_node.pipeline import messages as microbatch
from noloco_node.state_transfer import copies as copy_messages
from noloco_node.state_transfer import fetch as state_messages
from noloco_node.state_transfer.fetch import StateManifest, StateOffer, digest, packed_size, root_of, sign_manifest
from noloco_node.transport.errors import Refusal, Refused
from noloco_node.transport.messages import Message
from tests.chaos.attacks.life import Life, Victim
from tests.chaos.attacks.records import own_record, store
from tests.chaos.attacks.visits import made_microbatch

RENEW_SECONDS = 2.0
DRIP_SHARE = 0.8
"""Each chunk comes after this share of the progress deadline, just before its end."""
JUNK: tuple[dict[str, Any], ...] = (
    {"tokens": "many"},
    {"tokens": -1, "clock": "soon"},
    {},
    {"exchange": "0" * 32, "clock": 1e30, "tokens": 1 << 60},
)
ALL_STAGES = "a place in every stage"
READS = "reads of honest donors"
"""What comes of being the least busy donor: no attack by itself."""


async def announce(life: Life) -> None:
    """Announce a plausible record of this key in every stage, renewed, and an honest hello: an observer finds a peer
    that answers."""
    stage = life.rng.randrange(life.spec.stages)
    if "hello" not in life.served:
        life.served.add("hello")
        hello.serve_hello(life.transport, life.spec, lambda: stage)
    while True:
        for stage in range(life.spec.stages):
            stored = own_record(life, stage)
            for victim in life.victims:
                await store(life, ALL_STAGES, victim, [stored])
        await asyncio.sleep(RENEW_SECONDS)


async def garbled_copies(life: Life) -> None:
    """Take microbatches and send garbled copies under their ids to the stage peers that the sender will ask next. Then
    refuse them, so that the honest retry meets the copy."""
    attack = "garbled copies"

    async def handle(_peer: PeerId, message: Message) -> Message:
        header = microbatch.MicrobatchHeader.model_validate(message.header)
        life.tally.count(attack, "ids observed")
        copies = [victim for victim in life.of_stage(header.stage) if victim.peer not in life.banned_by]
        async with asyncio.TaskGroup() as group:
            for number, victim in enumerate(copies):
                made, activations, labels = made_microbatch(life, header.stage, header.id)
                if number % 2:
                    activations, labels = activations[:1], labels[:1]
                group.create_task(
                    life.call(
                        attack,
                        victim.peer,
                        microbatch.MICROBATCH.name,
                        made,
                        activations,
                        labels,
                        answer=activations.nbytes,
                    )
                )
        raise Refused(Refusal.INTERNAL, "out of order today")

    life.serve(attack, microbatch.MICROBATCH.name, handle)
    guessed = 0
    while True:
        for victim in life.victims:
            if victim.stage > 0:
                made, activations, labels = made_microbatch(life, victim.stage, f"{guessed:032x}")
                await life.call(
                    attack,
                    victim.peer,
                    microbatch.MICROBATCH.name,
                    made,
                    activations,
                    labels,
                    answer=activations.nbytes,
                )
        guessed += 1
        await asyncio.sleep(0.5)


async def bad_exchange_answers(life: Life) -> None:
    """Malformed answers to proposals; now and then a sound one, then a malformed answer to the opening."""
    attack = "bad answers to exchanges"

    async def propose(_peer: PeerId, _message: Message) -> Message:
        life.tally.count(attack, "proposals answered")
        if life.rng.random() < 0.5:
            return Message(exchange_messages.Acceptance(tokens=1000, loss=1e-3).model_dump(mode="json"))
        return Message(life.rng.choice(JUNK))

    async def opened(_peer: PeerId, message: Message) -> Message:
        life.tally.count(attack, "openings answered")
        if life.rng.random() < 0.5:
            nan = tuple(torch.full_like(tensor, float("nan")) for tensor in message.tensors)
            return Message({"exchange": message.header["exchange"], "clock": 1e18}, nan)
        return Message(life.rng.choice(JUNK), message.tensors)

    life.serve(attack, exchange_messages.PROPOSE.name, propose)
    life.serve(attack, exchange_messages.OPEN.name, opened)
    await asyncio.Event().wait()


async def dripping_donor(life: Life) -> None:
    """A state that comes for hours, one chunk just before each deadline, and is worth nothing. It comes first: honest
    donors are read meanwhile, so that this one is the least busy."""
    attack = "dripping donor"
    one_at_a_time = asyncio.Lock()
    sizes = [packed_size(worker.state_sizes()) for worker in life.workers]
    chunk = life.spec.limits.chunk_bytes

    async def offer(_peer: PeerId, message: Message) -> Message:
        offered = StateOffer(clock=life.clock, outer_rounds=10, readers=0, places=16)
        life.tally.count(attack, "offers made")
        return Message(offered.model_dump(mode="json"))

    async def opened(_peer: PeerId, message: Message) -> Message:
        stage = int(message.header["stage"])
        pieces = [_piece(stage, index, chunk, sizes[stage]) for index in range(-(-sizes[stage] // chunk))]
        digests = torch.frombuffer(bytearray(b"".join(map(digest, pieces))), dtype=torch.uint8)
        digests = digests.view(len(pieces), state_messages.DIGEST_BYTES)
        manifest = StateManifest(
            source=life.identity.peer_id,
            run=life.spec.run_id,
            stage=stage,
            contract=life.workers[stage].contract,
            snapshot=secrets.token_hex(8),
            clock=life.clock,
            outer_rounds=10,
            size=sizes[stage],
            root=root_of(digests),
        )
        signed = sign_manifest(life.transport, manifest, digests)
        life.tally.count(attack, "manifests given")
        return Message(signed.header.model_dump(mode="json"), signed.tensors)

    async def piece(_peer: PeerId, message: Message) -> Message:
        async with one_at_a_time:
            await asyncio.sleep(DRIP_SHARE * life.spec.limits.exchange_progress_seconds)
        stage, index = int(message.header["stage"]), int(message.header["index"])
        data = _piece(stage, index, chunk, sizes[stage])
        life.tally.count(attack, "chunks dripped")
        return Message({}, (torch.frombuffer(bytearray(data), dtype=torch.uint8),))

    life.serve(attack, state_messages.OFFER.name, offer)
    life.serve(attack, state_messages.OPEN.name, opened)
    life.serve(attack, state_messages.CHUNK.name, piece)
    async with asyncio.TaskGroup() as group:
        for victim in life.victims:
            group.create_task(_read_slowly(life, victim, -(-sizes[victim.stage] // chunk)))
        await asyncio.Event().wait()


async def _read_slowly(life: Life, victim: Victim, chunks: int) -> None:
    """Keep a place at an honest donor, by a new chunk now and then, of one snapshot after another."""
    pause = life.spec.limits.exchange_progress_seconds / 2
    bytes_a_chunk = life.spec.limits.chunk_bytes
    contract = life.workers[victim.stage].contract
    request = {"run": life.spec.run_id, "stage": victim.stage, "contract": contract}
    digests = chunks * state_messages.DIGEST_BYTES
    while True:
        given = await life.call(READS, victim.peer, state_messages.OPEN.name, request, answer=digests)
        if given is not None:
            named = request | {"snapshot": StateManifest.model_validate_json(given.header["manifest"]).snapshot}
            for index in range(chunks):
                await asyncio.sleep(pause)
                wanted = named | {"index": index}
                if await life.call(READS, victim.peer, state_messages.CHUNK.name, wanted, answer=bytes_a_chunk) is None:
                    break
                life.tally.count(READS, "chunks read")
        await asyncio.sleep(pause)


def _piece(stage: int, index: int, chunk: int, size: int) -> bytes:
    """Finite numbers that mean nothing, the same whenever they are asked for."""
    generator = torch.Generator().manual_seed(stage << 20 | index)
    length = min(chunk, size - index * chunk)
    values = torch.randn(-(-length // 4), generator=generator)
    return bytes(values.numpy().tobytes()[:length])


async def hostile_copies(life: Life) -> None:
    """Copies of a stage from the end of time, of huge weights: for standby copies in fp16, for exports in fp32."""
    attack = "hostile copies of a stage"
    given = {"fp16": torch.float16, "fp32": torch.float32}

    async def opened(_peer: PeerId, message: Message) -> Message:
        stage, precision = int(message.header["stage"]), message.header["precision"]
        weights = torch.full((life.workers[stage].outer.size,), 3e4, dtype=given[precision])
        manifest = copy_messages.CopyManifest(
            source=life.transport.peer_id,
            run=life.spec.run_id,
            stage=stage,
            clock=life.clock * 4 if precision == "fp16" else 1e15,
            outer_rounds=1 << 20,
            size=weights.numel(),
            root=copy_messages.root_of_weights(weights),
            precision=precision,
        )
        offer = copy_messages.sign_copy(life.transport, manifest, weights).offer
        life.tally.count(attack, "copies offered" if precision == "fp16" else "offered to exports")
        return Message(offer.model_dump(mode="json"))

    async def piece(_peer: PeerId, message: Message) -> Message:
        stage, index = int(message.header["stage"]), int(message.header["index"])
        dtype = given[message.header["precision"]]
        step = life.spec.limits.chunk_bytes // dtype.itemsize
        left = life.workers[stage].outer.size - index * step
        life.tally.count(attack, "chunks given")
        return Message({}, (torch.full((max(0, min(step, left)),), 3e4, dtype=dtype),))

    life.serve(attack, copy_messages.OPEN_COPY.name, opened)
    life.serve(attack, copy_messages.COPY_CHUNK.name, piece)
    await asyncio.Event().wait()
