"""The transport: requests and answers between peers, with tensors. One interface, two worlds (libp2p, in memory).

A request goes to one method of one peer and gets one answer or one typed refusal. What travels is a header (a small
JSON object) and a list of tensors. The receiver sees header and tensor specs first and may refuse before a byte of the
body is allocated. Many requests may be under way to one peer; cancelling the call closes its stream, and the handler
on the other side is cancelled.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from noloco_node.identity.peer_id import PeerId
from noloco_node.peers.stats import PeerStats
from noloco_node.transport.bans import Bans
from noloco_node.transport.errors import Refusal
from noloco_node.transport.messages import JsonObject, Message, TensorSpec, TrafficCount

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


Admit = Callable[[PeerId, JsonObject, tuple[TensorSpec, ...]], Admitted | Release | None]
"""A function that sees a request before its body is read; it raises `Refused` to turn it away. It must not block. The
release that it returns is called once, when the handler has answered or the request has come to nothing."""

Gate = Callable[[PeerId], bool]
"""A function that tells whether a peer may ask for anything but the `hello` methods."""

Handle = Callable[[PeerId, Message], Awaitable[Message]]
"""A function that answers a request; it raises `Refused` to say no. It is cancelled when the caller goes away."""


class Transport(Protocol):
    """What the swarm needs of a network. Implementations: `Libp2pTransport`, `MemoryTransport`."""

    @property
    def peer_id(self) -> PeerId:
        """This node's own id."""
        ...

    @property
    def traffic(self) -> TrafficCount:
        """Bytes so far, by method."""
        ...

    @property
    def refusals_given(self) -> Mapping[Refusal, int]:
        """Refusals this node gave so far, by reason."""
        ...

    @property
    def conduct(self) -> Bans:
        """What peers have done wrong here."""
        ...

    @property
    def peer_stats(self) -> PeerStats:
        """The peers that have answered this node, and those that it has seen work."""
        ...

    def guard(self, gate: Gate) -> None:
        """From now on refuse (`not_admitted`) all methods but those named `hello...` to peers that `gate` denies."""
        ...

    def serve(self, method: str, admit: Admit, handle: Handle, *, max_concurrent_per_peer: int) -> Withdraw:
        """Answer `method` from now on. More than `max_concurrent_per_peer` requests of one peer get `busy`."""
        ...

    async def call(
        self,
        peer: PeerId,
        method: str,
        request: Message,
        *,
        timeout: float,
        progress: float,
        max_answer_bytes: int,
    ) -> Message:
        """Send a request and wait for its answer.

        `timeout` (seconds) bounds the whole call. `progress` (seconds) bounds each wait in which bytes ought to move:
        opening, writing, and reading the body once the answer has begun. `max_answer_bytes` is checked before the
        answer's body is allocated.

        Raises `Refused` (a typed no), `PeerUnreachable` (certainly not carried out), or another `TransportError`
        (perhaps carried out).
        """
        ...

    def sign(self, statement: bytes) -> bytes:
        """This node's seal over a statement: what `signed_by` accepts for its peer id, on any node, at any time."""
        ...

    def signed_by(self, peer: PeerId, seal: bytes, statement: bytes) -> bool:
        """Whether `peer` made this seal over exactly this statement. Never raises."""
        ...

    async def close(self) -> None:
        """Cancel every call and handler, close every stream, and wait until all are gone."""
        ...
