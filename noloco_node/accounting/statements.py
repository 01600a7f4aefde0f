"""A file of signed statements of what this node has contributed. It only ever grows; this module also sums it up.

Each line is one JSON object: a statement (canonical JSON as text), its signer, and the seal. The node itself signs how
much it worked since its last line; the peers that it served sign receipts. A reader verifies every line. A receipt
proves that the holder of some key says it was served: friends can write each other as many as they like.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, BinaryIO, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from noloco_node.config.files import SMALL_BYTES
from noloco_node.config.settings import canonical_json
from noloco_node.identity.keys import signed_by
from noloco_node.identity.peer_id import PeerId

_Count = Annotated[int, Field(ge=0, le=1 << 60)]
_Name = Annotated[str, Field(max_length=128)]
WallTime = Annotated[float, Field(ge=0.0, le=1e12, allow_inf_nan=False)]

SignedBy = Callable[[PeerId, bytes, bytes], bool]
"""A function of (peer, seal, statement) that tells whether that peer signed it."""


class _Statement(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    run: _Name
    since: WallTime
    until: WallTime


class Work(_Statement):
    """What a node did between two moments, as it says itself."""

    kind: Literal["work"] = "work"
    stage: Annotated[int, Field(ge=0, lt=256)]
    tokens: _Count
    """Behind its inner steps."""
    drawn: _Count
    """Microbatches drawn from the text (stage 0)."""
    served: _Count
    """Microbatches of other peers."""
    outer_rounds: _Count


class Receipt(_Statement):
    """What `server` did for the signer. A receipt is named by its signer, `session` and `serial`."""

    kind: Literal["receipt"] = "receipt"
    server: _Name
    session: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    serial: Annotated[int, Field(ge=0, le=1 << 40)]
    microbatches: Annotated[int, Field(gt=0, le=1 << 40)]
    tokens: _Count


_ADAPTER: TypeAdapter[Work | Receipt] = TypeAdapter(Annotated[Work | Receipt, Field(discriminator="kind")])


@dataclass(frozen=True, slots=True)
class Entry:
    """One verified line."""

    signer: PeerId
    statement: Work | Receipt


@dataclass(slots=True)
class Received:
    """The receipts of one peer in sum."""

    microbatches: int = 0
    tokens: int = 0


@dataclass(slots=True)
class Contribution:
    """A file in sum. `refused` counts lines that their named signer did not sign."""

    owner: PeerId
    tokens: int = 0
    drawn: int = 0
    served: int = 0
    outer_rounds: int = 0
    seconds: float = 0.0
    first: float | None = None
    last: float = 0.0
    """Until when the own work is written down."""
    receipts: dict[PeerId, Received] = field(default_factory=dict[PeerId, Received])
    refused: int = 0


def statement_text(statement: Work | Receipt) -> str:
    """A statement as it is signed and stored."""
    return canonical_json(statement.model_dump(mode="json"))


class ContributionFile:
    """Appends statements to `path`. A line that a crash cut off is closed, so that the next one stands alone."""

    def __init__(self, path: Path) -> None:
        self._path = path
        if path.exists() and path.stat().st_size:
            with path.open("rb+") as file:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.write(b"\n")

    def append(self, signer: PeerId, text: str, seal: bytes) -> None:
        """Add one statement and wait until it is on the disk. OSError as the file system says."""
        line = json.dumps({"signer": signer, "statement": text, "seal": seal.hex()}) + "\n"
        with self._path.open("ab", buffering=0) as file:
            end = file.tell()
            if file.write(line.encode()) != len(line):  # cut off by a full disk: the next one must stand alone
                file.truncate(end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file.fileno())


def read_entries(path: Path, check: SignedBy = signed_by) -> Iterator[Entry | None]:
    """The lines of a file in order; none if there is no file. A line that its named signer did not sign gives None. A
    cut-off last line is left out."""
    if not path.exists():
        return
    with path.open("rb") as file:
        while line := file.readline(SMALL_BYTES + 1):
            if line.endswith(b"\n") or _line_ends(file):  # of a longer line nothing is kept
                yield _verified(line, check)


def _line_ends(file: BinaryIO) -> bool:
    """Go to the end of this line; whether it has one, or is cut off."""
    while rest := file.readline(SMALL_BYTES):
        if rest.endswith(b"\n"):
            return True
    return False


def read_contribution(path: Path, owner: PeerId, check: SignedBy = signed_by) -> Contribution:
    """What `owner`'s file says in sum: its own work, and the receipts made out to it, each counted once."""
    total = Contribution(owner)
    seen: set[tuple[PeerId, str, int]] = set()
    for entry in read_entries(path, check):
        match entry:
            case Entry(signer, Work() as work) if signer == owner:
                _add_work(total, work)
            case Entry(signer, Receipt() as receipt) if receipt.server == owner and signer != owner:
                name = (signer, receipt.session, receipt.serial)
                if name not in seen:
                    seen.add(name)
                    _add_receipt(total, signer, receipt)
            case _:
                total.refused += 1
    return total


def _add_work(total: Contribution, work: Work) -> None:
    total.tokens += work.tokens
    total.drawn += work.drawn
    total.served += work.served
    total.outer_rounds += work.outer_rounds
    total.seconds += max(0.0, work.until - work.since)
    total.last = max(total.last, work.until)
    total.first = work.since if total.first is None else min(total.first, work.since)


def _add_receipt(total: Contribution, signer: PeerId, receipt: Receipt) -> None:
    row = total.receipts.setdefault(signer, Received())
    row.microbatches += receipt.microbatches
    row.tokens += receipt.tokens


def _verified(line: bytes, check: SignedBy) -> Entry | None:
    if len(line) > SMALL_BYTES:
        return None
    try:
        row = json.loads(line)
        signer, text, seal = row["signer"], row["statement"], bytes.fromhex(row["seal"])
        statement = _ADAPTER.validate_json(text)
    except (ValueError, KeyError, TypeError, ValidationError, RecursionError):
        return None
    if not isinstance(signer, str) or not check(PeerId(signer), seal, text.encode()):
        return None
    return Entry(PeerId(signer), statement)
