"""Blocks: what one replica reads alone at a time. Microbatches come out of them, turn after turn, and a block that
cannot be read does not end a run."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from noloco_node.ambient import LOOK_SECONDS
from noloco_node.data.documents import data_error
from noloco_node.data.mixture import MixedPosition, SourceOrder, naming_source
from noloco_node.data.prefetch import Portion, Portions
from noloco_node.data.sampler import BEGINNING, Permutation
from noloco_node.data.samples import Position
from noloco_node.data.shards import TextShards
from noloco_node.data.shared_turns import MOST_BEGUN, SharedTurns, Turn
from noloco_node.data.tokenizers import Tokens
from noloco_node.data.windows import Windows
from noloco_node.document_marks import BEGINS
from noloco_node.errors import UserError
from noloco_node.tallies import Doubling


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
    left at the end of a block is no window. `marked` windows say where documents begin (`document_marks.BEGINS`)."""

    def __init__(self, shards: TextShards, parts: int, length: int, *, marked: bool = False) -> None:
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


MOST_FAILED = 10
"""The number of different blocks in a row whose reading failed that ends the run of this node, where none was read
before them. If there are fewer blocks, it is all of them."""
PAUSES = Doubling(1.0, 60.0)
"""Seconds of pause after blocks in a row that broke off: the disk or the hub may be away for a while."""


@dataclass(frozen=True, slots=True)
class Row:
    """The blocks of one source, and the turns in which they are read."""

    blocks: Blocks
    turns: SharedTurns


@dataclass(frozen=True, slots=True)
class _Mark:
    """How far a turn has come with a window."""

    slot: int
    reached: int
    finished: bool


_Step = tuple[Tokens, list[_Mark]]
"""A window, and how far its turn has come with it; before that, turns that had none."""


class BlockReader:
    """Reads the blocks of rows into portions of `size` windows, on the prefetch thread.

    A mixture has as many rows as sources; `order` names the row of each window.
    """

    def __init__(self, rows: Sequence[Row], size: int, order: SourceOrder | None = None) -> None:
        self._size, self._order = size, order
        self._changed = threading.Condition()
        self._rows = [_RowReader(row, self._changed) for row in rows]
        self._begins = BEGINNING if order is None else order.position
        self._passed_over = 0

    @property
    def position(self) -> Position:
        """Where drawing goes on, for a checkpoint."""
        own = tuple(row.turns.position for row in self._rows)
        return own[0] if self._order is None else MixedPosition(order=self._begins, sources=own)

    def portions(self) -> Portions:
        """Portions without end. Raises UserError (DATA) if the first blocks cannot be read, or hold not one window. A
        portion of less than `size` windows is all of `MOST_BEGUN` blocks of a source. No more of them may be begun
        before these are drawn."""
        steps = [row.steps() for row in self._rows]
        made = _Made.of(len(steps))
        while True:
            number = 0 if self._order is None else self._order.next()
            step = self._next(steps, number)
            if step is None:
                return
            made.add(number, step)
            if len(made.windows) == self._size or made.held[number] == MOST_BEGUN:
                yield self._portion(made)
                made = _Made.of(len(steps))

    def passed_over(self) -> list[str]:
        """The files of which the rest could not be read, since they were asked for last, each once, and why."""
        found: list[str] = []
        for number, row in enumerate(self._rows):
            source = "" if self._order is None else f" of run.data.mixture[{number}]"
            for name, why in row.broken_off():
                self._passed_over += 1
                found.append(
                    f"the rest of '{name}'{source} is passed over ({self._passed_over} so far), and training goes on "
                    f"with other text: {why}"
                )
        return found

    def close(self) -> None:
        """End whatever `portions` waits for."""
        with self._changed:
            for row in self._rows:
                row.closed = True
            self._changed.notify_all()

    def _next(self, steps: Sequence[Iterator[_Step]], number: int) -> _Step | None:
        if self._order is None:
            return next(steps[number], None)
        with naming_source(number):
            return next(steps[number], None)

    def _portion(self, made: _Made) -> Portion:
        position = BEGINNING if self._order is None else self._order.position
        rows = list(zip(self._rows, made.marks, strict=True))

        def drawn() -> None:
            self._begins = position
            for row, marks in rows:
                row.drawn(marks)

        windows = torch.from_numpy(np.stack(made.windows).astype(np.int32))  # pyright: ignore[reportUnknownMemberType]
        return Portion(windows, position, drawn)


