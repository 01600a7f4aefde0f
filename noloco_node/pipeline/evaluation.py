"""When stage 0 evaluates: at the start, whenever the clock has gone far enough, and at the end."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence

from torch import Tensor

from noloco_node.aio import Pulse, some_at_a_time
from noloco_node.config.run_spec import RunSpec
from noloco_node.data.samples import Samples, by_source
from noloco_node.pipeline.messages import HopFailed
from noloco_node.pipeline.microbatch import MicrobatchSource
from noloco_node.telemetry.events import Evaluation, SourceLoss
from noloco_node.training.progress import Progress
from noloco_node.training.stage_worker import StageWorker

logger = logging.getLogger(__name__)


async def evaluate(
    origin: MicrobatchSource, windows: Tensor, size: int, sources: Sequence[int] = ()
) -> list[tuple[float, int]]:
    """Losses (nats, summed over tokens) of held-out windows, int32 [n, T + 1], through the swarm, and their tokens.

    They go in microbatches of `size` windows. `sources` counts the windows of each source, which lie one after the
    other. There is one pair for each source, or one for all together.

    Raises HopFailed.
    """
    parts: list[tuple[int, Tensor]] = []
    for number, own in enumerate(by_source(windows, sources)):
        parts += [(number, own[start : start + size]) for start in range(0, len(own), size)]
    results = [(0.0, 0) for _ in sources or (0,)]

    async def evaluate_part(part: tuple[int, Tensor]) -> None:
        number, rows = part
        loss, tokens = await origin.evaluate(rows)
        results[number] = (results[number][0] + loss, results[number][1] + tokens)

    await some_at_a_time(2, parts, evaluate_part)
    return results


class Evaluations:
    """Sends the held-out windows through the swarm and emits what comes of it."""

    def __init__(
        self,
        origin: MicrobatchSource,
        samples: Samples,
        worker: StageWorker,
        spec: RunSpec,
        emit: Callable[[Evaluation], None],
    ) -> None:
        self._origin = origin
        self._samples = samples
        self._worker = worker
        self._every = spec.evaluation.every_tokens
        """Tokens of the clock."""
        self._size = spec.inner.microbatch_windows
        self._emit = emit

    async def now_and_then(self, moved: Pulse, way_is_open: Callable[[], Awaitable[None]]) -> None:
        """At the start, and whenever the clock has gone `every` further; goes on until it is cancelled."""
        due = 0.0
        while True:
            clock = self._worker.progress.clock
            if clock >= due:
                due = (clock // self._every + 1) * self._every
                await way_is_open()
                await self._evaluate(final=False)
            await moved.wait()

    async def last(self) -> None:
        """The evaluation at the run's end, which is worth a few tries."""
        for _ in range(3):
            if await self._evaluate(final=True):
                return

    async def _evaluate(self, *, final: bool) -> bool:
        progress = self._worker.progress
        try:
            names = [name for name, _ in self._samples.held_out_of]
            counts = [count for _, count in self._samples.held_out_of]
            losses = await evaluate(self._origin, self._samples.held_out, self._size, counts)
        except HopFailed as failure:
            logger.warning("evaluation at %.0f tokens came to nothing: %s", progress.clock, failure)
            return False
        self._emit(_told(names, losses, progress, final=final))
        return True


def _told(names: Sequence[str], losses: Sequence[tuple[float, int]], progress: Progress, *, final: bool) -> Evaluation:
    tokens = sum(count for _, count in losses)
    return Evaluation(
        clock=progress.clock,
        step=progress.steps,
        loss=sum(loss for loss, _ in losses) / tokens,
        tokens=tokens,
        final=final,
        sources=[
            SourceLoss(source=name, loss=loss / count, tokens=count)
            for name, (loss, count) in zip(names, losses, strict=bool(names))
            if count
        ],
    )
