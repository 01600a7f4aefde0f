"""One stay of a node at a stage: it trains beside what accompanies it, and leaves with everything saved."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from noloco_node import ambient
from noloco_node.accounting.receipts import Receipts
from noloco_node.directory.membership import Membership
from noloco_node.directory.records import SERVING, PeerState
from noloco_node.directory.signed_end import near_from
from noloco_node.errors import UserError
from noloco_node.identity.peer_id import PeerId
from noloco_node.node.checkpointing import CheckpointKeeper
from noloco_node.node.checks import ClockWatch
from noloco_node.node.interrupts import Interrupts, PauseSwitch
from noloco_node.node.network import Network
from noloco_node.node.replica import Replica
from noloco_node.node.stage_lifecycle import StageLifecycle
from noloco_node.storage.checkpoint import Checkpoint, CheckpointFolder
from noloco_node.storage.run_folder import RunFolder
from noloco_node.storage.weights import read_manifest, save_stage
from noloco_node.telemetry.events import AnyEvent, NodeStopped, Warned
from noloco_node.telemetry.of_node import Telemetry
from noloco_node.telemetry.words import as_trained
from noloco_node.training.compute_thread import ComputeThread

logger = logging.getLogger(__name__)

BACK = "start it again soon, with the same command"


@dataclass(slots=True)
class NodeParts:
    """The parts of a node that outlive its stays, and what one stay leaves to the next."""

    net: Network
    folder: RunFolder
    checkpoints: CheckpointFolder
    thread: ComputeThread
    telemetry: Telemetry
    stays: StageLifecycle
    pause: PauseSwitch
    saved: Checkpoint | None
    """What the next stay goes on from; after a pause None stands for this node's newest checkpoint."""
    started: bool = False
    """It has told that it is up."""
    paused: bool = False
    """A pause has ended the last stay, and this node is to come back to its stage."""
    was_paused: bool = False
    """It has trained, and a pause ended that stay."""

    @property
    def emit(self) -> Callable[[AnyEvent], None]:
        return self.telemetry.emit


@dataclass(slots=True)
class Stay:
    """A replica with what accompanies it."""

    node: NodeParts
    interrupts: Interrupts
    replica: Replica
    keeper: CheckpointKeeper
    receipts: Receipts
    refused: UserError | None = None
    """Why this node leaves, where its invitation has ended."""

    async def train(self) -> None:
        """Train to the end of the stay, and save what is kept of it."""
        node, replica, interrupts = self.node, self.replica, self.interrupts
        node.net.lives.worked = lambda: replica.worker.last_trained.at > 0.0
        interrupts.graceful(replica.stop)
        replica.on_leaving = interrupts.leaves
        leaving = (PeerState.FINISHING, PeerState.DRAINING)
        work = self.receipts.beside(replica.run(), replica.context.moved, lambda: replica.membership.state in leaving)
        companions = (
            self.keeper.run(),
            node.stays.accompany(replica),
            self._say_if_last(),
            node.thread.ends_when_lost(),
            ClockWatch(node.net.transport, node.emit).keep(),
            self._say_if_shared(),
            self._stop_when_refused(),
            self._rest_when_told(),
            node.pause.keep(),
        )
        await run_and_save(node.net.beside(work, *companions), self._save)

    async def leave(self, started: float) -> NodeStopped | None:
        """How the node ends, which began at `started`; None where it only moves on to another stage or rests.

        Raises UserError (NOT_ADMITTED) where it leaves since its invitation has ended: the run goes on without it, so
        that nothing is marked as ended.
        """
        node, replica = self.node, self.replica
        if self._moves_on:
            return None
        if self._rests:
            node.paused = True
            return None
        await node.stays.give_up_move()
        if self.refused is not None and not self.interrupts.asked:
            self.interrupts.leaves(self.refused.exit_code)
            raise self.refused
        folder, spec = node.folder, node.net.spec
        reason = "interrupted" if replica.stop.is_set() else "target_reached"
        if reason == "target_reached":
            node.stays.signed.own()
            folder.mark_ended(spec.run_id, spec.name)
        return stopped_event(
            reason,
            "",
            started,
            outer_rounds=replica.worker.progress.outer_rounds,
            partners=replica.outer_steps.partners,
            final_weights=str(folder.final.relative_to(folder.path)),
        )

    @property
    def _moves_on(self) -> bool:
        return self.node.stays.move is not None and self.refused is None and not self.interrupts.asked

    @property
    def _rests(self) -> bool:
        return self.replica.rested and self.refused is None and not self.interrupts.asked

    async def _save(self) -> None:
        """Save the last checkpoint and the final weights. Those of a stage that this node only leaves for another are
        with its stage peers."""
        if self._moves_on:
            return
        if self._rests:
            self.node.saved = await self.keeper.save_or_keep()
            return
        await self.keeper.save()
        await _save_weights(self.node, self.replica)

    async def _stop_when_refused(self) -> None:
        """Leave in order once the node's invitation has ended: alone it would train to an end that is none of the
        run's."""
        self.refused = error = await self.node.net.invitation.ends()
        logger.warning("%s: leaving, with everything saved", error.message)
        self.interrupts.leaves(error.exit_code)
        self.replica.stop.set()

    async def _rest_when_told(self) -> None:
        """Leave for a rest once this node is to; not at the run's end, which it is about to leave by."""
        replica, said = self.replica, False
        while not replica.stop.is_set():
            await self.node.pause.begins()
            if replica.course.run_goes_on():
                replica.rest(self.node.pause.why())
            elif not said:
                said = True
                logger.warning("not paused: the run comes to its end here, and this node leaves with everything saved")
            # The run may go on after all.
            await replica.context.moved.wait(1.0)

    async def _say_if_shared(self) -> None:
        """Say so where another node turns out to run with this one's identity."""
        await self.replica.membership.twin.seen.wait()
        net = self.node.net
        key = net.settings.identity or self.node.folder.identity
        detail = (
            f"ANOTHER NODE RUNS WITH THIS NODE'S IDENTITY ({net.daemon.own_id}), as where a folder or a disk was "
            "copied: each of them takes what was meant for the other, and one may get no work at all. Stop one of "
            f"them, remove its key (here {key}), and start it again: it makes one of its own"
        )
        self.node.emit(Warned(what="identity_shared", detail=detail))

    async def _say_if_last(self) -> None:
        """Once this node is told to leave, or its invitation has ended: say so where its stage loses its last one."""
        replica, net = self.replica, self.node.net
        await replica.stop.wait()
        if self.interrupts.asked or self.refused is not None or replica.rests:
            warning = last_of_stage(
                replica.membership,
                net.transport.peer_stats.answers,
                net.spec.standby_copies,
                kept=not self.keeper.failing,
                back="resume it soon" if replica.rests else BACK,
            )
            if warning is not None:
                self.node.emit(warning)


