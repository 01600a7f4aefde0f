"""What this node knows of peers by dealings of its own: which have answered it, and which it has seen work.

A record in the directory costs its signer nothing, so it only introduces. An answer over an authenticated link shows
that somebody is there; only work shows a replica. All of it is this node's own knowledge: nobody's word enters here.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from noloco_node import ambient
from noloco_node.identity.peer_id import PeerId
from noloco_node.peer_table import PeerTable

ANSWER_SECONDS = 60.0
"""An answer counts for so many seconds."""
SILENCES_TOLERATED = 1
"""The link may lose so many calls after an answer before the peer no longer counts as answering."""
WORK_SECONDS = 120.0
"""Work counts for so many seconds if a caller does not say."""
PEERS_REMEMBERED = 4096
"""So many peers that worked are remembered, and as many others."""
ASKS_REMEMBERED = 64
"""So many latest asks for work are remembered of peers without work so far, and as many of others."""
IDLES_ALLOWED = 2
"""Work that a peer was given may come to nothing so many times in a row; with the next one it has had its chance."""
IDLE_REST_SECONDS = 60.0
"""A peer that let this node down rests for so many seconds, or for as long as finding out took if that is more. The
rest doubles after each further time. A bad line breaks three exchanges in a row now and then, at both ends at once, and
none would begin another."""
MOST_IDLE_DOUBLINGS = 20
ASKS_ALLOWED = 4
"""A peer may refuse in at least so many windows without any work from it in between."""
MOST_ASKS_ALLOWED = 64
ASKS_TO_JUDGE = 16
"""After so many asks of peers that had worked before, these asks say how often a working peer refuses."""
WORK_AN_ASK = 0.25
"""This share of honest peers comes to work in the window in which they are asked, while nothing else is known."""
LEAST_WORK_AN_ASK, MOST_WORK_AN_ASK = 0.125, 0.5
SHARE_DOUBT = 1.0
"""The share that those asks show is lowered by so many standard deviations."""
MISTAKEN = 0.001
"""This share of working peers may by mistake be taken for peers that never work again."""
REST_AN_ASK = 0.25
"""A peer rests for this part of the time that it was asked in vain, before it has a new chance. The rest doubles with
each failed chance."""


@dataclass(slots=True)
class _Ask:
    """This node asked a peer for work that had worked before."""

    came: bool = False


def coming_share(asks: int, came: int) -> float:
    """A safe lower estimate of the share of asks of working peers that comes to work; `came` of `asks` did.

    It is `WORK_AN_ASK` if the asks are too few. Peers that all work refuse a replica four times out of five if it is a
    fast one among slow ones. They do so too if its exchanges take as long as the steps in between.
    """
    if asks < ASKS_TO_JUDGE:
        return WORK_AN_ASK
    share = came / asks
    return share - SHARE_DOUBT * math.sqrt(share * (1.0 - share) / asks)


def asks_allowed(asks: int, came: int) -> int:
    """How often in a row a peer may be asked in vain that works as others do: of so many `asks` so many `came`."""
    share = coming_share(asks, came)
    if asks < ASKS_TO_JUDGE or share >= 1.0:
        return ASKS_ALLOWED
    if share <= 0.0:
        return MOST_ASKS_ALLOWED
    return min(MOST_ASKS_ALLOWED, max(ASKS_ALLOWED, math.ceil(math.log(MISTAKEN) / math.log(1.0 - share))))


@dataclass(slots=True)
class PeerHistory:
    """What this node has seen of one peer. Times are seconds on a clock that never goes back; -inf for never."""

    answered_at: float = -math.inf
    silences: int = 0
    """Calls that the link lost since the last answer."""
    worked_at: float = -math.inf
    tokens: int = 0
    """The tokens of the work that was seen, where it is counted in tokens."""
    idles: int = 0
    """How often it was asked for work and none came, since work of it was last seen."""
    idle_since: float = math.inf
    """The time of the first idle; +inf if there is none, -inf if the peer is let down for good."""
    idle_at: float = -math.inf
    """The time of the last idle."""
    asks: int = 0
    """How often this node asked it for work since work of it was last seen, each window counted once."""
    asked_at: float = -math.inf
    """When the last ask was that counts."""
    asks_began_at: float = -math.inf
    """The time of the first ask that counts."""
    chances: int = 0
    """How often all that it was asked came to nothing, since work of it was last seen."""
    ask: _Ask | None = None
    """The last one after it had worked, while nothing has come of it."""
    stage: int | None = None
    """The stage of this node's run that it serves, as it said itself over its own link; None where it has not."""
    drawn: bool | None = None
    """Whether it answered, and served the stage of its record, when this node last drew it at random; None where it has
    not been drawn."""


