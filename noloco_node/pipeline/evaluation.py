"""When stage 0 evaluates: at the start, whenever the clock has gone far enough, and at the end."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence

from noloco_node.aio import Pulse
from noloco_node.data.samples import Samples
from noloco_node.pipeline.messages import HopFailed
from noloco_node.pipeline.source import MicrobatchSource
from noloco_node.telemetry.events import Evaluation, SourceLoss
from noloco_node.training.progress import Progress
from noloco_node.training.stage_worker import StageWorker

logger = logging.getLogger(__name__)

FINAL_TRIES = 3


class Evaluations:
    """Sends the held-out windows through the swarm and emits what comes of it. `every` is in tokens of the clock."""

    def __init__(
        self,
        origin: MicrobatchSource,
        samples: Samples,
        worker: StageWorker,
        every: int,
        emit: Callable[[Evaluation], None],
    ) -> None:
        self._origin = origin
        self._samples = samples
        self._worker = worker
        self._every = every
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
        for _ in range(FINAL_TRIES):
            if await self._evaluate(final=True):
                return

    async def _evaluate(self, *, final: bool) -> bool:
        progress = self._worker.progress
        try:
            names = [name for name, _ in self._samples.held_out_of]
            counts = [count for _, count in self._samples.held_out_of]
            losses = await self._origin.evaluate(self._samples.held_out, counts)
        except HopFailed as failure:
            logger.warning("evaluation at clock %.0f came to nothing: %s", progress.clock, failure)
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
