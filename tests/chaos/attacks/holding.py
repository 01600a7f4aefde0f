"""Exchanges carried to their end, each chunk at the last moment: a partner that holds a replica keeps all others
away."""

from __future__ import annotations

import asyncio

import torch

from noloco_node.averaging import session as exchange_messages
from tests.chaos.attacks.life import Life, Victim
from tests.chaos.attacks.visits import (
    ANSWER_BYTES,
    _chunks,  # pyright: ignore[reportPrivateUsage]
    _opening_shapes,  # pyright: ignore[reportPrivateUsage]
    _proposed,  # pyright: ignore[reportPrivateUsage]
)

ATTACK = "dripping exchanges"
LAST_MOMENT = 0.9
"""Each chunk comes after this share of the progress deadline."""
PAUSE = 0.1


async def dripping_exchanges(life: Life) -> None:
    """One exchange with each victim at a time, and the next as soon as that is over."""

    async def hold(victim: Victim) -> None:
        while True:
            await _hold(life, victim)
            await asyncio.sleep(PAUSE)

    async with asyncio.TaskGroup() as group:
        for victim in life.victims:
            group.create_task(hold(victim))


async def _hold(life: Life, victim: Victim) -> None:
    name = await _proposed(life, ATTACK, victim)
    if name is None:
        return
    opening = {"exchange": name, "clock": life.clock}
    gauge = [0.001 * torch.randn(shape) for shape in _opening_shapes(life, victim.stage)]
    opened = exchange_messages.OPEN.name
    if await life.call(ATTACK, victim.peer, opened, opening, *gauge, answer=ANSWER_BYTES) is None:
        return
    for index, chunk in enumerate(_chunks(life, victim.stage)):
        await asyncio.sleep(LAST_MOMENT * life.spec.limits.exchange_progress_seconds)
        header = {"exchange": name, "index": index}
        answer = await life.call(ATTACK, victim.peer, exchange_messages.CHUNK.name, header, chunk, answer=ANSWER_BYTES)
        if answer is None:
            return
    life.tally.count(ATTACK, "carried to the end")
