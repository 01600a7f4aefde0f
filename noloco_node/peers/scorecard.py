"""What this node knows of its peers by dealings of its own: a scorecard for each, and the book of all of them.

A record in the directory costs its signer nothing, so it only introduces. An answer over an authenticated link shows
that somebody is there; only work shows a replica. Nobody's word on others enters here. What a peer said of itself over
its own link is marked so. Times are seconds on clocks that never go back.

An offence is something that no honest node sends, however bad its network is. Links are encrypted and checksummed, so
bytes that arrive changed were sent changed. A stream that breaks or stalls, a refusal to serve (BUSY included), and
slowness are none. Neither is what a bound on norms scales down.
"""

from __future__ import annotations

import heapq
import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from noloco_node import ambient
from noloco_node.identity.peer_id import PeerId
from noloco_node.peers.hop import Hop, Trust
from noloco_node.tallies import BANS, NO_REST, Doubling, PeerTable, Rest

logger = logging.getLogger(__name__)

TOLERATED = 10.0
"""A peer may have so many offences on its account; the next one brings a ban. One is forgiven in the time of the first
ban."""
ANSWER_SECONDS = 60.0
"""An answer counts for so many seconds."""
SILENCES_TOLERATED = 1
"""The link may lose so many calls after an answer before the peer no longer counts as answering."""
WORK_SECONDS = 2.0 * ANSWER_SECONDS
"""Work counts for so many seconds."""
ASKS_ALLOWED = 16
"""A peer may be asked in vain in so many windows without any work from it in between. Peers that all work refuse a
replica four times out of five if it is a fast one among slow ones, or if its exchanges take as long as the steps in
between."""
ASKS_REMEMBERED = 4 * ASKS_ALLOWED
"""The number of latest asks for work that are remembered of peers without work so far."""
FAILURE_ASKS = 6
"""Work that a peer was given and that came to nothing counts as so many asks: the third in a row is too many."""
REST_AN_ASK = 0.25
"""A peer rests for this part of the time that it was asked in vain, or as a banned peer if that is more. The rest
doubles with each failed chance. With more of it a fast replica leaves out a fifth of slow honest ones."""


class Offence(StrEnum):
    """What a peer did wrong."""

    MALFORMED = "malformed"
    """Frames or messages that break the protocol: no frame, a wrong checksum, a wrong header, shape or precision."""
    TOO_LARGE = "too_large"
    """More than a limit allows that both sides know."""
    NOT_FINITE = "not_finite"
    """NaN or infinity."""
    FORGED = "forged"
    """A signature that does not hold."""
    BAD_ANSWER = "bad_answer"
    """An answer to this node's own request that breaks the protocol."""


@dataclass(frozen=True, slots=True)
class BanRecord:
    """One peer's offences, and what followed."""

    offences: float = 0.0
    """The number of offences as of `since`; time forgives."""
    since: float = 0.0
    ban: Rest = NO_REST
    """The last one, and how many there were in a row."""
    reason: Offence | None = None
    """The offence that brought the last ban."""

    def banned(self, now: float) -> bool:
        return self.ban.holds(now)


CLEAN = BanRecord()


def after_offence(standing: BanRecord, offence: Offence, now: float) -> BanRecord:
    """The account after one more offence; banned where it holds more than `TOLERATED`.

    During a ban nothing is added: what a banned peer had under way when the ban began is not held against it.
    """
    if standing.banned(now):
        return standing
    offences = max(0.0, standing.offences - (now - standing.since) / BANS.first) + 1.0
    if offences <= TOLERATED:
        return BanRecord(offences, now, standing.ban, standing.reason)
    return BanRecord(0.0, now, standing.ban.ban(now), offence)


@dataclass(slots=True)
class Partner:
    """A peer of the own stage: the exchanges with it."""

    lost: Rest = NO_REST
    """Exchanges that came to nothing since the last that did not, and when it may be met again."""
    saved: tuple[float, int] | None = None
    """Visits that it might still make, after that many outer steps of this replica."""
    seconds_per_byte: float | None = None
    """What its line takes, as of `carried_at`."""
    carried_at: float = -math.inf
    committed: int = 0
    """Outer steps taken with it."""
    came_at: float | None = None
    """This replica's inner steps when it came; -inf if it was there before or is in line, None if it was never seen."""
    slow_rate: float | None = None
    """The bytes a second that it gave as a state source, if it was left for its slowness."""


