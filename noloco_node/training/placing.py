"""A stage on the device where a replica of it trains, as this node's settings say."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

from noloco_node import ambient
from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import RunSpec
from noloco_node.model.stage import Stage
from noloco_node.training.activation_codec import carried_dtype
from noloco_node.training.compiled_stage import INDUCTOR
from noloco_node.training.compute_device import resolve_device
from noloco_node.training.compute_thread import Compute
from noloco_node.training.stage_worker import PlacedStage, place_stage

logger = logging.getLogger(__name__)

COMPILED = "compiled"
"""Folder in the run folder for what torch.compile has made: another start takes it from there."""
UNFINISHED = "unfinished"
"""In that folder while a stage is being compiled: torch.compile trips over files that are half written."""
CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
"""Where torch.compile keeps it."""
TORCHS_OWN = "torchinductor_"
"""How the name of that folder begins, in /tmp, where nobody chooses: others of the machine can take it first."""


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
