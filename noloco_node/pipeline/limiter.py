"""Places for microbatches of other peers: how many this node holds at once, and how they are shared."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from noloco_node import ambient
from noloco_node.identity.peer_id import PeerId
from noloco_node.pauses import moved
from noloco_node.peer_table import PeerTimes
from noloco_node.peers.stats import WORK_SECONDS
from noloco_node.training.compute_thread import DeviceLoad
from noloco_node.transport.errors import Refusal, Refused
from noloco_node.transport.interface import Release

WANTED_SECONDS = 1.0
"""A refused peer is taken to want a place for so many seconds; it asks again within a fraction of that."""
AHEAD_SECONDS = 0.5
"""A microbatch is sent on to others if more than so many seconds of a device's work wait before it. To ask another peer
takes about as long."""
ASKS_TO_WAIT = 2
"""After so many asks that came to nothing, a microbatch may wait wherever there is a place. A sender that has asked all
the peers it sees counts as many."""


class MicrobatchLimiter:
    """At most `limit` microbatches at once, including those on their way.

    A quarter of the places (none of fewer than four) is kept from the peer that has most. One peer that fills what it
    can then shuts nobody out. A peer that was just refused has a place kept for it until it asks again, from a peer
    that has more than its part. While some peers' places came to something of late, half of all places are for them.
    Keys that were never seen before cost nothing, and a place is held for as long as its body is on its way.

    If the device has enough work waiting, a sender that has not asked around yet is refused as well. Another device may
    be idle, and only this node knows how long a microbatch takes here.
    """

    def __init__(
        self, limit: int, clock: Callable[[], float] = ambient.monotonic, load: Callable[[], DeviceLoad] = DeviceLoad
    ) -> None:
        self._limit = limit
        self._load = load
        self._usual = 0.0
        """Seconds of the device that a microbatch usually takes, steps and all; 0 before the first."""
        self._busy = load().busy_seconds
        self._limit_per_peer = limit - limit // 4
        self._clock = clock
        self._taken: dict[PeerId, int] = {}
        """The places each peer has taken; a peer without any is not listed."""
        self._count = 0
        self._answered: dict[PeerId, int] = {}
        """The number of a peer's places that were answered."""
        self._reliable = PeerTimes[PeerId]()
        """The peers with a place that lately came to something, and until when that counts."""
        self._wanted = PeerTimes[PeerId](limit)
        """The peers that were refused lately, and until when each is taken to want a place."""

    @property
    def taken(self) -> int:
        """Places taken now."""
        return self._count

    def held_by(self, peer: PeerId) -> int:
        """Places that this peer has taken now."""
        return self._taken.get(peer, 0)

    def take(self, peer: PeerId, asks: int = ASKS_TO_WAIT) -> Release:
        """A place for one microbatch of `peer`, which has asked so often for it before, this node or others; what is
        returned gives it back. Refused (`busy`) if none is free, or where it would wait and has not asked around."""
        if asks < ASKS_TO_WAIT and (ahead := self._ahead_of(peer)) * self._usual > AHEAD_SECONDS:
            raise Refused(Refusal.BUSY, f"{ahead} microbatches wait for the device before yours")
        if self._count >= self._limit:
            self._want(peer)
            raise Refused(Refusal.BUSY, f"{self._count} microbatches are pending here")
        of_peer = self._taken.get(peer, 0)
        if of_peer >= self._limit_per_peer or (self._wanted and self._keeps_for_others(peer, of_peer)):
            raise Refused(Refusal.BUSY, f"{of_peer} of your microbatches are pending here")
        if peer not in self._reliable and self._strangers_have_theirs():
            self._want(peer)
            raise Refused(Refusal.BUSY, "half of the places are for peers whose microbatches were trained here")
        if self._wanted:
            self._wanted.pop(peer, None)
        self._taken[peer] = of_peer + 1
        self._count += 1
        return partial(self._release, peer)

    def answered(self, peer: PeerId) -> None:
        """A place of `peer` came to something: the answer to its microbatch is ready."""
        self._answered[peer] = self._answered.get(peer, 0) + 1
        before, self._busy = self._busy, self._load().busy_seconds
        self._usual = moved(self._usual or None, self._busy - before)
        self._reliable[peer] = self._clock() + WORK_SECONDS

    def _release(self, peer: PeerId) -> None:
        if peer in self._answered:
            _one_less(self._answered, peer)
        else:
            self._reliable.pop(peer, None)
        _one_less(self._taken, peer)
        self._count -= 1

    def _ahead_of(self, peer: PeerId) -> int:
        """Count the microbatches waiting for the device whose turn comes before a new one of `peer`.

        Senders take turns, so a sender with many waiting is before it with one more than `peer` has itself. If all were
        counted, a sender that fills a device would have it alone, since every other one was sent on.
        """
        waiting = self._load().waiting
        if not waiting:
            return 0
        own = self._taken.get(peer, 0)
        turns = sum([min(count, own + 1) for other, count in self._taken.items() if other != peer])
        return min(waiting, own + turns)

    def _strangers_have_theirs(self) -> bool:
        """Whether peers that are not reliable hold all places that may be theirs."""
        theirs = max(1, self._limit - self._limit // 2)
        if self._count < theirs:
            return False
        self._reliable.expire(self._clock())
        strangers = sum([count for peer, count in self._taken.items() if peer not in self._reliable])
        return bool(self._reliable) and strangers >= theirs

    def _keeps_for_others(self, peer: PeerId, of_peer: int) -> bool:
        """Whether the places that are left are for others than `peer`, which has so many."""
        self._wanted.expire(self._clock())
        others = len(self._wanted.keys() - {peer})
        if self._limit - self._count > others:
            return False
        return of_peer >= max(1, self._limit // len({peer, *self._taken, *self._wanted}))

    def _want(self, peer: PeerId) -> None:
        self._wanted[peer] = self._clock() + WANTED_SECONDS


def _one_less(counts: dict[PeerId, int], peer: PeerId) -> None:
    left = counts[peer] - 1
    if left:
        counts[peer] = left
    else:
        del counts[peer]
