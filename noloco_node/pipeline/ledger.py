"""The microbatches that this replica has trained, so that none is trained twice, and the answers to the last of them.

An id is only the sender's word. A repeat is therefore known by its sender, which the link authenticates, by its id, and
by its content. If another sender uses the same id, or the same sender has other weights, it is another microbatch.
"""

from __future__ import annotations

import zlib
from collections import Counter, OrderedDict
from typing import NamedTuple

from torch import Tensor

from noloco_node import ambient
from noloco_node.identity.peer_id import PeerId
from noloco_node.peer_table import PeerTable
from noloco_node.pipeline.messages import MicrobatchAnswer, Mode
from noloco_node.transport.calls import Reply
from noloco_node.transport.errors import Refusal, Refused
from noloco_node.transport.frames import tensor_bytes

ANSWERS_KEPT = 32
KEPT_ANSWER_BYTES = 64 << 20
INLINE_BYTES = 1 << 20
"""Checksums of up to so many bytes are taken on the event loop (0.15 ms)."""


class MicrobatchName(NamedTuple):
    """What one microbatch is known by here."""

    sender: PeerId
    mode: Mode
    id: str
    content: tuple[int, ...]
    """CRC-32 of each tensor. No stronger hash is needed.

    A sender that makes two of its own contents agree gets its own former answer, and no other sender can use its names.
    """


async def content_of(tensors: tuple[Tensor, ...]) -> tuple[int, ...]:
    """The checksums of a microbatch's tensors; large ones are read off the event loop."""
    if sum(tensor.nbytes for tensor in tensors) <= INLINE_BYTES:
        return _checksums(tensors)
    return await ambient.elsewhere(_checksums, tensors)


class Repeats:
    """The books of one replica. Bounded in microbatches, answers and their bytes."""

    def __init__(self) -> None:
        self._trained = PeerTable[MicrobatchName, None](forgotten=self._uncount)
        self._ids: Counter[str] = Counter()
        self._answers: OrderedDict[MicrobatchName, Reply[MicrobatchAnswer]] = OrderedDict()
        self._kept_bytes = 0

    def answer_to(self, name: MicrobatchName) -> Reply[MicrobatchAnswer] | None:
        """The answer to a repeat, None where it is none. Refused (`already_trained`) where the answer is gone: it must
        not be trained again."""
        if name in self._answers:
            return self._answers[name]
        if name in self._trained:
            raise Refused(Refusal.ALREADY_TRAINED)
        return None

    def mark_trained(self, name: MicrobatchName) -> bool:
        """From here on it changes this replica: a repeat is turned away even if this attempt is cancelled. True where
        a microbatch of the same id was trained here before, in another's name or from other weights."""
        again = self._ids[name.id] > 0
        self._trained[name] = None
        self._ids[name.id] += 1
        return again

    def was_trained(self, name: MicrobatchName) -> bool:
        """Whether it has changed this replica, or is about to."""
        return name in self._trained

    def unmark(self, name: MicrobatchName) -> None:
        """It came to nothing after all."""
        if name in self._trained:
            del self._trained[name]
            self._uncount(name)

    def keep(self, name: MicrobatchName, answer: Reply[MicrobatchAnswer]) -> None:
        """Remember the answer, for a repeat."""
        self._answers[name] = answer
        self._kept_bytes += _size(answer)
        while self._answers and (len(self._answers) > ANSWERS_KEPT or self._kept_bytes > KEPT_ANSWER_BYTES):
            _, dropped = self._answers.popitem(last=False)
            self._kept_bytes -= _size(dropped)

    def _uncount(self, name: MicrobatchName, _: None = None) -> None:
        self._ids[name.id] -= 1
        if not self._ids[name.id]:
            del self._ids[name.id]


def _checksums(tensors: tuple[Tensor, ...]) -> tuple[int, ...]:
    return tuple(zlib.crc32(tensor_bytes(tensor)) for tensor in tensors)


def _size(message: Reply[MicrobatchAnswer]) -> int:
    return sum(tensor.nbytes for tensor in message.tensors)
