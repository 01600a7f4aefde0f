"""What a file holds: told by its first bytes and its name, and where the two disagree, not told at all. How its bytes
become characters: by what its beginning says, and what is lost."""

from __future__ import annotations

import codecs
import gzip
import importlib
import io
import json
import re
import zlib
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO, cast

from noloco_node.config.tokenizer_files import FETCH, POINTER, is_pointer
from noloco_node.data.documents import damaged, data_error, unreadable
from noloco_node.errors import UserError

LOST, SHOWN = "\udcff", "\ufffd"
"""The first stands for what could not be read until it is counted, since no text can be decoded to it. The second
shows it."""
LOSSY = "noloco-lossy"
"""The name of the error handler that puts `LOST` in place of what cannot be read."""
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),  # begins as the mark of UTF-16 does
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
    (codecs.BOM_UTF8, "utf-8"),
)
_FEW = 3
"""The number of lost characters that end no run, however short the file: a name in a comment has as many."""
USUAL = "gb18030, big5, shift_jis, euc_kr, cp1251, cp1252 or utf-16"
"""Encodings of texts that are not UTF-8, for a person to try."""


def encoding_of(beginning: bytes, named: str | None) -> str:
    """What the mark at the beginning of a text says; else the encoding that is named; else UTF-8."""
    return next((name for mark, name in _MARKS if beginning.startswith(mark)), named or "utf-8")


