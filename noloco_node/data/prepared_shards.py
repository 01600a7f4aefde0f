"""A streamed text that was tokenised once, shard by shard, which gives the same windows in the same order."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from multiprocessing import connection
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from noloco_node.config.data_spec import DataSpec
from noloco_node.data.documents import data_error
from noloco_node.data.encoding import encode, fitting_tokenizer
from noloco_node.data.formats import ReadMeter
from noloco_node.data.loaders import load
from noloco_node.data.places import SourceFile
from noloco_node.data.shards import fingerprint_of_shards, shard_files
from noloco_node.data.sources import is_held_out
from noloco_node.data.token_file import TokenFile, no_room, token_type
from noloco_node.data.tokenizers import Tokenizer, Tokens
from noloco_node.errors import UserError
from noloco_node.workers import cores

_Count = Annotated[int, Field(ge=0)]
PARTS = ("training", "validation")
_ENDS = np.dtype("<u8")
_ABOUT = "shard.json"
LOOK_SECONDS = 0.5
"""A listener hears every so many seconds how far a preparation has come."""


class PreparedShard(BaseModel):
    """What lies in the folder of one shard."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    source: str
    """The fingerprint of this shard alone."""
    documents: tuple[_Count, _Count]
    """To train on, and held out."""
    tokens: tuple[_Count, _Count]
    """The number of tokens of the two parts."""


@dataclass(frozen=True, slots=True)
class PreparedSoFar:
    """How far a preparation has come."""

    done_bytes: int
    """The bytes of the source's files that are done."""
    all_bytes: int
    """0 where nobody knows."""
    tokens: int


def prepare_shards(
    spec: DataSpec, vocab_size: int, folder: Path, told: Callable[[PreparedSoFar], None]
) -> list[PreparedShard]:
    """Write the tokens of every shard to a folder of its own below `folder`. Each shard has a process, as many at once
    as there are cores; shards that are there already are kept. Raises UserError (DATA) if a shard cannot be read, if
    another one was prepared under its number, or if the disk is full. Then nothing half written is left."""
    files = shard_files(spec)
    shards: dict[int, PreparedShard] = {}
    for number, file in enumerate(files):
        if (made := _made(folder, number, file)) is not None:
            shards[number] = made
    missing = [number for number in range(len(files)) if number not in shards]
    _clear(folder)
    if missing:
        _in_processes(spec, vocab_size, folder, files, shards, missing, told)
    return [shards[number] for number in range(len(files))]


def _in_processes(
    spec: DataSpec,
    vocab_size: int,
    folder: Path,
    files: Sequence[SourceFile],
    shards: dict[int, PreparedShard],
    missing: Sequence[int],
    told: Callable[[PreparedSoFar], None],
) -> None:
    """Fill `shards`. An error of one ends the others after the shard that they are at."""
    spawn = multiprocessing.get_context("spawn")
    passed = RawArray("Q", len(files))
    sizes = [file.size for file in files]

    def tell() -> None:
        so_far = (size if number in shards else min(passed[number], size) for number, size in enumerate(sizes))
        told(PreparedSoFar(sum(so_far), sum(sizes), sum(sum(shard.tokens) for shard in shards.values())))

    with ProcessPoolExecutor(min(cores(), len(missing)), spawn, _begin, (passed,)) as pool:
        made, text = partial(_prepare_shard, vocab_size=vocab_size, folder=folder), spec.model_dump_json()
        work: dict[Future[PreparedShard], int] = {pool.submit(made, text, number): number for number in missing}
        try:
            left = set(work)
            while left:
                tell()
                done, left = wait(left, LOOK_SECONDS, FIRST_COMPLETED)
                for future in done:
                    shards[work[future]] = future.result()
        except BrokenProcessPool as error:
            raise data_error(
                "a process that tokenised a shard was killed, perhaps for want of memory",
                "see that there is memory, and start the command again: it goes on",
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)
            _clear(folder)
    tell()


class PreparedShards:
    """Shards out of a folder that `prepare_shards` wrote. Raises UserError (DATA) where not all of it is there."""

    def __init__(self, folder: Path, count: int, vocab_size: int) -> None:
        self._folder, self._vocab_size = folder, vocab_size
        self._shards = [_whole(_place(folder, number), vocab_size) for number in range(count)]
        self.names = [shard.name for shard in self._shards]

    def training(self, shard: int, part: int, parts: int) -> Iterator[Tokens]:
        """See `Shards`."""
        return self._documents(shard, PARTS[0], part, parts)

    def held_out(self, shard: int) -> Iterator[Tokens]:
        """See `Shards`."""
        return self._documents(shard, PARTS[1], 0, 1)

    def _documents(self, shard: int, name: str, part: int, parts: int) -> Iterator[Tokens]:
        place = _place(self._folder, shard)
        try:
            ends = np.fromfile(place / f"{name}.ends", dtype=_ENDS)
            tokens = TokenFile.at(place / f"{name}.tokens", self._vocab_size)
        except OSError as error:
            raise _incomplete(place, error.strerror or str(error)) from None
        for number in range(part, len(ends), parts):
            begin = int(ends[number - 1]) if number else 0
            yield tokens.read(begin, int(ends[number]) - begin)


