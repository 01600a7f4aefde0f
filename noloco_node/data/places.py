"""Which files of this machine a path means: a file, a folder or a glob, all of one format."""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from noloco_node.data.documents import data_error
from noloco_node.data.folders import Listed, glob_files, keys_of, rows_of_datasets, walk_files
from noloco_node.data.formats import READABLE, Format, Look, Packing, ReadMeter, look
from noloco_node.errors import ExitCode, UserError

_ABOUT = frozenset({"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"})
"""`datasets` writes these files beside the rows."""
_SPLITS = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
    "eval": "test",
    "evaluation": "test",
}
_WORD = re.compile(r"[^a-zA-Z]+")


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file to read, and the key of what it holds."""

    path: Path
    key: str
    """Its place below the source, in POSIX form; empty where the source is this one file, whatever its name."""
    format: Format
    packing: Packing | None
    size: int
    """Bytes on the disk."""
    encoding: str | None = None
    """What is named as its encoding."""
    meter: ReadMeter | None = field(default=None, compare=False)
    """Hears how much of it was read."""

    @property
    def name(self) -> str:
        """For a person."""
        return self.key or self.path.name


@dataclass(frozen=True, slots=True)
class Found:
    """The files of a source, all of one format, in an order that depends on their keys only."""

    files: tuple[SourceFile, ...]
    passed_over: tuple[str, ...] = ()
    """Names of files of other formats in the same folder."""
    notes: tuple[str, ...] = ()
    """What else is left out, a sentence each."""


def find_files(path: str, split: str, encoding: str | None = None) -> Found:
    """The files that a path means.

    A file is itself. A folder is its files of the format that has most of its bytes; the others are passed over. All
    files of a glob must be of one format. If the names of tables say splits, those of `split` are taken.

    Raises UserError (DATA) if nothing is there, if it cannot be told what is there, or if a file of rows is empty.
    """
    path = os.path.expanduser(path)
    place = Path(path)
    if place.is_file():
        return Found((_taken(look(place, encoding), ""),))
    if place.is_dir():
        return _of_folder(place, split, encoding)
    if glob.has_magic(path):
        return _of_glob(path, split, encoding)
    raise Absent(path)


class Absent(UserError):
    """There is nothing of that name."""

    def __init__(self, path: str, remedy: str = "name an existing file or folder, or a glob of files") -> None:
        super().__init__(ExitCode.DATA, f"run.data.path is '{path}', which does not exist", remedy)


def _of_folder(folder: Path, split: str, encoding: str | None) -> Found:
    listed = walk_files(folder)
    own = rows_of_datasets(listed.paths, whole=True)
    looks = [look(path, encoding) for path in own if path.name not in _ABOUT]
    sizes: Counter[Format | None] = Counter()
    for seen in looks:
        sizes[seen.format] += seen.size
        if seen.is_pointer and seen.is_wanted:
            raise seen.error
    if not looks or not sum(sizes.values()):
        raise data_error(f"run.data.path '{folder}' holds no text", "point it to text that is not empty")
    main, most = sizes.most_common(1)[0]
    if main is None:
        raise max((seen for seen in looks if seen.format is None), key=lambda seen: seen.size).error
    if 2 * most <= sum(sizes.values()):
        raise _mixed(str(folder), looks)
    others = tuple(seen.path.name for seen in looks if seen.format is not main)
    ours = [seen for seen in looks if seen.format is main]
    return Found(_in_order(str(folder), folder, ours, split), others, tuple(_notes(listed, own)))


def _of_glob(pattern: str, split: str, encoding: str | None) -> Found:
    root, listed = glob_files(pattern)
    own = rows_of_datasets(listed.paths, whole=False) or list(listed.paths)
    looks = [look(path, encoding) for path in own]
    if not looks:
        hint = "; in a glob `[` begins a set of characters, and `[[]` stands for itself" if "[" in pattern else ""
        raise Absent(pattern, f"name files that are there; quote a glob so that the shell leaves it alone{hint}")
    for seen in looks:
        if seen.format is None:
            raise seen.error
    if len({seen.format for seen in looks}) > 1:
        raise _mixed(pattern, looks)
    return Found(_in_order(pattern, root, looks, split), notes=tuple(_notes(listed, own)))


def _notes(listed: Listed, own: Sequence[Path]) -> Iterator[str]:
    """What is left out although it lies there, for a person."""
    rest = sorted(path.name for path in set(listed.paths) - set(own))
    if rest:
        yield f"{_some(rest)}: results that the datasets library keeps beside its rows are left out"
    if listed.astray:
        yield f"{_some(listed.astray)}: links that lead nowhere are left out"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _in_order(named: str, root: Path, looks: Sequence[Look], split: str) -> tuple[SourceFile, ...]:
    chosen = _of_split(named, root, looks, split)
    keys = keys_of(root, [seen.path for seen in chosen])
    keyed = sorted(((keys[seen.path], seen) for seen in chosen), key=lambda each: each[0])
    found = [_taken(seen, key) for key, seen in keyed if not (seen.empty and seen.format is Format.TEXT)]
    if not found:
        raise data_error(f"run.data.path '{named}' holds no text", "point it to text that is not empty")
    return tuple(found)


def _of_split(named: str, root: Path, looks: Sequence[Look], split: str) -> list[Look]:
    """The tables of the wanted split, if their names say splits."""
    if looks[0].format is Format.TEXT:
        return list(looks)
    splits = {seen.path: _split_of(seen.path.relative_to(root)) for seen in looks}
    said = sorted({name for name in splits.values() if name})
    if not said:
        return list(looks)
    wanted = _SPLITS.get(split, split)
    chosen = [seen for seen in looks if splits[seen.path] == wanted]
    if not chosen:
        raise data_error(
            f"run.data.split is '{split}', but the files of '{named}' are of the splits {', '.join(said)}",
            "set run.data.split to one of these, or name the files by a glob",
        )
    return chosen


def _split_of(place: Path) -> str | None:
    """The split that the name of a file says, or the name of the nearest folder."""
    for part in reversed(place.parts):
        for word in _WORD.split(part):
            if word.lower() in _SPLITS:
                return _SPLITS[word.lower()]
    return None


def _taken(seen: Look, key: str) -> SourceFile:
    if seen.format is None:
        raise seen.error
    if seen.empty and seen.format is not Format.TEXT:
        raise empty_shard(seen.path)
    if seen.undecodable is not None:
        raise seen.undecodable
    return SourceFile(seen.path, key, seen.format, seen.packing, seen.size, seen.named_encoding)


def empty_shard(path: Path) -> UserError:
    """A file of rows that has none."""
    return data_error(
        f"run.data.path: '{path}' is empty: it has no rows",
        "copy or download it again, or take it away where it should be empty",
    )


def _mixed(named: str, looks: Sequence[Look]) -> UserError:
    counts = Counter(str(seen.format) if seen.format else "unknown files" for seen in looks)
    found = ", ".join(f"{count} {name}" for name, count in counts.most_common())
    return data_error(
        f"run.data.path '{named}' holds files of several formats ({found}), and none that most of it is",
        f"name those to train on by a glob such as '{named.partition('*')[0].rstrip('/')}/*.parquet'; {READABLE}",
    )
