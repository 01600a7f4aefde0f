"""One life of a stranger: a connection under a throw-away key, its victims, and the count of what it did."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, P2PHandlerError

from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import RunSpec
from noloco_node.directory.validator import stage_key
from noloco_node.identity.keys import Identity, ed25519_peer_id, ed25519_public_key, load_or_create_identity
from noloco_node.identity.peer_id import PeerId
from noloco_node.libp2p.daemon import PrivateP2P
from noloco_node.libp2p.start import running_p2p
from noloco_node.model.stage import build_stage
from noloco_node.state_transfer.backups import standby_stage
from noloco_node.training.compute_thread import ComputeThread
from noloco_node.training.placing import outer_of
from noloco_node.training.stage_trainer import StageTrainer
from noloco_node.training.stage_worker import StageWorker
from noloco_node.transport.errors import Refusal, Refused, TransportError
from noloco_node.transport.interface import Handle
from noloco_node.transport.libp2p import Libp2pTransport
from noloco_node.transport.messages import JsonObject, Message, TensorSpec
from tests.inside import thread_of

RPC_SECONDS = 3.0
CALL_SECONDS = 5.0
LOST = "lost"
"""An outcome that shows nothing: the link failed, so the attack may never have arrived."""
BROKEN = "broken"
"""An outcome that says that the attack itself is at fault."""
WAITED_FOR = 2.0 / 3.0
"""Share of its stage peers that a key leaves the first word in exchanges."""
DHT_SERVICE = "DHTProtocol"
"""The name under which hivemind's nodes serve the directory."""


@dataclass(frozen=True)
class Victim:
    """An honest node, as anybody can find it."""

    peer: PeerId
    stage: int
    address: str


def read_victims(path: Path) -> list[Victim]:
    """Those that `write_victims` wrote."""
    return [Victim(**entry) for entry in json.loads(path.read_text())]


def write_victims(path: Path, victims: Sequence[Victim]) -> None:
    """For a stranger in a process of its own."""
    path.write_text(json.dumps([asdict(victim) for victim in victims]))


class Tally:
    """Attack -> outcome -> times; also in a file, where one is named."""

    def __init__(self, path: Path | None = None) -> None:
        self.counts: dict[str, Counter[str]] = {}
        self._path = path

    def count(self, attack: str, outcome: str, times: int = 1) -> None:
        """So many more."""
        self.counts.setdefault(attack, Counter())[outcome] += times

    def write(self) -> None:
        """Bring the file up to date."""
        if self._path is not None:
            draft = self._path.with_suffix(".draft")
            draft.write_text(json.dumps(self.counts))
            draft.rename(self._path)


