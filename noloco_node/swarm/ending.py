"""When a run is over for those who draw no samples: the origins say so."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from noloco_node.aio import Pulse
from noloco_node.errors import ExitCode, UserError
from noloco_node.swarm.directory import PeerState
from noloco_node.swarm.membership import Membership

NEAR_TARGET = 0.9
"""Share of the target from which the disappearance of all origins is taken for the run's end."""
ORPHAN_GRACES = 15


async def until_nobody_trains(
    membership: Membership, stop: asyncio.Event, moved: Pulse, grace: float, is_near_end: Callable[[], bool]
) -> None:
    """Return when the run is over (`Membership.run_is_over`), or when `stop` is set.

    Orphans, whose origins left without that word, wait for `grace` seconds if the run's end is near, and else much
    longer (the origins may only be out of sight, or stage 0 is being restored); then they raise UserError
    (PEERS_UNREACHABLE). A node that never saw an origin waits for one.
    """
    origins_seen = membership.stage == 0
    alone_since: float | None = None
    while not stop.is_set():
        if membership.live(0, PeerState.TRAINING):
            origins_seen, alone_since = True, None
        elif membership.run_is_over():
            return
        elif origins_seen:
            alone_since = alone_since or time.monotonic()
            alone = time.monotonic() - alone_since
            if is_near_end() and alone > grace:
                return
            if alone > ORPHAN_GRACES * grace:
                raise UserError(
                    ExitCode.PEERS_UNREACHABLE,
                    f"no replica of stage 0 has been seen for {alone:.0f} s, far from the run's end",
                    "look whether the run goes on and whether this machine is connected, then start the node again",
                )
        await moved.wait(grace / 4)
