"""When a run is over for a replica: its own clock says so, or the origins that it has worked for. A pure decision.

A record alone ends nothing and keeps nothing going: it costs its signer nothing. An origin counts here by its
microbatches that were trained here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from noloco_node import ambient
from noloco_node.aio import Pulse
from noloco_node.directory.clocks import OriginSeen, OriginsSeen, Voice, furthest_clock, median_voice, places
from noloco_node.directory.membership import Membership, too_few
from noloco_node.directory.records import NOT_GONE, PeerState
from noloco_node.directory.signed_end import SignedEnd, near_from
from noloco_node.errors import ExitCode, UserError
from noloco_node.identity.peer_id import PeerId
from noloco_node.peers.scorecard import PeerStats
from noloco_node.tallies import PeerTable

logger = logging.getLogger(__name__)

NEAR_BY_CLOCK = 0.9
"""Share of the target from which a run is near its end though nobody has said so. To be idle is no error then."""
IDLE_GRACES = 15
"""Grace times without work after which a node leaves: near the target that is the run's end, far from it an error."""
HELD_UP_GRACES = 12 * IDLE_GRACES
"""Grace times without work after which a node leaves while a stage has no replica, or an origin's clock moved within
`IDLE_GRACES`."""
BEGINNING_SECONDS = 86_400.0
"""Seconds after which a node leaves whose run has not begun: the others may be started by hand, one after
another."""


class RunVerdict(StrEnum):
    """What a replica makes of what it sees."""

    GOES_ON = "goes_on"
    OVER = "over"
    STALLED = "stalled"
    """Nothing is trained here any more, and nothing says that this is the run's end."""


@dataclass(frozen=True, slots=True)
class Sight:
    """What one replica knows of the run's end at one moment. Seconds."""

    near: bool
    """Others may have come to the target: by its own clock, by that of an origin that it trained for, or as it came
    (`came_near_the_end`)."""
    ended: bool
    """Finished origins have most of its late work, and all finished, or a grace passed without work, or `IDLE_GRACES`
    with it; or the end is signed."""
    idle: float
    """Since it last trained, came, or saw a stage served again."""
    patience: float
    """How long it stays without work."""


def verdict(sight: Sight) -> RunVerdict:
    """Whether the run is over for this replica."""
    if sight.ended:
        return RunVerdict.OVER
    if sight.idle <= sight.patience:
        return RunVerdict.GOES_ON
    return RunVerdict.OVER if sight.near else RunVerdict.STALLED