_passed: list[Any] = []
"""A process that tokenises says here how far it has come, for all shards."""


def _begin(passed: object) -> None:
    """Begin a process that tokenises: a parent that is killed cannot end it."""
    _passed.append(passed)
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker is started by a process"

    def end_with_parent() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


@lru_cache(maxsize=1)
def _opened(spec: str, vocab_size: int) -> tuple[DataSpec, Tokenizer, tuple[SourceFile, ...]]:
    """Once in each process."""
    made = DataSpec.model_validate_json(spec)
    return made, fitting_tokenizer(made, vocab_size), shard_files(made)


def _prepare_shard(spec_json: str, number: int, *, vocab_size: int, folder: Path) -> PreparedShard:
    """Tokenise one shard into its folder, which is there when all of it is."""
    spec, tokenizer, files = _opened(spec_json, vocab_size)
    meter = ReadMeter()
    file, begun = replace(files[number], meter=meter), folder / f".{_place(folder, number).name}"
    try:
        begun.mkdir()
        written = [TokenFile.at(begun / f"{name}.tokens", tokenizer.vocab_size, write=True) for name in PARTS]
        ends = [array("Q") for _ in PARTS]
        for document in load(file, spec.text_field):
            if not document.is_blank:
                held_out = is_held_out(document, spec)
                written[held_out].append(encode(document, tokenizer, spec))
                ends[held_out].append(written[held_out].count)
            for passed in _passed:
                passed[number] = meter.passed
        for name, tokens, marks in zip(PARTS, written, ends, strict=True):
            tokens.flush()
            tokens.sync()
            np.asarray(marks, dtype=_ENDS).tofile(begun / f"{name}.ends")
        made = PreparedShard(
            name=file.name,
            source=fingerprint_of_shards([file]),
            documents=(len(ends[0]), len(ends[1])),
            tokens=(written[0].count, written[1].count),
        )
        (begun / _ABOUT).write_text(made.model_dump_json(), encoding="utf-8")
        begun.rename(_place(folder, number))
    except OSError as error:
        raise no_room(str(folder), error) from None
    finally:
        shutil.rmtree(begun, ignore_errors=True)
    return made


def _place(folder: Path, number: int) -> Path:
    return folder / f"{number:05}"


def _made(folder: Path, number: int, file: SourceFile) -> PreparedShard | None:
    """What an earlier preparation made of the shard. Raises UserError (DATA) where that was another one."""
    place = _place(folder, number)
    if not place.is_dir():
        return None
    found = _read(place)
    if found.source != fingerprint_of_shards([file]):
        raise data_error(
            f"'{file.name}' has changed since its preparation in '{place}', or other files were put before it",
            "take that folder away, or all of them where the text is another",
        )
    return found


def _read(place: Path) -> PreparedShard:
    try:
        return PreparedShard.model_validate_json((place / _ABOUT).read_bytes())
    except OSError as error:
        raise _incomplete(place, error.strerror or str(error)) from None
    except ValidationError as error:
        raise _incomplete(place, str(error.errors()[0]["msg"])) from None


def _whole(place: Path, vocab_size: int) -> PreparedShard:
    """The shard, if all its files have the size that it says."""
    found, width = _read(place), token_type(vocab_size).itemsize
    for name, documents, tokens in zip(PARTS, found.documents, found.tokens, strict=True):
        for ending, wanted in (("ends", documents * _ENDS.itemsize), ("tokens", tokens * width)):
            path = place / f"{name}.{ending}"
            size = path.stat().st_size if path.is_file() else 0
            if size != wanted:
                raise _incomplete(path, f"it has {size} bytes, and {_ABOUT} says {wanted}")
    return found


def _incomplete(place: Path, why: str) -> UserError:
    return data_error(
        f"run.data.prepared: '{place}' is not whole: {why}",
        "copy it again, or take that folder away and start `noloco-node data prepare` again: it makes what is missing",
    )


def _clear(folder: Path) -> None:
    """Take away what was only begun."""
    for path in folder.glob(".[0-9]*"):
        shutil.rmtree(path, ignore_errors=True)
