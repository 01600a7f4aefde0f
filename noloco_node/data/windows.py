"""Tokens packed into windows of equal length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from noloco_node.config.run_spec import DataSpec
from noloco_node.data.documents import Document, data_error
from noloco_node.data.loaders import ends_of_ids
from noloco_node.data.places import find_files
from noloco_node.data.sources import divided
from noloco_node.data.token_file import TokenFile
from noloco_node.data.tokenizers import Tokenizer, Tokens, load_tokenizer
from noloco_node.data.walk import Permutation
from noloco_node.errors import ExitCode, UserError


class Windows:
    """Training and validation windows, each of `sequence_length` + 1 tokens, without overlap.

    `train` and `validation` give (inputs, labels), both int64 [len(indices), sequence_length]: labels are the inputs
    moved on by one token.
    """

    def __init__(self, training: TokenFile, validation: TokenFile, spec: DataSpec) -> None:
        self._training, self._validation = training, validation
        self._length, self._seed = spec.sequence_length + 1, spec.seed
        for tokens, purpose in ((training, "training"), (validation, "validation")):
            if tokens.count < self._length:
                raise data_error(
                    f"the {purpose} text has {tokens.count} tokens, less than one window of run.data.sequence_length "
                    f"+ 1 ({self._length})",
                    "add text, lower run.data.sequence_length, or raise run.data.holdout where the validation text is "
                    "too short",
                )

    @property
    def train_count(self) -> int:
        """Windows to train on."""
        return self._training.count // self._length

    @property
    def validation_count(self) -> int:
        """Windows held out."""
        return self._validation.count // self._length

    def train(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Inputs and labels of training windows."""
        return _inputs_and_labels(self._training.windows(indices, self._length))

    def validation(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Inputs and labels of held-out windows."""
        return _inputs_and_labels(self._validation.windows(indices, self._length))

    def validation_indices(self, count: int) -> list[int]:
        """`count` held-out windows (all, where there are fewer), spread over the text; equal on every machine."""
        order = Permutation(self.validation_count, f"validation/{self._seed}")
        return [order[position] for position in range(min(count, self.validation_count))]


def load_windows(spec: DataSpec, vocab_size: int) -> Windows:
    """Read, split, tokenize and pack the text of the run, into files that are gone when this process ends.

    Raises UserError (DATA) when the source or tokenizer cannot be used, when the tokenizer's vocabulary exceeds the
    model's `vocab_size`, or when training or validation text is shorter than one window.
    """
    tokenizer = fitting_tokenizer(spec, vocab_size)
    training, validation = (TokenFile.nameless(tokenizer.vocab_size) for _ in range(2))
    for document, held_out in divided(spec):
        (validation if held_out else training).append(encode(document, tokenizer, spec))
    training.flush()
    validation.flush()
    return Windows(training, validation, spec)


def fitting_tokenizer(spec: DataSpec, vocab_size: int) -> Tokenizer:
    """The run's tokenizer. Raises UserError (DATA) where there is none such, and where it has more tokens than the
    model's vocabulary."""
    tokenizer = load_tokenizer(spec.tokenizer)
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            ExitCode.DATA,
            f"run.data.tokenizer '{spec.tokenizer}' has {tokenizer.vocab_size} tokens, "
            f"more than run.model.config.vocab_size ({vocab_size})",
            f"set run.model.config.vocab_size to {tokenizer.vocab_size} or more",
        )
    return tokenizer


def encode(document: Document, tokenizer: Tokenizer, spec: DataSpec) -> Tokens:
    """The document's tokens and the separator after them; token ids that others made may end with it already.

    Raises UserError (DATA) for ids that the run's tokenizer does not have.
    """
    separator = tokenizer.separator
    if document.ids is None:
        return np.concatenate([tokenizer.encode(document.text), separator])
    ids = document.ids
    check_ids(int(ids.min()), int(ids.max()), f"'{document.key}'", tokenizer, spec)
    if len(separator) and np.array_equal(ids[-len(separator) :], separator):
        return ids
    return np.concatenate([ids, separator])


def check_ids(least: int, largest: int, where: str, tokenizer: Tokenizer, spec: DataSpec) -> None:
    """Raise UserError (DATA) where token ids of the text lie outside the vocabulary of the run's tokenizer."""
    if least < 0 or largest >= tokenizer.vocab_size:
        raise data_error(
            f"run.data.text_field '{spec.text_field}' holds the token id {least if least < 0 else largest} in {where}, "
            f"outside the {tokenizer.vocab_size} tokens of run.data.tokenizer '{spec.tokenizer}'",
            "set run.data.tokenizer to the tokenizer that made them",
        )


def check_made_tokens(spec: DataSpec, tokenizer: Tokenizer) -> None:
    """Raise UserError (DATA) where files say beforehand that they hold ids outside the vocabulary, as Parquet may."""
    if spec.source != "text" or spec.path is None:
        return
    for file in find_files(spec.path, spec.split).files:
        ends = ends_of_ids(file, spec.text_field)
        if ends is not None:
            check_ids(*ends, f"'{file.name}'", tokenizer, spec)


def _inputs_and_labels(windows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    rows = torch.from_numpy(windows)  # pyright: ignore[reportUnknownMemberType]
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
