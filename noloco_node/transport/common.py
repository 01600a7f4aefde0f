"""What both transports have in common: the desk that answers requests, and the showing of this node's proof."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping

from noloco_node.identity.peer_id import PeerId
from noloco_node.peers.stats import PeerStats
from noloco_node.transport.bans import Bans
from noloco_node.transport.errors import ProtocolViolation, Refusal, Refused, TransportError
from noloco_node.transport.interface import Admit, Gate, Handle, TrafficCount, Withdraw
from noloco_node.transport.messages import Message
from noloco_node.transport.server import OPEN_TO_ALL, RequestDesk, TransportLimits

Introduce = Callable[[PeerId, float], Awaitable[None]]
"""A function that shows a peer, within so many seconds, that this node is invited. Raises like `Transport.call`."""


class CommonTransport(ABC):
    """The part of a `Transport` that does not depend on what carries the bytes. Subclasses bring `_call`."""

    def __init__(self, limits: TransportLimits | None) -> None:
        self._desk = RequestDesk(limits or TransportLimits())
        self._introduce: Introduce | None = None

    @property
    def traffic(self) -> TrafficCount:
        """See `Transport.traffic`."""
        return self._desk.traffic

    @property
    def refusals_given(self) -> Mapping[Refusal, int]:
        """See `Transport.refusals_given`."""
        return self._desk.refusals_given

    @property
    def conduct(self) -> Bans:
        """See `Transport.conduct`."""
        return self._desk.conduct

    @property
    def peer_stats(self) -> PeerStats:
        """See `Transport.peer_stats`."""
        return self._desk.peer_stats

    def guard(self, gate: Gate) -> None:
        """See `Transport.guard`."""
        self._desk.gate = gate

    def serve(self, method: str, admit: Admit, handle: Handle, *, max_concurrent_per_peer: int) -> Withdraw:
        """See `Transport.serve`."""
        return self._desk.serve(method, admit, handle, max_concurrent_per_peer=max_concurrent_per_peer)

    def introduce_with(self, introduce: Introduce | None) -> None:
        """From now on ask once more, after an introduction, where a peer refuses as `not_admitted`: it did nothing."""
        self._introduce = introduce

    async def call(
        self, peer: PeerId, method: str, request: Message, *, timeout: float, progress: float, max_answer_bytes: int
    ) -> Message:
        """See `Transport.call`. The request's tensors must stay unchanged until the call returns."""
        try:
            return await self._noted(peer, method, request, timeout, progress, max_answer_bytes)
        except Refused as refused:
            introduce = self._introduce
            if refused.reason is not Refusal.NOT_ADMITTED or introduce is None or method.startswith(OPEN_TO_ALL):
                raise
        await introduce(peer, timeout)
        return await self._noted(peer, method, request, timeout, progress, max_answer_bytes)

    async def _noted(
        self, peer: PeerId, method: str, request: Message, timeout: float, progress: float, max_answer_bytes: int
    ) -> Message:
        """The call, and whether the peer answered it. An answer that breaks the protocol says neither."""
        try:
            answer = await self._call(peer, method, request, timeout, progress, max_answer_bytes)
        except Refused:
            self.peer_stats.answered(peer)
            raise
        except ProtocolViolation:
            raise
        except TransportError:
            self.peer_stats.silent(peer)
            raise
        self.peer_stats.answered(peer)
        return answer

    @abstractmethod
    async def _call(
        self, peer: PeerId, method: str, request: Message, timeout: float, progress: float, max_answer_bytes: int
    ) -> Message:
        """The call itself: `call` without introductions."""
