"""The name of a peer. It is apart from `transport` for modules that need neither torch nor the network."""

from __future__ import annotations

from typing import NewType

PeerId = NewType("PeerId", str)
"""A peer's name: base58 of the multihash of its public key, authenticated by the transport."""
