"""This module decides how long a stage peer is left alone.

A peer whose exchanges come to nothing must not keep a replica engaged for ever. A peer whose weights stay far away must
not pull at it for ever. `averaging.visits` counts the cost of exchanges that succeed.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from noloco_node.identity.peer_id import PeerId
from noloco_node.pauses import Doubling
from noloco_node.peer_table import PeerTable
from noloco_node.transport.bans import ban_seconds

logger = logging.getLogger(__name__)

REST_PER_SECOND_LOST = 3.0
"""A stage peer rests so many seconds for each second of a lost exchange. It costs another a quarter of its time at
most."""
RESTS = Doubling(1.0, 120.0)
"""These are the shortest rests in seconds: the first is 1 s, each further one is twice as long, up to 120 s."""
FAR = 2.0
"""A stage peer's weights are far away if they differ by more than this multiple of the bound on differences."""
STAGE_PEERS_REMEMBERED = 1024


@dataclass(frozen=True, slots=True)
class Rest:
    """One stage peer's exchanges that came to nothing since the last that did not, and when it may be met again."""

    in_vain: int = 0
    until: float = 0.0


def after_lost_exchange(rest: Rest, seconds: float, now: float) -> Rest:
    """The rest after an exchange that took `seconds` and came to nothing. The first in a row brings none: a stage peer
    that died and came back must not wait. Each further one doubles the shortest rest."""
    if rest.in_vain == 0:
        return Rest(1, now)
    return Rest(rest.in_vain + 1, now + max(RESTS.after(rest.in_vain), REST_PER_SECOND_LOST * seconds))


@dataclass(frozen=True, slots=True)
class Distance:
    """How far away one stage peer's weights were when they were last averaged, and when they may be again."""

    norm: float = 0.0
    """The norm of the difference between both weights if it was far, else 0."""
    rests: int = 0
    until: float = 0.0


def after_meeting(distance: Distance, norm: float, bound: float, now: float) -> Distance:
    """The distance after an exchange with weights at `norm`; a difference of `bound` would be taken whole, 0 is not
    known yet.

    A peer that is far twice in a row, and no nearer than before, is left alone, each time for twice as long. A near
    peer is met as ever.
    """
    if bound == 0.0:
        return distance
    if norm <= FAR * bound:
        return Distance(0.0, distance.rests)
    if distance.norm == 0.0 or norm < distance.norm:
        return Distance(norm, distance.rests, distance.until)
    seconds, rests = ban_seconds(distance.rests, distance.until, now)
    return Distance(norm, rests, now + seconds)


class BackOff:
    """The rests of all stage peers. A bad network and a state that was lost bring them as well as malice: they are no
    offence and lead to no ban."""

    def __init__(self) -> None:
        self._rests = PeerTable[PeerId, Rest](STAGE_PEERS_REMEMBERED)
        self._distances = PeerTable[PeerId, dict[int | None, Distance]](STAGE_PEERS_REMEMBERED)

    def lost(self, peer: PeerId, seconds: float, now: float) -> None:
        """An exchange with `peer` came to nothing after so many seconds."""
        self._rests[peer] = after_lost_exchange(self._rests.get(peer, Rest()), seconds, now)

    def committed(self, peer: PeerId) -> None:
        """An exchange with `peer` came to its end: those that did not are forgotten."""
        self._rests.pop(peer, None)

    def met(self, peer: PeerId, fragment: int | None, norm: float, bound: float, now: float) -> None:
        """A fragment (None: all) was averaged with `peer`; see `after_meeting`."""
        distances = self._distances[peer] = self._distances.get(peer, {})
        before = distances.get(fragment, Distance())
        after = distances[fragment] = after_meeting(before, norm, bound, now)
        if after.rests != before.rests:
            what = "its weights stay %.1f times as far away as is taken whole: it is left alone for %.0f s"
            logger.warning(f"%s: {what}", peer, norm / bound, after.until - now)

    def resting(self, peer: PeerId, now: float) -> bool:
        """Tell whether `peer` is left alone now because its exchanges come to nothing."""
        return now < self._rests.get(peer, Rest()).until

    def stays_far(self, peer: PeerId, now: float) -> bool:
        """Tell whether `peer` is left alone now because its weights stay far away."""
        return any(now < distance.until for distance in self._distances.get(peer, {}).values())

    def forget_distances(self) -> None:
        """This replica has other weights now: a peer that was far from the former ones need not be far from these."""
        self._distances.clear()

    def ready(self, peers: Sequence[PeerId], now: float) -> Collection[PeerId]:
        """Those of `peers` that may be dialled: all that do not rest. If all rest, it returns all of them, for one must
        be next."""
        return [p for p in peers if not self.resting(p, now) and not self.stays_far(p, now)] or peers
