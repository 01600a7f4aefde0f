"""Finished trainings on disk, appended as they end, so that an experiment that was cut off goes on where it was."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from noloco_node.laboratory.result import Result


class Journal:
    """The file of finished trainings, one JSON line each: the key of the training and its result."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._results: dict[str, Result] = {}
        self._read()

    def __len__(self) -> int:
        return len(self._results)

    def get(self, key: str) -> Result | None:
        """The result of the training of that key; None where it has not ended yet."""
        return self._results.get(key)

    def add(self, key: str, result: Result) -> None:
        """Keep a result; it is on the disk when this returns. Raises OSError as the file system does."""
        line = json.dumps({"key": key, "result": result.model_dump(mode="json")}, allow_nan=False) + "\n"
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        self._results[key] = result

    def _read(self) -> None:
        """Take what is there. A last line without its end, left by a crash, is cut off. Results of other versions of
        the record are passed over and trained anew."""
        if not self._path.exists():
            return
        content = self._path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            os.truncate(self._path, len(whole))
        for line in whole.splitlines():
            entry = _parsed(line)
            if entry is not None:
                self._results[entry[0]] = entry[1]


def _parsed(line: bytes) -> tuple[str, Result] | None:
    try:
        raw: object = json.loads(line)
    except ValueError:
        return None
    if not isinstance(raw, dict):
        return None
    entry = cast("dict[str, Any]", raw)
    try:
        return str(entry.get("key")), Result.model_validate(entry.get("result"))
    except ValidationError:
        return None
