"""A text that was tokenised once: two files of tokens and a manifest, which a run reads in place of the text."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from noloco_node import ambient
from noloco_node.ambient import LOOK_SECONDS
from noloco_node.config.data_spec import NOT_PREPARED, DataSpec
from noloco_node.config.files import home_place
from noloco_node.data.documents import Document, Fingerprint, data_error
from noloco_node.data.encoding import encode
from noloco_node.data.formats import ReadMeter
from noloco_node.data.hub import revision_of
from noloco_node.data.mixture import mixed_fingerprint, naming_part
from noloco_node.data.shards import fingerprint_of_shards, shard_files
from noloco_node.data.sources import check_fingerprint, check_source, divided, fingerprint_of_documents
from noloco_node.data.token_file import TokenFile, token_type
from noloco_node.data.tokenizers import Tokenizer, Tokens
from noloco_node.errors import ExitCode, UserError
from noloco_node.workers import cores

BATCH_LENGTH = 1 << 18
"""A thread tokenises so many characters at a time."""
_Batch = list[tuple[Document, bool]]
SAVE_SECONDS = 5.0
"""A preparation writes down how far it has come every so many seconds."""
_DONE, _UNDER_WAY = "manifest.json", "unfinished.json"
_NOT_THE_TEXTS = frozenset({"path", "prepared", "fingerprint", "seed", "block_windows", "parts_per_shard"})
"""Tokens do not depend on these settings of `run.data`."""

_Count = Annotated[int, Field(ge=0)]


class TextManifest(BaseModel):
    """What lies in a prepared folder, and how far its preparation has come."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: Literal[1] = 1
    text: dict[str, JsonValue]
    """The settings of `run.data` that the tokens depend on."""
    vocab_size: Annotated[int, Field(gt=0)]
    """The number of ids of the tokenizer."""
    documents: _Count = 0
    """The number of documents, or pieces of them, with tokens there."""
    so_far: str = Fingerprint().text
    """The fingerprint of these."""
    training: _Count = 0
    """Tokens to train on."""
    validation: _Count = 0
    """Tokens held out."""
    fingerprint: str = ""
    """The fingerprint of the whole text, once all of it is there."""
    files: str = ""
    """The fingerprint of the files of a text on this machine, by their ends."""


@dataclass(frozen=True, slots=True)
class PreparedSoFar:
    """How far a preparation has come."""

    done_bytes: int
    """The bytes of the source's files that are done."""
    all_bytes: int
    """0 where nobody knows."""
    tokens: int


def prepare_run(
    spec: DataSpec, tokenizer: Tokenizer, folder: Path, told: Callable[[int, PreparedSoFar], None] = lambda _, __: None
) -> tuple[TextManifest, ...]:
    """Write the tokens of all that a run trains on: of a mixture each source's to a folder of its own below `folder`.
    `told` hears how far the source of that number has come.

    Raises UserError as `prepare` does, CONFIG for a streamed text, and DATA where the mixture is not the run's.
    """
    if spec.streaming:
        raise UserError(
            ExitCode.CONFIG,
            f"run.data.streaming is on, and {NOT_PREPARED}",
            "leave run.data.streaming off; run.data.block_windows shares such a text out between replicas",
        )
    made: list[TextManifest] = []
    for number, part in enumerate(spec.model_copy(update={"prepared": str(folder)}).parts):
        with naming_part(spec, number):
            unprepared = part.model_copy(update={"prepared": None})
            made.append(prepare(unprepared, tokenizer, _prepared_folder(part), partial(told, number)))
    if spec.mixture:
        check_fingerprint(spec, mixed_fingerprint([each.fingerprint for each in made]))
    return tuple(made)


def prepare(
    spec: DataSpec, tokenizer: Tokenizer, folder: Path, told: Callable[[PreparedSoFar], None] = lambda _: None
) -> TextManifest:
    """Write the tokens of the text to `folder`; an interrupted preparation is continued.

    `told` hears now and then how far it has come. Raises UserError (DATA) as `load_windows` does. It does so too if the
    folder holds another text's tokens, the text has changed since the interruption, or the disk is full. It raises
    RUN_FOLDER if the folder cannot be written.
    """
    made = not folder.is_dir()
    _make(folder)
    with _alone(folder):
        try:
            return _prepare(spec, tokenizer, folder, told)
        except UserError:
            _leave_nothing(folder, made=made)
            raise


