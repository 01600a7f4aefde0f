"""A microbatch at a later stage: admit → run → send on → settle → answer. `microbatch.py` has how it is sent on.

A replica remembers the microbatches that it has trained, so that none is trained twice, and the answers to the last of
them. An id is only the sender's word. A repeat is therefore known by its sender, which the link authenticates, by its
id, and by its content. If another sender uses the same id, or the same sender has other weights, it is another
microbatch.
"""

from __future__ import annotations

import asyncio
import math
import zlib
from collections import Counter
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from noloco_node import ambient
from noloco_node.aio import run_to_end
from noloco_node.config.run_spec import ActivationCodec
from noloco_node.directory.clocks import FarBehind, OriginsSeen
from noloco_node.document_marks import positions_of, without_marks
from noloco_node.finite import INLINE_ELEMENTS, found_finite, scale_of
from noloco_node.identity.peer_id import PeerId
from noloco_node.participant import ReplicaContext
from noloco_node.pipeline.activations import from_wire, to_wire
from noloco_node.pipeline.admission import EvaluationRations, MicrobatchLimiter, SourceShares, turn_of
from noloco_node.pipeline.messages import (
    MICROBATCH,
    NO_MEMORY,
    HopFailed,
    Ledger,
    MicrobatchAnswer,
    MicrobatchHeader,
    Mode,
    Outgoing,
    Trained,
    check_specs,
    labels_and_ids,
)
from noloco_node.pipeline.microbatch import Downstream
from noloco_node.process_memory import NoMemory
from noloco_node.tallies import FEW_PEERS, PeerTable
from noloco_node.training.bounds import MULTIPLE, NormBound
from noloco_node.training.compute_thread import DeviceWaits
from noloco_node.training.trainer import ForwardContext, MicrobatchNotFinite, StageFacts, carried_dtype
from noloco_node.transport.calls import Reply, on_tensors
from noloco_node.transport.errors import Refusal, Refused
from noloco_node.transport.interface import Release, Transport, Withdraw
from noloco_node.transport.messages import TensorSpec, check_addressed, tensor_bytes

KEPT_ANSWER_BYTES = 64 << 20
INLINE_BYTES = 4 * INLINE_ELEMENTS
"""Checksums of up to so many bytes are taken on the event loop (0.15 ms)."""


class MicrobatchName(NamedTuple):
    """What one microbatch is known by here."""

    sender: PeerId
    mode: Mode
    id: str
    content: tuple[int, ...]
    """CRC-32 of each tensor. No stronger hash is needed.

    A sender that makes two of its own contents agree gets its own former answer, and no other sender can use its names.
    """


async def content_of(tensors: tuple[Tensor, ...]) -> tuple[int, ...]:
    """The checksums of a microbatch's tensors; large ones are read off the event loop."""
    if sum(tensor.nbytes for tensor in tensors) <= INLINE_BYTES:
        return _checksums(tensors)
    return await ambient.elsewhere(_checksums, tensors)


class Repeats:
    """The books of one replica. Bounded in microbatches, answers and their bytes."""

    def __init__(self) -> None:
        self._trained = PeerTable[MicrobatchName, None](forgotten=self._uncount)
        self._ids: Counter[str] = Counter()
        self._answers = PeerTable[MicrobatchName, Reply[MicrobatchAnswer]](FEW_PEERS, self._dropped)
        self._kept_bytes = 0

    def answer_to(self, name: MicrobatchName) -> Reply[MicrobatchAnswer] | None:
        """The answer to a repeat, None where it is none. Refused (`already_trained`) where the answer is gone: it must
        not be trained again."""
        if name in self._answers:
            return self._answers[name]
        if name in self._trained:
            raise Refused(Refusal.ALREADY_TRAINED)
        return None

    def begin_training(self, name: MicrobatchName) -> bool:
        """From here on it changes this replica: a repeat is turned away even if this attempt is cancelled. True where
        a microbatch of the same id was trained here before, in another's name or from other weights."""
        again = self._ids[name.id] > 0
        self._trained[name] = None
        self._ids[name.id] += 1
        return again

    def has_begun(self, name: MicrobatchName) -> bool:
        """Whether it has changed this replica, or is about to."""
        return name in self._trained

    def forget(self, name: MicrobatchName) -> None:
        """It came to nothing after all."""
        if name in self._trained:
            del self._trained[name]
            self._uncount(name)

    def keep(self, name: MicrobatchName, answer: Reply[MicrobatchAnswer]) -> None:
        self._kept_bytes += _size(answer)
        self._answers[name] = answer
        while self._kept_bytes > KEPT_ANSWER_BYTES:
            self._dropped(*self._answers.popitem(last=False))

    def _dropped(self, _: MicrobatchName, answer: Reply[MicrobatchAnswer]) -> None:
        self._kept_bytes -= _size(answer)

    def _uncount(self, name: MicrobatchName, _: None = None) -> None:
        self._ids[name.id] -= 1
        if not self._ids[name.id]:
            del self._ids[name.id]


