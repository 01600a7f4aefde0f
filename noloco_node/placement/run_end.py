"""When a run is over for a replica: its own work says so, and the origins that it has worked with. A pure decision.

A record alone ends nothing and keeps nothing going: it costs its signer nothing. An origin counts here by microbatches
of it that were trained here, or by exchanges committed with it; where none has been met yet, by its answers.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from noloco_node import ambient
from noloco_node.aio import Pulse
from noloco_node.directory.membership import Membership, too_few
from noloco_node.directory.records import PeerRecord, PeerState
from noloco_node.errors import ExitCode, UserError
from noloco_node.identity.peer_id import PeerId
from noloco_node.placement.last_clocks import ClocksLastHeard, newest_of_each
from noloco_node.transport.peer_stats import PeerStats
from noloco_node.trust.sources_seen import OriginSeen, OriginsSeen, Voice, furthest_clock, median_voice

NEAR_TARGET = 0.9
"""Share of the target from which the run's end may have come; in a run so short that clocks may differ by more than the
rest, from where they may: but not before `HALF_WAY`."""
HALF_WAY = 0.5
LATE_GRACES = 5
"""Grace times without work for a node whose origins disagree whether the run is over, or that the others have left."""
ORPHAN_GRACES = 15
"""Grace times without work after which a node gives up, far from the end or left by its origins."""
HELD_UP_GRACES = 180
"""The same while a stage has no replica, or while others go on and only this node gets nothing to train."""
BEGINNING_SECONDS = 86_400.0
"""For a node at which the run has not begun: the others may be started by hand, one after another."""
LONGEST_PAUSE_SECONDS = 0.1
"""Between two looks where things move faster."""


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
    """By its own clock, by those of the origins whose microbatches it has trained, or as its former stage told it; a
    short run's is half-way."""
    close: bool
    """By the same clocks the run's last tokens are trained (`close_from`)."""
    begun: bool
    """It has trained here, or came to a run that was under way."""
    idle: float
    """Since it last trained, or came."""
    finished: bool
    """An origin that counts has trained to the run's end."""
    training: bool
    """An origin that counts says that it trains; an origin that trains counts itself."""
    vanished: bool
    """An origin that counts has left without a word."""
    outvoted: float
    """For how long most of the origins that count have finished; 0 where they have not."""
    moving: bool
    """The clock of an origin that counts moves."""
    held_up: bool
    """A stage has no replica."""
    held_up_for: float
    """Of `idle`, what had passed when a stage that had no replica was last served again; 0 where none was."""
    deserted: bool
    """A stage has no replica, or on a later stage no clock of an origin that counts moves, and meanwhile a node that
    counts, of whatever stage, has left as at the run's end; or this machine slept, and of those that it has worked with
    nobody moves and half are gone, who by their last words have come to the target meanwhile."""
    ended: bool
    """Of the origins that count none trains any more, as far as their clocks tell, and most have finished and
    say themselves that they are near the target: what a replica has to go by that got no work of late."""


def verdict(sight: Sight, grace: float) -> RunVerdict:
    """Whether the run is over for this replica; `grace` in seconds.

    While it trains the run goes on, whatever anybody says, unless most origins have finished for long. Near the target
    it is over at once where every origin that counts has finished, after a grace where none trains any more, and after
    some where nothing is trained here and they disagree, or others have left and a stage is empty or those origins
    stand still: all that was trained here may be of one that hangs. That none trains says nothing before the run's
    last tokens, unless one of them has finished: those that die before end it for nobody. Far from the
    target, as far as this replica can tell by itself, the word of one origin ends nothing: it is over after a grace
    without work where they have all come to their end.
    """
    at_once = sight.finished and not sight.vanished
    if comes_to_its_end(sight) and not sight.training and (at_once or sight.idle > grace):
        return RunVerdict.OVER
    said = sight.finished or sight.deserted
    if sight.near and ((said and sight.idle > LATE_GRACES * grace) or sight.outvoted > LATE_GRACES * grace):
        return RunVerdict.OVER
    if sight.ended and sight.idle > grace:
        return RunVerdict.OVER
    return RunVerdict.STALLED if sight.idle > patience(sight, grace) else RunVerdict.GOES_ON


