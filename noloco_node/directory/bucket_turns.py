"""When a node reads another bucket of a stage, and when that bucket takes the place of one that it holds.

The functions work for one node, or for many at once by rows: a simulation has more nodes than it can step one by one.
"""

from __future__ import annotations

from typing import overload

import numpy as np
from numpy.typing import NDArray

from noloco_node.directory.buckets import RAISE, TARGET

HELD = 2
"""A node holds so many buckets of a near stage."""
WHOLLY_HELD = 1
"""At this level or below, all buckets are held and there are no others to exchange them for."""
RENEWED_SECONDS = 120.0
"""After so many seconds a held bucket is exchanged for another: a quarter of the view in a minute."""
SAMPLED_AGAIN = 0.6
"""Once the number has settled, a bucket is read for it every so many record lives."""
READ_AGAIN, READ_AGAIN_AT_LAST = 0.4, 0.5
"""A held bucket is read again after the first part of a record's life, or at most the second if buckets are full. A
record is renewed at a third of its life."""
SETTLED = 4
"""A node that has come to a level reads so many of its buckets at once, one at each look."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


@overload
def drawn_again(fullness: float, life: float) -> float: ...
@overload
def drawn_again(fullness: Floats, life: float) -> Floats: ...
def drawn_again(fullness: float | Floats, life: float) -> float | Floats:
    """Seconds between two buckets that are read for the number alone; `fullness` is the number of records in a bucket.

    The fuller buckets are, the more rarely they are read, so that as many records come in a second.
    """
    return SAMPLED_AGAIN * life * _times_full(fullness)


@overload
def held_again(fullness: float, life: float) -> float: ...
@overload
def held_again(fullness: Floats, life: float) -> Floats: ...
def held_again(fullness: float | Floats, life: float) -> float | Floats:
    """Seconds between two reads of a held bucket; all records that are shown must be read again before they end."""
    return life * np.minimum(READ_AGAIN * _times_full(fullness), READ_AGAIN_AT_LAST)


def _times_full(fullness: float | Floats) -> Floats:
    return np.clip(np.asarray(fullness, np.float64) / TARGET, 1.0, RAISE)


@overload
def draws(drawn_here: int, confirming: bool, has_place: bool, since: float, again: float) -> bool: ...
@overload
def draws(drawn_here: Ints, confirming: Flags, has_place: Flags, since: Floats, again: Floats) -> Flags: ...
def draws(
    drawn_here: int | Ints,
    confirming: bool | Flags,
    has_place: bool | Flags,
    since: float | Floats,
    again: float | Floats,
) -> bool | Flags:
    """Tell whether a node reads a bucket for the number now.

    It has read `drawn_here` buckets of its level and may be `confirming` that it leaves the level. `has_place` says
    that it would hold the next bucket (`has_a_place`). It drew the last one `since` seconds ago and usually draws one
    `again` after so many seconds.
    """
    return (drawn_here < SETTLED) | confirming | has_place | (since >= again)


@overload
def has_a_place(level: int, held: int, since: float) -> bool: ...
@overload
def has_a_place(level: Ints, held: Ints, since: Floats) -> Flags: ...
def has_a_place(level: int | Ints, held: int | Ints, since: float | Floats) -> bool | Flags:
    """Tell whether a bucket drawn at a level is held from now on.

    The node holds `held` buckets and has exchanged one of them `since` seconds ago. If all places are taken, the eldest
    goes, unless there are no other buckets.
    """
    return (held < HELD) | ((since >= RENEWED_SECONDS) & (level > WHOLLY_HELD))
