"""Numbers as protobuf and multiaddrs write them."""

from __future__ import annotations


def varint(number: int) -> bytes:
    """A number in seven bits a byte, the lowest first; all but the last byte have the highest bit set."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*out, number))