def comes_to_its_end(sight: Sight) -> bool:
    """Whether nodes that leave now leave because the run ends."""
    return sight.near and (sight.finished or (sight.close and not sight.training))


def near_from(target: float, max_lag: float) -> float:
    """The clock beyond which a run is near its end; all in tokens."""
    return min(NEAR_TARGET * target, max(HALF_WAY * target, target - max_lag))


def close_from(target: float, max_lag: float) -> float:
    """The clock beyond which origins that are gone may have come to the end, though nobody has said so; all in tokens.
    What is left is a tenth of a short run, and of a long one the lag that clocks may have, which is minutes: the last
    tenth of a month is three days, in which a machine may well be started again."""
    return max(NEAR_TARGET * target, target - max_lag)


def patience(sight: Sight, grace: float) -> float:
    """Seconds without work after which a replica gives up."""
    if not sight.begun:
        return max(BEGINNING_SECONDS, HELD_UP_GRACES * grace)
    longest = HELD_UP_GRACES * grace
    return longest if sight.held_up or sight.moving else min(longest, sight.held_up_for + ORPHAN_GRACES * grace)


@dataclass(slots=True)
class _Known:
    """What an origin that counts said last."""

    word: PeerState
    """`finishing` where it has trained to the run's end."""
    clock: float
    rose_at: float
    """When that clock was last seen to rise; monotonic seconds."""


