"""How much of something peers may have: so much at once, and so much more with every second."""

from __future__ import annotations

from collections.abc import Callable

from noloco_node.identity.peer_id import PeerId
from noloco_node.peer_table import PeerTable


class Budget:
    """`most` at once, refilled by `a_second`. The clock gives seconds, or what else a budget grows with, and never goes
    back."""

    def __init__(self, most: float, a_second: float, clock: Callable[[], float]) -> None:
        self._most, self._a_second, self._clock = most, a_second, clock
        self._left, self._since = most, clock()

    @property
    def left(self) -> float:
        """What may be had now."""
        now = self._clock()
        self._left = min(self._most, self._left + (now - self._since) * self._a_second)
        self._since = now
        return self._left

    def spend(self, amount: float = 1.0) -> None:
        """Take `amount` away; may be more than is left, which then has to be made up for."""
        self._left = self.left - amount


class PeerBudgets:
    """One budget a peer; those used longest ago are forgotten first."""

    def __init__(self, most: float, a_second: float, clock: Callable[[], float]) -> None:
        self._most, self._a_second, self._clock = most, a_second, clock
        self._budgets = PeerTable[PeerId, Budget]()

    def of(self, peer: PeerId) -> Budget:
        """The budget of `peer`, a full one where it was not met before."""
        budget = self._budgets.get(peer)
        if budget is None:
            budget = self._budgets[peer] = Budget(self._most, self._a_second, self._clock)
        else:
            self._budgets.move_to_end(peer)
        return budget
