"""What a look-up asks for: a key, and marks of what the asker holds of it already, so that it is told nothing twice.

A mark is a short hash of a record's signer and expiry under a salt that is drawn for each request: nobody can make a
record in advance whose mark hides another's. A key of the DHT's own length asks for everything, as before there were
marks.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import islice

KEY_BYTES = 20
"""Of a key of the DHT."""
MARK_BYTES = 4
MOST_MARKS = 256
MOST_NEIGHBOURS = 20

_HEAD = struct.Struct(">B8s")
_EXPIRES = struct.Struct(">d")


@dataclass(frozen=True, slots=True)
class AskedKey:
    """One key of a request."""

    key: bytes
    neighbours: int = MOST_NEIGHBOURS
    """Nodes near the key that the asker wants to be told of, at most."""
    salt: bytes = b""
    marks: frozenset[bytes] = frozenset()

    def holds(self, signer: str, expires: float) -> bool:
        """Whether the asker holds this record already."""
        return bool(self.marks) and _mark(_salted(self.salt), signer, expires) in self.marks


def pack_asked(key: bytes, held: Iterable[tuple[str, float]], salt: bytes, neighbours: int) -> bytes:
    """A key of a request by who holds these signers' records, with their expiries (DHT time, seconds)."""
    salted = _salted(salt)
    marks = b"".join(_mark(salted, signer, expires) for signer, expires in islice(held, MOST_MARKS))
    return key + _HEAD.pack(neighbours, salt) + marks


def unpack_asked(raw: bytes) -> AskedKey:
    """What a key of a request asks for, whatever its bytes."""
    rest = len(raw) - KEY_BYTES - _HEAD.size
    if rest < 0 or rest % MARK_BYTES:
        return AskedKey(raw)
    neighbours, salt = _HEAD.unpack_from(raw, KEY_BYTES)
    first, most = len(raw) - rest, MOST_MARKS * MARK_BYTES
    marks = frozenset(raw[at : at + MARK_BYTES] for at in range(first, min(len(raw), first + most), MARK_BYTES))
    return AskedKey(raw[:KEY_BYTES], min(neighbours, MOST_NEIGHBOURS), salt, marks)


@lru_cache(maxsize=16)
def _salted(salt: bytes) -> blake2b:
    """What the marks of one request begin with."""
    return blake2b(digest_size=MARK_BYTES, salt=salt)


def _mark(salted: blake2b, signer: str, expires: float) -> bytes:
    mark = salted.copy()
    mark.update(signer.encode() + _EXPIRES.pack(expires))
    return mark.digest()
