"""One table from format to loader: the documents of a file, read in pieces of bounded size."""

from __future__ import annotations

import csv
import importlib
import io
import itertools
import json
import logging
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TextIO, cast

import numpy as np

from noloco_node.data.documents import Document, damaged, data_error, unreadable
from noloco_node.data.formats import LOSSY, LOST, SHOWN, Format, encoding_of, open_unpacked, too_many, undecodable
from noloco_node.data.places import SourceFile, empty_shard
from noloco_node.data.tokenizers import Tokens
from noloco_node.errors import UserError

logger = logging.getLogger(__name__)

MASK = "attention_mask"
"""This column beside token ids is 0 where they are padding."""
LONGEST_TEXT = 16 << 20
"""A text file of up to so many characters is one document. A longer file is cut at line ends into pieces."""
BATCH_ROWS = 256
PIECE_LENGTH = LONGEST_TEXT // 16
"""What is longer is read, judged, handed on and written in pieces of so many characters, or bytes."""
_KINDS = {"int": "whole numbers", "float": "numbers", "bool": "true and false", "dict": "groups of fields"}
_BETWEEN = re.compile(r"[\s,]*")

_LEAST, _LARGEST = -(1 << 63), (1 << 63) - 1
"""The least and the largest int64."""


def load(file: SourceFile, field: str) -> Iterator[Document]:
    """The documents of a file, in their order. `field` names the column of the text, or of token ids.

    Raises UserError (DATA) where the file is damaged, has no rows, or no such column.
    """
    try:
        for document in _LOADERS[file.format](file, field):
            yield from bounded(document)
    except PermissionError as error:
        raise unreadable(file.path, error) from None
    except (OSError, EOFError, zlib.error) as error:
        raise damaged(file.path, error) from None


def bounded(document: Document) -> Iterator[Document]:
    """The document. A row is cut as a text file is that is as long. A tokenizer takes 150 bytes of memory a character:
    one row could take all of a machine's, again after each start."""
    text, start = document.text, 0
    if len(text) < LONGEST_TEXT:
        yield document
        return
    while start < len(text):
        end = _piece_end(text, start)
        yield Document(f"{document.key}@{start}", text[start:end])
        start = end


def _piece_end(text: str, start: int) -> int:
    """Where a piece that begins at `start` ends: behind its last line end, or else at its full length."""
    end = start + PIECE_LENGTH
    return text.rfind("\n", start, end) + 1 or end


def first_look(file: SourceFile, field: str) -> None:
    """Raise UserError (DATA) if a file of rows can be seen not to have the column, any rows, or a sound end. It does
    not read all of it."""
    if file.format is Format.TEXT:
        return
    if file.format is Format.PARQUET:
        parquet = _open_parquet(file, field)
        if parquet.metadata.num_rows == 0:
            raise empty_shard(file.path)
        parquet.close()
    next(load(file, field), None)


def ends_of_ids(file: SourceFile, field: str) -> tuple[int, int] | None:
    """The smallest and the largest token id of a Parquet file, where its statistics say them."""
    if file.format is not Format.PARQUET:
        return None
    parquet = _open_parquet(file, field)
    ends: list[int] = []
    for group in range(parquet.metadata.num_row_groups):
        columns = [parquet.metadata.row_group(group).column(each) for each in range(parquet.metadata.num_columns)]
        for column in columns:
            known = column.path_in_schema.split(".")[0] == field and column.statistics
            if known and column.statistics.has_min_max and isinstance(column.statistics.min, int):
                ends += [column.statistics.min, column.statistics.max]
    parquet.close()
    return (min(ends), max(ends)) if ends else None


def document_of(key: str, place: str, value: object, mask: object, field: str) -> Document:
    """A row as a document: `value` is text or a list of token ids, of which those are dropped where `mask` is 0.

    Raises UserError (DATA), naming the row by `place`, for anything else.
    """
    if value is None or isinstance(value, str):
        return Document(key, value or "")
    ids = _whole_numbers(value)
    if ids is None:
        raise data_error(
            f"run.data.text_field is '{field}', but that column of {place} holds {_kind(value)}, not text or token ids",
            "set run.data.text_field to the column that holds the text, or lists of token ids",
        )
    if mask is not None:
        kept = _whole_numbers(mask)
        if kept is None or len(kept) != len(ids):
            raise data_error(
                f"run.data.path: in {place}, '{field}' has {len(ids)} tokens, and '{MASK}' is no mask of as many",
                "make the two columns of equal length, or leave the mask out",
            )
        ids = ids[kept != 0]
    return Document(key, "", ids)


