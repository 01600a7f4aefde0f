"""Places for microbatches of other peers: how many this node holds at once, and how they are shared."""

from __future__ import annotations

from collections import Counter

from noloco_node.swarm.transport import PeerId, Refusal, Refused, Release


class Places:
    """At most `limit` microbatches at once, those on their way included. A quarter of the places (none of fewer than
    four) is for others than whoever has most: one peer that fills what it can get shuts nobody out."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._limit_per_peer = limit - limit // 4
        self._taken: Counter[PeerId] = Counter()

    @property
    def taken(self) -> int:
        """Places taken now."""
        return self._taken.total()

    def take(self, peer: PeerId) -> Release:
        """A place for one microbatch of `peer`; what is returned gives it back. Refused (`busy`) if none is free."""
        if self.taken >= self._limit:
            raise Refused(Refusal.BUSY, f"{self.taken} microbatches are pending here")
        if self._taken[peer] >= self._limit_per_peer:
            raise Refused(Refusal.BUSY, f"{self._taken[peer]} of your microbatches are pending here")
        self._taken[peer] += 1

        def release() -> None:
            self._taken[peer] -= 1
            if not self._taken[peer]:
                del self._taken[peer]

        return release