@dataclass
class Life:
    """What an attack works with. One that an attack needs and nobody has asked for is made on the way."""

    spec: RunSpec
    victims: list[Victim]
    identity: Identity
    daemon: PrivateP2P
    transport: Libp2pTransport
    tally: Tally
    rng: random.Random
    workers: list[StageWorker]
    """Stages as a volunteer would build them: for contracts, shapes and sizes."""
    clock: float = 0.0
    """The clock that a plausible record claims."""
    banned_by: set[PeerId] = field(default_factory=set[PeerId])
    """Victims that answer this key no more."""
    shut_out: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once most victims have banned this key."""
    served: set[str] = field(default_factory=set[str])
    newcomers: dict[PeerId, int] = field(default_factory=dict[PeerId, int])
    """Others that have called this key, and the stage that they say they serve: late joiners."""

    def of_stage(self, stage: int) -> list[Victim]:
        """Victims that serve a stage."""
        return [victim for victim in self.victims if victim.stage == stage]

    def claimed(self, peer: PeerId) -> int:
        """The stage that this life claims to a peer. It is the peer's own, to be averaged with or asked for its state.
        To some it is the next, to be sent microbatches. To a keeper of another stage's copy it is that stage, to be
        asked for it."""
        stage = next((victim.stage for victim in self.victims if victim.peer == peer), None)
        if stage is None:
            return self.newcomers.get(peer, 0)
        rank = sum(victim.peer < peer for victim in self.of_stage(stage))
        guarded = standby_stage(stage, rank, self.spec.stages, self.spec.standby_copies)
        if guarded is not None:
            return guarded
        choices = [stage, stage, min(stage + 1, self.spec.stages - 1)]
        return random.Random(f"{self.identity.peer_id}/{peer}").choice(choices)

    def waits_for(self, victim: Victim) -> bool:
        """Tell whether this key leaves the first word in exchanges to a victim: a node that is kept engaged dials
        nobody."""
        waits = random.Random(f"{self.identity.peer_id}/waits/{victim.peer}").random() < WAITED_FOR
        return waits and self.claimed(victim.peer) == victim.stage

    def key(self, stage: int) -> str:
        """The directory's key of a stage."""
        return stage_key(self.spec.run_id, stage)

    def serve(self, attack: str, method: str, handle: Handle) -> None:
        """Answer all requests of a method with this; the first word stands. If it fails the attack is at fault."""
        if method in self.served:
            return

        async def seen(peer: PeerId, message: Message) -> Message:
            try:
                return await handle(peer, message)
            except Refused:
                raise
            except Exception:
                traceback.print_exc()
                self.tally.count(attack, BROKEN)
                raise

        self.served.add(method)
        self.transport.serve(method, _admit_all, seen, max_concurrent_per_peer=64)

    async def call(
        self, attack: str, peer: PeerId, method: str, header: dict[str, Any], *tensors: torch.Tensor, answer: int = 0
    ) -> Message | None:
        """Ask a victim something, with room for `answer` bytes; count what came of it. None where it gave no answer."""
        try:
            message = await self.transport.call(
                peer,
                method,
                Message(header, tensors),
                timeout=CALL_SECONDS,
                progress=CALL_SECONDS,
                max_answer_bytes=answer,
            )
        except Refused as refused:
            if refused.reason is Refusal.BANNED:
                self.banned_by.add(peer)
                if 2 * len(self.banned_by) > len(self.victims):
                    self.shut_out.set()
            self.tally.count(attack, f"refused: {refused.reason}")
        except TransportError:
            self.tally.count(attack, LOST)
        else:
            self.tally.count(attack, "answered")
            return message
        return None

    async def rpc(self, attack: str, peer: PeerId, method: str, request: object, answer: type) -> Any:
        """Ask a victim's directory (`rpc_ping`, `rpc_store`, `rpc_find`); None where it gave no answer."""
        p2p: Any = self.daemon.hivemind_p2p
        try:
            async with asyncio.timeout(RPC_SECONDS):
                return await p2p.call_protobuf_handler(
                    PeerID.from_base58(peer), f"{DHT_SERVICE}.{method}", request, answer
                )
        except P2PHandlerError:
            self.tally.count(attack, "refused: the handler failed")
        except (P2PDaemonError, OSError, TimeoutError, asyncio.IncompleteReadError):
            self.tally.count(attack, LOST)
        return None

    async def close_workers(self) -> None:
        """End their threads."""
        for worker in self.workers:
            await thread_of(worker).close()


def _admit_all(_peer: PeerId, _header: JsonObject, _specs: tuple[TensorSpec, ...]) -> None:
    return None


def throw_away_key() -> Identity:
    """A key in memory, with no file and no node."""
    private = Ed25519PrivateKey.generate()
    peer = ed25519_peer_id(private)
    return Identity(Path(), peer, ed25519_public_key(peer), True, private)


def digest_of(key: str) -> bytes:
    """The place of a key in the directory, 20 bytes."""
    identifier: Any = DHTID.generate(source=key)
    return bytes(identifier.to_bytes())


def make_workers(spec: RunSpec) -> list[StageWorker]:
    """One for each stage. `Life.close_workers` ends them."""
    workers: list[StageWorker] = []
    for stage in range(spec.stages):
        trainer = StageTrainer(build_stage(spec.model, stage), spec.inner, device="cpu", wire_dtype=torch.float32)
        workers.append(StageWorker(spec, trainer, outer_of(spec, trainer), ComputeThread(), lambda _: None))
    return workers


@contextlib.asynccontextmanager
async def living(
    spec: RunSpec, victims: Sequence[Victim], folder: Path, tally: Tally, rng: random.Random, *, trains: bool = True
) -> AsyncIterator[Life]:
    """A life under a new key, connected to all victims; its process and folder are gone at the end. Where it `trains`
    it has stages, which some attacks need."""
    identity = load_or_create_identity(folder / f"{rng.getrandbits(64):016x}.key")
    settings = NodeSettings(initial_peers=tuple(victim.address for victim in victims))
    async with running_p2p(settings, identity) as daemon:
        transport = Libp2pTransport(daemon, identity=identity)
        await transport.start()
        life = Life(spec, list(victims), identity, daemon, transport, tally, rng, make_workers(spec) if trains else [])
        try:
            yield life
        finally:
            await transport.close()
            await life.close_workers()
            identity.path.unlink()
            tally.write()


async def repeat(attack: str, life: Life, once: Any, pause: float) -> None:
    """`once(victim)` for all victims in turns, again and again with `pause` seconds between rounds."""
    while True:
        for victim in life.victims:
            await once(victim)
        life.tally.count(attack, "rounds")
        await asyncio.sleep(pause)
