"""Where text comes from: documents with stable keys, and which of them are held out for validation."""

from __future__ import annotations

import codecs
import hashlib
import importlib
import json
import math
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from noloco_node.config.run_spec import DataSpec
from noloco_node.errors import ExitCode, UserError

_NOT_OF_THE_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
_BINARY_PROBE_BYTES = 8192
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
"""What a text begins with that an editor saved as "Unicode"."""
_FILE_BUILDERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv", ".txt": "text"}
_TABLES = frozenset({".json", ".csv", ".tsv", ".parquet", ".arrow", ".gz", ".bz2", ".xz", ".zst", ".zip"})
"""Files that are not themselves the text: rows and columns, or compressed."""


@dataclass(frozen=True, slots=True)
class Document:
    """A text and its path-like key, which is the same on every machine that has the same text."""

    key: str
    text: str


@dataclass(frozen=True, slots=True)
class Split:
    """Documents to train on and documents to validate on; no document is in both, neither is empty."""

    training: tuple[Document, ...]
    validation: tuple[Document, ...]


def load_split(spec: DataSpec) -> Split:
    """Read the source and hold out a share of its documents, chosen by a hash of their keys.

    A text of fewer than 2 / holdout documents is cut into pieces first, so that one's own text in one file can be
    held out in part. Raises UserError (DATA) when the source is missing, unreadable or empty.
    """
    documents = [document for document in read_documents(spec) if document.text.strip()]
    if not documents:
        raise _data_error(f"{_setting(spec)} holds no text", "point it to text that is not empty")
    return split_documents(_enough_pieces(documents, spec), spec.holdout)


def read_documents(spec: DataSpec) -> Iterator[Document]:
    """The documents of the source, in an order that depends on their keys only."""
    if spec.source == "stdlib":
        return _standard_library()
    if spec.source == "text":
        return _text(Path(spec.path or ""), spec.text_field)
    return _dataset(spec.path or "", spec.text_field)


def check_source(spec: DataSpec) -> None:
    """Raise UserError (DATA) where it can be seen without reading the text that it cannot be trained on: a place of
    this machine that is not there, is no text, or is too short. A dataset of a hub is not asked for."""
    if spec.source == "stdlib" or spec.path is None:
        return
    path = Path(spec.path)
    if spec.source == "huggingface":
        if spec.path.startswith(("/", ".", "~")) and not path.exists():
            raise _absent(path, "name an existing file or folder, or a dataset of the Hugging Face hub (owner/name)")
        return
    if not path.exists():
        raise _absent(path)
    _refuse_tables(path)
    try:
        size = sum(file.stat().st_size for file in ([path] if path.is_file() else _files(path)))
        if path.is_file():
            path.open("rb").close()
    except OSError as error:
        raise _data_error(f"run.data.path: '{path}' cannot be read: {error.strerror}", "make it readable") from None
    if size < 2 * (spec.sequence_length + 1):  # a window to train on and one to validate on; a token is a byte or more
        raise _data_error(
            f"{_setting(spec)} has {size} bytes, too few for two windows of run.data.sequence_length "
            f"({spec.sequence_length})",
            "name a longer text, or lower run.data.sequence_length",
        )


def split_documents(documents: Sequence[Document], holdout: float) -> Split:
    """Hold out each document whose hash falls below the share `holdout`, and at least one, but never all."""
    if len(documents) < 2:
        raise _data_error("the training text is a single short document", "add more text")
    ranked = sorted(documents, key=lambda document: (_share(document.key), document.key))
    held = sum(_share(document.key) < holdout for document in documents)
    held_keys = {document.key for document in ranked[: min(max(held, 1), len(ranked) - 1)]}
    return Split(
        training=tuple(document for document in documents if document.key not in held_keys),
        validation=tuple(document for document in documents if document.key in held_keys),
    )


