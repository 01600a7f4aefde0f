"""How many microbatches there may be: at a replica, of each sender, and under way of an origin itself.

Places for microbatches of other peers are bounded and shared (`MicrobatchLimiter`). A sender with text unlike that of
the others has a bounded share of what is trained (`SourceShares`). Generating and evaluating are bounded in proportion
to what is trained (`Rations`).

An origin keeps as few under way as keep the devices at work, never more than a step's share (`InFlight`). More of them
hide the time that a microbatch is away. Each one beyond the first makes a gradient staler, and if no device is free
they only wait in queues. An origin sees two things. The rate at which microbatches end, for each number under way,
shows from where on another one brings nothing to itself. The part of its way that a microbatch waits for devices shows
from where on another one only takes a place from other origins.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Literal, NamedTuple

from noloco_node import ambient
from noloco_node.aio import Pulse
from noloco_node.config.node_settings import AUTO_AIM, AUTO_MOST
from noloco_node.config.run_spec import RunSpec
from noloco_node.directory.clocks import RECENT_MICROBATCHES, weighted_median
from noloco_node.identity.peer_id import PeerId
from noloco_node.peers.hop import ASK_SECONDS, HANG_SECONDS
from noloco_node.peers.scorecard import WORK_SECONDS, PeerBook
from noloco_node.pipeline.messages import MicrobatchHeader
from noloco_node.tallies import (
    FEW_PEERS,
    MUCH_MORE,
    QUIET_PAUSES,
    RECENT,
    Budget,
    PeerBudgets,
    PeerTable,
    PeerTimes,
    moved,
)
from noloco_node.training.bounds import SHARE
from noloco_node.training.compute_thread import DeviceLoad, QueueTurn
from noloco_node.training.stage_worker import StageWorker
from noloco_node.transport.errors import Refusal, Refused
from noloco_node.transport.interface import Release

ASKS_TO_WAIT = 2
"""After so many asks that came to nothing, a microbatch may wait wherever there is a place. A sender that has asked all
the peers it sees counts as many."""


class MicrobatchLimiter:
    """At most `limit` microbatches at once, including those on their way.

    A quarter of the places (none of fewer than four) is kept from the peer that has most. One peer that fills what it
    can then shuts nobody out. A peer that was just refused has a place kept for it until it asks again, from a peer
    that has more than its part. While some peers' places came to something of late, half of all places are for them.
    Keys that were never seen before cost nothing, and a place is held for as long as its body is on its way.

    If more work waits for the device than it takes to ask another peer, a sender that has not asked around yet is
    refused as well. Another device may
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
        return self._count

    def held_by(self, peer: PeerId) -> int:
        return self._taken.get(peer, 0)

    def take(self, peer: PeerId, asks: int = ASKS_TO_WAIT) -> Release:
        """A place for one microbatch of `peer`, which has asked so often for it before, this node or others; what is
        returned gives it back. Refused (`busy`) if none is free, or where it would wait and has not asked around."""
        if asks < ASKS_TO_WAIT and (ahead := self._ahead_of(peer)) * self._usual > ASK_SECONDS:
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
        self._wanted[peer] = self._clock() + HANG_SECONDS


def _one_less(counts: dict[PeerId, int], peer: PeerId) -> None:
    left = counts[peer] - 1
    if left:
        counts[peer] = left
    else:
        del counts[peer]


class _Taken(NamedTuple):
    """A microbatch whose gradient an inner step took in."""

    tokens: int
    at: float
    """Monotonic seconds."""


class _Sender:
    """The last microbatches of one sender."""

    def __init__(self) -> None:
        self._taken = deque[_Taken](maxlen=RECENT_MICROBATCHES)
        self.losses = deque[float](maxlen=RECENT_MICROBATCHES)
        """Nats a token."""
        self._tokens = 0
        self._heard_until = -math.inf

    def took_in(self, tokens: int, loss: float, now: float) -> None:
        """One more. What every admission asks is worked out here, once."""
        self._taken.append(_Taken(tokens, now))
        self.losses.append(loss)
        self._tokens = sum([each.tokens for each in self._taken])
        longest = max((later.at - earlier.at for earlier, later in pairwise(self._taken)), default=0.0)
        self._heard_until = now + QUIET_PAUSES * longest

    def at_work(self, now: float) -> bool:
        """Whether it is silent for no longer than it has been before."""
        return now <= self._heard_until

    def pace(self, now: float, coming: int = 0) -> float:
        """Tokens a second since the first of these, with those that are `coming`."""
        return (coming + self._tokens) / max(now - self._taken[0].at, 1e-3)


