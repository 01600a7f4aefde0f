"""Tells which donor is too slow to be worth waiting for: a pure decision, made again at every window of a transfer.

A donor that lets one chunk drip before each deadline would hold a joiner for hours beside an idle honest one. A donor
slower than an honest one at its slowest is therefore left. That needs another that offers and may be faster, or is busy
and may have a place by now. A few are tried; then the fastest of them is kept, since the slowness may be this node's
own. The only donor is never given up.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from noloco_node import ambient
from noloco_node.identity.peer_id import PeerId
from noloco_node.peers.scorecard import PeerBook
from noloco_node.transport.errors import TransportError

MOST_TRIED = 3
"""So many donors are tried for a window each before the fastest is kept."""
MUCH_FASTER = 2.0


class TooSlow(TransportError):
    """The donor gives, but another may be faster."""


class DonorPaces:
    """What slow donors were measured to give. `floor` in bytes per second."""

    def __init__(self, floor: float, book: PeerBook | None = None) -> None:
        self.floor = floor
        self._book = book or PeerBook()

    def goes_on(self, donor: PeerId, rate: float, offering: Collection[PeerId]) -> bool:
        """Whether to stay with `donor`, which gives `rate` bytes per second, while all of `offering` would give."""
        enough = self.is_enough(donor, rate, offering)
        self._book.gives(donor, None if enough else rate)
        return enough

    def is_enough(self, donor: PeerId, rate: float, offering: Collection[PeerId]) -> bool:
        """Whether nobody else of `offering` is known, or likely, to be faster than a donor that gives `rate`."""
        if rate >= self.floor:
            return True
        others = [peer for peer in offering if peer != donor]
        tried = [slow for slow in map(self._slow_rate, others) if slow is not None]
        return len(tried) >= min(len(others), MOST_TRIED - 1) and max(tried, default=0.0) <= MUCH_FASTER * rate

    def next(self, ranked: Collection[PeerId]) -> PeerId:
        """The next donor of `ranked`, the best first: one not known as slow, until a few are; then the fastest."""
        rates = {peer: self._slow_rate(peer) for peer in ranked}
        untried = [peer for peer, rate in rates.items() if rate is None]
        slow = {peer: rate for peer, rate in rates.items() if rate is not None}
        if untried and len(slow) < MOST_TRIED:
            return untried[0]
        return max(slow, key=lambda peer: slow[peer])

    def all_slow(self, donors: Collection[PeerId]) -> bool:
        """Whether all of them were measured and found slow."""
        return all(self._slow_rate(donor) is not None for donor in donors)

    def _slow_rate(self, donor: PeerId) -> float | None:
        known = self._book.of(donor).partner
        return None if known is None else known.slow_rate


class DonorPace:
    """Measures one transfer from `donor`; to be told the bytes that lie here. Raises TooSlow where it is to be left."""

    def __init__(
        self,
        paces: DonorPaces,
        donor: PeerId,
        offering: Collection[PeerId],
        window: float,
        now: Callable[[], float] = ambient.monotonic,
    ) -> None:
        """`window` in seconds."""
        self._paces = paces
        self._donor = donor
        self._offering = offering
        self._window = window
        self._now = now
        self._began: float | None = None
        self._had = 0

    def begin(self) -> None:
        """A new stream of chunks begins: what comes first is what lies here already."""
        self._began = None

    def __call__(self, received: int) -> None:
        """So many bytes lie here now."""
        now = self._now()
        if self._began is None:
            self._began, self._had = now, received
        elif (seconds := now - self._began) >= self._window:
            rate = (received - self._had) / seconds
            self._began, self._had = now, received
            if not self._paces.goes_on(self._donor, rate, self._offering):
                raise TooSlow(f"it gives {rate / 1e3:.1f} kB/s: another may be faster")
