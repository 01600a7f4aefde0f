"""The windows of p2pd's streams: how far a sender may go before it hears that its bytes were read.

Each direction of a stream has a window. The receiver says how much it has read when that is half of its window. It
doubles the window if it last said so less than four round trips before. p2pd's multiplexer (go-yamux 4.0.1) forgets to
grant that half whenever it doubles, for good. A sender therefore stands still for almost a round trip in each half of a
window. It does not if messages are no larger than half of a new stream's window.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from noloco_node.identity.peer_id import PeerId
from noloco_node.transport.common import TransportLimits

FIRST_OCTETS = 256 << 10
"""The bytes of a new stream's window."""
MOST_OCTETS = 16 << 20
READ_OCTETS = 32 << 10
"""p2pd reads so many bytes of a message at a time."""
QUICK_TRIPS = 4.0
KEPT_SECONDS = TransportLimits().idle_seconds / 2
"""Callers keep a stream that nobody uses for so many seconds."""


@dataclass(slots=True)
class StreamWindow:
    """One direction of one stream. Positions are bytes since it was opened.

    Moments are those of arrival. For a grant it is the moment at which bytes can be there that leave when the sender
    hears of it.
    """

    said_at: float
    """When the receiver spoke last, or the stream was opened."""
    size: int = FIRST_OCTETS
    read: int = 0
    """Bytes that have come, all of which are read at once."""
    said: int = 0
    """The bytes of them that the receiver has spoken of."""
    allowed: int = FIRST_OCTETS
    """The sender may go so far."""
    _granted: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    """On the way to the sender: from when on it counts, and as far as the sender may go then."""

    def room(self, octets: int, begun: int, now: float) -> int:
        """How many of `octets` can come before the receiver speaks or the sender must wait for it: none where it must
        wait. `begun` is where their message began."""
        while self._granted and self._granted[0][0] <= now:
            self.allowed = self._granted.pop(0)[1]
        due = self.said + self.size // 2 - begun
        speaks = begun + READ_OCTETS * -(-due // READ_OCTETS)
        return min(octets, self.allowed - self.read, speaks - self.read)

    def came(self, octets: int, round_trip: float, now: float) -> None:
        """So many more are there; the round trip is in seconds."""
        self.read += octets
        grant = self.read - self.said
        if grant < self.size // 2:
            return
        if now - self.said_at < QUICK_TRIPS * round_trip and self.size < MOST_OCTETS:
            grant, self.size = self.size, 2 * self.size
        self.said, self.said_at = self.read, now
        before = self._granted[-1][1] if self._granted else self.allowed
        self._granted.append((now + round_trip, before + grant))

    @property
    def goes_on_at(self) -> float:
        """When a sender goes on that must wait."""
        return self._granted[0][0]


class KeptStream:
    """One stream, a window each way."""

    def __init__(self, now: float) -> None:
        self._opened = now
        self._windows: dict[PeerId, StreamWindow] = {}

    def towards(self, peer: PeerId) -> StreamWindow:
        """That of the direction to `peer`."""
        if peer not in self._windows:
            self._windows[peer] = StreamWindow(self._opened)
        return self._windows[peer]


class KeptStreams:
    """The streams that one peer keeps to another. As nodes do it lends the one that was given back last."""

    def __init__(self) -> None:
        self._idle: list[tuple[float, KeptStream]] = []

    def take(self, now: float) -> KeptStream:
        """One that is kept, or a new one."""
        while self._idle and now - self._idle[0][0] >= KEPT_SECONDS:
            self._idle.pop(0)
        return self._idle.pop()[1] if self._idle else KeptStream(now)

    def give_back(self, stream: KeptStream, now: float) -> None:
        """It may be lent again."""
        self._idle.append((now, stream))
