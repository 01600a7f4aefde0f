"""One replica's side of an outer step: φ and δ on the host, and the arithmetic of an exchange, chunk by chunk."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from noloco_node.outer.codec import CodecName, decode, encode
from noloco_node.outer.update import OuterRule, contribution, step_


@dataclass(frozen=True, slots=True)
class CommitResult:
    """What a commit did: norms before clipping, and the scale that was applied to the difference."""

    difference_norm: float
    own_motion: float
    scale: float


class NotFinite(ValueError):
    """A partner's chunk holds NaN or infinity."""


class OuterReplica:
    """Slow weights φ, momentum δ, and at most one open outer step, all flat fp32 vectors of one length on the host.

    An open step works on a frozen snapshot θ of the fast weights. With its own s_i exact and Q the codec, the receiver
    forms mean(s) = s_i + Σ_j (Q(s_j) − Q(s_i))/n, so the mean over replicas is kept to rounding whatever Q does. Only
    `commit` changes φ and δ; `abandon` leaves no trace. Buffers are allocated once.
    """

    def __init__(self, rule: OuterRule, slow: Tensor, *, chunk_elements: int, codec: CodecName) -> None:
        self.rule = rule
        self.slow = slow
        self.momentum = torch.zeros_like(slow)
        self.snapshot = torch.empty_like(slow)
        self._difference = torch.empty_like(slow)
        self._chunk = chunk_elements
        self._codec: CodecName = codec
        self._weight = 1.0
        self._members = 1

    @property
    def size(self) -> int:
        """Number of weights."""
        return self.slow.numel()

    @property
    def chunks(self) -> int:
        """Chunks that an exchange consists of."""
        return math.ceil(self.size / self._chunk)

    def chunk_size(self, index: int) -> int:
        """Weights in chunk `index`; IndexError outside."""
        if not 0 <= index < self.chunks:
            raise IndexError(index)
        return min(self._chunk, self.size - index * self._chunk)

    def open(self, *, members: int, weight: float) -> None:
        """Begin an outer step of a group of `members` on the present snapshot; `weight` is this replica's n·w."""
        self._members, self._weight = members, weight
        self._difference.zero_()

    def encoded_chunk(self, index: int) -> Tensor:
        """Q(s_i) of a chunk, as it travels."""
        return encode(self._contribution(self._slice(index)), self._codec)

    def add_chunk(self, index: int, wire: Tensor) -> None:
        """Take in a partner's Q(s_j) of a chunk.

        Raises NotFinite, and ValueError where length or precision differ from what was agreed.
        """
        part = self._slice(index)
        own = self.encoded_chunk(index)
        if wire.shape != own.shape or wire.dtype != own.dtype:
            raise ValueError(f"chunk {index} is {wire.dtype} {tuple(wire.shape)}, not {own.dtype} {tuple(own.shape)}")
        difference = decode(wire) - decode(own)
        if not bool(torch.isfinite(difference).all()):
            raise NotFinite(f"chunk {index} holds NaN or infinity")
        self._difference[part] += difference / self._members

    def difference_norm(self) -> float:
        """Norm of Σ_j (Q(s_j) − Q(s_i))/n over all chunks: how far the partners pull this replica's mean."""
        total = 0.0
        for index in range(self.chunks):  # in fp64, or the square of a large finite difference would be infinite
            total += float(self._difference[self._slice(index)].double().square().sum())
        return math.sqrt(total)

    def own_motion(self) -> float:
        """Norm of this replica's own part of the step, αδ + βΔ (the scale that a difference is compared with)."""
        total = 0.0
        for index in range(self.chunks):
            part = self._slice(index)
            own = (self.snapshot[part] - self.slow[part]).mul_(self.rule.beta)
            own.add_(self.momentum[part], alpha=self.rule.alpha)
            total += float(own.double().square().sum())
        return math.sqrt(total)

    def commit(self, scale: float = 1.0) -> Tensor:
        """Take the step: φ and δ are replaced. Returns φ_new − θ_snapshot, to be added to the fast weights, in a
        buffer that stays valid until the next `open`."""
        for index in range(self.chunks):
            part = self._slice(index)
            mean = self._contribution(part).add_(self._difference[part], alpha=scale)
            step_(self.rule, mean, slow=self.slow[part], momentum=self.momentum[part])
            torch.sub(self.slow[part], self.snapshot[part], out=self._difference[part])
        return self._difference

    def _slice(self, index: int) -> slice:
        start = index * self._chunk
        return slice(start, start + self.chunk_size(index))

    def _contribution(self, part: slice) -> Tensor:
        return contribution(
            self.rule,
            fast=self.snapshot[part],
            slow=self.slow[part],
            momentum=self.momentum[part],
            weight=self._weight,
        )