@dataclass(slots=True)
class _Made:
    """A portion that is not full yet."""

    marks: list[list[_Mark]]
    """By row: of each turn how far it comes with it."""
    held: list[int]
    """By row: blocks that end in it, but for empty ones."""
    windows: list[Tokens] = field(default_factory=list[Tokens])

    @classmethod
    def of(cls, rows: int) -> _Made:
        return cls([[] for _ in range(rows)], [0] * rows)

    def add(self, number: int, step: _Step) -> None:
        window, reached = step
        self.windows.append(window)
        marks = self.marks[number]
        for mark in reached:
            if marks and marks[-1].slot == mark.slot:
                marks.pop()
            marks.append(mark)
        self.held[number] += reached[-1].finished


class _RowReader:
    """Reads the blocks of one row, window by window. `changed` wakes the waiting thread."""

    def __init__(self, row: Row, changed: threading.Condition) -> None:
        self._blocks, self.turns, self._changed = row.blocks, row.turns, changed
        self._failed = self._empty = 0
        self._failed_blocks: set[int] = set()
        self._sound = False
        """Whether a window was read: a hub or disk that then fails comes back, and the node waits for it."""
        self._broken: dict[str, str] = {}
        self._told: set[str] = set()
        """Names of these that were asked for."""
        self.closed = False

    def steps(self) -> Generator[_Step]:
        """Until it is closed. Raises UserError (DATA) as `BlockReader.portions` does."""
        passed = list[_Mark]()
        while (turn := self._take()) is not None:
            reached, last = turn.start, None
            with closing(self._read(turn)) as windows:
                for window in windows:
                    if last is not None:  # only now is it known that this one was not the block's last
                        yield last, [*passed, _Mark(turn.slot, reached, False)]
                        passed = []
                    last = window
                    reached += 1
            passed.append(_Mark(turn.slot, reached, True))
            self._note_empty(turn, reached)
            if last is not None:
                yield last, passed
                passed = []

    def broken_off(self) -> list[tuple[str, str]]:
        """Names of what broke off first since it was asked for last, and why; an error would hold what was read."""
        with self._changed:
            found = [(name, why) for name, why in self._broken.items() if name not in self._told]
            self._told.update(self._broken)
        return found

    def drawn(self, marks: Sequence[_Mark]) -> None:
        """Windows were drawn with which turns came so far."""
        for mark in marks:
            self.turns.reached(mark.slot, mark.reached)
            if mark.finished:
                self.turns.finished(mark.slot)
        with self._changed:
            self._changed.notify_all()

    def _take(self) -> Turn | None:
        """The next turn; None once it is closed."""
        with self._changed:
            while not self.closed:
                if (turn := self.turns.take()) is not None:
                    return turn
                self._changed.wait(LOOK_SECONDS)
        return None

    def _read(self, turn: Turn) -> Generator[Tokens]:
        try:
            for window in self._blocks.read(turn):
                self._sound = True
                yield window
            self._failed = 0
        except UserError as error:
            self._failed += 1
            self._failed_blocks.add(turn.block)
            if not self._sound and len(self._failed_blocks) >= min(self._blocks.count, MOST_FAILED):
                raise
            with self._changed:
                self._broken.setdefault(self._blocks.name(turn.block), f"{error.message}; {error.remedy}")
            self._pause()

    def _pause(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.closed, PAUSES.after(self._failed - 1))

    def _note_empty(self, turn: Turn, reached: int) -> None:
        """Neither what an earlier life has read of a block nor a failure is a word about the text."""
        if reached > turn.start:
            self._empty = 0
            return
        self.turns.finished(turn.slot)  # it need not be held until what was read before it is drawn
        self._empty += turn.start == 0 and not self._failed
        if self._empty > self._blocks.count:
            raise data_error(
                "no block of the text has as many tokens as one window of run.data.sequence_length + 1",
                "lower run.data.parts_per_shard or run.data.sequence_length, or give longer files",
            )
