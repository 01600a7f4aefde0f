"""What stage 0 trains on and is measured by, however it comes about."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from noloco_node.data.claims import SharedPosition
from noloco_node.data.mixture import MixedPosition
from noloco_node.data.sampler import SamplerPosition
from noloco_node.data.shared_rows import SharedRows
from noloco_node.data.turns import TurnPosition
from noloco_node.document_marks import BEGINS, without_marks

Position = SamplerPosition | TurnPosition | SharedPosition | MixedPosition
"""The position where drawing goes on. It is in a walk over numbered windows, in a row of blocks, in one that replicas
share, or in several such rows."""

Batch = tuple[Tensor, Tensor]
"""Inputs and labels, both int64 [b, T]; the labels with marks where documents begin (`marks.BEGINS`)."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Stage 0's text. Windows are rows of token ids, int32 [b, T + 1], with marks where documents begin if attention
    ends there."""

    draw: Callable[[], Awaitable[Tensor]]
    """The next microbatch's windows. Raises UserError (DATA) where the text cannot be read on."""
    held_out: Tensor
    """The fixed windows of every evaluation."""
    position: Callable[[], Position] = SamplerPosition
    """Where `draw` goes on."""
    waited_seconds: Callable[[], float] = float
    """Time that drawing has had to wait for the text, so far."""
    held_out_of: tuple[tuple[str, int], ...] = ()
    """Each source's name in a mixture and the number of its held-out windows, which lie together, in this order."""
    blocks: int | None = None
    """The number of blocks of a text that is read in blocks; in a mixture, of the source with the fewest."""
    shared: SharedRows | None = None
    """The rows by which the replicas share the text, if they do."""
    passed_over: Callable[[], list[str]] = list
    """What could not be read, and so is not trained on, since it was asked for last; for a person."""
    close: Callable[[], None] = lambda: None
    """Read no further; may take as long as the reading of one document."""


def by_source(windows: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """Rows that lie together: so many of each source; all of them where no counts are named."""
    ends = list(accumulate(counts)) or [len(windows)]
    return [windows[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def inputs_and_labels(windows: Tensor) -> Batch:
    """Split rows of token ids: labels are the inputs moved on by one token, and take over the inputs' marks."""
    rows = windows.to(torch.int64)
    ids, marks = without_marks(rows), rows[:, :-1] & BEGINS
    return ids[:, :-1].contiguous(), ids[:, 1:] | marks
