"""What a look-up asks for: a key, and marks of what the asker holds of it already, so that it is told nothing twice,
and nothing that it knows to be over.

A mark is a short hash of a record's signer, and its expiry: whoever is asked leaves out that record and all before it.
Near a key many are asked at once, and most of what those hold who do not store it is older than what the asker has. The
hash is salted, with a salt that is drawn for each request: nobody can seek a key in advance whose mark hides another's.
A key of the DHT's own length asks for everything, as before there were marks.

Whoever wants to know no more than that a stage is served, and by whom for example, asks for a few: those that come
first by the request's salt, so that each holder names the same ones, and the same again when it is asked again.
"""

from __future__ import annotations

import heapq
import struct
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from itertools import islice
from typing import NamedTuple, TypeVar

KEY_BYTES = 20
"""Of a key of the DHT."""
SIGNER_BYTES, EXPIRY_BYTES = 3, 3
MARK_BYTES = SIGNER_BYTES + EXPIRY_BYTES
MOST_MARKS = 256
MOST_NEIGHBOURS = 20
TICKS = 1024
"""Of an expiry, a second: a record expires a millisecond later at least than the one before it."""

SALT_BYTES = 8
MOST_OF_FEW = 128

_HEAD = struct.Struct(f">B{SALT_BYTES}s")
_NEIGHBOUR_BITS = 5
"""Of the first byte; those above say how many records are wanted, as a power of two, or all (0). Who does not know of
few names more neighbours, and tells all."""
_TURN = 1 << (8 * EXPIRY_BYTES)
"""Ticks after which a mark's expiry begins anew: 4.5 hours, more than twice the longest life."""


S = TypeVar("S", bound=str)


def _nothing() -> dict[bytes, int]:
    return {}


class Few(NamedTuple):
    """Some of the records under a key: `most`, a power of two from 2 to 128, those that come first by a salt."""

    most: int
    salt: bytes

    def of(self, signers: Collection[S]) -> Collection[S]:
        """Which of them."""
        if len(signers) <= self.most:
            return signers
        salted = _salted(self.salt)
        return heapq.nsmallest(self.most, signers, key=lambda signer: (_mark(salted, signer), signer))


@dataclass(frozen=True, slots=True)
class AskedKey:
    """One key of a request."""

    key: bytes
    neighbours: int = MOST_NEIGHBOURS
    """Nodes near the key that the asker wants to be told of, at most."""
    salt: bytes = b""
    marks: Mapping[bytes, int] = field(default_factory=_nothing)
    """Ticks of the expiry that the asker holds, by the salted hash of the signer."""
    most: int = 0
    """Records that are wanted, those that come first by the salt; 0: all."""

    def of(self, signers: Collection[S]) -> Collection[S]:
        """Whose records are wanted, of those that are held."""
        return Few(self.most, self.salt).of(signers) if self.most else signers

    def holds(self, signer: str, expires: float) -> bool:
        """Whether the asker holds this record already, or a later one of the same signer."""
        if not self.marks:
            return False
        held = self.marks.get(_mark(_salted(self.salt), signer))
        return held is not None and (held - _ticks(expires)) % _TURN < _TURN // 2


def pack_asked(key: bytes, held: Iterable[tuple[str, float]], salt: bytes, neighbours: int, most: int = 0) -> bytes:
    """A key of a request by who holds these signers' records, with their expiries (DHT time, seconds), and wants at
    most so many others (`Few.most`; 0: all)."""
    assert most == 0 or (2 <= most <= MOST_OF_FEW and most & (most - 1) == 0), most
    salted = _salted(salt)
    marks = b"".join(
        _mark(salted, signer) + _ticks(expires).to_bytes(EXPIRY_BYTES, "big")
        for signer, expires in islice(held, MOST_MARKS)
    )
    first = neighbours | (most.bit_length() - 1 if most else 0) << _NEIGHBOUR_BITS
    return key + _HEAD.pack(first, salt) + marks


def unpack_asked(raw: bytes) -> AskedKey:
    """What a key of a request asks for, whatever its bytes."""
    first = KEY_BYTES + _HEAD.size
    if len(raw) < first or (len(raw) - first) % MARK_BYTES:
        return AskedKey(raw)
    numbers, salt = _HEAD.unpack_from(raw, KEY_BYTES)
    neighbours, most = numbers & ((1 << _NEIGHBOUR_BITS) - 1), numbers >> _NEIGHBOUR_BITS
    last = min(len(raw), first + MOST_MARKS * MARK_BYTES)
    marks = {
        raw[at : at + SIGNER_BYTES]: int.from_bytes(raw[at + SIGNER_BYTES : at + MARK_BYTES], "big")
        for at in range(first, last, MARK_BYTES)
    }
    return AskedKey(raw[:KEY_BYTES], min(neighbours, MOST_NEIGHBOURS), salt, marks, 1 << most if most else 0)


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
