"""An export from what was gathered to the finished folder, and to a repository of the Hugging Face hub."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import huggingface_hub
from huggingface_hub import errors as hub_errors
from torch import Tensor

from noloco_node.errors import ExitCode, UserError
from noloco_node.exporting.card import NAME as CARD
from noloco_node.exporting.card import model_card
from noloco_node.exporting.evaluation import Bench, Score
from noloco_node.exporting.gathered import Gathered
from noloco_node.exporting.merge import RUN_FILE, SavedReplica, mean_of, write_model
from noloco_node.model.export import SHARD_BYTES, parameters_of
from noloco_node.node.checks import free_disk
from noloco_node.telemetry.words import as_bytes, printable

logger = logging.getLogger(__name__)

SPARE_BYTES = 16 << 20
"""The bytes that are kept free on the disk for everything beside the weights."""

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
    gathered: Gathered, out: Path, tell: _Tell, shard_bytes: int = SHARD_BYTES, bench: Bench | None = None
) -> Exported:
    """Make the mean of the replicas of each stage and write it to `out` as one model. What it is worth is said in its
    card where there is a `bench`.

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
    if bench is not None:
        tell("scoring the model on the held-out text")
    score = bench.score(state) if bench is not None else None
    texts = {CARD: model_card(gathered, used, parameters, run.name, score), RUN_FILE: run.agreed_json}
    tell(f"writing {as_bytes(4 * parameters)} to {out}")
    write_model(run, state, out, texts, shard_bytes)
    left_out = sum(map(len, gathered.replicas.values())) - sum(map(len, used.values()))
    return Exported(out, parameters, used, left_out, score)


def _check_room(out: Path, size: int) -> None:
    free = free_disk(out.absolute().parent)
    if free < size + SPARE_BYTES:
        raise UserError(
            ExitCode.RUN_FOLDER,
            f"the model needs {as_bytes(size + SPARE_BYTES)} at '{out}', and {as_bytes(free)} are free there",
            "make room there, or name a folder on another disk with --out",
        )


REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
STALE = ["*.safetensors", "*.safetensors.index.json"]
"""An earlier push may have left weights under these names; transformers would load them in place of the new ones."""
NO_ANSWER = cast("type[Exception]", hub_errors.HfHubHTTPError.__bases__[0])
"""The library's HTTP client raises this, whichever client that is."""
LOG_IN = "log in with `hf auth login`, or set HF_TOKEN: a token that may write, from the hub's settings"


def check_push(repository: str) -> None:
    """Raise UserError before anything is fetched or written: USAGE where this is no OWNER/NAME, HUB without a token."""
    if not REPOSITORY.fullmatch(repository):
        message = f"--push is '{repository}'"
        raise UserError(ExitCode.USAGE, message, "name a repository of the hub as OWNER/NAME")
    try:
        token = huggingface_hub.get_token()
    except (NO_ANSWER, OSError, ValueError, RuntimeError) as error:
        raise UserError(ExitCode.HUB, f"the token for the hub cannot be had: {_first_line(error)}", LOG_IN) from None
    if not token:
        raise UserError(ExitCode.HUB, "there is no token for the hub on this machine", LOG_IN)


def push(folder: Path, repository: str, *, public: bool) -> str:
    """Upload a folder as one model repository of the hub, made where there is none: for the owner alone, unless
    `public`. Weights that lie there under other names are removed with it. Its address.

    Raises UserError (HUB) where that fails; the folder stays as it is.
    """
    hub = huggingface_hub.HfApi(token=True)
    try:
        made = hub.create_repo(repository, private=not public, exist_ok=True)
        hub.upload_folder(
            repo_id=repository,
            folder_path=folder,
            commit_message="A model that noloco-node exported",
            delete_patterns=STALE,
        )
    except hub_errors.HfHubHTTPError as error:
        raise _refused(folder, repository, error) from None
    except (NO_ANSWER, OSError, ValueError, RuntimeError) as error:
        raise _failed(folder, repository, _first_line(error), "look whether the hub can be reached from here") from None
    return str(made)


def _refused(folder: Path, repository: str, error: hub_errors.HfHubHTTPError) -> UserError:
    status = error.response.status_code
    what, remedy = {
        401: ("it does not accept the token", LOG_IN),
        403: ("the token may not write there", f"take a token that may write to {repository}, or name another one"),
        404: (
            "there is no such owner, or the token may not write there",
            "look at the name and the token's rights",
        ),
        409: ("somebody else changes it at the same time", "wait until that is done"),
    }.get(status, (_first_line(error), "look at the hub's status, and try again later"))
    return _failed(folder, repository, f"{what} (HTTP {status})", remedy)


def _failed(folder: Path, repository: str, why: str, remedy: str) -> UserError:
    again = f"hf upload {repository} '{folder}'"
    return UserError(
        ExitCode.HUB,
        f"the model was not pushed to {repository}: {why}. It is whole in '{folder}'",
        f"{remedy}; then: {again}",
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return printable(lines[0])[:300] if lines else type(error).__name__