def no_column(field: str, where: str, columns: Sequence[str]) -> UserError:
    """The rows have no such column."""
    return data_error(
        f"run.data.text_field is '{field}', but {where} has the columns {', '.join(map(str, columns)) or '(none)'}",
        "set run.data.text_field to the column that holds the text, or lists of token ids",
    )


def two_columns(field: str, where: str) -> UserError:
    """Two columns have that name, and nobody can tell which is meant."""
    return data_error(
        f"run.data.text_field: {where} has two columns '{field}'",
        "give each column a name of its own, and name the one that is meant with run.data.text_field",
    )


def with_column(
    rows: Iterable[tuple[int, Mapping[str, object]]], field: str, place: Callable[[int], str], where: str
) -> Iterator[tuple[int, Mapping[str, object]]]:
    """The numbered rows that have the column; others hold no text, and neither does a row with an empty column. Raises
    UserError (DATA) if none of the first has it, naming the first by its `place`."""
    lacking: list[tuple[int, Mapping[str, object]]] = []
    found, count = False, 0
    for number, row in rows:
        if field in row:
            found = True
            yield number, row
            continue
        count += 1
        lacking.append((number, row))
        if not found and count == BATCH_ROWS:
            break
        del lacking[1:]
    if count and not found:
        raise no_column(field, place(lacking[0][0]), list(lacking[0][1]))
    if count:
        logger.warning("%s: rows without the column '%s' are passed over: %d", where, field, count)


def _whole_numbers(value: object) -> Tokens | None:
    """The numbers as int64; a larger one becomes the largest int64, which no vocabulary has."""
    if isinstance(value, np.ndarray):
        array = cast("np.ndarray[Any, Any]", value)
    elif isinstance(value, list):
        numbers = cast(list[object], value)
        if not all(type(number) is int for number in numbers):
            return None
        try:
            array = np.asarray(numbers, dtype=np.int64)
        except OverflowError:
            array = np.asarray([min(max(cast(int, number), _LEAST), _LARGEST) for number in numbers], dtype=np.int64)
    else:
        return None
    if array.ndim != 1 or array.dtype.kind not in "iu":
        return None
    if array.dtype == np.uint64:
        array = np.minimum(array, np.uint64(_LARGEST))
    return array.astype(np.int64, copy=False)


def _kind(value: object) -> str:
    if isinstance(value, list | np.ndarray):
        return f"lists such as {str(cast(object, value))[:40]}"
    return _KINDS.get(type(value).__name__, type(value).__name__)


def _text(file: SourceFile, _field: str) -> Iterator[Document]:
    with _Decoded(file) as stream:
        text = stream.read(LONGEST_TEXT)
        if len(text) < LONGEST_TEXT:
            yield Document(file.key, text)
            return
        start = 0
        while text:
            cut = _piece_end(text, 0)
            yield Document(f"{file.key}@{start}", text[:cut])
            start += len(text[:cut])
            text = text[cut:]
            if len(text) < PIECE_LENGTH:
                text += stream.read(LONGEST_TEXT - len(text))


class _Decoded(io.TextIOWrapper):
    """The text of a file. What cannot be read shows as the replacement character; reading raises UserError (DATA)
    where that is too much of it. That is looked at after each piece and at the end."""

    def __init__(self, file: SourceFile) -> None:
        with open_unpacked(file.path, file.packing) as probe:
            encoding = encoding_of(probe.read(4), file.encoding)
        stream = open_unpacked(file.path, file.packing, file.meter)
        super().__init__(stream, encoding=encoding, errors=LOSSY, newline="")
        self._file, self._written = file, encoding
        self._lost = self._characters = self._looked = 0

    def read(self, size: int | None = -1, /) -> str:
        """Read as any text file does."""
        text = self._counted(super().read(size))
        if size is None or size < 0 or len(text) < size:
            self._look()
        return text

    def __next__(self) -> str:
        try:
            line = super().__next__()
        except StopIteration:
            self._look()
            raise
        return self._counted(line)

    def _counted(self, text: str) -> str:
        self._characters += len(text)
        if not text.isascii():
            self._lost += text.count(LOST)
            text = text.replace(LOST, SHOWN)
        if self._characters - self._looked >= PIECE_LENGTH:
            self._look()
        return text

    def _look(self) -> None:
        self._looked = self._characters
        if too_many(self._lost, self._characters):
            raise undecodable(self._file.path, self._lost, self._characters, self._written)