class SourceShares:
    """What the inner steps took in of each sender of late, and whether it may bring more.

    A sender with losses unlike the others' keeps at most `MUCH_MORE` times the pace of the median other sender. Beside
    two others that is half of what is trained. One origin of four that flooded with wrong labels had 78 % of the last
    stage's tokens. An honest sender that is much faster than the others has no bound: its losses are like theirs. Wrong
    labels lose more than the others' text while they are the smaller part, and make that lose more where they are the
    larger one. Before the model has learnt anything all texts lose the same, so each sender is bounded. The median
    sender is weighed by its pace: keys that bring little lower the bound for nobody. A sender with fewer than two
    others at work has none.
    """

    def __init__(self, losses_tell: Callable[[], bool], now: Callable[[], float] = ambient.monotonic) -> None:
        """`losses_tell`: whether the model has learnt enough for losses to tell one text from another."""
        self._losses_tell = losses_tell
        self._now = now
        self._senders = PeerTable[PeerId, _Sender](FEW_PEERS)

    def took_in(self, sender: PeerId, tokens: int, loss: float) -> None:
        """The gradient of so many tokens that `sender` sent, which lost `loss` nats a token, goes into a step."""
        known = self._senders[sender] = self._senders.get(sender) or _Sender()
        known.took_in(tokens, loss, self._now())

    def may_bring(self, sender: PeerId, tokens: int) -> bool:
        """Whether `sender` may have so many tokens under way here, beside those that were taken in."""
        own, now = self._senders.get(sender), self._now()
        others = [each for each in self._senders.values() if each is not own and each.at_work(now)]
        if len(others) < 2 or own is None:
            return True
        paces = [each.pace(now) for each in others]
        if own.pace(now, tokens) <= MUCH_MORE * weighted_median(zip(paces, paces, strict=True)):
            return True
        return self._losses_tell() and _alike(own, others)


def _alike(own: _Sender, others: Sequence[_Sender]) -> bool:
    """Whether the median loss of a sender lies within all but the lowest and the highest part of the others' losses."""
    middle = median(own.losses)
    lower = sum([loss < middle for each in others for loss in each.losses])
    return SHARE <= lower / sum([len(each.losses) for each in others]) <= 1.0 - SHARE


STRANGERS_SHARE = 0.03
"""A node evaluates at most this share of the tokens that it trains for peers whose microbatches it has not trained.
Eight keys outside a run that asked for nothing else took its pace from 7,372 to 2,713 tokens/s."""
SAVED_EVALUATIONS = 4
"""Strangers may have so many evaluations of one origin at once, since each origin evaluates before its first
microbatch."""


def turn_of(sender: PeerId, header: MicrobatchHeader, tokens: int) -> QueueTurn:
    """On the sender's account, and within it on that of the origin that it names: an honest one names the right one."""
    return QueueTurn((sender, header.origin), float(tokens))


class Rations:
    """A ration of tokens for askers: `share` of the tokens `trained` here, and what was saved up of it, at most `most`
    at once.

    One asker gets half of all that.
    """

    def __init__(self, share: float, most: float, trained: Callable[[], int]) -> None:
        self._trained = trained
        self._furthest = 0
        self._all = Budget(most, share, self._clock)
        self._each = PeerBudgets[PeerId](most / 2, share / 2, self._clock)

    def check(self, peer: PeerId, tokens: int) -> None:
        """Refused (`busy`) where the peer may not have so many now."""
        if min(self._each.of(peer).left, self._all.left) < tokens:
            raise Refused(Refusal.BUSY, "what is trained here leaves no more to others' forwards, for now")

    def spend(self, peer: PeerId, tokens: int) -> None:
        self._each.of(peer).spend(tokens)
        self._all.spend(tokens)

    def _clock(self) -> float:
        """A replica that takes a stage peer's state may count anew."""
        self._furthest = max(self._furthest, self._trained())
        return float(self._furthest)


class EvaluationRations:
    """A ration of evaluations. A peer evaluates as much as it trains here, or twice what the run's evaluations take if
    that is more.

    It gives the device's time for it out of its own turns. All others share a ration.
    """

    def __init__(self, spec: RunSpec, worker: StageWorker, book: PeerBook) -> None:
        one = spec.evaluation.windows * spec.data.sequence_length
        self._usual = one / spec.evaluation.every_tokens
        """Tokens that one origin evaluates for each token of the clock."""
        self._worker = worker
        self._saved = 2 * one
        self._book = book
        self._strangers = Rations(STRANGERS_SHARE, float(SAVED_EVALUATIONS * one), lambda: worker.last_trained.tokens)

    def worked(self, peer: PeerId, tokens: int) -> None:
        """So many tokens that `peer` sent were trained here."""
        self._book.card(peer).earned += tokens

    def check(self, peer: PeerId, tokens: int) -> None:
        """Raise Refused (`busy`) if the peer may not have so many tokens evaluated now."""
        if not self._has_earned(peer, tokens):
            self._strangers.check(peer, tokens)

    def spend(self, peer: PeerId, tokens: int) -> None:
        """Book them, once the peer has a place: one that is refused a place has spent nothing."""
        if self._has_earned(peer, tokens):
            self._book.card(peer).evaluated += tokens
        else:
            self._strangers.spend(peer, tokens)

    def _has_earned(self, peer: PeerId, tokens: int) -> bool:
        card = self._book.of(peer)
        share = max(1.0, 2.0 * self._usual * self._worker.live_replicas)
        return card.earned > 0 and card.evaluated + tokens <= self._saved + share * card.earned


