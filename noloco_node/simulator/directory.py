"""The directory of a simulation, as one node sees it."""

from __future__ import annotations

from collections.abc import Callable

from noloco_node.directory.memory import MemoryDirectory, MemoryDirectoryHub
from noloco_node.directory.records import DirectoryView, PeerRecord
from noloco_node.identity.peer_id import PeerId


class SimulatedDirectory(MemoryDirectory):
    """Records in one hub; `apart` says who is cut off from this node: what such peers publish is not seen. A dead
    node's own words reach nobody."""

    def __init__(self, hub: MemoryDirectoryHub, apart: Callable[[PeerId], bool]) -> None:
        super().__init__(hub)
        self._apart = apart
        self.dead = False

    async def publish(self, record: PeerRecord, life: float) -> bool:
        """See `Directory.publish`."""
        return not self.dead and await super().publish(record, life)

    async def refresh(self) -> DirectoryView:
        """See `Directory.refresh`."""
        before = self._view
        seen = await super().refresh()
        if any(self._apart(peer) for rows in (*before.stages, *seen.stages) for peer in rows):
            now = self.now()
            self._view = DirectoryView(
                tuple(
                    {peer: row for peer, row in new.items() if not self._apart(peer)}
                    | {peer: row for peer, row in old.items() if self._apart(peer) and row.expires > now}
                    for old, new in zip(before.stages, seen.stages, strict=True)
                )
            )
        return self._view
