"""Whom this node knows by dealings of its own: who has answered it, and of whom it has seen work.

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
"""How long an answer counts."""
SILENCES_TOLERATED = 1
"""Calls that the link may lose after an answer before the peer no longer counts as answering."""
WORK_SECONDS = 120.0
"""How long work counts where a caller does not say."""
PEERS_REMEMBERED = 4096
"""Of those whose work was seen, and as many of the others."""
ASKS_REMEMBERED = 64
"""Latest asks for work that are remembered: of peers without work so far, and of others, each."""
IDLES_ALLOWED = 2
"""Times in a row that work which a peer was given may come to nothing; with the next one it has had its chance."""
IDLE_REST_SECONDS = 60.0
"""How long it is left alone then at least: else as long as it took to find out, and twice as long after each further
time. A bad line breaks three exchanges in a row now and then, at both ends at once, and none would begin another."""
MOST_IDLE_DOUBLINGS = 20
ASKS_ALLOWED = 4
"""Windows in which a peer may be asked and refuse without any work from it in between: at least."""
MOST_ASKS_ALLOWED = 64
ASKS_TO_JUDGE = 16
"""Asks of peers that had worked before, from which on they say how often who works refuses."""
WORK_AN_ASK = 0.25
"""Of honest peers that are asked, so many come to work within the same window, as long as nothing else is known."""
LEAST_WORK_AN_ASK, MOST_WORK_AN_ASK = 0.125, 0.5
SHARE_DOUBT = 1.0
"""Standard deviations below what those asks say."""
MISTAKEN = 0.001
"""Of peers that refuse no more often than those do that work, so many are taken for such as never work again."""
REST_AN_ASK = 0.25
"""Times as long as a peer has been asked in vain it is left alone, before it has a new chance; twice as long after each
that came to nothing."""


@dataclass(slots=True)
class _Ask:
    """This node asked a peer for work that had worked before."""

    came: bool = False


def coming_share(asks: int, came: int) -> float:
    """Of asks of peers that work, the share that comes to work, where of so many so many did: what is safe to say;
    `WORK_AN_ASK` where those are too few. A fast replica among slow ones, or one whose exchanges take as long as the
    steps in between, is refused four times out of five by peers that all work."""
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
class Acquaintance:
    """What this node has seen of one peer. Times are seconds on a clock that never goes back; -inf for never."""

    answered_at: float = -math.inf
    silences: int = 0
    """Calls that the link lost since the last answer."""
    worked_at: float = -math.inf
    tokens: int = 0
    """Of the work that was seen, where it is counted in tokens."""
    idles: int = 0
    """How often it was asked for work and none came, since work of it was last seen."""
    idle_since: float = math.inf
    """When the first of those was; +inf where there is none, -inf where it is let down for good."""
    idle_at: float = -math.inf
    """When the last of those was."""
    asks: int = 0
    """How often this node asked it for work since work of it was last seen, each window counted once."""
    asked_at: float = -math.inf
    """When the last ask was that counts."""
    asks_began_at: float = -math.inf
    """When the first of those was."""
    chances: int = 0
    """How often all that it was asked came to nothing, since work of it was last seen."""
    ask: _Ask | None = None
    """The last one after it had worked, while nothing has come of it."""
    stage: int | None = None
    """The stage of this node's run that it serves, as it said itself over its own link; None where it has not."""
    drawn: bool | None = None
    """Whether it answered, and served the stage of its record, when this node last drew it at random; None where it has
    not been drawn."""


NOBODY = Acquaintance()


class Acquaintances:
    """One node's acquaintances. Bounded: who has only answered is forgotten before who has worked, who was
    heard of longest ago first.

    Many methods: what is noted of a peer and what is asked of it are one line each.
    """

    def __init__(self, clock: Callable[[], float] = ambient.monotonic) -> None:
        self._clock = clock
        self._met = PeerTable[PeerId, Acquaintance](PEERS_REMEMBERED)
        self._workers = PeerTable[PeerId, Acquaintance](PEERS_REMEMBERED)
        self.silences_in_all = 0
        """Calls that the link lost, to whomever, so far."""
        self._asks: deque[tuple[PeerId, float]] = deque(maxlen=ASKS_REMEMBERED)
        self._asks_again: deque[_Ask] = deque(maxlen=ASKS_REMEMBERED)
        self.work_an_ask = WORK_AN_ASK
        """Of honest peers that this node asks for work, at least so many come to work in the same window."""
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
            known = self._workers[peer] = self._met.pop(peer, None) or Acquaintance()
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
        """This node asks `peer`, drawn at random from those that answer, for work; what it asks within `window`
        seconds of the last time counts as one."""
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

    def _rests(self, known: Acquaintance) -> bool:
        """Whether a peer that was asked in vain is still left alone."""
        rest = REST_AN_ASK * 2.0**known.chances * (known.asked_at - known.asks_began_at)
        return self._clock() - known.asked_at < rest

    def _is_let_down(self, known: Acquaintance) -> bool:
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
        """Whether nothing speaks against `peer`'s serving this stage, though it has not answered of late: this node has
        not come to call it, or not again."""
        known = self.of(peer)
        return known.drawn is not False and known.silences <= SILENCES_TOLERATED and known.stage in (None, stage)

    def answers(self, peer: PeerId, within: float = ANSWER_SECONDS) -> bool:
        """Whether `peer` has answered within so many seconds and is not silent since."""
        return self._answers(self.of(peer), within)

    def _answers(self, known: Acquaintance, within: float) -> bool:
        return known.silences <= SILENCES_TOLERATED and self._clock() - known.answered_at <= within

    def works(self, peer: PeerId, within: float = WORK_SECONDS) -> bool:
        """Whether work of `peer` was seen within so many seconds."""
        known = self._workers.get(peer)
        return known is not None and self._clock() - known.worked_at <= within

    def of(self, peer: PeerId) -> Acquaintance:
        """What is known of `peer`; to be read only."""
        return self._workers.get(peer) or self._met.get(peer, NOBODY)

    def _known(self, peer: PeerId) -> Acquaintance:
        known = self._workers.get(peer) or self._met.get(peer)
        if known is None:
            known = self._met[peer] = Acquaintance()
        return known
