"""One open exchange: what a side knows of it, and the event that it ends in."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal

from noloco_node.outer.replica import Part
from noloco_node.swarm.state_messages import StateManifest
from noloco_node.swarm.transport import PeerId
from noloco_node.telemetry.events import OuterStep
from noloco_node.training.progress import Progress
from noloco_node.training.stage_worker import Commit, Snapshot


@dataclass(slots=True, eq=False)
class Session:
    """One open exchange."""

    exchange: str
    partner: PeerId
    role: Literal["dialler", "dialled"]
    fragment: int | None
    """Which fragment of the stage; None is the whole."""
    part: Part
    weight: float = 1.0
    """n·w of this replica."""
    started: float = field(default_factory=time.monotonic)
    last_progress: float = field(default_factory=time.monotonic)
    opening: bool = False
    snapshot: Snapshot | None = None
    partner_clock: float = 0.0
    spread: float | None = None
    added: set[int] = field(default_factory=set[int])
    """Chunks whose arithmetic is done (kept by the arithmetic's thread); the commit waits for all of them."""
    committing: bool = False
    gives_only: bool = False
    """The dialled side of a weightless exchange: nothing changes here."""
    bound: float | None = None
    """The largest difference that the giving side would accept whole: measured there, told here."""
    fellow_loss: float | None = None
    """The partner's training loss, as it says."""
    sent: int = 0
    received: int = 0


def commit_event(session: Session, snapshot: Snapshot, commit: Commit, *, norm: float, clipped: bool) -> OuterStep:
    """What is reported of a committed step; `norm` is that of the difference to the partner, if there was one."""
    paired = bool(session.partner)
    return OuterStep(
        kind="paired" if paired else "alone",
        round=commit.progress.outer_rounds,
        step=snapshot.progress.steps,
        clock=commit.progress.clock,
        learning_rate=snapshot.learning_rate,
        fragment=session.fragment,
        partner=session.partner or None,
        role=session.role if paired else "none",
        reason="",
        spread=session.spread,
        difference_norm=norm if paired else None,
        clipped=clipped,
        bytes_sent=session.sent,
        bytes_received=session.received,
        seconds=time.monotonic() - session.started,
        held_seconds=snapshot.held_seconds + commit.held_seconds,
        inner_steps_meanwhile=commit.inner_steps_meanwhile,
    )


def abort_event(session: Session, progress: Progress, learning_rate: float, reason: str) -> OuterStep:
    """What is reported of an exchange that came to nothing."""
    return OuterStep(
        kind="aborted",
        round=progress.outer_rounds,
        step=progress.steps,
        clock=progress.clock,
        learning_rate=learning_rate,
        fragment=session.fragment,
        partner=session.partner,
        role=session.role,
        reason=reason,
        spread=session.spread,
        difference_norm=None,
        clipped=False,
        bytes_sent=session.sent,
        bytes_received=session.received,
        seconds=time.monotonic() - session.started,
        held_seconds=session.snapshot.held_seconds if session.snapshot else 0.0,
        inner_steps_meanwhile=0,
    )


def caught_up_event(
    partner: PeerId, progress: Progress, manifest: StateManifest, learning_rate: float, seconds: float
) -> OuterStep:
    """What is reported of a replica that took a fellow's state instead of averaging with it."""
    return OuterStep(
        kind="caught_up",
        round=manifest.outer_rounds,
        step=progress.steps,
        clock=manifest.clock,
        learning_rate=learning_rate,
        partner=partner,
        role="none",
        reason="this replica's clock lagged its partner's",
        spread=None,
        difference_norm=None,
        clipped=False,
        bytes_sent=0,
        bytes_received=manifest.size,
        seconds=seconds,
        held_seconds=0.0,
        inner_steps_meanwhile=0,
    )
