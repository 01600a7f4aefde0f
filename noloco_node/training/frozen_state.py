"""A replica's state of one moment, read piece by piece beside its training: by a checkpoint, and by copies for peers.

Nothing is copied as a state is frozen. What is to be changed is freed first, by the thread that will change it. Two of
the pieces that were not read yet are copied then, and for the others the change waits. Between two inner steps nothing
changes but the gradient, so little is copied of a state that is read within that time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from noloco_node import ambient
from noloco_node.process_memory import refused_memory
from noloco_node.training.progress import Progress

PIECE = 1 << 24
"""Numbers that are read, or added, at once: 64 MiB of fp32."""
SPARE_BYTES = 2 * 4 * PIECE
"""The bytes of a state that are copied where it is changed before it was read. For the rest the change waits."""
PATIENCE_SECONDS = 120.0
"""A change waits at most so long for a reader, as for a disk that hangs. The reader is told then that it has failed."""

Vectors = Mapping[str, Sequence[tuple[int, Tensor]]]
"""Flat vectors by name, each of one part or more: where in the vector a part begins, and its live memory. A number
alone has no dimension."""
Sizes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Dtype and shape of tensors by name."""

TRAIL = "trail"
"""Name of `OuterReplica.trail` among a state's tensors, where the codec trails."""
MOMENTUM = "momentum"
"""Name of δ among a state's tensors, where α is not 0."""
GRADIENT = "gradient"
"""Name of what has gathered for the next inner step, in a checkpoint: left out where that is nothing."""


def sizes_of(tensors: Mapping[str, Tensor]) -> Sizes:
    """Their dtypes and shapes."""
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


class Thawed(Exception):
    """The state was let go before it was read to its end: what was read is of no one moment."""


@dataclass(slots=True, eq=False)
class _Piece:
    name: str
    start: int
    source: Tensor
    copied: bool = False


@dataclass(slots=True, eq=False)
class FrozenState:
    """The state, once `freeze` has filled it. It belongs to one reader on one thread, and to the threads that change
    what it is made of."""

    progress: Progress = field(default_factory=Progress)
    credit: float = 0.0
    """Tokens by which earlier inner steps exceeded their share of the batch."""
    tokens_accumulated: int = 0
    loss_accumulated: float = 0.0
    sizes: Sizes = field(default_factory=dict[str, tuple[torch.dtype, tuple[int, ...]]])
    """Dtypes and shapes of what is read: flat fp32 vectors and, as int64, a number alone."""
    held_seconds: float = 0.0
    """For which changes have waited or copied, until now."""
    _waiting: deque[_Piece] = field(default_factory=deque[_Piece])
    _reading: str | None = None
    _alone: bool = False
    _thawed: bool = False
    _to_host: Callable[[Tensor], Tensor] = lambda source: source
    _changed: threading.Condition = field(default_factory=threading.Condition)
    """Its lock may be taken again by the thread that has it."""

    def freeze(self, vectors: Vectors, to_host: Callable[[Tensor], Tensor]) -> None:
        """Hold these vectors still, in the order in which they will be read: first numbers alone, then each vector from
        its beginning. `to_host` brings a part of one to the host as it is, for any thread."""
        self._to_host = to_host
        numbers = {name: parts[0][1] for name, parts in vectors.items() if len(parts) == 1 and not parts[0][1].dim()}
        sizes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = dict.fromkeys(numbers, (torch.int64, ()))
        with self._changed:
            for name, number in numbers.items():
                self._waiting.append(_Piece(name, 0, number.to("cpu", copy=True), copied=True))
            for name, parts in vectors.items():
                if name in numbers:
                    continue
                sizes[name] = (torch.float32, (sum(len(part) for _, part in parts),))
                for start, part in sorted(parts, key=lambda each: each[0]):
                    places = range(0, len(part), PIECE)
                    flat = part.detach()
                    self._waiting.extend(_Piece(name, start + at, flat[at : at + PIECE]) for at in places)
            self.sizes = sizes

    @property
    def thawed(self) -> bool:
        """Whether it was let go, or read to its end."""
        return self._thawed

    def pieces(self) -> Iterator[tuple[str, int, Tensor]]:
        """Name, beginning and numbers of each piece in turn: host tensors, not to be changed and not to be kept. Raises
        Thawed as soon as what was read is of no one moment."""
        while True:
            with self._changed:
                self._reading = None
                self._changed.notify_all()
                if self._thawed:
                    raise Thawed
                if not self._waiting:
                    self._thawed = True
                    return
                piece = self._waiting.popleft()
                self._reading = piece.name
            source = piece.source if piece.copied else self._to_host(piece.source)
            yield piece.name, piece.start, source.float() if source.dim() else source

    def collect(self) -> dict[str, Tensor]:
        room = {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in self.sizes.items()}
        for name, start, piece in self.pieces():
            (room[name][start : start + len(piece)] if piece.dim() else room[name]).copy_(piece)
        return room

    def free(self, names: Collection[str]) -> None:
        """The vectors of these names are about to be changed, by the thread that calls: what was not read of them yet
        is copied, or waited for."""
        with self._changed:
            if self._thawed or not (self._reading in names or self._left_of(names)):
                return
            if self._alone:
                self.thaw()
                return
            began = ambient.monotonic()
            while self._bytes_beyond(names) > SPARE_BYTES and self._waits(began):
                pass
            try:
                for piece in self._left_of(names):
                    here = self._to_host(piece.source)
                    piece.source = here.to("cpu", copy=True) if here is piece.source else here
                    piece.copied = True
            except (MemoryError, RuntimeError) as refusal:  # the training goes on, and the reader is told
                if refused_memory(refusal) is None:
                    raise
                self.thaw()
            while self._reading in names and self._waits(began):
                pass
            self.held_seconds += ambient.monotonic() - began

    def leave_alone(self) -> None:
        """Nobody waits any more for what is read. A reader that is on its way may go on while nothing changes."""
        with self._changed:
            self._alone = True
            self._changed.notify_all()

    def thaw(self) -> None:
        """Nobody may read it any more."""
        with self._changed:
            self._thawed = True
            self._waiting.clear()
            self._changed.notify_all()

    def _left_of(self, names: Collection[str]) -> list[_Piece]:
        return [piece for piece in self._waiting if piece.name in names and not piece.copied]

    def _bytes_beyond(self, names: Collection[str]) -> int:
        """What would lie in copies if these vectors were freed now."""
        pieces = (piece for piece in self._waiting if piece.copied or piece.name in names)
        return sum(4 * piece.source.numel() for piece in pieces)

    def _waits(self, began: float) -> bool:
        """Wait for the reader to get on. False once nobody waits for what it reads, or that was too long and it has
        failed."""
        if self._alone or ambient.monotonic() - began > PATIENCE_SECONDS:
            self.thaw()
        return not self._thawed and (self._changed.wait(1.0) or True)
