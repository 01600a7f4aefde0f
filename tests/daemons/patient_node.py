"""A real daemon that waits longer for the holder of a stage: on a busy machine one needs more than 15 s for its start.

Run as `python -m tests.daemons.patient_node run ...`; it is a paced node, whose speed comes from the environment.
"""

from __future__ import annotations

from noloco_node.node import revival
from tests.chaos import paced_node

if __name__ == "__main__":
    revival.DOUBT_SECONDS = 120.0
    paced_node.main()
