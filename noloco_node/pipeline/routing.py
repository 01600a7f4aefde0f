"""The choice of the peer for the next microbatch: a pure function, and the balancer that remembers what it needs.

`Membership.next_stage_peers` lists the candidates; weights, rests and trust are in `peers/hop.py`.

A stage may be filled by peers that answer, and train nothing. Those that send to it see by what came of their own
microbatches that nothing gets through (`CircuitBreaker`). Nobody else need believe them: one of them can go there
itself.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Collection, Sequence
from itertools import islice
from typing import NamedTuple

from noloco_node import ambient
from noloco_node.aio import Pulse
from noloco_node.config.run_spec import RoutingName
from noloco_node.identity.peer_id import PeerId
from noloco_node.peers.hop import (
    HANG_SECONDS,
    UNBLEMISHED,
    Bounds,
    Hop,
    Reputation,
    RequestOutcome,
    Trust,
    after_audit,
    after_request,
    bounds_of,
    set_aside,
    weight_of,
    yields_little,
)
from noloco_node.peers.scorecard import ANSWER_SECONDS, PeerBook
from noloco_node.pipeline.admission import ASKS_TO_WAIT
from noloco_node.pipeline.messages import PASSED_UPWARD
from noloco_node.tallies import NO_REST, QUIET_PAUSES, Doubling
from noloco_node.transport.errors import Refusal, Refused

logger = logging.getLogger(__name__)

RESTS = Doubling(5.0, 60.0)
"""A peer whose stream broke or timed out rests for so many seconds, by the number of failures before."""

LOAD_LIFE_SECONDS = 3.0
"""A reported load counts for so many seconds. If it never aged, a peer that was busy once would never be asked again
and could not correct its figure. Routes would lock in, and the mixing that the method rests on would end."""

FEW = 8
"""The number of peers that are drawn and examined for each microbatch where a stage has more of them."""

FULL = 1 << 20
"""This load, the largest there may be, marks a peer that refuses since it is full."""
TRIES = 8
"""A stage is judged only after so many attempts in a row have come to nothing."""
LIVES = 5.0
"""Nothing must have come through for so many lives of a directory record."""


def outcome_of(refusal: Refused, took: float) -> RequestOutcome:
    """What a refusal that came after so many seconds says of its giver."""
    if refusal.reason is Refusal.BUSY and took < HANG_SECONDS:
        return RequestOutcome.UNTOLD
    # A request may have waited behind others on this node's own link: every peer is late then, and none beside others.
    excused = refusal.reason is Refusal.BUSY or refusal.reason in PASSED_UPWARD
    return RequestOutcome.EXCUSED if excused else RequestOutcome.FAILED


class Candidate(NamedTuple):
    """A live next-stage peer as its caller knows it."""

    peer: PeerId
    outstanding: int
    """Own requests under way to it."""
    load: int
    """Microbatches that it held besides the answered one at its last answer; 0 where that is too long ago."""
    rests_until: float = 0.0
    trust: Trust = Trust.ORDINARY
    weight: float = 1.0
    """How often it is asked, beside 1 for a peer as quick as its stage peers (`weight_of`). Only `balanced` uses it."""


def choose_peer(
    strategy: RoutingName,
    candidates: Sequence[Candidate],
    *,
    own_rank: int,
    now: float,
    rng: random.Random,
    excluded: Collection[PeerId] = (),
) -> PeerId | None:
    """The peer for one microbatch, or None where nobody may be asked now.

    `uniform` draws one, as the paper does. `balanced` draws two and takes the less loaded. A peer of less weight is
    drawn as often as its weight says. `fixed`, for the ablation of routing, always takes the candidate at `own_rank`,
    modulo their number, even while it rests. That rank is this peer's place among its stage peers.

    Peers that rest are not asked, unless all do. Then the one that returns first is tried, so that a stage with a
    single slow peer is never cut off. Peers on trial may be chosen if all ordinary ones rest. Peers that are set
    aside may be chosen if there are no others. Neither are asked merely because all ordinary ones are excluded, as when
    they are busy.
    """
    pool = [c for c in candidates if c.trust is Trust.ORDINARY]
    if all(c.rests_until > now for c in pool):
        pool = [c for c in candidates if c.trust is not Trust.SET_ASIDE] or list(candidates)
    eligible = [c for c in pool if c.peer not in excluded] if excluded else pool
    if strategy == "fixed" and eligible:
        ordered = sorted(eligible, key=lambda c: c.peer)
        return ordered[own_rank % len(ordered)].peer
    available = [c for c in eligible if c.rests_until <= now]
    if not available:
        return min(eligible, key=lambda c: c.rests_until).peer if eligible else None
    if strategy == "uniform":
        return rng.choice(available).peer
    refusing = [c for c in pool if c.peer in excluded] if excluded else ()
    others_are_full = any(c.weight == 1.0 and c.rests_until <= now for c in refusing)
    return _balanced(available, rng, others_are_full)


def _balanced(available: Sequence[Candidate], rng: random.Random, others_are_full: bool) -> PeerId | None:
    """What a peer says of its load decides only among those that are as quick as their stage peers. A slow
    peer is not asked more often because the quick ones are full: it would have every microbatch that they refuse."""
    ordinary = [c for c in available if c.weight == 1.0]
    if len(ordinary) < len(available):
        slow = rng.choices(available, [c.weight for c in available])[0]
        if slow.weight < 1.0:
            return slow.peer if ordinary or not others_are_full or rng.random() < slow.weight else None
    if len(ordinary) == 1:
        return ordinary[0].peer
    first, second = rng.sample(ordinary, 2)
    return first.peer if _burden(first) <= _burden(second) else second.peer


def _burden(candidate: Candidate) -> tuple[int, int]:
    """Own requests count even when the last answer is older than they are; what others sent shows in the answer.

    Between two full peers the own requests decide.
    """
    return max(candidate.outstanding, candidate.load), candidate.outstanding


class LoadBalancer:
    """What this node knows of its next-stage peers: the live ones, requests under way, load, rests, audits."""

    def __init__(
        self, strategy: RoutingName, rng: random.Random, clock: Callable[[], float], book: PeerBook | None = None
    ) -> None:
        self._strategy: RoutingName = strategy
        self._rng = rng
        self._clock = clock
        self._peers: Sequence[PeerId] = ()
        self._in_order: tuple[PeerId, ...] = ()
        """The live peers sorted by their ids, for `fixed`."""
        self.cards = book or PeerBook()
        self._any_came = False
        """Whether any peer has brought what was asked for."""
        self._bounds, self._bounded_at = Bounds(0.0, 1.0), -math.inf
        self._doubted: set[PeerId] = set()
        """Peers on whose scorecards there may be a doubt."""
        self.changed = Pulse()
        """Fires when the set of live peers has changed."""
        self.own_rank = 0

    def update(self, peers: Sequence[PeerId], own_rank: int) -> None:
        """Take over the directory's live next-stage peers, a sequence that nobody changes, and this peer's place among
        its stage peers."""
        same = peers is self._peers or (len(peers) == len(self._peers) and tuple(peers) == tuple(self._peers))
        if not same:
            self._peers = peers
            self._in_order = tuple(sorted(peers)) if self._strategy == "fixed" else ()
            self.changed.fire()
        self.own_rank = own_rank

    def choose(self, excluded: Collection[PeerId] = ()) -> PeerId | None:
        """A peer for one microbatch, or None where nobody may be asked now.

        In a large stage a few peers are drawn and examined, so that the cost does not grow with the stage. A draw from
        a few drawn ones is a draw from all. All are examined if none of the few may be asked.
        """
        now, few, strategy = self._clock(), len(self._peers) > FEW, self._strategy
        if few and strategy == "fixed" and not excluded and not self._doubted:
            return self._in_order[self.own_rank % len(self._in_order)]
        drawn = self._described(self._drawn(excluded), now) if few and strategy != "fixed" else ()
        may_be = [c for c in drawn if c.trust is Trust.ORDINARY and c.rests_until <= now and c.peer not in excluded]
        described = drawn if may_be else self._described(self._peers, now)
        return choose_peer(strategy, described, own_rank=self.own_rank, now=now, rng=self._rng, excluded=excluded)

    def _drawn(self, excluded: Collection[PeerId]) -> list[PeerId]:
        """A few live peers, and beside them a few excluded ones, which say whether others are full."""
        peers, many, chance = self._peers, len(self._peers), self._rng.random
        if not excluded:
            places = dict[int, None]()
            while len(places) < FEW:
                places[int(chance() * many)] = None
            return [peers[place] for place in places]
        drawn = self._rng.sample(peers, min(many, FEW + len(excluded)))
        some = list(islice(excluded, FEW))
        live = set(some).intersection(self._peers)
        return [*[peer for peer in drawn if peer not in excluded][:FEW], *[peer for peer in some if peer in live]]

    def _described(self, peers: Sequence[PeerId], now: float) -> list[Candidate]:
        described = list[Candidate]()
        hops = [self.cards.of(peer).hop for peer in peers]
        bounds = bounds_of(hops, now) if len(self._peers) <= FEW else self._bounds_of_all(now)
        for peer, hop in zip(peers, hops, strict=True):
            if hop is None:
                described.append(Candidate(peer, 0, 0))
                continue
            load = hop.load if now - hop.load_at < LOAD_LIFE_SECONDS else 0
            trust = hop.repute.trust(now) if hop.repute is not UNBLEMISHED else Trust.ORDINARY
            weight = weight_of(hop, bounds, now)
            under_way, until = len(hop.under_way), hop.rest.until
            described.append(Candidate(peer, under_way, load, until, trust, weight))
        return described

    def _bounds_of_all(self, now: float) -> Bounds:
        """What is quick is said by all stage peers, not by those that happen to be drawn; here as of a moment ago."""
        if not 0.0 <= now - self._bounded_at < LOAD_LIFE_SECONDS:
            self._bounds = bounds_of((self.cards.of(peer).hop for peer in self._peers), now)
            self._bounded_at = now
        return self._bounds

    def sent(self, peer: PeerId) -> float:
        """A request to `peer` is under way; what is returned names it to `done`."""
        began = self._clock()
        self.cards.hop(peer).under_way.append(began)
        return began

    def done(self, peer: PeerId, began: float, how: RequestOutcome) -> None:
        hop, now = self.cards.hop(peer), self._clock()
        self._any_came |= how is RequestOutcome.CAME
        seconds = after_request(hop, began, now, how, any_came=self._any_came)
        if began in hop.under_way:  # else so many others were met meanwhile that the peer was forgotten
            hop.under_way.remove(began)
        if seconds > 0.0:
            hop.rest = hop.rest._replace(until=max(hop.rest.until, now + seconds))

    def full(self, peer: PeerId) -> None:
        """`peer` has no place now: for a while it counts as the most loaded."""
        self._note_load(peer, FULL)

    def yields_little(self, peer: PeerId) -> bool:
        """Whether asking `peer` brings far less often what was asked for than asking its stage peers."""
        hop = self.cards.of(peer).hop
        others = (self.cards.of(each).hop for each in self._peers)
        return hop is not None and yields_little(hop, others, self._clock())

    def reported(self, peer: PeerId, load: int) -> None:
        """`peer` said with its answer how many other microbatches it holds."""
        self._note_load(peer, load).rest = NO_REST

    def _note_load(self, peer: PeerId, load: int) -> Hop:
        hop = self.cards.hop(peer)
        hop.load, hop.load_at = load, self._clock()
        return hop

    def failed(self, peer: PeerId) -> None:
        """A stream to `peer` broke or timed out: it rests for a while."""
        hop, now = self.cards.hop(peer), self._clock()
        hop.rest = hop.rest.again(RESTS, now, at_least=hop.rest.until - now)

    def asks_for(self, peer: PeerId) -> int:
        """The number of earlier asks that is sent with a microbatch. With `ASKS_TO_WAIT` it may queue at a busy peer,
        with 0 that peer sends it on. A peer that was busy a moment ago is chosen only where nobody better is left."""
        return ASKS_TO_WAIT if self.is_full(peer) or self._strategy != "balanced" else 0

    def is_full(self, peer: PeerId) -> bool:
        """Whether it said a moment ago that it takes no more."""
        hop = self.cards.of(peer).hop
        return hop is not None and hop.load == FULL and self._clock() - hop.load_at < LOAD_LIFE_SECONDS

    @property
    def peers(self) -> Sequence[PeerId]:
        """Live peers, whatever is thought of them."""
        return self._peers

    def burden_of(self, peer: PeerId) -> tuple[int, int | None]:
        """Own requests under way to a peer, and how many other microbatches it said that it holds.

        The second is None if it has not said so lately, or only that it is full.
        """
        hop = self.cards.of(peer).hop
        if hop is None:
            return 0, None
        known = hop.load < FULL and self._clock() - hop.load_at < LOAD_LIFE_SECONDS
        return len(hop.under_way), hop.load if known else None

    @property
    def doubted(self) -> set[PeerId]:
        """Live peers that audits have gone against, and not cleared since."""
        now = self._clock()
        self._doubted = {peer for peer in self._doubted if self.repute(peer).doubt_at(now) > 0.0}
        return self._doubted.intersection(self._peers)

    @property
    def set_aside_now(self) -> int:
        """Live peers that are set aside: audits went against them again and again."""
        return sum(self.trust(peer) is Trust.SET_ASIDE for peer in self.doubted)

    def repute(self, peer: PeerId) -> Reputation:
        hop = self.cards.of(peer).hop
        return UNBLEMISHED if hop is None else hop.repute

    def trust(self, peer: PeerId) -> Trust:
        """Which microbatches a peer gets now."""
        return self.repute(peer).trust(self._clock())

    def audited(self, peer: PeerId, *, against: bool | None, by_copy: bool) -> None:
        """An audit of a peer is over; see `after_audit`. It is remembered whatever the directory says meanwhile."""
        before, after = self._judged(peer, lambda repute, now: after_audit(repute, against, now, by_copy=by_copy))
        if after.aside.until > before.aside.until:
            self._say_set_aside(peer, after, "its gradients contradict others' time and again")
        elif after.doubt > before.doubt:
            logger.info("%s is on trial: its gradient of a microbatch contradicts those of two others", peer)

    def leant(self, peer: PeerId) -> None:
        """A peer's answers lean one way (`Leanings`): many of them together show it, so that it is set aside at
        once."""
        _, after = self._judged(peer, set_aside)
        self._say_set_aside(peer, after, "its gradients lean one way, and those of others do not")

    def _judged(self, peer: PeerId, judge: Callable[[Reputation, float], Reputation]) -> tuple[Reputation, Reputation]:
        """A peer's repute before and after a judgement, which is kept."""
        hop, now = self.cards.hop(peer), self._clock()
        before = hop.repute
        after = hop.repute = judge(before, now)
        (self._doubted.add if after.doubt > 0.0 else self._doubted.discard)(peer)
        return before, after

    def _say_set_aside(self, peer: PeerId, repute: Reputation, why: str) -> None:
        logger.warning("%s is set aside for %.0f s: %s", peer, repute.aside.until - self._clock(), why)


def patience(record_seconds: float, budget_seconds: float, stages_behind: int) -> float:
    """Seconds without any answer to a microbatch after which a stage counts as lost, even if peers answer there.

    `stages_behind` is the number of stages after it. A sender near the end of the pipeline loses patience first: what
    does not get through there fails at all stages before.
    """
    return (1 + stages_behind) * max(LIVES * record_seconds, QUIET_PAUSES * budget_seconds)


class CircuitBreaker:
    """The account of one node with its next stage. Times are seconds on a clock that never goes back."""

    def __init__(self, clock: Callable[[], float] = ambient.monotonic) -> None:
        self._clock = clock
        self._tries = 0
        self._since = math.inf
        self._last = -math.inf

    def through(self) -> None:
        self._tries, self._since = 0, math.inf

    def failed(self) -> None:
        """An attempt came to nothing, for whatever reason but `out_of_reach`."""
        now = self._clock()
        self._tries += 1
        self._since, self._last = min(self._since, now), now

    def lasts(self, seconds: float) -> bool:
        """Whether nothing has got through for so long although it was tried again and again until now."""
        now = self._clock()
        return self._tries >= TRIES and now - self._since >= seconds and now - self._last <= ANSWER_SECONDS
