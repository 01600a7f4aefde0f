"""How records lie in hivemind's messages: MessagePack, a dictionary as an extension type. Anything else is nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import msgpack  # pyright: ignore[reportMissingTypeStubs]

DICTIONARY_CODE = 0x50
MOST_ROWS = 1024
"""At most so many rows of a dictionary are examined; an honest one has fewer."""

_msgpack: Any = msgpack

_Row = tuple[str, bytes, float]
"""A row is a signer, what it signed, and the expiry in DHT time."""


def pack_one(value: object) -> bytes:
    """A subkey or a value."""
    return bytes(_msgpack.packb(value, use_bin_type=True))


def unpack_one(data: bytes) -> object:
    """One MessagePack value without extension types; ValueError for anything else."""
    return _msgpack.unpackb(data, raw=False, strict_map_key=True, ext_hook=_no_extension)


def pack_dictionary(rows: Sequence[_Row]) -> bytes:
    """Pack rows as hivemind packs a value with subkeys."""
    items = [[signer, pack_one(signed), expires] for signer, signed, expires in rows]
    latest = max((expires for _, _, expires in rows), default=0.0)
    return pack_one(_msgpack.ExtType(DICTIONARY_CODE, pack_one([float("inf"), latest, items])))


def unpack_dictionary(data: bytes) -> list[tuple[object, object, object]]:
    """Rows of any types: what is no row is passed over, and what is no dictionary has none. Never raises."""
    try:
        packed = _msgpack.unpackb(data, ext_hook=_content_of_dictionary)
        if not isinstance(packed, bytes):
            return []
        parts = _msgpack.unpackb(packed, raw=False, strict_map_key=True, ext_hook=_passed_over)
    except ValueError:
        return []
    if not isinstance(parts, list) or len(cast("list[object]", parts)) != 3:
        return []
    items = cast("list[object]", parts)[2]
    rows: list[tuple[object, object, object]] = []
    for item in cast("list[object]", items)[:MOST_ROWS] if isinstance(items, list) else []:
        if isinstance(item, list) and len(cast("list[object]", item)) == 3:
            signer, value, expires = cast("list[object]", item)
            rows.append((signer, unpacked_bytes(value), expires))
    return rows


def unpacked_bytes(value: object) -> bytes | None:
    """The bytes that a packed value holds; None where it holds no bytes, or is packed otherwise than all others."""
    if not isinstance(value, bytes):
        return None
    try:
        inner = unpack_one(value)
    except ValueError:
        return None
    return inner if isinstance(inner, bytes) else None


def _no_extension(code: int, data: bytes) -> object:
    raise ValueError(f"extension type {code} of {len(data)} bytes")


def _content_of_dictionary(code: int, data: bytes) -> object:
    return data if code == DICTIONARY_CODE else None


def _passed_over(_code: int, _data: bytes) -> object:
    return None
