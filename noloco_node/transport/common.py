"""What both transports have in common: the desk that answers requests, and the showing of this node's proof.

The desk has the methods that a node serves and a bound on each peer's requests under way. It turns failures into
refusals, so that both transports refuse alike.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from noloco_node.config.run_spec import MAX_BODY_BYTES
from noloco_node.identity.addresses import shown
from noloco_node.identity.peer_id import PeerId
from noloco_node.peers.stats import PeerStats
from noloco_node.transport.bans import OFFENSIVE, Bans
from noloco_node.transport.errors import ProtocolViolation, Refusal, Refused, TransportError
from noloco_node.transport.frames import Envelope, check_sendable, encode_envelope
from noloco_node.transport.interface import Admit, Admitted, Gate, Handle, Release, Withdraw
from noloco_node.transport.messages import Message, TensorSpec, TrafficCount

logger = logging.getLogger(__name__)

OPEN_TO_ALL = "hello"
"""Methods with this prefix are answered even to peers that are not admitted to the run."""


@dataclass(frozen=True, slots=True)
class TransportLimits:
    """What one node grants its peers."""

    max_body_bytes: int = MAX_BODY_BYTES
    """Largest body of a request."""
    max_streams_per_peer: int = 128
    """Open streams from one peer; one more is closed at once."""
    max_streams: int = 4096
    """Open streams from all peers together; one more is closed at once."""
    max_bytes_per_peer: int = 2 * MAX_BODY_BYTES
    """Bodies of one peer's requests under way, in bytes; for more the answer is `busy`."""
    progress_seconds: float = 15.0
    """A request that has begun must bring a whole frame within this time."""
    min_bytes_per_second: int = 32 << 10
    """A body, and an answer, has `progress_seconds` and on top as long as it takes at this speed.

    Without it a peer that sends a little now and then would hold its place for hours.
    """
    idle_seconds: float = 60.0
    """A stream without a request is closed after this time; callers close theirs after half of it."""
    drain_bytes: int = 4 << 20
    """The body of a refused request is read and thrown away up to this size.

    A larger one is read for a moment only, then the stream is closed.
    """


@dataclass(slots=True)
class _Method:
    admit: Admit
    handle: Handle
    max_concurrent_per_peer: int
    running: Counter[PeerId] = field(default_factory=Counter[PeerId])


class RequestPlace:
    """What an admitted request holds."""

    def __init__(self, method: _Method, admission: Admitted | Release | None) -> None:
        self.method = method
        typed = isinstance(admission, Admitted)
        self._release = admission.release if typed else admission
        self.parsed = admission.parsed if typed else None
        """See `Message.parsed`."""

    def free(self) -> None:
        """Give back what the admission reserved; harmless when repeated."""
        release, self._release = self._release, None
        if release is not None:
            release()


