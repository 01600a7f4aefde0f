"""How much of what is trained here one sender may bring, where its text is unlike that of the others."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from noloco_node import ambient
from noloco_node.identity.peer_id import PeerId
from noloco_node.pauses import QUIET_PAUSES
from noloco_node.peer_table import FEW_PEERS, PeerTable
from noloco_node.trust.sources_seen import RECENT_MICROBATCHES, weighted_median

MOST_TIMES_OTHERS = 2.0
"""A sender with losses unlike the others' keeps at most so many times the pace of the median other sender. Beside two
others that is half of what is trained. One origin of four that flooded with wrong labels had 78 % of the last stage's
tokens."""


EIGHTH = 1 / 8
"""A sender whose median loss lies in the lowest or highest part of this size of the others' losses has another text."""


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

    An honest sender that is much faster than the others has no bound: its losses are like theirs. Wrong labels lose
    more than the others' text while they are the smaller part, and make that lose more where they are the larger one.
    Before the model has learnt anything all texts lose the same, so each sender is bounded. The median sender is
    weighed by its pace: keys that bring little lower the bound for nobody. A sender with fewer than two others at work
    has none.
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
        if own.pace(now, tokens) <= MOST_TIMES_OTHERS * weighted_median(zip(paces, paces, strict=True)):
            return True
        return self._losses_tell() and _alike(own, others)


def _alike(own: _Sender, others: Sequence[_Sender]) -> bool:
    middle = median(own.losses)
    lower = sum([loss < middle for each in others for loss in each.losses])
    return EIGHTH <= lower / sum([len(each.losses) for each in others]) <= 1.0 - EIGHTH
