"""Peers that vanished from the directory without a farewell, and the time when each is asked for next.

A network that falls into two halves leaves two directories: each half forgets the other's nodes within a minute. Once
the network is whole again nothing would ever bring the halves together. So a node keeps asking for those that it lost,
ever more rarely; one answer on one node joins the halves.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

from noloco_node.directory.records import DirectoryView, PeerState
from noloco_node.identity.peer_id import PeerId
from noloco_node.pauses import Doubling
from noloco_node.peer_table import FEW_PEERS, PeerTable
from noloco_node.peers.stats import PeerStats

PAUSES = Doubling(5.0, 60.0)
FORGET_SECONDS = 86_400.0


@dataclass(slots=True)
class _Lost:
    since: float
    next_try: float
    worth: int
    asked_for: int = 0


class LostPeers:
    """The missed peers; pure state, no clock of its own.

    It holds at most `FEW_PEERS`: first those that this node has seen work, then those that have answered it.
    Chance decides among equals, so that the last lost has a place.
    """

    def __init__(self, own: PeerId, rng: random.Random, known: PeerStats) -> None:
        self._own = own
        self._rng = rng
        self._known = known
        self._lost = PeerTable[PeerId, _Lost](FEW_PEERS)

    @property
    def missed(self) -> tuple[PeerId, ...]:
        """Those that are asked for, the one lost longest ago first."""
        return tuple(self._lost)

    def seen(self, old: DirectoryView, new: DirectoryView, now: float) -> None:
        """Compare two views: a peer that is gone from the second without having said so is missed, one that is in it is
        not."""
        present = {peer for rows in new.stages for peer in rows} | {self._own}
        farewells = {peer for rows in old.stages for peer, row in rows.items() if row.record.state is PeerState.GONE}
        self._forget(present | farewells)
        for rows in old.stages:
            for peer in rows.keys() - present - farewells - self._lost.keys():
                worth = self._known.has_worked(peer) + self._known.met(peer)
                if self._make_room(worth):
                    self._lost[peer] = _Lost(now, now + PAUSES.about(0, self._rng), worth)
        self._forget([peer for peer, lost in self._lost.items() if now - lost.since > FORGET_SECONDS])

    def due(self, now: float) -> PeerId | None:
        """The peer to ask for now, or None; the next time for it is set."""
        for lost in self._lost.values():  # no pause is longer, unless the clock has gone back since
            lost.next_try = min(lost.next_try, now + 1.5 * PAUSES.longest)
        waiting = [peer for peer, lost in self._lost.items() if lost.next_try <= now]
        if not waiting:
            return None
        peer = self._rng.choice(waiting)
        lost = self._lost[peer]
        lost.next_try = now + PAUSES.about(lost.asked_for, self._rng)
        lost.asked_for += 1
        return peer

    def _make_room(self, worth: int) -> bool:
        """A crowd that leaves must not push out those that this node has worked with: halves come together by them."""
        if len(self._lost) < FEW_PEERS:
            return True
        least = min(lost.worth for lost in self._lost.values())
        if worth < least:
            return False
        del self._lost[self._rng.choice([peer for peer, lost in self._lost.items() if lost.worth == least])]
        return True

    def _forget(self, peers: Iterable[PeerId]) -> None:
        for peer in peers:
            self._lost.pop(peer, None)