class RequestDesk:
    """Admits requests, runs handlers, counts refusals and traffic."""

    def __init__(self, limits: TransportLimits) -> None:
        self.limits = limits
        self.traffic = TrafficCount()
        self.peer_stats = PeerStats()
        self.conduct = Bans(book=self.peer_stats.book)
        self.gate: Gate | None = None
        self._bytes_under_way: Counter[PeerId] = Counter()
        self._methods: dict[str, _Method] = {}
        self._refusals: Counter[Refusal] = Counter()

    @property
    def refusals_given(self) -> Mapping[Refusal, int]:
        """Refusals so far, by reason."""
        return self._refusals

    def serve(self, method: str, admit: Admit, handle: Handle, *, max_concurrent_per_peer: int) -> Withdraw:
        """Answer `method` from now on. Serving a method twice is a programming error."""
        assert method not in self._methods, f"{method} is served already"
        assert max_concurrent_per_peer > 0
        served = self._methods[method] = _Method(admit, handle, max_concurrent_per_peer)

        def withdraw() -> None:
            if self._methods.get(method) is served:
                del self._methods[method]

        return withdraw

    def count_refusal(self, peer: PeerId, refused: Refused) -> None:
        """Count a refusal that goes out to `peer`, and the offence that it answers, if it is one."""
        self._refusals[refused.reason] += 1
        logger.debug("refused a request of %s: %s", peer, refused)
        offence = OFFENSIVE.get(refused.reason)
        if offence is not None:
            self.conduct.offended(peer, offence, refused.detail)

    def seconds_for(self, body_bytes: int) -> float:
        """How long a body of that size may take on its way."""
        return self.limits.progress_seconds + body_bytes / self.limits.min_bytes_per_second

    def traffic_name(self, method: str) -> str:
        """The name to count traffic under: strangers cannot grow the table with names of their own."""
        return method if method in self._methods else "unknown"

    @contextmanager
    def admitted(self, peer: PeerId, envelope: Envelope) -> Generator[RequestPlace]:
        """Hold a place for the request while the block runs, or raise `Refused` before anything is allocated."""
        method = self._method_for(peer, envelope)
        place = RequestPlace(method, _ask(method.admit, peer, envelope))
        method.running[peer] += 1
        self._bytes_under_way[peer] += envelope.body_bytes
        try:
            yield place
        finally:
            place.free()
            for counter, count in ((method.running, 1), (self._bytes_under_way, envelope.body_bytes)):
                counter[peer] -= count
                if not counter[peer]:
                    del counter[peer]

    def _method_for(self, peer: PeerId, envelope: Envelope) -> _Method:
        """The method asked for, if this peer may have it now."""
        self.conduct.refuse_banned(peer)
        if self.gate is not None and not envelope.method.startswith(OPEN_TO_ALL) and not self.gate(peer):
            raise Refused(Refusal.NOT_ADMITTED)
        self.peer_stats.answered(peer)
        method, limits = self._methods.get(envelope.method), self.limits
        if method is None:
            raise Refused(Refusal.UNKNOWN_METHOD, shown(envelope.method))
        if envelope.body_bytes > limits.max_body_bytes:
            raise Refused(Refusal.TOO_LARGE, f"body of {envelope.body_bytes} bytes, at most {limits.max_body_bytes}")
        if method.running[peer] >= method.max_concurrent_per_peer:
            raise Refused(Refusal.BUSY, f"{method.max_concurrent_per_peer} requests under way")
        under_way = self._bytes_under_way[peer]
        if under_way and under_way + envelope.body_bytes > limits.max_bytes_per_peer:
            raise Refused(Refusal.BUSY, f"{under_way} bytes under way")
        return method

    async def answer(self, peer: PeerId, method: str, request: Message, place: RequestPlace) -> tuple[bytes, Message]:
        """Run the handler that admitted the request; returns its answer and the answer's encoded envelope.

        The place is free again before the answer is sent. Raises Refused (`draining`) if that handler has gone: another
        stage may serve a method of this name. The handler's failures, and an answer that cannot be sent, become
        `Refused(INTERNAL)` and are logged; nothing of them reaches the peer.
        """
        served = place.method
        try:
            if self._methods.get(method) is not served:
                raise Refused(Refusal.DRAINING)
            answer = await served.handle(peer, Message(request.header, request.tensors, place.parsed))
            check_sendable(answer.tensors)
            return encode_envelope("", answer.header, answer.specs), answer
        except Refused:
            raise
        except Exception:
            if self._methods.get(method) is not served:
                raise Refused(Refusal.DRAINING) from None  # its replica has left meanwhile, and its stage is gone
            logger.exception("the handler of %s failed on a request of %s", method, peer)
            raise Refused(Refusal.INTERNAL) from None
        finally:
            place.free()


def _ask(admit: Admit, peer: PeerId, envelope: Envelope) -> Admitted | Release | None:
    specs: tuple[TensorSpec, ...] = envelope.specs
    try:
        return admit(peer, envelope.header, specs)
    except Refused:
        raise
    except Exception:
        logger.exception("admission to %s failed on a request of %s", envelope.method, peer)
        raise Refused(Refusal.INTERNAL) from None


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
