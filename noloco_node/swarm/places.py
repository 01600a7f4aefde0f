"""Places for microbatches of other peers: how many this node holds at once, and how they are shared."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable

from noloco_node.swarm.transport import PeerId, Refusal, Refused, Release

WANTED_SECONDS = 1.0
"""How long a peer that was refused is taken to want a place still: it asks again within a fraction of that."""


class Places:
    """At most `limit` microbatches at once, those on their way included. A quarter of the places (none of fewer than
    four) is for others than whoever has most: one peer that fills what it can get shuts nobody out. Places that
    others found taken just now are kept for them, until they ask again, from whoever has more than its part."""

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._limit_per_peer = limit - limit // 4
        self._clock = clock
        self._taken: Counter[PeerId] = Counter()
        self._wanted: OrderedDict[PeerId, float] = OrderedDict()
        """Who was refused last, and until when it is taken to want a place; at most `limit` of them."""

    @property
    def taken(self) -> int:
        """Places taken now."""
        return self._taken.total()

    def take(self, peer: PeerId) -> Release:
        """A place for one microbatch of `peer`; what is returned gives it back. Refused (`busy`) if none is free."""
        if self.taken >= self._limit:
            self._want(peer)
            raise Refused(Refusal.BUSY, f"{self.taken} microbatches are pending here")
        if self._taken[peer] >= self._limit_per_peer or self._keeps_for_others(peer):
            raise Refused(Refusal.BUSY, f"{self._taken[peer]} of your microbatches are pending here")
        self._wanted.pop(peer, None)
        self._taken[peer] += 1

        def release() -> None:
            self._taken[peer] -= 1
            if not self._taken[peer]:
                del self._taken[peer]

        return release

    def _keeps_for_others(self, peer: PeerId) -> bool:
        """Whether the places that are left are for others than `peer`."""
        now = self._clock()
        while self._wanted and next(iter(self._wanted.values())) <= now:
            self._wanted.popitem(last=False)
        others = len(self._wanted.keys() - {peer})
        if self._limit - self.taken > others:
            return False
        return self._taken[peer] >= max(1, self._limit // len({peer, *self._taken, *self._wanted}))

    def _want(self, peer: PeerId) -> None:
        self._wanted[peer] = self._clock() + WANTED_SECONDS
        self._wanted.move_to_end(peer)
        if len(self._wanted) > self._limit:
            self._wanted.popitem(last=False)
