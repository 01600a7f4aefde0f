"""From the saved stages of a run to one model: the mean of their replicas, written as a Hugging Face folder."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from noloco_node.config.data_spec import NO_TOKENIZER
from noloco_node.config.run_spec import RunSpec
from noloco_node.data.samples import Batch, inputs_and_labels
from noloco_node.data.tokenizers import load_tokenizer
from noloco_node.errors import ExitCode, UserError
from noloco_node.model.export import SHARD_BYTES, export_model, merge_replicas
from noloco_node.storage import atomic
from noloco_node.storage.weights import load_slow, read_manifest

logger = logging.getLogger(__name__)

RUN_FILE = "noloco_run.json"
"""This file in a model's folder says what the run's nodes agreed on, so that `eval` knows the held-out text."""


@dataclass(frozen=True, slots=True)
class SavedReplica:
    """The slow weights that one replica of a stage left, to be read when they are wanted."""

    stage: int
    clock: float
    """In swarm tokens."""
    source: str
    """Where they come from, for a person."""
    load: Callable[[], Mapping[str, Tensor]]
    """Full Hugging Face name -> fp32 tensor, on the CPU. Raises UserError where they are damaged."""
    peer: str = ""
    """Its peer id, where that is known."""


def final_weights(folder: Path) -> SavedReplica:
    """What `save_stage` left in a folder. Raises UserError (RUN_FOLDER) where its manifest is damaged."""
    manifest = read_manifest(folder)
    return SavedReplica(manifest.stage, manifest.clock, str(folder), partial(load_slow, folder))


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


def agreeing(clocks: Sequence[float], within: float, near: float) -> list[int]:
    """The places of the largest set of clocks that lie within so many tokens of each other. If several sets are as
    large, it is the one whose lowest clock is nearest to `near`. A clock is its owner's word: the largest one decides
    nothing."""
    order = sorted(range(len(clocks)), key=lambda place: clocks[place])
    sets = [[p for p in order[start:] if clocks[p] - clocks[first] <= within] for start, first in enumerate(order)]
    return sorted(min(sets, key=lambda found: (-len(found), abs(clocks[found[0]] - near)))) if sets else []


def in_time(replicas: Sequence[SavedReplica], max_lag: float, target: float) -> list[SavedReplica]:
    """The replicas of a stage that are at most `max_lag` tokens behind the furthest, as stage peers average. One that
    left early, or came when the others had gone, would pull the model back. A clock beyond the run's `target` counts as
    the target."""
    furthest = min(target, max(replica.clock for replica in replicas))
    kept = [replica for replica in replicas if furthest - replica.clock <= max_lag]
    if len(kept) < len(replicas):
        logger.warning(
            "%d of %d replicas of stage %d are more than %s tokens behind the others, and no part of the model",
            len(replicas) - len(kept),
            len(replicas),
            replicas[0].stage,
            f"{max_lag:,.0f}",
        )
    return kept


def write_model(
    run: RunSpec,
    state: Mapping[str, Tensor],
    folder: Path,
    texts: Mapping[str, str] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a whole model to `folder`, an ordinary Hugging Face one, with further `texts` by the name of their file. It
    is there as a whole or not at all; a folder already there is replaced. Raises UserError: RUN_FOLDER if the weights
    are not those of the run's model or the disk refuses, DATA if there is no such tokenizer."""
    if run.data.tokenizer != NO_TOKENIZER:
        load_tokenizer(run.data)
    try:
        with atomic.new_folder(folder) as partial_folder:
            export_model(run.model, state, partial_folder, run.data.tokenizer, shard_bytes, run.data.tokenizer_revision)
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


def batches_of(run: RunSpec, windows: Tensor) -> Iterator[Batch]:
    """Windows, int32 [n, T + 1], in microbatches of (inputs, labels), both int64 [B, T]."""
    size = run.inner.microbatch_windows
    return (inputs_and_labels(windows[start : start + size]) for start in range(0, len(windows), size))
