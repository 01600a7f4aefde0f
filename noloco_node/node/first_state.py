"""How a replica comes to its first state, from top to bottom: look, bring back, copy, begin anew.

It looks for others. It brings back a stage that is lost (`revival`). It asks the peers that answer, decides
(`placement.arrival`), and copies a stage peer. Else it begins anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from functools import partial

from noloco_node.ambient import SOON_SECONDS
from noloco_node.bootstrap.hello import Hello, hello_or_none, said_to_be_over
from noloco_node.bootstrap.spec_fetch import RunHasEnded, run_has_ended
from noloco_node.directory.known_peers import HeldState
from noloco_node.directory.records import FIRST_LOOK_SECONDS, SERVING, PeerRecord, PeerState
from noloco_node.directory.signed_end import near_from
from noloco_node.errors import ExitCode, UserError
from noloco_node.identity.addresses import peers_at
from noloco_node.identity.peer_id import PeerId
from noloco_node.node.replica import Replica
from noloco_node.node.revival import (
    FirstWeights,
    first_weights,
    revive,
    revive_if_lost,
    stage_lost,
    state_elsewhere,
    wait_for_holder,
)
from noloco_node.node.stage_lifecycle import BeginsFrom, StageLifecycle
from noloco_node.placement.arrival import (
    BEGINNINGS,
    DOUBT_SECONDS,
    HEARD,
    is_left_behind,
    lacks_first_weights,
    no_first_weights,
    where_to_begin,
)
from noloco_node.state_transfer.donor_choice import BUSY_PATIENCE_SECONDS, NoDonor
from noloco_node.state_transfer.fetch import DiskFull
from noloco_node.storage.checkpoint import CheckpointFolder

logger = logging.getLogger(__name__)

NEAR_AND_NOBODY = "it was near its end, and nobody that answers trains any more"
STAGE_HAS_ENDED = "all known replicas of this stage had trained to its end"

STARTS_ALONE = (
    "STARTS ALONE from the first weights: this node has joined others, but no node with a stage of the run answers it. "
    "The first node of a run starts like this. If others train already, this one cannot reach them, and what it learns "
    "alone is thrown away once it does: stop it, set its clock right, and name nodes that train as initial peers"
)

BEGINS_THE_RUN = (
    "begins the run from the first weights: the seeds that this node has joined by have seen nobody train in it yet. "
    "Others come by the same seeds, or by this node's address"
)


async def obtain_state(
    replica: Replica,
    stays: StageLifecycle,
    saved_clock: float | None,
    checkpoints: CheckpointFolder,
    holders: Sequence[tuple[PeerId, HeldState]] = (),
    first: FirstWeights | None = None,
) -> BeginsFrom | None:
    """Look, bring a lost stage back, copy a stage peer, or begin anew: give the replica the state to begin with, and
    say where from.

    `saved_clock` is that of the checkpoint that it was resumed from. One of `checkpoints` may be what is left of a lost
    stage. `holders` held its state when they were last seen: a node that has just started waits for them, briefly and
    once. So does one whose checkpoint is left behind (`is_left_behind`). `first` gives the run's first weights, if they
    are not to come from building the stage anew.

    None if this node has moved here and nobody gave the state: `StageLifecycle.back` says where to go then. Raises
    UserError (NO_STATE_SOURCE) for a node that has just started, and RunHasEnded.
    """
    say_that_it_looks(replica)
    replica.end.came_near_the_end = stays.near
    await stays.look_again(replica.membership)
    try:
        origin = await _bring_back(replica, stays, saved_clock, checkpoints, holders, first)
        origin = origin or await _copy(replica, saved_clock)
    except UserError as error:
        _give_up_the_move(replica, stays, error)
        return None
    return origin or await _begin_anew(replica, stays, checkpoints)


async def _bring_back(
    replica: Replica,
    stays: StageLifecycle,
    saved_clock: float | None,
    checkpoints: CheckpointFolder,
    holders: Sequence[tuple[PeerId, HeldState]],
    first: FirstWeights | None,
) -> BeginsFrom | None:
    """The stage, where nobody serves it although others train; None where it is not lost, or where the own checkpoint
    is as far as the others."""
    spec, members = replica.context.spec, replica.membership
    behind = saved_clock is not None and await _left_behind(replica, saved_clock)
    if saved_clock is not None and not behind:
        return None
    further = [(peer, held) for peer, held in holders if saved_clock is None or held.clock > saved_clock]
    if further and stays.moving is None and not members.stage_peers(*SERVING):
        stays.emit(state_elsewhere(replica.stage, further, DOUBT_SECONDS))
        await wait_for_holder(members, further)
    revived = await revive_if_lost(
        spec,
        members,
        replica.worker,
        stays.copies,
        replica.context.transport.peer_id,
        confirmed=stays.moving is not None and stays.moving.why == "lost",
        saved=lambda: checkpoints.newest(spec.run_id, replica.stage),
        first=(first or first_weights(spec, replica.stage)) if behind else None,
    )
    if revived is not None:
        _say_if_from_seed(replica, stays, revived)
        replica.begins_late()
    return revived


async def _copy(replica: Replica, saved_clock: float | None) -> BeginsFrom | None:
    """A stage peer's state, or the own checkpoint where that is as good; None where the first weights stand."""
    donor = await become_current(replica, saved_clock)
    if donor is not None:
        return "peer"
    return None if saved_clock is None else "checkpoint"


