"""What a node remembers by peer, bounded: a key costs a stranger nothing, so nothing may grow with the keys it uses."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TypeVar

MOST_PEERS = 4096
"""A table has so many entries if it is told no other number: a key costs a stranger nothing."""
FEW_PEERS = 128
"""A table that is searched for each microbatch, or holds much for each peer, has so many."""

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class PeerTable(OrderedDict[K, V]):
    """At most `most` entries, by peer or by what else strangers can make up: what was set longest ago goes first.

    It is read like any dictionary. What is in use without being set anew is kept by `move_to_end`.
    """

    def __init__(self, most: int | None = None, forgotten: Callable[[K, V], object] | None = None) -> None:
        """`most` is `MOST_PEERS` if it is None. `forgotten` is called with each entry that has to go."""
        super().__init__()
        self._most = MOST_PEERS if most is None else most
        self._forgotten = forgotten

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._most:
            gone = self.popitem(last=False)
            if self._forgotten is not None:
                self._forgotten(*gone)


class PeerTimes(PeerTable[K, float]):
    """Until when something holds for a peer: `times[peer] = until`. All times are seconds of one clock."""

    def holds(self, key: K, now: float) -> bool:
        """Whether it holds still."""
        return now < self.get(key, now)

    def expire(self, now: float) -> None:
        """Forget peers from the oldest entry on, up to the first that it still holds for. If it holds equally long for
        all, these are all that have expired. Otherwise some stay until those before them expire."""
        while self and next(iter(self.values())) <= now:
            self.popitem(last=False)
