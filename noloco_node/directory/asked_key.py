"""What a look-up asks for: a key, and marks of what the asker holds of it already, so that it is told nothing twice.

A mark is a short hash of a record's signer and expiry under a salt that is drawn anew whenever the asker holds other
records: nobody can make a record in advance whose mark hides another's. A key of the DHT's own length asks for
everything, as before there were marks.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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

    def lacked(self, told_apart: Sequence[bytes]) -> list[bool]:
        """Of each of these records, by its `told_apart`, whether the asker does not hold it yet."""
        if not self.marks:
            return [True] * len(told_apart)
        return [mark not in self.marks for mark in _marks(self.salt, told_apart)]


def told_apart(signer: str, expires: float) -> bytes:
    """By what a record is told from others: its signer, and its expiry in DHT time, seconds."""
    return signer.encode() + _EXPIRES.pack(expires)


def pack_asked(key: bytes, held: Iterable[bytes], salt: bytes, neighbours: int) -> bytes:
    """A key of a request by who holds these records, each by its `told_apart`."""
    return key + _HEAD.pack(neighbours, salt) + b"".join(_marks(salt, islice(held, MOST_MARKS)))


def unpack_asked(raw: bytes) -> AskedKey:
    """What a key of a request asks for, whatever its bytes."""
    rest = len(raw) - KEY_BYTES - _HEAD.size
    if rest < 0 or rest % MARK_BYTES:
        return AskedKey(raw)
    neighbours, salt = _HEAD.unpack_from(raw, KEY_BYTES)
    first, most = len(raw) - rest, MOST_MARKS * MARK_BYTES
    marks = frozenset(raw[at : at + MARK_BYTES] for at in range(first, min(len(raw), first + most), MARK_BYTES))
    return AskedKey(raw[:KEY_BYTES], min(neighbours, MOST_NEIGHBOURS), salt, marks)


def _marks(salt: bytes, records: Iterable[bytes]) -> list[bytes]:
    salted, marks = blake2b(digest_size=MARK_BYTES, salt=salt).copy, list[bytes]()
    for record in records:
        mark = salted()
        mark.update(record)
        marks.append(mark.digest())
    return marks
