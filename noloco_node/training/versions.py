"""Published weights: immutable copies in the compute precision, so that a backward uses the weights of its forward."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from noloco_node.address_space import refused_memory
from noloco_node.training.layout import FlatLayout


@dataclass(slots=True, eq=False)
class Version:
    """One published copy. `parameters` are autograd leaves; nothing writes to them while `users` > 0."""

    number: int
    flat: Tensor
    parameters: dict[str, Tensor]
    users: int = 0


class VersionStore:
    """Publishes copies of the master weights and reuses the memory of those that no microbatch needs any more.

    Not thread-safe: it belongs to the compute thread. Versions alive are bounded by the microbatches that hold one,
    plus the current one.

    Where there is no memory for one more, the work that holds the current one ends first. New work is refused until
    that memory is free for the next.
    """

    def __init__(self, layout: FlatLayout, dtype: torch.dtype) -> None:
        self._layout = layout
        self._dtype = dtype
        self._free: list[Version] = []
        self._held: set[Version] = set()
        self._current: Version | None = None
        self._late: Tensor | None = None
        """Master weights that are newer than the current version, and have had no memory yet."""
        self._published = 0

    @property
    def live(self) -> int:
        """Versions that are current or held by a microbatch."""
        return len(self._held) + (self._current is not None and self._current not in self._held)

    @property
    def current(self) -> Version:
        """The version that new work takes. Raises what refuses memory where there is none for what is late."""
        self._publish_late()
        assert self._current is not None, "publish() comes first"
        return self._current

    def publish(self, master: Tensor) -> None:
        """Copy the master weights [size] into a fresh version and make it current: now, or where there is no memory for
        it before the next work begins. `master` must be the same tensor each time."""
        self._late = master
        try:
            self._publish_late()
        except (MemoryError, RuntimeError) as refusal:
            if self._current is None or refused_memory(refusal) is None:
                raise

    def _publish_late(self) -> None:
        if (master := self._late) is None:
            return
        previous = self._current
        if previous is not None and previous.users == 0:
            self._free.append(previous)
        version = self._free.pop() if self._free else self._allocate(master.device)
        with torch.no_grad():
            version.flat.copy_(master)
        self._published += 1
        version.number = self._published
        self._current, self._late = version, None

    def acquire(self) -> Version:
        """The current version, held until `release`."""
        version = self.current
        version.users += 1
        self._held.add(version)
        return version

    def release(self, version: Version) -> None:
        """Give a version back; its memory is reused once nobody holds it and a newer one is current."""
        version.users -= 1
        assert version.users >= 0, "released more often than acquired"
        if version.users == 0:
            self._held.discard(version)
            if version is not self._current:
                self._free.append(version)

    def _allocate(self, device: torch.device) -> Version:
        flat = torch.empty(self._layout.size, dtype=self._dtype, device=device)
        leaves = {name: view.detach().requires_grad_() for name, view in self._layout.views(flat).items()}
        return Version(0, flat, leaves)
