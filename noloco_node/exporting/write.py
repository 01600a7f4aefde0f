"""An export from what was gathered to the finished folder."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from noloco_node.errors import ExitCode, UserError
from noloco_node.exporting.card import NAME as CARD
from noloco_node.exporting.card import model_card
from noloco_node.exporting.evaluation import Bench, Score
from noloco_node.exporting.gathered import Gathered, chosen
from noloco_node.exporting.merge import RUN_FILE, SavedReplica, mean_of, write_model
from noloco_node.model.export import SHARD_BYTES, parameters_of
from noloco_node.node.checks import free_disk
from noloco_node.telemetry.words import as_bytes

logger = logging.getLogger(__name__)

SPARE_BYTES = 16 << 20
"""So many bytes are kept free for everything beside the weights."""
BEST = "best"

_Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written where."""

    folder: Path
    parameters: int
    used: Mapping[int, Sequence[SavedReplica]]
    left_out: int
    """Replicas too far behind."""
    score: Score | None
    """On the run's held-out text, where that was asked for."""


def check_out(out: Path) -> None:
    """Raise UserError (RUN_FOLDER) where `out` exists, or nothing can be made there."""
    if out.exists() or out.is_symlink():
        raise UserError(ExitCode.RUN_FOLDER, f"--out is '{out}', which exists already", "name a folder that does not")
    try:
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            ExitCode.RUN_FOLDER,
            f"--out is '{out}', which cannot be made: {error.strerror or error}",
            "name a folder that you may write to",
        ) from None


def export(
    gathered: Gathered, out: Path, which: str, tell: _Tell, shard_bytes: int = SHARD_BYTES, bench: Bench | None = None
) -> Exported:
    """Make the model and write it to `out`. `which`: `mean`, `best` (needs `bench`), or a replica's name. What the
    model is worth is said in its card where there is a `bench`.

    Raises UserError as `Gathered.kept`, `chosen` and `write_model` do, and where the disk is too small.
    """
    run, kept = gathered.run, gathered.kept()
    used = chosen(kept, "mean" if which == BEST else which)
    state: dict[str, Tensor] = {}
    for stage in sorted(used):
        count = len(used[stage])
        tell(f"stage {stage}: averaging {count} replicas" if count > 1 else f"stage {stage}: one replica")
        state |= mean_of(used[stage])
    if which == BEST:
        if bench is None:
            raise ValueError("the best replicas cannot be told without a bench")
        used, state = bench.best_of(kept, state, tell)
    parameters = parameters_of(run.model)
    _check_room(out, 4 * parameters)
    if bench is not None:
        tell("scoring the model on the held-out text")
    score = bench.score(state) if bench is not None else None
    texts = {CARD: model_card(gathered, used, parameters, run.name, score), RUN_FILE: run.agreed_json}
    tell(f"writing {as_bytes(4 * parameters)} to {out}")
    write_model(run, state, out, texts, shard_bytes)
    left_out = sum(map(len, gathered.replicas.values())) - sum(map(len, kept.values()))
    return Exported(out, parameters, used, left_out, score)


def _check_room(out: Path, size: int) -> None:
    free = free_disk(out.absolute().parent)
    if free < size + SPARE_BYTES:
        raise UserError(
            ExitCode.RUN_FOLDER,
            f"the model needs {as_bytes(size + SPARE_BYTES)} at '{out}', and {as_bytes(free)} are free there",
            "make room there, or name a folder on another disk with --out",
        )