FIRST = 2
FRESH = 40
"""A rate is believed for at most so many windows; then that number is tried again. It is never believed for longer than
the origin had been watching when it was seen. The first windows tell only of a swarm that is beginning."""
ENOUGH_WAITING = 2.0
"""If so many own microbatches wait for devices on average, the devices that limit the pipeline are at work. If more
than one beyond them waits, they take places from other origins: nothing is won, since the others do the same."""


@dataclass(frozen=True, slots=True)
class Rate:
    """At which microbatches ended while so many were under way."""

    a_second: float
    window: int
    """Number of the window in which it was seen."""


def of_use(kept: int, waiting: float) -> int:
    """Microbatches that may be of use under way, where `kept` are, of which `waiting` wait for devices."""
    if waiting > ENOUGH_WAITING + 1.0:
        return max(1, kept - 1)
    return kept if waiting >= ENOUGH_WAITING else kept + 1


def next_limit(rates: dict[int, Rate], window: int, most: int) -> int:
    """Microbatches to keep under way in the next window.

    It is the least number, up to `most`, that brings nearly as much as the best does. A neighbour of it that was not
    tried of late is tried.
    """
    believed = {n: each.a_second for n, each in rates.items() if window - each.window < min(FRESH, 1 + each.window)}
    fresh = {n: rate for n, rate in believed.items() if n <= most}
    if not fresh:
        return most
    best = max(fresh.values())
    least = min(n for n, rate in fresh.items() if rate >= AUTO_AIM * best)
    for other in (least + 1, least - 1):
        if 1 <= other <= most and other not in fresh:
            return other
    return least


def holds_back(missing: float, under_way: int, waiting: float) -> bool:
    """Tell whether a microbatch had better be drawn after the next inner step: its gradient is then of the weights that
    it changes.

    `missing` counts microbatches until that step; all of them must be under way. `waiting` is the part of its way that
    a microbatch waits for devices and links. It may be drawn later by so much and be back no later. In that time the
    same part of those `under_way` come back.
    """
    return 0 < missing <= min(under_way, waiting * under_way)


class InFlight:
    """The limit that one origin keeps to. `setting` is a number, or `auto`.

    `share` says how many microbatches a step of this replica has now, `missing` how many its next step still lacks.
    `changed` fires when one may be drawn that could not before.
    """

    def __init__(
        self,
        setting: int | Literal["auto"],
        share: Callable[[], int],
        missing: Callable[[], float],
        clock: Callable[[], float] = ambient.monotonic,
    ) -> None:
        self.most = AUTO_MOST if setting == "auto" else setting
        """The highest limit that there may be."""
        self.changed = Pulse()
        self._auto = setting == "auto"
        self._wanted = FIRST if self._auto else self.most
        self._share = share
        self._missing = missing
        self._clock = clock
        self._released = False
        self._waiting = 0.0
        self._rates: dict[int, Rate] = {}
        self._windows = 0
        self._begin()

    @property
    def limit(self) -> int:
        return min(self._wanted, max(1, self._share()), self.most) if self._auto else self.most

    def open_to(self, number: int, under_way: int) -> bool:
        """Tell whether the drawer of this number, from 0, may draw now beside so many under way."""
        if self._released:
            return True
        return number < self.limit and not holds_back(self._missing(), under_way, self._waiting)

    def release(self) -> None:
        """Nobody waits for the limit any more: no more is drawn."""
        self._released = True
        self.changed.fire()

    def carried(self, seconds: float, waited: float, link_wait: float = 0.0) -> None:
        """A microbatch was trained `seconds` after it was drawn. One rate is measured over `RECENT` of them, or over
        three times the number under way if that is more.

        `waited` counts the seconds that it waited for devices once its forward had begun. Until then it takes nobody's
        place and is of the newest weights. `link_wait` counts the seconds that it waited for its link. Such a
        microbatch could have been drawn later, but its place is not useless. While links wait for each other at random,
        one more fills what would be empty.
        """
        if seconds > 0.0:
            self._waiting = moved(self._waiting, (waited + link_wait) / seconds)
        if not self._auto:
            return
        if self._passed_over < self._kept:  # drawn under another limit
            self._passed_over += 1
            if self._passed_over == self._kept:
                self._began = self._clock()
            return
        self._count += 1
        self._seconds += seconds
        self._waited += waited
        if self._count >= max(RECENT, 3 * self._kept):
            self._decide()
            self._begin()

    def _begin(self) -> None:
        self._kept = self.limit
        self._passed_over = self._count = 0
        self._seconds = self._waited = 0.0
        self._began = self._clock()

    def _decide(self) -> None:
        passed = self._clock() - self._began
        if passed <= 0.0:
            return
        self._windows += 1
        self._rates[self._kept] = Rate(self._count / passed, self._windows)
        waiting = self._kept * self._waited / self._seconds if self._seconds > 0.0 else 0.0
        self._wanted = next_limit(self._rates, self._windows, min(of_use(self._kept, waiting), self.most))
        self.changed.fire()
