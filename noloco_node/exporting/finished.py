"""What a run that has come to its end leaves: one model out of its nodes' final weights, and a sample of its text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from noloco_node.config.data_spec import NO_TOKENIZER
from noloco_node.config.run_spec import RunSpec
from noloco_node.data.encoding import fitting_tokenizer
from noloco_node.document_marks import without_marks
from noloco_node.exporting.evaluation import Bench, HeldOut
from noloco_node.exporting.folders import gather_folders
from noloco_node.exporting.write import export
from noloco_node.model.cut import build_config
from noloco_node.model.export import continue_ids, generate_sample, load_exported

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
    exported = export(gather_folders(saved, run), model, tell, bench=Bench(run, held_out))
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
