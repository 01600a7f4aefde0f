"""The warnings for the user that runs a node."""

from __future__ import annotations

from typing import Literal

WarningKind = Literal[
    "checkpoints_unusable",
    "stage_lost",
    "state_elsewhere",
    "last_of_stage",
    "memory_short",
    "text_damaged",
    "invitation_ends",
    "clock_wrong",
    "identity_shared",
    "another_life",
]
