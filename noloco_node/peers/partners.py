"""The stage peers of one replica: how long each is left alone, how often it may come, and which of them count.

A peer whose exchanges come to nothing must not keep a replica engaged for ever. A replica has one exchange at a time,
so a partner that holds it keeps all others away. Seconds count even if an exchange comes to nothing: otherwise a
partner that lets chunks drip could hold a whole stage. A slow line is used less where there is another, and never not
at all: it may be quicker by now.

Newcomers are on probation: they are pulled towards their stage peers before they pull anybody themselves.

An exchange in which the dialled side does not count the dialler is *weightless*. The dialler commits as ever; the
dialled side gives its half and changes nothing. Two kinds of newcomers are not counted. A late joiner says so itself.
Any peer is new, whatever it says, that this replica came to know only after its own first outer step. Saying too
little therefore gains a peer nothing, and saying too much only costs it its own weight.

Both kinds count once one exchange has shown that their distance is in line, or after a bounded number of inner steps.
Probation shuts out what is broken. It does not stop a hostile and patient peer; the bound on every partner's pull does.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from noloco_node.identity.peer_id import PeerId
from noloco_node.peers.hop import LEAST_WEIGHT, LONGEST_MEMORY_SECONDS, REST_A_SECOND, slowness
from noloco_node.peers.scorecard import Partner, PeerBook
from noloco_node.tallies import NO_REST, RECENT, Doubling, Rest, moved

RESTS = Doubling(1.0, 120.0)
"""These are the shortest rests in seconds: the first is 1 s, each further one is twice as long, up to 120 s."""
VISITS_SAVED = 2.0
"""A stage peer may make so many visits one after the other, since partners meet by chance."""
REST_PER_SECOND_GIVEN = 19.0
"""Newcomers that held this replica for a second rest for so many: together they take a twentieth of its time."""
STRANGERS = PeerId("")
"""One account for all peers that this replica has seen no work of: a new key costs such a peer nothing."""
PROBATION_ROUNDS = 4
"""Probation lasts at most so many outer steps of H inner steps. A newcomer that no stage peer had time for stays on
probation for so many times that bound, since its copy is as old as when it came."""
LOSS_TOLERANCE = 1.1
"""A newcomer whose loss is more than so many times a stage peer's is not in line with it."""

Ending = Literal["in_line", "time"]


def after_lost_exchange(rest: Rest, seconds: float, now: float) -> Rest:
    """The rest after an exchange that took `seconds` and came to nothing. The first in a row brings none: a stage peer
    that died and came back must not wait. Each further one doubles the shortest rest."""
    return rest.again(RESTS, now, at_least=REST_A_SECOND * seconds) if rest.times else Rest(1, now)


