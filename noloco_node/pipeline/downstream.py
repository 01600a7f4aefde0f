"""A microbatch's way there and back.

Each hop has one owner. The sender keeps the activations until the gradient is back. On a refusal, a time-out or a
broken stream it picks another peer. `Downstream` is that owner, `PipelineServer` answers; `source.py` has its origin.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from noloco_node import ambient
from noloco_node.address_space import NoMemory
from noloco_node.aio import run_to_end
from noloco_node.config.run_spec import ActivationCodec, RunSpec
from noloco_node.directory.peer_clocks import FarBehind
from noloco_node.document_marks import positions_of, without_marks
from noloco_node.identity.peer_id import PeerId
from noloco_node.model.router import Router
from noloco_node.peers.latency import HANG_SECONDS, RequestOutcome
from noloco_node.peers.stats import PeerStats
from noloco_node.pipeline.audit import JURY, Auditor, share_of_a_hop
from noloco_node.pipeline.circuit_breaker import CircuitBreaker
from noloco_node.pipeline.ledger import MicrobatchName, Repeats, content_of
from noloco_node.pipeline.limiter import ASKS_TO_WAIT, MicrobatchLimiter
from noloco_node.pipeline.link_codecs import LinkCodecs, from_wire, to_wire
from noloco_node.pipeline.messages import (
    COME_BACK,
    MICROBATCH,
    NO_MEMORY,
    HopFailed,
    Ledger,
    MicrobatchAnswer,
    MicrobatchHeader,
    Outgoing,
    Trained,
    check_specs,
    decoded,
    given_up,
    labels_and_ids,
    passed_upward,
    read_answer,
)
from noloco_node.pipeline.routing import LoadBalancer
from noloco_node.pipeline.source_shares import SourceShares
from noloco_node.pipeline.work_rations import EvaluationRations, turn_of
from noloco_node.telemetry.metric_table import HOP_SECONDS, Meter
from noloco_node.training.activation_codec import carried_dtype
from noloco_node.training.compute_thread import DeviceWaits
from noloco_node.training.norm_bound import NormBound
from noloco_node.training.stage_worker import StageWorker
from noloco_node.training.trainer import ForwardContext, MicrobatchNotFinite
from noloco_node.transport.calls import Reply, ask, judging, on_tensors
from noloco_node.transport.errors import PeerUnreachable, Refusal, Refused, TransportError
from noloco_node.transport.headers import check_addressed
from noloco_node.transport.interface import Release, Transport, Withdraw
from noloco_node.transport.messages import TensorSpec
from noloco_node.transport.tensor_checks import all_finite, scale_of
from noloco_node.trust.sources_seen import OriginsSeen

logger = logging.getLogger(__name__)

BUDGET_SHARE_PASSED_ON = 0.9
"""Each hop gives the next one this share of its time, so that it can fail upward before its own time is over."""

MIN_BUDGET_MS = 50
BUSY_BACKOFF_SECONDS = (0.02, 0.2)
ROUNDS_TO_DESPAIR = 3
"""Every peer of good repute must refuse a microbatch in so many rounds before a peer on trial is asked for it."""
NOBODY_WARNING_SECONDS = 30.0
SCALE_MULTIPLE = 16.0
"""Activations are refused if their root mean square is this many times the usual one."""

_NOT_FOR_US = (Refusal.BANNED, Refusal.NOT_ADMITTED)
PASSED_UPWARD = (Refusal.OUT_OF_REACH, Refusal.DOWNSTREAM_EXHAUSTED, Refusal.BUDGET_SPENT)
"""A peer that gives one of these refusals says that others further on gave up."""


def outcome_of(refusal: Refused, took: float) -> RequestOutcome:
    """What a refusal that came after so many seconds says of its giver."""
    if refusal.reason is Refusal.BUSY and took < HANG_SECONDS:
        return RequestOutcome.UNTOLD
    # A request may have waited behind others on this node's own link: every peer is late then, and none beside others.
    excused = refusal.reason is Refusal.BUSY or refusal.reason in PASSED_UPWARD
    return RequestOutcome.EXCUSED if excused else RequestOutcome.FAILED


class Downstream:
    """Sends microbatches to the next stage and brings their gradients back, trying several peers."""

    def __init__(
        self,
        spec: RunSpec,
        stage: int,
        transport: Transport,
        book: LoadBalancer,
        ledger: Ledger,
        rng: random.Random,
        router: Router | None = None,
    ) -> None:
        """Answers are held to how the model's `router` is trained, where it is."""
        self._spec = spec
        self._stage = stage
        self._transport = transport
        self._book = book
        self._ledger = ledger
        self._rng = rng
        self._warn_again_at = 0.0
        self._router = router
        self.circuit_breaker = CircuitBreaker()
        self.hop_seconds = Meter(HOP_SECONDS)
        """From sending a microbatch to one peer to its answer."""
        hops = spec.stages - 1
        share = share_of_a_hop(spec.pipeline.audit_share, hops)
        self._codecs = LinkCodecs(spec.pipeline.activations, rng, book.cards)
        self.auditor = Auditor(share, book, self._train_again, rng, allowance=JURY / hops)
        """Runs beside the training (`Auditor.run`)."""

    @property
    def set_aside_now(self) -> int:
        """Next-stage peers that audits have gone against and that get nothing now."""
        return self._book.set_aside_now

    @property
    def peer_id(self) -> PeerId:
        """This node's own."""
        return self._transport.peer_id

    async def send(self, outgoing: Outgoing, budget: float) -> Trained:
        """Have the next stage train (or evaluate) a microbatch.

        Raises HopFailed when the budget (seconds) or the attempts are used up, or when a peer further on gave up. The
        latter is passed upward at once and retried by the origin only, so that failures do not multiply over hops. The
        origin tries another peer then: a peer that always says so may be the one at fault.
        """
        deadline = ambient.monotonic() + budget
        failures, attempt, rounds, reached, busy_since = 0, 0, 0, False, math.inf
        excluded: set[PeerId] = set()
        while (remaining := deadline - ambient.monotonic()) * 1000 > MIN_BUDGET_MS:
            peer = self._book.choose(excluded, desperate=rounds >= ROUNDS_TO_DESPAIR)
            if peer is None:
                if excluded and attempt < ASKS_TO_WAIT:
                    attempt = ASKS_TO_WAIT
                else:
                    await self._wait_for_a_peer(bool(excluded), remaining)
                    rounds += bool(excluded)
                excluded.clear()
                continue
            began, patience = ambient.monotonic(), self._patience(remaining)
            attempt = max(attempt, self._book.asks_for(peer))
            try:
                answer = await self._ask(peer, outgoing, attempt, patience)
            except Refused as refusal:
                if refusal.reason is not Refusal.OUT_OF_REACH:
                    self.circuit_breaker.failed()
                if self._stage > 0 and refusal.reason in PASSED_UPWARD:
                    self._note_failure(peer, refusal)
                    raise passed_upward(refusal, reached) from None
                reached = reached or refusal.reason is not Refusal.OUT_OF_REACH
                busy_since = min(busy_since, began) if refusal.reason is Refusal.BUSY else busy_since
                failures += refusal.reason not in COME_BACK
                self._note_failure(peer, refusal)
                logger.debug("microbatch %s refused by %s: %s", outgoing.id[:8], peer, refusal)
            except TransportError as error:
                failures += 1
                self.circuit_breaker.failed()
                self._note_failure(peer, error)
                reached = reached or not isinstance(error, PeerUnreachable)
                if outgoing.mode == "train" and not isinstance(error, PeerUnreachable):
                    self._ledger.repeated += 1
                logger.debug("microbatch %s lost at %s: %r", outgoing.id[:8], peer, error)
            else:
                if outgoing.mode == "train":
                    copied = replace(outgoing, codec=answer.codec, asks=attempt)
                    self.auditor.consider(answer, copied, budget=patience, took=ambient.monotonic() - began)
                return replace(answer, waited=answer.waited + max(0.0, began - busy_since))
            if failures >= self._spec.pipeline.hop_attempts:
                why = f"{failures} failures at stage {self._stage + 1}"
                raise given_up(Refusal.DOWNSTREAM_EXHAUSTED, why, reached)
            attempt += 1
            if outgoing.mode == "train":
                self._ledger.retried += 1
            excluded.add(peer)
        why = f"no peer of stage {self._stage + 1} answered within {budget:.1f} s"
        raise given_up(Refusal.BUDGET_SPENT, why, reached)

    async def take_back(
        self, worker: StageWorker, passage: ForwardContext, trained: Trained, waits: DeviceWaits
    ) -> Tensor | None:
        """Go backward with the answer to what `send` sent on, and compare what that did with what others' answers do.
        The gradient of the passage's inputs. Raises MicrobatchNotFinite, NoMemory."""
        assert trained.gradient is not None
        gradient = await worker.backward(
            passage,
            trained.gradient,
            trained.loss_sum,
            trained.tokens,
            source=trained.peer,
            scale=trained.scale,
            chosen=trained.chosen,
            waits=waits,
        )
        if passage.signs is not None:
            self.auditor.compare(PeerId(trained.peer), passage.signs)
        return gradient

    def _patience(self, remaining: float) -> float:
        """Seconds for one attempt. The origin keeps half for a second one, so that a silent peer (stopped, hung) does
        not eat the whole budget. A later hop gives all it has, or a deep pipeline's share would shrink to nothing."""
        if self._stage > 0:
            return remaining
        return min(remaining, max(remaining / 2, self._spec.pipeline.progress_seconds))

    async def _train_again(self, peer: PeerId, first: Outgoing, budget: float) -> Trained:
        try:
            return await self._ask(peer, replace(first, id=ambient.token(16)), first.asks, budget)
        except (Refused, TransportError) as error:
            self._note_failure(peer, error)
            raise

    def _note_failure(self, peer: PeerId, error: Refused | TransportError) -> None:
        if not isinstance(error, Refused) or error.reason in _NOT_FOR_US:
            self._book.failed(peer)
            self._transport.peer_stats.idle(peer)
        elif error.reason is Refusal.BUSY:
            self._book.full(peer)
        elif error.reason in PASSED_UPWARD and self._book.yields_little(peer):
            self._transport.peer_stats.idle(peer)

    async def _ask(self, peer: PeerId, outgoing: Outgoing, attempt: int, left: float) -> Trained:
        activations, mode = outgoing.activations, outgoing.mode
        codec = self._codecs.widest if mode == "evaluate" else outgoing.codec or self._codecs.choose(peer)
        wire = await to_wire(activations, codec)
        header = MicrobatchHeader(
            id=outgoing.id,
            attempt=attempt,
            budget_ms=max(1, int(left * 1000 * BUDGET_SHARE_PASSED_ON)),
            mode=mode,
            run=self._spec.run_id,
            stage=self._stage + 1,
            origin=outgoing.drawn.origin,
            origin_clock=outgoing.drawn.clock,
            chosen=outgoing.chosen,
            codec=codec,
        )
        began, asked = self._book.sent(peer), ambient.monotonic()
        how = RequestOutcome.FAILED
        try:
            answer = await ask(
                self._transport,
                peer,
                MICROBATCH,
                header,
                tensors=(wire, outgoing.tokens),
                specs=(TensorSpec.of(wire),) if mode == "train" else (),
                seconds=left,
                progress=self._spec.pipeline.progress_seconds,
            )
            how = RequestOutcome.CAME
            took = ambient.monotonic() - asked
            self.hop_seconds.add(took)
        except Refused as refusal:
            how = outcome_of(refusal, ambient.monotonic() - asked)
            raise
        except asyncio.CancelledError:
            how = RequestOutcome.UNTOLD
            raise
        finally:
            self._book.done(peer, began, how)
        with judging(self._transport, peer, MICROBATCH.name):
            trained = await decoded(read_answer(answer, activations, self._router), codec, activations)
        self._book.reported(peer, answer.header.load)
        self.circuit_breaker.through()
        link_wait = 0.0
        if mode == "train":
            link_wait = self._codecs.carried(peer, codec, took, answer.header.work_seconds)
            self._ledger.note_received(peer, trained.tokens)
            self._transport.peer_stats.worked(peer, trained.tokens)
        return replace(trained, peer=peer, codec=codec, waited=min(trained.waited, took), link_wait=link_wait)

    async def _wait_for_a_peer(self, all_asked: bool, remaining: float) -> None:
        """After a round in which every peer said no, a short jittered pause; with no peer at all, until one appears."""
        now = ambient.monotonic()
        if not all_asked and now >= self._warn_again_at:
            self._warn_again_at = now + NOBODY_WARNING_SECONDS
            logger.warning("stage %d has no replica that this node knows of: waiting for one", self._stage + 1)
        pause = self._rng.uniform(*BUSY_BACKOFF_SECONDS) if all_asked else remaining
        await self._book.changed.wait(min(pause, remaining))


