"""What a window of token ids says: inputs, labels, and where documents begin.

A bit of the ids says where one begins. It comes from the packing, never from what a token is. torch is imported where
it is needed: it takes seconds, and a process that only prepares a text needs none of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

BEGINS = 1 << 30
"""This bit is set in a token id, int32 or int64, that is the first of its document; it is above every id. In labels it
stands where the *input* of that place is the first of its document, so that labels say it to later stages, too."""


def without_marks(ids: Tensor) -> Tensor:
    """Token ids alone."""
    return ids & (BEGINS - 1)


def positions_of(marked: Tensor) -> Tensor | None:
    """Each token's place in its document, int64 [B, T], of ids or labels [B, T] with marks. A row begins with a place 0
    whatever it says. None if no document begins within a row: places then count from its beginning."""
    import torch

    begins = (marked & BEGINS) != 0
    begins[:, 0] = True
    if int(begins.sum()) == len(begins):
        return None
    places = torch.arange(marked.shape[1], device=marked.device).expand(marked.shape)
    return places - torch.where(begins, places, 0).cummax(1).values


def inputs_and_labels(windows: Tensor) -> tuple[Tensor, Tensor]:
    """Split rows of token ids [b, T + 1]: labels are the inputs moved on by one token, and take over the inputs' marks.
    Both are int64 [b, T]."""
    import torch

    rows = windows.to(torch.int64)
    ids, marks = without_marks(rows), rows[:, :-1] & BEGINS
    return ids[:, :-1].contiguous(), ids[:, 1:] | marks
