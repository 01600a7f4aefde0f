"""What this node knows of peers by dealings of its own: which have answered it, and which it has seen work.

A record in the directory costs its signer nothing, so it only introduces. An answer over an authenticated link shows
that somebody is there; only work shows a replica. All of it is this node's own knowledge: nobody's word enters here.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

from noloco_node import ambient
from noloco_node.identity.peer_id import PeerId
from noloco_node.pauses import BANS, Doubling
from noloco_node.peers.scorecard import PeerBook, Scorecard

ANSWER_SECONDS = 60.0
"""An answer counts for so many seconds."""
SILENCES_TOLERATED = 1
"""The link may lose so many calls after an answer before the peer no longer counts as answering."""
WORK_SECONDS = 120.0
"""Work counts for so many seconds if a caller does not say."""
ASKS_REMEMBERED = 64
"""The number of latest asks for work that are remembered of peers without work so far, and as many of others."""
IDLES_ALLOWED = 2
"""Work that a peer was given may come to nothing so many times in a row; with the next one it has had its chance."""
ASKS_ALLOWED = 4
"""A peer may refuse in at least so many windows without any work from it in between."""
SAMPLE = 16
"""The number of peers that must have been asked before their answers say anything of others."""
DOUBT = 2.0
"""A sample's share is lowered by so many standard deviations: four of a crowd that answer by chance say nothing of its
rest."""
WORK_AN_ASK = 0.25
"""This share of honest peers comes to work in the window in which they are asked, while nothing else is known."""
LEAST_WORK_AN_ASK, MOST_WORK_AN_ASK = 0.125, 0.5
MISTAKEN = 0.001
"""This share of working peers may by mistake be taken for peers that never work again."""
REST_AN_ASK = 0.25
"""A peer rests for this part of the time that it was asked in vain, before it has a new chance. The rest doubles with
each failed chance."""


def safe_share(some: int, of: int) -> float:
    """A safe lower estimate of the share that `some` of so many drawn ones show."""
    share = some / of
    return max(0.0, share - DOUBT * math.sqrt(share * (1.0 - share) / of))


def coming_share(asks: int, came: int) -> float:
    """A safe lower estimate of the share of asks of working peers that comes to work; `came` of `asks` did.

    It is `WORK_AN_ASK` if the asks are too few. Peers that all work refuse a replica four times out of five if it is a
    fast one among slow ones. They do so too if its exchanges take as long as the steps in between.
    """
    return WORK_AN_ASK if asks < SAMPLE else safe_share(came, asks)


def asks_allowed(asks: int, came: int) -> int:
    """How often in a row a peer may be asked in vain that works as others do: of so many `asks` so many `came`."""
    share = coming_share(asks, came)
    if asks < SAMPLE or share >= 1.0:
        return ASKS_ALLOWED
    if share <= 0.0:
        return ASKS_REMEMBERED
    return min(ASKS_REMEMBERED, max(ASKS_ALLOWED, math.ceil(math.log(MISTAKEN) / math.log(1.0 - share))))


class PeerStats:
    """What one node's scorecards say of answers and of work."""

    def __init__(self, clock: Callable[[], float] = ambient.monotonic) -> None:
        self._clock = clock
        self.book = PeerBook()
        self.silences_in_all = 0
        """The number of calls that the link lost so far, to all peers together."""
        self._asks: deque[tuple[PeerId, float]] = deque(maxlen=ASKS_REMEMBERED)
        self._asks_again: deque[list[bool]] = deque(maxlen=ASKS_REMEMBERED)
        self.work_an_ask = WORK_AN_ASK
        """At least this share of honest peers that this node asks for work comes to work in the same window."""
        self._asks_allowed = ASKS_ALLOWED

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
        known.idles, known.idle_since, known.silences = 0, math.inf, 0
        known.asks = known.chances = 0
        if known.pending_ask is not None:
            known.pending_ask[0], known.pending_ask = True, None
            self._judge_asks()

    def idle(self, peer: PeerId) -> None:
        """`peer` was asked for work and none came: an exchange that came to nothing, a microbatch that failed."""
        known = self.book.card(peer)
        if known.idles == 0:
            known.idle_since = self._clock()
        known.idles, known.idle_at = known.idles + 1, self._clock()

    def let_down(self, peer: PeerId) -> None:
        """`peer` had all the chances that it gets: it has failed until work of it is seen."""
        known = self.book.card(peer)
        known.idles = IDLES_ALLOWED
        self.idle(peer)
        known.idle_since = -math.inf

    def said(self, peer: PeerId, stage: int | None) -> None:
        """`peer` said over its own link which stage of this node's run it serves; None where it serves none of it."""
        self.book.card(peer).stage = stage

    def drew(self, peer: PeerId, serves: bool) -> None:
        """This node drew `peer` at random from those that records introduce, and called it: does it serve its stage?"""
        self.book.card(peer).drawn = serves

    def asked(self, peer: PeerId, window: float) -> None:
        """This node asks `peer`, drawn at random from those that answer, for work.

        Asks within `window` seconds of the last one that counts are counted with it.
        """
        known, now = self.book.card(peer), self._clock()
        if now - known.asked_at < window:
            return
        if known.asks > self._asks_allowed and not self._rests(known):
            known.asks, known.chances = 0, known.chances + 1
        if known.asks == 0:
            known.asks_began_at = now
        known.asked_at = now
        known.asks += 1
        if known.worked_at == -math.inf:
            self._asks.append((peer, now))
            return
        known.pending_ask = [False]
        self._asks_again.append(known.pending_ask)
        self._judge_asks()

    def _judge_asks(self) -> None:
        asks, came = len(self._asks_again), sum(ask[0] for ask in self._asks_again)
        self.work_an_ask = min(MOST_WORK_AN_ASK, max(LEAST_WORK_AN_ASK, coming_share(asks, came)))
        self._asks_allowed = asks_allowed(asks, came)

    def _rests(self, known: Scorecard) -> bool:
        """Whether a peer that was asked in vain is still left alone."""
        rest = Doubling(REST_AN_ASK * (known.asked_at - known.asks_began_at), math.inf)
        return self._clock() - known.asked_at < rest.after(known.chances)

    def _is_let_down(self, known: Scorecard) -> bool:
        """Whether what a peer was given came to nothing too often, and it is still left alone for it.

        It rests for as long as finding out took, or as a banned peer if that is more. A bad line breaks three exchanges
        in a row now and then, at both ends at once, and none would begin another.
        """
        over = known.idles - IDLES_ALLOWED - 1
        if over < 0:
            return False
        rest = Doubling(max(BANS.first, known.idle_at - known.idle_since), math.inf)
        return self._clock() - known.idle_at < rest.after(over)

    def asks_since(self, then: float) -> tuple[int, int]:
        """How often, of late, it asked peers of which it had seen no work before; and how often work came of it."""
        peers = [peer for peer, at in self._asks if at >= then]
        return len(peers), sum(peer in self.book.workers for peer in peers)

    def met(self, peer: PeerId) -> bool:
        """Whether `peer` has ever answered, as far as this node remembers."""
        return self.book.of(peer).answered_at > -math.inf

    def known_workers(self) -> Sequence[PeerId]:
        """Peers of which work was seen and that answer, whatever the directory says of them."""
        return [peer for peer in self.book.workers if self.answers(peer)]

    def answering(self) -> Sequence[PeerId]:
        """Peers that answer, whatever the directory says of them."""
        return [peer for peer in (*self.book.workers, *self.book.met) if self.answers(peer)]

    def takes_part(self, peer: PeerId) -> bool:
        """Whether `peer` answers and has said itself that it serves this run, at whatever stage."""
        known = self.book.of(peer)
        return known.stage is not None and self._answers(known, ANSWER_SECONDS)

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
        return self._is_let_down(known) or (known.asks > self._asks_allowed and self._rests(known))

    def serves(self, peer: PeerId, stage: int) -> bool:
        """Whether `peer` answers and has said itself that it serves this stage of the run."""
        known = self.book.of(peer)
        return known.stage == stage and self._answers(known, ANSWER_SECONDS)

    def unsure(self, peer: PeerId, stage: int) -> bool:
        """Tell whether nothing speaks against `peer`'s serving this stage, though it has not answered of late.

        This node has not come to call it, or not again.
        """
        known = self.book.of(peer)
        return known.drawn is not False and known.silences <= SILENCES_TOLERATED and known.stage in (None, stage)

    def answers(self, peer: PeerId, within: float = ANSWER_SECONDS) -> bool:
        """Whether `peer` has answered within so many seconds and is not silent since."""
        return self._answers(self.book.of(peer), within)

    def _answers(self, known: Scorecard, within: float) -> bool:
        return known.silences <= SILENCES_TOLERATED and self._clock() - known.answered_at <= within

    def works(self, peer: PeerId, within: float = WORK_SECONDS) -> bool:
        """Whether work of `peer` was seen within so many seconds."""
        known = self.book.workers.get(peer)
        return known is not None and self._clock() - known.worked_at <= within

    def of(self, peer: PeerId) -> Scorecard:
        """What is known of `peer`; to be read only."""
        return self.book.of(peer)
