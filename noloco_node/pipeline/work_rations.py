"""What a node computes for others beside training, in proportion to what it trains: generating and evaluating."""

from __future__ import annotations

from collections.abc import Callable

from noloco_node.config.run_spec import RunSpec
from noloco_node.identity.peer_id import PeerId
from noloco_node.peers.rations import Budget, PeerBudgets
from noloco_node.peers.scorecard import PeerBook
from noloco_node.pipeline.messages import MicrobatchHeader
from noloco_node.training.compute_thread import QueueTurn
from noloco_node.training.stage_worker import StageWorker
from noloco_node.transport.errors import Refusal, Refused
from noloco_node.transport.interface import Release

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
        self._each = PeerBudgets(most / 2, share / 2, self._clock)

    def check(self, peer: PeerId, tokens: int) -> None:
        """Refused (`busy`) where the peer may not have so many now."""
        if min(self._each.of(peer).left, self._all.left) < tokens:
            raise Refused(Refusal.BUSY, "what is trained here leaves no more to others' forwards, for now")

    def spend(self, peer: PeerId, tokens: int) -> None:
        """Book them on the peer's account."""
        self._each.of(peer).spend(tokens)
        self._all.spend(tokens)

    def take(self, peer: PeerId, tokens: int) -> None:
        """Check, and book."""
        self.check(peer, tokens)
        self.spend(peer, tokens)

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

    def place(self, peer: PeerId, tokens: int, take: Callable[[], Release]) -> Release:
        """The place that `take` gives, with so many tokens to evaluate booked; 0 tokens if it is to be trained.

        Raises Refused (`busy`) if the peer may not have so many now. A peer that is refused a place has spent nothing.
        """
        if not tokens:
            return take()
        card = self._book.of(peer)
        share = max(1.0, 2.0 * self._usual * self._worker.live_replicas)
        has_earned = card.earned > 0 and card.evaluated + tokens <= self._saved + share * card.earned
        if not has_earned:
            self._strangers.check(peer, tokens)
        release = take()
        if has_earned:
            card.evaluated += tokens
        else:
            self._strangers.spend(peer, tokens)
        return release
