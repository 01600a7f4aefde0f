"""The folder of one node's run, and where things lie in it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from noloco_node.config.files import is_plain, read_small
from noloco_node.errors import ExitCode, UserError
from noloco_node.storage import atomic
from noloco_node.storage.held import NODE_LOCK, FileLock, LockHeld, holder_pid, lock_holder

MARK = "run.json"
SMALLEST_DISK = 64 << 20
"""A run folder may take so many bytes beside what grows with the model."""
TOKENIZER = "tokenizer.place.json"
"""This file says where the run's tokenizer lies on this machine, beside what all nodes agree on."""


class EndWord(BaseModel):
    """The last record of an origin, as it signed it: it had trained to the run's end."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    peer: Annotated[str, Field(min_length=10, max_length=128)]
    expires: Annotated[float, Field(gt=0.0, le=1e12, allow_inf_nan=False)]
    """DHT time, seconds."""
    level: Annotated[int, Field(ge=0, le=64)]
    """The level of the bucket that it was signed for."""
    signed: Annotated[str, Field(max_length=4096)]
    """Base64."""


class RunMark(BaseModel):
    """The run and the node that a folder belongs to."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    run_id: str
    run_name: str
    ended: bool = False
    birth: str | None = None
    """The life of the run that this folder is of (`trust.lives`); None where an older release wrote it."""
    end: tuple[EndWord, ...] = ()
    """The words of origins that the run has come to its end."""