@dataclass(slots=True)
class Scorecard:
    """All that this node has seen of one peer. -inf stands for never."""

    answered_at: float = -math.inf
    silences: int = 0
    """Calls that the link lost since the last answer."""
    worked_at: float = -math.inf
    tokens: int = 0
    """The tokens of the work that was seen, where it is counted in tokens."""
    asks: int = 0
    """How often this node asked it for work since work of it was last seen: each window counts once, work that was
    given and came to nothing more."""
    asked_at: float = -math.inf
    """When the last ask was that counts."""
    asks_began_at: float = -math.inf
    """The time of the first ask that counts; -inf if the peer is let down for good."""
    chances: int = 0
    """How often all that it was asked came to nothing, since work of it was last seen."""
    stage: int | None = None
    """The stage of this node's run that it serves, as it said itself over its own link; None where it has not."""
    earned: int = 0
    """Tokens that it sent and that were trained here."""
    evaluated: int = 0
    """Tokens that this node evaluated for it on that account."""
    conduct: BanRecord = CLEAN
    hop: Hop | None = None
    partner: Partner | None = None

    def left_alone(self, now: float) -> str:
        """Why this node leaves the peer alone now, or asks it last, and for how long; empty if neither. Neither a ban
        is told here, nor that it is slow or full."""
        reasons = list[tuple[float, str]]()
        if self.hop is not None:
            reasons.append((self.hop.repute.aside.until, "it is set aside: its gradients contradict those of others"))
            if self.hop.repute.trust(now) is Trust.ON_TRIAL:
                reasons.append((self.hop.repute.trial_until, "it is on trial: a gradient of it contradicted others"))
            why = "a request to it failed" if self.hop.rest.times else "it held a request up for nothing"
            reasons.append((self.hop.rest.until, f"it rests: {why}"))
        if self.partner is not None:
            reasons.append((self.partner.lost.until, "exchanges with it came to nothing"))
        return "; ".join(f"{why}, {until - now:.0f} s more" for until, why in reasons if until > now)


NOBODY = Scorecard()
"""The scorecard of a peer that this node knows nothing of. Nobody writes on it."""


class PeerBook:
    """The scorecards of one node's peers, bounded in number.

    Peers that have never worked are forgotten before peers that have, what was not heard of for longest first.
    """

    def __init__(self) -> None:
        self.met = PeerTable[PeerId, Scorecard](forgotten=self._forget)
        self.workers = PeerTable[PeerId, Scorecard](forgotten=self._forget)
        self.bans_forgotten = 0
        """Scorecards with a ban that had to go."""

    def of(self, peer: PeerId) -> Scorecard:
        """What is known of `peer`; to be read only."""
        return self.workers.get(peer) or self.met.get(peer, NOBODY)

    def card(self, peer: PeerId) -> Scorecard:
        known = self.workers.get(peer) or self.met.get(peer)
        if known is None:
            known = self.met[peer] = Scorecard()
        return known

    def worker(self, peer: PeerId) -> Scorecard:
        """The scorecard of a peer of which work was just seen."""
        known = self.workers.get(peer)
        if known is None:
            known = self.workers[peer] = self.met.pop(peer, None) or Scorecard()
        else:
            self.workers.move_to_end(peer)
        return known

    def heard(self, peer: PeerId) -> Scorecard:
        """The scorecard of a peer that was just heard."""
        known = self.card(peer)
        if peer in self.met:
            self.met.move_to_end(peer)
        return known

    def hop(self, peer: PeerId) -> Hop:
        """What is known of `peer` as one of the next stage, to be written on."""
        card = self.card(peer)
        if card.hop is None:
            card.hop = Hop()
        return card.hop

    def partner(self, peer: PeerId) -> Partner:
        """What is known of `peer` as one of the own stage, to be written on."""
        card = self.card(peer)
        if card.partner is None:
            card.partner = Partner()
        return card.partner

    def gives(self, peer: PeerId, rate: float | None) -> None:
        """As a state source `peer` gives so many bytes a second, which is too slow; None where it is quick enough."""
        self.partner(peer).slow_rate = rate

    @property
    def cards(self) -> Iterator[Scorecard]:
        yield from self.workers.values()
        yield from self.met.values()

    @property
    def partners(self) -> Iterator[tuple[PeerId, Partner]]:
        """What is known of all peers as peers of the own stage."""
        for peer, card in (*self.workers.items(), *self.met.items()):
            if card.partner is not None:
                yield peer, card.partner

    def begin_stage(self) -> None:
        """This node serves a stage from now on: who stood where in its former one says nothing."""
        for card in self.cards:
            card.hop = card.partner = None

    def _forget(self, _peer: PeerId, card: Scorecard) -> None:
        self.bans_forgotten += card.conduct.ban.times > 0