class EndOfRun:
    """Follows, for one stay of a replica, whether the run is over.

    `clock()` is the replica's clock (tokens), `last_trained()` when it last trained (monotonic seconds, 0 before the
    first time), `held_up()` whether a stage has no replica. `origins` is None on stage 0, which trains for nobody; of
    their clocks the furthest is believed that is at most `max_lag` (tokens) beyond their median.
    """

    def __init__(
        self,
        own: PeerId,
        membership: Membership,
        peer_stats: PeerStats,
        origins: OriginsSeen | None,
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
        self._clock = clock
        self._last_trained = last_trained
        self._held_up = held_up
        self._target = target
        self._max_lag = max_lag
        self._grace = grace
        self._now = now
        self._idle_since = self._looked = now()
        self._was_held_up, self._served_again_at = False, -math.inf
        self._known: dict[PeerId, _Known] = {}
        self._outvoted_since: float | None = None
        self.last_heard = ClocksLastHeard(grace)
        """Of those that it has worked with."""
        self._awake_at, self._noted_at = membership.now(), -math.inf
        self._gone = False
        self._deserted = False
        """Kept while it waits so: records of those that have left are soon forgotten."""
        self.came_late = False
        """It came to a run that was under way: it took a stage peer's state, or brought a lost stage back."""
        self.came_near_the_end = False
        """The run was near its end at the stage that this node has left for this one. A stage that begins anew says 0
        of that: a node that took a lost first stage over waited an hour for others that had left at the end."""

    async def wait(self, stop: asyncio.Event, moved: Pulse) -> None:
        """Return when the run is over, or when `stop` is set; `moved` fires when there may be something new. Raises
        UserError (PEERS_UNREACHABLE) where nothing is trained here any more and the run is not over."""
        while not stop.is_set():
            sight = self.look()
            found = verdict(sight, self._grace)
            if found is RunVerdict.OVER:
                return
            if found is RunVerdict.STALLED:
                raise self._stalled(sight)
            await moved.wait(self._grace / 4)
            rest = self._looked + min(self._grace / 20, LONGEST_PAUSE_SECONDS) - self._now()
            if rest > 0:  # pulses come with every step, and a look reads all records of stage 0
                await asyncio.sleep(rest)

    def in_sight(self) -> bool:
        """Whether nodes leave because the run ends: a stage that empties then is not lost."""
        return comes_to_its_end(self.look())

    def look(self) -> Sight:
        """What this replica knows now."""
        now = self._now()
        idle = self._idle(now)
        records = {PeerId(r.peer_id): r for r in self._membership.live(0, *PeerState) if r.peer_id != self._own}
        seen = self._origins.latest(self._memory) if self._origins is not None else ()
        counting = self._counting(records, seen)
        self._hear(records, counting, now)
        if not self._most_have_finished(seen):
            self._outvoted_since = None
        elif self._outvoted_since is None:
            self._outvoted_since = now
        finished = any(known.word is PeerState.FINISHING for known in self._known.values())
        state = self._membership.state if self._membership.stage == 0 else PeerState.GONE
        trains = [peer for peer, known in self._known.items() if known.word is PeerState.TRAINING]
        rose_at = max((known.rose_at for known in self._known.values()), default=-float("inf"))
        furthest, held_up = max(self._clock(), furthest_clock(seen, self._max_lag) or 0.0), self._held_up()
        if self._was_held_up and not held_up:
            self._served_again_at = now
        self._was_held_up = held_up
        moving = self._origins is not None and now - rose_at <= LATE_GRACES * self._grace
        gone = self._are_gone_who_were_worked_with()
        waits = held_up or (self._origins is not None and not moving)
        self._deserted = waits and (self._deserted or self._somebody_has_left_as_at_the_end() or gone)
        return Sight(
            near=self.came_near_the_end or furthest > near_from(self._target, self._max_lag),
            close=furthest > close_from(self._target, self._max_lag),
            begun=self.came_late or self._last_trained() > 0.0,
            idle=idle,
            finished=finished or state is PeerState.FINISHING,
            training=state is PeerState.TRAINING or any(peer in records for peer in trains),
            vanished=state is not PeerState.FINISHING and any(peer not in records for peer in trains),
            outvoted=0.0 if self._outvoted_since is None else now - self._outvoted_since,
            moving=moving,
            held_up=held_up,
            held_up_for=max(0.0, idle - (now - self._served_again_at)),
            deserted=self._deserted,
            ended=self._have_ended(seen, now),
        )

    def _idle(self, now: float) -> float:
        self._idle_since = max(self._idle_since, self._last_trained())
        pause = now - self._looked
        if pause > self._grace:  # this process stood still: that says nothing of the others
            self._idle_since = min(now, self._idle_since + pause)
            self._served_again_at = min(now, self._served_again_at + pause)
        self._looked = now
        return now - self._idle_since

    def _have_ended(self, seen: Sequence[OriginSeen], now: float) -> bool:
        near, still = near_from(self._target, self._max_lag), now - LATE_GRACES * self._grace
        heard = {p: k for p, k in self._known.items() if k.word is not PeerState.TRAINING or k.rose_at > still}
        trains = any(known.word is PeerState.TRAINING for known in heard.values())
        ended = {p: known.word is PeerState.FINISHING and known.clock > near for p, known in heard.items()}
        return self._origins is not None and not trains and _is_true_of_most(ended, seen)

    def _somebody_has_left_as_at_the_end(self) -> bool:
        """Of the nodes worked with, whatever their stage; where none is seen, of those that once answered."""
        newest = newest_of_each(self._membership.others(*PeerState))
        finished = {peer: record.finished for peer, record in newest.items()}
        worked = {peer: it for peer, it in finished.items() if self._peer_stats.has_worked(peer)}
        return any((worked or {p: it for p, it in finished.items() if self._peer_stats.met(p)}).values())

    def _are_gone_who_were_worked_with(self) -> bool:
        """Since this machine slept, to come to the target: who is awake sees them leave, or knows that they have died.

        Some times in a grace only: it reads all records."""
        now = self._membership.now()
        slept, self._awake_at = now - self._awake_at > self._grace, now
        if not 0.0 <= now - self._noted_at < self._grace / 4:  # below: this machine's clock was set back
            known = self._peer_stats
            records = [r for r in self._membership.others(*PeerState) if known.has_worked(PeerId(r.peer_id))]
            self.last_heard.note(records, self._membership.replicas_per_stage(), now, slept=slept)
            self._noted_at = now
            self._gone = self.last_heard.have_come_to(self._target, now, known.answers)
        return self._gone

    @property
    def _memory(self) -> float:
        """Seconds for which an origin counts by a microbatch."""
        return 2 * ORPHAN_GRACES * self._grace

    def _most_have_finished(self, seen: Sequence[OriginSeen]) -> bool:
        """On stage 0 nobody is outvoted: who trains goes on."""
        words = {peer: known.word for peer, known in self._known.items() if known.word is not PeerState.GONE}
        finished = {peer: word is PeerState.FINISHING for peer, word in words.items()}
        return self._origins is not None and _is_true_of_most(finished, seen)

    def _counting(self, records: Mapping[PeerId, PeerRecord], seen: Sequence[OriginSeen]) -> Collection[PeerId]:
        """Origins that count: those worked with, on stage 0 also those that answer and say that they train, for they
        may not have averaged yet; where nobody was worked with, those that answer."""
        ended = {peer for peer, known in self._known.items() if known.word is PeerState.FINISHING}
        answering = {peer for peer in records if self._peer_stats.answers(peer)}
        if self._origins is not None:
            worked = {each.origin for each in seen} | ended
            return worked or answering
        worked = {peer for peer in records if self._peer_stats.works(peer, within=float("inf"))} | ended
        return worked | {peer for peer in answering if not worked or not records[peer].finished}

    def _hear(self, records: Mapping[PeerId, PeerRecord], counting: Collection[PeerId], now: float) -> None:
        """Take in what the origins that count say; forget the others."""
        self._known = {peer: known for peer, known in self._known.items() if peer in counting}
        for peer in counting:
            record, before = records.get(peer), self._known.get(peer)
            if record is None:
                self._known.setdefault(peer, _Known(PeerState.TRAINING, 0.0, now))
            elif before is None:
                self._known[peer] = _Known(_word(record), record.clock, now)
            else:
                before.word = _word(record)
                before.rose_at = now if record.clock > before.clock else before.rose_at
                before.clock = record.clock

    def _stalled(self, sight: Sight) -> UserError:
        share = self._clock() / self._target
        if not sight.begun:
            why = "the run has not begun here"
        elif sight.held_up:
            few = too_few(sum(self._membership.replicas_per_stage()), self._membership.stages)
            why = f"a stage has no replica ({', '.join(map(str, self._membership.unserved()))}){few}"
        elif sight.training and self._membership.stage > 0:
            why = "a node of stage 0 says that it trains, but its clock stands still, or sends this node nothing"
        elif self._membership.stage > 0:
            why = "no replica of stage 0 that this node has worked with is seen any more"
        elif sight.finished:
            why = "others have come to its end meanwhile"
        else:
            why = "no microbatch comes back"
        return UserError(
            ExitCode.PEERS_UNREACHABLE,
            f"nothing has been trained here for {sight.idle:.0f} s, at {share:.0%} of the run's target: {why}",
            "look whether the run goes on and whether this machine is connected, then start the node again: it goes on "
            "from its checkpoint",
        )


def _is_true_of_most(origins: Mapping[PeerId, bool], seen: Sequence[OriginSeen]) -> bool:
    """By the work of these origins that was trained here, whatever number of names stands for it; where none was, by
    their number."""
    if not any(origins.values()):
        return False
    worked = [Voice(s.sender, s.origin, origins[s.origin], s.tokens) for s in seen if s.origin in origins]
    return bool(median_voice(worked or (Voice(peer, peer, true, 1) for peer, true in origins.items())))


def _word(record: PeerRecord) -> PeerState:
    if record.finished:
        return PeerState.FINISHING
    left = record.state in (PeerState.DRAINING, PeerState.GONE)
    return PeerState.GONE if left else PeerState.TRAINING
