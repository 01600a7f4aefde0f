"""Statements that a node signs with its identity and that anybody can check later, without asking it."""

from __future__ import annotations

import struct

from noloco_node.identity.keys import MAX_PUBLIC_KEY_BYTES, Identity, peer_id_of, verify
from noloco_node.identity.peer_id import PeerId

_DOMAIN = b"noloco statement 1\0"
_LENGTH = struct.Struct(">H")


def sign_statement(identity: Identity, statement: bytes) -> bytes:
    """A seal over `statement`: the public key and a signature. `signed_by` accepts it for this identity's peer id."""
    signature = identity.sign(_DOMAIN + statement)
    return _LENGTH.pack(len(identity.public_key)) + identity.public_key + signature


def signed_by(peer: PeerId, seal: bytes, statement: bytes) -> bool:
    """Whether the owner of `peer` made this seal over exactly this statement. Never raises."""
    if len(seal) < _LENGTH.size:
        return False
    end = _LENGTH.size + _LENGTH.unpack_from(seal)[0]
    public_key, signature = seal[_LENGTH.size : end], seal[end:]
    if not 0 < len(public_key) <= MAX_PUBLIC_KEY_BYTES or peer_id_of(public_key) != peer:
        return False
    return verify(public_key, signature, _DOMAIN + statement)