class PeerStats:
    """What one node's scorecards say of answers and of work."""

    def __init__(self, clock: Callable[[], float] = ambient.monotonic) -> None:
        self._clock = clock
        self.book = PeerBook()
        self.silences_in_all = 0
        """The number of calls that the link lost so far, to all peers together."""
        self._asks: deque[PeerId] = deque(maxlen=ASKS_REMEMBERED)

    def answered(self, peer: PeerId) -> None:
        """`peer` answered or refused a call of this node, or sent it a request, over its own authenticated link."""
        known = self.book.heard(peer)
        known.answered_at, known.silences = self._clock(), 0

    def silent(self, peer: PeerId) -> None:
        """A call to `peer` failed for the link: no stream, a broken one, or a deadline."""
        known = self.book.card(peer)
        known.silences += 1
        self.silences_in_all += 1

    def worked(self, peer: PeerId, tokens: int = 0) -> None:
        """Work of `peer` was seen here: a microbatch, an exchange committed with it, a receipt that holds."""
        known = self.book.worker(peer)
        known.worked_at = known.answered_at = self._clock()
        known.tokens += tokens
        known.silences = known.asks = known.chances = 0

    def idle(self, peer: PeerId) -> None:
        """`peer` was given work and none came of it: an exchange that came to nothing, a microbatch that failed."""
        self._ask_in_vain(self.book.card(peer), FAILURE_ASKS)

    def let_down(self, peer: PeerId) -> None:
        """`peer` had all the chances that it gets: it has failed until work of it is seen."""
        known = self.book.card(peer)
        known.asks, known.asked_at, known.asks_began_at = ASKS_ALLOWED + 1, self._clock(), -math.inf

    def said(self, peer: PeerId, stage: int | None) -> None:
        """`peer` said over its own link which stage of this node's run it serves; None where it serves none of it."""
        self.book.card(peer).stage = stage

    def asked(self, peer: PeerId, window: float) -> None:
        """This node asks `peer`, drawn at random from those that answer, for work.

        Asks within `window` seconds of the last one that counts are counted with it.
        """
        known, now = self.book.card(peer), self._clock()
        if now - known.asked_at < window:
            return
        self._ask_in_vain(known, 1)
        if known.worked_at == -math.inf:
            self._asks.append(peer)

    def _ask_in_vain(self, known: Scorecard, asks: int) -> None:
        """So many asks more of which nothing has come yet."""
        if known.asks > ASKS_ALLOWED and not self._rests(known):
            known.asks, known.chances = 0, known.chances + 1
        known.asked_at = self._clock()
        if known.asks == 0:
            known.asks_began_at = known.asked_at
        known.asks += asks

    def _rests(self, known: Scorecard) -> bool:
        """Whether a peer that was asked in vain is still left alone."""
        rest = Doubling(max(BANS.first, REST_AN_ASK * (known.asked_at - known.asks_began_at)), math.inf)
        return self._clock() - known.asked_at < rest.after(known.chances)

    def asks_lately(self) -> tuple[int, int]:
        """How often, of late, it asked peers of which it had seen no work before; and how often work came of it."""
        return len(self._asks), sum(peer in self.book.workers for peer in self._asks)

    def met(self, peer: PeerId) -> bool:
        """Whether `peer` has ever answered, as far as this node remembers."""
        return self.book.of(peer).answered_at > -math.inf

    def known_workers(self) -> Sequence[PeerId]:
        """Peers of which work was seen and that answer, whatever the directory says of them."""
        return [peer for peer in self.book.workers if self.answers(peer)]

    def answering(self) -> Sequence[PeerId]:
        """Peers that answer, whatever the directory says of them."""
        return [peer for peer in (*self.book.workers, *self.book.met) if self.answers(peer)]

    @property
    def deserted(self) -> bool:
        """Whether peers have answered this node, and none does any more."""
        return not self.answering() and any(card.answered_at > -math.inf for card in self.book.cards)

    def takes_part(self, peer: PeerId) -> bool:
        """Whether `peer` answers and has said itself that it serves this run, at whatever stage."""
        known = self.book.of(peer)
        return known.stage is not None and self._answers(known)

    def has_taken_part(self, peer: PeerId) -> bool:
        """Whether `peer` has said that it serves this run, however long ago, and has not been silent since."""
        known = self.book.of(peer)
        return known.stage is not None and known.silences == 0

    def has_worked(self, peer: PeerId) -> bool:
        """Whether work of `peer` was ever seen here, as far as this node remembers."""
        return peer in self.book.workers

    def failed(self, peer: PeerId) -> bool:
        """Whether `peer` had its fair chance to work with this node, and no work has come of it since. It has another
        one after a while: to refuse is honest, and so is a bad line."""
        known = self.book.of(peer)
        return known.asks > ASKS_ALLOWED and self._rests(known)

    def serves(self, peer: PeerId, stage: int) -> bool:
        """Whether `peer` answers and has said itself that it serves this stage of the run."""
        known = self.book.of(peer)
        return known.stage == stage and self._answers(known)

    def unsure(self, peer: PeerId, stage: int) -> bool:
        """Tell whether nothing speaks against `peer`'s serving this stage, though it has not answered of late: this
        node has not come to call it, or not again."""
        known = self.book.of(peer)
        return known.silences == 0 and known.stage in (None, stage)

    def answers(self, peer: PeerId) -> bool:
        return self._answers(self.book.of(peer))

    def _answers(self, known: Scorecard) -> bool:
        return known.silences <= SILENCES_TOLERATED and self._clock() - known.answered_at <= ANSWER_SECONDS

    def works(self, peer: PeerId) -> bool:
        """Whether work of `peer` was seen of late."""
        known = self.book.workers.get(peer)
        return known is not None and self._clock() - known.worked_at <= WORK_SECONDS

    def of(self, peer: PeerId) -> Scorecard:
        """What is known of `peer`; to be read only."""
        return self.book.of(peer)


