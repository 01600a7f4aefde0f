"""A world in which more may befall the nodes than stopping and starting: they move, have disks, lie, and vanish."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import RunSpec
from noloco_node.directory.records import PeerRecord
from noloco_node.identity.peer_id import PeerId
from noloco_node.simulator.learning import Learning
from noloco_node.simulator.links import Links, LinkSeconds, PlainWay
from noloco_node.simulator.node import Node
from noloco_node.simulator.stays import Disk, StayingNode, StayingWorld
from noloco_node.simulator.world import DeviceTimes
from noloco_node.sizing.footprint import Footprint


class HuntedLinks(Links):
    """Links of which some end nowhere."""

    def __init__(self, seconds: LinkSeconds) -> None:
        super().__init__(PlainWay(seconds))
        self.nowhere: set[PeerId] = set()

    def apart(self, one: PeerId, other: PeerId) -> bool:
        """See `Links.apart`."""
        return one in self.nowhere or other in self.nowhere or super().apart(one, other)


class HuntedWorld(StayingWorld):
    """A world of nodes that move. The peers that `disks` names keep checkpoints below `folder`."""

    def __init__(
        self,
        spec: RunSpec,
        settings: NodeSettings,
        footprint: Footprint,
        *,
        device: DeviceTimes,
        learning: Learning,
        links: HuntedLinks,
        seed: int,
        folder: Path,
        disks: frozenset[int],
    ) -> None:
        super().__init__(spec, settings, footprint, learning=learning, device=device, links=links, seed=seed)
        self._ends_of_links = links
        self._folder = folder
        self._with_disk = disks
        self._disks: dict[PeerId, Disk] = {}
        self._auto = False

    def _outfit(self, node: Node) -> None:
        super()._outfit(node)
        assert isinstance(node, StayingNode)
        node.auto = self._auto
        if node.number in self._with_disk:
            self._disks[node.peer] = Disk(self._folder / f"{node.number}")
        node.disk = self._disks.get(node.peer)

    def join(self) -> Node:
        """A node that chooses its stage."""
        self._auto = True
        try:
            return self.start(0)
        finally:
            self._auto = False

    async def ended(self, within: float) -> None:
        """See `World.ended`; nobody waits for nodes that have vanished."""
        await self.until(lambda: not self.running, within)
        nowhere = self._ends_of_links.nowhere
        await asyncio.wait([self._lives[node.number] for node in self.nodes if node.peer not in nowhere])

    def vanish(self, node: Node) -> None:
        """A node's machine is gone: nothing breaks, and nothing comes back."""
        node.die(silent=True)
        self._ends_of_links.nowhere.add(node.peer)
        self.freeze(node)
        self.changed.fire()

    @property
    def vanished(self) -> int:
        """How many have."""
        return len(self._ends_of_links.nowhere)

    def claim(self, node: Node, change: Callable[[PeerRecord], PeerRecord]) -> None:
        """From now on a node's records say what `change` makes of them."""
        if node.directory is not None:
            node.directory.change = change
