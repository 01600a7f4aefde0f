"""How many replicas train beside this one: by what they have shown, never by their records alone.

A peer that worked counts in full, until it has had its fair chance to show more and did not. Of peers that were there
from the start, answer and have shown nothing yet, the share counts that turned out to work among those that were asked.
Of peers that came later a few are welcome at once. A peer that does not answer counts nothing.

A large stage is seen in part, and not all of that part can be called at once. Those not called yet are as often there
as those that were (`seen_there`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from noloco_node import ambient
from noloco_node.directory.records import DirectoryView, PeerRecord, PeerState
from noloco_node.identity.peer_id import PeerId
from noloco_node.peers.scorecard import PeerStats
from noloco_node.tallies import QUIET_PAUSES, RECENT, PeerTable
from noloco_node.telemetry.node_state import FEW_STEPS

PRIOR = 3.0
"""The number of stage peers that are taken to have worked at a common start, before any has been asked. After `RECENT`
asks nothing of that is left."""
WORK_AN_ASK = 0.25
"""At least this share of honest peers comes to work in the window in which they are asked."""
WELCOME_SHARE = 0.25
"""Newcomers that answer count up to this share of the peers that have shown work, and at least one."""


@dataclass(slots=True)
class _Seen:
    """What this replica has followed of one stage peer since it was introduced. Times are monotonic seconds."""

    clock: float
    moved_at: float
    """When its clock was last seen to move, and this replica's own inner steps by then."""
    moved_step: int
    pause: float = 0.0
    """Seconds between its clock's last two moves."""


def is_there(known: PeerStats, record: PeerRecord) -> bool:
    """Tell whether the peer of a record answers this node, and says itself that it serves what the record says.

    A peer on its way to a stage must say that it takes part in the run.
    """
    peer = PeerId(record.peer_id)
    return known.takes_part(peer) if record.state is PeerState.JOINING else known.serves(peer, record.stage)


def seen_there(
    view: DirectoryView, known: PeerStats, now: float, stage: int, *states: PeerState, without: PeerId | None
) -> tuple[list[PeerRecord], float]:
    """The records of a stage's nodes that are there at DHT time `now`, but `without`, and for how many each stands.

    Where the stage is seen in part, records of nodes that were not asked yet count as far as those of others do.
    """
    rows = [record for record in view.live(stage, now, *states) if record.peer_id != without]
    there = [record for record in rows if is_there(known, record)]
    each = view.scale(stage).each
    if each > 1.0 and there:
        each *= len(rows) / (len(rows) - len(unasked(known, rows)))
    return there, each


def unasked(known: PeerStats, records: Iterable[PeerRecord]) -> list[PeerId]:
    """The peers of records of which nothing is known but that they are introduced."""
    others = [record for record in records if not is_there(known, record)]
    return [peer for record in others if known.unsure(peer := PeerId(record.peer_id), record.stage)]


def proven_share(asks: int, worked: int) -> float:
    """The share that counts of stage peers that were there from the start, answer and have shown nothing yet.

    It follows from so many `asks` for work of their like, of which so many `worked`.
    """
    prior = PRIOR * max(0.0, 1.0 - asks / RECENT)
    expected = max(float(worked), WORK_AN_ASK * asks)
    return (worked + prior) / (expected + prior) if worked + prior else 0.0


def count(working: int, first: int, later: int, first_share: float) -> float:
    """The number of replicas: this one, the `working` ones, and a share of the others.

    The `first` ones, there from the start, count with `first_share`. Of those that came `later` a few are welcome.
    """
    return 1.0 + working + first * first_share + min(float(later), max(1.0, WELCOME_SHARE * working))


class LiveReplicaEstimate:
    """Follows the stage peers of one replica."""

    def __init__(self, known: PeerStats, clock: Callable[[], float] = ambient.monotonic) -> None:
        self._known = known
        self._clock = clock
        self._seen: dict[PeerId, _Seen] = {}
        self._first = PeerTable[PeerId, None]()
        """The peers that may have come together with this replica.

        They were introduced before work of a stage peer was seen, or while the stage was seen in part. They are not new
        if their records ended and are there again: all stood still, or this node was cut off.
        """
        self._settled, self._began_at = False, math.inf
        """Whether work of a stage peer was seen since the first look, and when that was."""
        self._was_sampled = False
        self._own_steps = 0
        self._still_seconds = math.inf
        self._looked_at = -math.inf

    def look(
        self, stage_peers: Iterable[PeerRecord], own_steps: int, record_seconds: float, *, sampled: bool = False
    ) -> None:
        """Take in the records of the stage peers that say they train; `sampled` as in `replicas`."""
        now, before = self._clock(), self._seen
        self._began_at = min(self._began_at, now)
        early = not self._settled or sampled or self._was_sampled
        self._was_sampled = sampled
        self._still_seconds, self._own_steps, self._looked_at = record_seconds, own_steps, now
        self._seen = {}
        for record in stage_peers:
            peer = PeerId(record.peer_id)
            seen = before.get(peer)
            if seen is None:
                seen = _Seen(record.clock, now, own_steps)
                if early:
                    self._first[peer] = None
            if seen.clock != record.clock:
                seen.pause = now - seen.moved_at
                seen.clock, seen.moved_at, seen.moved_step = record.clock, now, own_steps
            self._seen[peer] = seen
        self._settled = self._settled or any(self._known.of(p).worked_at >= self._began_at for p in self._seen)

    def works(self, peer: PeerId) -> bool:
        """Whether work of this stage peer was seen here, and nothing has spoken against it since."""
        return self._known.has_worked(peer) and not self.idles(peer)

    def idles(self, peer: PeerId) -> bool:
        """Tell whether this stage peer had its fair chance to work with this replica and did not.

        The same holds if its own records show a clock that stands still while this one's moves on.
        """
        seen = self._seen.get(peer)
        return self._known.failed(peer) or (seen is not None and self._stands_still(seen))

    def replicas(self, answering: Iterable[PeerId], *, sampled: bool = False) -> float:
        """An estimate of the replicas of the stage that train, this one and so many `answering` peers included.

        In a stage that is `sampled` a peer's coming does not say how long it has been there: all that have shown
        nothing yet count alike.
        """
        working, first, later = 0, 0, 0
        for peer in answering:
            if self.idles(peer):
                continue
            seen = self._seen.get(peer)
            if self._known.has_worked(peer):
                working += 1
            elif sampled or not self._settled or seen is None or peer in self._first:
                first += 1
            else:
                later += 1
        return count(working, first, later, proven_share(*self._known.asks_lately()))

    def _stands_still(self, seen: _Seen) -> bool:
        """Whether its clock has not moved though there was time for it, by the last look: after that no record was read
        that could say so."""
        paused, steps = self._looked_at - seen.moved_at, self._own_steps - seen.moved_step
        return steps >= FEW_STEPS and paused >= max(self._still_seconds, QUIET_PAUSES * seen.pause)
