"""How long a fellow whose exchanges came to nothing is left alone: it must not keep a replica engaged for ever."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from noloco_node.swarm.transport import PeerId

REST_PER_SECOND_LOST = 3.0
"""Rest for each second that an exchange took in vain: one fellow costs another a quarter of its time at most."""
SHORTEST_REST_SECONDS = 1.0
LONGEST_REST_SECONDS = 120.0
"""Of the doubled shortest ones."""
FELLOWS_REMEMBERED = 1024


@dataclass(frozen=True, slots=True)
class Rest:
    """One fellow's exchanges that came to nothing since the last that did not, and when it may be met again."""

    in_vain: int = 0
    until: float = 0.0


def after_lost_exchange(rest: Rest, seconds: float, now: float) -> Rest:
    """The rest after an exchange that took `seconds` and came to nothing. The first in a row brings none: a fellow that
    died and came back must not wait. Each further one doubles the shortest rest."""
    if rest.in_vain == 0:
        return Rest(1, now)
    shortest = min(LONGEST_REST_SECONDS, SHORTEST_REST_SECONDS * 2.0 ** min(rest.in_vain, 16))
    return Rest(rest.in_vain + 1, now + max(shortest, REST_PER_SECOND_LOST * seconds))


class Patience:
    """The rests of all fellows. A bad network brings them as well as malice: it is no offence and leads to no ban."""

    def __init__(self) -> None:
        self._rests: OrderedDict[PeerId, Rest] = OrderedDict()

    def lost(self, peer: PeerId, seconds: float, now: float) -> None:
        """An exchange with `peer` came to nothing after so many seconds."""
        self._rests[peer] = after_lost_exchange(self._rests.pop(peer, Rest()), seconds, now)
        if len(self._rests) > FELLOWS_REMEMBERED:
            self._rests.popitem(last=False)

    def committed(self, peer: PeerId) -> None:
        """An exchange with `peer` came to its end: all is forgotten."""
        self._rests.pop(peer, None)

    def resting(self, peer: PeerId, now: float) -> bool:
        """Whether `peer` is to be left alone now."""
        return now < self._rests.get(peer, Rest()).until

    def ready(self, peers: Sequence[PeerId], now: float) -> Collection[PeerId]:
        """Whom to dial of `peers`: those that do not rest; where all do, all of them, for one must be the next."""
        return [peer for peer in peers if not self.resting(peer, now)] or peers
