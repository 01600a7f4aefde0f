"""Addresses as p2pd reads and writes them: bytes. hivemind's codec is used where it is right."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import base58
from hivemind.utils.multiaddr import Multiaddr  # pyright: ignore[reportMissingTypeStubs]

from noloco_node.identity.addresses import CIRCUIT, parse_address
from noloco_node.identity.keys import varint

MOST_ADDRESSES = 16
P2P_CODE = 421
CIRCUIT_CODE = 290


@dataclass(frozen=True, slots=True)
class RawAddress:
    """Stands for hivemind's `Multiaddr` where only its bytes are wanted."""

    raw: bytes

    def to_bytes(self) -> bytes:
        """The address in binary form."""
        return self.raw


def to_dial(text: str) -> RawAddress:
    """Where a connection to the peer of this address begins: the address without the peer itself.

    hivemind's codec writes a relay's peer id as a CID, which p2pd does not understand. ValueError for no address.
    """
    relay = parse_address(text).relay
    place = text.partition(CIRCUIT)[0] if relay is not None else text
    raw = bytes(Multiaddr(place.rpartition("/p2p/")[0]).to_bytes())
    if relay is not None:
        named = base58.b58decode(relay)
        raw += varint(P2P_CODE) + varint(len(named)) + named + varint(CIRCUIT_CODE)
    return RawAddress(raw)


def as_texts(addresses: Sequence[bytes]) -> list[str]:
    """Those addresses that can be dialled from elsewhere, as text; a stranger's bytes may be anything."""
    texts: list[str] = []
    for raw in list(addresses)[:MOST_ADDRESSES]:
        with contextlib.suppress(ValueError, LookupError):
            texts.append(str(Multiaddr(raw)))
    return texts
