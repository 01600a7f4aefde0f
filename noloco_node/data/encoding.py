"""Documents as token ids of the run's tokenizer."""

from __future__ import annotations

from itertools import islice

import numpy as np

from noloco_node.config.data_spec import NO_TOKENIZER, DataSpec
from noloco_node.data.documents import Document, data_error
from noloco_node.data.loaders import ends_of_ids, load
from noloco_node.data.mixture import naming_part
from noloco_node.data.places import find_files
from noloco_node.data.sources import read_documents
from noloco_node.data.tokenizers import (
    NoTokenizer,
    PretrainedTokenizer,
    Tokenizer,
    Tokens,
    load_tokenizer,
    no_tokenizer,
)
from noloco_node.document_marks import BEGINS


def fitting_tokenizer(spec: DataSpec, vocab_size: int) -> Tokenizer:
    """The run's tokenizer, or for `none` a stand-in. It may have more tokens than the model: `encode` checks those that
    occur. Raises UserError (DATA) if there is none such, or if the model lacks the token between documents. It does so
    too if it is `bytes` and the model has fewer tokens."""
    vocab_size = min(vocab_size, BEGINS)
    if spec.tokenizer == NO_TOKENIZER:
        return NoTokenizer(vocab_size)
    tokenizer = load_tokenizer(spec, vocab_size)
    if tokenizer.vocab_size > vocab_size:  # of bytes each may occur
        raise data_error(
            f"run.data.tokenizer '{spec.tokenizer}' has {tokenizer.vocab_size} tokens, "
            f"more than run.model.config.vocab_size ({vocab_size})",
            f"set run.model.config.vocab_size to {tokenizer.vocab_size} or more",
        )
    check_of_text(tokenizer.separator, "it puts between documents", tokenizer)
    return tokenizer


def encode(document: Document, tokenizer: Tokenizer, spec: DataSpec) -> Tokens:
    """The document's tokens and the separator after them; token ids that others made may end with it already.

    Raises UserError (DATA) for ids that the run's tokenizer or its model does not have.
    """
    separator = tokenizer.separator
    where = f"{spec.path}{document.key}" if document.key.startswith(":") else document.key  # of one file: the row alone
    if document.ids is None:
        ids = tokenizer.encode(document.text)
        check_of_text(ids, f"it makes of '{where or spec.path}'", tokenizer)
        return np.concatenate([ids, separator])
    ids = document.ids
    check_ids(int(ids.min()), int(ids.max()), f"'{where}'", tokenizer, spec)
    if len(separator) and np.array_equal(ids[-len(separator) :], separator):
        return ids
    return np.concatenate([ids, separator])


def check_of_text(ids: Tokens, what: str, tokenizer: Tokenizer) -> None:
    """Raise UserError (DATA) where ids that the tokenizer made are not the model's. `what` goes on "that"."""
    if not len(ids) or int(ids.max()) < tokenizer.vocab_size or not isinstance(tokenizer, PretrainedTokenizer):
        return
    bad = int(ids.max())
    raise data_error(
        f"run.data.tokenizer '{tokenizer.name}' has ids up to {tokenizer.bound - 1}, and a token that {what} is {bad} "
        f"({tokenizer.word(bad)!r}), outside the model's vocabulary: run.model.config.vocab_size is "
        f"{tokenizer.vocab_size}",
        f"set run.model.config.vocab_size to {tokenizer.bound} or more; for weights that are there already, take the "
        "tokenizer that they were trained with",
    )


def check_ids(least: int, largest: int, where: str, tokenizer: Tokenizer, spec: DataSpec) -> None:
    """Raise UserError (DATA) where token ids of the text lie outside the vocabulary of the run's tokenizer."""
    if least >= 0 and largest < tokenizer.vocab_size:
        return
    bad = least if least < 0 else largest
    if isinstance(tokenizer, PretrainedTokenizer) and 0 <= bad < tokenizer.bound:
        check_of_text(np.array([bad]), f"stands in {where}", tokenizer)
    if spec.tokenizer == NO_TOKENIZER:
        raise data_error(
            f"run.data.text_field '{spec.text_field}' holds the token id {bad} in {where}, outside the model's "
            f"vocabulary: run.model.config.vocab_size is {tokenizer.vocab_size}",
            "set run.model.config.vocab_size to that of the tokenizer that made them",
        )
    raise data_error(
        f"run.data.text_field '{spec.text_field}' holds the token id {bad} in {where}, outside the "
        f"{tokenizer.vocab_size} tokens of run.data.tokenizer '{spec.tokenizer}'",
        "set run.data.tokenizer to the tokenizer that made them",
    )


def check_made_tokens(spec: DataSpec, tokenizer: Tokenizer) -> None:
    """Raise UserError (DATA) if files say beforehand that they hold ids outside the vocabulary, as Parquet may. It is
    raised too if they hold text and there is no tokenizer."""
    for number, part in enumerate(spec.parts):
        with naming_part(spec, number):
            _check_made(part, tokenizer)


def _check_made(spec: DataSpec, tokenizer: Tokenizer) -> None:
    if spec.source != "text" or spec.path is None or spec.prepared is not None:
        return
    if isinstance(tokenizer, PretrainedTokenizer) and tokenizer.vocab_size < tokenizer.bound:
        _check_beginning(spec, tokenizer)
    for file in find_files(spec.path, spec.split, spec.encoding).files:
        beginning = islice(load(file, spec.text_field), 1 if spec.tokenizer == NO_TOKENIZER else 0)
        if any(document.ids is None for document in beginning):
            raise no_tokenizer(f"run.data.text_field '{spec.text_field}' holds text in '{file.name}'")
        ends = ends_of_ids(file, spec.text_field)
        if ends is not None:
            check_ids(*ends, f"'{file.name}'", tokenizer, spec)


def _check_beginning(spec: DataSpec, tokenizer: Tokenizer) -> None:
    """Check the first documents with a tokenizer that is larger than the model: a foreign one shows there."""
    left = 1 << 20  # characters, or ids
    for document in read_documents(spec):
        if not document.is_blank:
            encode(document, tokenizer, spec)
        left -= len(document)
        if left <= 0:
            return
