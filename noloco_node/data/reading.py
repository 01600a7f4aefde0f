"""The text of a run, opened at the place where a stage-0 replica goes on."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice

import numpy as np
import torch
from torch import Tensor

from noloco_node.config.data_spec import DataSpec, apportioned
from noloco_node.data.block_reader import (
    BlockReader,
    Blocks,
    NumberedBlocks,
    Row,
    StreamedBlocks,
    cut_windows,
    with_marks,
)
from noloco_node.data.documents import data_error
from noloco_node.data.encoding import fitting_tokenizer
from noloco_node.data.mixture import MixedPosition, SourceOrder, Walk, naming_part
from noloco_node.data.prefetch import Portion, Portions, Prefetch
from noloco_node.data.sampler import BEGINNING, SamplerPosition
from noloco_node.data.samples import Position, Samples, SharedRows
from noloco_node.data.shards import TextShards
from noloco_node.data.shared_turns import SharedTurns
from noloco_node.data.windows import Windows, load_windows

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reader:
    """The reading replica, and its measure."""

    peer_id: str
    microbatch_windows: int
    held_out_windows: int
    prefetch_bytes: int = 16_000_000


_HeldOut = tuple[Tensor, tuple[tuple[str, int], ...]]
"""The values of `Samples.held_out` and `Samples.held_out_of`."""


def open_samples(spec: DataSpec, vocab_size: int, reader: Reader, position: Position) -> Samples:
    """All that stage 0 asks of its text, from `position` on. A thread reads ahead until `close`. Blocks of a text are
    read in turns that begin once `Samples.shared` has heard of the others. Raises UserError (DATA) as `load_windows`
    does."""
    if spec.streaming:
        shards = _shards(spec, vocab_size)
        blocks = [_streamed(each, spec) for each in shards]
        return _in_blocks(blocks, _held_out(shards, spec, reader.held_out_windows), spec, reader, position)
    windows = load_windows(spec, vocab_size)
    tokens = windows.train_count * spec.sequence_length
    if spec.block_windows is not None:
        blocks = [NumberedBlocks(each, spec.block_windows, spec.seed) for each in windows.by_source()]
        held_out = _numbered_held_out(windows, spec, reader.held_out_windows)
        return replace(_in_blocks(blocks, held_out, spec, reader, position), tokens=tokens)
    walk = _walk(windows, spec.seed, reader.peer_id, position)
    prefetch = Prefetch(_walked(windows, walk, reader.microbatch_windows), walk.position, reader.prefetch_bytes)
    held_out, held_out_of = _numbered_held_out(windows, spec, reader.held_out_windows)
    return Samples(
        draw=prefetch.draw,
        held_out=held_out,
        held_out_of=held_out_of,
        tokens=tokens,
        position=lambda: prefetch.position,
        waited_seconds=lambda: prefetch.waited_seconds,
        close=prefetch.close,
    )


def held_out_windows(spec: DataSpec, vocab_size: int, count: int) -> Tensor:
    """The windows of every evaluation, `count` or fewer, int32 [n, sequence_length + 1]; equal on every machine.

    Raises UserError (DATA) as `load_windows` does.
    """
    return held_out_by_source(spec, vocab_size, count)[0]


def held_out_by_source(spec: DataSpec, vocab_size: int, count: int) -> _HeldOut:
    """`held_out_windows`, and of a mixture `Samples.held_out_of`. Raises UserError (DATA) as `load_windows` does."""
    if spec.streaming:
        return _held_out(_shards(spec, vocab_size), spec, count)
    return _numbered_held_out(load_windows(spec, vocab_size), spec, count)


def _numbered_held_out(windows: Windows, spec: DataSpec, count: int) -> _HeldOut:
    return windows.held_out(count), _named(spec, windows.held_out_counts(count))


def _named(spec: DataSpec, counts: Sequence[int]) -> tuple[tuple[str, int], ...]:
    return tuple(zip(spec.names, counts, strict=True)) if spec.mixture else ()


def _streamed(shards: TextShards, spec: DataSpec) -> StreamedBlocks:
    marked = spec.attention == "document"
    return StreamedBlocks(shards, spec.parts_per_shard, spec.sequence_length + 1, marked=marked)


def _in_blocks(
    blocks: Sequence[Blocks], held_out: _HeldOut, spec: DataSpec, reader: Reader, position: Position
) -> Samples:
    """`blocks`: of each source."""
    order: SourceOrder | None = None
    positions: list[Position] = [position]
    if spec.mixture:
        begin = position if isinstance(position, MixedPosition) and len(position.sources) == len(blocks) else None
        order = _order(spec, reader.peer_id, BEGINNING if begin is None else begin.order)
        positions = [BEGINNING] * len(blocks) if begin is None else list(begin.sources)
    own = reader.peer_id
    turns = [
        SharedTurns(each.count, spec.seed, own, random.Random(f"slots/{own}"), begin)
        for each, begin in zip(blocks, positions, strict=True)
    ]
    rows = [Row(each, its) for each, its in zip(blocks, turns, strict=True)]
    source = BlockReader(rows, reader.microbatch_windows, order)
    prefetch = Prefetch(source.portions(), position, reader.prefetch_bytes)

    def close() -> None:
        source.close()
        prefetch.close()

    return Samples(
        draw=prefetch.draw,
        held_out=held_out[0],
        held_out_of=held_out[1],
        position=lambda: source.position,
        waited_seconds=lambda: prefetch.waited_seconds,
        blocks=min(each.count for each in blocks),
        shared=SharedRows(turns),
        passed_over=source.passed_over,
        close=close,
    )


def _order(spec: DataSpec, peer_id: str, begin: SamplerPosition) -> SourceOrder:
    try:
        return SourceOrder(spec.weights, spec.seed, peer_id, begin)
    except ValueError as error:
        logger.warning("the order of the sources begins anew: %s", error)
        return SourceOrder(spec.weights, spec.seed, peer_id)


def _shards(spec: DataSpec, vocab_size: int) -> list[TextShards]:
    """The shards of each source."""
    tokenizer = fitting_tokenizer(spec, vocab_size)
    found: list[TextShards] = []
    for number, part in enumerate(spec.parts):
        with naming_part(spec, number):
            found.append(TextShards(part, tokenizer))
    return found


def _held_out(shards: Sequence[TextShards], spec: DataSpec, count: int) -> _HeldOut:
    """The held-out windows; of a mixture each source's share, or all that it has if these are fewer."""
    found: list[Tensor] = []
    for number, (each, wanted) in enumerate(zip(shards, apportioned(spec.weights, count), strict=True)):
        with naming_part(spec, number):
            found.append(_first_held_out(each, spec, wanted))
    return torch.cat(found), _named(spec, [len(rows) for rows in found])


def _first_held_out(shards: TextShards, spec: DataSpec, count: int) -> Tensor:
    """The first ones, in the order of the shards: what lies behind them is not read."""
    if not count:
        return torch.empty((0, spec.sequence_length + 1), dtype=torch.int32)
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
        if isinstance(position, SamplerPosition):
            return windows.walk(seed, peer_id, position)
        logger.warning("the walk through the text begins anew: the text was read in blocks before")
    except ValueError as error:
        logger.warning("the walk through the text begins anew, the text has changed: %s", error)
    return windows.walk(seed, peer_id)
