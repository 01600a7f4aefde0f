"""Tokens packed into windows of equal length."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from noloco_node.config.data_spec import DataSpec, apportioned
from noloco_node.data.documents import Fingerprint, data_error
from noloco_node.data.encoding import encode, fitting_tokenizer
from noloco_node.data.mixture import MixedSampler, Walk, mixed_fingerprint, naming_part
from noloco_node.data.prepared import open_prepared, read_manifest
from noloco_node.data.sampler import BEGINNING, Permutation, SamplerPosition, WindowSampler
from noloco_node.data.samples import Batch
from noloco_node.data.sources import check_fingerprint, divided
from noloco_node.data.token_file import TokenFile
from noloco_node.data.tokenizers import Tokenizer, Tokens
from noloco_node.document_marks import inputs_and_labels
from noloco_node.errors import ExitCode, UserError


class Windows:
    """Training and validation windows, each of `sequence_length` + 1 tokens, without overlap.

    Windows of a mixture are numbered one source after the other. `train` and `validation` give (inputs, labels), both
    int64 [len(indices), sequence_length]: labels are the inputs moved on by one token.
    """

    def __init__(self, parts: Sequence[tuple[TokenFile, TokenFile]], spec: DataSpec) -> None:
        """`parts`: the tokens of each source to train on, and those held out."""
        self._length, self._seed, self._weights = spec.sequence_length + 1, spec.seed, spec.weights
        self._parts, self._spec = parts, spec
        for number, part in enumerate(parts):
            with naming_part(spec, number):
                _check_long_enough(part, self._length)
        self._training = _Numbered([part[0] for part in parts], self._length)
        self._validation = _Numbered([part[1] for part in parts], self._length)

    def by_source(self) -> list[Windows]:
        """The windows of each source by itself."""
        if not self._spec.mixture:
            return [self]
        return [Windows([tokens], part) for tokens, part in zip(self._parts, self._spec.parts, strict=True)]

    @property
    def train_count(self) -> int:
        """Windows to train on."""
        return self._training.count

    def rows(self, indices: Sequence[int]) -> Tensor:
        """Training windows as they are, int32 [len(indices), sequence_length + 1]."""
        return _rows(self._training.windows(indices))

    def window(self, index: int) -> Tokens:
        """One training window, `sequence_length` + 1 tokens."""
        return self._training.windows([index])[0]

    def train(self, indices: Sequence[int]) -> Batch:
        """Inputs and labels of training windows."""
        return inputs_and_labels(self.rows(indices))

    def validation(self, indices: Sequence[int]) -> Batch:
        """Inputs and labels of held-out windows."""
        return inputs_and_labels(_rows(self._validation.windows(indices)))

    def held_out(self, count: int) -> Tensor:
        """The windows of every evaluation (`validation_indices`), int32 [count, sequence_length + 1]."""
        return _rows(self._validation.windows(self.validation_indices(count)))

    def validation_indices(self, count: int) -> list[int]:
        """`count` held-out windows (all, if there are fewer), spread over the text; equal on every machine. In a
        mixture each source gives its share of them, or all that it has."""
        chosen: list[int] = []
        numbered = self._validation
        for base, held, own in zip(numbered.bases, numbered.counts, self.held_out_counts(count), strict=True):
            order = Permutation(held, f"validation/{self._seed}")
            chosen += [base + order[position] for position in range(own)]
        return chosen

    def held_out_counts(self, count: int) -> list[int]:
        """How many of `validation_indices(count)` are of each source."""
        shares = apportioned(self._weights, count)
        return [min(wanted, held) for wanted, held in zip(shares, self._validation.counts, strict=True)]

    def walk(self, seed: int, peer_id: str, position: SamplerPosition = BEGINNING) -> Walk:
        """The order in which a replica trains on them, from `position` on. ValueError where that lies outside."""
        if len(self._weights) == 1:
            return WindowSampler(self.train_count, seed, peer_id, position)
        return MixedSampler(self._training.counts, self._weights, seed, peer_id, position)


class _Numbered:
    """The windows of some files of tokens, numbered one file after the other."""

    def __init__(self, files: Sequence[TokenFile], length: int) -> None:
        self._files, self._length = files, length
        self.counts = [file.count // length for file in files]
        *self.bases, self.count = accumulate(self.counts, initial=0)

    def windows(self, indices: Sequence[int]) -> NDArray[np.int64]:
        """int64 [len(indices), length]."""
        if len(self._files) == 1 or not len(indices):
            return self._files[0].windows(indices, self._length)
        return np.concatenate([self._one(index) for index in indices])

    def _one(self, index: int) -> NDArray[np.int64]:
        number = bisect_right(self.bases, index) - 1
        return self._files[number].windows([index - self.bases[number]], self._length)


def load_windows(spec: DataSpec, vocab_size: int) -> Windows:
    """Read, split, tokenize and pack the text of the run, into files that are gone when this process ends.

    A prepared text is only opened. Raises UserError: CONFIG for a streamed text; DATA when the source or tokenizer
    cannot be used. It raises DATA too when the tokenizer's vocabulary exceeds the model's `vocab_size`, or when
    training or validation text is shorter than one window.
    """
    if spec.streaming:
        raise UserError(
            ExitCode.CONFIG,
            "run.data.streaming is on, and here every replica walks through all windows of a text",
            "leave run.data.streaming off, and name a part of the text that fits on the disk",
        )
    tokenizer = fitting_tokenizer(spec, vocab_size)
    parts: list[tuple[TokenFile, TokenFile]] = []
    found: list[str] = []
    for number, part in enumerate(spec.parts):
        fingerprint = Fingerprint()
        with naming_part(spec, number):
            if part.prepared is not None:
                parts.append(open_prepared(part, tokenizer.vocab_size))
                found.append(read_manifest(part).fingerprint)
            else:
                parts.append(_tokenised(part, tokenizer, fingerprint))
                found.append(fingerprint.text)
    if spec.mixture:
        check_fingerprint(spec, mixed_fingerprint(found))
    return Windows(parts, spec)


def _tokenised(spec: DataSpec, tokenizer: Tokenizer, found: Fingerprint) -> tuple[TokenFile, TokenFile]:
    """The tokens of one source to train on, and those held out; `found` becomes the fingerprint of the text."""
    marked = spec.attention == "document"
    training, validation = (TokenFile.nameless(tokenizer.vocab_size, marked=marked) for _ in range(2))
    for document, held_out in divided(spec, found):
        (validation if held_out else training).append(encode(document, tokenizer, spec))
    training.flush()
    validation.flush()
    return training, validation


def _check_long_enough(part: tuple[TokenFile, TokenFile], length: int) -> None:
    for tokens, purpose in zip(part, ("training", "validation"), strict=True):
        if tokens.count < length:
            raise data_error(
                f"the {purpose} text has {tokens.count} tokens, less than one window of run.data.sequence_length "
                f"+ 1 ({length})",
                "add text, lower run.data.sequence_length, or raise run.data.holdout where the validation text is "
                "too short",
            )


def _rows(windows: NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(windows.astype(np.int32))  # pyright: ignore[reportUnknownMemberType]
