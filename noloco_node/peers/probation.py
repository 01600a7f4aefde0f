"""Probation: newcomers are pulled towards their stage peers before they pull anybody themselves.

An exchange in which the dialled side does not count the dialler is *weightless*. The dialler commits as ever; the
dialled side gives its half and changes nothing. Two kinds of newcomers are not counted. A late joiner says so itself.
Any peer is new, whatever it says, that this replica came to know only after its own first outer step. Saying too
little therefore gains a peer nothing, and saying too much only costs it its own weight.

Both kinds count once one exchange has shown that their distance is in line, or after a bounded number of inner steps.
Probation shuts out what is broken. It does not stop a hostile and patient peer; the bound on every partner's pull does.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from noloco_node.identity.peer_id import PeerId
from noloco_node.pauses import RECENT
from noloco_node.peers.scorecard import PeerBook

PROBATION_ROUNDS = 4
"""Probation lasts at most so many outer steps of H inner steps. A newcomer that no stage peer had time for stays on
probation for so many times that bound, since its copy is as old as when it came."""
LOSS_TOLERANCE = 1.1

Ending = Literal["in_line", "time"]


@dataclass(frozen=True, slots=True)
class Meeting:
    """What one exchange showed of two replicas, as one of them measured it."""

    difference: float
    """The norm of the difference between the two replicas, before clipping."""
    bound: float
    """The largest difference that the deciding replica accepts whole (`DifferenceBound.bound`).

    A newcomer takes the smaller of its own and the stage peer's bound, since its own motion, were it wild, would excuse
    every distance.
    """
    own_loss: float | None = None
    """Recent training loss of the newcomer; None where it is not known or does not matter."""
    stage_peer_loss: float | None = None
    """Recent training loss of the other, as that one says."""


def in_line(meeting: Meeting) -> bool:
    """Tell whether the newcomer is where its stage peers are.

    It is so near that nothing would be clipped. If both losses are known, its own is at most a tenth above the other's.
    """
    if not meeting.difference <= meeting.bound:  # not `>`: NaN is in line with nothing
        return False
    if meeting.own_loss is None or meeting.stage_peer_loss is None:
        return True
    return meeting.own_loss <= LOSS_TOLERANCE * meeting.stage_peer_loss


class RecentLoss:
    """The mean training loss over the last inner steps, by tokens."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, int]] = deque(maxlen=RECENT)

    def add(self, loss: float, tokens: int) -> None:
        """One more inner step."""
        if tokens > 0:
            self._steps.append((loss, tokens))

    @property
    def mean(self) -> float | None:
        """Nats per token; None before the first step."""
        tokens = sum(count for _, count in self._steps)
        return sum(loss * count for loss, count in self._steps) / tokens if tokens else None


class ProbationStanding:
    """One replica's view of itself and its stage peers: which of them count. `limit` is the bound in inner steps.

    Methods take this replica's own inner steps so far where time matters. `on_end` is told why and after how many inner
    steps its own probation ended.
    """

    def __init__(self, inner_steps: int, on_end: Callable[[Ending, int], None], book: PeerBook | None = None) -> None:
        self._on_end = on_end
        self.limit = PROBATION_ROUNDS * inner_steps
        self.loss = RecentLoss()
        self._joined_at: int | None = None
        self._drawn = False
        self._book = book or PeerBook()
        self._settled = False

    def begin(self, steps: int) -> None:
        """This replica has just become a copy of a stage peer: it does not count for now."""
        self._joined_at, self._drawn = steps, False

    @property
    def newcomer(self) -> bool:
        """Whether this replica itself is on probation."""
        return self._joined_at is not None

    def met(self, meeting: Meeting | None, steps: int) -> None:
        """After an exchange of this newcomer, or after an inner step (None): its probation may end. Time alone does not
        end it soon: what it copied may be long past, and only an exchange tells it what time it is."""
        if self._joined_at is None:
            return
        self._drawn |= meeting is not None
        lasted = steps - self._joined_at
        aligned = meeting is not None and in_line(meeting)
        if aligned or lasted >= self.limit * (1 if self._drawn else PROBATION_ROUNDS):
            self._joined_at = None
            self._on_end("in_line" if aligned else "time", lasted)

    def look(self, stage_peers: Iterable[PeerId], steps: int, *, outer_rounds: int) -> None:
        """The directory was read. A peer is no newcomer if it is seen before this replica's own first outer step, or
        at the first look after it."""
        for peer in stage_peers:
            known = self._book.partner(peer)
            if known.came_at is None:
                known.came_at = steps if self._settled else -math.inf
        self._settled = self._settled or outer_rounds > 0

    def counts(self, peer: PeerId, steps: int) -> bool:
        """Tell whether an exchange with this peer moves this replica.

        Time makes a peer count only if it was seen in the directory. A key that has merely asked stays new; otherwise
        one stranger could let many grow old at once.
        """
        known = self._book.of(peer).partner
        if known is None or known.came_at is None:
            return not self._settled
        return steps - known.came_at >= self.limit

    def measured(self, peer: PeerId, meeting: Meeting) -> None:
        """A weightless exchange with `peer` is complete: it counts from the next one on if it was in line."""
        if in_line(meeting):
            self._book.partner(peer).came_at = -math.inf

    def partners(self, stage_peers: Sequence[PeerId], declared: Collection[PeerId], steps: int) -> list[PeerId]:
        """Stage peers that are worth dialling: they do not declare themselves newcomers, and would move this replica.

        A newcomer is moved by every peer that counts itself.
        """
        return [peer for peer in stage_peers if peer not in declared and (self.newcomer or self.counts(peer, steps))]
