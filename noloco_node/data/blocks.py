"""Blocks: what one replica reads alone at a time, and the windows in them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

import numpy as np

from noloco_node.data.sampler import Permutation
from noloco_node.data.shards import Shards
from noloco_node.data.shared_turns import Turn
from noloco_node.data.tokenizers import Tokens
from noloco_node.data.windows import Windows
from noloco_node.document_marks import BEGINS


class Blocks(Protocol):
    """A text in blocks. Used by the reader's thread."""

    @property
    def count(self) -> int:
        """All blocks of a pass."""
        ...

    def name(self, block: int) -> str:
        """Where the block lies, for a person."""
        ...

    def read(self, turn: Turn) -> Iterator[Tokens]:
        """The windows of the turn's block, from `turn.start` on. Raises UserError (DATA)."""
        ...


class StreamedBlocks:
    """Parts of shards: block b is part b modulo `parts` of shard b // `parts`. Windows are `length` tokens; what is
    left at the end of a block is no window. `marked` windows say where documents begin (`marks.BEGINS`)."""

    def __init__(self, shards: Shards, parts: int, length: int, *, marked: bool = False) -> None:
        self._shards, self._parts, self._length, self._marked = shards, parts, length, marked

    @property
    def count(self) -> int:
        """All blocks of a pass."""
        return len(self._shards.names) * self._parts

    def name(self, block: int) -> str:
        """The name of the block's shard."""
        return self._shards.names[block // self._parts]

    def read(self, turn: Turn) -> Iterator[Tokens]:
        """The windows of the turn's block, from `turn.start` on."""
        shard, part = divmod(turn.block, self._parts)
        documents = self._shards.training(shard, part, self._parts)
        return cut_windows(with_marks(documents) if self._marked else documents, self._length, turn.start)


def with_marks(documents: Iterable[Tokens]) -> Iterator[Tokens]:
    """The documents' tokens, int32, the first of each with its mark."""
    for document in documents:
        marked = document.astype(np.int32)
        marked[:1] |= BEGINS
        yield marked


class NumberedBlocks:
    """Blocks of `size` windows of a text that is tokenised already. A pass has an order of its own, equal for all
    replicas: each block has windows from everywhere."""

    def __init__(self, windows: Windows, size: int, seed: int) -> None:
        self._windows, self._size, self._seed = windows, size, seed

    @property
    def count(self) -> int:
        """All blocks of a pass; the last one may be shorter."""
        return -(-self._windows.train_count // self._size)

    def name(self, block: int) -> str:
        """Its number."""
        return f"block {block} of the text"

    def read(self, turn: Turn) -> Iterator[Tokens]:
        """The windows of the turn's block, from `turn.start` on."""
        order = Permutation(self._windows.train_count, f"windows/{self._seed}/{turn.epoch}")
        first, end = turn.block * self._size, min((turn.block + 1) * self._size, len(order))
        for place in range(first + turn.start, end):
            yield self._windows.window(order[place])


def cut_windows(documents: Iterable[Tokens], length: int, start: int = 0) -> Iterator[Tokens]:
    """The tokens of the documents, one after the other, in windows, from window `start` on."""
    passed_over, waiting, held = start * length, list[Tokens](), 0
    for document in documents:
        if passed_over >= len(document):
            passed_over -= len(document)
            continue
        waiting.append(document[passed_over:])
        held += len(document) - passed_over
        passed_over = 0
        if held >= length:
            joined = np.concatenate(waiting)
            whole = held - held % length
            for at in range(0, whole, length):
                yield joined[at : at + length]
            waiting, held = [joined[whole:]], held - whole
