"""A ration of what exchanges with others may cost a replica: their number, and the seconds for which they hold it.

A replica has one exchange at a time, so a partner that holds it keeps all others away. Seconds count even if an
exchange comes to nothing. Otherwise a partner that lets chunks drip could hold a whole stage, and nothing would look
amiss.
"""

from __future__ import annotations

import statistics
from collections import deque

from noloco_node.identity.peer_id import PeerId
from noloco_node.peer_table import PeerTable

STAGE_PEERS_REMEMBERED = 1024
VISITS_SAVED = 2.0
"""A stage peer may make so many visits one after the other, since partners meet by chance."""
REST_PER_SECOND_GIVEN = 19.0
"""Newcomers that held this replica for a second rest for so many: together they take a twentieth of its time."""
INTERVALS_REMEMBERED = 16
"""So many latest times between two outer steps are kept. Their median is the usual one; a few slow partners cannot make
it longer."""
STRANGERS = PeerId("")
"""One account for all peers that this replica has seen no work of: a new key costs such a peer nothing."""


class Visits:
    """The ration of one replica.

    In the long run each stage peer gets an equal part of the outer steps. All peers together that this replica has seen
    no work of get one such part. Honest peers come half as often, for they are dialled as often as they dial. A visit
    that lasts for several outer steps costs as many visits.

    All times are seconds of one clock that never goes back.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._saved = PeerTable[PeerId, tuple[float, int]](STAGE_PEERS_REMEMBERED)
        """Visits that a stage peer might still make, after that many outer steps."""
        self._late = PeerTable[PeerId, tuple[float, int]](STAGE_PEERS_REMEMBERED)
        """Outer steps that exchanges dialled by this replica cost it beyond their own, after that many steps."""
        self._stepped_at: float | None = None
        self._intervals = deque[float](maxlen=INTERVALS_REMEMBERED)
        self._gives_again = 0.0
        self._free = 0.0
        """Visits that a committed exchange costs less than it would."""

    def begin_last_round(self) -> None:
        """This replica takes its last outer step, and answers all that take theirs.

        All begin anew, and come as often as they like. Only their time counts.
        """
        self._saved.clear()
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
        self._saved[dialler] = self._left(dialler, stage_peers) - visits, self._steps

    def too_many(self, dialler: PeerId, stage_peers: int) -> bool:
        """Whether `dialler` has had its part for now."""
        return self._left(dialler, stage_peers) < 1.0

    def dialled(self, partner: PeerId, stage_peers: int, seconds: float) -> None:
        """An exchange for which this replica dialled `partner` was committed after so many seconds."""
        owed = self._owed(partner, stage_peers) + max(0.0, self.cost(seconds) - 1.0)
        self._late[partner] = owed, self._steps

    def too_slow(self, partner: PeerId, stage_peers: int) -> bool:
        """Whether `partner` lately held this replica for longer than its part, and is not dialled for now."""
        return self._owed(partner, stage_peers) > VISITS_SAVED

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
        left, since = self._saved.get(dialler, (VISITS_SAVED, self._steps))
        return min(VISITS_SAVED, left + (self._steps - since) / max(1, stage_peers))

    def _owed(self, partner: PeerId, stage_peers: int) -> float:
        owed, since = self._late.get(partner, (0.0, self._steps))
        return max(0.0, owed - (self._steps - since) / max(1, stage_peers))
