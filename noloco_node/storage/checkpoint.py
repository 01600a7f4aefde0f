"""A node's own checkpoints: everything needed to go on, the last few of them, none ever taken for what it is not.

`checkpoints/00000012/` holds one safetensors file, written piece by piece, and a manifest with the file's SHA-256 and a
seal over itself. The folder is written under another name, synced and renamed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from noloco_node import __version__, ambient
from noloco_node.config.files import check_plain, read_small
from noloco_node.data.samples import Position
from noloco_node.finite import all_finite
from noloco_node.storage import atomic
from noloco_node.storage.weights import MANIFEST, Sealed, Sha256, file_sha256
from noloco_node.training.frozen_state import FrozenState, Sizes, Thawed
from noloco_node.training.progress import MOST_COUNTED, Progress

_DTYPES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int8: "I8",
    torch.uint8: "U8",
}


def write_tensors(path: Path, sizes: Sizes, pieces: Iterable[tuple[str, int, Tensor]]) -> tuple[str, int]:
    """Write the tensors of these `sizes`, in their order, wide dtypes first. `pieces` are their numbers on the host in
    that order: name, beginning and what comes there. Returns the file's SHA-256 as hex and the bytes of its tensors.

    Raises OSError as the file system does, and whatever `pieces` raises; the file is no good then.
    """
    header, size = _header(sizes)
    digest = hashlib.sha256(header)
    written = 0
    with path.open("wb") as file:
        file.write(header)
        for _, _, piece in pieces:
            data = piece.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
            file.write(data)
            digest.update(data)
            written += len(data)
    assert written == size, f"{written} bytes were given where {size} were announced"
    return digest.hexdigest(), size


def whole(tensors: Mapping[str, Tensor]) -> Iterable[tuple[str, int, Tensor]]:
    """Tensors in memory as pieces: each is one."""
    return ((name, 0, tensor) for name, tensor in tensors.items())


def _header(sizes: Sizes) -> tuple[bytes, int]:
    entries: dict[str, object] = {}
    offset = 0
    for name, (dtype, shape) in sizes.items():
        assert offset % dtype.itemsize == 0, "wide dtypes come first, so that each number is aligned"
        end = offset + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, offset


logger = logging.getLogger(__name__)

T = TypeVar("T")

STATE = "state.safetensors"
SLOW = "slow"
"""The name of the tensor of slow weights."""

NEVER_NEGATIVE = ("exp_avg_sq", "optimizer_steps")
"""The optimizer takes roots and powers of these tensors."""

_Count = Annotated[int, Field(ge=0, le=MOST_COUNTED)]


def held_name(number: int) -> str:
    """The name of the tensor of the windows of the sample held at this place."""
    return f"held_{number}"


class HeldSample(BaseModel):
    """A sample that was drawn and neither trained nor dropped yet: to be trained first. Its windows are the tensor
    `held_name` of its place among those held."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    requeues: _Count


