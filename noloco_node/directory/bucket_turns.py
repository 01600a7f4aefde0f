"""When a node reads another bucket of a stage, and when that takes the place of one that it holds: of one node, or of
many at once by rows, for a simulation of more nodes than can be looked at one by one.
"""

from __future__ import annotations

from typing import overload

import numpy as np
from numpy.typing import NDArray

HELD = 2
"""Buckets of a near stage that a node holds."""
RENEWED_SECONDS = 120.0
"""After which one of them is another: a quarter of the view in a minute."""
SAMPLED_AGAIN = 0.6
"""Of a record's life, between two buckets that are read for the number alone, once that has settled."""
SETTLED = 4
"""Buckets of a level that are read at once, one at each look, when this node has come to it."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


@overload
def draws(drawn_here: int, confirming: bool, held: int, since: float, life: float) -> bool: ...
@overload
def draws(drawn_here: Ints, confirming: Flags, held: Ints, since: Floats, life: float) -> Flags: ...
def draws(
    drawn_here: int | Ints, confirming: bool | Flags, held: int | Ints, since: float | Floats, life: float
) -> bool | Flags:
    """Whether a bucket is read for the number now, by who has read so many of its level, may be about to leave that,
    holds so many buckets, and drew the last one so long `since`, in seconds, where records have such a `life`."""
    return (drawn_here < SETTLED) | confirming | (held < HELD) | (since >= SAMPLED_AGAIN * life)


@overload
def has_a_place(held: int, since: float) -> bool: ...
@overload
def has_a_place(held: Ints, since: Floats) -> Flags: ...
def has_a_place(held: int | Ints, since: float | Floats) -> bool | Flags:
    """Whether what was drawn is held from now on, by who holds so many and has exchanged one of them so long `since`:
    where all places are taken, the eldest goes."""
    return (held < HELD) | (since >= RENEWED_SECONDS)