async def run_and_save(run: Awaitable[None], save: Callable[[], Awaitable[None]]) -> None:
    """Await `run`, then save. Where it fails, what was trained so far is saved and its failure goes on.

    A failure of that rescue is logged, so that it does not take the first one's node. Nothing is saved on
    cancellation: it means to leave at once.
    """
    try:
        await run
    except Exception:
        try:
            await save()
            logger.info("the weights were saved as they are")
        except Exception:
            logger.exception("the weights could not be saved either")
        raise
    await save()


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
        else "Nobody keeps a copy of it (run.standby_copies is 0): its next node begins from the first weights"
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


async def save_what_was_not(node: NodeParts, replica: Replica, clock: float | None) -> None:
    """The run has come to its end without this node, or just as its disk was full: its last checkpoint, at that `clock`
    (None: there is none), is all that it has of the run's end."""
    spec, final = node.net.spec, node.folder.final
    target = spec.inner.target_tokens
    if clock is None or not final_lacks(final, clock):
        return
    if clock > near_from(target, spec.max_lag_tokens):
        await _save_weights(node, replica)
        logger.info("the final weights were not here yet: those of the last checkpoint were saved to %s", final)
    else:
        logger.warning("the final weights are not here; the last checkpoint stands at %s", as_trained(clock, target))


async def _save_weights(node: NodeParts, replica: Replica) -> None:
    """Write the final slow weights under their names in the whole model."""
    weights, _ = await replica.worker.named_weights()
    slow = {replica.full_names[local]: weight for local, weight in weights.items()}
    progress = replica.worker.progress
    await ambient.elsewhere(
        save_stage,
        node.folder.final,
        run_id=node.net.spec.run_id,
        cut=replica.context.cut,
        clock=progress.clock,
        outer_rounds=progress.outer_rounds,
        slow=slow,
    )


def final_lacks(final: Path, clock: float) -> bool:
    """Whether the weights in `final` are none, or older than a checkpoint of this `clock` (tokens): each stay that is
    ended by hand leaves some, and one that is killed at the run's end, or finds its disk full, leaves those."""
    try:
        return read_manifest(final).clock < clock
    except UserError:
        return True


def stopped_event(
    reason: Literal["target_reached", "interrupted", "failed"],
    detail: str,
    started: float,
    *,
    outer_rounds: int = 0,
    partners: dict[str, int] | None = None,
    final_weights: str | None = None,
) -> NodeStopped:
    """The last event of a node, which began at `started` on the monotonic clock (seconds)."""
    return NodeStopped(
        reason=reason,
        detail=detail,
        outer_steps_taken=outer_rounds,
        partners=partners or {},
        final_weights=final_weights,
        seconds=ambient.monotonic() - started,
    )
