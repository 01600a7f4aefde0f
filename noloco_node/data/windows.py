"""Tokens packed into windows of equal length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from noloco_node.config.data_spec import DataSpec
from noloco_node.data.documents import data_error
from noloco_node.data.encoding import encode, fitting_tokenizer
from noloco_node.data.prepared import open_prepared
from noloco_node.data.samples import Batch, inputs_and_labels
from noloco_node.data.sources import divided
from noloco_node.data.token_file import TokenFile
from noloco_node.data.tokenizers import Tokens
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

    def rows(self, indices: Sequence[int]) -> Tensor:
        """Training windows as they are, int32 [len(indices), sequence_length + 1]."""
        return _rows(self._training.windows(indices, self._length))

    def window(self, index: int) -> Tokens:
        """One training window, `sequence_length` + 1 tokens."""
        return self._training.windows([index], self._length)[0]

    def train(self, indices: Sequence[int]) -> Batch:
        """Inputs and labels of training windows."""
        return inputs_and_labels(self.rows(indices))

    def validation(self, indices: Sequence[int]) -> Batch:
        """Inputs and labels of held-out windows."""
        return inputs_and_labels(_rows(self._validation.windows(indices, self._length)))

    def held_out(self, count: int) -> Tensor:
        """The windows of every evaluation (`validation_indices`), int32 [count, sequence_length + 1]."""
        return _rows(self._validation.windows(self.validation_indices(count), self._length))

    def validation_indices(self, count: int) -> list[int]:
        """`count` held-out windows (all, where there are fewer), spread over the text; equal on every machine."""
        order = Permutation(self.validation_count, f"validation/{self._seed}")
        return [order[position] for position in range(min(count, self.validation_count))]


def load_windows(spec: DataSpec, vocab_size: int) -> Windows:
    """Read, split, tokenize and pack the text of the run, into files that are gone when this process ends; a prepared
    text is only opened.

    Raises UserError: CONFIG for a streamed text; DATA when the source or tokenizer cannot be used, when the tokenizer's
    vocabulary exceeds the model's `vocab_size`, or when training or validation text is shorter than one window.
    """
    if spec.streaming:
        raise UserError(
            ExitCode.CONFIG,
            "run.data.streaming is on, and here every replica walks through all windows of a text",
            "leave run.data.streaming off, and name a part of the text that fits on the disk",
        )
    tokenizer = fitting_tokenizer(spec, vocab_size)
    if spec.prepared is not None:
        return Windows(*open_prepared(spec, tokenizer.vocab_size), spec)
    marked = spec.attention == "document"
    training, validation = (TokenFile.nameless(tokenizer.vocab_size, marked=marked) for _ in range(2))
    for document, held_out in divided(spec):
        (validation if held_out else training).append(encode(document, tokenizer, spec))
    training.flush()
    validation.flush()
    return Windows(training, validation, spec)


def _rows(windows: NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(windows.astype(np.int32))  # pyright: ignore[reportUnknownMemberType]
