"""The transport's twin in memory: same rules, no sockets. For tests, simulations and exactness.

Requests go through the same admission, limits and refusals as on libp2p; headers pass through the wire's JSON, tensors
are copied. Faults are injected by rule and counted when they fire, so that a test can prove that they happened.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from noloco_node.aio import cancel_and_wait
from noloco_node.identity.peer_id import PeerId
from noloco_node.transport.errors import (
    BrokenStream,
    DeadlinePassed,
    PeerUnreachable,
    ProtocolViolation,
    Refusal,
    Refused,
    TransportError,
)
from noloco_node.transport.interface import Transport, TransportLimits
from noloco_node.transport.messages import (
    Envelope,
    Message,
    TensorSpec,
    TrafficCount,
    check_sendable,
    decode_envelope,
    encode_envelope,
)
from noloco_node.transport.pacing import UNBOUNDED, BodyTurn, Line


class FaultKind(StrEnum):
    """What an injected fault does to a call."""

    UNREACHABLE = "unreachable"
    """No stream opens: `PeerUnreachable`, the handler never runs."""
    LOSE_REQUEST = "lose_request"
    """The stream breaks before the handler runs: `BrokenStream`."""
    LOSE_ANSWER = "lose_answer"
    """The stream breaks after the handler ran: `BrokenStream`."""
    REFUSE = "refuse"
    """The peer refuses with `Fault.reason`."""
    DELAY = "delay"
    """The request waits for `Fault.wait()` before it reaches the peer."""
    REPEAT = "repeat"
    """The request reaches the peer twice, and what it answers to the second one is lost."""
    TAMPER = "tamper"
    """The peer's answer is what `Fault.change` makes of it."""


@dataclass(slots=True)
class Fault:
    """A rule: calls that match `source`, `target` and `method` (None matches any) suffer `kind`, `times` times over
    (None: always)."""

    kind: FaultKind
    source: PeerId | None = None
    target: PeerId | None = None
    method: str | None = None
    times: int | None = None
    reason: Refusal = Refusal.BUSY
    wait: Callable[[], Awaitable[None]] | None = None
    change: Callable[[Message], Message] | None = None
    fired: int = 0
    """Calls that have suffered it."""

    def fires_on(self, source: PeerId, target: PeerId, method: str) -> bool:
        """Whether the rule matches and has not used up its times."""
        return (
            self.times != 0
            and self.source in (None, source)
            and self.target in (None, target)
            and self.method in (None, method)
        )


@dataclass(frozen=True, slots=True)
class Parcel:
    """What is sent at once: a request or an answer of a method."""

    method: str
    header_octets: int
    specs: tuple[TensorSpec, ...] = ()

    @property
    def octets(self) -> int:
        """Bytes of it all."""
        return self.header_octets + sum(spec.nbytes for spec in self.specs)


class Carrier(Protocol):
    """What lies between the peers of a network and takes time."""

    async def open(self, source: PeerId, target: PeerId) -> None:
        """Return when a stream to `target` is open. Raises PeerUnreachable."""
        ...

    async def carry(self, source: PeerId, target: PeerId, parcel: Parcel) -> None:
        """Return when it is there."""
        ...


class MemoryNetwork:
    """What the transports of one test share: the peers and the injected faults.

    A message takes the time that `carrier` says; without one, none.
    """

    def __init__(self, carrier: Carrier | None = None) -> None:
        self._carrier = carrier
        self.fired: Counter[FaultKind] = Counter()
        """Faults that happened, by kind."""
        self.transports: dict[PeerId, MemoryTransport] = {}
        self._killed: set[PeerId] = set()
        self._faults: list[Fault] = []

    async def carry(self, source: PeerId, target: PeerId, parcel: Parcel) -> None:
        """Return when it is there."""
        if self._carrier is not None:
            await self._carrier.carry(source, target, parcel)

    async def open(self, source: PeerId, target: PeerId) -> None:
        """Return when a stream is open. Raises PeerUnreachable."""
        if self._carrier is not None:
            await self._carrier.open(source, target)

    def inject(self, fault: Fault) -> Fault:
        """Add a rule; returned so that it can be handed to `lift`."""
        self._faults.append(fault)
        return fault

    def lift(self, fault: Fault) -> None:
        """Remove a rule."""
        self._faults.remove(fault)

    def kill(self, peer: PeerId) -> None:
        """The peer dies: its handlers are cancelled, calls from and to it break, later ones find nobody."""
        self._killed.add(peer)
        for transport in self.transports.values():
            transport.break_calls(peer if transport.peer_id != peer else None)
        if peer in self.transports:
            self.transports[peer].cancel_handlers()

    def stall(self, stalled: Callable[[PeerId, PeerId], bool]) -> None:
        """Called when bytes cease to move between some: see `MemoryTransport.stall`."""
        for transport in self.transports.values():
            transport.stall(stalled)

    def revive(self, peer: PeerId) -> None:
        """A killed peer is reachable again."""
        self._killed.discard(peer)

    def attach(self, transport: MemoryTransport) -> None:
        """Called by a transport's constructor. A new transport takes over the peer id of an old one."""
        self.transports[transport.peer_id] = transport
        self._killed.discard(transport.peer_id)

    def detach(self, transport: MemoryTransport) -> None:
        """Called by a transport's `close`."""
        if self.transports.get(transport.peer_id) is transport:
            del self.transports[transport.peer_id]

    def find(self, source: PeerId, target: PeerId) -> MemoryTransport:
        """The peer to talk to, or `PeerUnreachable`."""
        found = self.transports.get(target)
        if found is None or target in self._killed or source in self._killed:
            raise PeerUnreachable(f"{target} is not there")
        return found

    def fire(self, kind: FaultKind, source: PeerId, target: PeerId, method: str) -> Fault | None:
        """The first rule of `kind` that applies to this call, counted and used up by one; None if there is none."""
        for fault in self._faults:
            if fault.kind is kind and fault.fires_on(source, target, method):
                if fault.times is not None:
                    fault.times -= 1
                fault.fired += 1
                self.fired[kind] += 1
                return fault
        return None


