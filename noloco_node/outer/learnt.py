"""Which way a replica itself has been learning, and how far a difference to its partners leads back along it.

A stage of up to 4 million weights is looked at as a whole. Of a larger one 4,096 blocks are, one of each stretch of the
vector. Products of vectors so long are then known to a few percent, and the memory does not grow with the stage. The
blocks are drawn by a seed of the replica's own. A partner that knew them would take back everything else.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from noloco_node.outer.modulo_codes import BLOCK
from noloco_node.outer.workplace import IN_CACHE
from noloco_node.tallies import RECENT

MOST_BLOCKS = 4096
"""Blocks that are looked at."""


def learnt_bytes(size: int) -> int:
    """Memory that it takes of a stage of `size` weights in fp32."""
    return 2 * 4 * _looked_at(size)


class LearntWay:
    """A moving average over `RECENT` steps of a replica's own Δ = θ − φ, and the difference to the partners of the open
    step, both on the blocks that are looked at. Vectors are flat; a `start` is a place in the stage's vector, at a
    block's beginning."""

    def __init__(self, size: int, dtype: torch.dtype, seed: int) -> None:
        """For a stage of `size` weights."""
        self._chosen = None if _looked_at(size) == size else _draw(size // BLOCK, seed)
        """The blocks by rising number; None for all."""
        self._way, self._seen = (torch.zeros(_looked_at(size), dtype=dtype) for _ in range(2))
        self._size = size

    def forget(self) -> None:
        self._way.zero_()

    def begin(self) -> None:
        """A step is opened: nothing of a difference is known."""
        self._seen.zero_()

    def see(self, difference: Tensor, start: int) -> None:
        """Take note of the difference in the weights that begin at `start`, wherever it lies."""
        self._seen[self._place(start, start + len(difference))] = self._of(difference, start)

    def blocks(self, start: int, end: int) -> Tensor | None:
        """Which blocks of [start, end) are looked at, counted from its beginning; None for all."""
        if self._chosen is None:
            return None
        first, last = self._within(start, end)
        return self._chosen[first:last] - start // BLOCK

    def see_blocks(self, values: Tensor, start: int, end: int) -> None:
        """Take note of the difference in those blocks, flat, wherever it lies."""
        self._seen[self._place(start, end)] = values

    def learn(self, fast: Tensor, slow: Tensor, start: int) -> None:
        """A step is taken on the weights that begin at `start`: this replica brought Δ = fast − slow to it."""
        way = self._way[self._place(start, start + len(fast))]
        way.lerp_(self._of(fast, start) - self._of(slow, start), 1 / RECENT)

    def taken_back(self, fast: Tensor, slow: Tensor, most: float) -> tuple[float, float]:
        """How far the difference, each value within ± `most`, leads back along the way, and how far Δ has come along
        it. Before the first step the way is that of Δ. Without any, both are 0."""
        back, made, length = self._along(fast, slow, most, self._way)
        if length == 0.0:
            back, made, length = self._along(fast, slow, most, None)
        if length == 0.0:
            return 0.0, 0.0
        share = len(self._way) / self._size
        return back / math.sqrt(share * length), made / math.sqrt(share * length)

    def _along(self, fast: Tensor, slow: Tensor, most: float, way: Tensor | None) -> tuple[float, float, float]:
        """Products of `way` (None: Δ) with minus the difference, with Δ and with itself."""
        back, made, length = 0.0, 0.0, 0.0
        for start, end in self._pieces():
            place = self._place(start, end)
            delta = (self._of(fast[start:end], start) - self._of(slow[start:end], start)).double()
            piece = delta if way is None else way[place].double()
            back -= float(self._seen[place].clamp(-most, most).double().dot(piece))
            made += float(delta.dot(piece))
            length += float(piece.dot(piece))
        return back, made, length

    def _pieces(self) -> list[tuple[int, int]]:
        """The stage in pieces of which not too much is looked at."""
        step = IN_CACHE
        if self._chosen is not None:
            step = max(step, self._size // MOST_BLOCKS * (IN_CACHE // BLOCK) // BLOCK * BLOCK)
        return [(start, min(start + step, self._size)) for start in range(0, self._size, step)]

    def _of(self, values: Tensor, start: int) -> Tensor:
        """Those that are looked at of the values that begin at `start`."""
        if self._chosen is None:
            return values
        rows = self.blocks(start, start + len(values))
        assert rows is not None, "some are chosen"
        return values[: len(values) // BLOCK * BLOCK].view(-1, BLOCK)[rows.to(values.device)].flatten()

    def _place(self, start: int, end: int) -> slice:
        """Where they lie in this one's vectors."""
        if self._chosen is None:
            return slice(start, end)
        first, last = self._within(start, end)
        return slice(first * BLOCK, last * BLOCK)

    def _within(self, start: int, end: int) -> tuple[int, int]:
        assert self._chosen is not None
        first, last = torch.searchsorted(self._chosen, torch.tensor([start // BLOCK, end // BLOCK]))
        return int(first), int(last)


def _looked_at(size: int) -> int:
    return size if -(-size // BLOCK) <= MOST_BLOCKS else MOST_BLOCKS * BLOCK


def _draw(blocks: int, seed: int) -> Tensor:
    """One of each of `MOST_BLOCKS` stretches of so many blocks, by rising number."""
    edges = torch.arange(MOST_BLOCKS + 1, dtype=torch.int64) * blocks // MOST_BLOCKS
    lengths = edges[1:] - edges[:-1]
    drawn = torch.rand(MOST_BLOCKS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return edges[:-1] + (drawn * lengths).long().clamp_(max=lengths - 1)
