"""A hostile peer: a real daemon that holds a place in the swarm and does what the environment tells it.

It answers with poison (gradients, weights) and attacks every peer that it finds in the directory: broken, truncated,
replayed and oversized frames, slow streams, forged directory records. What it has done stands in `attacks.json` in
its run folder: name of the attack -> times carried out.
Run as `python -m tests.chaos.hostile_node run ...`.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from hivemind.dht.routing import DHTID
from torch import Tensor

from noloco_node import PROTOCOL_VERSION
from noloco_node.config.run_spec import ActivationCodec
from noloco_node.directory.dht_node import Stored
from noloco_node.directory.records import PeerRecord, PeerState
from noloco_node.directory.validator import sign_record, stage_key
from noloco_node.identity.peer_id import PeerId
from noloco_node.node import journey as node
from noloco_node.node.replica import Replica
from noloco_node.outer.replica import OuterReplica, Part
from noloco_node.pipeline import messages as microbatch
from noloco_node.pipeline.messages import MicrobatchAnswer, MicrobatchHeader, Trained
from noloco_node.pipeline.server import PipelineServer
from noloco_node.transport.calls import Reply
from noloco_node.transport.errors import Refused, TransportError
from noloco_node.transport.frames import (
    END_FRAME,
    FrameKind,
    encode_envelope,
    encode_frame,
    encode_prefix,
    tensor_bytes,
)
from noloco_node.transport.libp2p import STREAM_PROTOCOL
from noloco_node.transport.messages import Message, TensorSpec
from tests.chaos import paced_node
from tests.inside import directory_of, host_of, node_of, signs_as
from tests.support import alongside

HOSTILITY = "NOLOCO_CHAOS_HOSTILITY"
"""Names of attacks, separated by commas."""
ROUND_SECONDS = 0.5
LORIS_STREAMS = 24
LORIS_SECONDS = 20.0

GRADIENTS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "nan gradients": lambda gradient: torch.full_like(gradient, float("nan")),
    "flipped gradients": lambda gradient: -gradient,
    "huge gradients": lambda gradient: -1e6 * gradient,
}
WEIGHTS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "nan weights": lambda weights: torch.full_like(weights, float("nan")),
    "flipped weights": lambda weights: -weights,
    "huge weights": lambda weights: 1e4 * torch.randn_like(weights),
}


class Tally:
    """Counts what was done, in a file."""

    def __init__(self) -> None:
        self.path: Path | None = None
        self._counts: Counter[str] = Counter()

    def count(self, name: str) -> None:
        """One more."""
        self._counts[name] += 1
        if self.path is not None:
            self.path.write_text(json.dumps(self._counts))


TALLY = Tally()
PLAN = frozenset(os.environ.get(HOSTILITY, "").split(","))


class HostileReplica(Replica):
    """Trains like any other, and attacks its peers meanwhile."""

    async def run(self) -> None:
        """See `Replica.run`."""
        TALLY.path = self.context.settings.run_folder / "attacks.json"
        async with alongside(Attacker(self).run()):
            await super().run()


class Attacker:
    """Attacks all live peers in turns."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._transport: Any = replica.context.transport
        attacks = {
            "garbage": self._garbage,
            "wrong checksum": self._wrong_checksum,
            "truncated": self._truncated,
            "oversized": self._oversized,
            "replayed": self._replayed,
            "slow loris": self._loris,
            "wrong shape": self._wrong_shape,
            "nan activations": self._nan_activations,
            "forged records": self._forge,
        }
        self._attacks: dict[str, Callable[[PeerId, int], Awaitable[None]]] = {
            name: attack for name, attack in attacks.items() if name in PLAN
        }

    async def run(self) -> None:
        """Until cancelled."""
        while self._attacks:
            await asyncio.sleep(ROUND_SECONDS)
            for stage in range(self._replica.context.spec.stages):
                for record in self._replica.membership.live(stage):
                    if record.peer_id != self._transport.peer_id:
                        await self._attack(PeerId(record.peer_id), stage)

    async def _attack(self, peer: PeerId, stage: int) -> None:
        for name, attack in self._attacks.items():
            try:
                async with asyncio.timeout(5):
                    await attack(peer, stage)
            except (OSError, TimeoutError, TransportError, Refused, asyncio.IncompleteReadError):
                pass
            TALLY.count(name)

    async def _send(self, peer: PeerId, *parts: bytes, wait: bool = True) -> None:
        reader, writer = await host_of(self._transport).open_stream(peer, STREAM_PROTOCOL)
        try:
            writer.write(b"".join(parts))
            await writer.drain()
            if wait:
                async with asyncio.timeout(1):
                    await reader.read(4096)
        finally:
            writer.transport.abort()

    async def _garbage(self, peer: PeerId, _stage: int) -> None:
        await self._send(peer, secrets.token_bytes(2048))

    async def _wrong_checksum(self, peer: PeerId, stage: int) -> None:
        frame = bytearray(encode_frame(FrameKind.HEADER, self._envelope(stage)))
        frame[-3] ^= 0x40
        await self._send(peer, bytes(frame))

    async def _truncated(self, peer: PeerId, stage: int) -> None:
        body = bytes(tensor_bytes(self._tensors()[0]))
        prefix = encode_prefix(FrameKind.BODY, body)
        await self._send(peer, encode_frame(FrameKind.HEADER, self._envelope(stage)), prefix, body[:100], wait=False)

    async def _oversized(self, peer: PeerId, stage: int) -> None:
        specs = [TensorSpec("fp32", (1 << 20, 1 << 20)), TensorSpec("i32", (1 << 20, 1 << 20))]
        envelope = encode_envelope(microbatch.MICROBATCH.name, self._header(stage), specs)
        await self._send(peer, encode_frame(FrameKind.HEADER, envelope))
        too_long = bytearray(encode_prefix(FrameKind.HEADER, b""))
        too_long[4:8] = (1 << 30).to_bytes(4, "big")
        await self._send(peer, bytes(too_long))

    async def _replayed(self, peer: PeerId, stage: int) -> None:
        """Send the same request twice on streams of its own, and twice on one stream."""
        activations, labels = self._tensors()
        parts = [encode_frame(FrameKind.HEADER, self._envelope(stage))]
        for tensor in (activations, labels):
            body = bytes(tensor_bytes(tensor))
            parts += [encode_prefix(FrameKind.BODY, body), body]
        parts.append(END_FRAME)
        await self._send(peer, *parts)
        await self._send(peer, *parts)
        await self._send(peer, *parts, *parts)

    async def _loris(self, peer: PeerId, stage: int) -> None:
        """Streams on which a byte comes now and then; opened once a peer and left to the background."""
        if getattr(self, "_loris_running", None) is None:
            self._loris_running = set[PeerId]()
            self._loris_tasks = set[asyncio.Task[None]]()
        if peer in self._loris_running:
            return
        self._loris_running.add(peer)
        frame = encode_frame(FrameKind.HEADER, self._envelope(stage))

        async def dribble() -> None:
            try:
                _, writer = await host_of(self._transport).open_stream(peer, STREAM_PROTOCOL)
                for position in range(len(frame)):
                    writer.write(frame[position : position + 1])
                    await writer.drain()
                    await asyncio.sleep(LORIS_SECONDS / len(frame))
            except (OSError, TransportError):
                return
            finally:
                self._loris_running.discard(peer)

        for _ in range(LORIS_STREAMS):
            task = asyncio.create_task(dribble())
            self._loris_tasks.add(task)
            task.add_done_callback(self._loris_tasks.discard)

    async def _wrong_shape(self, peer: PeerId, stage: int) -> None:
        await self._call(peer, stage, torch.zeros(2, 3, 5), torch.zeros(2, 3, dtype=torch.int32))

    async def _nan_activations(self, peer: PeerId, stage: int) -> None:
        activations, labels = self._tensors()
        await self._call(peer, stage, torch.full_like(activations, float("nan")), labels)

    async def _call(self, peer: PeerId, stage: int, *tensors: Tensor) -> None:
        message = Message(self._header(stage), tensors)
        await self._transport.call(
            peer, microbatch.MICROBATCH.name, message, timeout=4, progress=4, max_answer_bytes=1 << 20
        )

    async def _forge(self, peer: PeerId, stage: int) -> None:
        """Records in another's name, of another place, and one of its own that claims the end of time."""
        directory: Any = directory_of(self._replica.membership)
        while not hasattr(directory, "_node"):  # what screens the records wraps what fetches them
            directory = directory._directory
        key, expires = stage_key(self._replica.context.spec.run_id, stage), directory.now() + 300
        record = PeerRecord(
            peer_id=self._transport.peer_id,
            stage=stage,
            state=PeerState.TRAINING,
            clock=1e17,
            protocol=PROTOCOL_VERSION,
            version="x",
        )
        other = record.model_copy(update={"peer_id": peer, "state": PeerState.GONE})
        identity = signs_as(directory)
        for value, subkey, until in (
            (sign_record(identity, key, other, expires), peer, expires),
            (sign_record(identity, key, record, expires), peer, expires),
            (sign_record(identity, key, record, expires), self._transport.peer_id, expires + 1000),
            (b"\xff" * 100, peer, expires),
        ):
            row = Stored(DHTID.generate(source=key).to_bytes(), subkey, value, until)
            async with asyncio.timeout(2):
                for near in list(node_of(directory).table.peer_id_to_uid):
                    await node_of(directory).store(near, [row])

    def _header(self, stage: int) -> dict[str, Any]:
        spec = self._replica.context.spec
        own, clock = self._transport.peer_id, self._replica.worker.progress.clock
        header = MicrobatchHeader(
            id=secrets.token_hex(16),
            budget_ms=3000,
            run=spec.run_id,
            stage=stage,
            origin=own,
            origin_clock=clock,
            codec=spec.pipeline.activations[0],
        )
        return header.model_dump(mode="json")

    def _tensors(self) -> tuple[Tensor, Tensor]:
        spec = self._replica.context.spec
        shape = (spec.inner.microbatch_windows, spec.data.sequence_length)
        hidden = int(spec.model.config["hidden_size"])
        return torch.randn(*shape, hidden), torch.zeros(shape, dtype=torch.int32)

    def _envelope(self, stage: int) -> bytes:
        return encode_envelope(
            microbatch.MICROBATCH.name, self._header(stage), [TensorSpec.of(t) for t in self._tensors()]
        )


