"""What a look-up asks for: a key, and marks of what the asker holds of it already.

A mark is a short hash of a record's signer, and its expiry. The asked node leaves out that record and all before it, so
nothing is told twice. Near a key many nodes are asked at once. Most records of those that do not store it are older
than what the asker has. The hash is salted, with a salt drawn for each request: nobody can seek a key in advance whose
mark hides another's. A key of the DHT's own length asks for everything, as before there were marks.

An asker may want nothing of signers that are not marked: one that seeks nodes marks nobody.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from itertools import islice

KEY_BYTES = 20
"""The length of a DHT key in bytes."""
SIGNER_BYTES, EXPIRY_BYTES = 3, 3
MARK_BYTES = SIGNER_BYTES + EXPIRY_BYTES
MOST_ASKED = 256
"""A request names at most so many keys, since a run has no more stages, and marks so many records of each. Of records
that it brings so many are examined."""
TICKS = 1024
"""The ticks of a second in an expiry. A record expires at least one of them later than the one before it."""

_HEAD = struct.Struct(">B8s")
_ONLY_MARKED = 0x80
"""This bit of the first byte stands beside the number of neighbours."""
_TURN = 1 << (8 * EXPIRY_BYTES)
"""A mark's expiry begins anew after so many ticks: 4.5 hours, more than twice the longest life."""


def _nothing() -> dict[bytes, int]:
    return {}


@dataclass(frozen=True, slots=True)
class AskedKey:
    """One key of a request."""

    key: bytes
    neighbours: int = _ONLY_MARKED - 1
    """Nodes near the key that the asker wants to be told of, at most."""
    salt: bytes = b""
    marks: Mapping[bytes, int] = field(default_factory=_nothing)
    """Ticks of the expiry that the asker holds, by the salted hash of the signer."""
    only_marked: bool = False
    """Whether nothing is wanted of other signers."""

    def wants(self, signer: str, expires: float) -> bool:
        """Whether the asker wants this record: it holds neither that nor a later one of the same signer."""
        held = self.marks.get(_mark(_salted(self.salt), signer)) if self.marks else None
        if held is None:
            return not self.only_marked
        return (held - _ticks(expires)) % _TURN >= _TURN // 2


def pack_asked(
    key: bytes, held: Iterable[tuple[str, float]], salt: bytes, neighbours: int, *, only_marked: bool = False
) -> bytes:
    """Pack one key of a request for an asker that holds these signers' records, with their expiries (DHT time,
    seconds).

    With `only_marked` the asker wants no other signers' records.
    """
    salted = _salted(salt)
    marks = b"".join(
        _mark(salted, signer) + _ticks(expires).to_bytes(EXPIRY_BYTES, "big")
        for signer, expires in islice(held, MOST_ASKED)
    )
    return key + _HEAD.pack(neighbours | (_ONLY_MARKED if only_marked else 0), salt) + marks


def unpack_asked(raw: bytes) -> AskedKey:
    """What a key of a request asks for, whatever its bytes."""
    first = KEY_BYTES + _HEAD.size
    if len(raw) < first or (len(raw) - first) % MARK_BYTES:
        return AskedKey(raw)
    first_byte, salt = _HEAD.unpack_from(raw, KEY_BYTES)
    neighbours, only_marked = first_byte & ~_ONLY_MARKED, bool(first_byte & _ONLY_MARKED)
    last = min(len(raw), first + MOST_ASKED * MARK_BYTES)
    marks = {
        raw[at : at + SIGNER_BYTES]: int.from_bytes(raw[at + SIGNER_BYTES : at + MARK_BYTES], "big")
        for at in range(first, last, MARK_BYTES)
    }
    return AskedKey(raw[:KEY_BYTES], neighbours, salt, marks, only_marked)


@lru_cache(maxsize=16)
def _salted(salt: bytes) -> blake2b:
    """What the marks of one request begin with."""
    return blake2b(digest_size=SIGNER_BYTES, salt=salt)


def _mark(salted: blake2b, signer: str) -> bytes:
    mark = salted.copy()
    mark.update(signer.encode())
    return mark.digest()


def _ticks(expires: float) -> int:
    return int(expires * TICKS) % _TURN