NOBODY = PeerHistory()


class PeerStats:
    """What one node has seen of its peers, bounded in number.

    Peers that have only answered are forgotten before peers that have worked, the longest silent first.
    """

    def __init__(self, clock: Callable[[], float] = ambient.monotonic) -> None:
        self._clock = clock
        self._met = PeerTable[PeerId, PeerHistory](PEERS_REMEMBERED)
        self._workers = PeerTable[PeerId, PeerHistory](PEERS_REMEMBERED)
        self.silences_in_all = 0
        """The number of calls that the link lost so far, to all peers together."""
        self._asks: deque[tuple[PeerId, float]] = deque(maxlen=ASKS_REMEMBERED)
        self._asks_again: deque[_Ask] = deque(maxlen=ASKS_REMEMBERED)
        self.work_an_ask = WORK_AN_ASK
        """At least this share of honest peers that this node asks for work comes to work in the same window."""
        self._asks_allowed = ASKS_ALLOWED

    def answered(self, peer: PeerId) -> None:
        """`peer` answered or refused a call of this node, or sent it a request, over its own authenticated link."""
        known = self._known(peer)
        known.answered_at, known.silences = self._clock(), 0
        if peer in self._met:
            self._met.move_to_end(peer)

    def silent(self, peer: PeerId) -> None:
        """A call to `peer` failed for the link: no stream, a broken one, or a deadline."""
        known = self._known(peer)
        known.silences += 1
        self.silences_in_all += 1

    def worked(self, peer: PeerId, tokens: int = 0) -> None:
        """Work of `peer` was seen here: a microbatch, an exchange committed with it, a receipt that holds."""
        known = self._workers.get(peer)
        if known is None:
            known = self._workers[peer] = self._met.pop(peer, None) or PeerHistory()
        else:
            self._workers.move_to_end(peer)
        known.worked_at = known.answered_at = self._clock()
        known.tokens += tokens
        known.idles, known.idle_since, known.silences = 0, math.inf, 0
        known.asks = known.chances = 0
        if known.ask is not None:
            known.ask.came, known.ask = True, None
            self._judge_asks()

    def idle(self, peer: PeerId) -> None:
        """`peer` was asked for work and none came: an exchange that came to nothing, a microbatch that failed."""
        known = self._known(peer)
        if known.idles == 0:
            known.idle_since = self._clock()
        known.idles, known.idle_at = known.idles + 1, self._clock()

    def let_down(self, peer: PeerId) -> None:
        """`peer` had all the chances that it gets: it has failed until work of it is seen."""
        known = self._known(peer)
        known.idles = IDLES_ALLOWED
        self.idle(peer)
        known.idle_since = -math.inf

    def said(self, peer: PeerId, stage: int | None) -> None:
        """`peer` said over its own link which stage of this node's run it serves; None where it serves none of it."""
        self._known(peer).stage = stage

    def drew(self, peer: PeerId, serves: bool) -> None:
        """This node drew `peer` at random from those that records introduce, and called it: does it serve its stage?"""
        self._known(peer).drawn = serves

    def asked(self, peer: PeerId, window: float) -> None:
        """This node asks `peer`, drawn at random from those that answer, for work.

        Asks within `window` seconds of the last one that counts are counted with it.
        """
        known, now = self._known(peer), self._clock()
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
        known.ask = _Ask()
        self._asks_again.append(known.ask)
        self._judge_asks()

    def _judge_asks(self) -> None:
        asks, came = len(self._asks_again), sum(ask.came for ask in self._asks_again)
        self.work_an_ask = min(MOST_WORK_AN_ASK, max(LEAST_WORK_AN_ASK, coming_share(asks, came)))
        self._asks_allowed = asks_allowed(asks, came)

    def _rests(self, known: PeerHistory) -> bool:
        """Whether a peer that was asked in vain is still left alone."""
        rest = REST_AN_ASK * 2.0**known.chances * (known.asked_at - known.asks_began_at)
        return self._clock() - known.asked_at < rest

    def _is_let_down(self, known: PeerHistory) -> bool:
        """Whether what a peer was given came to nothing too often, and it is still left alone for it."""
        over = known.idles - IDLES_ALLOWED - 1
        if over < 0:
            return False
        rest = max(IDLE_REST_SECONDS, known.idle_at - known.idle_since)
        return self._clock() - known.idle_at < rest * 2.0 ** min(over, MOST_IDLE_DOUBLINGS)

    def asks_since(self, then: float) -> tuple[int, int]:
        """How often, of late, it asked peers of which it had seen no work before; and how often work came of it."""
        peers = [peer for peer, at in self._asks if at >= then]
        return len(peers), sum(peer in self._workers for peer in peers)

    def met(self, peer: PeerId) -> bool:
        """Whether `peer` has ever answered, as far as this node remembers."""
        return self.of(peer).answered_at > -math.inf

    def known_workers(self) -> Sequence[PeerId]:
        """Peers of which work was seen and that answer, whatever the directory says of them."""
        return [peer for peer in self._workers if self.answers(peer)]

    def answering(self) -> Sequence[PeerId]:
        """Peers that answer, whatever the directory says of them."""
        return [peer for peer in (*self._workers, *self._met) if self.answers(peer)]

    def takes_part(self, peer: PeerId) -> bool:
        """Whether `peer` answers and has said itself that it serves this run, at whatever stage."""
        known = self.of(peer)
        return known.stage is not None and self._answers(known, ANSWER_SECONDS)

    def has_taken_part(self, peer: PeerId) -> bool:
        """Whether `peer` has said that it serves this run, however long ago, and has not been silent since."""
        known = self.of(peer)
        return known.stage is not None and known.silences == 0

    def has_worked(self, peer: PeerId) -> bool:
        """Whether work of `peer` was ever seen here, as far as this node remembers."""
        return peer in self._workers

    def failed(self, peer: PeerId) -> bool:
        """Whether `peer` had its fair chance to work with this node, and no work has come of it since. It has another
        one after a while: to refuse is honest, and so is a bad line."""
        known = self.of(peer)
        return self._is_let_down(known) or (known.asks > self._asks_allowed and self._rests(known))

    def serves(self, peer: PeerId, stage: int) -> bool:
        """Whether `peer` answers and has said itself that it serves this stage of the run."""
        known = self.of(peer)
        return known.stage == stage and self._answers(known, ANSWER_SECONDS)

    def unsure(self, peer: PeerId, stage: int) -> bool:
        """Tell whether nothing speaks against `peer`'s serving this stage, though it has not answered of late.

        This node has not come to call it, or not again.
        """
        known = self.of(peer)
        return known.drawn is not False and known.silences <= SILENCES_TOLERATED and known.stage in (None, stage)

    def answers(self, peer: PeerId, within: float = ANSWER_SECONDS) -> bool:
        """Whether `peer` has answered within so many seconds and is not silent since."""
        return self._answers(self.of(peer), within)

    def _answers(self, known: PeerHistory, within: float) -> bool:
        return known.silences <= SILENCES_TOLERATED and self._clock() - known.answered_at <= within

    def works(self, peer: PeerId, within: float = WORK_SECONDS) -> bool:
        """Whether work of `peer` was seen within so many seconds."""
        known = self._workers.get(peer)
        return known is not None and self._clock() - known.worked_at <= within

    def of(self, peer: PeerId) -> PeerHistory:
        """What is known of `peer`; to be read only."""
        return self._workers.get(peer) or self._met.get(peer, NOBODY)

    def _known(self, peer: PeerId) -> PeerHistory:
        known = self._workers.get(peer) or self._met.get(peer)
        if known is None:
            known = self._met[peer] = PeerHistory()
        return known
