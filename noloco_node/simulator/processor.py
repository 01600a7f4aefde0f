"""What a node's own processor takes, as far as a simulation counts it: the arithmetic of weight exchanges."""

from __future__ import annotations

from statistics import fmean

from noloco_node.averaging.side import THREAD
from noloco_node.config.run_spec import RunSpec
from noloco_node.simulator.loop import ThreadSeconds
from noloco_node.sizing.footprint import Footprint

PIECES = 6
"""One side's arithmetic falls into so many pieces of work on average, if an exchange is a single chunk. A dialler has
seven, a dialled side five. Each goes over the weights about once."""


def exchange_arithmetic(spec: RunSpec, footprint: Footprint, seconds: float) -> ThreadSeconds:
    """The seconds of a piece of work on each thread of a node. An exchange takes so many `seconds` of either side's
    processor for a million weights."""
    millions = fmean(footprint.parameters) / spec.outer.fragments / 1e6
    return lambda thread: seconds * millions / PIECES if thread == THREAD else 0.0
