"""An export from what was gathered to the finished folder."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from noloco_node.config.data_spec import NO_TOKENIZER
from noloco_node.config.run_spec import RunSpec
from noloco_node.data.encoding import fitting_tokenizer
from noloco_node.data.tokenizers import load_tokenizer
from noloco_node.document_marks import without_marks
from noloco_node.errors import ExitCode, UserError
from noloco_node.exporting.card import NAME as CARD
from noloco_node.exporting.card import model_card
from noloco_node.exporting.evaluation import HeldOut, Score
from noloco_node.exporting.folders import gather_folders
from noloco_node.exporting.gathered import Gathered, SavedReplica
from noloco_node.model.cut import build_config
from noloco_node.model.export import (
    continue_ids,
    export_model,
    generate_sample,
    load_exported,
    merge_replicas,
    parameters_of,
)
from noloco_node.node.checks import SMALLEST_DISK, free_disk
from noloco_node.storage import atomic
from noloco_node.telemetry.words import as_bytes

logger = logging.getLogger(__name__)

RUN_FILE = "noloco_run.json"
"""This file in a model's folder says what the run's nodes agreed on, so that `eval` knows the held-out text."""

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


def export(gathered: Gathered, out: Path, tell: _Tell, held_out: HeldOut | None = None) -> Exported:
    """Make the mean of the replicas of each stage and write it to `out` as one model. What it is worth is said in its
    card where there are `held_out` windows.

    Raises UserError as `Gathered.kept` and `write_model` do, and where the disk is too small.
    """
    run, used = gathered.run, gathered.kept()
    state: dict[str, Tensor] = {}
    for stage in sorted(used):
        count = len(used[stage])
        tell(f"stage {stage}: averaging {count} replicas" if count > 1 else f"stage {stage}: one replica")
        state |= mean_of(used[stage])
    parameters = parameters_of(run.model)
    _check_room(out, 4 * parameters)
    if held_out is not None:
        tell("scoring the model on the held-out text")
    score = held_out.score_of(state) if held_out is not None else None
    texts = {CARD: model_card(gathered, used, parameters, run.name, score), RUN_FILE: run.agreed_json}
    tell(f"writing {as_bytes(4 * parameters)} to {out}")
    write_model(run, state, out, texts)
    left_out = sum(map(len, gathered.replicas.values())) - sum(map(len, used.values()))
    return Exported(out, parameters, used, left_out, score)


def mean_of(replicas: Sequence[SavedReplica]) -> dict[str, Tensor]:
    """The mean of a stage's replicas, read one after the other. UserError (RUN_FOLDER) where they do not go together,
    or are damaged."""
    try:
        return merge_replicas(replica.load() for replica in replicas)
    except ValueError as error:
        sources = ", ".join(replica.source for replica in replicas)
        raise UserError(
            ExitCode.RUN_FOLDER,
            f"the weights of stage {replicas[0].stage} do not go together: {error} ({sources})",
            "leave out the folder of another model or version, and name those of one run",
        ) from None


def write_model(
    run: RunSpec,
    state: Mapping[str, Tensor],
    folder: Path,
    texts: Mapping[str, str] | None = None,
) -> None:
    """Write a whole model to `folder`, an ordinary Hugging Face one, with further `texts` by the name of their file. It
    is there as a whole or not at all; a folder already there is replaced. Raises UserError: RUN_FOLDER if the weights
    are not those of the run's model or the disk refuses, DATA if there is no such tokenizer."""
    if run.data.tokenizer != NO_TOKENIZER:
        load_tokenizer(run.data)
    try:
        with atomic.new_folder(folder) as partial_folder:
            export_model(run.model, state, partial_folder, run.data.tokenizer, revision=run.data.tokenizer_revision)
            for name, text in (texts or {}).items():
                (partial_folder / name).write_text(text, encoding="utf-8")
    except ValueError as error:
        raise UserError(
            ExitCode.RUN_FOLDER,
            f"the weights are not those of the model of run '{run.name}': {error}",
            "they were saved by another version or for another model: name the folders of nodes of this run",
        ) from None
    except (OSError, SafetensorError) as error:
        raise UserError(
            ExitCode.RUN_FOLDER,
            f"the model cannot be written to '{folder}': {getattr(error, 'strerror', None) or error}",
            "make room on the disk, or name a folder elsewhere that you may write to",
        ) from None


def _check_room(out: Path, size: int) -> None:
    free = free_disk(out.absolute().parent)
    if free < size + SMALLEST_DISK:
        raise UserError(
            ExitCode.RUN_FOLDER,
            f"the model needs {as_bytes(size + SMALLEST_DISK)} at '{out}', and {as_bytes(free)} are free there",
            "make room there, or name a folder on another disk with --out",
        )


PROMPT_SHARE = 4
"""A prompt is the first 1/4 of a held-out window; the model continues it to the window's length."""


@dataclass(frozen=True, slots=True)
class MergedModel:
    """What `merge_run` leaves."""

    model: Path
    """An ordinary Hugging Face folder, with its card."""
    sample: Path
    """Held-out beginnings, continued by the model."""
    loss: float
    """On the run's held-out windows, nats per token."""


def merge_run(run: RunSpec, saved: Sequence[Path], folder: Path, tell: Callable[[str], None]) -> MergedModel:
    """Average the slow weights of each stage's replicas, and put the stages together to one model in `folder`.

    `saved` are the folders that `save_stage` wrote; every stage needs one, and those `in_time` count. `tell`
    is told what comes next, since each part takes many seconds.
    Raises UserError: RUN_FOLDER for a stage without weights and for damaged ones, DATA where the text of the run cannot
    be read.
    """
    model, sample = folder / "model", folder / "sample.txt"
    held_out = HeldOut(run)
    exported = export(gather_folders(saved, run), model, tell, held_out)
    assert exported.score is not None
    tell("letting it continue a text")
    sample.write_text(_samples(run, model, held_out.rows[:3]), encoding="utf-8")
    return MergedModel(model, sample, exported.score.loss)


def _samples(run: RunSpec, model: Path, windows: Tensor) -> str:
    tokenizer = fitting_tokenizer(run.data, build_config(run.model).vocab_size)
    length = run.data.sequence_length
    parts: list[str] = []
    for number, window in enumerate(windows):
        beginning = without_marks(window[: max(1, length // PROMPT_SHARE)]).long()
        prompt = tokenizer.decode([int(token) for token in beginning])
        wanted, seed = length - length // PROMPT_SHARE, run.data.seed + number
        if run.data.tokenizer == NO_TOKENIZER:
            rest = tokenizer.decode(continue_ids(load_exported(model), beginning, wanted, seed)[len(beginning) :])
        else:
            rest = generate_sample(model, prompt, wanted, seed=seed).removeprefix(prompt)
        parts.append(f"--- held-out beginning {number + 1} ---\n{prompt}\n--- continued by the model ---\n{rest}\n")
    return "\n".join(parts)
