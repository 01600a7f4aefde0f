"""Which files lie below a folder, or match a glob: each folder once, whatever links lead to it."""

from __future__ import annotations

import glob
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import cast
from unicodedata import normalize

from noloco_node.data.documents import data_error, unreadable

_STATE, _INFO = "state.json", "dataset_info.json"
_NOBODYS = frozenset({"lost+found", "__pycache__"})
"""These folders hold no text of the user's: one that nobody can read, at the top of a disk, and compiled Python.
Compiled files outweigh their sources."""


@dataclass(frozen=True, slots=True)
class Listed:
    """Files, and the places of links that lead nowhere."""

    paths: tuple[Path, ...]
    astray: tuple[str, ...] = ()


def walk_files(root: Path, skip: frozenset[str] = frozenset(), *, hidden: bool = False) -> Listed:
    """All regular files below a folder, in the order of their places; those in linked folders too. Hidden files and
    folders, and folders of a name in `skip`, are left out, but for hidden ones where they are asked for.

    Raises UserError (DATA) for a folder that cannot be read.
    """
    found: list[Path] = []
    seen: set[tuple[int, int]] = set()
    starts = [root]  # linked folders come after real ones, so that a file has the same place however links lie
    while starts:
        links: list[Path] = []
        for start in starts:
            if _identity(start) in seen:
                continue
            for folder, folders, names in os.walk(start, onerror=_refuse):
                seen.add(_identity(Path(folder)))
                wanted = [Path(folder, name) for name in sorted(folders) if name not in skip | _NOBODYS]
                wanted = [path for path in wanted if hidden or not path.name.startswith(".")]
                links += [path for path in wanted if path.is_symlink()]
                folders[:] = [path.name for path in wanted if not path.is_symlink() and _identity(path) not in seen]
                found.extend(Path(folder, name) for name in names if hidden or not name.startswith("."))
        starts = sorted(links)
    astray = [_place(path, root) for path in found if path.is_symlink() and not path.exists()]
    files = sorted((path for path in found if path.is_file()), key=lambda path: _place(path, root))
    return Listed(tuple(files), tuple(sorted(astray)))


def glob_files(pattern: str) -> tuple[Path, Listed]:
    """The folder that the fixed beginning of the pattern names, and the files that match. A folder that is there under
    the name as it is written counts as fixed, brackets or not."""
    parts = Path(pattern).parts
    root, fixed = Path(), 0
    for part in parts[:-1]:
        if glob.has_magic(part) and not (root / part).is_dir():
            break
        root, fixed = root / part, fixed + 1
    rest = parts[fixed:]
    if "**" in rest:
        listed = walk_files(root, hidden=any(part.startswith(".") for part in rest))
        return root, Listed(
            tuple(path for path in listed.paths if _matches(path.relative_to(root).parts, rest)),
            tuple(place for place in listed.astray if _matches(Path(place).parts, rest)),
        )
    found = [root / name for name in glob.iglob("/".join(rest), root_dir=root)]
    real = {path: Path(os.path.realpath(path.parent), path.name) for path in found}
    taken: dict[Path, Path] = {}
    for path in sorted(found, key=lambda path: (real[path] != path.absolute(), path)):
        taken.setdefault(real[path], path)
    astray = [_place(path, root) for path in found if path.is_symlink() and not path.exists()]
    files = sorted(path for path in taken.values() if path.is_file())
    return root, Listed(tuple(files), tuple(sorted(astray)))


def keys_of(root: Path, paths: Sequence[Path]) -> dict[Path, str]:
    """The place of each file below `root`, in POSIX form. Characters are composed (NFC), as most systems write them and
    some do not, unless two files would have one place."""
    places = {path: path.relative_to(root).as_posix() for path in paths}
    composed = {path: normalize("NFC", place) for path, place in places.items()}
    often = Counter(composed.values())
    return {path: composed[path] if often[composed[path]] == 1 else places[path] for path in paths}


def rows_of_datasets(paths: Sequence[Path], *, whole: bool) -> list[Path]:
    """The paths without what the `datasets` library keeps beside its rows. `state.json` names the files of a saved
    folder, and in a folder of its cache results are called `cache-`. Raises UserError (DATA) if a `whole` folder lacks
    one of its files, or is saved as numbers of rows."""
    kept: list[Path] = []
    of_folder: dict[Path, frozenset[str] | None] = {}
    for path in paths:
        folder = path.parent
        if folder not in of_folder:
            of_folder[folder] = _saved(folder, whole=whole)
        named = of_folder[folder]
        results = named is None and path.name.startswith("cache-") and (folder / _INFO).is_file()
        if path.suffix != ".arrow" or (path.name in named if named is not None else not results):
            kept.append(path)
    return kept


def _saved(folder: Path, *, whole: bool) -> frozenset[str] | None:
    """What `save_to_disk` wrote into the folder; None where it did not write it."""
    try:
        state: object = json.loads((folder / _STATE).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    said: dict[str, object] = cast("dict[str, object]", state) if isinstance(state, dict) else {}
    named = frozenset(_file_names(said.get("_data_files")))
    if not named:
        return None
    gone = sorted(name for name in named if not (folder / name).is_file())
    if whole and gone:
        raise data_error(
            f"run.data.path: '{folder / _STATE}' names the file {gone[0]}, which is not there",
            "copy the folder again, all of it, or name the files to train on by a glob",
        )
    if whole and list(_file_names(said.get("_indices_data_files"))):
        raise data_error(
            f"run.data.path: '{folder}' was saved by an old version of datasets, with rows that are chosen by number",
            "load it with datasets, and save it again with its flatten_indices",
        )
    return named


def _file_names(listed: object) -> Iterator[str]:
    for each in cast("list[object]", listed) if isinstance(listed, list) else []:
        name = cast("dict[str, object]", each).get("filename") if isinstance(each, dict) else None
        if isinstance(name, str):
            yield name


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Match as `glob` does: `**` is any number of folders, and what is hidden matches by its dot alone."""
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return _matches(parts, pattern[1:]) or (
            bool(parts) and not parts[0].startswith(".") and _matches(parts[1:], pattern)
        )
    if not parts or (parts[0].startswith(".") and not pattern[0].startswith(".")):
        return False
    return fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])


def _identity(folder: Path) -> tuple[int, int]:
    try:
        seen = folder.stat()
    except OSError as error:
        raise unreadable(folder, error) from None
    return seen.st_dev, seen.st_ino


def _place(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix()


def _refuse(error: OSError) -> None:
    raise unreadable(error.filename, error) from None