def _share(key: str) -> float:
    digest = hashlib.blake2b(key.encode("utf-8", errors="surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2.0**64


def _enough_pieces(documents: Sequence[Document], spec: DataSpec) -> list[Document]:
    wanted = math.ceil(2 / spec.holdout)
    if len(documents) >= wanted:
        return list(documents)
    total = sum(len(document.text) for document in documents)
    length = max(total // wanted, 4 * (spec.sequence_length + 1))
    return [piece for document in documents for piece in _pieces(document, length)]


def _pieces(document: Document, length: int) -> Iterator[Document]:
    start = 0
    while start < len(document.text):
        end = start + length
        if len(document.text) - end < length // 2:
            end = len(document.text)
        else:
            end = document.text.rfind("\n", start + length // 2, end) + 1 or end
        yield Document(f"{document.key}#{start}", document.text[start:end])
        start = end


def _standard_library() -> Iterator[Document]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in _files(root, skip=_NOT_OF_THE_LIBRARY):
        if path.suffix == ".py":
            yield Document(path.relative_to(root).as_posix(), _decode(path.read_bytes()))


def _text(path: Path, text_field: str) -> Iterator[Document]:
    if not path.exists():
        raise _absent(path)
    _refuse_tables(path)
    root, files = (path.parent, iter([path])) if path.is_file() else (path, _files(path))
    for file in files:
        key = file.relative_to(root).as_posix()
        try:
            content = file.read_bytes()
        except OSError as error:
            why = f"run.data.path: '{file}' cannot be read: {error.strerror}"
            raise _data_error(why, "make it readable") from error
        if content.startswith(_UTF_16):
            content = content.decode("utf-16", errors="replace").encode()
        if file.suffix == ".jsonl":
            yield from _json_lines(key, content, text_field)
        elif b"\0" not in content[:_BINARY_PROBE_BYTES]:
            yield Document(key, _decode(content))


def _refuse_tables(path: Path) -> None:
    """Refuse what would be trained on with its braces and commas: a file of rows, or a folder that is mostly such."""
    if path.is_file():
        tables = path.suffix.lower() in _TABLES
        found = f"'{path}', a {path.suffix} file"
    else:
        sizes = [(file.suffix.lower() in _TABLES, file.stat().st_size) for file in _files(path)]
        tables = 2 * sum(size for table, size in sizes if table) > sum(size for _, size in sizes)
        found = f"'{path}', whose files are mostly {' or '.join(sorted(_suffixes(path) & _TABLES))}"
    if tables:
        raise _data_error(
            f"run.data.path is {found}, and run.data.source 'text' would train on it as it stands",
            "give plain text, or .jsonl with the text in run.data.text_field; or set run.data.source to huggingface, "
            f"which takes {', '.join(sorted(_FILE_BUILDERS))} files and folders of them",
        )


def _absent(path: Path, remedy: str = "name an existing file or folder") -> UserError:
    return _data_error(f"run.data.path is '{path}', which does not exist", remedy)


def _suffixes(folder: Path) -> set[str]:
    return {file.suffix.lower() for file in _files(folder)}


def _json_lines(key: str, content: bytes, text_field: str) -> Iterator[Document]:
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row: Any = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _data_error(
                f"run.data.path: line {number} of '{key}' is not JSON: {error}", "correct the file"
            ) from error
        text: Any = cast(dict[str, Any], row).get(text_field) if isinstance(row, dict) else None
        if not isinstance(text, str):
            raise _data_error(
                f"run.data.text_field is '{text_field}', but line {number} of '{key}' has no such text",
                "set run.data.text_field to the column that holds the text",
            )
        yield Document(f"{key}:{number}", text)


def _files(root: Path, skip: frozenset[str] = frozenset()) -> Iterator[Path]:
    found: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skip]
        found.extend(Path(folder, name) for name in names if not name.startswith("."))
    regular = [path for path in found if path.is_file()]
    return iter(sorted(regular, key=lambda path: path.relative_to(root).as_posix()))


def _decode(content: bytes) -> str:
    return content.decode("utf-8", errors="replace")


def _dataset(name: str, text_field: str) -> Iterator[Document]:
    table = _load_dataset(name)
    columns: list[str] = table.column_names
    if text_field not in columns:
        raise _data_error(
            f"run.data.text_field is '{text_field}', but the dataset '{name}' has the columns {', '.join(columns)}",
            "set run.data.text_field to the column that holds the text",
        )
    for number, row in enumerate(table.select_columns([text_field])):
        text: object = row[text_field]
        if text is not None and not isinstance(text, str):
            raise _data_error(
                f"run.data.text_field is '{text_field}', but that column of '{name}' holds {_kind(text)}, not text",
                "set run.data.text_field to the column that holds the text: noloco-node makes the tokens itself, from "
                "run.data.tokenizer",
            )
        yield Document(f"{number}", text or "")


def _kind(value: object) -> str:
    shown = str(value)[:40]
    return f"lists (token ids, perhaps: {shown} …)" if isinstance(value, list) else type(value).__name__


def _load_dataset(name: str) -> Any:
    """The `train` split of a dataset of the hub (`owner/name`, or `owner/name:subset`), a file, or a folder."""
    datasets: Any = importlib.import_module("datasets")  # untyped, and slow to import where it is not needed
    load: Any = datasets.load_dataset
    path = Path(name)
    try:
        if path.is_file():
            return load(_builder_of(path), data_files=str(path), split="train")
        if path.is_dir() and any((path / mark).exists() for mark in ("state.json", "dataset_dict.json")):
            return _train_split(datasets.load_from_disk(str(path)), name)
        if path.is_dir():
            return load(str(path), split="train")
        repository, _, subset = name.partition(":")
        return load(repository, subset or None, split="train")
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise _data_error(
            f"run.data.path is '{name}', which the datasets library cannot load: {reason}",
            "name a dataset of the Hugging Face hub (owner/name, or owner/name:subset), a file, or a local folder",
        ) from error


def _builder_of(path: Path) -> str:
    builder = _FILE_BUILDERS.get(path.suffix.lower())
    if builder is None:
        raise _data_error(
            f"run.data.path is '{path}', and by '{path.suffix}' it cannot be told what it holds",
            f"name a {', '.join(sorted(_FILE_BUILDERS))} file (unpack a compressed one first), or a folder of them",
        )
    return builder


def _train_split(loaded: Any, name: str) -> Any:
    if not isinstance(loaded, dict):
        return loaded
    splits = cast(dict[str, Any], loaded)
    if "train" in splits:
        return splits["train"]
    raise _data_error(
        f"run.data.path is '{name}', whose splits are {', '.join(splits)}: there is no 'train'",
        "point run.data.path to the folder of one split",
    )


def _setting(spec: DataSpec) -> str:
    return "run.data.source 'stdlib'" if spec.source == "stdlib" else f"run.data.path '{spec.path}'"


def _data_error(message: str, remedy: str) -> UserError:
    return UserError(ExitCode.DATA, message, remedy)
