"""The offences of peers against this node and what follows: a ban with a reason and an end, as a pure decision.

An offence is something that no honest node sends, however bad its network is. Links are encrypted and checksummed, so
bytes that arrive changed were sent changed. A stream that breaks or stalls, a refusal to serve (BUSY included), and
slowness are none. Neither is what a bound on norms scales down.
"""

from __future__ import annotations

import heapq
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping

from noloco_node import ambient
from noloco_node.identity.peer_id import PeerId
from noloco_node.peers.scorecard import BanRecord, Offence, PeerBook
from noloco_node.transport.errors import ProtocolViolation, Refusal, Refused

logger = logging.getLogger(__name__)

TOLERATED = 10.0
"""A peer may have so many offences on its account; the next one brings a ban."""
FORGIVEN_A_SECOND = 1.0 / 30.0
"""Each second takes so many offences off the account."""


OFFENSIVE: Mapping[Refusal, Offence] = {
    Refusal.MALFORMED: Offence.MALFORMED,
    Refusal.TOO_LARGE: Offence.TOO_LARGE,
    Refusal.NOT_FINITE: Offence.NOT_FINITE,
    Refusal.FORGED: Offence.FORGED,
}
"""Refusals caused by an offence of the peer that was refused. All others are ordinary life."""


def after_offence(standing: BanRecord, offence: Offence, now: float) -> BanRecord:
    """The account after one more offence; banned where it holds more than `TOLERATED`.

    During a ban nothing is added: what a banned peer had under way when the ban began is not held against it.
    """
    if standing.banned(now):
        return standing
    offences = max(0.0, standing.offences - (now - standing.since) * FORGIVEN_A_SECOND) + 1.0
    if offences <= TOLERATED:
        return BanRecord(offences, now, standing.ban, standing.reason)
    return BanRecord(0.0, now, standing.ban.ban(now), offence)


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

    def judge(self, peer: PeerId, error: Exception) -> None:
        """Count an answer of `peer` that broke the protocol; a link that failed says nothing against it."""
        if isinstance(error, ProtocolViolation):
            self.offended(peer, Offence.BAD_ANSWER, str(error))

    def banned(self, peer: PeerId) -> bool:
        """Whether `peer` is banned now."""
        return self._book.of(peer).conduct.banned(self.clock())

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
        """Peers that are banned now."""
        now = self.clock()
        return sum(card.conduct.banned(now) for card in self._book.cards)

    def refuse_banned(self, peer: PeerId) -> None:
        """Raise Refused (`banned`, with the reason and the seconds left) where `peer` is banned now."""
        standing, now = self._book.of(peer).conduct, self.clock()
        if standing.banned(now):
            left = standing.ban.until - now
            raise Refused(Refusal.BANNED, f"for {standing.reason}, {math.ceil(left)} s more")
