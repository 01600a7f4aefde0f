"""An exported folder, read back by plain transformers; what is wrong with it in a person's words."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from noloco_node.errors import ExitCode, UserError
from noloco_node.model.export import generate_sample, load_exported

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def open_model(folder: Path) -> PreTrainedModel:
    """The model of a folder, fp32. UserError (RUN_FOLDER) where it cannot be loaded."""
    with _whole(folder):
        return load_exported(folder)


def continued(folder: Path, prompt: str, tokens: int, seed: int, temperature: float) -> str:
    """The prompt and up to `tokens` further tokens of a folder's model, as `generate_sample` draws them.

    UserError: RUN_FOLDER where it cannot be loaded or has no tokenizer, USAGE for a prompt without a token.
    """
    if not prompt:
        raise UserError(ExitCode.USAGE, "--prompt is empty", "name the beginning of a text")
    with _whole(folder):
        if not any((folder / name).is_file() for name in TOKENIZER_FILES):
            raise UserError(
                ExitCode.RUN_FOLDER,
                f"the model in '{folder}' has no tokenizer, so that no text is its beginning",
                "copy the files of the tokenizer that made its token ids into that folder",
            )
        return generate_sample(folder, prompt, tokens, seed, temperature)


@contextmanager
def _whole(folder: Path) -> Generator[None]:
    if not (folder / "config.json").is_file():
        raise UserError(
            ExitCode.RUN_FOLDER,
            f"'{folder}' is no exported model: it has no config.json",
            "name the folder that noloco-node export wrote (--out)",
        )
    try:
        yield
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        lines = str(error).strip().splitlines()
        raise UserError(
            ExitCode.RUN_FOLDER,
            f"the model in '{folder}' cannot be used: {lines[0][:300] if lines else type(error).__name__}",
            "copy it again as a whole, or export it anew",
        ) from None
