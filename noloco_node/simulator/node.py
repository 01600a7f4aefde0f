"""One node of a simulation: a whole replica on a machine of its own, from its start to its end."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Sequence
from typing import Literal

import base58

from noloco_node import ambient
from noloco_node.bootstrap.hello import serve_hello
from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import RunSpec
from noloco_node.directory.first_look import FIRST_LOOK_SECONDS
from noloco_node.identity.peer_id import PeerId
from noloco_node.node.first_state import become_current, say_that_it_looks
from noloco_node.node.replica import Replica
from noloco_node.simulator.device import SimulatedDevice
from noloco_node.simulator.directory import SimulatedDht, SimulatedDirectory
from noloco_node.simulator.learning import Learning
from noloco_node.simulator.loop import Machine
from noloco_node.telemetry.events import AnyEvent
from noloco_node.training.compute_thread import Priority
from noloco_node.transport.memory import MemoryNetwork, MemoryTransport

logger = logging.getLogger(__name__)

Condition = Literal["running", "ended", "failed", "killed"]
"""`ended`: it left in order, at the run's end or told to; `failed`: its own code gave up."""


def peer_of(number: int) -> PeerId:
    """The id of the node with this number: shaped like a real one, and as evenly spread."""
    return PeerId(base58.b58encode(b"\x12\x20" + hashlib.sha256(f"node {number}".encode()).digest()).decode())


def address_of(peer: PeerId) -> str:
    """What a joiner names; nobody dials it."""
    return f"/ip4/127.0.0.1/tcp/7000/p2p/{peer}"


class Node:
    """A replica with its machine, device, transport and place in the directory.

    `seconds` is what its device takes for each kind of work; `told` gets every event. It joins by the nodes
    `entrances`; without any it begins a swarm.
    """

    def __init__(
        self,
        number: int,
        peer: PeerId,
        stage: int,
        spec: RunSpec,
        settings: NodeSettings,
        learning: Learning,
        network: MemoryNetwork,
        dht: SimulatedDht,
        seconds: Callable[[Priority], float],
        told: Callable[[Node, AnyEvent], None],
        machine: Machine,
        entrances: Sequence[PeerId] = (),
    ) -> None:
        self.number = number
        self.stage = stage
        self.peer = peer
        self.machine = machine
        self.condition: Condition = "running"
        self.error: BaseException | None = None
        """What it failed of."""
        self.replica: Replica | None = None
        """Its last one; closed once the node has left."""
        self.left_open: tuple[str, ...] = ()
        """What its replica held still when it had run to its end."""
        self.weights = ""
        """Hash of the weights with which it ended, slow and fast."""
        addresses = tuple(address_of(peer) for peer in entrances)
        self._spec = spec
        self._settings = settings.model_copy(update={"initial_peers": addresses, "stage": stage})
        self._learning = learning
        self._network = network
        self._dht = dht
        self.directory: SimulatedDirectory | None = None
        self._seconds = seconds
        self._told = told

    def emit(self, event: AnyEvent) -> None:
        """Tell an event; the dead tell nothing."""
        if self.condition == "running":
            self._told(self, event)

    def die(self) -> None:
        """It is gone from one moment to the next: nothing of what it still does is seen by anybody."""
        self.condition = "killed"
        if self.directory is not None:
            self.directory.die()

    async def live(self) -> None:
        """From the start to the end. Never raises but when cancelled: see `condition` and `error`."""
        try:
            await self._live()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self.condition, self.error = "failed", error
            logger.warning("node %d failed at %.3f s: %r", self.number, ambient.monotonic(), error, exc_info=error)
        else:
            self.condition = "ended"

    async def _live(self) -> None:
        device = SimulatedDevice(self._seconds)
        transport = MemoryTransport(self._network, self.peer)
        directory = self.directory = SimulatedDirectory(self._dht, self.peer, transport.acquaintances)
        try:
            placed = await self._learning.place(self._spec, self._settings, self.stage, device)
            samples = self._learning.samples(self._spec, self.number, 0) if self.stage == 0 else None
            replica = self.replica = Replica(
                self._spec, self._settings, placed, transport, directory, device, samples=samples, emit=self.emit
            )
            serve_hello(transport, self._spec, lambda: self.stage)
            replica.serve()
            try:
                say_that_it_looks(replica)
                await replica.membership.look_for_others(FIRST_LOOK_SECONDS if self._settings.initial_peers else 0.0)
                await become_current(replica)
                await replica.run()
                self.weights = await weights_of(replica)
            finally:
                replica.close()
        finally:
            if self.condition != "killed":
                directory.close()
            await transport.close()
            await device.close()


async def weights_of(replica: Replica) -> str:
    """Hash of a replica's slow and fast weights."""
    digest = hashlib.sha256()
    for weights in await replica.worker.named_weights():
        for name in sorted(weights):
            digest.update(weights[name].numpy().tobytes())
    return digest.hexdigest()