class Partners:
    """One replica's dealings with its stage peers.

    In the long run each stage peer gets an equal part of the outer steps. All peers together that this replica has seen
    no work of get one such part. Honest peers come half as often, for they are dialled as often as they dial. A visit
    that lasts for several outer steps costs as many visits. A bad network and a state that was lost bring rests as well
    as malice: they are no offence and lead to no ban. All times are seconds of one clock that never goes back.
    """

    def __init__(self, book: PeerBook | None = None) -> None:
        self._book = book or PeerBook()
        self._steps = 0
        self._stepped_at: float | None = None
        self._intervals = deque[float](maxlen=RECENT)
        self._gives_again = 0.0
        self._free = 0.0
        """Visits that a committed exchange costs less than it would."""

    def lost(self, peer: PeerId, seconds: float, now: float) -> None:
        """An exchange with `peer` came to nothing after so many seconds."""
        known = self._book.partner(peer)
        known.lost = after_lost_exchange(known.lost, seconds, now)

    def committed(self, peer: PeerId) -> None:
        """An exchange with `peer` came to its end: those that did not are forgotten."""
        self._book.partner(peer).lost = NO_REST

    def resting(self, peer: PeerId, now: float) -> bool:
        """Tell whether `peer` is left alone now because its exchanges come to nothing."""
        known = self._book.of(peer).partner
        return known is not None and known.lost.holds(now)

    def ready(self, peers: Sequence[PeerId], now: float) -> Collection[PeerId]:
        """Those of `peers` that may be dialled: all that do not rest. If all rest, it returns all of them, for one must
        be next."""
        return [peer for peer in peers if not self.resting(peer, now)] or peers

    def begin_last_round(self) -> None:
        """This replica takes its last outer step, and answers all that take theirs.

        All begin anew, and come as often as they like. Only their time counts.
        """
        for _, known in self._book.partners:
            known.saved = None
        self._free = 1.0

    def stepped(self, now: float | None = None) -> None:
        """This replica has taken an outer step, with a partner or alone; `now` is None where no time passes."""
        self._steps += 1
        if now is not None:
            if self._stepped_at is not None:
                self._intervals.append(now - self._stepped_at)
            self._stepped_at = now

    def cost(self, seconds: float) -> float:
        """The outer steps that a replica usually takes in so many seconds; one while that is not known."""
        usual = statistics.median(self._intervals) if self._intervals else 0.0
        return seconds / usual if usual > 0.0 else 1.0

    def made(self, dialler: PeerId, stage_peers: int, seconds: float = 0.0, *, committed: bool = True) -> None:
        """An exchange that `dialler` had dialled is over, after so many `seconds`; `stage_peers` live beside this
        replica. One that was committed is a visit at least."""
        visits = max(1.0, self.cost(seconds)) - self._free if committed else self.cost(seconds)
        self._book.partner(dialler).saved = self._left(dialler, stage_peers) - visits, self._steps

    def too_many(self, dialler: PeerId, stage_peers: int) -> bool:
        """Whether `dialler` has had its part for now."""
        return self._left(dialler, stage_peers) < 1.0

    def gave(self, seconds: float, now: float) -> None:
        """A weightless exchange is over, in whatever way, after so many seconds."""
        self._gives_again = now + REST_PER_SECOND_GIVEN * seconds

    def may_give(self, now: float) -> bool:
        """Tell whether a weightless exchange may be answered now.

        The ration is for all newcomers together. A crowd of them, or one with a new key each time, would keep this
        replica from its own averaging.
        """
        return now >= self._gives_again

    def _left(self, dialler: PeerId, stage_peers: int) -> float:
        known = self._book.of(dialler).partner
        left, since = (known and known.saved) or (VISITS_SAVED, self._steps)
        return min(VISITS_SAVED, left + (self._steps - since) / max(1, stage_peers))

    def exchanged(self, stage_peer: PeerId, seconds: float, sent_and_received: int, now: float) -> None:
        """An outer step with a stage peer took so long, for so many bytes both ways together."""
        known = self._book.partner(stage_peer)
        known.committed += 1
        if sent_and_received <= 0:
            return
        known.seconds_per_byte = moved(_known_way(known, now), seconds / sent_and_received)
        known.carried_at = now

    def weights(self, stage_peers: Sequence[PeerId], now: float) -> list[float]:
        """How often to choose each of the stage peers, in their order."""
        return way_weights([_known_way(self._book.of(stage_peer).partner, now) for stage_peer in stage_peers])


def _known_way(partner: Partner | None, now: float) -> float | None:
    """The seconds per byte that a stage peer's line was seen to take of late."""
    if partner is None or now - partner.carried_at >= LONGEST_MEMORY_SECONDS:
        return None
    return partner.seconds_per_byte


