"""The stage peers of one replica: how long each is left alone, how often it may come, and how quick its line is.

A peer whose exchanges come to nothing must not keep a replica engaged for ever. A replica has one exchange at a time,
so a partner that holds it keeps all others away. Seconds count even if an exchange comes to nothing: otherwise a
partner that lets chunks drip could hold a whole stage. A slow line is used less where there is another, and never not
at all: it may be quicker by now.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection, Sequence

from noloco_node.identity.peer_id import PeerId
from noloco_node.pauses import NO_REST, RECENT, Doubling, Rest, moved
from noloco_node.peers.latency import LEAST_WEIGHT, LONGEST_MEMORY_SECONDS, slowness
from noloco_node.peers.scorecard import Partner, PeerBook

REST_PER_SECOND_LOST = 3.0
"""A stage peer rests so many seconds for each second of a lost exchange. It costs another a quarter of its time at
most."""
RESTS = Doubling(1.0, 120.0)
"""These are the shortest rests in seconds: the first is 1 s, each further one is twice as long, up to 120 s."""
VISITS_SAVED = 2.0
"""A stage peer may make so many visits one after the other, since partners meet by chance."""
REST_PER_SECOND_GIVEN = 19.0
"""Newcomers that held this replica for a second rest for so many: together they take a twentieth of its time."""
STRANGERS = PeerId("")
"""One account for all peers that this replica has seen no work of: a new key costs such a peer nothing."""


def after_lost_exchange(rest: Rest, seconds: float, now: float) -> Rest:
    """The rest after an exchange that took `seconds` and came to nothing. The first in a row brings none: a stage peer
    that died and came back must not wait. Each further one doubles the shortest rest."""
    return rest.again(RESTS, now, at_least=REST_PER_SECOND_LOST * seconds) if rest.times else Rest(1, now)


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