def _checksums(tensors: tuple[Tensor, ...]) -> tuple[int, ...]:
    return tuple(zlib.crc32(tensor_bytes(tensor)) for tensor in tensors)


def _size(message: Reply[MicrobatchAnswer]) -> int:
    return sum(tensor.nbytes for tensor in message.tensors)


class PipelineServer:
    """Answers microbatches for this node's stage. Full means `busy` at once: nothing queues without bound."""

    def __init__(
        self,
        context: ReplicaContext,
        stage: StageFacts,
        downstream: Downstream | None,
        ledger: Ledger,
        behind: FarBehind,
    ) -> None:
        """`behind` says whether this replica is far behind its stage peers."""
        self._spec = spec = context.spec
        self._worker = worker = context.worker
        self._peer_stats = peer_stats = context.transport.peer_stats
        self._stage = context.stage
        self._width = stage.cut_width
        """Numbers of a token that come in."""
        self._vocabulary = stage.vocab_size
        self._downstream = downstream
        self._carried = carried_dtype(spec.pipeline.activations)
        self._ledger = ledger
        self._under_way: dict[MicrobatchName, asyncio.Task[object] | None] = {}
        self._handed_back: set[MicrobatchName] = set()
        self._repeats = Repeats()
        self._places = MicrobatchLimiter(context.settings.max_pending, load=lambda: worker.load)
        self._shares = SourceShares(lambda: worker.progress.clock >= spec.inner.warmup_tokens)
        self.rations = EvaluationRations(spec, worker, peer_stats.book)
        # A refusal loses a microbatch, and a clipped gradient only counts less: here twice as much is allowed.
        self._scales = NormBound(2.0 * MULTIPLE, floor=1.0)
        self.origins_seen = OriginsSeen()
        self.out_of_scale = 0
        """Microbatches refused so far because their activations were much too large."""
        self.accepting = False
        """Whether microbatches are taken now."""
        self._behind = behind

    @property
    def pending(self) -> int:
        """Microbatches of others that this node holds now, those on their way to it included."""
        return self._places.taken

    def serve(self, transport: Transport) -> Withdraw:
        return on_tensors(transport, MICROBATCH, self.handle, self.admit)

    def admit(self, peer: PeerId, header: MicrobatchHeader, specs: tuple[TensorSpec, ...]) -> Release:
        """Refuse a microbatch that is not meant for this node, malformed, too large, or too much now. Otherwise keep a
        place for it, from before its body arrives."""
        if not self.accepting:
            raise Refused(Refusal.DRAINING)
        if self._behind.stands_back:
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
        if evaluates:
            self.rations.check(peer, tokens)
        place = self._places.take(peer, header.attempt)
        if evaluates:
            self.rations.spend(peer, tokens)
        return place

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
            if not self._repeats.has_begun(name) and task is not None:
                self._handed_back.add(name)
                task.cancel()

    async def _carry_through(
        self, name: MicrobatchName, header: MicrobatchHeader, activations: Tensor, tokens: Tensor
    ) -> Trained:
        deadline = ambient.monotonic() + min(header.budget_ms / 1000, self._spec.pipeline.budget_seconds)
        activations = await from_wire(activations, header.codec, self._carried, self._width)
        scale = await scale_of(activations)
        if not math.isfinite(scale) and not await found_finite(activations):
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
            self._repeats.forget(name)
            raise Refused(Refusal.DIVERGED, str(error)) from None  # with these weights: no proof against the sender
        except NoMemory as error:
            self._repeats.forget(name)
            raise Refused(Refusal.BUSY, NO_MEMORY) from error

    def _check_scale(self, peer: PeerId, scale: float) -> None:
        """Refuse activations whose root mean square is beyond the bound on strangers' numbers."""
        if not math.isfinite(scale) or self._scales.factor(peer, scale) < 1.0:
            self.out_of_scale += 1
            raise Refused(Refusal.OUT_OF_SCALE, f"root mean square {scale:.3g}, {self._scales.usual:.3g} is usual here")

    async def _train(
        self, name: MicrobatchName, header: MicrobatchHeader, activations: Tensor, tokens: Tensor, deadline: float
    ) -> Trained:
        labels, ids = labels_and_ids(self._spec.model, tokens)
        waits, turn = DeviceWaits(), turn_of(name.sender, header, labels.numel())
        if self._downstream is None:
            self.begin_training(name)
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
            self.begin_training(name)
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
        self, header: MicrobatchHeader, outputs: Tensor, tokens: Tensor, deadline: float, chosen: tuple[int, ...] = ()
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

    def begin_training(self, name: MicrobatchName) -> None:
        """It changes this replica from here on, and is counted where it is `repeated`: see `Repeats.begin_training`."""
        self._ledger.repeated += self._repeats.begin_training(name)