def _prepare(spec: DataSpec, tokenizer: Tokenizer, folder: Path, told: Callable[[PreparedSoFar], None]) -> TextManifest:
    files_now = fingerprint_of_shards(shard_files(spec)) if spec.source == "text" else ""
    begun = _begun(spec, tokenizer, folder)
    if begun.files and begun.files != files_now:
        raise _changed(folder)
    if begun.fingerprint:
        return begun
    begun = begun.model_copy(update={"files": files_now})
    marked = spec.attention == "document"
    with _writing(folder):
        files = {
            held: TokenFile.at(_tokens(folder, held), begun.vocab_size, write=True, marked=marked)
            for held in (False, True)
        }
    files[False].cut_to(begun.training)
    files[True].cut_to(begun.validation)
    whole, walked, number, saved = Fingerprint(), Fingerprint(), 0, ambient.monotonic()

    def reached(fingerprint: str = "") -> TextManifest:
        counts = {"training": files[False].count, "validation": files[True].count}
        changes = {"documents": number, "so_far": walked.text, "fingerprint": fingerprint}
        return begun.model_copy(update={**counts, **changes})

    meter, size, looked = ReadMeter(), _bytes_of(spec), 0.0

    def tell() -> None:
        told(PreparedSoFar(meter.total, size, sum(file.count for file in files.values())))

    for document, held_out, tokens in _tokenised(divided(spec, whole, meter), begun.documents, tokenizer, spec):
        number += 1
        walked.add(document)
        if number == begun.documents and walked.text != begun.so_far:
            raise _changed(folder)
        if tokens is None:
            continue
        files[held_out].append(tokens)
        now = ambient.monotonic()
        if now - looked >= LOOK_SECONDS:
            tell()
            looked = now
        if now - saved >= SAVE_SECONDS:
            _save(folder, files, reached())
            saved = now
    if number < begun.documents:
        raise _changed(folder)
    tell()
    done = reached(whole.text)
    _save(folder, files, done)
    (folder / _UNDER_WAY).rename(folder / _DONE)
    return done


def _make(folder: Path) -> None:
    """Make a folder for the tokens. Raises as `_writing`."""
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@contextlib.contextmanager
def _alone(folder: Path) -> Generator[None]:
    """Raises UserError (RUN_FOLDER) where another process prepares there: one would cut off what the other wrote."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # some disks of the network know no locks of folders
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                what, remedy = f"another process prepares a text in '{folder}'", "wait for its end, or change --to DIR"
                raise UserError(ExitCode.RUN_FOLDER, what, remedy) from None
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _writing(folder: Path) -> Generator[None]:
    """Raises UserError (RUN_FOLDER) where the folder, or a file in it, cannot be written."""
    try:
        yield
    except OSError as error:
        reason = "it is no folder" if isinstance(error, FileExistsError) else error.strerror or str(error)
        raise UserError(
            ExitCode.RUN_FOLDER,
            f"the folder for the tokens is '{folder}', which cannot be written: {reason}",
            "name a folder that does not exist yet, or one that this user may write to, with --to DIR",
        ) from None


def _leave_nothing(folder: Path, *, made: bool) -> None:
    """Remove a preparation that cannot be continued, since it ended before it wrote down how far it had come."""
    if any((folder / name).exists() for name in (_DONE, _UNDER_WAY)):
        return
    with contextlib.suppress(OSError):
        for held_out in (False, True):
            _tokens(folder, held_out).unlink(missing_ok=True)
        if made:
            folder.rmdir()


def _bytes_of(spec: DataSpec) -> int:
    return sum(file.size for file in shard_files(spec)) if spec.source == "text" else 0


def _tokenised(
    documents: Iterable[tuple[Document, bool]], done: int, tokenizer: Tokenizer, spec: DataSpec
) -> Iterator[tuple[Document, bool, Tokens | None]]:
    """The documents in their order, with their tokens but for the first `done` of them. As many threads work as there
    are cores: a tokenizer lets go of Python's lock."""
    threads, waiting = cores(), deque[tuple[_Batch, Future[list[Tokens]] | None]]()

    def tokens_of(batch: _Batch) -> list[Tokens]:
        return [encode(document, tokenizer, spec) for document, _ in batch]

    def first() -> Iterator[tuple[Document, bool, Tokens | None]]:
        batch, made = waiting.popleft()
        tokens = [None] * len(batch) if made is None else made.result()
        return ((document, held_out, each) for (document, held_out), each in zip(batch, tokens, strict=True))

    number = 0
    with ThreadPoolExecutor(threads, thread_name_prefix="tokens") as pool:
        for batch in _batches(documents, done):
            number += len(batch)
            waiting.append((batch, pool.submit(tokens_of, batch) if number > done else None))
            while len(waiting) > 2 * threads:
                yield from first()
        while waiting:
            yield from first()


