"""The text of a run, opened at the place where a stage-0 replica goes on."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from noloco_node.config.data_spec import DataSpec
from noloco_node.data.prefetch import Portion, Portions, Prefetch
from noloco_node.data.samples import Position, Samples
from noloco_node.data.walk import WalkPosition, WindowWalk
from noloco_node.data.windows import Windows, load_windows

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reader:
    """Who reads, and in which measure."""

    peer_id: str
    microbatch_windows: int
    held_out_windows: int
    prefetch_bytes: int


def open_samples(spec: DataSpec, vocab_size: int, reader: Reader, position: Position) -> Samples:
    """All that stage 0 asks of its text, from `position` on. A thread reads ahead until `close`.

    Raises UserError (DATA) as `load_windows` does.
    """
    windows = load_windows(spec, vocab_size)
    walk = _walk(windows.train_count, spec.seed, reader.peer_id, position)
    prefetch = Prefetch(_walked(windows, walk, reader.microbatch_windows), walk.position, reader.prefetch_bytes)
    return Samples(
        draw=prefetch.draw,
        held_out=windows.held_out(reader.held_out_windows),
        position=lambda: prefetch.position,
        waited_seconds=lambda: prefetch.waited_seconds,
        close=prefetch.close,
    )


def _walked(windows: Windows, walk: WindowWalk, size: int) -> Portions:
    while True:
        rows = windows.rows(walk.take(size))
        yield Portion(rows, walk.position)


def _walk(count: int, seed: int, peer_id: str, position: Position) -> WindowWalk:
    try:
        if isinstance(position, WalkPosition):
            return WindowWalk.at(count, seed, peer_id, position)
        logger.warning("the walk through the text begins anew: the text was read in blocks before")
    except ValueError as error:
        logger.warning("the walk through the text begins anew, the text has changed: %s", error)
    return WindowWalk(count, seed, peer_id)
