"""The text of a run, opened at the place where a stage-0 replica goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np
import torch
from torch import Tensor

from noloco_node.config.data_spec import DataSpec
from noloco_node.data.block_reader import BlockReader
from noloco_node.data.blocks import Blocks, NumberedBlocks, StreamedBlocks, cut_windows, with_marks
from noloco_node.data.documents import data_error
from noloco_node.data.encoding import fitting_tokenizer
from noloco_node.data.mixture import Walk
from noloco_node.data.prefetch import Portion, Portions, Prefetch
from noloco_node.data.prepared import open_shards
from noloco_node.data.samples import Position, Samples
from noloco_node.data.shards import Shards, TextShards
from noloco_node.data.shared_turns import SharedTurns
from noloco_node.data.turns import OwnTurns, TurnPosition, Turns
from noloco_node.data.walk import WalkPosition
from noloco_node.data.windows import Windows, load_windows

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reader:
    """Who reads, and in which measure."""

    peer_id: str
    microbatch_windows: int
    held_out_windows: int
    prefetch_bytes: int


MakeTurns = Callable[[int, Position], Turns]
"""Makes the turns over so many blocks, from a position on."""


def open_samples(
    spec: DataSpec, vocab_size: int, reader: Reader, position: Position, make_turns: MakeTurns | None = None
) -> Samples:
    """All that stage 0 asks of its text, from `position` on. A thread reads ahead until `close`.

    `make_turns` says who reads which block of a text in blocks next; without it each replica walks through all of them.
    Raises UserError (DATA) as `load_windows` does.
    """
    if spec.streaming:
        return _streamed(spec, vocab_size, reader, position, make_turns)
    windows = load_windows(spec, vocab_size)
    if spec.block_windows is not None:
        blocks = NumberedBlocks(windows, spec.block_windows, spec.seed)
        return _in_blocks(blocks, windows.held_out(reader.held_out_windows), spec, reader, position, make_turns)
    walk = _walk(windows, spec.seed, reader.peer_id, position)
    prefetch = Prefetch(_walked(windows, walk, reader.microbatch_windows), walk.position, reader.prefetch_bytes)
    return Samples(
        draw=prefetch.draw,
        held_out=windows.held_out(reader.held_out_windows),
        held_out_of=_named(spec, windows.held_out_counts(reader.held_out_windows)),
        position=lambda: prefetch.position,
        waited_seconds=lambda: prefetch.waited_seconds,
        close=prefetch.close,
    )


def held_out_windows(spec: DataSpec, vocab_size: int, count: int) -> Tensor:
    """The windows of every evaluation, `count` or fewer, int32 [n, sequence_length + 1]; equal on every machine.

    Raises UserError (DATA) as `load_windows` does.
    """
    return held_out_by_source(spec, vocab_size, count)[0]


def held_out_by_source(spec: DataSpec, vocab_size: int, count: int) -> tuple[Tensor, tuple[tuple[str, int], ...]]:
    """`held_out_windows`, and of a mixture `Samples.held_out_of`. Raises UserError (DATA) as `load_windows` does."""
    if spec.streaming:
        return _first_held_out(_shards(spec, vocab_size), spec, count), ()
    windows = load_windows(spec, vocab_size)
    return windows.held_out(count), _named(spec, windows.held_out_counts(count))


def _named(spec: DataSpec, counts: Sequence[int]) -> tuple[tuple[str, int], ...]:
    return tuple(zip(spec.names, counts, strict=True)) if spec.mixture else ()


def _streamed(
    spec: DataSpec, vocab_size: int, reader: Reader, position: Position, make_turns: MakeTurns | None
) -> Samples:
    shards = _shards(spec, vocab_size)
    marked = spec.attention == "document"
    blocks = StreamedBlocks(shards, spec.parts_per_shard, spec.sequence_length + 1, marked=marked)
    held_out = _first_held_out(shards, spec, reader.held_out_windows)
    return _in_blocks(blocks, held_out, spec, reader, position, make_turns)


def _in_blocks(
    blocks: Blocks, held_out: Tensor, spec: DataSpec, reader: Reader, position: Position, make_turns: MakeTurns | None
) -> Samples:
    if make_turns:
        turns = make_turns(blocks.count, position)
    else:
        begin = position if isinstance(position, TurnPosition) else TurnPosition()
        turns = OwnTurns(blocks.count, spec.seed, reader.peer_id, begin)
    source = BlockReader(blocks, turns, reader.microbatch_windows)
    prefetch = Prefetch(source.portions(), position, reader.prefetch_bytes)

    def close() -> None:
        source.close()
        prefetch.close()

    return Samples(
        draw=prefetch.draw,
        held_out=held_out,
        position=lambda: turns.position,
        waited_seconds=lambda: prefetch.waited_seconds,
        blocks=blocks.count,
        shared=turns if isinstance(turns, SharedTurns) else None,
        close=close,
    )


def _shards(spec: DataSpec, vocab_size: int) -> Shards:
    tokenizer = fitting_tokenizer(spec, vocab_size)
    if spec.prepared is not None:
        return open_shards(spec, tokenizer.vocab_size)
    return TextShards(spec, tokenizer)


def _first_held_out(shards: Shards, spec: DataSpec, count: int) -> Tensor:
    """The first ones, in the order of the shards: what lies behind them is not read."""
    documents = chain.from_iterable(shards.held_out(shard) for shard in range(len(shards.names)))
    if spec.attention == "document":
        documents = with_marks(documents)
    rows = list(islice(cut_windows(documents, spec.sequence_length + 1), count))
    if not rows:
        raise data_error(
            f"the documents that are held out of the streamed text have fewer tokens than one window of "
            f"run.data.sequence_length + 1 ({spec.sequence_length + 1})",
            "raise run.data.holdout, lower run.data.sequence_length, or leave run.data.streaming off: then a text of "
            "few documents is cut into pieces",
        )
    return torch.from_numpy(np.stack(rows).astype(np.int32))  # pyright: ignore[reportUnknownMemberType]


def _walked(windows: Windows, walk: Walk, size: int) -> Portions:
    while True:
        rows = windows.rows(walk.take(size))
        yield Portion(rows, walk.position)


def _walk(windows: Windows, seed: int, peer_id: str, position: Position) -> Walk:
    try:
        if isinstance(position, WalkPosition):
            return windows.walk(seed, peer_id, position)
        logger.warning("the walk through the text begins anew: the text was read in blocks before")
    except ValueError as error:
        logger.warning("the walk through the text begins anew, the text has changed: %s", error)
    return windows.walk(seed, peer_id)