class Bans:
    """The offences of peers on their scorecards, and the bans in force."""

    def __init__(self, clock: Callable[[], float] = ambient.monotonic, book: PeerBook | None = None) -> None:
        self.clock = clock
        self._book = book or PeerBook()
        self.offences: Counter[str] = Counter()
        """So far, by `Offence`."""
        self.bans: Counter[str] = Counter()
        """So far, by the `Offence` that brought them."""
        self._changes = 0
        self._ends: list[float] = []
        """The ends of the bans in force, as a heap."""
        self.on_ban: Callable[[PeerId], None] | None = None
        """Called when a ban begins."""

    def offended(self, peer: PeerId, offence: Offence, detail: str = "") -> None:
        """Count an offence of `peer`; a ban that follows is logged once, with its reason and its end."""
        now = self.clock()
        card = self._book.heard(peer)
        before = card.conduct
        after = card.conduct = after_offence(before, offence, now)
        self.offences[offence.value] += 1
        if not after.banned(now) or before.banned(now):
            return
        self.bans[offence.value] += 1
        self._end_bans()
        self._changes += 1
        heapq.heappush(self._ends, after.ban.until)
        seconds = after.ban.until - now
        logger.warning("%s is banned here for %.0f s: %s (%s)", peer, seconds, offence.value, detail[:200])
        if self.on_ban is not None:
            self.on_ban(peer)

    def standing(self, peer: PeerId) -> BanRecord:
        """The offences of `peer`, and the last ban that they brought."""
        return self._book.of(peer).conduct

    def banned(self, peer: PeerId) -> bool:
        return self.standing(peer).banned(self.clock())

    @property
    def changes(self) -> int:
        """How often `banned` may have changed its answer so far: bans that began, and that ended."""
        self._end_bans()
        return self._changes + self._book.bans_forgotten

    def _end_bans(self) -> None:
        while self._ends and self._ends[0] <= self.clock():
            heapq.heappop(self._ends)
            self._changes += 1

    def deals(self, peer: PeerId, _: object = None, /) -> bool:
        """Whether this node deals with `peer`: it is not banned now."""
        return not self.banned(peer)

    @property
    def banned_now(self) -> int:
        now = self.clock()
        return sum(card.conduct.banned(now) for card in self._book.cards)
