"""How many replicas train beside this one: by what they have shown, never by their records alone.

A peer that worked counts in full, until it has had its fair chance to show more and did not. A peer that answers and
has shown nothing yet counts in part. Its part is the share of peers that turned out to work, among peers drawn at
random that came no earlier. At a common start, before anybody has shown anything, it counts as if they all did. A peer
that does not answer counts nothing.

A large stage has more peers than can be called in a minute. Those not called yet count by the share of those called,
drawn at random, that came no earlier.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from noloco_node import ambient
from noloco_node.directory.records import PeerRecord, PeerState
from noloco_node.identity.peer_id import PeerId
from noloco_node.pauses import QUIET_PAUSES
from noloco_node.peer_table import PeerTable
from noloco_node.peers.stats import SAMPLE, WORK_AN_ASK, PeerStats, safe_share

PRIOR = 3.0
"""The number of stage peers that are taken to have worked at a common start, before any has been asked."""
WELCOME_SHARE = 0.25
"""Newcomers that answer count at once up to this share of the peers that have shown work, and at least one."""
STILL_STEPS = 8
"""A stage peer whose clock stands still for so many inner steps of this replica does not train."""


@dataclass(slots=True)
class _Seen:
    """What this replica has followed of one stage peer since it was introduced. Times are monotonic seconds."""

    since: float
    clock: float
    first_step: int
    """This replica's own inner steps by then, and when the stage peer's clock was last seen to move."""
    moved_at: float
    moved_step: int
    pause: float = 0.0
    """Seconds between its clock's last two moves."""


def is_there(known: PeerStats, record: PeerRecord) -> bool:
    """Tell whether the peer of a record answers this node, and says itself that it serves what the record says.

    A peer on its way to a stage must say that it takes part in the run.
    """
    peer = PeerId(record.peer_id)
    return known.takes_part(peer) if record.state is PeerState.JOINING else known.serves(peer, record.stage)


def welcome_share(asks: int, worked: int, *, from_the_start: bool, work_an_ask: float = WORK_AN_ASK) -> float:
    """The share that counts of stage peers that answer and have shown nothing yet.

    It follows from so many `asks` for work of their like, of which so many `worked`; of honest ones at least
    `work_an_ask` do.
    """
    prior = PRIOR * max(0.0, 1.0 - asks / SAMPLE) if from_the_start else 0.0
    doubt = 0.0 if from_the_start else 1.0
    expected = max(float(worked), work_an_ask * asks)
    return (worked + prior) / (expected + prior + doubt) if worked + prior else 0.0


def sampled_share(drawn: int, there: int) -> float:
    """The share of uncalled peers that counts as being there: a safe lower estimate, 0 if too few were drawn.

    Of `drawn` others, taken at random, so many are `there`.
    """
    return 0.0 if drawn < SAMPLE else safe_share(there, drawn)


def unasked_share(asked: int, there: int) -> float:
    """The share of uncalled peers of a stage that is seen in part; they count as those that were asked.

    Few of its peers have been asked when another part is seen.
    """
    return there / asked if 0 < asked < SAMPLE else sampled_share(asked, there)


def count(working: float, first: float, later: Sequence[tuple[float, float]], first_share: float) -> float:
    """The number of replicas: this one, the `working` ones, and a share of the others.

    The `first` ones, there from the start, count with `first_share`. Each of the `later` ones counts as far as it is
    there, with its own share; a few of these are welcome at once.
    """
    welcome = min(sum(there for there, _ in later), max(1.0, WELCOME_SHARE * working))
    return 1.0 + working + first * first_share + max(welcome, sum(there * share for there, share in later))


