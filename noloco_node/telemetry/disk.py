"""What is left of the disk on which a node keeps its run folder."""

from __future__ import annotations

import math
import os
from pathlib import Path


def free_bytes(folder: Path) -> float:
    """What this process may still write there, in bytes; not a number where the system does not say."""
    try:
        room = os.statvfs(folder)
    except OSError:
        return math.nan
    return float(room.f_bavail * room.f_frsize)
