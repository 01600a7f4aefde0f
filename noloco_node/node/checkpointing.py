"""When a node's state is saved, and how it is taken up again. What lies on the disk is `storage.checkpoint`'s."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from noloco_node import ambient
from noloco_node.ambient import OneByOne
from noloco_node.config.node_settings import NodeSettings
from noloco_node.document_marks import without_marks
from noloco_node.errors import ExitCode, UserError
from noloco_node.node.replica import Replica
from noloco_node.pipeline.messages import Sample
from noloco_node.process_memory import refused_memory
from noloco_node.storage.checkpoint import (
    Checkpoint,
    CheckpointFailed,
    CheckpointFolder,
    HeldSample,
    KeptStanding,
    Written,
    held_name,
)
from noloco_node.telemetry.events import AnyEvent, CheckpointTaken
from noloco_node.training.frozen_state import FrozenState
from noloco_node.training.progress import Progress
from noloco_node.training.stage_worker import CheckpointState

logger = logging.getLogger(__name__)

HELD_SHARE = 0.002
"""Checkpoints may hold the compute thread for at most this share of the time, whatever the settings say. If a snapshot
takes long, they become rarer."""

LAST_OF_ALL = 2.0
"""A leaving node writes so many times a checkpoint: one, and slow and fast weights, which are less than another."""

HOLDS_TO_TELL = 3
RANDOM = "random_state"


def is_due(*, rounds: int, seconds: float, held_seconds: float, every_rounds: int, at_least_seconds: float) -> bool:
    """Whether to take a checkpoint, `rounds` outer steps and `seconds` after the last one began, which held the
    compute thread for `held_seconds`."""
    return rounds >= every_rounds and seconds >= max(at_least_seconds, held_seconds / HELD_SHARE)


def too_slow_to_leave(seconds: float, leave_seconds: float, drain_seconds: float) -> bool:
    """Tell whether a node whose checkpoint took so long would be ended before it has written its last state."""
    return drain_seconds + LAST_OF_ALL * seconds > leave_seconds


class CheckpointKeeper:
    """Takes a replica's checkpoints beside its training, on a thread that does nothing else."""

    def __init__(
        self,
        replica: Replica,
        folder: CheckpointFolder,
        emit: Callable[[AnyEvent], None],
        settings: NodeSettings,
        birth: Callable[[], str | None] = lambda: None,
    ) -> None:
        """`birth` gives the life of the run that is saved."""
        self._birth = birth
        self._replica = replica
        self._folder = folder
        self._emit = emit
        self._settings = settings
        self._disk = OneByOne("checkpoint")
        self._failing = self._too_slow = False
        self._held: deque[float] = deque(maxlen=HOLDS_TO_TELL)
        self._round, self._since = replica.worker.progress.outer_rounds, ambient.monotonic()

    async def resume(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint: weights, optimizer, clock, samples held, books. Before the replica runs.

        Raises UserError (RUN_FOLDER) where it does not fit this stage.
        """
        standing, tensors = checkpoint.standing, dict(checkpoint.tensors)
        random_state = tensors.pop(RANDOM, None)
        windows = [tensors.pop(held_name(number), None) for number in range(len(standing.held))]
        state = CheckpointState(
            standing.progress, standing.credit, standing.tokens_accumulated, standing.loss_accumulated, tensors
        )
        try:
            held = [
                Sample(self._checked(rows), each.requeues) for each, rows in zip(standing.held, windows, strict=True)
            ]
            await self._replica.worker.resume(state)
            if random_state is not None:
                self._replica.context.rng.setstate((3, tuple(int(word) for word in random_state), None))
        except (ValueError, TypeError, OverflowError, RuntimeError) as error:  # sealed by its writer, not sound
            raise UserError(
                ExitCode.RUN_FOLDER,
                f"the checkpoint {checkpoint.path} cannot be gone on from: {error}",
                "use the version of noloco-node that wrote it, or remove it to start from a stage peer's state",
            ) from None
        ledger = self._replica.pipeline.ledger
        ledger.resume(standing.ledger)
        ledger.waiting.clear()  # after a pause it has those of the checkpoint already
        ledger.waiting.extend(held)
        if self._replica.pipeline.origin is None:  # else its text goes on from there already
            ledger.walk = standing.walk
        self._replica.averaging.side.free_since_step = standing.progress.steps
        self._round = standing.progress.outer_rounds

    @property
    def failing(self) -> bool:
        """Whether the last one was not taken."""
        return self._failing

    async def run(self) -> None:
        """Take a checkpoint whenever one is due, until cancelled."""
        while True:
            await self._replica.context.moved.wait()
            rounds = self._replica.worker.progress.outer_rounds
            self._round = min(self._round, rounds)  # a state that was taken over may have seen fewer
            if is_due(
                rounds=rounds - self._round,
                seconds=ambient.monotonic() - self._since,
                held_seconds=self._usual_hold(),
                every_rounds=self._settings.checkpoint_outer_steps,
                at_least_seconds=self._settings.checkpoint_seconds,
            ):
                await self.save()

    async def save(self) -> None:
        """Take a checkpoint now. Where the disk refuses it, or there is no memory for a piece of it: a warning, once
        until it works again; never an error."""
        self._since = ambient.monotonic()
        async with self._replica.worker.frozen() as state:
            await self._write(state)

    async def save_or_keep(self) -> Checkpoint | None:
        """Take a checkpoint of a replica that trains no more; where the disk refuses it, give what it would hold."""
        await self.save()
        if not self._failing:
            return None
        async with self._replica.worker.frozen() as state:
            standing, beside = self._standing(state), self._beside_the_state()
            tensors = await ambient.elsewhere(_in_memory, state)
        return Checkpoint(self._folder.path, standing, {**tensors, **beside})

    def _beside_the_state(self) -> dict[str, Tensor]:
        held = {held_name(number): each.windows for number, each in enumerate(self._replica.pipeline.held_samples)}
        return {RANDOM: self._random_state(), **held}

    async def _write(self, state: FrozenState) -> None:
        started = self._since
        standing = self._standing(state)  # no await before it: see `StageWorker.frozen`
        self._round = state.progress.outer_rounds
        tensors = self._beside_the_state()
        written, error = None, ""
        try:
            written = await self._disk.do(lambda: self._folder.write(standing, tensors, state))
        except CheckpointFailed as failure:
            error = str(failure)
        except (MemoryError, RuntimeError) as refusal:
            if refused_memory(refusal) is None:
                raise
            error = f"no memory for a piece of the state ({str(refusal)[:200]})"
        self._held.append(state.held_seconds)
        self._report(error)
        seconds = ambient.monotonic() - started
        if written is not None:
            self._warn_if_slow(seconds)
        self._emit(_event(state.progress, state.held_seconds, written, error, seconds))

    def _usual_hold(self) -> float:
        """How long the training waits for a checkpoint: the least of the last few. One alone says as much of what else
        ran on the machine just then, and must not put the next checkpoint off."""
        return min(self._held) if len(self._held) == HOLDS_TO_TELL else 0.0

    def __enter__(self) -> CheckpointKeeper:
        return self

    def __exit__(self, *_: object) -> None:
        """Take no more. A write that is under way is not waited for: it becomes whole, or counts for nothing."""
        self._disk.stop()

    def _standing(self, state: FrozenState) -> KeptStanding:
        return KeptStanding(
            run_id=self._replica.context.spec.run_id,
            stage=self._replica.stage,
            progress=state.progress,
            credit=state.credit,
            tokens_accumulated=state.tokens_accumulated,
            loss_accumulated=state.loss_accumulated,
            walk=self._replica.pipeline.walk_position(),
            held=tuple(HeldSample(requeues=sample.requeues) for sample in self._replica.pipeline.held_samples),
            ledger=self._replica.pipeline.ledger.counts,
            birth=self._birth(),
        )

    def _checked(self, windows: Tensor | None) -> Tensor:
        """A held sample's windows. ValueError where no such text could have given them."""
        spec = self._replica.context.spec
        most = (spec.inner.microbatch_windows, spec.data.sequence_length + 1)
        if windows is None or windows.dtype != torch.int32 or windows.dim() != 2:
            raise ValueError("a sample that it holds has no windows")
        if not 1 <= windows.shape[0] <= most[0] or windows.shape[1] != most[1]:
            raise ValueError(f"a sample that it holds has windows of {tuple(windows.shape)}, not {most}")
        ids = without_marks(windows) if spec.data.attention == "document" else windows
        if not (windows >= 0).all() or not (ids < self._replica.vocab_size).all():
            raise ValueError("a sample that it holds has tokens outside the vocabulary")
        return windows

    def _random_state(self) -> Tensor:
        """The random state of the choices of routes and partners, so that a returning node chooses otherwise."""
        _, words, _ = self._replica.context.rng.getstate()
        return torch.tensor(words, dtype=torch.int64)

    def _warn_if_slow(self, seconds: float) -> None:
        """Once until it is quick again: at its end it would be too late."""
        former, bound = self._too_slow, self._settings.leave_seconds
        self._too_slow = too_slow_to_leave(seconds, bound, self._settings.drain_seconds)
        if self._too_slow and not former:
            logger.warning(
                "a checkpoint took %.0f s: leaving has node.leave_seconds (%g) in all, and the last one would be lost; "
                "raise it, or choose a quicker disk",
                seconds,
                bound,
            )

    def _report(self, error: str) -> None:
        where = self._folder.path
        if error and not self._failing:
            logger.warning("no checkpoint can be written to %s: %s; training goes on, and each is tried", where, error)
        elif self._failing and not error:
            logger.info("checkpoints are written to %s again", where)
        self._failing = bool(error)


def _event(
    progress: Progress, held_seconds: float, written: Written | None, error: str, seconds: float
) -> CheckpointTaken:
    return CheckpointTaken(
        path=str(written.path) if written else None,
        clock=progress.clock,
        outer_steps_taken=progress.outer_rounds,
        step=progress.steps,
        size=written.size if written else 0,
        held_seconds=held_seconds,
        seconds=seconds,
        error=error,
    )


def _in_memory(state: FrozenState) -> dict[str, Tensor]:
    tensors = {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in state.sizes.items()}
    for name, start, piece in state.pieces():
        tensors[name].view(-1)[start : start + piece.numel()] = piece.reshape(-1)
    return tensors