class PipelineServer:
    """Answers microbatches for this node's stage. Full means `busy` at once: nothing queues without bound."""

    def __init__(
        self,
        spec: RunSpec,
        stage: int,
        width: int,
        vocabulary: int,
        worker: StageWorker,
        downstream: Downstream | None,
        ledger: Ledger,
        max_pending: int,
        peer_stats: PeerStats,
        accepting: Callable[[], bool],
        behind: FarBehind | None = None,
    ) -> None:
        """`width` counts the numbers of a token that come in. `accepting()` says whether microbatches are taken now,
        `behind` whether this replica is far behind its stage peers; None: it never is."""
        self._spec = spec
        self._stage = stage
        self._width = width
        self._vocabulary = vocabulary
        self._worker = worker
        self._downstream = downstream
        self._carried = carried_dtype(spec.pipeline.activations)
        self._ledger = ledger
        self._peer_stats = peer_stats
        self._under_way: dict[MicrobatchName, asyncio.Task[object] | None] = {}
        self._handed_back: set[MicrobatchName] = set()
        self._repeats = Repeats()
        self._places = MicrobatchLimiter(max_pending, load=lambda: worker.load)
        self._shares = SourceShares(lambda: worker.progress.clock >= spec.inner.warmup_tokens)
        self.rations = EvaluationRations(spec, worker, peer_stats.book)
        self._scales = NormBound(SCALE_MULTIPLE, floor=1.0)
        self.origins_seen = OriginsSeen(spec.max_lag_tokens)
        self.out_of_scale = 0
        """Microbatches refused so far because their activations were much too large."""
        self._accepting = accepting
        self._behind = behind

    @property
    def pending(self) -> int:
        """Microbatches of others that this node holds now, those on their way to it included."""
        return self._places.taken

    def serve(self, transport: Transport) -> Withdraw:
        """Register with the transport."""
        return on_tensors(transport, MICROBATCH, self.handle, self.admit)

    def admit(self, peer: PeerId, header: MicrobatchHeader, specs: tuple[TensorSpec, ...]) -> Release:
        """Refuse a microbatch that is not meant for this node, malformed, too large, or too much now. Otherwise keep a
        place for it, from before its body arrives."""
        if not self._accepting():
            raise Refused(Refusal.DRAINING)
        if self._behind is not None and self._behind.stands_back:
            raise Refused(Refusal.BUSY, "this replica is far behind and takes a stage peer's state first")
        own_run, own_stage = self._spec.run_id, self._stage
        check_addressed(
            run=header.run, stage=header.stage, own_run=own_run, own_stage=own_stage, protocol=header.protocol
        )
        if header.codec not in self._spec.pipeline.activations:
            raise Refused(Refusal.MALFORMED, f"this run's activations do not travel as {header.codec}")
        if self._stage == 1 and header.origin != peer:
            raise Refused(Refusal.MALFORMED, "stage 0 sends only what it has drawn itself")
        check_specs(specs, self._spec, codec=header.codec, width=self._width)
        tokens, evaluates = math.prod(specs[0].shape[:2]), header.mode == "evaluate"
        if not evaluates and not self._shares.may_bring(peer, tokens * (1 + self._places.held_by(peer))):
            raise Refused(Refusal.BUSY, "you have your share of an inner step, and others are at work here")
        return self.rations.place(peer, tokens if evaluates else 0, lambda: self._places.take(peer, header.attempt))

    async def handle(
        self, peer: PeerId, header: MicrobatchHeader, tensors: tuple[Tensor, ...]
    ) -> Reply[MicrobatchAnswer]:
        """Train or evaluate one admitted microbatch and answer with loss and gradient."""
        began = ambient.monotonic()
        name = MicrobatchName(peer, header.mode, header.id, await content_of(tensors))
        if name in self._under_way:
            raise Refused(Refusal.BUSY, "this microbatch is under way here")
        known = self._repeats.answer_to(name)
        if known is not None:
            self._places.answered(peer)
            return known
        self._under_way[name] = task = asyncio.current_task()
        try:
            trained = await self._carry_through(name, header, *tensors)
            answer = await self.answer(trained, header.codec, began)
        except asyncio.CancelledError:
            if name not in self._handed_back or task is None:
                raise
            task.uncancel()
            raise Refused(Refusal.DRAINING) from None
        finally:
            del self._under_way[name]
            self._handed_back.discard(name)
        if header.mode == "train":
            self._repeats.keep(name, answer)
        else:
            self._places.answered(peer)
        return answer

    def _note_work(self, name: MicrobatchName, header: MicrobatchHeader, trained: Trained, taken_in: bool) -> None:
        """A microbatch was trained and is about to be answered. What taught nothing shows no work of its sender's."""
        sender, tokens = name.sender, trained.tokens
        self._ledger.note_served(sender, tokens)
        if not taken_in:
            return
        self._places.answered(sender)
        self._shares.took_in(sender, tokens, trained.loss_sum / tokens)
        self.rations.worked(sender, tokens)
        self._peer_stats.worked(sender, tokens)
        self.origins_seen.saw(header.drawn, sender, tokens=tokens, own_clock=self._worker.progress.clock)

    def hand_back(self) -> None:
        """Refuse what is under way here and not trained yet, as `draining`: its senders try others at once, and count
        it as no failure. What is being trained comes to its end."""
        for name, task in self._under_way.items():
            if not self._repeats.was_trained(name) and task is not None:
                self._handed_back.add(name)
                task.cancel()

    async def _carry_through(
        self, name: MicrobatchName, header: MicrobatchHeader, activations: Tensor, tokens: Tensor
    ) -> Trained:
        deadline = ambient.monotonic() + min(header.budget_ms / 1000, self._spec.pipeline.budget_seconds)
        activations = await from_wire(activations, header.codec, self._carried, self._width)
        scale = await scale_of(activations)
        if not math.isfinite(scale) and not await all_finite(activations):
            raise Refused(Refusal.NOT_FINITE, "the activations hold NaN or infinity")
        self._check_scale(name.sender, scale)
        wanted = without_marks(tokens) if self._spec.data.attention == "document" else tokens
        if int(tokens.min()) < 0 or int(wanted.max()) >= self._vocabulary:  # on a GPU this would end the process
            raise Refused(Refusal.MALFORMED, f"a token is outside the vocabulary of {self._vocabulary}")
        router, count = self._worker.router, activations.shape[0] * activations.shape[1]
        if router is not None and header.mode == "train" and not router.before(header.chosen, count):
            raise Refused(Refusal.MALFORMED, "the counts of chosen experts are not those of the stages before")
        try:
            if header.mode == "evaluate":
                return await self._evaluate(name, header, activations, tokens, deadline)
            return await self._train(name, header, activations, tokens, deadline)
        except MicrobatchNotFinite as error:
            self._repeats.unmark(name)
            raise Refused(Refusal.DIVERGED, str(error)) from None  # with these weights: no proof against the sender
        except NoMemory as error:
            self._repeats.unmark(name)
            raise Refused(Refusal.BUSY, NO_MEMORY) from error

    def _check_scale(self, peer: PeerId, scale: float) -> None:
        if not math.isfinite(scale) or self._scales.factor(peer, scale) < 1.0:
            self.out_of_scale += 1
            raise Refused(Refusal.OUT_OF_SCALE, f"root mean square {scale:.3g}, {self._scales.usual:.3g} is usual here")

    async def _train(
        self, name: MicrobatchName, header: MicrobatchHeader, activations: Tensor, tokens: Tensor, deadline: float
    ) -> Trained:
        labels, ids = labels_and_ids(self._spec.model, tokens)
        waits, turn = DeviceWaits(), turn_of(name.sender, header, labels.numel())
        if self._downstream is None:
            self.mark_trained(name)
            done = await self._worker.loss(
                activations, labels, ids, source=name.sender, turn=turn, chosen=header.chosen, waits=waits
            )
            trained = Trained(done.loss_sum, done.tokens, done.input_gradient, chosen=done.chosen, waited=waits.seconds)
            self._note_work(name, header, trained, done.taken_in)
            return trained
        passage = ForwardContext(source=name.sender, positions=positions_of(labels), ids=ids)
        try:
            outputs = await self._worker.forward(activations, passage, turn=turn, waits=waits)
            chosen = tuple(before + own for before, own in zip(header.chosen, passage.chosen, strict=False))
            trained = await self._send_on(header, outputs, tokens, deadline, chosen)
            self.mark_trained(name)
            gradient = await self._downstream.take_back(self._worker, passage, trained, waits)
            self._note_work(name, header, trained, passage.taken_in)
            return replace(trained, gradient=gradient, waited=trained.waited + waits.seconds)
        except BaseException:
            await run_to_end(self._worker.discard(passage))
            raise

    async def _evaluate(
        self, name: MicrobatchName, header: MicrobatchHeader, activations: Tensor, tokens: Tensor, deadline: float
    ) -> Trained:
        labels, ids = labels_and_ids(self._spec.model, tokens)
        turn = turn_of(name.sender, header, labels.numel())
        if self._downstream is None:
            loss_sum = await self._worker.evaluate_loss(activations, labels, turn, ids=ids)
            return Trained(loss_sum, labels.numel(), None)
        outputs = await self._worker.evaluate(activations, positions_of(labels), turn, ids=ids)
        return await self._send_on(header, outputs, tokens, deadline)

    async def _send_on(
        self,
        header: MicrobatchHeader,
        outputs: Tensor,
        tokens: Tensor,
        deadline: float,
        chosen: tuple[int, ...] = (),
    ) -> Trained:
        assert self._downstream is not None
        try:
            outgoing = Outgoing(header.id, header.mode, header.drawn, outputs, tokens, chosen)
            return await self._downstream.send(outgoing, deadline - ambient.monotonic())
        except HopFailed as failure:
            raise Refused(failure.reason, failure.detail) from None

    async def answer(self, trained: Trained, codec: ActivationCodec, began: float) -> Reply[MicrobatchAnswer]:
        """What goes back for a microbatch that came at `began`, in seconds of the monotonic clock."""
        gradient = None if trained.gradient is None else await to_wire(trained.gradient, codec)
        header = MicrobatchAnswer(
            loss_sum=trained.loss_sum,
            tokens=trained.tokens,
            load=max(0, self.pending - 1),
            chosen=trained.chosen,
            work_ms=1000.0 * (ambient.monotonic() - began),
            waited_ms=1000.0 * trained.waited,
        )
        return Reply(header, () if gradient is None else (gradient,))

    def mark_trained(self, name: MicrobatchName) -> None:
        """It changes this replica from here on, and is counted where it is `repeated`: see `Repeats.mark_trained`."""
        self._ledger.repeated += self._repeats.mark_trained(name)