class KeptStanding(BaseModel):
    """Where a node stands, apart from its tensors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: str
    stage: _Count
    progress: Progress
    credit: Annotated[float, Field(ge=-MOST_COUNTED, le=MOST_COUNTED)]
    """Tokens by which earlier inner steps exceeded their share of the batch."""
    tokens_accumulated: _Count
    """Tokens behind the gradient that no inner step has used yet."""
    loss_accumulated: Annotated[float, Field(allow_inf_nan=False)]
    walk: Position
    """Where the next sample comes from; on stage 0 only."""
    held: tuple[HeldSample, ...]
    ledger: dict[str, _Count]
    """Counts of microbatches. On stage 0: drawn = trained + dropped + samples held."""
    birth: Annotated[str, Field(max_length=64)] | None = None
    """The life of the run of which this is a state; None where an older release wrote it."""


class CheckpointManifest(Sealed):
    """What the checkpoint is."""

    format: Literal[2] = 2
    version: str
    """noloco-node's version that wrote it."""
    written: float
    """Seconds since 1970."""
    standing: KeptStanding
    files: dict[Literal["state.safetensors"], Sha256]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One that was read back and found whole. Tensors are on the host."""

    path: Path
    standing: KeptStanding
    tensors: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Written:
    """What a write left."""

    path: Path
    size: int
    """Bytes of its tensors."""


class CheckpointFailed(Exception):
    """The disk did not take a checkpoint; nothing of it is left, and the ones before it are."""


class Unusable(Exception):
    """Why a checkpoint cannot be gone on from."""


class OfAnotherStage(Unusable):
    """It is whole, as far as its manifest says, but of another stage than the one wanted."""


class CheckpointFolder:
    """The checkpoints of one node, by rising number.

    The last `keep` stay, and the newest of each stage that the node has served. It may be all that is left of that
    stage one day. One is written at a time. Otherwise what a stay was still writing as the node left it would be mixed
    with the next one's.
    """

    def __init__(self, path: Path, keep: int) -> None:
        self.path = path
        self._keep = keep
        self._writing = threading.Lock()
        self.damaged: dict[Path, str] = {}
        """The checkpoints that `newest` passed over last, and why; not those of another stage."""

    def write(self, standing: KeptStanding, tensors: Mapping[str, Tensor], state: FrozenState | None = None) -> Written:
        """Write one more of `tensors` and of the `state`, piece by piece as that is read, and then remove those that
        are too many. Raises CheckpointFailed, also where the state is no good: it must not push sound ones out."""
        try:
            with self._writing:
                written = self._write(standing, tensors, state or FrozenState())
                self._prune()
        except OSError as error:
            raise CheckpointFailed(error.strerror or str(error)) from error
        except Thawed:
            raise CheckpointFailed("the disk took too long or memory ran out, and the training went on") from None
        return written

    def _write(self, standing: KeptStanding, tensors: Mapping[str, Tensor], state: FrozenState) -> Written:
        self.path.mkdir(parents=True, exist_ok=True)
        last = self._paths()[-1:]
        target = self.path / f"{int(last[0].name) + 1 if last else 1:08d}"
        wide = {name: tensor for name, tensor in tensors.items() if tensor.element_size() == 8}
        rest = {name: tensor for name, tensor in tensors.items() if name not in wide}
        sizes = {
            **{name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in wide.items()},
            **state.sizes,
            **{name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in rest.items()},
        }

        def sound() -> Iterator[tuple[str, int, Tensor]]:
            for pieces in (whole(wide), state.pieces(), whole(rest)):
                for name, start, piece in pieces:
                    if (why := _no_good({name: piece})) is not None:
                        raise CheckpointFailed(why)
                    yield name, start, piece

        with atomic.new_folder(target) as partial:
            digest, size = write_tensors(partial / STATE, sizes, sound())
            manifest = _sealed(standing, {STATE: digest})
            atomic.write_json(partial / MANIFEST, manifest.model_dump(mode="json"))
        return Written(target, size)

    def newest(self, run_id: str, stage: int | None) -> Checkpoint | None:
        """The newest one of this run and stage (None: of whatever stage) that is whole. One that is not used is logged
        with the reason, and the one before it is tried."""
        self.damaged = {}
        return next(self._from_the_newest(lambda path: read_checkpoint(path, run_id, stage), self.damaged), None)

    def newest_whole(self) -> tuple[Path, KeptStanding] | None:
        """The newest one that is whole, of whatever run and stage, without its tensors; those passed over are logged
        with the reason."""
        return next(self._from_the_newest(lambda path: (path, read_standing(path)), {}), None)

    def birth(self, run_id: str) -> str | None:
        """The life of the run that the newest readable checkpoint of this run belongs to. None if there is none, or an
        older release wrote it."""
        readable = self._from_the_newest(lambda path: _read_manifest(path).standing)
        return next((standing.birth for standing in readable if standing.run_id == run_id), None)

    @property
    def holds_any(self) -> bool:
        """Whether there is one, as far as manifests say: a write that was cut short leaves none."""
        return any(_stage_of(path) is not None for path in self._paths())

    def any_sound(self, run_id: str) -> bool:
        """Tell whether one checkpoint of this run is whole, of whatever stage."""
        return any(self._from_the_newest(lambda path: bool(read_checkpoint(path, run_id, None))))

    def _from_the_newest(self, read: Callable[[Path], T], damaged: dict[Path, str] | None = None) -> Iterator[T]:
        """What `read` makes of each that it can use. With `damaged` the others are logged, and those gathered in it
        that are of no other stage."""
        for path in reversed(self._paths()):
            try:
                yield read(path)
            except Unusable as reason:
                if damaged is None:
                    continue
                elsewhere = isinstance(reason, OfAnotherStage)
                level = logging.INFO if elsewhere else logging.WARNING
                logger.log(level, "checkpoint %s is not used: %s", path, reason)
                if not elsewhere:
                    damaged[path] = str(reason)

    def _prune(self) -> None:
        stages: set[int] = set()
        for age, path in enumerate(reversed(self._paths())):
            stage = _stage_of(path)
            if age >= self._keep and (stage is None or stage in stages):
                shutil.rmtree(path, ignore_errors=True)
            if stage is not None:
                stages.add(stage)

    def _paths(self) -> list[Path]:
        if not self.path.is_dir():
            return []
        numbered = [entry for entry in self.path.iterdir() if _is_numbered(entry)]
        return sorted(numbered, key=lambda entry: int(entry.name))


def _is_numbered(entry: Path) -> bool:
    """A link is no checkpoint: what it leads to is not this node's to read, nor to remove."""
    return entry.name.isascii() and entry.name.isdigit() and not entry.is_symlink()