class TokenizerPlace(BaseModel):
    """The folder of a tokenizer."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    folder: str


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths inside a run folder that can be written."""

    path: Path

    @classmethod
    def create(cls, path: Path) -> RunFolder:
        """Make the folder, or take the one that is there, and prove by a written file that it can be written. Raises
        UserError (RUN_FOLDER) if it cannot. It does so too if something lies there that has the name of a node's file
        or folder and is none."""
        probe = path / ".probe"
        try:
            path.mkdir(parents=True, exist_ok=True)
            atomic.write_bytes(probe, b"noloco-node")
            probe.unlink(missing_ok=True)
        except OSError as error:
            raise _unwritable(path, error, _in_the_way(path, error)) from error
        folder = cls(path)
        files = (folder.events, folder.contribution, folder.log, folder._lock_file, path / MARK)
        wrong = [file for file in files if os.path.lexists(file) and not is_plain(file)]
        wrong += [place for place in (folder.checkpoints, folder.final) if place.exists() and not place.is_dir()]
        if wrong:
            raise UserError(
                ExitCode.RUN_FOLDER,
                f"node.run_folder '{path}' holds '{wrong[0].name}', which no node has left there: it is of "
                "another kind, or a link",
                "remove it, or name another folder with --run-folder",
            )
        return folder

    def refusal(self) -> str:
        """Why the disk takes nothing more, in the system's words; empty where a block can be written."""
        probe = self.path / f".room.{os.getpid()}"
        try:
            # Fewer bytes may fit into the rest of a block of a full disk.
            probe.write_bytes(bytes(8192))
        except OSError as error:
            return error.strerror or str(error)
        finally:
            with contextlib.suppress(OSError):
                probe.unlink(missing_ok=True)
        return ""

    @contextlib.contextmanager
    def lock(self) -> Generator[None]:
        """Hold the folder for this process: two nodes in one would write each other's files.

        Raises UserError (RUN_FOLDER) where another process holds it.
        """
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(FileLock(self._lock_file))
            except LockHeld as held:
                raise UserError(
                    ExitCode.RUN_FOLDER,
                    f"node.run_folder '{self.path}' is in use by {held}",
                    "give each node a folder of its own (--run-folder), or stop the other node first",
                ) from None
            except OSError as error:
                raise _unwritable(self.path, error) from error
            yield

    @property
    def in_use(self) -> bool:
        """Whether a process holds it. OSError if it cannot be told."""
        return lock_holder(self._lock_file) is not None

    @property
    def pid(self) -> int | None:
        """The id of the process on this machine that holds it; None if there is none, or if it cannot be told."""
        return holder_pid(self._lock_file)

    @property
    def silent_so_far(self) -> bool:
        """Whether the process that holds it has written no event yet: those that are there are of former lives."""
        with contextlib.suppress(OSError):
            return self.events.stat().st_mtime_ns < self._lock_file.stat().st_mtime_ns
        return False

    @property
    def _lock_file(self) -> Path:
        return self.path / NODE_LOCK

    def claim(self, run_id: str, run_name: str) -> bool:
        """Say that this folder belongs to a run. Returns whether the run has come to its end here.

        Raises UserError (RUN_FOLDER) where the folder belongs to another run, or cannot be written any more.
        """
        ended = self.judge(run_id, run_name)
        if not self.claimed:
            self._write_mark(RunMark(run_id=run_id, run_name=run_name))
        return ended

    def judge(self, run_id: str, run_name: str) -> bool:
        """Whether the run has come to its end here. Writes nothing. Raises UserError (RUN_FOLDER) where the folder
        belongs to another run."""
        former = self._mark()
        if former is None:
            return False
        if former.run_id != run_id:
            raise UserError(
                ExitCode.RUN_FOLDER,
                f"node.run_folder '{self.path}' holds run '{former.run_name}' ({former.run_id}), "
                f"not '{run_name}' ({run_id})",
                "name another folder with --run-folder; or go on with that run by its own configuration: every value "
                "under `run:` must be the same",
            )
        return former.ended

    def keep_spec(self, agreed: str) -> None:
        """Write down what all nodes of the run agree on (`RunSpec.agreed_json`), if it does not stand there yet. An
        export of a model out of this folder needs it. Raises UserError (RUN_FOLDER) if it cannot be written."""
        try:
            if not is_plain(self.run_spec) or read_small(self.run_spec) != agreed.encode():
                atomic.write_bytes(self.run_spec, agreed.encode())
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def keep_tokenizer_place(self, folder: Path) -> None:
        """Write down where the run's tokenizer lies on this machine, for an export of a model out of this folder.
        Raises UserError (RUN_FOLDER) if it cannot be written."""
        try:
            atomic.write_json(self.path / TOKENIZER, {"folder": str(folder)})
        except OSError as error:
            raise _unwritable(self.path, error) from error

    @property
    def tokenizer_place(self) -> Path | None:
        """Where the run's tokenizer lay when a node read it here; None where that was never written down."""
        try:
            return Path(TokenizerPlace.model_validate_json(read_small(self.path / TOKENIZER)).folder)
        except (OSError, ValidationError):
            return None

    def mark_ended(self, run_id: str, run_name: str) -> None:
        """Say that the run has come to its end here. Raises as `claim`."""
        self._write_mark(self._mark_of(run_id, run_name).model_copy(update={"ended": True}))

    def keep_end(self, run_id: str, run_name: str, words: tuple[EndWord, ...]) -> None:
        """Write down which origins have signed the run's end. Raises as `claim`."""
        self._write_mark(self._mark_of(run_id, run_name).model_copy(update={"end": words}))

    def end(self, run_id: str) -> tuple[EndWord, ...]:
        """The words of the run's end, as far as they were written down."""
        mark = self._mark()
        return mark.end if mark is not None and mark.run_id == run_id else ()

    def keep_birth(self, run_id: str, run_name: str, birth: str) -> None:
        """Write down which life of the run this folder is of. Raises as `claim`."""
        if self.birth(run_id) != birth:
            self._write_mark(self._mark_of(run_id, run_name).model_copy(update={"birth": birth}))

    def birth(self, run_id: str) -> str | None:
        """The life of this run that the folder is of, as far as it was written down."""
        mark = self._mark()
        return mark.birth if mark is not None and mark.run_id == run_id else None

    def may_be_of(self, run_id: str | None) -> bool:
        """Whether it is no run's yet, or of this one and that has not ended. False where a run has it and `run_id` is
        not known."""
        mark = self._mark()
        return mark is None or (mark.run_id == run_id and not mark.ended)

    @property
    def claimed(self) -> bool:
        return self._mark() is not None

    @property
    def ended(self) -> bool:
        mark = self._mark()
        return mark is not None and mark.ended

    def _mark(self) -> RunMark | None:
        try:
            return RunMark.model_validate_json(read_small(self.path / MARK))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValidationError) as error:
            raise UserError(
                ExitCode.RUN_FOLDER,
                f"'{self.path / MARK}', which says whose run this folder holds, cannot be read: {error}",
                "name another folder with --run-folder; or remove that file if you know which run the folder holds",
            ) from None

    def _mark_of(self, run_id: str, run_name: str) -> RunMark:
        mark = self._mark()
        return mark if mark is not None and mark.run_id == run_id else RunMark(run_id=run_id, run_name=run_name)

    def _write_mark(self, mark: RunMark) -> None:
        try:
            atomic.write_json(self.path / MARK, mark.model_dump(mode="json"))
        except OSError as error:
            raise _unwritable(self.path, error) from error

    @property
    def events(self) -> Path:
        """The event file: typed JSON lines."""
        return self.path / "events.jsonl"

    @property
    def identity(self) -> Path:
        """The private key behind the peer id, where no other is named."""
        return self.path / "identity.key"

    @property
    def peers(self) -> Path:
        """The peers that the node has seen."""
        return self.path / "peers.json"

    @property
    def contribution(self) -> Path:
        """The signed record of what the node has contributed."""
        return self.path / "contribution.jsonl"

    @property
    def log(self) -> Path:
        return self.path / "node.log"

    @property
    def run_spec(self) -> Path:
        """All that the run's nodes agree on."""
        return self.path / "run_spec.json"

    @property
    def checkpoints(self) -> Path:
        """The node's own checkpoints, by number."""
        return self.path / "checkpoints"

    @property
    def final(self) -> Path:
        """The stage's weights at the end of the run."""
        return self.path / "final"


def _in_the_way(path: Path, error: OSError) -> str:
    """Why no folder is made, or none can be used, where the system's word for it would mislead; else empty."""
    files = [place for place in (path, *path.parents) if os.path.isfile(place)]
    if files:
        return f"'{files[0]}' is a file, not a folder"
    if isinstance(error, FileNotFoundError):
        return "it takes no file" if os.path.isdir(path) else "no folder can be made there"
    return ""


def _unwritable(path: Path, error: OSError | UnicodeDecodeError, why: str = "") -> UserError:
    why = why or (error.strerror if isinstance(error, OSError) else None) or str(error)
    return UserError(
        ExitCode.RUN_FOLDER,
        f"node.run_folder is '{path}', which cannot be written: {why}",
        "name a folder that does not exist yet or that you may write to, on a disk with space left",
    )
