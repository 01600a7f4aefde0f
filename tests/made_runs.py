"""Run folders as nodes leave them, made by hand: small, quick, and of a known state."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from noloco_node.config.load import load_config
from noloco_node.config.run_spec import RunSpec
from noloco_node.model.stage import build_stage
from noloco_node.storage.checkpoint import CheckpointFolder
from noloco_node.storage.run_folder import RunFolder
from noloco_node.storage.weights import save_stage
from noloco_node.telemetry.events import Evaluation, EventFile
from noloco_node.training.layout import FlatLayout
from tests.storage.test_checkpoint import standing
from tests.telemetry import made_events

MICRO = Path(__file__).parent / "configs" / "micro.yaml"
TEXT = Path(__file__)
OWN_TEXT = ("run.data.source=text", f"run.data.path={TEXT}")
"""The standard library takes seconds to read."""
RUN = load_config(MICRO, OWN_TEXT).run


def weights(stage: int, run: RunSpec = RUN, shift: float = 0.0) -> dict[str, Tensor]:
    """The first weights of a stage, each moved on by `shift`, under their full names."""
    module = build_stage(run.model, stage)
    names = module.full_names()
    return {names[name]: tensor.detach() + shift for name, tensor in module.named_parameters()}


def finished(
    folder: Path, stage: int, *, run: RunSpec = RUN, clock: float = 49_152.0, shift: float = 0.0, peer: str = ""
) -> Path:
    """The run folder of a node that came to the run's end at `stage`."""
    cut, state = build_stage(run.model, stage).cut, weights(stage, run, shift)
    kept = RunFolder.create(folder)
    kept.keep_spec(run.agreed_json)
    save_stage(kept.final, run_id=run.run_id, cut=cut, clock=clock, outer_rounds=1, slow=state)
    if peer:
        diary = EventFile(kept.events)
        diary.write(made_events.started("s0-r0").model_copy(update={"peer_id": peer, "stage": stage}))
        diary.write(Evaluation(time=1001.0, clock=40_000.0, step=3, loss=2.5, tokens=512, final=False))
        diary.close()
    return folder


def under_way(folder: Path, stage: int, *, run: RunSpec = RUN, clock: float = 20_000.0, shift: float = 0.0) -> Path:
    """The run folder of a node that died and left one more checkpoint."""
    module = build_stage(run.model, stage)
    names = module.full_names()
    state = weights(stage, run, shift)
    slow = FlatLayout.of(dict(module.named_parameters())).flatten({local: state[full] for local, full in names.items()})
    at = standing(clock, run_id=run.run_id, stage=stage)
    kept = RunFolder.create(folder)
    kept.keep_spec(run.agreed_json)
    CheckpointFolder(kept.checkpoints, keep=3).write(at, {"slow": slow, "fast": torch.zeros_like(slow)})
    return folder