def read_checkpoint(path: Path, run_id: str, stage: int | None) -> Checkpoint:
    """Read one back. Raises Unusable if it is torn, altered, of another run or stage, or of no use to go on from,
    whatever its seal."""
    manifest = _read_manifest(path)
    standing = manifest.standing
    if standing.run_id != run_id:
        raise Unusable(f"it is of run {standing.run_id}, not {run_id}")
    if stage is not None and standing.stage != stage:
        raise OfAnotherStage(f"it is of stage {standing.stage}, and this node serves stage {stage}")
    _check_hash(path, manifest)
    try:
        tensors = load_file(path / STATE)
    except (OSError, SafetensorError) as error:
        raise _unreadable(error) from error
    if (why := _no_good(tensors)) is not None:
        raise Unusable(why)
    return Checkpoint(path, standing, tensors)


def read_standing(path: Path) -> KeptStanding:
    """What stands in a checkpoint, of whatever run, without its tensors. Raises Unusable where it is not whole."""
    manifest = _read_manifest(path)
    _check_hash(path, manifest)
    return manifest.standing


def open_slow(path: Path) -> Callable[[], Tensor]:
    """A function that reads a checkpoint's slow weights alone, flat fp32 on the host. Its node may replace the
    checkpoint meanwhile, as the open file stays readable. Both raise Unusable where the weights are not sound."""
    opened: Any
    try:
        check_plain(path / STATE)
        opened = safe_open(path / STATE, framework="pt")
    except (OSError, SafetensorError) as error:
        raise _unreadable(error) from error

    def read() -> Tensor:
        try:
            slow = cast("Tensor", opened.get_tensor(SLOW))
        except (OSError, SafetensorError) as error:
            raise _unreadable(error) from error
        if (why := _no_good({SLOW: slow})) is not None:
            raise Unusable(why)
        return slow

    return read


def _read_manifest(path: Path) -> CheckpointManifest:
    try:
        text = read_small(path / MANIFEST)
        manifest = CheckpointManifest.model_validate_json(text)
    except (OSError, ValidationError) as error:
        wrong = error.errors() if isinstance(error, ValidationError) else []
        if any(each["loc"] == ("format",) for each in wrong):
            raise Unusable("another version of noloco-node wrote it, in a format that this one does not read") from None
        raise _unreadable(error) from error
    if not Sealed.holds_in(text):
        raise Unusable(f"{MANIFEST} does not match its own seal")
    return manifest


def _check_hash(path: Path, manifest: CheckpointManifest) -> None:
    try:
        check_plain(path / STATE)
        if file_sha256(path / STATE) != manifest.files[STATE]:
            raise Unusable(f"{STATE} does not match the hash in its {MANIFEST}")
    except (OSError, KeyError) as error:
        raise _unreadable(error) from error


def _unreadable(error: Exception) -> Unusable:
    return Unusable(f"{type(error).__name__}: {str(error).splitlines()[0]}")


def _no_good(tensors: Mapping[str, Tensor]) -> str | None:
    """Why nobody can train on from these; None where nothing speaks against it."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not all_finite(tensor):
            return f"{name} holds NaN or infinity"
        if name in NEVER_NEGATIVE and tensor.numel() and tensor.min().item() < 0:
            return f"{name} holds numbers below zero"
    return None


def _stage_of(path: Path) -> int | None:
    """The stage that a checkpoint's manifest names; None where there is no sound manifest."""
    try:
        return _read_manifest(path).standing.stage
    except Unusable:
        return None


def _sealed(standing: KeptStanding, files: dict[Literal["state.safetensors"], str]) -> CheckpointManifest:
    manifest = CheckpointManifest(version=__version__, written=ambient.wall(), standing=standing, files=files)
    return manifest.sealed()
