"""What a node serves: its methods, who may have how many requests under way, and how failures become refusals.

Both transports answer requests through this, so they refuse alike.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from noloco_node.config.run_spec import MAX_BODY_BYTES
from noloco_node.swarm.frames import Envelope, encode_envelope, tensor_bytes
from noloco_node.swarm.transport import (
    Admit,
    Handle,
    Message,
    PeerId,
    Refusal,
    Refused,
    TensorSpec,
    TrafficCount,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TransportLimits:
    """What one node grants its peers."""

    max_body_bytes: int = MAX_BODY_BYTES
    """Largest body of a request."""
    max_streams_per_peer: int = 128
    """Open streams from one peer; one more is closed at once."""
    progress_seconds: float = 15.0
    """A request that has begun must bring a whole frame within this time."""
    idle_seconds: float = 60.0
    """A stream without a request is closed after this time; callers close theirs after half of it."""
    drain_bytes: int = 4 << 20
    """The body of a refused request is read and thrown away up to this size; a larger one for a moment only, then the
    stream is closed."""


@dataclass(slots=True)
class _Method:
    admit: Admit
    handle: Handle
    max_concurrent_per_peer: int
    running: Counter[PeerId] = field(default_factory=Counter[PeerId])


class RequestDesk:
    """Admits requests, runs handlers, counts refusals and traffic."""

    def __init__(self, limits: TransportLimits) -> None:
        self.limits = limits
        self.traffic = TrafficCount()
        self._methods: dict[str, _Method] = {}
        self._refusals: Counter[Refusal] = Counter()

    @property
    def refusals_given(self) -> Mapping[Refusal, int]:
        """Refusals so far, by reason."""
        return self._refusals

    def serve(self, method: str, admit: Admit, handle: Handle, *, max_concurrent_per_peer: int) -> None:
        """Answer `method` from now on. Serving a method twice is a programming error."""
        assert method not in self._methods, f"{method} is served already"
        assert max_concurrent_per_peer > 0
        self._methods[method] = _Method(admit, handle, max_concurrent_per_peer)

    def withdraw(self, *families: str) -> None:
        """No longer answer methods of these families. What is under way goes on."""
        self._methods = {name: how for name, how in self._methods.items() if name.partition(".")[0] not in families}

    def count_refusal(self, refused: Refused) -> None:
        """Count a refusal that goes out."""
        self._refusals[refused.reason] += 1
        logger.debug("refused a request: %s", refused)

    def traffic_name(self, method: str) -> str:
        """The name to count traffic under: strangers cannot grow the table with names of their own."""
        return method if method in self._methods else "unknown"

    @contextmanager
    def admitted(self, peer: PeerId, envelope: Envelope) -> Generator[None]:
        """Hold a place for the request while the block runs, or raise `Refused` before anything is allocated."""
        method = self._methods.get(envelope.method)
        if method is None:
            raise Refused(Refusal.UNKNOWN_METHOD, envelope.method)
        if envelope.body_bytes > self.limits.max_body_bytes:
            raise Refused(
                Refusal.TOO_LARGE, f"body of {envelope.body_bytes} bytes, at most {self.limits.max_body_bytes}"
            )
        if method.running[peer] >= method.max_concurrent_per_peer:
            raise Refused(Refusal.BUSY, f"{method.max_concurrent_per_peer} requests under way")
        _ask(method.admit, peer, envelope)
        method.running[peer] += 1
        try:
            yield
        finally:
            method.running[peer] -= 1
            if not method.running[peer]:
                del method.running[peer]

    async def answer(self, peer: PeerId, method: str, request: Message) -> tuple[bytes, Message]:
        """Run the handler; its answer, and the answer's encoded envelope.

        The handler's failures, and an answer that cannot be sent, become `Refused(INTERNAL)` and are logged; nothing
        of them reaches the peer.
        """
        try:
            served = self._methods.get(method)
            if served is None:
                raise Refused(Refusal.UNKNOWN_METHOD, method)
            answer = await served.handle(peer, request)
            for tensor in answer.tensors:
                tensor_bytes(tensor)
            return encode_envelope("", answer.header, answer.specs), answer
        except Refused:
            raise
        except Exception:
            logger.exception("the handler of %s failed on a request of %s", method, peer)
            raise Refused(Refusal.INTERNAL) from None


def _ask(admit: Admit, peer: PeerId, envelope: Envelope) -> None:
    specs: tuple[TensorSpec, ...] = envelope.specs
    try:
        admit(peer, envelope.header, specs)
    except Refused:
        raise
    except Exception:
        logger.exception("admission to %s failed on a request of %s", envelope.method, peer)
        raise Refused(Refusal.INTERNAL) from None
