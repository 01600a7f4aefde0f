"""Microbatches out of blocks, turn after turn; a block that cannot be read does not end a run."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from noloco_node.data.blocks import Blocks
from noloco_node.data.documents import data_error
from noloco_node.data.prefetch import Portion, Portions
from noloco_node.data.tokenizers import Tokens
from noloco_node.data.turns import MOST_BEGUN, Turn, TurnPosition, Turns
from noloco_node.errors import UserError

logger = logging.getLogger(__name__)

OPEN_TURNS = 2
"""Blocks that may have been taken and not drawn to their end: the present one and the next."""
MOST_FAILED = 10
"""So many blocks in a row that broke off end the run of this node, or all there are, where they are fewer."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 60.0
"""After a block that broke off: the disk or the hub may be away for a while."""
ASK_AGAIN_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class _Mark:
    """How far a turn has come with a portion."""

    slot: int
    reached: int
    finished: bool


class BlockReader:
    """Reads the blocks of `turns` into portions of `size` windows, on the prefetch thread."""

    def __init__(self, blocks: Blocks, turns: Turns, size: int) -> None:
        self._blocks, self._turns, self._size = blocks, turns, size
        self._failed = self._empty = self._open = 0
        self._told: set[str] = set()
        self._closed = False
        self._changed = threading.Condition()

    def portions(self) -> Portions:
        """Without end. Raises UserError (DATA) where block after block cannot be read, or holds not one window.

        A portion of less than `size` windows is all of `MOST_BEGUN` blocks: no more may be begun before these are
        drawn.
        """
        windows, marks, held = list[Tokens](), list[_Mark](), 0
        while (turn := self._take()) is not None:
            reached = turn.start
            for window in self._read(turn):
                if not self._turns.holds(turn.slot):
                    break
                if len(windows) == self._size:  # only now is it known that this one was not the block's last
                    yield self._portion(windows, [*marks, _Mark(turn.slot, reached, False)])
                    windows, marks, held = [], [], 0
                windows.append(window)
                reached += 1
            marks.append(_Mark(turn.slot, reached, True))
            self._note_empty(turn, reached)
            held += reached > turn.start
            if len(windows) == self._size or held == MOST_BEGUN:
                yield self._portion(windows, marks)
                windows, marks, held = [], [], 0

    def close(self) -> None:
        """End whatever `portions` waits for."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _portion(self, windows: Sequence[Tokens], marks: Sequence[_Mark]) -> Portion:
        finished = sum(mark.finished for mark in marks)
        with self._changed:
            self._open += finished

        def drawn() -> None:
            for mark in marks:
                self._turns.reached(mark.slot, mark.reached)
                if mark.finished:
                    self._turns.finished(mark.slot)
            with self._changed:
                self._open -= finished
                self._changed.notify_all()

        last = marks[-1]
        position = TurnPosition(slot=last.slot, start=last.reached)
        rows = torch.from_numpy(np.stack(windows).astype(np.int32))  # pyright: ignore[reportUnknownMemberType]
        return Portion(rows, position, drawn)

    def _take(self) -> Turn | None:
        """The next turn; None once it is closed."""
        with self._changed:
            while not self._closed:
                if self._open >= OPEN_TURNS:
                    self._changed.wait()
                elif (turn := self._turns.take()) is not None:
                    return turn
                else:
                    self._changed.wait(ASK_AGAIN_SECONDS)
        return None

    def _read(self, turn: Turn) -> Iterator[Tokens]:
        try:
            yield from self._blocks.read(turn)
            self._failed = 0
        except UserError as error:
            self._failed += 1
            if self._failed >= min(self._blocks.count, MOST_FAILED):
                raise
            self._say(self._blocks.name(turn.block), error)
            self._pause()

    def _say(self, name: str, error: UserError) -> None:
        if name not in self._told:
            self._told.add(name)
            logger.warning("the rest of '%s' is passed over, and training goes on with other text: %s", name, error)

    def _pause(self) -> None:
        seconds = min(FIRST_PAUSE_SECONDS * 2 ** (self._failed - 1), LONGEST_PAUSE_SECONDS)
        with self._changed:
            self._changed.wait_for(lambda: self._closed, seconds)

    def _note_empty(self, turn: Turn, reached: int) -> None:
        """What others say that they have read of a block, or that it is theirs, is no word about the text."""
        if reached > turn.start:
            self._empty = 0
            return
        whole = turn.start == 0 and self._turns.holds(turn.slot)
        self._turns.empty(turn.slot)
        self._empty += whole
        if self._empty > self._blocks.count:
            raise data_error(
                "no block of the text has as many tokens as one window of run.data.sequence_length + 1",
                "lower run.data.parts_per_shard or run.data.sequence_length, or give longer files",
            )
