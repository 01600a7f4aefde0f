"""From the saved stages of a run to one model: merged, exported, evaluated, and made to speak."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from noloco_node.config.run_spec import RunSpec
from noloco_node.data.tokenizers import load_tokenizer
from noloco_node.data.windows import Windows, load_windows
from noloco_node.model.cut import build_config
from noloco_node.model.export import evaluate_model, export_model, generate_sample, load_exported, merge_replicas
from noloco_node.storage.weights import SavedStage, load_stage

logger = logging.getLogger(__name__)

SAMPLES = 3
PROMPT_SHARE = 4
"""A prompt is the first 1/4 of a held-out window; the model continues it to the window's length."""


@dataclass(frozen=True, slots=True)
class MergedModel:
    """What `merge_run` leaves."""

    model: Path
    """An ordinary Hugging Face folder."""
    sample: Path
    """Held-out beginnings, continued by the model."""
    loss: float
    """On the run's held-out windows, nats per token."""


def merge_run(run: RunSpec, saved: Mapping[int, Sequence[Path]], folder: Path) -> MergedModel:
    """Average the slow weights of each stage's replicas, and put the stages together to one model in `folder`.

    `saved` names the folders that `save_stage` wrote, by stage; every stage needs one, and those `in_time` count.
    Raises UserError: RUN_FOLDER for damaged weights, DATA where the text of the run cannot be read.
    """
    state: dict[str, Tensor] = {}
    for stage in range(run.stages):
        replicas = [load_stage(path) for path in saved[stage]]
        state |= merge_replicas([replica.slow for replica in in_time(replicas, run.max_lag_tokens)])
    model = folder / "model"
    export_model(run.model, state, model, run.data.tokenizer)
    windows = load_windows(run.data, build_config(run.model).vocab_size)
    held_out = windows.validation_indices(run.evaluation.windows)
    size = run.inner.microbatch_windows
    batches = (windows.validation(held_out[start : start + size]) for start in range(0, len(held_out), size))
    loss = evaluate_model(load_exported(model), batches)
    sample = folder / "sample.txt"
    sample.write_text(_samples(run, windows, model, held_out[:SAMPLES]), encoding="utf-8")
    return MergedModel(model, sample, loss)


def in_time(replicas: Sequence[SavedStage], max_lag: float) -> list[SavedStage]:
    """Those of a stage's replicas that are at most `max_lag` tokens behind the furthest, as fellows average: one that
    left early, or came when the others had gone, would pull the model back."""
    furthest = max(replica.manifest.clock for replica in replicas)
    kept = [replica for replica in replicas if furthest - replica.manifest.clock <= max_lag]
    if len(kept) < len(replicas):
        logger.warning(
            "%d of %d replicas of stage %d are more than %s tokens behind the others, and no part of the model",
            len(replicas) - len(kept),
            len(replicas),
            replicas[0].manifest.stage,
            f"{max_lag:,.0f}",
        )
    return kept


def _samples(run: RunSpec, windows: Windows, model: Path, indices: Sequence[int]) -> str:
    tokenizer = load_tokenizer(run.data.tokenizer)
    length = run.data.sequence_length
    parts: list[str] = []
    for number, index in enumerate(indices):
        inputs, _ = windows.validation([index])
        beginning = inputs[0, : max(1, length // PROMPT_SHARE)]
        prompt = tokenizer.decode([int(token) for token in beginning])
        text = generate_sample(model, prompt, length - length // PROMPT_SHARE, seed=run.data.seed + number)
        rest = text.removeprefix(prompt)
        parts.append(f"--- held-out beginning {number + 1} ---\n{prompt}\n--- continued by the model ---\n{rest}\n")
    return "\n".join(parts)
