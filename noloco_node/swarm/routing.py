"""Who gets the next microbatch: a pure choice, and the book that remembers what it needs."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from noloco_node.aio import Pulse
from noloco_node.swarm.transport import PeerId

Strategy = Literal["uniform", "balanced", "fixed"]

SUSPENSION_SECONDS = 5.0
"""How long a peer whose stream broke or timed out is passed over; doubled with each failure, up to a minute."""

LONGEST_SUSPENSION_SECONDS = 60.0

LOAD_LIFE_SECONDS = 3.0
"""How long a reported load counts. One that never aged would keep a peer that was busy once from ever being asked
again, and so from correcting its figure: routes would lock in, and the mixing that the method rests on would end."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A live next-stage peer as its caller knows it."""

    peer: PeerId
    outstanding: int
    """Own requests under way to it."""
    load: int
    """Microbatches that it held besides the answered one at its last answer; 0 where that is too long ago."""
    suspended_until: float = 0.0
    is_set_aside: bool = False
    """Audits have gone against it again and again."""


def choose_peer(
    strategy: Strategy,
    candidates: Sequence[Candidate],
    *,
    own_rank: int,
    now: float,
    rng: random.Random,
    excluded: Collection[PeerId] = (),
) -> PeerId | None:
    """The peer for one microbatch, or None where nobody may be asked now.

    `uniform` draws one (the paper's); `balanced` draws two and takes the less loaded; `fixed` always takes the
    candidate at `own_rank` (this peer's place among its fellows), modulo their number, for the ablation of routing.
    Suspended peers are passed over, unless all are: then the one that returns first is tried, so that a stage with a
    single slow peer is never cut off. Peers that are set aside get nothing while the stage has another, asked or not.
    """
    pool = [c for c in candidates if not c.is_set_aside] or candidates
    eligible = [c for c in pool if c.peer not in excluded]
    if strategy == "fixed" and eligible:
        ordered = sorted(eligible, key=lambda c: c.peer)
        return ordered[own_rank % len(ordered)].peer
    available = [c for c in eligible if c.suspended_until <= now]
    if not available:
        return min(eligible, key=lambda c: c.suspended_until).peer if eligible else None
    if strategy == "uniform" or len(available) == 1:
        return rng.choice(available).peer
    first, second = rng.sample(available, 2)
    return first.peer if _burden(first) <= _burden(second) else second.peer


def _burden(candidate: Candidate) -> int:
    """Own requests count even when the last answer is older than they are; what others sent shows in the answer."""
    return max(candidate.outstanding, candidate.load)


class RoutingBook:
    """What this node knows of its next-stage peers: who lives, own requests under way, reported load, suspensions,
    who is set aside."""

    def __init__(self, strategy: Strategy, rng: random.Random, clock: Callable[[], float]) -> None:
        self._strategy: Strategy = strategy
        self._rng = rng
        self._clock = clock
        self._peers: tuple[PeerId, ...] = ()
        self._outstanding: dict[PeerId, int] = {}
        self._load: dict[PeerId, tuple[int, float]] = {}
        self._suspended: dict[PeerId, float] = {}
        self._failures: dict[PeerId, int] = {}
        self._aside_until: dict[PeerId, float] = {}
        self.changed = Pulse()
        """Fires when the set of live peers has changed."""
        self.own_rank = 0

    def update(self, peers: Sequence[PeerId], own_rank: int) -> None:
        """Take over the directory's live next-stage peers and this peer's place among its fellows."""
        if tuple(peers) != self._peers:
            self._peers = tuple(peers)
            self._load = {peer: load for peer, load in self._load.items() if peer in peers}
            self._suspended = {peer: until for peer, until in self._suspended.items() if peer in peers}
            self._failures = {peer: count for peer, count in self._failures.items() if peer in peers}
            self.changed.fire()
        self.own_rank = own_rank

    def choose(self, excluded: Collection[PeerId] = ()) -> PeerId | None:
        """A peer for one microbatch, or None where nobody may be asked now."""
        now = self._clock()
        candidates = [
            Candidate(
                peer,
                self._outstanding.get(peer, 0),
                self._load_of(peer, now),
                self._suspended.get(peer, 0.0),
                self._is_set_aside(peer, now),
            )
            for peer in self._peers
        ]
        return choose_peer(
            self._strategy,
            candidates,
            own_rank=self.own_rank,
            now=now,
            rng=self._rng,
            excluded=excluded,
        )

    def sent(self, peer: PeerId) -> None:
        """A request to `peer` is under way."""
        self._outstanding[peer] = self._outstanding.get(peer, 0) + 1

    def done(self, peer: PeerId) -> None:
        """A request to `peer` has ended, however."""
        left = self._outstanding.get(peer, 0) - 1
        if left > 0:
            self._outstanding[peer] = left
        else:
            self._outstanding.pop(peer, None)

    def reported(self, peer: PeerId, load: int) -> None:
        """`peer` said with its answer how many other microbatches it holds."""
        self._load[peer] = (load, self._clock())
        self._suspended.pop(peer, None)
        self._failures.pop(peer, None)

    def failed(self, peer: PeerId) -> None:
        """A stream to `peer` broke or timed out: pass it over for a while."""
        failures = self._failures[peer] = min(self._failures.get(peer, 0) + 1, 10)
        pause = min(LONGEST_SUSPENSION_SECONDS, SUSPENSION_SECONDS * 2 ** (failures - 1))
        self._suspended[peer] = self._clock() + pause

    def set_aside(self, peer: PeerId, until: float) -> None:
        """Ask `peer` for nothing up to then, whatever the directory says meanwhile, unless the stage has no other."""
        now = self._clock()
        self._aside_until = {other: end for other, end in self._aside_until.items() if end > now} | {peer: until}

    @property
    def peers(self) -> Sequence[PeerId]:
        """Live peers, those that are set aside included."""
        return self._peers

    @property
    def set_aside_now(self) -> int:
        """Live peers that are set aside."""
        now = self._clock()
        return sum(self._is_set_aside(peer, now) for peer in self._peers)

    def _is_set_aside(self, peer: PeerId, now: float) -> bool:
        return self._aside_until.get(peer, now) > now

    def _load_of(self, peer: PeerId, now: float) -> int:
        load, when = self._load.get(peer, (0, now))
        return load if now - when < LOAD_LIFE_SECONDS else 0
