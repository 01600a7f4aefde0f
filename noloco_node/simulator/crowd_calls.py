"""Roll calls of a crowd: an account of their bytes alone, where everybody answers. Whom nodes ask, how often and what
they tell follow `directory.roll_call` and `directory.records_call`."""

from __future__ import annotations

import numpy as np

from noloco_node.directory.bucket_turns import HELD, Floats, Ints
from noloco_node.directory.records_call import FEW_TOLD, FEWEST_TOLD, MANY
from noloco_node.directory.roll_call import ASK_AGAIN, CALLS_A_SECOND, LONGEST_QUIET

MESSAGE_BYTES = 62.0
"""A call or its answer without records."""
TOLD_BYTES = 1.38
"""Times a record as it lies in the directory: as text, with its peer, stage and life."""


def seen_of(number: Floats, level: Ints) -> Floats:
    """How many a node sees of a near stage of so many that it takes to lie at this level."""
    return number * np.minimum(1.0, HELD / np.exp2(level))


def octets_a_second(known: Floats, life: float, record_bytes: float) -> Floats:
    """Bytes that a node sends in a second which knows so many others. Of two that answer each other one asks, and both
    tell; nobody asks oftener than it may, and is asked as often as it asks."""
    again = min(LONGEST_QUIET, ASK_AGAIN * life)
    messages = np.minimum(known / again, 2.0 * CALLS_A_SECOND)
    told = np.where(known >= MANY, FEWEST_TOLD, FEW_TOLD)
    return np.asarray(messages * (MESSAGE_BYTES + told * TOLD_BYTES * record_bytes), np.float64)