def _json(file: SourceFile, field: str) -> Iterator[Document]:
    with _Decoded(file) as stream:
        beginning = stream.read(1)
        while beginning and (beginning.isspace() or beginning == "\ufeff"):
            beginning = stream.read(1)
    with _Decoded(file) as stream:
        rows = _json_list(file, stream) if beginning == "[" else _json_lines(file, stream)
        unit = "row" if beginning == "[" else "line"

        def place(number: int) -> str:
            return f"{unit} {number} of '{file.name}'"

        listed = list[int]()
        columns = with_column(_columns(rows, file, field, unit, listed), field, place, f"'{file.name}'")
        for number, row in columns:
            yield document_of(f"{file.key}:{number}", place(number), row[field], row.get(MASK), field)
        if not listed:
            raise empty_shard(file.path)


def _columns(
    rows: Iterator[tuple[int, object]], file: SourceFile, field: str, unit: str, listed: list[int]
) -> Iterator[tuple[int, Mapping[str, object]]]:
    for number, row in rows:
        listed[:] = [number]
        if not isinstance(row, dict):
            raise data_error(
                f"run.data.text_field is '{field}', but {unit} {number} of '{file.name}' has no columns: it is "
                f"{_shown(row)}",
                'give rows such as {"text": "…"}',
            )
        yield number, cast(dict[str, object], row)


def _shown(row: object) -> str:
    shown = json.dumps(row, ensure_ascii=False)
    return shown if len(shown) <= 40 else shown[:40] + " …"


def _json_lines(file: SourceFile, stream: TextIO) -> Iterator[tuple[int, object]]:
    for number, line in enumerate(stream, start=1):
        line = line.lstrip("\ufeff") if number == 1 else line
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _no_json(f"line {number} of '{file.name}'", error) from error


def _json_list(file: SourceFile, stream: TextIO) -> Iterator[tuple[int, object]]:
    """The elements of one list, decoded one by one."""
    decoder = json.JSONDecoder()
    buffered = stream.read(PIECE_LENGTH)
    at, number = buffered.find("[") + 1, 0  # another file may have taken its place since it was looked at
    while True:
        match = _BETWEEN.match(buffered, at)
        at = at if match is None else match.end()
        if buffered.startswith("]", at):
            return
        problem: Exception = ValueError("the list has no end")
        end = len(buffered)
        row: object = None
        try:
            row, end = decoder.raw_decode(buffered, at)
        except (ValueError, RecursionError) as error:
            problem = error
        if end < len(buffered):
            number, at = number + 1, end
            yield number, row
            continue
        more = stream.read(max(PIECE_LENGTH, len(buffered) - at))
        if not more:
            raise _no_json(f"row {number + 1} of '{file.name}'", problem)
        buffered, at = buffered[at:] + more, 0


def _no_json(place: str, error: Exception) -> UserError:
    return data_error(
        f"run.data.path: {place} is not JSON: {error}", "correct the file: a row a line, or one list of rows"
    )


def _csv(file: SourceFile, field: str) -> Iterator[Document]:
    csv.field_size_limit(LONGEST_TEXT)
    with _Decoded(file) as stream:
        first = next(stream, "").removeprefix("\ufeff")  # before a quote the mark would make it a part of the name
        reader = csv.reader(itertools.chain([first], stream), strict=True)
        rows: Iterator[list[str]] = (row for row in reader if row)
        try:
            names = next(rows, list[str]())
            if field not in names:
                raise no_column(field, f"'{file.name}'", names)
            if names.count(field) > 1:
                raise two_columns(field, f"'{file.name}'")
            column, number = names.index(field), 0
            for number, row in enumerate(rows, start=1):
                if len(row) != len(names):
                    raise csv.Error(f"line {reader.line_num} has {len(row)} columns, the first {len(names)}")
                yield Document(f"{file.key}:{number}", row[column])
        except csv.Error as error:
            raise damaged(file.path, error) from error
        if number == 0:
            raise empty_shard(file.path)


