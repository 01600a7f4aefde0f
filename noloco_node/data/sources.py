"""Where text comes from: documents with stable keys, and which of them are held out for validation."""

from __future__ import annotations

import hashlib
import logging
import math
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from noloco_node.config.data_spec import TEXT, DataSpec
from noloco_node.data.documents import Document, Fingerprint, data_error, unreadable
from noloco_node.data.folders import walk_files
from noloco_node.data.formats import Format, ReadMeter
from noloco_node.data.hub import check_not_here, hub_documents
from noloco_node.data.loaders import first_look, load
from noloco_node.data.mixture import naming_part
from noloco_node.data.places import Absent, Found, find_files
from noloco_node.errors import UserError

logger = logging.getLogger(__name__)

_NOT_OF_THE_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


def divided(
    spec: DataSpec, found: Fingerprint | None = None, meter: ReadMeter | None = None
) -> Iterator[tuple[Document, bool]]:
    """The documents that are not blank, and whether each is held out: a share of them is, chosen by a hash of their
    keys.

    At least one is to train on and one to validate on; no document is in both. A text of fewer than 2 / holdout
    documents is cut into pieces first. One's own text in one file can then be held out in part. Of a longer one only
    the first documents are in memory at once. `found` becomes the fingerprint of the whole, and `meter` hears how far
    it has come.

    Raises UserError (DATA) when the source is missing, unreadable, empty or not the run's text.
    """
    found = found or Fingerprint()
    documents = counted(read_documents(spec, meter), found)
    first: list[Document] = []
    sides: set[bool] = set()
    for document in documents:
        first.append(document)
        sides.add(is_held_out(document, spec))
        if len(sides) == 2 and len(first) >= _wanted(spec):
            for each in chain(first, documents):
                yield each, is_held_out(each, spec)
            check_fingerprint(spec, found.text)
            return
    check_fingerprint(spec, found.text)
    if not first:
        raise data_error(f"{_setting(spec)} holds no text", "point it to text that is not empty")
    pieces = _enough_pieces(first, spec)
    held_out = held_out_of(pieces, spec.holdout)
    for piece in pieces:
        yield piece, piece.key in held_out


def counted(documents: Iterable[Document], fingerprint: Fingerprint) -> Iterator[Document]:
    """The documents that are not blank, added to `fingerprint` as they go by."""
    for document in documents:
        if not document.is_blank:
            fingerprint.add(document)
            yield document


def fingerprint_of_documents(spec: DataSpec) -> str:
    """The fingerprint of the whole text of one source, which is read for it; memory does not grow with it. Raises
    UserError (DATA) as reading does, and if it is not the one that the run names."""
    found = Fingerprint()
    for _ in counted(read_documents(spec), found):
        pass
    check_fingerprint(spec, found.text)
    return found.text


def check_fingerprint(spec: DataSpec, found: str) -> None:
    """Raise UserError (DATA) where the run names another text."""
    if (
        spec.fingerprint is not None
        and spec.fingerprint != found
        and (not spec.streaming or not found.startswith(TEXT))
    ):
        raise data_error(
            f"the text of {_setting(spec)} is not the run's: its fingerprint is {found}, and run.data.fingerprint is "
            f"{spec.fingerprint}",
            "get the text that the run's owner has, all of it under its own names; an owner that has changed the "
            "text sets run.data.fingerprint anew, which makes another run",
        )


def read_documents(spec: DataSpec, meter: ReadMeter | None = None) -> Iterator[Document]:
    """The documents of the source, in an order that depends on their keys only."""
    if spec.source == "stdlib":
        return _standard_library()
    if spec.source == "text":
        return _local(spec, meter)
    return hub_documents(spec)


def check_source(spec: DataSpec) -> None:
    """Raise UserError (DATA) if it can be seen without reading the text that it cannot be trained on. A place of this
    machine may be missing, ambiguous, without the column or any rows, or too short. A dataset of a hub is not asked
    for."""
    for number, part in enumerate(spec.parts):
        with naming_part(spec, number):
            _check_one(part)


