"""The transport: requests and answers between peers, with tensors. One class, two worlds (libp2p, in memory).

A request goes to one method of one peer and gets one answer or one typed refusal. What travels is a header (a small
JSON object) and a list of tensors. The receiver sees header and tensor specs first and may refuse before a byte of the
body is allocated. Many requests may be under way to one peer; cancelling the call closes its stream, and the handler
on the other side is cancelled.

A desk answers requests in both worlds. It has the methods that a node serves and a bound on each peer's requests under
way. It turns failures into refusals, so that both worlds refuse alike.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from noloco_node.config.run_spec import MAX_BODY_BYTES
from noloco_node.identity.addresses import shown
from noloco_node.identity.peer_id import PeerId
from noloco_node.peers.scorecard import Bans, Offence, PeerStats
from noloco_node.transport.errors import ProtocolViolation, Refusal, Refused, TransportError
from noloco_node.transport.messages import (
    Envelope,
    JsonObject,
    Message,
    TensorSpec,
    TrafficCount,
    check_sendable,
    encode_envelope,
)

logger = logging.getLogger(__name__)

OPEN_TO_ALL = "hello"
"""Methods with this prefix are answered even to peers that are not admitted to the run."""

DIRECTORY, RELAYED = "directory", "relayed"
"""Traffic is counted under these names that no method has."""

Release = Callable[[], None]
"""A function that gives back what an admission reserved."""


Withdraw = Callable[[], None]
"""A function that ends the answering of one method: its handler is let go, and requests under way go on to their end.
If another handler serves a method of that name by then, it does nothing."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """What an admission made of a request."""

    parsed: object
    """Its header as a model: the handler finds it in `Message.parsed`."""
    release: Release | None = None


OFFENSIVE: Mapping[Refusal, Offence] = {
    Refusal.MALFORMED: Offence.MALFORMED,
    Refusal.TOO_LARGE: Offence.TOO_LARGE,
    Refusal.NOT_FINITE: Offence.NOT_FINITE,
    Refusal.FORGED: Offence.FORGED,
}
"""Refusals caused by an offence of the peer that was refused. All others are ordinary life."""

Admit = Callable[[PeerId, JsonObject, tuple[TensorSpec, ...]], Admitted | Release | None]
"""A function that sees a request before its body is read; it raises `Refused` to turn it away. It must not block. The
release that it returns is called once, when the handler has answered or the request has come to nothing."""

Gate = Callable[[PeerId], bool]
"""A function that tells whether a peer may ask for anything but the `hello` methods."""

Handle = Callable[[PeerId, Message], Awaitable[Message]]
"""A function that answers a request; it raises `Refused` to say no. It is cancelled when the caller goes away."""

Introduce = Callable[[PeerId, float], Awaitable[None]]
"""A function that shows a peer, within so many seconds, that this node is invited. Raises like `Transport.call`."""


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

    def __init__(self, limits: TransportLimits | None = None) -> None:
        self.limits = limits or TransportLimits()
        self.traffic = TrafficCount()
        """Bytes so far, by method."""
        self.peer_stats = PeerStats()
        """The peers that have answered this node, and those that it has seen work."""
        self.conduct = Bans(book=self.peer_stats.book)
        """What peers have done wrong here."""
        self.gate: Gate | None = None
        self._bytes_under_way: Counter[PeerId] = Counter()
        self._methods: dict[str, _Method] = {}
        self._refusals: Counter[Refusal] = Counter()

    @property
    def refusals_given(self) -> Mapping[Refusal, int]:
        """Refusals so far, by reason."""
        return self._refusals

    def guard(self, gate: Gate) -> None:
        """From now on refuse (`not_admitted`) all methods but those named `hello...` to peers that `gate` denies."""
        self.gate = gate

    def serve(self, method: str, admit: Admit, handle: Handle, *, max_concurrent_per_peer: int) -> Withdraw:
        """Answer `method` from now on. More than `max_concurrent_per_peer` requests of one peer get `busy`. Serving a
        method twice is a programming error."""
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

    def judge(self, peer: PeerId, error: Exception) -> None:
        """Count an answer of `peer` that broke the protocol; a link that failed says nothing against it."""
        if isinstance(error, ProtocolViolation):
            self.conduct.offended(peer, Offence.BAD_ANSWER, str(error))

    def refuse_banned(self, peer: PeerId) -> None:
        """Raise Refused (`banned`, with the reason and the seconds left) where `peer` is banned now."""
        standing, now = self.conduct.standing(peer), self.conduct.clock()
        if standing.banned(now):
            left = standing.ban.until - now
            raise Refused(Refusal.BANNED, f"for {standing.reason}, {math.ceil(left)} s more")

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
        self.refuse_banned(peer)
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


class Transport(RequestDesk, ABC):
    """What the swarm needs of a network. Subclasses bring `_call`, seals and a peer id."""

    def __init__(self, limits: TransportLimits | None) -> None:
        super().__init__(limits)
        self._introduce: Introduce | None = None

    @property
    @abstractmethod
    def peer_id(self) -> PeerId:
        """This node's own id."""

    def introduce_with(self, introduce: Introduce | None) -> None:
        """From now on ask once more, after an introduction, where a peer refuses as `not_admitted`: it did nothing."""
        self._introduce = introduce

    async def call(
        self, peer: PeerId, method: str, request: Message, *, timeout: float, progress: float, max_answer_bytes: int
    ) -> Message:
        """Send a request and wait for its answer. The request's tensors must stay unchanged until then.

        `timeout` (seconds) bounds the whole call. `progress` (seconds) bounds each wait in which bytes ought to move:
        opening, writing, and reading the body once the answer has begun. `max_answer_bytes` is checked before the
        answer's body is allocated.

        Raises `Refused` (a typed no), `PeerUnreachable` (certainly not carried out), or another `TransportError`
        (perhaps carried out).
        """
        try:
            return await self._noted(peer, method, request, timeout, progress, max_answer_bytes)
        except Refused as refused:
            introduce = self._introduce
            if refused.reason is not Refusal.NOT_ADMITTED or introduce is None or method.startswith(OPEN_TO_ALL):
                raise
        await introduce(peer, timeout)
        return await self._noted(peer, method, request, timeout, progress, max_answer_bytes)

    @abstractmethod
    def sign(self, statement: bytes) -> bytes:
        """This node's seal over a statement: what `signed_by` accepts for its peer id, on any node, at any time."""

    @abstractmethod
    def signed_by(self, peer: PeerId, seal: bytes, statement: bytes) -> bool:
        """Whether `peer` made this seal over exactly this statement. Never raises."""

    @abstractmethod
    async def close(self) -> None:
        """Cancel every call and handler, close every stream, and wait until all are gone."""

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
        """The call itself, without introductions."""
