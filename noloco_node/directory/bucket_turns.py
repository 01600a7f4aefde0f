"""When a node reads another bucket of a stage, and when that takes the place of one that it holds: of one node, or of
many at once by rows, for a simulation of more nodes than can be looked at one by one.
"""

from __future__ import annotations

from typing import overload

import numpy as np
from numpy.typing import NDArray

from noloco_node.directory.buckets import RAISE, TARGET

HELD = 2
"""Buckets of a near stage that a node holds."""
WHOLLY_HELD = 1
"""The level that has no more buckets."""
RENEWED_SECONDS = 120.0
"""After which one of them is another: a quarter of the view in a minute."""
SAMPLED_AGAIN = 0.6
"""Of a record's life, between two buckets that are read for the number alone, once that has settled."""
READ_AGAIN, READ_AGAIN_AT_LAST = 0.4, 0.5
"""Of a record's life, for what is held: a record is renewed at a third of it. The second where buckets are full."""
SETTLED = 4
"""Buckets of a level that are read at once, one at each look, when this node has come to it."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


@overload
def drawn_again(fullness: float, life: float) -> float: ...
@overload
def drawn_again(fullness: Floats, life: float) -> Floats: ...
def drawn_again(fullness: float | Floats, life: float) -> float | Floats:
    """Seconds between two buckets that are read for the number alone, of a stage whose buckets hold so many records:
    the fuller they are, the more rarely, so that as many come in a second."""
    return SAMPLED_AGAIN * life * _times_full(fullness)


@overload
def held_again(fullness: float, life: float) -> float: ...
@overload
def held_again(fullness: Floats, life: float) -> Floats: ...
def held_again(fullness: float | Floats, life: float) -> float | Floats:
    """The same between two looks at a bucket that is held: all that are shown must be read again before they end."""
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
    """Whether a bucket is read for the number now, by who has read so many of its level, may be about to leave that,
    would hold the next (`has_a_place`), and drew the last one so long `since`, where one is drawn `again` after so
    long (seconds)."""
    return (drawn_here < SETTLED) | confirming | has_place | (since >= again)


@overload
def has_a_place(level: int, held: int, since: float) -> bool: ...
@overload
def has_a_place(level: Ints, held: Ints, since: Floats) -> Flags: ...
def has_a_place(level: int | Ints, held: int | Ints, since: float | Floats) -> bool | Flags:
    """Whether what is drawn at a level is held from now on, by who holds so many and has exchanged one of them so long
    `since`: where all places are taken, the eldest goes, unless there are no others."""
    return (held < HELD) | ((since >= RENEWED_SECONDS) & (level > WHOLLY_HELD))
