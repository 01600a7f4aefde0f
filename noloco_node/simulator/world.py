"""A swarm in virtual time: whole nodes, and what may happen to them."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from noloco_node.aio import Pulse, cancel_and_wait
from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import RunSpec
from noloco_node.identity.peer_id import PeerId
from noloco_node.simulator.directory import SimulatedDht
from noloco_node.simulator.links import Links
from noloco_node.simulator.loop import Machine, this_loop
from noloco_node.simulator.node import Disk, Node, identity_of
from noloco_node.simulator.quadratic import Quadratic
from noloco_node.sizing.footprint import Footprint, footprint_of
from noloco_node.telemetry.events import Account, AnyEvent
from noloco_node.training.compute_thread import Priority
from noloco_node.transport.memory import MemoryNetwork

SECONDS = {Priority.STEP: 0.01, Priority.BACKWARD: 0.4, Priority.FORWARD: 0.2, Priority.DRAW: 0.2}
"""Seconds of a device for each kind of work if nothing else is said."""

DeviceTimes = Callable[[int], Callable[[Priority], float]]
"""A function from a node's number to the seconds that its device takes for each kind of work."""


class World:
    """All nodes that were ever started, by number, and the links between them.

    Nodes go where they are needed most, keep copies of other stages and bring lost ones back. Those whose numbers
    `disks` names keep checkpoints below `folder`, and in their next lives as well.

    Use it as a context on a `SimulatedLoop`; at its end every node is gone. Every event of a node goes into `trace`,
    whose hash is the course of the simulation: one seed, one hash.
    """

    def __init__(
        self,
        spec: RunSpec,
        settings: NodeSettings | None = None,
        *,
        footprint: Footprint | None = None,
        learning: Quadratic | None = None,
        device: DeviceTimes = lambda _number: SECONDS.__getitem__,
        links: Links | None = None,
        seed: int = 0,
        folder: Path = Path("nowhere"),
        disks: frozenset[int] = frozenset(),
    ) -> None:
        self.spec = spec
        self.settings = settings or NodeSettings(in_flight=2, drain_seconds=1, seed=seed)
        self.links = links or Links()
        self.links.lost = lambda peer: self.node_of(peer).condition != "running"
        self.network = MemoryNetwork(self.links)
        self.dht = SimulatedDht(spec.stages, self.links, spec.run_id, spec.limits.record_seconds)
        self.nodes: list[Node] = []
        self.events: list[list[AnyEvent]] = []
        """What each node told, by number."""
        self.on_event: Callable[[Node, AnyEvent], None] = lambda _node, _event: None
        self.changed = Pulse()
        """Fires when a node starts or ends."""
        self._learning = learning or Quadratic()
        footprint = footprint or footprint_of(spec)
        # a copy is refused that has not as many weights as its stage
        self._footprint = replace(footprint, parameters=self._learning.weights(footprint))
        self._device = device
        self._folder = folder
        self._with_disk = disks
        self._disks: dict[PeerId, Disk] = {}
        self._rng = random.Random(f"world/{seed}")
        self._lives: list[asyncio.Task[None]] = []
        self._loop = this_loop()
        self._trace = hashlib.sha256()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for node in self.nodes:
            self._loop.go_on(node.machine)
        await cancel_and_wait(self._lives)

    @property
    def trace(self) -> str:
        """A hash of all events so far, with their nodes and times, and of the weights of those that have ended."""
        whole = self._trace.copy()
        for node in self.nodes:
            whole.update(f"{node.number} {node.condition} {node.weights}\n".encode())
        return whole.hexdigest()

    @property
    def running(self) -> list[Node]:
        """Nodes that have not come to any end."""
        return [node for node in self.nodes if node.condition == "running"]

    def start(self, stage: int, *, twin_of: Node | None = None, auto: bool = False) -> Node:
        """Start a node at a stage, now; an `auto` one chooses where. It joins by nodes that run; the first begins the
        swarm. `twin_of`: it has that node's identity, as where a folder was copied."""
        number = len(self.nodes)
        running = [node.peer for node in self.running]
        entrances = self._rng.sample(running, min(3, len(running)))
        machine = Machine(f"node {number}")
        identity = identity_of(number) if twin_of is None else twin_of.identity
        node = Node(
            number,
            identity,
            stage,
            self.spec,
            self.settings,
            self._footprint,
            self._learning,
            self.network,
            self.dht,
            self._device(number),
            self._take,
            machine,
            entrances,
        )
        node.auto = auto
        if number in self._with_disk:
            self._disks[node.peer] = Disk(self._folder / f"{number}", self.settings.checkpoints_kept)
        node.disk = self._disks.get(node.peer)
        self.nodes.append(node)
        self.events.append([])
        life = self._loop.create_task(node.live(), name=f"node {number}", context=machine.context())
        life.add_done_callback(lambda _: self.changed.fire())
        self._lives.append(life)
        self.changed.fire()
        return node

    def stop(self, node: Node) -> None:
        """Ask a node to leave in order, as SIGINT does."""
        node.told_to_leave = True
        if node.replica is not None:
            node.replica.stop.set()

    def kill(self, node: Node) -> None:
        """A node is gone from one moment to the next; its record lives on until it expires."""
        if node.condition != "running":
            return
        node.die()
        self.network.kill(node.peer)
        self._lives[node.number].cancel()
        self._loop.go_on(node.machine)

    def vanish(self, node: Node) -> None:
        """A node's machine is gone: nothing breaks, and nothing comes back."""
        node.die(silent=True)
        self.links.nowhere.add(node.peer)
        self.freeze(node)
        self.changed.fire()

    def freeze(self, node: Node) -> None:
        """Nothing runs on a node any more, until `thaw`; its connections stay open."""
        self._loop.halt(node.machine)

    def thaw(self, node: Node) -> None:
        """A frozen node goes on; all that came due meanwhile comes at once."""
        self._loop.go_on(node.machine)

    def part(self, *sides: Iterable[Node]) -> None:
        """Part as `Links.part`, between nodes; a call under way between two sides is given up once its time is over."""
        self.links.part(*([node.peer for node in side] for side in sides))
        self.network.stall(self.links.apart)

    def slow(self, node: Node, times: float) -> None:
        """All that goes to and from a node takes so many times as long; 1 is as it was."""
        self.links.way.slow(node.peer, times)

    async def until(self, holds: Callable[[], bool], within: float) -> None:
        """Return when `holds`, which is looked at whenever a node starts or ends. TimeoutError after so many virtual
        seconds."""
        async with asyncio.timeout(within):
            while not holds():
                await self.changed.wait()

    async def ended(self, within: float) -> None:
        """Return when no node runs any more; nobody waits for those that have vanished. TimeoutError after so many
        virtual seconds."""
        await self.until(lambda: not self.running, within)
        await asyncio.wait([self._lives[node.number] for node in self.nodes if node.peer not in self.links.nowhere])

    def accounts(self) -> dict[int, Account]:
        """The books of every node as it told them last, by number."""
        told = (
            (number, [event for event in events if isinstance(event, Account)])
            for number, events in enumerate(self.events)
        )
        return {number: accounts[-1] for number, accounts in told if accounts}

    def node_of(self, peer: PeerId) -> Node:
        """The latest node with this id. KeyError where there is none."""
        for node in reversed(self.nodes):
            if node.peer == peer:
                return node
        raise KeyError(peer)

    def _take(self, node: Node, event: AnyEvent) -> None:
        self._trace.update(f"{node.number} {event.model_dump_json()}\n".encode())
        self.events[node.number].append(event)
        self.on_event(node, event)
