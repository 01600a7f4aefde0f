"""An exported folder goes to a model hub: with the user's own token, from where huggingface_hub keeps it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import cast

import huggingface_hub
from huggingface_hub import errors as hub_errors

from noloco_node.errors import ExitCode, UserError
from noloco_node.telemetry.words import printable

REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
STALE = ["*.safetensors", "*.safetensors.index.json"]
"""An earlier push may have left weights under these names; transformers would load them in place of the new ones."""
NO_ANSWER = cast("type[Exception]", hub_errors.HfHubHTTPError.__bases__[0])
"""The library's HTTP client raises this, whichever client that is."""
MOST_SHOWN = 300
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
    return printable(lines[0])[:MOST_SHOWN] if lines else type(error).__name__