class EndOfRun:
    """Follows, for one stay of a replica, whether the run is over.

    `clock()` is the replica's clock (tokens), `last_trained()` when it last trained (monotonic seconds, 0 before the
    first time), `held_up()` whether a stage has no replica. `origins` is None on stage 0, which trains for nobody; of
    their clocks the furthest is believed that is at most `max_lag` (tokens) beyond their median. `signed` has the last
    words of origins, also those that it hears only when it wakes or comes home.
    """

    def __init__(
        self,
        own: PeerId,
        membership: Membership,
        peer_stats: PeerStats,
        origins: OriginsSeen | None,
        signed: SignedEnd,
        *,
        clock: Callable[[], float],
        last_trained: Callable[[], float],
        held_up: Callable[[], bool],
        target: float,
        max_lag: float,
        grace: float,
        now: Callable[[], float] = ambient.monotonic,
    ) -> None:
        self._own = own
        self._membership = membership
        self._peer_stats = peer_stats
        self._origins = origins
        self._signed = signed
        self._clock = clock
        self._last_trained = last_trained
        self._held_up = held_up
        self._target = target
        self._max_lag = max_lag
        self._near_from = near_from(target, max_lag)
        self._grace = grace
        self._now = now
        self._idle_since = self._looked = now()
        self._was_held_up = False
        self._awake_at, self._asked_at = membership.now(), now()
        self._fell_asleep_at = self._woke_at = -float("inf")
        self._clocks = PeerTable[PeerId, float]()
        """By the records of origins that it has worked for, or that answer."""
        self._moved_at = -float("inf")
        self._finished: set[PeerId] = set()
        """Peers that have said so; it is kept, since the records of those that have left are soon forgotten."""
        self._ended_beside = False
        """A peer that answers has said so. A node that comes home near the end and gets no work then waits
        `IDLE_GRACES` instead of `HELD_UP_GRACES`."""
        self._most_since: float | None = None
        self.came_late = False
        """It came to a run that was under way: it took a stage peer's state, or brought a lost stage back."""
        self.came_near_the_end = False
        """The stage that this node left for this one was near the run's end. The clock of a stage that begins anew is
        0, so it cannot show that."""

    async def wait(self, stop: asyncio.Event, moved: Pulse) -> None:
        """Return when the run is over, or when `stop` is set; `moved` fires when there may be something new. Raises
        UserError (PEERS_UNREACHABLE) where nothing is trained here any more and the run is not over."""
        while not stop.is_set():
            sight = self.look()
            found = verdict(sight)
            if found is RunVerdict.OVER:
                idle = f"nothing was trained here for {sight.idle:.0f} s, near the run's target"
                logger.info("the run is over: %s", "its origins have finished" if sight.ended else idle)
                return
            if found is RunVerdict.STALLED:
                raise self._stalled(sight)
            await self._ask(sight)
            await moved.wait(self._grace / 4)
            rest = self._looked + min(self._grace / 20, 0.1) - self._now()
            if rest > 0:  # pulses come with every step, and a look reads all records of stage 0
                await asyncio.sleep(rest)

    async def _ask(self, sight: Sight) -> None:
        """Without work, once in a grace time: the run may have come to its end while this machine slept."""
        since = self._now() - self._asked_at
        if self._woke_at > self._asked_at or min(sight.idle, since) > self._grace:
            self._asked_at = self._now()
            await self._signed.ask_around()

    @property
    def begun(self) -> bool:
        """It has trained here, or came to a run that was under way."""
        return self.came_late or self._last_trained() > 0.0

    def in_sight(self) -> bool:
        """Whether nodes leave because the run ends: a stage that empties then is not lost."""
        seen = self._seen()
        self._hear(seen, self._now())
        furthest = self._furthest(seen)
        training = [r for r in self._membership.live(0, PeerState.TRAINING) if not r.finished]
        return self._is_near(furthest) and (bool(self._finished) or not training)

    def look(self) -> Sight:
        """What this replica knows now."""
        now, seen = self._now(), self._seen()
        held_up = self._held_up()
        idle = self._idle(now, held_up)
        self._hear(seen, now)
        near = self.came_near_the_end or self._is_near(self._furthest(seen))
        ended = self._ended(seen, near, idle, now) or self._is_signed(idle)
        return Sight(near, ended, idle, self._patience(near, held_up, now))

    def _is_signed(self, idle: float) -> bool:
        """Whether the end is signed for an origin, or for a node that came home, and it has no work. One that is awake
        waits for long: others may go on. A later stage goes by the work that was trained here."""
        if self._origins is not None and self.begun:
            return False
        away = not self.begun or self._slept
        return idle > (1 if away else IDLE_GRACES) * self._grace and bool(self._signed.known)

    def _seen(self) -> Sequence[OriginSeen]:
        """Origins count for twice the time that a node waits without work, of which its sleep is no part."""
        slept = self._now() - self._fell_asleep_at if self._slept else 0.0
        return [] if self._origins is None else self._origins.latest(2 * IDLE_GRACES * self._grace + slept)

    def _furthest(self, seen: Sequence[OriginSeen]) -> float:
        return max(self._clock(), furthest_clock(seen, self._max_lag) or 0.0)

    def _is_near(self, furthest: float) -> bool:
        """In a short run clocks may be apart by half of it. Then the last tenth counts, or the word of a peer, or that
        all have left while this machine slept."""
        if furthest <= self._near_from:
            return False
        alone = self._slept and not self._membership.others(*NOT_GONE)
        return bool(self._finished) or furthest > NEAR_BY_CLOCK * self._target or alone

    @property
    def _slept(self) -> bool:
        """Whether it has got no work since this machine slept. What it trains as it wakes was under way before."""
        return self._last_trained() <= self._woke_at + self._grace

    def _patience(self, near: bool, held_up: bool, now: float) -> float:
        usual = IDLE_GRACES * self._grace
        if not self.begun and not (near and self._ended_beside):
            return HELD_UP_GRACES * self._grace if near else max(BEGINNING_SECONDS, HELD_UP_GRACES * self._grace)
        goes_on = now - self._moved_at <= usual
        return HELD_UP_GRACES * self._grace if goes_on or (held_up and not near) else usual

    def _idle(self, now: float, held_up: bool) -> float:
        self._idle_since = max(self._idle_since, self._last_trained())
        pause = now - self._looked
        if pause > self._grace:  # this process stood still: that says nothing of the others
            self._idle_since = min(now, self._idle_since + pause)
        if self._was_held_up and not held_up:
            self._idle_since = now
        time = self._membership.now()  # that of the machine goes on while it sleeps
        if time - self._awake_at > self._grace:
            self._fell_asleep_at, self._woke_at = self._looked, now
        self._awake_at = time
        self._was_held_up, self._looked = held_up, now
        return now - self._idle_since

    def _hear(self, seen: Sequence[OriginSeen], now: float) -> None:
        """Take in what those say that this node has worked with."""
        origins = {each.origin for each in seen}
        for record in self._membership.others(*PeerState):
            peer = PeerId(record.peer_id)
            if record.finished and (peer in origins or self._peer_stats.has_worked(peer)):
                self._finished.add(peer)
            self._ended_beside |= record.finished and self._peer_stats.met(peer)
            if record.stage == 0 and (peer in origins or self._peer_stats.answers(peer)):
                if record.clock > self._clocks.get(peer, record.clock):
                    self._moved_at = now
                self._clocks[peer] = record.clock
        self._signed.look(lambda record: self._peer_stats.has_worked(PeerId(record.peer_id)), places(seen))
        for record in self._signed.records():
            self._finished.add(PeerId(record.peer_id))
            self._clocks[PeerId(record.peer_id)] = record.clock

    def _ended(self, seen: Sequence[OriginSeen], near: bool, idle: float, now: float) -> bool:
        left = self._membership.live(0, PeerState.DRAINING, PeerState.GONE) if near else ()
        left_unfinished = {PeerId(record.peer_id) for record in left} - self._finished
        words = [
            Voice(each.sender, each.origin, self._has_ended(each.origin), each.tokens)
            for each in seen
            if each.origin not in left_unfinished
        ]
        if not words or not median_voice(words):
            self._most_since = None
            return False
        if self._most_since is None:
            self._most_since = now
        everybody = all(word.value for word in words)
        waited = now - self._most_since > IDLE_GRACES * self._grace
        return waited or idle > self._grace or (everybody and near)

    def _has_ended(self, origin: PeerId) -> bool:
        return origin in self._finished and self._clocks.get(origin, 0.0) > self._near_from

    def _stalled(self, sight: Sight) -> UserError:
        share = self._clock() / self._target
        if not self.begun:
            why = "the run has not begun here"
        elif self._was_held_up:
            few = too_few(sum(self._membership.replicas_per_stage()), self._membership.stages)
            why = f"a stage has no replica ({', '.join(map(str, self._membership.unserved()))}){few}"
        elif self._membership.stage == 0:
            why = "no microbatch comes back"
        elif any(PeerId(r.peer_id) in self._clocks for r in self._membership.live(0, PeerState.TRAINING)):
            why = "a node of stage 0 says that it trains, but its clock stands still, or sends this node nothing"
        else:
            why = "no replica of stage 0 that this node has worked with is seen any more"
        return UserError(
            ExitCode.PEERS_UNREACHABLE,
            f"nothing has been trained here for {sight.idle:.0f} s, at {share:.0%} of the run's target: {why}",
            "look whether the run goes on and whether this machine is connected, then start the node again: it goes on "
            "from its checkpoint",
        )