def _give_up_the_move(replica: Replica, stays: StageLifecycle, error: UserError) -> None:
    """Nobody gave the state: a node that came from another stage goes back there. Raises the error, or RunHasEnded, for
    any other node and for any other reason."""
    ended = isinstance(error, RunHasEnded) and stays.near
    if ended or error.exit_code is not ExitCode.NO_STATE_SOURCE:
        raise error
    if stays.moving is None:
        if why := _why_ended(replica, stays):
            raise run_has_ended(replica.context.spec, why) from None
        raise error
    logger.warning("could not move to stage %d: %s", replica.stage, error.message)


async def _begin_anew(replica: Replica, stays: StageLifecycle, checkpoints: CheckpointFolder) -> BeginsFrom:
    """The run's first weights where it has just begun. Where it was under way and nobody trains at all, go on with what
    this node has: what is left of the stage is with it."""
    if not stays.met_under_way:
        return "seed"
    others = replica.membership.others_there(*SERVING)
    if stays.near and not others:
        raise run_has_ended(replica.context.spec, NEAR_AND_NOBODY)
    replica.begins_late()
    if others:
        return "seed"
    spec, members = replica.context.spec, replica.membership
    saved = partial(checkpoints.newest, spec.run_id, replica.stage)
    revived = await revive(spec, members, replica.worker, stays.copies, saved)
    _say_if_from_seed(replica, stays, revived)
    return revived


def _why_ended(replica: Replica, stays: StageLifecycle) -> str:
    """How this node, to which nobody gave a state, knows that the run came to its end meanwhile; empty if it does not.

    Last words of nodes that have left count, as records outlive their nodes. Nobody who finishes trains any more. Nodes
    that come have no say, and neither have those that left before the end. A node that is paused will be back.
    """
    spec, members = replica.context.spec, replica.membership
    target, near = spec.inner.target_tokens, near_from(spec.inner.target_tokens, spec.max_lag_tokens)
    said = [r for r in members.others(*PeerState) if r.clock > 0.0 and (r.finished or r.state is not PeerState.GONE)]
    here = [record for record in said if record.stage == replica.stage]
    if here and all(record.finished or record.clock >= target for record in here):
        return STAGE_HAS_ENDED
    all_near = bool(said) and all(record.clock > near and not record.shown.paused for record in said)
    return NEAR_AND_NOBODY if (stays.near or all_near) and not members.others_there(PeerState.TRAINING) else ""


def say_that_it_looks(replica: Replica) -> None:
    """Tell observers of the node."""
    replica.activity.say("joining", "looking for the nodes of the run")


async def _left_behind(replica: Replica, clock: float) -> bool:
    """Whether a checkpoint of this clock is (`is_left_behind`), as those say that answer. Where nobody does and records
    of others would say so they are asked again for a while: one lost request decides nothing."""
    members, stage, max_lag = replica.membership, replica.stage, replica.context.spec.max_lag_tokens
    loop = asyncio.get_running_loop()
    until = loop.time() + FIRST_LOOK_SECONDS
    while not (there := members.others_there(*SERVING)):
        elsewhere = [record for record in members.others(*SERVING) if record.stage != stage]
        if not is_left_behind(clock, elsewhere, stage, max_lag) or loop.time() >= until:
            break
        # Nothing tells that a peer can be reached again: asking is the only way.
        await asyncio.sleep(SOON_SECONDS)
        await members.refresh()
    return is_left_behind(clock, there, stage, max_lag)


def _say_if_from_seed(replica: Replica, stays: StageLifecycle, revived: BeginsFrom) -> None:
    if revived == "seed":
        stays.emit(stage_lost(replica.context.spec, replica.stage))


async def become_current(replica: Replica, own_clock: float | None = None) -> PeerId | None:
    """Begin where `where_to_begin` says, on probation with a stage peer's state; the donor, or None where the weights
    stand. See `FirstState`."""
    return await FirstState(replica).take(own_clock)