def _note_lost(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return LOST, error.end


codecs.register_error(LOSSY, _note_lost)


def too_many(lost: int, characters: int) -> bool:
    """More than a thousandth."""
    return lost > _FEW and lost * 1000 > characters


def undecodable(path: object, lost: int, characters: int, encoding: str) -> UserError:
    """A text in another encoding than it is read as."""
    return data_error(
        f"run.data.path: '{path}' is not {encoding}: {lost:,} of {characters:,} characters cannot be read",
        f"set run.data.encoding to what it is (often {USUAL}), convert it to UTF-8 with iconv, or take it away",
    )


HEAD_BYTES = 64 << 10
"""The bytes that are read of a file's beginning to tell its format. The fingerprint of a shard covers as many of its
beginning and of its end: another number is another fingerprint."""
BINARY_PROBE_BYTES = HEAD_BYTES // 8


class Format(StrEnum):
    """What can be read, by the name that a person gives it."""

    TEXT = "text"
    JSON = "JSON"
    CSV = "CSV"
    PARQUET = "Parquet"
    ARROW = "Arrow"


class Packing(StrEnum):
    """How a file is compressed, by the name that Arrow gives it."""

    GZIP = "gzip"
    ZSTD = "zstd"


_NAMED = {
    ".json": Format.JSON,
    ".jsonl": Format.JSON,
    ".ndjson": Format.JSON,
    ".csv": Format.CSV,
    ".parquet": Format.PARQUET,
    ".pq": Format.PARQUET,
    ".arrow": Format.ARROW,
    ".feather": Format.ARROW,
}
"""The format that a suffix promises; every other suffix promises text."""
_TEXT_NAMES = frozenset({".txt", ".text", ".md", ""})
_PACKED_NAMES = {".gz": Packing.GZIP, ".zst": Packing.ZSTD, ".zstd": Packing.ZSTD}
_SKIPPABLE = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18")
"""The beginning of a frame of zstd that holds no text, but what a program has to say to itself."""
_PACKED_MAGIC = {b"\x1f\x8b": Packing.GZIP, b"\x28\xb5\x2f\xfd": Packing.ZSTD}
_MAGIC = {b"PAR1": Format.PARQUET, b"ARROW1": Format.ARROW, b"\xff\xff\xff\xff": Format.ARROW}
_UNREAD_MAGIC = {b"PK\x03\x04": "a zip archive", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x04\x22\x4d\x18": "lz4"}
_UNREAD_NAMES = frozenset({".tsv", ".zip", ".bz2", ".xz", ".lz4", ".tar", ".tgz", ".avro", ".orc", ".xlsx"})

READABLE = "text, JSON and JSON lines (.json, .jsonl), CSV, Parquet or Arrow; the first three also as .gz or .zst"


@dataclass(frozen=True, slots=True)
class Look:
    """What a file was seen to be."""

    path: Path
    size: int
    """Bytes on the disk."""
    format: Format | None
    """None where it cannot be told, or cannot be read."""
    packing: Packing | None = None
    doubt: str = ""
    """What was seen, where there is no format."""
    empty: bool = False
    is_pointer: bool = False
    """Whether something else stands in place of the file."""
    named_encoding: str | None = None
    """Where no mark says it."""
    undecodable: UserError | None = None
    """What a person reads of a text that begins in another encoding."""

    @property
    def is_wanted(self) -> bool:
        """Whether its name promises something to train on."""
        suffix = self.path.suffix.lower()
        return suffix in _NAMED or suffix in _PACKED_NAMES or suffix in _TEXT_NAMES

    @property
    def error(self) -> UserError:
        """What a person reads of a file that cannot be told."""
        if self.is_pointer:
            return data_error(f"run.data.path: '{self.path}' cannot be trained on: {POINTER}", FETCH)
        return data_error(
            f"run.data.path: it cannot be told what '{self.path}' holds: {self.doubt}",
            f"give {READABLE}; and name each file as what it is",
        )


def look(path: Path, encoding: str | None = None) -> Look:
    """Tell what a file holds; `encoding` is that of texts where no mark says it.

    Raises UserError (DATA) where it cannot be read, or breaks off within its beginning.
    """
    try:
        with path.open("rb") as file:
            size, head = path.stat().st_size, file.read(HEAD_BYTES)
    except OSError as error:
        raise unreadable(path, error) from None
    if is_pointer(head):
        return Look(path, size, None, doubt=POINTER, is_pointer=True)
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    named = _PACKED_NAMES.get(suffixes[-1]) if suffixes else None
    packing = next((packing for magic, packing in _PACKED_MAGIC.items() if head.startswith(magic)), None)
    if named is Packing.ZSTD and _SKIPPABLE.match(head):
        packing = named
    if head and packing is not named:
        return Look(path, size, None, doubt=f"it is named '{path.name}', but begins with {_shown(head)}")
    if named is not None:
        suffixes.pop()
    if packing is not None:
        head = _unpacked_head(path, packing)
    suffix = suffixes[-1] if suffixes else ""
    if not head:
        return Look(path, size, _NAMED.get(suffix, Format.TEXT), packing, empty=True)
    written = encoding_of(head, encoding)
    format, doubt = _told(head, suffix, packing, written)
    wrong: UserError | None = None
    if format in (Format.TEXT, Format.JSON, Format.CSV):
        text = codecs.getincrementaldecoder(written)(LOSSY).decode(head)  # the last character may be cut
        lost = text.count(LOST)
        wrong = undecodable(path, lost, len(text), written) if too_many(lost, len(text)) else None
    return Look(path, size, format, packing, doubt, named_encoding=encoding, undecodable=wrong)


@dataclass(slots=True)
class ReadMeter:
    """How many bytes of files, as they lie on the disk, have gone by."""

    before: int = 0
    """Bytes of the files before this one."""
    passed: int = 0
    """Bytes of this file that were passed."""

    @property
    def total(self) -> int:
        """Bytes of all files."""
        return self.before + self.passed


class _Metered(io.FileIO):
    """A file that tells its meter how far it was read."""

    def __init__(self, path: Path, meter: ReadMeter) -> None:
        super().__init__(path, "rb")
        self._meter = meter

    def readinto(self, buffer: Any, /) -> int | None:
        """Read as any file does."""
        count = super().readinto(buffer)
        self._meter.passed = self.tell()
        return count


class _Gzip(gzip.GzipFile):
    """Goes over zeros after the end, as tapes and some servers leave them, and closes the file that it reads."""

    def __init__(self, raw: BinaryIO) -> None:
        super().__init__(fileobj=raw, mode="rb")
        self._packed = raw

    def close(self) -> None:
        """Both."""
        super().close()
        self._packed.close()


def open_unpacked(path: Path, packing: Packing | None, meter: ReadMeter | None = None) -> BinaryIO:
    """The bytes of the file, decompressed as they are read. Reading raises OSError, EOFError or zlib.error where they
    are damaged."""
    if packing is Packing.ZSTD:
        pa: Any = importlib.import_module("pyarrow")
        source = pa.PythonFile(_raw(path, meter)) if meter else pa.OSFile(str(path))
        return cast(BinaryIO, io.BufferedReader(pa.CompressedInputStream(source, packing.value), 1 << 20))
    raw = cast(BinaryIO, _raw(path, meter))
    return raw if packing is None else cast(BinaryIO, io.BufferedReader(_Gzip(raw), 1 << 20))


def _raw(path: Path, meter: ReadMeter | None) -> io.BufferedReader:
    return io.BufferedReader(_Metered(path, meter) if meter else io.FileIO(path), 1 << 20)


def _told(head: bytes, suffix: str, packing: Packing | None, encoding: str) -> tuple[Format | None, str]:
    """The format, or why there is none."""
    unread = next((name for magic, name in _UNREAD_MAGIC.items() if head.startswith(magic)), None)
    if unread is not None:
        return None, f"it is {unread}, which is not read: unpack it"
    if suffix in _UNREAD_NAMES:
        return None, f"'{suffix}' files are not read"
    promised = _NAMED.get(suffix, Format.TEXT)
    seen = _seen(head, encoding)
    named = f"its name ends in '{suffix}'" if suffix else "its name has no ending"
    if seen is None:
        return None, f"it is not text, and begins with {_shown(head)} (UTF-16 without a mark needs run.data.encoding)"
    if packing is not None and seen in (Format.PARQUET, Format.ARROW):
        return None, f"it is {seen} inside {packing}: unpack it"
    if (
        promised is Format.JSON
        and seen is Format.TEXT
        and head.lstrip(codecs.BOM_UTF8 + b" \t\r\n")[:1] in (b"{", b"[")
    ):
        return Format.JSON, ""  # broken rows: the reader says which line
    if (promised is Format.CSV and seen is Format.TEXT) or promised is seen:
        return promised, ""
    return None, f"{named}, which promises {promised}, but it begins as {seen}: {_shown(head)}"


def _seen(head: bytes, encoding: str) -> Format | None:
    """By its bytes alone; CSV cannot be told from text."""
    magic = next((format for magic, format in _MAGIC.items() if head.startswith(magic)), None)
    if magic is not None:
        return magic
    wide = encoding.startswith(("utf-16", "utf-32"))
    if not wide and b"\0" in head[:BINARY_PROBE_BYTES]:
        return None
    text = head.removeprefix(codecs.BOM_UTF8).decode(encoding, errors="ignore")
    return Format.JSON if _is_json_rows(text) else Format.TEXT


def _is_json_rows(text: str) -> bool:
    """Whether the first line is a row, or a list of rows begins."""
    text = text.lstrip("\ufeff \t\r\n")
    if text.startswith("["):
        return text[1:].lstrip().startswith("{")
    if not text.startswith("{"):
        return False
    line, end, _ = text.partition("\n")
    if not end and len(text) >= HEAD_BYTES // 2:
        return line[1:].lstrip().startswith('"')  # a row longer than what was looked at
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _unpacked_head(path: Path, packing: Packing) -> bytes:
    try:
        with open_unpacked(path, packing) as stream:
            return stream.read(HEAD_BYTES)
    except (OSError, EOFError, zlib.error) as error:
        raise damaged(path, error) from None


def _shown(head: bytes) -> str:
    """The first bytes, for a person."""
    return repr(head[:24])[1:]
