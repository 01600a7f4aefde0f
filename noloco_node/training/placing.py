"""A stage on the device where a replica of it trains, with its outer state on the host, as run and node say."""

from __future__ import annotations

import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from noloco_node import ambient
from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import RunSpec
from noloco_node.model.stage import Stage
from noloco_node.outer.codec import CODECS
from noloco_node.outer.replica import OuterReplica
from noloco_node.outer.update import OuterRule
from noloco_node.training.compute_device import device_kind, resolve_device, use_tensor_cores
from noloco_node.training.compute_thread import Compute, Priority
from noloco_node.training.stage_forms import INDUCTOR, CompileBackend
from noloco_node.training.stage_trainer import StageTrainer
from noloco_node.training.trainer import StageFacts, Trainer, carried_dtype


def outer_of(spec: RunSpec, trainer: Trainer) -> OuterReplica:
    """The outer state of a stage that begins at the trainer's weights, on the host."""
    outer = spec.outer
    slow = trainer.master.to(device="cpu", dtype=torch.float32, copy=True)
    replica = OuterReplica(
        OuterRule(outer.alpha, outer.beta, outer.effective_gamma, outer.momentum),
        slow,
        codec=CODECS[outer.codec],
        chunk_bytes=spec.limits.chunk_bytes,
        seed=ambient.chance().getrandbits(32),
        accelerator=trainer.copies.beside(),
    )
    replica.snapshot = trainer.copies.room(slow.shape, slow.dtype)
    return replica


logger = logging.getLogger(__name__)

COMPILED = "compiled"
"""Folder in the run folder for what torch.compile has made: another start takes it from there."""
UNFINISHED = "unfinished"
"""In that folder while a stage is being compiled: torch.compile trips over files that are half written."""
CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
"""Where torch.compile keeps it."""
TORCHS_OWN = "torchinductor_"
"""How the name of that folder begins, in /tmp, where nobody chooses: others of the machine can take it first."""


@dataclass(frozen=True, slots=True, eq=False)
class PlacedStage:
    """A stage with all vectors that its training takes: several times its weights, so it is never made on the loop."""

    stage: StageFacts
    trainer: Trainer
    outer: OuterReplica


async def place_stage(
    spec: RunSpec,
    stage: Stage,
    thread: Compute,
    *,
    device: str,
    wire_dtype: torch.dtype,
    backend: CompileBackend | None = None,
) -> PlacedStage:
    """Put a stage on its device (`node.device`), on the thread that owns that; compiled where a `backend` of
    torch.compile is named. UserError (CONFIG) as `StageTrainer.compile_for`."""

    def work() -> PlacedStage:
        trainer = StageTrainer(stage, spec.inner, device=device, wire_dtype=wire_dtype)
        if backend is not None:
            shape = (spec.inner.microbatch_windows, spec.data.sequence_length)
            trainer.compile_for(shape, documents=spec.data.attention == "document", backend=backend)
        if device_kind(trainer.device) is not None:
            use_tensor_cores(trainer.device)
            trainer.try_out()
        return PlacedStage(stage, trainer, outer_of(spec, trainer))

    return await thread.run(Priority.STEP, work)


async def on_its_device(spec: RunSpec, settings: NodeSettings, stage: Stage, thread: Compute) -> PlacedStage:
    """Put a stage where a replica of it trains (`place_stage`), compiled where the node's owner wants that. OSError
    where the run folder refuses what is compiled."""
    device, wire_dtype = resolve_device(settings.device), carried_dtype(spec.pipeline.activations)
    if not settings.compile:
        return await place_stage(spec, stage, thread, device=device, wire_dtype=wire_dtype)
    folder = settings.run_folder / COMPILED
    _keep_compiled_in(folder)
    await ambient.elsewhere(_begin, folder)
    logger.info("node.compile: the stage is being compiled, which takes a minute or more the first time")
    started = ambient.monotonic()
    placed = await place_stage(spec, stage, thread, device=device, wire_dtype=wire_dtype, backend=INDUCTOR)
    await ambient.elsewhere((folder / UNFINISHED).unlink)
    logger.info("node.compile: compiled in %.0f s", ambient.monotonic() - started)
    return placed


def _begin(folder: Path) -> None:
    """What a start that was broken off has left is thrown away, and this one is marked as begun."""
    if (folder / UNFINISHED).exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / UNFINISHED).touch()


def _keep_compiled_in(folder: Path) -> None:
    """Keep what torch.compile makes in `folder`, unless the environment names another place.

    torch names a place of its own there as soon as transformers is loaded, in this process or in its parent.
    """
    if Path(os.environ.get(CACHE_VARIABLE, TORCHS_OWN)).name.startswith(TORCHS_OWN):
        os.environ[CACHE_VARIABLE] = str(folder.absolute())
