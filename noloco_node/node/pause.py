"""Whether a node rests: told to by a person (`pause`, `resume`), or outside the hours in which it works."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Literal

from noloco_node import ambient
from noloco_node.aio import Pulse
from noloco_node.config.node_settings import Hours, as_time, inside, next_begin

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
"""The machine's clock is looked at every so many seconds, by a node that has hours."""

Word = Literal["pause", "resume"]


@dataclass(frozen=True, slots=True)
class PauseState:
    """What is known of a node's rest. `inside`: the clock stands within its hours."""

    by_hand: bool = False
    """A person has told it to pause, and not to go on since."""
    despite_hours: bool = False
    """A person has told it to go on outside its hours: until they have come and gone once more."""
    inside: bool = True

    @property
    def rests(self) -> bool:
        """Whether it rests."""
        return self.by_hand or not (self.inside or self.despite_hours)


def told(state: PauseState, word: Word) -> PauseState:
    """After a person's word."""
    if word == "pause":
        return PauseState(by_hand=True, inside=state.inside)
    return PauseState(despite_hours=not state.inside, inside=state.inside)


def looked(state: PauseState, *, inside: bool) -> PauseState:
    """After a look at the clock."""
    return PauseState(state.by_hand, state.despite_hours and not inside, inside)


class PauseSwitch:
    """Follows a person's words and the machine's clock, and tells those that wait for a change."""

    def __init__(self, hours: Hours) -> None:
        self._hours = hours
        self._changed = Pulse()
        self._state = looked(PauseState(), inside=inside(hours, _minute()))

    @property
    def rests(self) -> bool:
        """Whether the node is to rest now."""
        return self._state.rests

    def told(self, word: Word) -> None:
        """A person has said so."""
        self._take(told(self._state, word))

    def why(self) -> str:
        """Why it rests, and what ends that, in one line."""
        if self._state.by_hand:
            return "paused: device and line are free; noloco-node resume goes on"
        begins = as_time(next_begin(self._hours, _minute()))
        return f"paused until {begins} (node.hours): device and line are free; noloco-node resume goes on at once"

    async def begins(self) -> None:
        """Wait until the node is to rest."""
        while not self.rests:
            await self._changed.wait()

    async def ends(self) -> None:
        """Wait until the node is to work."""
        while self.rests:
            await self._changed.wait()

    async def keep(self) -> None:
        """Follow the machine's clock, until cancelled."""
        while self._hours:
            await asyncio.sleep(LOOK_SECONDS)
            self._take(looked(self._state, inside=inside(self._hours, _minute())))

    def _take(self, state: PauseState) -> None:
        before, self._state = self._state, state
        if state.rests != before.rests:
            logger.info("%s", self.why() if state.rests else "going on after the pause")
            self._changed.fire()


def _minute() -> int:
    """The minute of the day, by the machine's clock and place."""
    now = time.localtime(ambient.wall())
    return 60 * now.tm_hour + now.tm_min