def _batches(documents: Iterable[tuple[Document, bool]], done: int) -> Iterator[_Batch]:
    """Batches of about BATCH_LENGTH characters; one ends with document `done`."""
    batch, length = list[tuple[Document, bool]](), 0
    for number, document in enumerate(documents, start=1):
        batch.append(document)
        length += len(document[0])
        if length >= BATCH_LENGTH or number == done:
            yield batch
            batch, length = [], 0
    if batch:
        yield batch


def open_prepared(spec: DataSpec, vocab_size: int) -> tuple[TokenFile, TokenFile]:
    """The tokens to train on and those held out of a prepared text, `vocab_size` being that of the run's tokenizer.

    Raises UserError (DATA) where the folder does not hold the finished tokens of the run's text.
    """
    folder = _prepared_folder(spec)
    manifest = read_manifest(spec)
    _check_vocabulary(manifest, folder, vocab_size)
    marked = spec.attention == "document"
    return (
        TokenFile.at(_tokens(folder, False), vocab_size, marked=marked),
        TokenFile.at(_tokens(folder, True), vocab_size, marked=marked),
    )


def read_manifest(spec: DataSpec) -> TextManifest:
    """The manifest of `run.data.prepared`. Raises UserError (DATA) if that is no finished preparation of the run's
    text, or not all of it is there."""
    folder = _prepared_folder(spec)
    manifest = _read(folder / _DONE)
    if manifest is None:
        state = "an unfinished preparation" if (folder / _UNDER_WAY).exists() else "no prepared text"
        raise data_error(
            f"run.data.prepared is '{folder}', which holds {state}",
            "make it, or go on with it, with `noloco-node data prepare CONFIG --to DIR`",
        )
    _check_same(spec, manifest, folder)
    _check_sizes(folder, manifest, marked=spec.attention == "document")
    check_fingerprint(spec, manifest.fingerprint)
    return manifest


def _check_sizes(folder: Path, manifest: TextManifest, *, marked: bool) -> None:
    """Raise UserError (DATA) where tokens are fewer than the manifest says, or more than those of a finished one."""
    for held_out, count in ((False, manifest.training), (True, manifest.validation)):
        path = _tokens(folder, held_out)
        wanted = count * token_type(manifest.vocab_size, marked=marked).itemsize
        size = path.stat().st_size if path.is_file() else 0
        if size < wanted or (manifest.fingerprint and size > wanted):
            raise data_error(
                f"run.data.prepared: '{path}' has {size} bytes, and its manifest says {wanted}",
                "copy it again, or take the folder away and prepare it anew",
            )


def check_text_here(spec: DataSpec) -> None:
    """`check_source`, and that the shards are the run's; or of a prepared text that it is one.

    Raises UserError (DATA).
    """
    if spec.prepared is None:
        check_source(spec)
    found = [_look(spec, *each) for each in enumerate(spec.parts)]
    known = [each for each in found if each]
    if spec.mixture and len(known) == len(found):
        check_fingerprint(spec, mixed_fingerprint(known))


def _look(spec: DataSpec, number: int, part: DataSpec) -> str | None:
    """The fingerprint of one part, where it can be told without reading the text or asking a hub."""
    with naming_part(spec, number):
        if part.prepared is not None or (part.streaming and part.source == "text"):
            return _fingerprint_of(part)
    return None