def _parquet(file: SourceFile, field: str) -> Iterator[Document]:
    pa = _arrow()
    parquet = _open_parquet(file, field)
    try:
        columns = [name for name in (field, MASK) if name in parquet.schema_arrow.names]
        batches = parquet.iter_batches(BATCH_ROWS, columns=columns)
        yield from _of_batches(batches, file, field, rows=parquet.metadata.num_rows)
    except pa.ArrowException as error:
        raise damaged(file.path, error) from error
    finally:
        parquet.close()


def _open_parquet(file: SourceFile, field: str) -> Any:
    pa, pq = _arrow(), cast(Any, importlib.import_module("pyarrow.parquet"))
    try:
        parquet = pq.ParquetFile(str(file.path))
        names = parquet.schema_arrow
    except pa.ArrowException as error:
        raise damaged(file.path, error) from error
    _column_of(names, field, file)
    return parquet


def _arrow_file(file: SourceFile, field: str) -> Iterator[Document]:
    """The documents of an Arrow file of either kind: with a table of contents at its end, and as a stream, which
    `datasets` writes."""
    pa = _arrow()
    try:
        with pa.OSFile(str(file.path)) as stream:
            if stream.read(6) == b"ARROW1":
                reader = pa.ipc.open_file(stream)
                batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
            else:
                stream.seek(0)
                reader = batches = pa.ipc.open_stream(stream)
            _column_of(reader.schema, field, file)
            yield from _of_batches(batches, file, field)
    except pa.ArrowException as error:
        raise damaged(file.path, error) from error


def _column_of(schema: Any, field: str, file: SourceFile) -> None:
    names: list[str] = schema.names
    if field not in names:
        raise no_column(field, f"'{file.name}'", names)
    for name in (field, MASK):
        if names.count(name) > 1:
            raise two_columns(name, f"'{file.name}'")


def _of_batches(batches: Any, file: SourceFile, field: str, rows: int = 0) -> Iterator[Document]:
    number = 0
    for batch in batches:
        if file.meter is not None and rows:
            file.meter.passed = file.size * number // rows
        column = batch.column(batch.schema.get_field_index(field))
        masked = batch.schema.get_field_index(MASK)
        values = _values(column)
        masks = _values(batch.column(masked)) if masked >= 0 and masked != batch.schema.get_field_index(field) else None
        for value in values:
            number += 1
            mask = None if masks is None else next(masks)
            yield document_of(f"{file.key}:{number}", f"row {number} of '{file.name}'", value, mask, field)
    if number == 0:
        raise empty_shard(file.path)


def _values(column: Any) -> Iterator[object]:
    """Rows of a column: lists of whole numbers as arrays, anything else as Python has it. ArrowException for damaged
    ones: nothing else sees what is no UTF-8, and an offset that leads outside would end the process."""
    column.validate(full=True)
    types: Any = _arrow().types
    lists = types.is_list(column.type) or types.is_large_list(column.type)
    if not lists or not types.is_integer(column.type.value_type) or column.flatten().null_count:
        yield from column.to_pylist()
        return
    numbers, offsets, valid = column.values.to_numpy(), column.offsets.to_numpy(), column.is_valid().to_pylist()
    for row, present in enumerate(valid):
        yield numbers[offsets[row] : offsets[row + 1]] if present else None


def _arrow() -> Any:
    return importlib.import_module("pyarrow")  # untyped, and slow to import where it is not needed


_LOADERS: dict[Format, Callable[[SourceFile, str], Iterator[Document]]] = {
    Format.TEXT: _text,
    Format.JSON: _json,
    Format.CSV: _csv,
    Format.PARQUET: _parquet,
    Format.ARROW: _arrow_file,
}
