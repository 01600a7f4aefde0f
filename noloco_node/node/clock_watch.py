"""Tells whether this machine's clock is still right while the node runs.

With a wrong clock the directory shows it no node, and others do not see it. It could say only that they are gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import NoReturn

from noloco_node import ambient
from noloco_node.bootstrap.hello import measure_hello
from noloco_node.identity.peer_id import PeerId
from noloco_node.node.checks import CLOCK_LIMIT_SECONDS, Check, CheckOutcome, check_clock
from noloco_node.telemetry.events import Warned
from noloco_node.transport.calls import ASKED_AT_ONCE
from noloco_node.transport.interface import Transport

logger = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
ASK_SECONDS = 600.0
"""Seconds between two rounds of questions while the clock runs evenly: drift is slow."""
AGAIN_SECONDS = 30.0
"""Seconds between two rounds of questions while the clock is wrong."""
STEP_SECONDS = 1.0
"""If the wall's clock moves by so many seconds more or less than the monotonic one, it was set, or the machine
slept."""


class ClockWatch:
    """Says once that this machine's clock has become wrong, and once that it is right again, by what others that answer
    say of theirs. It ends nothing: the node goes on by itself once the clock is right."""

    def __init__(self, transport: Transport, emit: Callable[[Warned], None]) -> None:
        self._transport = transport
        self._emit = emit
        self._chance = ambient.chance()
        self._wrong = False

    async def keep(self) -> NoReturn:
        """Look now and then, and soon after the clock was set."""
        asked, apart = ambient.monotonic(), _apart()
        while True:
            # Nothing tells that the clock was set: looking again is the only way.
            await asyncio.sleep(LOOK_SECONDS)
            pause = AGAIN_SECONDS if self._wrong else ASK_SECONDS
            if ambient.monotonic() - asked >= pause or abs(_apart() - apart) > STEP_SECONDS:
                asked, apart = ambient.monotonic(), _apart()
                await self.look()

    async def look(self) -> None:
        """Compare with some that answer; where none tells its time, nothing is known."""
        check = await self._compare(self._transport.peer_stats.answering())
        if check is None:
            return
        if check.outcome is CheckOutcome.FAIL and not self._wrong:
            self._wrong = True
            self._emit(Warned(what="clock_wrong", detail=wrong(check)))
        elif check.outcome is not CheckOutcome.FAIL and self._wrong:
            self._wrong = False
            logger.warning("this machine's clock is right again: %s", check.found)

    async def _compare(self, answering: Sequence[PeerId]) -> Check | None:
        asked = self._chance.sample(answering, min(ASKED_AT_ONCE, len(answering)))
        answers = await asyncio.gather(*(measure_hello(self._transport, peer) for peer in asked))
        skews = [(each.skew, each.doubt) for each in answers if each is not None and each.skew is not None]
        return check_clock(skews) if skews else None


def _apart() -> float:
    """By how much the wall's clock is ahead of the monotonic one, which nobody sets: seconds."""
    return ambient.wall() - ambient.monotonic()


def wrong(check: Check) -> str:
    """What to say to the user that runs the node."""
    return (
        f"THIS MACHINE'S CLOCK IS WRONG: {check.found}. Beyond {CLOCK_LIMIT_SECONDS:g} s this node and the others lose "
        "sight of each other, and it trains with nobody. Set the clock (NTP): the node goes on by itself then"
    )