def way_weights(seconds_per_byte: Sequence[float | None]) -> list[float]:
    """How often to choose each way, beside 1 for a quick one; None is not known, and so not slow.

    The quicker half of the known ways says what is slow.
    """
    known = sorted(each for each in seconds_per_byte if each is not None)
    quick = known[(len(known) - 1) // 2] if known else 0.0
    return [max(LEAST_WEIGHT, slowness(seconds or 0.0, quick)) for seconds in seconds_per_byte]


@dataclass(frozen=True, slots=True)
class Meeting:
    """What one exchange showed of two replicas, as one of them measured it."""

    difference: float
    """The norm of the difference between the two replicas, before clipping."""
    bound: float
    """The largest difference that the deciding replica accepts whole (`DifferenceBound.bound`).

    A newcomer takes the smaller of its own and the stage peer's bound, since its own motion, were it wild, would excuse
    every distance.
    """
    own_loss: float | None = None
    """Recent training loss of the newcomer; None where it is not known or does not matter."""
    stage_peer_loss: float | None = None
    """Recent training loss of the other, as that one says."""


def in_line(meeting: Meeting) -> bool:
    """Tell whether the newcomer is where its stage peers are.

    It is so near that nothing would be clipped. If both losses are known, its own is at most a tenth above the other's.
    """
    if not meeting.difference <= meeting.bound:  # not `>`: NaN is in line with nothing
        return False
    if meeting.own_loss is None or meeting.stage_peer_loss is None:
        return True
    return meeting.own_loss <= LOSS_TOLERANCE * meeting.stage_peer_loss


class RecentLoss:
    """The mean training loss over the last inner steps, by tokens."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, int]] = deque(maxlen=RECENT)

    def add(self, loss: float, tokens: int) -> None:
        if tokens > 0:
            self._steps.append((loss, tokens))

    @property
    def mean(self) -> float | None:
        """Nats per token; None before the first step."""
        tokens = sum(count for _, count in self._steps)
        return sum(loss * count for loss, count in self._steps) / tokens if tokens else None


class ProbationStanding:
    """One replica's view of itself and its stage peers: which of them count. `limit` is the bound in inner steps.

    Methods take this replica's own inner steps so far where time matters. `on_end` is told why and after how many inner
    steps its own probation ended.
    """

    def __init__(self, inner_steps: int, on_end: Callable[[Ending, int], None], book: PeerBook | None = None) -> None:
        self._on_end = on_end
        self.limit = PROBATION_ROUNDS * inner_steps
        self.loss = RecentLoss()
        self._joined_at: int | None = None
        self._drawn = False
        self._book = book or PeerBook()
        self._settled = False

    def begin(self, steps: int) -> None:
        """This replica has just become a copy of a stage peer: it does not count for now."""
        self._joined_at, self._drawn = steps, False

    @property
    def newcomer(self) -> bool:
        return self._joined_at is not None

    def met(self, meeting: Meeting | None, steps: int) -> None:
        """After an exchange of this newcomer, or after an inner step (None): its probation may end. Time alone does not
        end it soon: what it copied may be long past, and only an exchange tells it what time it is."""
        if self._joined_at is None:
            return
        self._drawn |= meeting is not None
        lasted = steps - self._joined_at
        aligned = meeting is not None and in_line(meeting)
        if aligned or lasted >= self.limit * (1 if self._drawn else PROBATION_ROUNDS):
            self._joined_at = None
            self._on_end("in_line" if aligned else "time", lasted)

    def look(self, stage_peers: Iterable[PeerId], steps: int, *, outer_rounds: int) -> None:
        """The directory was read. A peer is no newcomer if it is seen before this replica's own first outer step, or
        at the first look after it."""
        for peer in stage_peers:
            known = self._book.partner(peer)
            if known.came_at is None:
                known.came_at = steps if self._settled else -math.inf
        self._settled = self._settled or outer_rounds > 0

    def counts(self, peer: PeerId, steps: int) -> bool:
        """Tell whether an exchange with this peer moves this replica.

        Time makes a peer count only if it was seen in the directory. A key that has merely asked stays new; otherwise
        one stranger could let many grow old at once.
        """
        known = self._book.of(peer).partner
        if known is None or known.came_at is None:
            return not self._settled
        return steps - known.came_at >= self.limit

    def measured(self, peer: PeerId, meeting: Meeting) -> None:
        """A weightless exchange with `peer` is complete: it counts from the next one on if it was in line."""
        if in_line(meeting):
            self._book.partner(peer).came_at = -math.inf

    def partners(self, stage_peers: Sequence[PeerId], declared: Collection[PeerId], steps: int) -> list[PeerId]:
        """Stage peers that are worth dialling: they do not declare themselves newcomers, and would move this replica.

        A newcomer is moved by every peer that counts itself.
        """
        return [peer for peer in stage_peers if peer not in declared and (self.newcomer or self.counts(peer, steps))]
