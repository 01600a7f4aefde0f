"""Files that are either whole or absent: written under a temporary name, synced, renamed."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def write_bytes(path: Path, content: bytes) -> None:
    """Replace `path` by a file with this content. After a crash it holds the old content or the new, never a part.

    Raises OSError as the file system does; then no temporary file is left.
    """
    # Two threads may write the same file: either's content is whole, and none takes the other's file away.
    partial = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.partial")
    try:
        partial.write_bytes(content)
        sync(partial)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by the value as indented JSON. ValueError for NaN and infinity, which JSON does not have."""
    write_bytes(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


@contextmanager
def new_folder(path: Path) -> Generator[Path]:
    """Give a temporary folder to fill; when the block ends well its files are synced and it becomes `path`.

    A folder already there is replaced. When the block fails nothing changes and the temporary folder is removed.
    """
    partial, former = (path.with_name(f".{path.name}.{kind}") for kind in ("partial", "former"))
    _recover(path, former)
    for left_by_a_crash in (partial, former):
        shutil.rmtree(left_by_a_crash, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        for file in partial.iterdir():
            if file.is_file():
                file.chmod(partial.stat().st_mode & 0o666)  # as this process makes files; safetensors makes them 0600
            sync(file)
        sync(partial)
        if path.exists():
            path.rename(former)
        partial.rename(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        _recover(path, former)
        raise
    sync(path.parent)
    shutil.rmtree(former, ignore_errors=True)


def sync(path: Path) -> None:
    """Wait until a file or a folder's entries are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # some disks, as of a virtual machine's host, say so of a folder: they have no such thing
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


def _recover(path: Path, former: Path) -> None:
    if former.exists() and not path.exists():
        former.rename(path)