_Answered = tuple[Message, int]
"""An answer, and the bytes of its encoded header."""


class MemoryTransport(Transport):
    """The transport among those of one `MemoryNetwork`."""

    def __init__(
        self, network: MemoryNetwork, peer_id: PeerId, limits: TransportLimits | None = None, line: Line = UNBOUNDED
    ) -> None:
        """Bodies take turns on the `line`. How long they take is the network's affair."""
        super().__init__(limits)
        self._network = network
        self._line = line
        self._peer_id = peer_id
        self._calls: dict[asyncio.Future[_Answered], tuple[PeerId, float]] = {}
        """The calls under way: to which peer, and the seconds without a byte after which each is given up."""
        self._handlers: dict[asyncio.Task[_Answered], None] = {}  # in the order in which they began
        self._closed = False
        self._context = copy_context()
        """The context in which it was made: its handlers run there, whichever task asks."""
        network.attach(self)

    @property
    def peer_id(self) -> PeerId:
        """This node's own id."""
        return self._peer_id

    def sign(self, statement: bytes) -> bytes:
        """See `Transport.sign`; in memory nobody forges on purpose, so the name is the key."""
        return _seal(self._peer_id, statement)

    def signed_by(self, peer: PeerId, seal: bytes, statement: bytes) -> bool:
        """See `Transport.signed_by`."""
        return seal == _seal(peer, statement)

    async def _call(
        self, peer: PeerId, method: str, request: Message, timeout: float, progress: float, max_answer_bytes: int
    ) -> Message:
        check_sendable(request.tensors)
        payload = encode_envelope(method, request.header, request.specs, asks_first=request.asks_first)
        turn = self._line.turn(waits=request.asks_first)
        try:
            async with asyncio.timeout(timeout):
                await turn.come()
                target = await self._reach(peer, method, progress)
                answer, octets = await self._exchange(target, method, payload, request, turn, progress)
        except TimeoutError:
            raise DeadlinePassed(f"{method} of {peer} took more than {timeout:g} s") from None
        finally:
            turn.over()
        size = sum(spec.nbytes for spec in answer.specs)
        if size > max_answer_bytes:
            raise ProtocolViolation(f"answer of {size} bytes exceeds {max_answer_bytes}")
        self.traffic.add_received(method, size + octets)
        return answer

    async def _reach(self, peer: PeerId, method: str, progress: float) -> MemoryTransport:
        if self._closed:
            raise PeerUnreachable("this transport is closed")
        network = self._network
        if network.fire(FaultKind.UNREACHABLE, self._peer_id, peer, method):
            raise PeerUnreachable(f"{peer}: injected fault")
        network.find(self._peer_id, peer)
        delay = network.fire(FaultKind.DELAY, self._peer_id, peer, method)
        if delay and delay.wait:
            await delay.wait()
        async with asyncio.timeout(progress):
            await network.open(self._peer_id, peer)
        target = network.find(self._peer_id, peer)
        if network.fire(FaultKind.LOSE_REQUEST, self._peer_id, peer, method):
            raise BrokenStream(f"{peer}: injected fault")
        refuse = network.fire(FaultKind.REFUSE, self._peer_id, peer, method)
        if refuse:
            raise Refused(refuse.reason, "injected fault")
        return target

    async def _exchange(
        self, target: MemoryTransport, method: str, payload: bytes, request: Message, turn: BodyTurn, progress: float
    ) -> _Answered:
        """Run the handler as a task of the target; the call ends with it, or earlier when either side breaks."""
        self.traffic.add_sent(method, len(payload))
        task = target.start_handler(self._peer_id, payload, request, turn, self.traffic)
        outcome: asyncio.Future[_Answered] = asyncio.get_running_loop().create_future()
        self._calls[outcome] = target.peer_id, progress
        if self._network.fire(FaultKind.REPEAT, self._peer_id, target.peer_id, method):
            target.start_handler(self._peer_id, payload, request, turn, self.traffic)

        def settle(done: asyncio.Task[_Answered]) -> None:
            if outcome.done():
                return
            if done.cancelled():
                outcome.set_exception(BrokenStream(f"{target.peer_id} went away"))
            elif (error := done.exception()) is not None:
                outcome.set_exception(error)
            else:
                outcome.set_result(done.result())

        task.add_done_callback(settle)
        try:
            return await outcome
        finally:
            del self._calls[outcome]
            task.cancel()

    def start_handler(
        self, caller: PeerId, payload: bytes, request: Message, turn: BodyTurn, sent: TrafficCount
    ) -> asyncio.Task[_Answered]:
        """Called by the caller's transport: answer a request in a task that this transport owns."""
        task = asyncio.create_task(self._answer(caller, payload, request, turn, sent), context=self._context.copy())
        self._handlers[task] = None
        task.add_done_callback(self._handler_done)
        return task

    def _handler_done(self, task: asyncio.Task[_Answered]) -> None:
        self._handlers.pop(task, None)
        if not task.cancelled():
            task.exception()

    async def _answer(
        self, caller: PeerId, payload: bytes, request: Message, turn: BodyTurn, sent: TrafficCount
    ) -> _Answered:
        envelope = decode_envelope(payload)
        name = self.traffic_name(envelope.method)
        with_it = () if envelope.asks_first else request.specs
        await self._network.carry(caller, self._peer_id, Parcel(name, len(payload), with_it))
        self.traffic.add_received(name, len(payload))
        try:
            with self.admitted(caller, envelope) as place:
                if envelope.asks_first:
                    await self._network.carry(self._peer_id, caller, Parcel(name, 0))
                    await self._network.carry(caller, self._peer_id, Parcel(name, 0, request.specs))
                    turn.over()
                received = _copy(envelope, request)
                sent.add_sent(envelope.method, envelope.body_bytes)
                self.traffic.add_received(name, envelope.body_bytes)
                reply, answer = await self.answer(caller, envelope.method, received, place)
                tamper = self._network.fire(FaultKind.TAMPER, caller, self._peer_id, envelope.method)
                answer = tamper.change(answer) if tamper and tamper.change else answer
                copied = _copy(decode_envelope(reply), answer)
        except Refused as refused:
            self.count_refusal(caller, refused)
            await self._network.carry(self._peer_id, caller, Parcel(name, 0))
            raise
        size = len(reply) + sum(spec.nbytes for spec in answer.specs)
        self.traffic.add_sent(name, size)
        own_turn = self._line.turn(waits=envelope.asks_first)
        try:
            await own_turn.come()
            await self._network.carry(self._peer_id, caller, Parcel(name, len(reply), answer.specs))
        finally:
            own_turn.over()
        if self._network.fire(FaultKind.LOSE_ANSWER, caller, self._peer_id, envelope.method):
            raise BrokenStream(f"{self._peer_id}: injected fault")
        return copied, len(reply)

    def break_calls(self, to: PeerId | None) -> None:
        """Break the calls under way to one peer, or all of them."""
        for outcome, (target, _) in list(self._calls.items()):
            if to in (None, target) and not outcome.done():
                error: TransportError = BrokenStream(f"the stream to {target} broke")
                outcome.set_exception(error)

    def stall(self, stalled: Callable[[PeerId, PeerId], bool]) -> None:
        """No byte moves any more between pairs that are `stalled`.

        Calls under way are given up when their time without a byte has passed, unless bytes move again by then.
        """
        loop = asyncio.get_running_loop()

        def give_up(outcome: asyncio.Future[_Answered], target: PeerId) -> None:
            if stalled(self._peer_id, target) and not outcome.done():
                outcome.set_exception(DeadlinePassed(f"no byte moves between {self._peer_id} and {target}"))

        for outcome, (target, progress) in self._calls.items():
            if stalled(self._peer_id, target):
                loop.call_later(progress, give_up, outcome, target, context=self._context.copy())

    def cancel_handlers(self) -> None:
        """Cancel every handler under way."""
        for task in self._handlers:
            task.cancel()

    async def close(self) -> None:
        """See `Transport.close`."""
        self._closed = True
        self._network.detach(self)
        self.break_calls(None)
        await cancel_and_wait(list(self._handlers))


def _copy(envelope: Envelope, message: Message) -> Message:
    return Message(envelope.header, tuple(tensor.detach().clone() for tensor in message.tensors))


def _seal(peer: PeerId, statement: bytes) -> bytes:
    return hashlib.blake2b(statement, key=peer.encode()[:64]).digest()