class FirstState:
    """The place where a replica begins, and the peers that it may copy.

    `entrances` are the peers by which it came in, the initial peers if none are given; the run begins with a node that
    has none.
    """

    def __init__(self, replica: Replica, entrances: Collection[PeerId] | None = None) -> None:
        context = replica.context
        self._replica = replica
        self._spec = context.spec
        self._stage = context.stage
        self._own = context.transport.peer_id
        self._membership = replica.membership
        self._entrances = peers_at(context.settings.initial_peers) if entrances is None else entrances
        self._joined = bool(self._entrances)

    async def take(self, own_clock: float | None) -> PeerId | None:
        """Copy a stage peer's state if that is where to begin (`where_to_begin`); returns the donor.

        None if the weights stand: those of the own checkpoint, if `own_clock` is given, else the first ones. Raises
        UserError (NO_STATE_SOURCE) if a stage peer's state is needed and nobody gave it. It is needed, too, if the run
        began with weights that this node has no folder of. Raises DiskFull without a checkpoint to go on with.
        """
        there, joined = await self._who_answers(), self._joined
        over = await self._why_over() if joined else ""
        begin = where_to_begin(
            own_clock,
            there,
            self._stage,
            self._spec.max_lag_tokens,
            joined=joined,
            entrances=self._entrances,
            over=over,
        )
        if begin.source == "nowhere":
            raise run_has_ended(self._spec, begin.why)
        logger.info("begins from %s: %s", BEGINNINGS[begin.source], begin.why)
        if begin.source == "seed" and joined and not there:
            if await self._is_the_first():
                logger.info(BEGINS_THE_RUN)
            else:
                logger.warning(STARTS_ALONE)
        lacking = own_clock is None and lacks_first_weights(self._spec)
        if begin.source != "peer" and not lacking:
            return None
        try:
            return await self._copy_a_stage_peer(DOUBT_SECONDS if begin.doubtful else BUSY_PATIENCE_SECONDS)
        except NoDonor as error:
            explained = error.explained(self._spec, self._stage)
            if lacking and (begin.source == "seed" or begin.doubtful):
                raise no_first_weights(self._spec, self._stage) from None
            if own_clock is None and not begin.doubtful:
                raise explained from None
            source = "seed" if own_clock is None else "checkpoint"
            logger.warning("begins from %s after all: %s", BEGINNINGS[source], explained.message)
            return None
        except DiskFull as error:
            if own_clock is None:
                raise
            logger.warning("begins from %s after all: %s", BEGINNINGS["checkpoint"], error)
            return None

    async def _why_over(self) -> str:
        """How this node knows that the run has come to its end; empty where it does not."""
        signed = self._replica.signed
        signed.look(lambda _record: False)
        await signed.ask(self._entrances)
        if why := signed.known:
            return why
        if signed.may_be and said_to_be_over(await self._words_of_entrances()):
            return "so say most of the peers that this node was told to join"
        return ""

    async def _who_answers(self) -> list[PeerRecord]:
        """Records of the nodes that answer. Where records show some and none answers, they are asked again for a while:
        one lost request must not decide where a node begins. Longer still where one that answers serves the run and
        has told no record yet."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            await self._membership.refresh()
            there = self._membership.others_there(*HEARD)
            unrecorded = bool(self._membership.unrecorded())
            if there or not self._joined or not (unrecorded or self._membership.others(*HEARD)):
                return there
            if loop.time() >= began + (DOUBT_SECONDS if unrecorded else FIRST_LOOK_SECONDS):
                return there
            # Nothing tells that a peer can be reached again: asking is the only way.
            await asyncio.sleep(SOON_SECONDS)

    async def _is_the_first(self) -> bool:
        """Tell whether it came in only by seeds of this run that have seen no node at work in it. A run that is begun
        beside a seed begins like this."""
        told = (await self._told()).values()
        return bool(told) and all(hello.stage is None and hello.over is None for hello in told)

    async def _told(self) -> dict[PeerId, Hello]:
        """The hellos of its entrances that answer and are of this run."""
        transport = self._replica.context.transport
        told = await asyncio.gather(*(hello_or_none(transport, peer) for peer in self._entrances))
        pairs = zip(self._entrances, told, strict=True)
        return {peer: hello for peer, hello in pairs if hello is not None and hello.run == self._spec.run_id}

    async def _words_of_entrances(self) -> list[bool | None]:
        """Whether the run is over, say its entrances. The last record speaks for one that answers no more."""
        told = await self._told()
        left = [r for r in self._membership.others(*PeerState) if r.peer_id in self._entrances and r.finished]
        return [*(hello.over for hello in told.values()), *(True for r in left if PeerId(r.peer_id) not in told)]

    async def _copy_a_stage_peer(self, patience: float) -> PeerId:
        """Become a copy of a stage peer; busy ones are waited for `patience` seconds. Raises NoDonor."""
        self._replica.activity.say("downloading", f"a stage peer's state of stage {self._stage}")
        donor, _ = await self._replica.copier.copy_best(self.possible_donors, patience)
        self._replica.begins_as_copy()
        return donor

    async def possible_donors(self) -> list[PeerId]:
        """Stage peers that answer; where none does, those that records introduce."""
        await self._membership.refresh()  # a download outlives the records that were read before it
        introduced = self._membership.live(self._stage, *SERVING)
        named = [PeerId(record.peer_id) for record in introduced if record.peer_id != self._own]
        return self._membership.stage_peers(*SERVING) or named
