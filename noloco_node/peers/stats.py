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
"""Work counts for so many seconds."""
ASKS_REMEMBERED = 64
"""The number of latest asks for work that are remembered of peers without work so far."""
ASKS_ALLOWED = 16
"""A peer may be asked in vain in so many windows without any work from it in between. Peers that all work refuse a
replica four times out of five if it is a fast one among slow ones, or if its exchanges take as long as the steps in
between."""
FAILURE_ASKS = 6
"""Work that a peer was given and that came to nothing counts as so many asks: the third in a row is too many."""
REST_AN_ASK = 0.25
"""A peer rests for this part of the time that it was asked in vain, or as a banned peer if that is more. The rest
doubles with each failed chance."""


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
        """Whether `peer` has answered of late and is not silent since."""
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
