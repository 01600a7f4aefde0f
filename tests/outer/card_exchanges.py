"""Outer steps of replicas with a `Card` and without one."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from noloco_node.outer import CodecName
from noloco_node.outer.codec import BLOCK, CODECS
from noloco_node.outer.replica import NotFinite, OuterReplica, device_bytes
from noloco_node.outer.update import OuterRule
from tests.outer.card import Card, OnCard
from tests.outer.groups import vectors

RULE = OuterRule(0.5, 0.5, 0.5, "averaged")
SIZE = 21 * BLOCK + 77
"""Two chunks of 16 blocks of `sign`, the last one ragged."""
TRIES = 4
"""At so many of its operations the device refuses."""


def replica(codec: CodecName, seed: int, card: Card | None, size: int = SIZE, chunk: int = 16) -> OuterReplica:
    """One of several that lie close together, with chunks of so many blocks."""
    slow, moved, momentum = vectors(3, torch.float32, seed, size)
    chunk_bytes = CODECS[codec].wire_elements(chunk * BLOCK)
    base = vectors(1, torch.float32, 0, size)[0] + 0.01 * slow
    made = OuterReplica(RULE, base, codec=CODECS[codec], chunk_bytes=chunk_bytes, accelerator=card)
    made.snapshot.copy_(base + 0.01 * moved)
    assert made.momentum is not None
    made.momentum.copy_(0.01 * momentum)
    return made


def opened(group: list[OuterReplica], exchange: str = "e", sketches: list[Tensor] | None = None) -> list[list[Tensor]]:
    """Everything up to the chunks that travel. With these `sketches` both have one coding whatever rounded theirs."""
    for each in group:
        each.open(members=2, weight=1.0, exchange=exchange)
    own = sketches or [each.sketch() for each in group]
    for each, theirs in zip(group, own, strict=True):
        each.sketch = partial(Tensor.clone, theirs)  # pyright: ignore[reportAttributeAccessIssue]
    group[0].agree(own[1:])
    group[1].agree(own[:1])
    return [[each.encoded_chunk(index) for index in range(each.chunks)] for each in group]


def state(each: OuterReplica) -> list[Tensor]:
    """What a step leaves."""
    vectors = (each.slow, each.momentum, each.snapshot, each.trail)
    return [vector.clone() for vector in vectors if vector is not None]


def a_step(codec: CodecName, card: Card | None, sketches: list[Tensor]) -> tuple[list[Tensor], float]:
    """What a step by the card leaves, with a partner on the host; and what it found of the difference."""
    group = [replica(codec, 1, card), replica(codec, 2, None)]
    wires = opened(group, sketches=sketches)
    for index, wire in enumerate(wires[1]):
        group[0].add_chunk(index, wire)
    norm = group[0].difference_norm()
    group[0].commit(0.9)
    assert card is None or card.now == 0, "something is left on the device"
    return state(group[0]), norm


def differences(codec: CodecName, wires: list[list[Tensor]], sketches: list[Tensor], card: Card) -> dict[str, Any]:
    """Both sides of each chunk, one on the card."""
    same = opposite = True
    coding = CODECS[codec].coding("e", SIZE, sketches)
    for index, (own, other) in enumerate(zip(*wires, strict=True)):
        start = index * 16 * BLOCK
        with card.beside():
            there = coding.difference(other.to(card.device), own.to(card.device), start)
            assert isinstance(there, OnCard)
            found = there.to("cpu")
        same &= torch.equal(found, coding.difference(other, own, start))
        opposite &= torch.equal(found, -coding.difference(own, other, start))
    return {"same": same, "opposite": opposite, "wires": [len(each) for each in wires], "codec": codec}


def half_way(codec: CodecName) -> dict[str, int]:
    """Bytes left on the device by exchanges that end after the sketch, a chunk, and a chunk that is not finite."""
    left: dict[str, int] = {}
    card = Card()
    group = [replica(codec, 1, card), replica(codec, 2, None)]
    group[0].open(members=2, weight=1.0, exchange="e")
    group[0].sketch()
    left["sketch"] = card.now
    wires = opened(group)
    left["encoded"] = card.now
    group[0].add_chunk(0, wires[1][0])
    left["added"] = card.now
    if codec == "sign":
        wires[1][1][-2:] = torch.full((1,), float("nan"), dtype=torch.bfloat16).view(torch.uint8)
        try:
            group[0].add_chunk(1, wires[1][1])
            left["NaN was taken in"] = 1
        except NotFinite:
            left["not finite"] = card.now
    return left


def refusals(codec: CodecName, sketches: list[Tensor]) -> dict[str, Any]:
    """A step whose device refuses at one operation after the other: what is left is that of the host or the device."""
    free = Card()
    wanted, _ = a_step(codec, free, sketches)
    right, again = True, True
    places = range(1, len(free.operations) + 1, len(free.operations) // TRIES)
    for at in places:
        card = Card()
        card.refuses, card.refuses_at = torch.OutOfMemoryError, at
        found, _ = a_step(codec, card, sketches)
        right &= all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
        again &= len(card.operations) == at
    return {"right": right, "nothing more was asked of it": again, "tried": len(places)}


def case(codec: CodecName) -> dict[str, Any]:
    """All that is to be known of one codec."""
    card, plain = Card(), [replica(codec, seed, None) for seed in (1, 2)]
    wires = opened(plain)
    sketches = [each.sketch() for each in plain]
    own = replica(codec, 1, card)
    own.open(members=2, weight=1.0, exchange="e")
    apart = (own.sketch() - sketches[0]).norm() / (sketches[1] - sketches[0]).norm()
    stepped = [a_step(codec, each, sketches) for each in (Card(), None)]
    no_room = Card(room=device_bytes(16 * BLOCK, SIZE) - 1)
    a_step(codec, no_room, sketches)
    large = Card()
    pair = [replica(codec, seed, each, size, 256) for size in (256 * BLOCK,) for seed, each in ((1, large), (2, None))]
    for index, wire in enumerate(opened(pair)[1]):
        pair[0].add_chunk(index, wire)
    pair[0].commit()
    return {
        "differences": differences(codec, wires, sketches, card),
        "sketch apart": float(apart),
        "state": all(torch.equal(one, other) for one, other in zip(stepped[0][0], stepped[1][0], strict=True)),
        "norms": [norm for _, norm in stepped],
        "without room": len(no_room.operations),
        "half way": half_way(codec),
        "out of memory": refusals(codec, sketches),
        "peak": large.most / device_bytes(256 * BLOCK, 256 * BLOCK),
    }


def refuses_to_mix() -> bool:
    """As a GPU does: else nothing that passes here would say anything."""
    card = Card()
    with card.beside():
        try:
            torch.add(torch.ones(4, device=card.device), torch.ones(4))
        except AssertionError:
            return True
    return False
