"""The order in which a replica sees its windows: random access to a permutation, in constant memory."""

from __future__ import annotations

import hashlib
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Permutation:
    """A random-looking bijection of range(count), the same for the same key on every machine and library version.

    It is a balanced Feistel network with a keyed BLAKE2b as round function over the next power of 4. It is walked along
    its cycles until it lands inside (at most 4 steps on average).
    """

    def __init__(self, count: int, key: str) -> None:
        assert count > 0
        self._count = count
        self._half_bits = max(1, ((count - 1).bit_length() + 1) // 2)
        self._mask = (1 << self._half_bits) - 1
        self._key = hashlib.blake2b(key.encode(), digest_size=32).digest()

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, position: int) -> int:
        """The element at `position`, 0 <= position < count."""
        assert 0 <= position < self._count
        value = self._step(position)
        while value >= self._count:
            value = self._step(value)
        return value

    def _step(self, value: int) -> int:
        left, right = value >> self._half_bits, value & self._mask
        for number in range(6):
            left, right = right, left ^ self._round(number, right)
        return left << self._half_bits | right

    def _round(self, number: int, half: int) -> int:
        data = number.to_bytes(1, "little") + half.to_bytes(8, "little")
        digest = hashlib.blake2b(data, digest_size=8, key=self._key).digest()
        return int.from_bytes(digest, "little") & self._mask


class SamplerPosition(BaseModel):
    """How far a walk has come: passes over all windows completed, and windows taken in the present one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    epoch: Annotated[int, Field(ge=0)] = 0
    offset: Annotated[int, Field(ge=0)] = 0


BEGINNING = SamplerPosition()
"""The position before the first window."""


class WindowSampler:
    """An endless walk over `count` windows: each pass visits each once, in an order of its own.

    The order of a pass depends on (seed, peer id, epoch): replicas need not agree on anything to walk differently.
    """

    def __init__(self, count: int, seed: int, peer_id: str, position: SamplerPosition = BEGINNING) -> None:
        """ValueError where the position lies outside a pass over `count` windows."""
        if position.offset >= count:
            raise ValueError(f"offset {position.offset} in a pass over {count} windows")
        self._count, self._seed, self._peer_id = count, seed, peer_id
        self._go_to(position)

    @property
    def position(self) -> SamplerPosition:
        """Where the next window comes from."""
        return SamplerPosition(epoch=self._epoch, offset=self._offset)

    def take(self, count: int) -> list[int]:
        """The next `count` window indices."""
        return [self._next() for _ in range(count)]

    def _next(self) -> int:
        window = self._order[self._offset]
        following = self._offset + 1
        if following == self._count:
            self._go_to(SamplerPosition(epoch=self._epoch + 1))
        else:
            self._offset = following
        return window

    def _go_to(self, position: SamplerPosition) -> None:
        self._epoch, self._offset = position.epoch, position.offset
        self._order = Permutation(self._count, f"walk/{self._seed}/{self._peer_id}/{position.epoch}")
