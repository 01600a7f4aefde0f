"""The lives of a run: that an ended one goes on, and that this one is another. Records of free keys say so."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from noloco_node.directory.records import PeerState
from tests.chaos.attacks.life import Life
from tests.chaos.attacks.records import BELIEVED_SECONDS, ROUND_SECONDS, Stored, ghost, store

OLDEST = "0" * 24
"""A birth that is elder than any."""


async def undone_end(life: Life) -> None:
    """One ghost of stage 0 that says it trains: where the run has ended a seed forgot that, for good."""
    await _again_and_again(life, "an ended run that goes on", state=PeerState.TRAINING)


async def other_births(life: Life) -> None:
    """One ghost of stage 0 that names the eldest birth there can be: a node that follows it leaves the swarm."""
    await _again_and_again(life, "another birth of the run", birth=OLDEST)


async def _again_and_again(life: Life, attack: str, **claims: Any) -> None:
    while True:
        await told_once(life, attack, **claims)
        await asyncio.sleep(ROUND_SECONDS)


async def told_once(life: Life, attack: str, **claims: Any) -> Stored:
    """Store a ghost's record that claims this with all victims."""
    record = ghost(life, 0, time.time() + BELIEVED_SECONDS, **claims)
    for victim in life.victims:
        await store(life, attack, victim, [record])
    return record
