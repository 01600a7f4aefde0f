"""What stage 0 trains on and is measured by, however it comes about."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from noloco_node.data.walk import WalkPosition

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Samples:
    """Stage 0's text: `draw()` gives the next microbatch's windows, `train` and `validation` load windows as
    (inputs, labels) int64 [b, T], `held_out` are the fixed windows of every evaluation, and `position()` says where
    `draw` goes on."""

    draw: Callable[[], Sequence[int]]
    train: Callable[[Sequence[int]], Batch]
    validation: Callable[[Sequence[int]], Batch]
    held_out: Sequence[int]
    count: int
    """Windows to train on; `train` takes indices below it."""
    position: Callable[[], WalkPosition] = WalkPosition