class LiveReplicaEstimate:
    """Follows the stage peers of one replica."""

    def __init__(self, known: PeerStats, clock: Callable[[], float] = ambient.monotonic) -> None:
        self._known = known
        self._clock = clock
        self._seen: dict[PeerId, _Seen] = {}
        self._first = PeerTable[PeerId, None]()
        """The peers that may have come together with this replica.

        They were introduced before work of a stage peer was seen, or while the stage was seen in part. Then a peer's
        coming does not say how long it has been there. They are not new if their records ended and are there again: all
        stood still, or this node was cut off.
        """
        self._settled, self._began_at = False, math.inf
        """Whether work of a stage peer was seen since the first look, and when that was."""
        self._in_part_since = math.inf
        """Since when the stage has been seen in part; +inf where it is seen whole."""
        self._was_in_part = False
        self._own_steps = 0
        self._still_seconds = math.inf
        self._looked_at = -math.inf

    def look(
        self, stage_peers: Iterable[PeerRecord], own_steps: int, record_seconds: float, *, sampled: bool = False
    ) -> None:
        """Take in the records of the stage peers that say they train; `sampled` as in `replicas`."""
        now, before = self._clock(), self._seen
        self._began_at = min(self._began_at, now)
        in_part = now - self._in_part_since >= record_seconds
        early = not self._settled or in_part
        self._in_part_since = min(self._in_part_since, now) if sampled else math.inf
        self._was_in_part |= in_part
        self._still_seconds, self._own_steps, self._looked_at = record_seconds, own_steps, now
        self._seen = {}
        for record in stage_peers:
            peer = PeerId(record.peer_id)
            seen = before.get(peer)
            if seen is None:
                seen = _Seen(now, record.clock, own_steps, now, own_steps)
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
        if self._known.failed(peer):
            return True
        if seen is None:
            return False
        return self._stands_still(seen)

    def replicas(self, answering: Iterable[PeerId], unsure: Iterable[PeerId] = (), *, sampled: bool = False) -> float:
        """An estimate of the replicas of the stage that train, this one included.

        The `answering` peers answer; it is not known whether the `unsure` ones do. In a stage that is `sampled` a
        peer's coming does not say how long it has been there. All that have shown nothing yet then count alike, at most
        with the share of peers that worked when they had their chance. A peer whose clock was not watched for long
        counts at most with the share of watched peers whose clock moved.
        """
        working, first, later, shares = 0.0, 0.0, list[tuple[float, float]](), dict[float, float]()
        moving = self._moving_share() if sampled else 1.0
        called, uncalled = dict.fromkeys(answering, 1.0), self._sampled(unsure)
        for peer, there in (called | uncalled).items():
            if self.idles(peer):
                continue
            seen = self._seen.get(peer)
            if self._known.has_worked(peer):
                working += there
            elif sampled:
                first += there if seen and self._was_watched(seen) else moving * there
            elif not self._settled or seen is None or peer in self._first:
                first += there
            else:
                if seen.since not in shares:
                    shares[seen.since] = self._welcome_share(seen.since, from_the_start=False)
                later.append((there, shares[seen.since]))
        share = self._welcome_share(-math.inf, from_the_start=True) if first else 0.0
        if (sampled or self._was_in_part) and share:
            share = min(share, self._proven_share(working))
        return count(working, first, later, share)

    def _proven_share(self, working: float) -> float:
        """The share that worked of the peers that had their chance to work with this replica."""
        failed = sum(self._known.failed(peer) for peer in self._seen)
        return (working + PRIOR) / (working + failed + PRIOR)

    def _moving_share(self) -> float:
        """The share with a moving clock of the peers that were watched for long enough to tell.

        A few that stand still say little beside hundreds that do not.
        """
        watched = [seen for seen in self._seen.values() if self._was_watched(seen)]
        still = sum(self._stands_still(seen) for seen in watched)
        return (len(watched) - still + PRIOR) / (len(watched) + PRIOR)

    def _was_watched(self, seen: _Seen) -> bool:
        return self._has_had_time(seen.since, seen.first_step)

    def _stands_still(self, seen: _Seen) -> bool:
        paused = self._looked_at - seen.moved_at
        return paused >= QUIET_PAUSES * seen.pause and self._has_had_time(seen.moved_at, seen.moved_step)

    def _has_had_time(self, since: float, step: int) -> bool:
        """Tell whether its clock had time to move since then and since this inner step of this replica, as of the last
        look.

        After that look no record was read that could say so.
        """
        return self._own_steps - step >= STILL_STEPS and self._looked_at - since >= self._still_seconds

    def _welcome_share(self, since: float, *, from_the_start: bool) -> float:
        asks, worked = self._known.asks_since(since)
        return welcome_share(asks, worked, from_the_start=from_the_start, work_an_ask=self._known.work_an_ask)

    def _sampled(self, unsure: Iterable[PeerId]) -> dict[PeerId, float]:
        """The part for which each of these peers counts, by the stage peers that were drawn at random and came no
        earlier.

        Peers that were there before therefore say nothing of a crowd that comes later. A peer that has answered before,
        only not of late, belongs to no crowd. It counts with the share of others that have (`_again_share`).
        """
        counted = dict.fromkeys(unsure, 0.0)
        if not counted:
            return counted
        drawn = sorted(
            (
                (seen.since, known.drawn)
                for peer, seen in self._seen.items()
                if (known := self._known.of(peer)).drawn is not None
            ),
            reverse=True,
        )
        again = self._again_share()
        by_time = sorted(((seen.since, peer) for peer in counted if (seen := self._seen.get(peer))), reverse=True)
        taken = there = 0
        for since, peer in by_time:
            while taken < len(drawn) and drawn[taken][0] >= since:
                there += bool(drawn[taken][1])
                taken += 1
            share = sampled_share(taken, there)
            counted[peer] = max(share, again) if self._known.met(peer) else share
        return counted

    def _again_share(self) -> float:
        """The share that still answers of the peers that have answered before.

        It is judged by peers that have been heard of late or let a call go unanswered. It needs no draw: in the long
        run each stage peer calls this node before it is drawn.
        """
        met = [peer for peer in self._seen if self._known.met(peer)]
        there = sum(self._known.answers(peer) for peer in met)
        silent = sum(not self._known.answers(peer) and self._known.of(peer).silences > 0 for peer in met)
        return sampled_share(there + silent, there)
