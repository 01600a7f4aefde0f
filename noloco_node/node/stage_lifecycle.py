"""A node's stays: which stage it serves, and when it leaves for another with identity, p2pd and directory kept."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncGenerator, Callable, Iterable
from functools import partial
from typing import Literal

from noloco_node import ambient
from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import RunSpec
from noloco_node.directory.health_checks import HealthChecks
from noloco_node.directory.membership import Membership
from noloco_node.directory.records import (
    FIRST_LOOK_SECONDS,
    REFRESH_SECONDS,
    SERVING,
    Directory,
    DirectoryView,
    PeerRecord,
    PeerState,
    look_for_others,
)
from noloco_node.directory.signed_end import SignedEnd
from noloco_node.errors import ExitCode, UserError
from noloco_node.identity.addresses import peers_at
from noloco_node.identity.peer_id import PeerId
from noloco_node.node.replica import Replica
from noloco_node.pipeline.messages import Ledger
from noloco_node.placement.arrival import Arrival
from noloco_node.placement.balancing import (
    MigrationStanding,
    Move,
    Relocation,
    Server,
    as_far_trained,
    as_seen_at_work,
    servers_of,
    usual_strength,
)
from noloco_node.sizing.footprint import Footprint, footprint_of
from noloco_node.sizing.memory import Memory, fitting_stages, free_memory, memory_of
from noloco_node.sizing.traffic import check_line, check_lines, check_uplink, line_needs
from noloco_node.state_transfer.backups import StageCopies
from noloco_node.telemetry.events import NodeReassigned, Warned
from noloco_node.transport.interface import Transport

logger = logging.getLogger(__name__)


BeginsFrom = Literal["seed", "peer", "standby", "checkpoint"]


class StageLifecycle:
    """What a node keeps through all of its stays, and how one ends and the next begins. Made by `stays_of`. `free` is
    the memory for a stage's state; None: what this machine has now."""

    def __init__(
        self,
        spec: RunSpec,
        settings: NodeSettings,
        footprint: Footprint,
        transport: Transport,
        directory: Directory,
        free: Memory | None = None,
    ) -> None:
        self._spec = spec
        self._settings = settings
        self._footprint = footprint
        self._directory = directory
        self._own = transport.peer_id
        self._rng = random.Random(f"stays/{settings.seed}/{transport.peer_id}")
        self._known = transport.peer_stats
        self._roll = self._make_roll(transport)
        life, name = spec.limits.record_seconds, settings.name
        self.arrival = Arrival(directory, self._own, life, self._known, self._ask_all, name)
        self._needs = memory_of(spec, settings, footprint, spec.most_sharing)
        fitting = fitting_stages(self._needs, free or free_memory(settings.device))
        self._line, bounds = line_needs(spec, footprint), (settings.uplink_mbit, settings.downlink_mbit)
        borne = [stage for stage in fitting if self._line[stage].borne_by(*bounds)]
        self._fitting = [stage for stage in borne if stage > 0 or spec.data.is_here]
        self._line_seconds = [need.line_seconds(*bounds) for need in self._line]
        self._fits_memory = bool(fitting)
        self._began = 0.0
        self._looked_in_vain = False
        self.met_under_way = False
        """The run had begun at an earlier stay, or is past its first outer step as somebody that answered has said."""
        self.ledger = Ledger()
        self.copies = StageCopies(spec, footprint.parameters, transport, self._rng, settings.run_folder)
        self.copies.serve()
        self.stage = 0
        """The stage that it serves or is on its way to."""
        self.move: Move | None = None
        """Why this node leaves its stage; None while it stays."""
        self._came_from: tuple[int, Move] | None = None
        self.near = False
        """The run was near its end as its latest stay ended."""
        self.signed = SignedEnd(transport, directory, spec, peers_at(settings.initial_peers))
        self._replica: Replica | None = None
        """What trains here now."""
        self.emit: Callable[[Warned], None] = lambda warning: logger.warning(warning.detail)
        """Takes warnings for the user that runs the node."""

    def _make_roll(self, transport: Transport) -> HealthChecks:
        """For before a stage is chosen; while it serves one, its replica checks on peers."""

        def introduced() -> Iterable[PeerRecord]:
            return self._directory.view.without(self._own).everyone(self._directory.now())

        life = self._spec.limits.record_seconds
        return HealthChecks(
            transport,
            self._directory,
            self._spec.run_id,
            lambda: self.stage,
            life,
            introduced,
            lambda: None,
            self._rng,
            entrances=peers_at(self._settings.initial_peers),
        )

    async def _ask_all(self) -> None:
        await self._roll.sweep(FIRST_LOOK_SECONDS)

    async def look_around(self) -> DirectoryView:
        """The directory before a stage is chosen, without this node's own former record. If this node joined others, it
        returns as soon as it shows one of them, within a few seconds."""
        view = await look_for_others(self._directory, self._own, self._patience())
        self._looked_in_vain = not view.anyone(self._directory.now())
        await self._ask_all()
        seen = view.everyone(self._directory.now())
        self.met_under_way |= _is_under_way(record for record in seen if self._known.answers(PeerId(record.peer_id)))
        return view

    def _patience(self) -> float:
        """Seconds to look for others: none where this node joined nobody, or has just looked in vain."""
        return FIRST_LOOK_SECONDS if self._settings.initial_peers and not self._looked_in_vain else 0.0

    async def first_stage(self, saved: int | None) -> int:
        """The stage to begin with: the one that is set, else that of the node's checkpoint (`saved`). If there is
        neither, it is the one that needs this node most and fits its memory. Raises UserError (CONFIG) if there is no
        such stage."""
        wanted, stages = self._settings.stage, self._spec.stages
        check_uplink(self._spec, self._settings)
        if wanted == "auto" and saved is not None:
            wanted = saved
        if wanted == "auto":
            if not self._fitting:
                if self._fits_memory:  # it is the line that no stage fits
                    check_lines(self._spec, self._settings, self._line)
                raise self._too_small()
            return await self.arrival.choose(self._footprint.work, self._fitting, self._rng, self._line_seconds)
        if not 0 <= wanted < stages:
            raise UserError(
                ExitCode.CONFIG,
                f"node.stage is {wanted}, but the run has stages 0 to {stages - 1}",
                "name one of those, or `auto`",
            )
        check_line(self._spec, self._settings, self._line[wanted], wanted)
        if wanted not in self._fitting:
            logger.warning("stage %d may not fit: %s", wanted, self._shortage(wanted))
        return wanted

    @contextlib.asynccontextmanager
    async def arriving(self, stage: int) -> AsyncGenerator[None]:
        """Announce this node at `stage` while the block builds a replica of it and loads its state."""
        self.stage = stage
        async with self.arrival.announced(stage):
            yield

    @contextlib.asynccontextmanager
    async def resting(self, stage: int) -> AsyncGenerator[None]:
        """Announce this node as paused at `stage` while the block runs; meanwhile it gives nobody a copy."""
        self.copies.gives = False
        self.copies.let_go()
        try:
            async with self.arrival.announced(stage, PeerState.DRAINING):
                yield
        finally:
            self.copies.gives = True

    async def look_again(self, membership: Membership) -> None:
        """The directory again, with the stage at hand; a later stay looks anew."""
        await membership.look_for_others(self._patience())
        self._looked_in_vain = False
        self.met_under_way |= _is_under_way(membership.others_there(*SERVING))

    @property
    def over(self) -> bool | None:
        """Whether the run is over; None where this node cannot know, since it does not train. Those that come home
        together would else outvote the seed that knows of the end."""
        trains = self._replica is not None and self._replica.membership.state is PeerState.TRAINING
        return not trains and (bool(self.signed.known) or None)

    @property
    def moving(self) -> Move | None:
        """What brought this node to its stage from another one; None for its first."""
        return None if self._came_from is None else self._came_from[1]

    async def give_up_move(self) -> None:
        """Where a move was under way: nobody must wait for this node at its new stage any more."""
        if self.move is not None:
            await self.arrival.withdraw(self.move.stage)
            self.move = None

    async def back(self) -> int:
        """The stage that this node left for one whose state nobody gave it. Its announcement there is withdrawn, so
        that no peer waits for it."""
        await self.arrival.withdraw(self.stage)
        assert self._came_from is not None
        stage, _ = self._came_from
        self._came_from = None
        return stage

    def arrived(self, replica: Replica, origin: BeginsFrom) -> NodeReassigned | None:
        """The event of a move that has come to its end; None where the replica is this node's first."""
        if self._came_from is None:
            return None
        (left, move), self._came_from = self._came_from, None
        return NodeReassigned(
            from_stage=left,
            stage=replica.stage,
            why=move.why,
            origin=origin,
            clock=replica.worker.progress.clock,
            outer_steps_taken=replica.worker.progress.outer_rounds,
            parameters=self._footprint.parameters[replica.stage],
            flop_per_token=self.flop_per_token(replica.stage),
            seconds=ambient.monotonic() - self._began,
        )

    def flop_per_token(self, stage: int) -> float:
        """Work for a token at `stage`, forward and backward."""
        return self._footprint.flop_per_token[stage]

    def departs(self) -> int:
        """The stage that `move` names; the stay at the present one is over."""
        assert self.move is not None
        self.copies.let_go()
        self._came_from = self.stage, self.move
        stage, self.move = self.move.stage, None
        return stage

    async def accompany(self, replica: Replica) -> None:
        """Beside the training: keep and give copies, and set `move` and the replica's `stop` when it is time to go."""
        replica.course.hand_over = self.copies.hand_over
        keep = self.copies.keep(replica.membership, replica.worker, replica.donor.rate.take)
        self._replica = replica
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(keep)
                if self._settings.moves:
                    group.create_task(self._watch(replica))
        finally:
            self._replica = None
            self.near = replica.end.look().near
            self.met_under_way |= replica.end.begun

    async def _watch(self, replica: Replica) -> None:
        work = self._footprint.work
        standing = MigrationStanding(
            work, self._fitting, ambient.monotonic(), self._settings.min_stay_seconds, self._spec.limits.record_seconds
        )
        relocation, began = Relocation(standing, self._rng), replica.worker.progress.clock
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            if replica.stop.is_set() or not replica.course.run_goes_on():
                continue
            view, shut = self._directory.view, self._shut(replica)
            seen = servers_of(view, work, self._directory.now(), self._known, without=self._own)
            members, clock = replica.membership, replica.worker.progress.clock
            least = clock - self._spec.max_lag_tokens
            many, there = members.live_replicas(), members.live(replica.stage)
            clocks = {PeerId(record.peer_id): members.present_clock(record, many) for record in there}
            fellows = as_far_trained(members.counted_stage_peers(), clocks, least)
            others = as_seen_at_work(seen, replica.stage, fellows, shut=shut)
            strength = replica.capacity * work[replica.stage] or usual_strength(others)
            here = Server(self._own, replica.stage, strength, standby_of=self.copies.standby_of)
            now = ambient.monotonic()  # how long a stage has been empty is not told by a clock that somebody may set
            move = relocation.look(now, here, others, shut=bool(shut))
            short = standing.cut_short(now, began, clock, self._spec.inner.target_tokens)
            if move is None or (move.why == "poor" and short):
                continue
            if not await self.arrival.confirmed(move.stage, work, partial(relocation.still_worth, move, here)):
                continue
            if replica.stop.is_set() or not replica.course.run_goes_on():
                await self.arrival.withdraw(move.stage)  # meanwhile it was told to leave, or the run has ended
                continue
            for peer in shut if move.why == "lost" else ():
                self._known.let_down(peer)
            logger.warning("leaving stage %d for stage %d, which %s", replica.stage, move.stage, _why(move))
            self.move, self._began = move, ambient.monotonic()
            replica.stop.set()

    def _shut(self, replica: Replica) -> list[PeerId]:
        """Peers that answer at the next stage, where nothing gets through to it and a working stage peer stays."""
        members = replica.membership
        if not replica.pipeline.next_stage_shut or not any(map(self._known.has_worked, members.counted_stage_peers())):
            return []
        return [PeerId(record.peer_id) for record in members.there(replica.stage + 1, *SERVING)]

    def _shortage(self, stage: int) -> str:
        free = free_memory(self._settings.device)
        return f"it needs {self._needs[stage].total(own_memory=free.device > 0)}; free are {free}"

    def _too_small(self) -> UserError:
        parameters = self._footprint.parameters
        smallest = min(range(len(parameters)), key=lambda stage: parameters[stage])
        return UserError(
            ExitCode.CONFIG,
            f"no stage of this run fits node.device '{self._settings.device}': the smallest is stage {smallest}, and "
            f"{self._shortage(smallest)}",
            "end other programs, use a machine with more memory, or name a stage with --stage to try it all the same",
        )


async def stays_of(spec: RunSpec, settings: NodeSettings, transport: Transport, directory: Directory) -> StageLifecycle:
    """Count the run's stages, off the event loop, and prepare for the first stay."""
    footprint = await ambient.elsewhere(footprint_of, spec)
    return StageLifecycle(spec, settings, footprint, transport, directory)


def _is_under_way(answering: Iterable[PeerRecord]) -> bool:
    return any(record.outer_steps_taken > 0 and record.state in SERVING for record in answering)


def _why(move: Move) -> str:
    return "nobody serves any more" if move.why == "lost" else "has too little throughput for its work"
