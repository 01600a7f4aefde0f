"""An exported folder, read back by plain transformers: a text that its model continues, shown as it comes."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from noloco_node import ambient
from noloco_node.data.tokenizers import encodable
from noloco_node.errors import ExitCode, UserError
from noloco_node.model.export import continue_ids, load_exported, pretrained_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
HALF_A_CHARACTER = "\ufffd"
"""A tokenizer shows this for bytes that make no character yet."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What is asked of a model."""

    prompt: str
    tokens: int
    """So many at most."""
    temperature: float
    """0: always the likeliest."""
    seed: int


@dataclass(frozen=True, slots=True)
class Spoken:
    """What came of it."""

    tokens: int
    full: bool
    """It ends since the model sees no longer text."""
    seconds: float


class Shown:
    """Text that grows by tokens of transformers' `tokenizer`, given on in whole characters."""

    def __init__(self, tokenizer: Any, ids: Sequence[int], write: Callable[[str], None]) -> None:
        self._tokenizer = tokenizer
        self._write = write
        self.ids = list(ids)
        self._came = len(tokenizer.decode(self.ids))

    def add(self, token: int) -> None:
        """One more token."""
        self.ids.append(token)
        text = self._tokenizer.decode(self.ids)
        if not text.endswith(HALF_A_CHARACTER):
            self._give(text)

    def end(self) -> None:
        """Nothing more comes: also what is no whole character."""
        self._give(self._tokenizer.decode(self.ids))

    def _give(self, text: str) -> None:
        if len(text) > self._came:
            self._write(text[self._came :])
            self._came = len(text)


def open_model(folder: Path) -> PreTrainedModel:
    """The model of a folder, fp32. UserError (RUN_FOLDER) where it cannot be loaded."""
    with _whole(folder):
        return load_exported(folder)


def continued(folder: Path, wish: Wish, write: Callable[[str], None]) -> Spoken:
    """Write the prompt, and what a folder's model says after it, as it comes. Raises UserError: RUN_FOLDER if it cannot
    be loaded or has no tokenizer. It raises USAGE for a prompt without a token, or one that is as long as the model's
    positions."""
    with _whole(folder):
        if not any((folder / name).is_file() for name in TOKENIZER_FILES):
            raise UserError(
                ExitCode.RUN_FOLDER,
                f"the model in '{folder}' has no tokenizer, so that no text is its beginning",
                "copy the files of the tokenizer that made its token ids into that folder",
            )
        tokenizer, model = pretrained_tokenizer(str(folder)), load_exported(folder)
    ids: list[int] = tokenizer.encode(encodable(wish.prompt), add_special_tokens=False, verbose=False)
    if not ids:
        raise UserError(ExitCode.USAGE, "--prompt is empty", "name the beginning of a text")
    room: int = model.config.max_position_embeddings - len(ids)
    if room < 1:
        message = f"--prompt has {len(ids)} tokens, and the model has {model.config.max_position_embeddings} positions"
        raise UserError(ExitCode.USAGE, message, "name a shorter beginning")
    if max(ids) >= model.config.vocab_size:
        message = f"--prompt has the token {max(ids)}, and the model's vocabulary has {model.config.vocab_size}"
        raise UserError(ExitCode.USAGE, message, "name another beginning: the model has never seen that token")
    began, end, came = ambient.monotonic(), tokenizer.eos_token_id, 0
    write(wish.prompt)
    shown = Shown(tokenizer, ids, write)

    def told(token: int) -> None:
        nonlocal came
        came += 1
        if token != end:
            shown.add(token)

    continue_ids(model, torch.tensor(ids), wish.tokens, wish.seed, wish.temperature, told)
    shown.end()
    return Spoken(came, came == room < wish.tokens, ambient.monotonic() - began)


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
