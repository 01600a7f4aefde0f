"""One replica of one stage in the swarm, on any transport: the daemon runs it over libp2p, tests also in memory.

Its life: copy a stage peer's state if the swarm is past its first outer step, and advertise. It trains and averages
until the clock reaches the target (stage 0) or the origins of most of its work have finished (`EndOfRun`). A last outer
step follows, and it leaves.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable

from noloco_node import ambient
from noloco_node.accounting.stats import Activity, NodeStats, doing, facts_of
from noloco_node.aio import Pulse, cancel_and_wait
from noloco_node.averaging.step import Averaging
from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import RunSpec
from noloco_node.data.samples import Samples
from noloco_node.directory.clocks import FarBehind, PeerClocks
from noloco_node.directory.health_checks import HealthChecks
from noloco_node.directory.membership import Membership, OwnFigures
from noloco_node.directory.records import FIRST_LOOK_SECONDS, MOST_SHOWN, Directory, OwnWord, PeerState
from noloco_node.directory.records_call import serve_records
from noloco_node.directory.shared_text import SharedText
from noloco_node.directory.signed_end import SignedEnd
from noloco_node.identity.addresses import peers_at
from noloco_node.identity.peer_id import PeerId
from noloco_node.node.course import ReplicaCourse
from noloco_node.node.outer_steps import OuterSteps
from noloco_node.participant import Participant, ReplicaContext
from noloco_node.pipeline.messages import Ledger
from noloco_node.pipeline.participant import Pipeline
from noloco_node.state_transfer.donor import StateDonor, nobody_relayed
from noloco_node.state_transfer.donor_choice import StateCopier
from noloco_node.telemetry.events import AnyEvent, InnerStep
from noloco_node.telemetry.node_state import NodeView
from noloco_node.training.compute_thread import Compute
from noloco_node.training.placing import PlacedStage
from noloco_node.training.progress import Capacity, Pace
from noloco_node.training.stage_worker import InnerReport, StageWorker
from noloco_node.transport.interface import Transport, Withdraw
from noloco_node.trust.screened_directory import ScreenedDirectory


class Neighbourhood(Participant):
    """`describe` gives the figures for this replica's record; `on_change` is called after every look."""

    def __init__(
        self,
        context: ReplicaContext,
        directory: Directory,
        samples: Samples | None,
        describe: Callable[[], OwnFigures],
        on_change: Callable[[], None],
    ) -> None:
        self._context = context
        self._directory = directory
        spec, transport, life = context.spec, context.transport, context.spec.limits.record_seconds
        shared = None if samples is None else samples.shared
        text = shared and SharedText(shared, directory, context.emit)
        self.membership = Membership(
            ScreenedDirectory(directory, transport.conduct),
            transport.peer_stats,
            transport.peer_id,
            context.stage,
            spec.stages,
            life,
            describe,
            on_change,
            self._ask_all,
            text,
        )
        self.checks = HealthChecks(
            transport,
            directory,
            spec.run_id,
            lambda: context.stage,
            life,
            self.membership.others,
            on_change,
            random.Random(f"roll/{context.settings.seed}/{transport.peer_id}"),
            entrances=peers_at(context.settings.initial_peers),
        )

    async def _ask_all(self) -> None:
        """Before it serves; from then on the health check asks by itself."""
        await self.checks.sweep(FIRST_LOOK_SECONDS)

    def serve(self) -> tuple[Withdraw, ...]:
        """Tell records to peers that ask, at once: a joiner asks before anybody trains."""
        context = self._context
        return (serve_records(context.transport, context.spec.run_id, self._directory, lambda: context.stage),)

    async def run(self) -> None:
        """Announce this replica, read the directory, check on peers."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.membership.run())
            group.create_task(self.checks.run())


logger = logging.getLogger(__name__)


class Replica:
    """The participants of one replica and the order in which they live. `emit` receives every event."""

    def __init__(
        self,
        spec: RunSpec,
        settings: NodeSettings,
        placed: PlacedStage,
        transport: Transport,
        directory: Directory,
        thread: Compute,
        *,
        samples: Samples | None,
        emit: Callable[[AnyEvent], None],
        ledger: Ledger | None = None,
        standby_of: Callable[[], int | None] = lambda: None,
        relayed: Callable[[PeerId], Awaitable[bool]] = nobody_relayed,
        signed: SignedEnd | None = None,
    ) -> None:
        stage = placed.stage
        self.vocab_size = stage.vocab_size
        self.full_names = stage.full_names()
        """Parameter name of the stage -> name in the whole model."""
        self._loop = asyncio.get_running_loop()
        self.worker = StageWorker(spec, placed.trainer, placed.outer, thread, self._inner_step_taken)
        self._view = NodeView()
        self._emit = emit
        rng = random.Random(f"{settings.seed}/{transport.peer_id}")
        self.context = context = ReplicaContext(
            spec, settings, stage.cut, transport, self.worker, rng, Pulse(), self._tell
        )
        transport.peer_stats.book.begin_stage()
        self._pace, self._capacity = Pace(), Capacity()
        self.standby_of = standby_of
        self.activity = Activity(emit)
        self._neighbourhood = Neighbourhood(context, directory, samples, self._describe, self._directory_read)
        self.membership = self._neighbourhood.membership
        self._clocks = self._make_clocks()
        self._behind = FarBehind(self._clocks)
        self.pipeline = Pipeline(context, stage, samples, ledger or Ledger(), self._behind)
        self.averaging = Averaging(context, self._clocks)
        self.donor = StateDonor(context, relayed)
        self.copier = StateCopier(context, self._clocks.not_beyond)
        self._served: list[Withdraw] = []
        self.participants = (self._neighbourhood, self.pipeline, self.averaging, self.donor)
        self.outer_steps = OuterSteps(context, self.membership, self.averaging, self.copier, self._pace, self._behind)
        self.signed = signed or SignedEnd(transport, directory, spec, peers_at(settings.initial_peers))
        self.course = course = ReplicaCourse(
            context, self.membership, self.pipeline, self.averaging, samples, self.signed
        )
        self.end, self.missing = course.end, course.missing
        self.books = NodeStats(context, self.membership, self.pipeline, self.missing)
        transport.conduct.on_ban = lambda _: self._directory_read()
        self._rests: str | None = None
        self.rested = False
        """It has left its work for a rest (`rest`)."""
        self.on_leaving: Callable[[], None] = lambda: None
        """Called when it has lived through the run, or fails: all that follows is its end."""

    def _tell(self, event: AnyEvent) -> None:
        self._view.observe(event)
        self._emit(event)

    def _make_clocks(self) -> PeerClocks:
        return PeerClocks(
            self.context.spec.max_lag_tokens,
            own=lambda: self.worker.progress.clock,
            estimated=self.membership.stage_peer_clocks,
            recorded=self.membership.recorded_clocks,
            origins_lead=self._origins_lead,
        )

    @property
    def stage(self) -> int:
        return self.context.stage

    @property
    def stop(self) -> asyncio.Event:
        """Set it, and the replica leaves in order."""
        return self.course.stop

    @property
    def rests(self) -> bool:
        return self._rests is not None

    def rest(self, why: str) -> None:
        """Leave for a while, within two seconds; others are told that it is paused, and the user `why`."""
        self._rests = why
        self.stop.set()

    def begins_late(self) -> None:
        """The run has begun, though nothing was trained here yet."""
        self.end.came_late = True

    def begins_as_copy(self) -> None:
        """Its state is a stage peer's: it begins on probation, and the run has begun."""
        self.begins_late()
        self.averaging.standing.begin(self.worker.progress.steps)

    def serve(self) -> None:
        """Register all methods with the transport; nothing is accepted before `run`."""
        self._served = [withdraw for participant in self.participants for withdraw in participant.serve()]

    def close(self) -> None:
        """Take back what `serve` registered, and let go of the stage, so that another replica can take this one's
        place. Two stages may be more than the memory holds."""
        self.context.transport.conduct.on_ban = None
        for withdraw in self._served:
            withdraw()
        for participant in reversed(self.participants):
            participant.close()
        self.worker.let_go()

    async def run(self) -> None:
        """Train to the run's end, or until `stop` is set; then leave in order."""
        for participant in self.participants:
            participant.open()
        self.books.write()
        async with asyncio.TaskGroup() as group:
            await self.membership.announce(PeerState.TRAINING)
            lives = [*self.participants, self.outer_steps]
            background = [group.create_task(life.run()) for life in lives]
            background += [group.create_task(self._keep_account()), group.create_task(self.books.lag.measure())]
            try:
                await self._live_through_the_run(group)
            finally:
                self.on_leaving()
            self.books.write()
            for participant in self.participants:
                participant.shut()
            await cancel_and_wait(background)
            if self._rests is not None and self.rested:
                self.activity.say("paused", self._rests)
        await self.membership.announce(PeerState.DRAINING if self.rested else PeerState.GONE)

    async def _live_through_the_run(self, group: asyncio.TaskGroup) -> None:
        """Train, wait for the others, average a last time; cut short by `stop`."""
        course = group.create_task(self.course.go())
        stopped = group.create_task(self.stop.wait())
        await asyncio.wait((course, stopped), return_when=asyncio.FIRST_COMPLETED)
        if self.stop.is_set():
            await self._drain(course, group)
        stopped.cancel()

    async def _drain(self, course: asyncio.Task[None], group: asyncio.TaskGroup) -> None:
        """Told to stop: draw nothing new, refuse new work, finish what is under way within the configured time."""
        for participant in self.participants:
            participant.drain()
        seconds = self.context.settings.drain_seconds
        if self._rests is not None:
            # Device and line are to be free within two seconds.
            self.rested, seconds = True, min(seconds, 1.0)
        group.create_task(self.membership.announce(PeerState.DRAINING))  # peers that do not answer must not delay it
        try:
            async with asyncio.timeout(seconds):
                while any(participant.under_way for participant in self.participants):
                    await self.context.moved.wait(0.1)
        except TimeoutError:
            logger.info("the time to finish is over; microbatches that are unfinished: %d", self.pipeline.in_hand)
            for participant in self.participants:
                participant.hand_back()
        await cancel_and_wait((course,))

    async def _keep_account(self) -> None:
        while True:
            await asyncio.sleep(2.0)
            self.books.write()
            self.donor.tend()
            idle = self.activity.idle_seconds(self.worker.last_trained.at)
            pace, in_hand, missing = self._pace.step_seconds, self.pipeline.in_hand, self.missing.stages
            self.activity.say(*doing(facts_of(self.membership, idle, pace, in_hand, missing)))

    @property
    def capacity(self) -> float:
        """Tokens per second that this replica could train if it never had to wait; 0 before it is known."""
        return self._capacity.look(self.worker.progress.tokens, self.worker.busy_seconds)

    def _describe(self) -> OwnFigures:
        """What the directory record says of this replica."""
        progress, speed = self.worker.progress, self._pace.tokens_per_second
        return OwnFigures(
            clock=progress.clock,
            tokens_per_second=speed,
            outer_rounds=progress.outer_rounds,
            capacity=self.capacity,
            standby_of=self.standby_of(),
            steps=progress.steps,
            newcomer=self.averaging.standing.newcomer,
            shown=_shown(self._view, self.context.settings.name, progress.tokens, paused=self.rested),
        )

    def _origins_lead(self) -> float | None:
        """The lead of the origins as of now: what was heard before the clock's last shift would add that to it."""
        lead = self.pipeline.server.origins_seen.lead(self.worker.shifted_at)
        return self.worker.origins_lead if lead is None else lead

    def _directory_read(self) -> None:
        """Take over the new view: routes, the share of the batch, and everyone's waits."""
        membership, progress = self.membership, self.worker.progress
        self._neighbourhood.checks.look()
        self._behind.look()
        self.pipeline.balancer.update(membership.next_stage_peers(), membership.own_rank())
        self.worker.live_replicas = membership.live_replicas()
        self.averaging.standing.look(membership.stage_peers(), progress.steps, outer_rounds=progress.outer_rounds)
        self.course.look()
        self.context.moved.fire()

    def _inner_step_taken(self, report: InnerReport) -> None:
        """Called on the compute thread."""
        self._loop.call_soon_threadsafe(self._report_inner_step, report)

    def _report_inner_step(self, report: InnerReport) -> None:
        result, steps = report.result, report.progress.steps
        self.worker.origins_lead = self.pipeline.server.origins_seen.lead(self.worker.copied_at)
        self._pace.step(result.tokens, ambient.monotonic())
        self.averaging.standing.loss.add(result.loss, result.tokens)
        self.averaging.standing.met(None, steps)
        self.context.emit(
            InnerStep(
                step=steps,
                clock=report.progress.clock,
                tokens=result.tokens,
                loss=result.loss,
                learning_rate=report.learning_rate,
                gradient_norm=result.gradient_norm,
                skipped=result.skipped,
                live_replicas=report.live_replicas,
            )
        )
        self.context.moved.fire()


def _shown(view: NodeView, name: str, tokens: int, *, paused: bool) -> OwnWord:
    state = view.state()
    return OwnWord(
        name=name,
        tokens=tokens,
        training_loss=_in_record(state.training_loss),
        validation_loss=_in_record(state.validation_loss),
        replica_divergence=_in_record(state.replica_divergence),
        paused=paused,
    )


def _in_record(value: float | None) -> float | None:
    """A loss or a spread in as few digits as a screen shows; None for what is no number."""
    return None if value is None or not 0.0 <= value <= MOST_SHOWN else float(f"{value:.5g}")