def fingerprint_of(spec: DataSpec) -> str:
    """The fingerprint of the text, which is prepared, streamed, or read whole for it; of a mixture, of all sources.
    Raises UserError (DATA) as reading does, and if it is not the one that the run names."""
    return fingerprints_of(spec)[0]


def fingerprints_of(spec: DataSpec) -> tuple[str, list[str]]:
    """The fingerprint of the text, and if it is a mixture, one for each of its sources. Raises UserError (DATA) as
    `fingerprint_of` does."""
    if not spec.mixture:
        return _fingerprint_of(spec), []
    found: list[str] = []
    for number, part in enumerate(spec.parts):
        with naming_part(spec, number):
            found.append(_fingerprint_of(part))
    whole = mixed_fingerprint(found)
    check_fingerprint(spec, whole)
    return whole, found


def _fingerprint_of(spec: DataSpec) -> str:
    if spec.prepared is not None:
        return read_manifest(spec).fingerprint
    if not spec.streaming:
        return fingerprint_of_documents(spec)
    found = revision_of(spec) if spec.source == "huggingface" else fingerprint_of_shards(shard_files(spec))
    check_fingerprint(spec, found)
    return found


def _begun(spec: DataSpec, tokenizer: Tokenizer, folder: Path) -> TextManifest:
    fresh = TextManifest(text=_settings(spec), vocab_size=tokenizer.vocab_size)
    begun = _read(folder / _DONE) or _read(folder / _UNDER_WAY)
    if begun is None:
        return fresh
    _check_same(spec, begun, folder)
    _check_vocabulary(begun, folder, fresh.vocab_size)
    _check_sizes(folder, begun, marked=spec.attention == "document")
    return begun


def _check_vocabulary(manifest: TextManifest, folder: Path, vocab_size: int) -> None:
    if manifest.vocab_size != vocab_size:
        raise _another(folder, f"made for token ids below {manifest.vocab_size}, not below {vocab_size}")


def _check_same(spec: DataSpec, manifest: TextManifest, folder: Path) -> None:
    wanted = _settings(spec)
    made = DataSpec().model_dump(mode="json") | manifest.text
    other = [name for name in wanted if made[name] != wanted[name]]
    if made["tokenizer_fingerprint"] is None:  # then the name says which one it was
        other = ["tokenizer" if name == "tokenizer_fingerprint" else name for name in other]
    if other:
        said = [
            f"run.data.{name} {'not set' if made[name] is None else repr(made[name])}" for name in dict.fromkeys(other)
        ]
        raise _another(folder, f"made with {', '.join(said)}")


def _prepared_folder(spec: DataSpec) -> Path:
    """Where the run's prepared tokens lie, or are to lie, on this machine."""
    return home_place(spec.prepared or "")


def _settings(spec: DataSpec) -> dict[str, JsonValue]:
    """What the tokens depend on; of a dataset of the hub its name is part of it."""
    silent = _NOT_THE_TEXTS | ({"tokenizer"} if spec.own_tokenizer else set[str]())
    settings = spec.model_dump(mode="json", exclude=set(silent))
    return settings | ({"path": spec.path} if spec.source == "huggingface" else {})


def _read(path: Path) -> TextManifest | None:
    try:
        return TextManifest.model_validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValidationError as error:
        raise data_error(f"'{path}' is no manifest: {error.errors()[0]['msg']}", "prepare the text anew") from None


def _save(folder: Path, files: dict[bool, TokenFile], manifest: TextManifest) -> None:
    """First the tokens, then what says how many they are."""
    for file in files.values():
        file.flush()
        file.sync()
    temporary = folder / f".{_UNDER_WAY}"
    with _writing(folder), temporary.open("w", encoding="utf-8") as written:
        written.write(manifest.model_dump_json(indent=1))
        written.flush()
        os.fsync(written.fileno())
    temporary.replace(folder / _UNDER_WAY)


def _tokens(folder: Path, held_out: bool) -> Path:
    return folder / ("validation.tokens" if held_out else "training.tokens")


def _another(folder: Path, what: str) -> UserError:
    return data_error(f"'{folder}' holds the tokens of another text: {what}", "name another folder, or remove this one")


def _changed(folder: Path) -> UserError:
    return data_error(
        f"the text has changed since its preparation in '{folder}', or another was prepared there",
        "take the folder away, and prepare the text anew",
    )
