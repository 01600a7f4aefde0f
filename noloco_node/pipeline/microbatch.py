"""A microbatch's way: draw → run → choose → call → settle.

`MicrobatchSource` draws samples at stage 0, runs the stage on them, and keeps the account that must close. `Downstream`
has the next stage train a microbatch, at stage 0 and at every later one: it chooses a peer, calls it, and settles what
came of that. Each hop has one owner. The sender keeps the activations until the gradient is back. On a refusal, a
time-out or a broken stream it picks another peer. `server.py` has the side that answers.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import Tensor

from noloco_node import ambient
from noloco_node.aio import run_to_end
from noloco_node.config.run_spec import ActivationCodec, RunSpec
from noloco_node.data.samples import Samples
from noloco_node.directory.clocks import DrawnBy
from noloco_node.document_marks import inputs_and_labels, positions_of
from noloco_node.identity.peer_id import PeerId
from noloco_node.model.router import Router
from noloco_node.peers.hop import RequestOutcome
from noloco_node.pipeline.activations import LinkCodecs, to_wire
from noloco_node.pipeline.admission import ASKS_TO_WAIT, InFlight
from noloco_node.pipeline.audit import JURY, Auditor, share_of_a_hop
from noloco_node.pipeline.messages import (
    MICROBATCH,
    NO_FAILURE,
    NO_MEMORY,
    NOT_FOR_US,
    OF_ANY_MICROBATCH,
    PASSED_UPWARD,
    HopFailed,
    Ledger,
    Meter,
    MicrobatchAnswer,
    MicrobatchHeader,
    Outgoing,
    Sample,
    Trained,
    decoded,
    read_answer,
    tokens_to_send,
)
from noloco_node.pipeline.routing import CircuitBreaker, LoadBalancer, outcome_of
from noloco_node.process_memory import NoMemory
from noloco_node.tallies import Doubling
from noloco_node.telemetry.metrics import HOP_SECONDS
from noloco_node.training.compute_thread import DeviceWaits
from noloco_node.training.stage_worker import StageWorker
from noloco_node.training.trainer import ForwardContext, MicrobatchNotFinite
from noloco_node.transport.calls import ATTEMPTS, ask, judging
from noloco_node.transport.errors import PeerUnreachable, Refusal, Refused, TransportError
from noloco_node.transport.interface import Transport
from noloco_node.transport.messages import TensorSpec

logger = logging.getLogger(__name__)

PAUSES = Doubling(0.05, 5.0)
"""Seconds of pause after samples in a row that were requeued, since others are in trouble."""
BUDGET_SHARE_PASSED_ON = 0.9
"""Each hop gives the next one this share of its time, so that it can fail upward before its own time is over."""
MIN_BUDGET_MS = 50
BUSY_BACKOFF_SECONDS = (0.02, 0.2)


def _own_failure(error: MicrobatchNotFinite | NoMemory) -> HopFailed:
    """What this node itself cannot carry through fails like what comes back from a hop."""
    if isinstance(error, NoMemory):
        return HopFailed(Refusal.BUSY, NO_MEMORY)
    return HopFailed(Refusal.NOT_FINITE, str(error))


class MicrobatchSource:
    """Stage 0's source of microbatches: draws samples, keeps several under way, puts failed ones back.

    The account closes at every moment: drawn = trained + dropped + held.
    """

    def __init__(
        self,
        spec: RunSpec,
        worker: StageWorker,
        downstream: Downstream | None,
        ledger: Ledger,
        samples: Samples,
        rng: random.Random,
        in_flight: int | Literal["auto"],
    ) -> None:
        self._spec = spec
        self._worker = worker
        self._downstream = downstream
        self._ledger = ledger
        self._samples = samples
        self._rng = rng
        self._waiting = ledger.waiting
        self._few_blocks = False
        self._under_way: dict[Sample, None] = {}
        self._in_flight = InFlight(in_flight, self._share, self._missing)

    @property
    def under_way(self) -> int:
        return len(self._under_way)

    @property
    def held(self) -> int:
        """Samples drawn and neither trained nor dropped."""
        return len(self._waiting) + len(self._under_way)

    @property
    def held_samples(self) -> list[Sample]:
        """Those samples, in the order in which they are to be trained."""
        return [*self._under_way, *self._waiting]

    async def run(self, training_goes_on: Callable[[], bool], way_is_open: Callable[[], Awaitable[None]]) -> None:
        """Keep as many microbatches under way as `node.in_flight` says until `training_goes_on()` is false, then finish
        those under way.

        `way_is_open` is awaited before each: it returns once every later stage has a replica.
        """

        async def keep_drawing(number: int) -> None:
            in_vain = 0
            while True:
                while not self._in_flight.open_to(number, self.under_way):
                    await self._in_flight.changed.wait()
                await way_is_open()
                if not training_goes_on():
                    self._in_flight.release()
                    return
                if await self.train_one():
                    in_vain = 0
                else:
                    await asyncio.sleep(PAUSES.about(in_vain, self._rng))
                    in_vain += 1

        async with asyncio.TaskGroup() as group:
            for number in range(self._in_flight.most):
                group.create_task(keep_drawing(number))

    async def train_one(self) -> bool:
        """Draw one sample (one that was requeued, if there is any) and carry it to its end or back into the queue.

        True where it was trained.
        """
        sample = self._waiting.popleft() if self._waiting else await self._draw_new()
        self._under_way[sample] = None
        try:
            await self._run(sample)
        except HopFailed as failure:
            return self._close_sample(sample, failure)
        except (MicrobatchNotFinite, NoMemory) as error:
            return self._close_sample(sample, _own_failure(error))
        except asyncio.CancelledError:
            self._ended(sample)
            self._waiting.appendleft(sample)
            raise
        return self._close_sample(sample)

    async def _draw_new(self) -> Sample:
        self._heed_blocks()
        windows = await self._samples.draw()
        self._ledger.drawn += 1  # no await after the draw: the books close at every moment
        return Sample(windows)

    def _heed_blocks(self) -> None:
        blocks, replicas = self._samples.blocks, self._worker.live_replicas
        if blocks is not None and replicas > blocks and not self._few_blocks:
            self._few_blocks = True
            logger.warning(
                "%d replicas of the first stage read a text of %d blocks: some read the same at a time; a run with a "
                "larger run.data.parts_per_shard has more",
                replicas,
                blocks,
            )

    async def _run(self, sample: Sample) -> None:
        """Forward, on to the next stage and back, backward. Raises HopFailed, MicrobatchNotFinite, NoMemory."""
        inputs, labels = inputs_and_labels(sample.windows)
        drawn_at, waits = ambient.monotonic(), DeviceWaits()
        if self._downstream is None:
            await self._worker.loss(inputs, labels, draw=True)
            self._in_flight.carried(ambient.monotonic() - drawn_at, 0.0)
            return
        passage, drawn = ForwardContext(positions=positions_of(labels)), self._drawn(self._downstream, labels.numel())
        try:
            outputs = await self._worker.forward(inputs, passage, draw=True)
            tokens = tokens_to_send(self._spec.model, inputs, labels)
            outgoing = Outgoing(ambient.token(16), "train", drawn, outputs, tokens, passage.chosen)
            trained = await self._downstream.send(outgoing, self._spec.pipeline.budget_seconds)
            await self._downstream.take_back(self._worker, passage, trained, waits)
            waited = trained.waited + waits.seconds
            self._in_flight.carried(ambient.monotonic() - drawn_at, waited, trained.link_wait)
        except BaseException:
            await run_to_end(self._worker.discard(passage))
            raise

    def _close_sample(self, sample: Sample, failure: HopFailed | None = None) -> bool:
        """A sample's way is over: it is trained, or requeued, or dropped after too many failures. Whether it was
        trained."""
        self._ended(sample)
        if failure is None:
            self._ledger.trained += 1
            return True
        if failure.suspect:  # an outage, or peers without a place, say nothing against the sample
            if sample.requeues >= self._spec.pipeline.requeues:
                self._ledger.dropped += 1
                logger.warning("a sample was dropped after %d requeues: %s", sample.requeues, failure)
                return False
            sample.requeues += 1
        self._ledger.requeued += 1
        self._waiting.append(sample)
        return False

    def _ended(self, sample: Sample) -> None:
        del self._under_way[sample]
        self._in_flight.changed.fire()

    async def evaluate(self, windows: Tensor) -> tuple[float, int]:
        """The loss (nats, summed over tokens) of held-out windows, int32 [b, T + 1], as one microbatch through the
        swarm, and their tokens. Raises HopFailed."""
        inputs, labels = inputs_and_labels(windows)
        try:
            if self._downstream is None:
                return await self._worker.evaluate_loss(inputs, labels), labels.numel()
            outputs = await self._worker.evaluate(inputs, positions_of(labels))
        except (MicrobatchNotFinite, NoMemory) as error:
            raise _own_failure(error) from None
        drawn, tokens = self._drawn(self._downstream, labels.numel()), tokens_to_send(self._spec.model, inputs, labels)
        outgoing = Outgoing(ambient.token(16), "evaluate", drawn, outputs, tokens)
        result = await self._downstream.send(outgoing, self._spec.pipeline.budget_seconds)
        return result.loss_sum, result.tokens

    def _missing(self) -> float:
        return math.ceil(self._worker.tokens_missing / self._spec.microbatch_tokens)

    def _share(self) -> int:
        return self._spec.microbatches_a_step(self._worker.live_replicas)

    def _drawn(self, downstream: Downstream, tokens: int) -> DrawnBy:
        """The origin, and its clock as it will be once all samples under way, of so many tokens each, are trained."""
        coming = self.under_way * tokens * self._worker.live_replicas
        return DrawnBy(downstream.peer_id, self._worker.progress.clock + coming)


@dataclass(slots=True, eq=False)
class _Sending:
    """A microbatch on its way to the next stage, and what has come of its tries so far."""

    outgoing: Outgoing
    deadline: float
    """Monotonic seconds."""
    trains: bool
    """It is to be trained, and not only evaluated."""
    asks: int = 0
    """Asks so far. It is set to `ASKS_TO_WAIT` once the microbatch may wait at a peer (`MicrobatchLimiter.take`)."""
    failures: int = 0
    """Asks that count for `ATTEMPTS`: all that failed, but for `NO_FAILURE`."""
    excluded: set[PeerId] = field(default_factory=set[PeerId])
    """Peers that said no in this round."""
    suspect: bool = False
    """Whether a peer that could take this microbatch failed on it. Such failures can drop the sample."""
    busy_since: float = math.inf
    """When it was first refused since a peer was full."""

    def given_up(self, reason: Refusal, why: str) -> HopFailed:
        """What to raise when all tries are used up. One that is not suspect is held back at its origin, however
        often."""
        return HopFailed(reason if self.suspect else Refusal.OUT_OF_REACH, why)


class Downstream:
    """Sends microbatches to the next stage and brings their gradients back, trying several peers."""

    def __init__(
        self,
        spec: RunSpec,
        stage: int,
        transport: Transport,
        balancer: LoadBalancer,
        ledger: Ledger,
        rng: random.Random,
        router: Router | None = None,
    ) -> None:
        """Answers are held to how the model's `router` is trained, where it is."""
        self._spec = spec
        self._stage = stage
        self._transport = transport
        self._balancer = balancer
        self._ledger = ledger
        self._rng = rng
        self._router = router
        self.peer_id = transport.peer_id
        """This node's own."""
        self.circuit_breaker = CircuitBreaker()
        self.hop_seconds = Meter(HOP_SECONDS)
        """From sending a microbatch to one peer to its answer."""
        hops = spec.stages - 1
        share = share_of_a_hop(spec.pipeline.audit_share, hops)
        self._codecs = LinkCodecs(spec.pipeline.activations, rng, balancer.cards)
        self.auditor = Auditor(share, balancer, self._train_again, rng, allowance=JURY / hops)
        """Runs beside the training (`Auditor.run`)."""

    async def send(self, outgoing: Outgoing, budget: float) -> Trained:
        """Have the next stage train (or evaluate) a microbatch: choose a peer, call it, settle what came of it.

        Raises HopFailed when the budget (seconds) or the attempts are used up, or when a peer further on gave up. The
        latter is passed upward at once and retried by the origin only, so that failures do not multiply over hops. The
        origin tries another peer then: a peer that always says so may be the one at fault.
        """
        sending = _Sending(outgoing, ambient.monotonic() + budget, outgoing.mode == "train")
        while (left := sending.deadline - (began := ambient.monotonic())) * 1000 > MIN_BUDGET_MS:
            peer = self._balancer.choose(sending.excluded)
            if peer is None:
                await self._begin_another_round(sending, left)
                continue
            sending.asks, seconds = max(sending.asks, self._balancer.asks_for(peer)), self._seconds_of_an_ask(left)
            try:
                answer = await self._call(peer, outgoing, sending.asks, seconds)
            except (Refused, TransportError) as error:
                self._after_failed_ask(sending, peer, error, began)
            else:
                return self._accept_answer(sending, answer, seconds, began)
        why = f"no peer of stage {self._stage + 1} answered within {budget:.1f} s"
        raise sending.given_up(Refusal.BUDGET_SPENT, why)

    async def _begin_another_round(self, sending: _Sending, left: float) -> None:
        """Nobody may be asked now. After the first full round another follows at once, in which peers may let the
        microbatch wait. Later ones begin after a short pause at random. With no peer at all, wait for one."""
        some_refused = bool(sending.excluded)
        sending.excluded.clear()
        if some_refused and sending.asks < ASKS_TO_WAIT:
            sending.asks = ASKS_TO_WAIT
            return
        pause = self._rng.uniform(*BUSY_BACKOFF_SECONDS) if some_refused else left
        await self._balancer.changed.wait(min(pause, left))

    async def _call(self, peer: PeerId, outgoing: Outgoing, asks: int, seconds: float) -> Trained:
        """Ask one peer, and note what that says of it."""
        codec = self._codec_for(peer, outgoing)
        wire = await to_wire(outgoing.activations, codec)
        header = self._header(outgoing, codec, asks, seconds)
        began, asked = self._balancer.sent(peer), ambient.monotonic()
        how = RequestOutcome.FAILED
        try:
            answer = await ask(
                self._transport,
                peer,
                MICROBATCH,
                header,
                tensors=(wire, outgoing.tokens),
                specs=(TensorSpec.of(wire),) if outgoing.mode == "train" else (),
                seconds=seconds,
                progress=self._spec.pipeline.progress_seconds,
                asks_first=self._codecs.asks_first(peer, wire, codec),
            )
            how, took = RequestOutcome.CAME, ambient.monotonic() - asked
        except Refused as refusal:
            how = outcome_of(refusal, ambient.monotonic() - asked)
            raise
        except asyncio.CancelledError:
            how = RequestOutcome.UNTOLD
            raise
        finally:
            self._balancer.done(peer, began, how)
        self.hop_seconds.add(took)
        activations = outgoing.activations
        with judging(self._transport, peer, MICROBATCH.name):
            trained = await decoded(read_answer(answer, activations, self._router), codec, activations)
        return self._came(peer, codec, trained, answer.header, took)

    def _codec_for(self, peer: PeerId, outgoing: Outgoing) -> ActivationCodec:
        if outgoing.mode == "evaluate":
            return self._codecs.widest
        return outgoing.codec or self._codecs.choose(peer)

    def _header(self, outgoing: Outgoing, codec: ActivationCodec, asks: int, seconds: float) -> MicrobatchHeader:
        return MicrobatchHeader(
            id=outgoing.id,
            attempt=asks,
            budget_ms=max(1, int(seconds * 1000 * BUDGET_SHARE_PASSED_ON)),
            mode=outgoing.mode,
            run=self._spec.run_id,
            stage=self._stage + 1,
            origin=outgoing.drawn.origin,
            origin_clock=outgoing.drawn.clock,
            chosen=outgoing.chosen,
            codec=codec,
        )

    def _came(
        self, peer: PeerId, codec: ActivationCodec, trained: Trained, answer: MicrobatchAnswer, took: float
    ) -> Trained:
        """What an answer that holds says of its peer and of the link, `took` seconds after the request."""
        self._balancer.reported(peer, answer.load)
        self.circuit_breaker.through()
        link_wait = 0.0
        if trained.gradient is not None:
            link_wait = self._codecs.carried(peer, codec, took, answer.work_seconds)
            self._ledger.note_received(peer, trained.tokens)
            self._transport.peer_stats.worked(peer, trained.tokens)
        return replace(trained, peer=peer, codec=codec, waited=min(trained.waited, took), link_wait=link_wait)

    def _accept_answer(self, sending: _Sending, answer: Trained, budget: float, began: float) -> Trained:
        """The microbatch is through: its answer may be audited, and it has waited since its first peer was full."""
        if sending.trains:
            copied = replace(sending.outgoing, codec=answer.codec, asks=sending.asks)
            self.auditor.consider(answer, copied, budget=budget, took=ambient.monotonic() - began)
        return replace(answer, waited=answer.waited + max(0.0, began - sending.busy_since))

    def _after_failed_ask(self, sending: _Sending, peer: PeerId, error: Refused | TransportError, began: float) -> None:
        """A try came to nothing: what that says of the peer, of the stage and of the microbatch. Raises HopFailed where
        no other peer is to be tried."""
        refusal = error.reason if isinstance(error, Refused) else None
        suspect = refusal not in OF_ANY_MICROBATCH and not isinstance(error, PeerUnreachable)
        self._note_peer(peer, error)
        if refusal is not Refusal.OUT_OF_REACH:
            self.circuit_breaker.failed()
        if self._stage > 0 and isinstance(error, Refused) and refusal in PASSED_UPWARD:
            raise HopFailed(error.reason, error.detail) from None
        logger.debug("microbatch %s came to nothing at %s: %r", sending.outgoing.id[:8], peer, error)
        sending.suspect = sending.suspect or suspect
        sending.failures += refusal not in NO_FAILURE
        if refusal is Refusal.BUSY:
            sending.busy_since = min(sending.busy_since, began)
        if sending.trains and refusal is None and suspect:
            self._ledger.repeated += 1  # it may have been trained there all the same
        if sending.failures >= ATTEMPTS:
            why = f"{sending.failures} failures at stage {self._stage + 1}"
            raise sending.given_up(Refusal.DOWNSTREAM_EXHAUSTED, why) from None
        sending.asks += 1
        sending.excluded.add(peer)
        if sending.trains:
            self._ledger.retried += 1

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

    def _seconds_of_an_ask(self, remaining: float) -> float:
        """Seconds for one ask. The origin keeps half for a second one, so that a silent peer (stopped, hung) does
        not eat the whole budget. A later hop gives all it has, or a deep pipeline's share would shrink to nothing."""
        if self._stage > 0:
            return remaining
        return min(remaining, max(remaining / 2, self._spec.pipeline.progress_seconds))

    async def _train_again(self, peer: PeerId, first: Outgoing, budget: float) -> Trained:
        try:
            return await self._call(peer, replace(first, id=ambient.token(16)), first.asks, budget)
        except (Refused, TransportError) as error:
            self._note_peer(peer, error)
            raise

    def _note_peer(self, peer: PeerId, error: Refused | TransportError) -> None:
        if not isinstance(error, Refused) or error.reason in NOT_FOR_US:
            self._balancer.failed(peer)
            self._transport.peer_stats.idle(peer)
        elif error.reason is Refusal.BUSY:
            self._balancer.full(peer)
        elif error.reason in PASSED_UPWARD and self._balancer.yields_little(peer):
            self._transport.peer_stats.idle(peer)
