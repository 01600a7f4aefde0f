"""The weights of one stage on disk: a safetensors file and a manifest that proves it whole."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from noloco_node import __version__
from noloco_node.config.files import check_plain, read_small
from noloco_node.config.settings import canonical_json
from noloco_node.errors import ExitCode, UserError
from noloco_node.model.cut import StageCut
from noloco_node.storage import atomic

MANIFEST = "manifest.json"
SLOW_FILE = "slow.safetensors"

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Sealed(BaseModel):
    """A manifest whose `seal` is the SHA-256 of its other fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    seal: Sha256 | Literal[""] = ""

    @staticmethod
    def holds_in(text: bytes) -> bool:
        """Whether the seal in a manifest's JSON is that of its other fields, also of those unknown here."""
        written = json.loads(text)
        seal = written.pop("seal", "")
        return seal == _seal_of(written)

    def sealed(self) -> Self:
        """This manifest with its seal as it must be."""
        return self.model_copy(update={"seal": _seal_of(self.model_dump(mode="json", exclude={"seal"}))})


def _seal_of(fields: dict[str, object]) -> str:
    return hashlib.sha256(canonical_json(fields).encode()).hexdigest()


class WeightsManifest(Sealed):
    """What the files are and their SHA-256. Older releases wrote the fast weights beside the slow ones."""

    format: Literal[1] = 1
    version: str
    """noloco-node's version that wrote it."""
    run_id: str
    stage: Annotated[int, Field(ge=0)]
    stages: Annotated[int, Field(gt=0)]
    first_layer: Annotated[int, Field(ge=0)]
    end_layer: Annotated[int, Field(gt=0)]
    clock: Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
    """Clock in swarm tokens."""
    outer_rounds: Annotated[int, Field(ge=0)]
    files: dict[Literal["slow.safetensors", "fast.safetensors"], Sha256]


def save_stage(
    folder: Path, *, run_id: str, cut: StageCut, clock: float, outer_rounds: int, slow: Mapping[str, Tensor]
) -> WeightsManifest:
    """Write slow weights (full Hugging Face name -> tensor) to `folder`, replacing it as a whole.

    `clock` is in swarm tokens. Raises UserError (RUN_FOLDER) when the disk refuses; an older `folder` then stays.
    """
    try:
        with atomic.new_folder(folder) as partial:
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in slow.items()}
            save_file(tensors, partial / SLOW_FILE)
            manifest = WeightsManifest(
                version=__version__,
                run_id=run_id,
                stage=cut.index,
                stages=cut.stages,
                first_layer=cut.first_layer,
                end_layer=cut.end_layer,
                clock=clock,
                outer_rounds=outer_rounds,
                files={SLOW_FILE: file_sha256(partial / SLOW_FILE)},
            ).sealed()
            atomic.write_json(partial / MANIFEST, manifest.model_dump(mode="json"))
    except (OSError, SafetensorError) as error:
        raise UserError(
            ExitCode.RUN_FOLDER,
            f"the weights cannot be saved to '{folder}': {error}",
            "make room on the disk, or choose another run_folder",
        ) from error
    return manifest


def read_manifest(folder: Path) -> WeightsManifest:
    """What `save_stage` wrote about its files. Raises UserError (RUN_FOLDER) when it is missing, torn or altered."""
    try:
        manifest = WeightsManifest.model_validate_json(text := read_small(folder / MANIFEST))
    except (OSError, ValidationError) as error:
        raise _unreadable(folder, error) from error
    if not Sealed.holds_in(text):
        raise _damaged(folder, f"{MANIFEST} does not match its own seal")
    return manifest


def load_slow(folder: Path) -> dict[str, Tensor]:
    """The slow weights: full Hugging Face name -> fp32 tensor, on the CPU.

    Raises UserError (RUN_FOLDER) when their file or the manifest is missing, torn or altered."""
    manifest = read_manifest(folder)
    try:
        check_plain(folder / SLOW_FILE)
        if file_sha256(folder / SLOW_FILE) != manifest.files[SLOW_FILE]:
            raise _damaged(folder, f"{SLOW_FILE} does not match the hash in its {MANIFEST}")
        return load_file(folder / SLOW_FILE)
    except (OSError, KeyError, SafetensorError) as error:
        raise _unreadable(folder, error) from error


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _damaged(folder: Path, reason: str) -> UserError:
    return UserError(
        ExitCode.RUN_FOLDER,
        f"the saved weights in '{folder}' are damaged or incomplete: {reason}",
        "remove the folder and take the weights from another replica of the stage",
    )


def _unreadable(folder: Path, error: Exception) -> UserError:
    return _damaged(folder, f"{type(error).__name__}: {str(error).splitlines()[0]}")