def poison() -> None:
    """Let this process's gradients and weights be what the plan says."""
    for name in PLAN & GRADIENTS.keys():
        _poison_gradients(name, GRADIENTS[name])
    for name in PLAN & WEIGHTS.keys():
        _poison_weights(name, WEIGHTS[name])


def _poison_gradients(name: str, change: Callable[[Tensor], Tensor]) -> None:
    answer = PipelineServer.answer

    async def poisoned(
        self: PipelineServer, trained: Trained, codec: ActivationCodec, began: float
    ) -> Reply[MicrobatchAnswer]:
        if trained.gradient is not None:
            TALLY.count(name)
            trained = Trained(trained.loss_sum, trained.tokens, change(trained.gradient))
        return await answer(self, trained, codec, began)

    PipelineServer.answer = poisoned


def _poison_weights(name: str, change: Callable[[Tensor], Tensor]) -> None:
    open_step = OuterReplica.open

    def poisoned(self: OuterReplica, part: Part, *, members: int, weight: float, exchange: str = "") -> None:
        if members > 1:
            TALLY.count(name)
            self.snapshot[part.slice].copy_(change(self.snapshot[part.slice]))
        open_step(self, part, members=members, weight=weight, exchange=exchange)

    OuterReplica.open = poisoned


if __name__ == "__main__":
    sys.argv[0] = "noloco-node"
    poison()
    node.Replica = HostileReplica
    paced_node.main()
