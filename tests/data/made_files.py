"""Small files of every format, written by the libraries that write them elsewhere."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


def lines(texts: Sequence[str]) -> bytes:
    """JSON lines as C4's: the text is not the only column."""
    rows = ({"text": text, "url": f"https://example.org/{number}"} for number, text in enumerate(texts))
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def write_table(path: Path, columns: dict[str, object]) -> None:
    """Parquet, Arrow as a file or Arrow as a stream, by the path's name."""
    table = pa.table(columns)
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=3)
        return
    make = pa.ipc.new_stream if "stream" in path.name else pa.ipc.new_file
    with pa.OSFile(str(path), "wb") as sink, make(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)


def write_csv(path: Path, texts: Sequence[str]) -> None:
    """CSV with the text in the second column."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["number", "text"])
        writer.writerows(enumerate(texts))


def write_texts(path: Path, texts: Sequence[str]) -> None:
    """Documents of text in the format that the path's name says."""
    whole = path.name
    if whole.endswith(".csv"):
        write_csv(path, texts)
    elif whole.endswith((".parquet", ".arrow")):
        write_table(path, {"text": list(texts), "number": list(range(len(texts)))})
    elif whole.endswith(".json"):
        path.write_text(json.dumps([{"text": text} for text in texts], indent=1))
    elif whole.endswith(".gz"):
        path.write_bytes(gzip.compress(lines(texts)))
    elif whole.endswith(".zst"):
        path.write_bytes(pa.compress(lines(texts), codec="zstd", asbytes=True))
    else:
        path.write_bytes(lines(texts))


TABLES = (
    "rows.jsonl",
    "rows.json",
    "rows.json.gz",
    "rows.jsonl.zst",
    "rows.csv",
    "rows.parquet",
    "rows.arrow",
    "stream.arrow",
)
"""A name for every format of rows and each way to pack it."""
