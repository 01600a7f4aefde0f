"""One replica of one stage in the swarm, on any transport: the daemon runs it over libp2p, tests also in memory.

Its life: copy a fellow's state if the swarm is past its first outer round; advertise; train and average until the
clock reaches the target (stage 0) or nobody trains any more (later stages); a last outer step; leave.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Collection

from noloco_node import ambient
from noloco_node.accounting.activity import Watch, doing, facts_of
from noloco_node.accounting.stats import Books
from noloco_node.aio import Pulse
from noloco_node.averaging.exchange import Exchanger
from noloco_node.averaging.probation import Standing
from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import RunSpec
from noloco_node.data.samples import Position, Samples
from noloco_node.directory.membership import Membership, OwnFigures
from noloco_node.directory.peer_clocks import FarBehind, FellowClocks
from noloco_node.directory.records import Directory, PeerState
from noloco_node.directory.records_call import serve_records
from noloco_node.directory.roll_call import SWEEP_SECONDS, RollCall
from noloco_node.directory.shared_text import SharedText
from noloco_node.identity.addresses import peers_at
from noloco_node.identity.peer_id import PeerId
from noloco_node.model.stage import Stage
from noloco_node.node.first_state import FirstState
from noloco_node.node.outer_steps import OuterSteps
from noloco_node.pipeline.blockage import patience
from noloco_node.pipeline.evaluation import Evaluations
from noloco_node.pipeline.inference import InferenceServer
from noloco_node.pipeline.messages import Ledger, Sample
from noloco_node.pipeline.passing import Downstream, PipelineServer
from noloco_node.pipeline.routing import RoutingBook
from noloco_node.pipeline.source import Origin
from noloco_node.placement.run_end import EndOfRun
from noloco_node.placement.start_barrier import CommonStart, MissingStages
from noloco_node.state_transfer.donor import StateDonor, nobody_relayed
from noloco_node.state_transfer.donor_choice import StateCopier
from noloco_node.telemetry.events import AnyEvent, InnerStep
from noloco_node.training.compute_thread import Compute
from noloco_node.training.pace import Capacity, Pace
from noloco_node.training.progress import Progress
from noloco_node.training.stage_worker import InnerReport, PlacedStage, StageWorker
from noloco_node.transport.interface import Transport
from noloco_node.trust.filtered_directory import ScreenedDirectory

logger = logging.getLogger(__name__)

ACCOUNT_SECONDS = 2.0
DRAIN_LOOK_SECONDS = 0.1
LAST_LOOK_SECONDS = 0.3


class Replica:
    """The parts of one replica and the order in which they live. `emit` receives every event."""

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
        guards: Callable[[], int | None] = lambda: None,
        relayed: Callable[[PeerId], Awaitable[bool]] = nobody_relayed,
    ) -> None:
        stage = placed.stage
        assert (samples is not None) == stage.cut.is_first, "stage 0, and only it, has the text"
        self.spec = spec
        self.cut = stage.cut
        self.stage = stage.cut.index
        self.vocab_size = stage.vocab_size
        self.full_names = stage.full_names()
        """Parameter name of the stage -> name in the whole model."""
        self._settings = settings
        self._transport = transport
        self._directory = directory
        self._samples = samples
        self._emit = emit
        self._loop = asyncio.get_running_loop()
        self._rng = random.Random(f"{settings.seed}/{transport.peer_id}")
        self._moved = Pulse()
        self.ledger = ledger or Ledger()
        self.worker = StageWorker(spec, placed.trainer, placed.outer, thread, self._inner_step_taken)
        self.membership = self._make_membership(directory)
        if samples is not None and samples.shared is not None:
            own, life = transport.peer_id, spec.limits.record_seconds
            self.membership.text = SharedText(samples.shared, directory, own, life, emit)
        self._roll = self._make_roll(directory)
        self._book = RoutingBook(spec.pipeline.routing, self._rng, ambient.monotonic)
        self._downstream = (
            None
            if stage.cut.is_last
            else Downstream(spec, self.stage, transport, self._book, self.ledger, self._rng, stage.router)
        )
        self.standing = Standing(
            spec.outer.inner_steps, lambda reason, steps: self.outer_steps.probation_ended(reason, steps)
        )
        self.server = self._make_server(stage)
        self.inference = InferenceServer(
            spec, stage.cut, stage.hidden_size, stage.vocab_size, self.worker, settings.generate_share
        )
        self._clocks = FellowClocks(
            spec.max_lag_tokens,
            own=lambda: self.worker.progress.clock,
            estimated=self.membership.fellow_clocks,
            recorded=self.membership.recorded_clocks,
            origins_lead=self._origins_lead,
        )
        self.exchanger = self._make_exchanger()
        self.donor = StateDonor(spec, self.stage, transport, self.worker, places=settings.donor_places, relayed=relayed)
        self._copier = self._make_copier()
        self._pace = Pace()
        self.outer_steps = self._make_outer_steps()
        self._behind = self.server.behind = self.inference.behind = FarBehind(self._clocks)
        self.outer_steps.behind = self._behind
        self.origin = self._make_origin(samples) if samples else None
        self.stop = asyncio.Event()
        self._capacity = Capacity(self.worker.busy_seconds)
        self._guards = guards
        self.missing = MissingStages()
        self._start = CommonStart(settings.start_replicas)
        self.membership.eager = self.origin is not None and settings.start_replicas > 1
        self._watch = Watch(emit)
        self._first_state = self._make_first_state()
        self.books = self._make_books()
        self._end = self._make_end()
        self._over = False
        """An origin has found the run to be over before its own clock was at the target."""
        transport.conduct.on_ban = lambda _: self._directory_read()

    def heed_relays(self, relayed: Callable[[], Collection[PeerId]]) -> None:
        """Peers that are connected through relays only, as of now: others are preferred for work and for averages."""
        self._book.relayed = self.outer_steps.relayed = relayed

    def _make_membership(self, directory: Directory) -> Membership:
        return Membership(
            ScreenedDirectory(directory, self._transport.conduct),
            self._transport.acquaintances,
            self._transport.peer_id,
            self.stage,
            self.spec.stages,
            self.spec.limits.record_seconds,
            self._describe,
            self._directory_read,
            self._ask_all,
        )

    async def _ask_all(self) -> None:
        """Before it serves; from then on the roll call asks by itself."""
        await self._roll.sweep(SWEEP_SECONDS)

    def _make_roll(self, directory: Directory) -> RollCall:
        return RollCall(
            self._transport,
            directory,
            self.spec.run_id,
            lambda: self.stage,
            self.spec.limits.record_seconds,
            self.membership.introduced,
            self._directory_read,
            random.Random(f"roll/{self._settings.seed}/{self._transport.peer_id}"),
            entrances=peers_at(self._settings.initial_peers),
        )

    def _make_server(self, stage: Stage) -> PipelineServer:
        return PipelineServer(
            self.spec,
            self.stage,
            stage.hidden_size,
            stage.vocab_size,
            self.worker,
            self._downstream,
            self.ledger,
            self._settings.max_pending,
            self._transport.acquaintances,
        )

    def _make_exchanger(self) -> Exchanger:
        return Exchanger(
            self.spec,
            self.stage,
            self._transport,
            self.worker,
            streams=self._settings.exchange_streams,
            clocks=self._clocks,
            standing=self.standing,
            on_outer_step=lambda event: self.outer_steps.taken(event),
            moved=self._moved,
        )

    def _make_copier(self) -> StateCopier:
        return StateCopier(
            self.spec,
            self.stage,
            self._transport,
            self.worker,
            streams=self._settings.exchange_streams,
            believe=self._clocks.not_beyond,
            emit=self._emit,
            rng=self._rng,
        )

    def _make_outer_steps(self) -> OuterSteps:
        return OuterSteps(
            self._transport,
            self.worker,
            self.membership,
            self.standing,
            self.exchanger,
            self._copier,
            self._pace,
            rng=self._rng,
            moved=self._moved,
            emit=self._emit,
        )

    def _make_first_state(self) -> FirstState:
        return FirstState(
            self.spec,
            self.stage,
            self._transport.peer_id,
            self.membership,
            self._copier,
            self._watch,
            entrances=peers_at(self._settings.initial_peers),
        )

    def _make_origin(self, samples: Samples) -> Origin:
        return Origin(self.spec, self.worker, self._downstream, self.ledger, samples, self._rng)

    def _make_end(self) -> EndOfRun:
        return EndOfRun(
            self._transport.peer_id,
            self.membership,
            self._transport.acquaintances,
            self.server.origins_seen if self.stage > 0 else None,
            clock=lambda: self.worker.progress.clock,
            last_trained=lambda: self.worker.last_trained.at,
            held_up=lambda: bool(self.missing.stages),
            target=self.spec.inner.target_tokens,
            max_lag=self.spec.max_lag_tokens,
            grace=self.spec.limits.grace_seconds,
        )

    def _make_books(self) -> Books:
        return Books(
            self.spec,
            self._transport,
            self.membership,
            self.worker,
            self.server,
            self.ledger,
            self.missing,
            self._downstream,
            self._book,
            origin=self.origin,
            emit=self._emit,
        )

    @property
    def rng(self) -> random.Random:
        """Draws routes and partners."""
        return self._rng

    @property
    def moved(self) -> Pulse:
        """Fires whenever something has changed: a step, an exchange, the directory."""
        return self._moved

    def walk_position(self) -> Position:
        """Where the next sample comes from, also on a later stage: this node may return to stage 0."""
        return self._samples.position() if self._samples else self.ledger.walk

    @property
    def held_samples(self) -> list[Sample]:
        """Samples drawn and neither trained nor dropped; on a later stage those from this node's time at stage 0."""
        return self.origin.held_samples if self.origin else list(self.ledger.waiting)

    async def look_around(self, seconds: float) -> None:
        """Read the directory until it shows another node, `seconds` at most."""
        self._watch.say("joining", "looking for the nodes of the run")
        await self.membership.look_for_others(seconds)

    async def become_current(self, own_clock: float | None = None) -> PeerId | None:
        """Begin where `where_to_begin` says, on probation with a fellow's state; the donor, or None where the weights
        stand: those of the own checkpoint, if `own_clock` is given, else the first ones. Raises UserError (NO_DONOR)
        where a fellow's state is needed and nobody gave it."""
        donor = await self._first_state.take(own_clock)
        if donor is not None:
            self._end.copied = True
            self.outer_steps.begin_on_probation()
        return donor

    def progress(self) -> Progress:
        """Where it stands now."""
        return self.worker.progress

    def serve(self) -> None:
        """Register all methods with the transport; nothing is accepted before `run`."""
        if self.stage > 0:
            self.server.serve(self._transport)
        self.inference.serve(self._transport)
        self.exchanger.serve()
        self.donor.serve()
        serve_records(self._transport, self.spec.run_id, self._directory, lambda: self.stage)

    def close(self) -> None:
        """Take back what `serve` and its receipts registered, and let go of the stage, so that another replica can take
        this one's place: two stages may be more than the memory holds."""
        self.ledger.walk = self.walk_position()
        self._transport.conduct.on_ban = None
        self._transport.withdraw("microbatch", "inference", "outer", "state", "contribution", "records")
        self.donor.let_go()
        self.worker.let_go()

    async def run(self) -> None:
        """Train to the run's end, or until `stop` is set; then leave in order."""
        self.server.accepting = self.inference.accepting = True
        self.exchanger.accepting = self.donor.accepting = True
        self.books.write()
        async with asyncio.TaskGroup() as group:
            await self.membership.announce(PeerState.TRAINING)
            background = [
                group.create_task(coroutine)
                for coroutine in (
                    self.membership.run(),
                    self._roll.run(),
                    self.exchanger.run(),
                    self.outer_steps.run(),
                    self._keep_account(),
                    self.books.lag.measure(),
                    *([self._downstream.auditor.run()] if self._downstream else []),
                )
            ]
            await self._live_through_the_run(group)
            self.books.write()
            self.server.accepting = self.inference.accepting = False
            self.exchanger.accepting = self.donor.accepting = False
            for task in background:
                task.cancel()
        await self.membership.announce(PeerState.GONE)

    async def _live_through_the_run(self, group: asyncio.TaskGroup) -> None:
        """Train, wait for the others, average a last time; cut short by `stop`."""
        course = group.create_task(self._course())
        stopped = group.create_task(self.stop.wait())
        await asyncio.wait((course, stopped), return_when=asyncio.FIRST_COMPLETED)
        if self.stop.is_set():
            await self._drain(course)
        stopped.cancel()

    async def _drain(self, course: asyncio.Task[None]) -> None:
        """Told to stop: draw nothing new, refuse new work, finish what is under way within the configured time."""
        self.server.accepting = self.inference.accepting = self.exchanger.accepting = False
        await self.membership.announce(PeerState.DRAINING)
        try:
            async with asyncio.timeout(self._settings.drain_seconds):
                while self.server.pending or (self.origin and self.origin.under_way) or self.exchanger.engaged:
                    await self._moved.wait(DRAIN_LOOK_SECONDS)
        except TimeoutError:
            logger.info("the time to finish is over: %d microbatches go back to their senders", self.server.pending)
            self.server.hand_back()
        course.cancel()
        await asyncio.wait((course,))

    async def _course(self) -> None:
        """To the run's end. Told to stop, it ends without a word: who only leaves must not tell the others that the run
        is over."""
        if self.origin is not None and self._samples is not None:
            every = self.spec.evaluation.every_tokens
            evaluations = Evaluations(self.origin, self._samples, self.worker, every, self._emit)
            await self._train(self.origin, evaluations)
            if self.stop.is_set():
                return
            if not self._over:
                await evaluations.last()
                await self.membership.announce(PeerState.FINISHING)
        if not self._over:
            await self._end.wait(self.stop, self._moved)
        if not self.stop.is_set():
            await self._last_outer_step()

    def run_goes_on(self) -> bool:
        """False once this replica leaves or the origins do: stages that empty at the run's end are not lost."""
        return self.membership.state is PeerState.TRAINING and not self._end.in_sight()

    async def _train(self, origin: Origin, evaluations: Evaluations) -> None:
        """Until the clock is at the target, or the run turns out to be over without this node."""
        async with asyncio.TaskGroup() as group:
            evaluating = group.create_task(evaluations.now_and_then(self._moved, self._way_is_open))
            watching = group.create_task(self._until_over())
            await origin.run(self._settings.in_flight, self._training_goes_on, self._way_is_open)
            evaluating.cancel()
            watching.cancel()

    async def _until_over(self) -> None:
        await self._end.wait(self.stop, self._moved)
        if not self.stop.is_set():
            logger.warning("the run is over: nothing was trained here any more while others came to its end")
            self._over = True
            self._moved.fire()

    async def _way_is_open(self) -> None:
        """Return once every other stage has a replica and the run has begun, or the training is over."""
        while not self._may_draw() and self._training_goes_on():
            await self._moved.wait()

    def _may_draw(self) -> bool:
        if self.missing.stages or not self.missing.looked:
            return False
        if self.membership.eager:  # asked before every sample: the records are looked at only until the run has begun
            up, furthest = self.membership.replicas_per_stage(), self.membership.furthest_clock()
            furthest, now = max(self.worker.progress.clock, furthest), self._loop.time()
            self.membership.eager = not self._start.over(up, furthest, now)
        return not self.membership.eager

    def _training_goes_on(self) -> bool:
        reached = self.worker.progress.clock >= self.spec.inner.target_tokens
        return not (reached or self._over or self.stop.is_set())

    async def _last_outer_step(self) -> None:
        """Average once more with whoever is still there, and stay for fellows that have not had theirs."""
        self.exchanger.last_round = True
        await self.membership.announce(PeerState.FINISHING)
        self._moved.fire()
        try:
            async with asyncio.timeout(self.spec.limits.grace_seconds):
                while not self.outer_steps.last_taken:
                    await self._moved.wait()
                await self.membership.announce(PeerState.DRAINING)
                while self.membership.fellows(PeerState.TRAINING, PeerState.FINISHING) or self.exchanger.engaged:
                    await self.membership.refresh()
                    await self._moved.wait(LAST_LOOK_SECONDS)
        except TimeoutError:
            logger.info("the grace time is over: leaving with %d fellows still there", len(self.membership.fellows()))
        if not self.outer_steps.last_taken and not self.exchanger.engaged:
            await self.exchanger.step_alone()

    async def _keep_account(self) -> None:
        while True:
            await asyncio.sleep(ACCOUNT_SECONDS)
            self.books.write()
            self.donor.tend()
            idle = self._watch.idle_seconds(self.worker.last_trained.at)
            self._watch.say(*doing(facts_of(self.membership, idle, self._pace.step_seconds, self.books.in_hand)))

    @property
    def next_stage_shut(self) -> bool:
        """Whether nothing that this replica sends gets through to its next stage, for long enough to call it lost."""
        if self._downstream is None:
            return False
        behind = self.spec.stages - self.stage - 2
        seconds = patience(self.spec.limits.record_seconds, self.spec.pipeline.budget_seconds, behind)
        return self._downstream.blockage.lasts(seconds)

    @property
    def capacity(self) -> float:
        """Tokens per second that this replica could train if it never had to wait; 0 before it is known."""
        return self._capacity.look(self.worker.progress.tokens, self.worker.busy_seconds)

    def _describe(self) -> OwnFigures:
        """What the directory record says of this replica."""
        progress, speed = self.worker.progress, self._pace.tokens_per_second
        return OwnFigures(progress.clock, speed, progress.outer_rounds, self.capacity, self._guards(), progress.steps)

    def _origins_lead(self) -> float | None:
        """As of now: what was heard before the clock was last shifted would add the shift to it."""
        lead = self.server.origins_seen.lead(self.worker.shifted_at)
        return self.worker.origins_lead if lead is None else lead

    def _directory_read(self) -> None:
        """Take over who is there: routes, the share of the batch, and everyone's waits."""
        self._roll.look()
        self._behind.look()
        self._book.update(self.membership.next_stage_peers(), self.membership.own_rank())
        self.worker.live_replicas = self.membership.live_replicas()
        progress = self.worker.progress
        self.standing.look(self.membership.fellows(), progress.steps, outer_rounds=progress.outer_rounds)
        if self.run_goes_on():
            self.missing.look(self.membership.unserved(), self.spec.stages)
        self._moved.fire()

    def _inner_step_taken(self, report: InnerReport) -> None:
        """Called on the compute thread."""
        self._loop.call_soon_threadsafe(self._report_inner_step, report)

    def _report_inner_step(self, report: InnerReport) -> None:
        self.worker.origins_lead = self.server.origins_seen.lead(self.worker.copied_at)
        self._pace.step(report.result.tokens, ambient.monotonic())
        self.standing.loss.add(report.result.loss, report.result.tokens)
        self.standing.met(None, report.progress.steps)
        self._emit(
            InnerStep(
                step=report.progress.steps,
                clock=report.progress.clock,
                tokens=report.result.tokens,
                loss=report.result.loss,
                learning_rate=report.learning_rate,
                gradient_norm=report.result.gradient_norm,
                skipped=report.result.skipped,
                live_replicas=report.live_replicas,
            )
        )
        self._moved.fire()
