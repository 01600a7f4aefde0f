"""Who holds the state of a stage: said, and waited for, before it is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from noloco_node import ambient
from noloco_node.config.run_spec import RunSpec
from noloco_node.directory.known_peers import HeldState
from noloco_node.directory.membership import Membership
from noloco_node.directory.records import SERVING, PeerState
from noloco_node.errors import UserError
from noloco_node.identity.peer_id import PeerId
from noloco_node.storage.checkpoint import CheckpointFolder
from noloco_node.storage.weights import read_manifest
from noloco_node.telemetry.events import Warned
from noloco_node.telemetry.words import as_long

HOLDER_SECONDS = 15.0
"""How long a node without a state waits for a peer that held it when it was last seen at work; once."""
HOLDER_LOADS_SECONDS = 60.0
"""As long as that peer is there and on its way back to its stage."""
LOOK_SECONDS = 1.0


def final_lacks(final: Path, clock: float) -> bool:
    """Whether the weights in `final` are none, or older than a checkpoint of this `clock` (tokens): each stay that is
    ended by hand leaves some, and one that is killed at the run's end, or finds its disk full, leaves those."""
    try:
        return read_manifest(final).clock < clock
    except UserError:
        return True


def unusable_checkpoints(checkpoints: CheckpointFolder) -> Warned | None:
    """What to say where the last search of the folder found checkpoints and none that can be used."""
    if not checkpoints.damaged:
        return None
    newest, reason = next(iter(checkpoints.damaged.items()))
    count = len(checkpoints.damaged)
    found = (
        f"THE ONLY CHECKPOINT HERE IS DAMAGED ({newest}"
        if count == 1
        else f"ALL {count} CHECKPOINTS ARE DAMAGED ({newest}"
    )
    return Warned(
        what="checkpoints_unusable",
        detail=f"{found}: {reason}). This node takes the state of another replica of its stage; where there is none, "
        "the stage begins again from the first weights, and what it had learnt is lost. If you have a copy of "
        f"{checkpoints.path}, stop now (Ctrl-C), put it back, and start again",
    )


BACK = "start it again soon, with the same command"


def last_of_stage(
    membership: Membership,
    answers: Callable[[PeerId], bool],
    standby_copies: int,
    *,
    kept: bool = True,
    back: str = BACK,
) -> Warned | None:
    """What a user is told that stops a node and leaves a stage without a replica while others train. Peers that have
    answered this node are known. `kept`: its disk has taken the last checkpoint. `back`: how it comes back."""
    others = [PeerId(record.peer_id) for record in membership.others(*SERVING)]
    stage_peers = membership.stage_peers(*SERVING)
    if not any(map(answers, others)) or any(map(answers, stage_peers)):
        return None
    copies = (
        "What is left are the copies that nodes of other stages keep, up to two minutes old"
        if standby_copies
        else "Nobody keeps a copy of it (run.standby_copies is 0): whoever serves it next begins from the first weights"
    )
    own = (
        f"This node's checkpoint holds everything: {back}"
        if kept
        else "THIS NODE'S DISK HAS TAKEN NO CHECKPOINT OF LATE: make room on it at once, or what the stage has learnt "
        "since the last one is lost"
    )
    return Warned(
        what="last_of_stage",
        detail=f"THE LAST REPLICA OF STAGE {membership.stage} LEAVES: this node knows of no other that answers. "
        f"{copies}. {own}",
    )


def state_elsewhere(stage: int, holders: Sequence[tuple[PeerId, HeldState]], seconds: float) -> Warned:
    """Names who held a stage's state, the furthest first."""
    now = ambient.wall()
    rows = [f"{peer} at {held.clock:,.0f} tokens, seen {as_long(now - held.seen)} ago" for peer, held in holders[:3]]
    return Warned(
        what="state_elsewhere",
        detail=f"THE STATE OF STAGE {stage} IS ELSEWHERE: it was held by {'; '.join(rows)}. Waiting {seconds:.0f} s "
        "for it to come back; else this node begins the stage without it. Ask whoever runs that node to start it again",
    )


async def wait_for_holder(membership: Membership, holders: Sequence[tuple[PeerId, HeldState]]) -> bool:
    """Wait, within bounds, until a stage peer serves the stage; longer while one of `holders` is on its way back to it.
    False where none came."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    while not membership.stage_peers(*SERVING):
        back = {peer for peer, _ in holders} & set(membership.stage_peers(PeerState.JOINING))
        if loop.time() - began >= (HOLDER_LOADS_SECONDS if back else HOLDER_SECONDS):
            return False
        # The directory gives no sign of a change: asking again is the only way.
        await asyncio.sleep(LOOK_SECONDS)
        await membership.refresh()
    return True


def stage_lost(spec: RunSpec, stage: int) -> Warned:
    """What to say where a stage of a run under way begins anew."""
    asked = "run.standby_copies is 0" if spec.standby_copies == 0 else "no node that kept one is left"
    return Warned(
        what="stage_lost",
        detail=f"STAGE {stage} STARTS AGAIN FROM THE RUN'S SEED: all of its replicas are gone and no copy is left "
        f"({asked}); what it had learnt is lost. If the machine of a former replica still has its run folder, stop "
        "this node and start that one",
    )
