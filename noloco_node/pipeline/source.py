"""Where microbatches come from: stage 0 draws the samples and keeps the account that must close."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Literal

from torch import Tensor

from noloco_node import ambient
from noloco_node.address_space import NoMemory
from noloco_node.aio import run_to_end, some_at_a_time
from noloco_node.config.run_spec import RunSpec
from noloco_node.data.samples import Samples, by_source, inputs_and_labels
from noloco_node.document_marks import positions_of
from noloco_node.pauses import Doubling
from noloco_node.pipeline.downstream import Downstream
from noloco_node.pipeline.in_flight import InFlight
from noloco_node.pipeline.messages import NO_MEMORY, HopFailed, Ledger, Mode, Outgoing, Sample, tokens_to_send
from noloco_node.training.compute_thread import DeviceWaits
from noloco_node.training.stage_worker import StageWorker
from noloco_node.training.trainer import ForwardContext, MicrobatchNotFinite
from noloco_node.transport.errors import Refusal
from noloco_node.trust.sources_seen import DrawnBy

logger = logging.getLogger(__name__)

PAUSES = Doubling(0.05, 5.0)
"""Seconds of pause after samples in a row that were put back, since others are in trouble."""
EVALUATED_AT_ONCE = 2


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
    def data_wait_seconds(self) -> float:
        """Time that drawing has waited for the text."""
        return self._samples.waited_seconds()

    def passed_over(self) -> list[str]:
        """What of the text could not be read since it was asked for last, for a person."""
        return self._samples.passed_over()

    @property
    def under_way(self) -> int:
        """Samples being carried through now."""
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
        """Draw one sample (one that was put back, if there is any) and carry it to its end or back into the queue.

        True where it was trained.
        """
        sample = self._waiting.popleft() if self._waiting else await self._draw_new()
        self._under_way[sample] = None
        try:
            await self._carry_through(sample)
        except HopFailed as failure:
            self._ended(sample)
            self._put_back(sample, failure)
            return False
        except MicrobatchNotFinite as error:
            self._ended(sample)
            self._put_back(sample, HopFailed(Refusal.NOT_FINITE, str(error), reached=True))
            return False
        except NoMemory:
            self._ended(sample)
            self._put_back(sample, HopFailed(Refusal.BUSY, NO_MEMORY, reached=False))
            return False
        except asyncio.CancelledError:
            self._ended(sample)
            self._waiting.appendleft(sample)
            raise
        else:
            self._ended(sample)
            self._ledger.trained += 1
            return True

    def _ended(self, sample: Sample) -> None:
        del self._under_way[sample]
        self._in_flight.changed.fire()

    async def evaluate(self, windows: Tensor, sources: Sequence[int] = ()) -> list[tuple[float, int]]:
        """Losses (nats, summed over tokens) of held-out windows, int32 [n, T + 1], through the swarm, and their tokens.

        `sources` counts the windows of each source, which lie one after the other. There is one pair for each source,
        or one for all together.

        Raises HopFailed.
        """
        size = self._spec.inner.microbatch_windows
        parts: list[tuple[int, Tensor]] = []
        for number, own in enumerate(by_source(windows, sources)):
            parts += [(number, own[start : start + size]) for start in range(0, len(own), size)]
        results = [(0.0, 0) for _ in sources or (0,)]

        async def evaluate(part: tuple[int, Tensor]) -> None:
            number, rows = part
            loss, tokens = await self._evaluate_part(rows)
            results[number] = (results[number][0] + loss, results[number][1] + tokens)

        await some_at_a_time(EVALUATED_AT_ONCE, parts, evaluate)
        return results

    async def _carry_through(self, sample: Sample) -> None:
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
            outgoing = replace(self._outgoing("train", drawn, outputs, tokens), chosen=passage.chosen)
            trained = await self._downstream.send(outgoing, self._spec.pipeline.budget_seconds)
            await self._downstream.take_back(self._worker, passage, trained, waits)
            waited = trained.waited + waits.seconds
            self._in_flight.carried(ambient.monotonic() - drawn_at, waited, trained.link_wait)
        except BaseException:
            await run_to_end(self._worker.discard(passage))
            raise

    def _missing(self) -> float:
        return math.ceil(self._worker.tokens_missing / self._spec.microbatch_tokens)

    def _share(self) -> int:
        return self._spec.microbatches_a_step(self._worker.live_replicas)

    async def _evaluate_part(self, windows: Tensor) -> tuple[float, int]:
        inputs, labels = inputs_and_labels(windows)
        try:
            if self._downstream is None:
                return await self._worker.evaluate_loss(inputs, labels), labels.numel()
            outputs = await self._worker.evaluate(inputs, positions_of(labels))
        except MicrobatchNotFinite as error:
            raise HopFailed(Refusal.NOT_FINITE, str(error), reached=True) from None
        except NoMemory:
            raise HopFailed(Refusal.BUSY, NO_MEMORY, reached=False) from None
        drawn = self._drawn(self._downstream, labels.numel())
        outgoing = self._outgoing("evaluate", drawn, outputs, tokens_to_send(self._spec.model, inputs, labels))
        result = await self._downstream.send(outgoing, self._spec.pipeline.budget_seconds)
        return result.loss_sum, result.tokens

    def _drawn(self, downstream: Downstream, tokens: int) -> DrawnBy:
        """Later stages train before this one does: what is under way counts as trained, each with so many tokens."""
        coming = self.under_way * tokens * self._worker.live_replicas
        return DrawnBy(downstream.peer_id, self._worker.progress.clock + coming)

    @staticmethod
    def _outgoing(mode: Mode, drawn: DrawnBy, outputs: Tensor, tokens: Tensor) -> Outgoing:
        return Outgoing(ambient.token(16), mode, drawn, outputs, tokens)

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

    def _put_back(self, sample: Sample, failure: HopFailed) -> None:
        if failure.reached:  # where nobody had it in hand, an outage says nothing against the sample
            if sample.put_backs >= self._spec.pipeline.put_backs:
                self._ledger.dropped += 1
                logger.warning("a sample was dropped after %d put-backs: %s", sample.put_backs, failure)
                return
            sample.put_backs += 1
        self._ledger.put_back += 1
        self._waiting.append(sample)