def lacking_text(spec: DataSpec) -> str | None:
    """What is to be said of a text that is not on this machine. None where it is, or has another fault."""
    try:
        if spec.prepared is None:
            check_source(spec)
    except UserError as error:
        return error.message if isinstance(error.__cause__ or error, Absent) else None
    return None


def _check_one(spec: DataSpec) -> None:
    if spec.source == "stdlib" or spec.path is None:
        return
    if spec.source == "huggingface":
        check_not_here(spec.path)
        return
    files = find_files(spec.path, spec.split, spec.encoding).files
    for file in files:
        first_look(file, spec.text_field)
        try:
            file.path.open("rb").close()
        except OSError as error:
            raise unreadable(file.path, error) from None
    size = sum(file.size for file in files)
    plain = files[0].format is Format.TEXT and not any(file.packing for file in files)
    if plain and size < 2 * (spec.sequence_length + 1):  # a window to train on, one to validate on; a token is a byte
        raise data_error(
            f"{_setting(spec)} has {size} bytes, too few for two windows of run.data.sequence_length "
            f"({spec.sequence_length})",
            "name a longer text, or lower run.data.sequence_length",
        )


def is_held_out(document: Document, spec: DataSpec) -> bool:
    """By a hash of its key alone: of a text of many documents."""
    return _share(document.key) < spec.holdout


def held_out_of(documents: Sequence[Document], holdout: float) -> frozenset[str]:
    """Keys of the documents whose hash falls below the share `holdout`: of at least one, but never of all."""
    if len(documents) < 2:
        raise data_error("the training text is a single short document", "add more text")
    ranked = sorted(documents, key=lambda document: (_share(document.key), document.key))
    held = sum(_share(document.key) < holdout for document in documents)
    return frozenset(document.key for document in ranked[: min(max(held, 1), len(ranked) - 1)])


def _share(key: str) -> float:
    digest = hashlib.blake2b(key.encode("utf-8", errors="surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2.0**64


def _wanted(spec: DataSpec) -> int:
    """Documents that are enough to hold some of them out."""
    return math.ceil(2 / spec.holdout)


def _enough_pieces(documents: Sequence[Document], spec: DataSpec) -> list[Document]:
    wanted = _wanted(spec)
    if len(documents) >= wanted:
        return list(documents)
    length = max(sum(map(len, documents)) // wanted, 4 * (spec.sequence_length + 1))
    return [piece for document in documents for piece in _pieces(document, length)]


def _pieces(document: Document, length: int) -> Iterator[Document]:
    start = 0
    while start < len(document):
        end = start + length
        if len(document) - end < length // 2:
            end = len(document)
        elif document.ids is None:
            end = document.text.rfind("\n", start + length // 2, end) + 1 or end
        ids = None if document.ids is None else document.ids[start:end]
        yield Document(f"{document.key}#{start}", document.text[start:end], ids)
        start = end


def _standard_library() -> Iterator[Document]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in walk_files(root, skip=_NOT_OF_THE_LIBRARY).paths:
        if path.suffix == ".py":
            yield Document(path.relative_to(root).as_posix(), path.read_bytes().decode("utf-8", errors="replace"))


def _local(spec: DataSpec, meter: ReadMeter | None) -> Iterator[Document]:
    found = find_files(spec.path or "", spec.split, spec.encoding)
    warn_of_left_out(found, _setting(spec))
    for file in found.files:
        yield from load(replace(file, meter=meter), spec.text_field)
        if meter is not None:
            meter.before, meter.passed = meter.before + file.size, 0


def warn_of_left_out(found: Found, setting: str) -> None:
    """Say what of a path is not read."""
    if found.passed_over:
        logger.warning(
            "%s is read as %s: %d files of other formats in it are passed over (%s)",
            setting,
            found.files[0].format,
            len(found.passed_over),
            ", ".join(found.passed_over[:3]) + (", …" if len(found.passed_over) > 3 else ""),
        )
    for note in found.notes:
        logger.warning("%s: %s", setting, note)


def _setting(spec: DataSpec) -> str:
    if spec.mixture:
        return "run.data.mixture"
    return "run.data.source 'stdlib'" if spec.source == "stdlib" else f"run.data.path '{spec.path}'"
