"""One replica's side of an outer step: φ and δ on the host, and the arithmetic of an exchange, chunk by chunk."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from noloco_node.finite import all_finite
from noloco_node.outer.codec import BLOCK, Codec, Coding
from noloco_node.outer.decoupled import crosses_whole
from noloco_node.outer.update import OuterRule, contribution, step_

_IN_CACHE = 1 << 16
"""So many values are worked on together, so that they stay in a processor's cache."""
TRAIL_STEPS = 16
"""A trail averages over so many outer steps (decision 4)."""
LEARNT_STEPS = 16
"""What a replica itself has learnt is averaged over so many outer steps. Over fewer, honest partners seem to take back
what it learnt in the last steps, for these are all that they lack."""


@dataclass(frozen=True, slots=True)
class Part:
    """A range [start, end) of a stage's weights: one fragment, or the whole."""

    start: int
    end: int

    @property
    def slice(self) -> slice:
        """The range as an index."""
        return slice(self.start, self.end)

    @property
    def size(self) -> int:
        """Weights in it."""
        return self.end - self.start


class NotFinite(ValueError):
    """A partner's chunk holds NaN or infinity."""


def fragments_of(size: int, count: int) -> tuple[Part, ...]:
    """`size` weights cut into `count` fragments of nearly equal numbers of blocks.

    Raises ValueError where there are fewer blocks of 1024 weights than fragments.
    """
    blocks = math.ceil(size / BLOCK)
    if not 1 <= count <= blocks:
        raise ValueError(f"{size} weights are {blocks} blocks of {BLOCK}: they cannot be cut into {count} fragments")
    ends = [min(size, blocks * (index + 1) // count * BLOCK) for index in range(count)]
    return tuple(Part(start, end) for start, end in zip([0, *ends], ends, strict=False))


class OuterReplica:
    """Slow weights φ, momentum δ, and at most one open outer step, all flat vectors of one length on the host.

    An open step covers one part of the weights and works on a frozen snapshot θ of it. With its own s_i exact and Q the
    codec, the receiver forms mean(s) = s_i + Σ_j (Q(s_j) − Q(s_i))/n. The mean over replicas is therefore kept to
    rounding whatever Q does.

    A step is committed in three parts, so that a change of θ need not wait for the arithmetic. `prepare` works out the
    whole step in the open step's own buffers, `adopt` says that it counts, `settle` carries it into φ and δ. An open
    step that is never adopted leaves no trace. Buffers are allocated once.

    A codec that `trails` tells a replica's motion from its weights by their *trail* τ, a moving average of φ. What φ
    has moved lately is motion too, and crosses with δ and Δ. Where a block crosses whole, the difference moves the
    trail along as it moves s. Partners' trails need not agree for the mean to be kept. But a replica that takes over a
    φ takes its trail too, or what only one of them offers would move the two apart.

    A moving average of this replica's own Δ says which way it has been learning. No part of it came from partners; they
    are measured by it (`PartnerBound`). It is given to nobody.
    """

    def __init__(self, rule: OuterRule, slow: Tensor, *, codec: Codec, chunk_bytes: int, fragments: int = 1) -> None:
        self.rule = rule
        self.slow = slow
        self.momentum = torch.zeros_like(slow)
        self.snapshot = torch.empty_like(slow)
        self.codec = codec
        self.whole = Part(0, slow.numel())
        self.fragments = fragments_of(slow.numel(), fragments)
        self.trail = slow.clone() if codec.trails else None
        self._led: list[tuple[slice, Tensor, Tensor]] = []
        self._learnt = torch.zeros_like(slow)
        self._difference = torch.empty_like(slow)
        self._chunk = codec.values_within(chunk_bytes)
        self._part = self.whole
        self._exchange = ""
        self._coding: Coding | None = None
        self._sketch: Tensor | None = None
        self._sent: dict[int, Tensor] = {}
        self._weight = 1.0
        self._members = 1
        self._opened = False
        self._adopted = False
        self._settling = threading.Lock()

    @property
    def size(self) -> int:
        """Number of weights."""
        return self.slow.numel()

    @property
    def part(self) -> Part:
        """What the open step covers."""
        return self._part

    @property
    def chunks(self) -> int:
        """Chunks that the exchange of the open part consists of."""
        return math.ceil(self._part.size / self._chunk)

    def load(self, slow: Tensor, momentum: Tensor, trail: Tensor | None = None) -> None:
        """Go on from this φ and δ; without a trail it begins anew, as does the way that was learnt."""
        self.settle()
        self._learnt.zero_()
        self.slow.copy_(slow)
        self.momentum.copy_(momentum)
        if self.trail is not None:
            self.trail.copy_(slow if trail is None else trail)

    def chunk_size(self, index: int) -> int:
        """Weights in chunk `index` of the open part; IndexError outside."""
        if not 0 <= index < self.chunks:
            raise IndexError(index)
        return min(self._chunk, self._part.size - index * self._chunk)

    def open(self, part: Part, *, members: int, weight: float, exchange: str = "") -> None:
        """Begin an outer step of a group of `members` on the present snapshot of `part`.

        `weight` is this replica's n·w; `exchange` is the step's name, the same for all members: dither and sketch come
        from it.
        """
        self.settle()
        self._part, self._members, self._weight, self._exchange = part, members, weight, exchange
        self._opened = True
        self._coding = self._sketch = None
        self._sent.clear()
        self._led.clear()
        self._difference[part.slice].zero_()

    def sketch(self) -> Tensor:
        """What the partners must know of s_i before they encode, fp32; empty where the codec needs none."""
        if not self.codec.modulo:
            return torch.empty(0)
        if self._sketch is None:
            parts = [self.codec.sketch(self._exchange, self._contribution(self._slice(i))) for i in range(self.chunks)]
            self._sketch = torch.cat(parts)
        return self._sketch

    def agree(self, others: Sequence[Tensor]) -> None:
        """Take in the partners' sketches; only then can chunks be made.

        Raises NotFinite, and ValueError for a wrong length.
        """
        sketches = [self.sketch(), *others] if self.codec.modulo else []
        if any(sketch.shape != sketches[0].shape for sketch in sketches):
            raise ValueError(f"sketches of {[len(sketch) for sketch in sketches]} values do not fit together")
        if not all(map(all_finite, sketches)):
            raise NotFinite("a sketch holds NaN or infinity")
        self._coding = self.codec.coding(self._exchange, self._part.start, self._part.end, sketches)

    def encoded_chunk(self, index: int) -> Tensor:
        """Q(s_i) of a chunk, as it travels. Codes are kept until the step is over, so that what the difference is taken
        from is what was sent."""
        assert self._coding is not None, "a chunk needs an agreed coding"
        if index in self._sent:
            return self._sent[index]
        part = self._slice(index)
        kept_back = self.slow if self.trail is None else self.trail
        pull = self.rule.gamma * kept_back[part] if self.codec.decoupled else None
        wire = self._coding.encode(self._contribution(part), part.start, pull)
        if self.codec.modulo:  # others take up to four times the memory, and encode in no time
            self._sent[index] = wire
        return wire

    def add_chunk(self, index: int, wire: Tensor) -> None:
        """Take in a partner's Q(s_j) of a chunk.

        Raises NotFinite, and ValueError where length or precision differ from what was agreed.
        """
        assert self._coding is not None, "a chunk needs an agreed coding"
        part = self._slice(index)
        own = self.encoded_chunk(index)
        if wire.shape != own.shape or wire.dtype != own.dtype:
            raise ValueError(f"chunk {index} is {wire.dtype} {tuple(wire.shape)}, not {own.dtype} {tuple(own.shape)}")
        difference = self._coding.difference(wire, own, part.start)
        if not all_finite(difference):
            raise NotFinite(f"chunk {index} holds NaN or infinity")
        self._difference[part].add_(difference, alpha=1 / self._members)

    def difference_norm(self) -> float:
        """The norm of Σ_j (Q(s_j) − Q(s_i))/n over the open part: how far the partners pull this replica's mean."""
        return math.sqrt(_squares(self._difference[self._part.slice]))

    def own_motion(self) -> float:
        """The norm of βΔ over the open part: what this replica itself brings to the step.

        The momentum is left out, because earlier partners had a part in it (see `DifferenceBound`).
        """
        total = 0.0
        for index in range(self.chunks):
            part = self._slice(index)
            total += _squares(self.snapshot[part] - self.slow[part])
        return self.rule.beta * math.sqrt(total)

    def taken_back(self) -> tuple[float, float]:
        """How far the difference leads back along the way of this replica's own learning, and how far along it βΔ has
        come.

        The way is that of the last outer steps, over the open part; the first figure is negative if the difference
        leads onwards. Before the first outer step the way is that of Δ. Without any, both are 0.
        """
        back, made, length = self._along(self._learnt)
        if length == 0.0:
            back, made, length = self._along(None)
        return (back / math.sqrt(length), self.rule.beta * made / math.sqrt(length)) if length > 0.0 else (0.0, 0.0)

    def _along(self, way: Tensor | None) -> tuple[float, float, float]:
        """Products over the open part of `way` (None: Δ) with minus the difference, with Δ and with itself."""
        back, made, length = 0.0, 0.0, 0.0
        for start in range(self._part.start, self._part.end, _IN_CACHE):
            part = slice(start, min(start + _IN_CACHE, self._part.end))
            delta = (self.snapshot[part] - self.slow[part]).double()
            piece = delta if way is None else way[part].double()
            back -= float(self._difference[part].double().dot(piece))
            made += float(delta.dot(piece))
            length += float(piece.dot(piece))
        return back, made, length

    def limit_values(self, most: float) -> None:
        """Bring each value of the difference over the open part to within ± `most`."""
        most = min(most, torch.finfo(self._difference.dtype).max)
        self._difference[self._part.slice].clamp_(-most, most)

    def commit(self, scale: float = 1.0) -> Tensor:
        """Take the step: φ and δ of the open part are replaced. Returns what `prepare` does."""
        correction = self.prepare(scale)
        self.adopt()
        self.settle()
        return correction

    def prepare(self, scale: float = 1.0) -> Tensor:
        """Work the step out, the difference to the partners scaled; φ and δ stay as they are.

        Returns φ_new − θ_snapshot of the open part, to be added to its fast weights, in the snapshot's place: no chunk
        can be made any more.
        """
        assert self._opened, (
            "a step is opened before it is worked out: until then the difference is whatever memory held"
        )
        self._opened = False
        for index in range(self.chunks):
            part = self._slice(index)
            mean = self._contribution(part).add_(self._difference[part], alpha=scale)
            if self.trail is not None and self._members > 1:
                whole = crosses_whole(self._exchange, self.chunk_size(index))
                self._led.append((part, whole, scale * self._difference[part][whole]))
            slow, momentum = self.slow[part].clone(), self._difference[part].copy_(self.momentum[part])
            step_(self.rule, mean, slow=slow, momentum=momentum)
            torch.sub(slow, self.snapshot[part], out=self.snapshot[part])
        self._coding = None
        self._sent.clear()
        return self.snapshot[self._part.slice]

    def adopt(self) -> None:
        """The prepared step counts from now on; takes no time."""
        self._adopted = True

    def settle(self) -> None:
        """Carry an adopted step into φ and δ; it does nothing if none waits.

        Any thread may call it. A reader that needs θ, φ and δ of one state calls it first.
        """
        with self._settling:
            if self._adopted:
                part = self._part.slice
                # φ_new − φ is in the difference's place, φ_new − θ in the snapshot's: Δ is what they differ by.
                learnt = self._learnt[part].mul_(1 - 1 / LEARNT_STEPS)
                learnt.add_(self._difference[part], alpha=1 / LEARNT_STEPS)
                learnt.sub_(self.snapshot[part], alpha=1 / LEARNT_STEPS)
                self.slow[part].add_(self._difference[part])
                self.momentum[part].copy_(self._difference[part])
                if self.trail is not None:
                    for chunk, whole, moved in self._led:
                        self.trail[chunk][whole] += moved
                    self._led.clear()
                    self.trail[part].lerp_(self.slow[part], 1 / TRAIL_STEPS)
                self._adopted = False

    def _slice(self, index: int) -> slice:
        start = self._part.start + index * self._chunk
        return slice(start, start + self.chunk_size(index))

    def _contribution(self, part: slice) -> Tensor:
        return contribution(
            self.rule,
            fast=self.snapshot[part],
            slow=self.slow[part],
            momentum=self.momentum[part],
            weight=self._weight,
        )


def _squares(values: Tensor) -> float:
    """The sum of their squares, in fp64: the square of a large finite difference would be infinite otherwise."""
    starts = range(0, values.numel(), _IN_CACHE)
    return math.fsum(float(values[start : start + _IN_CACHE].double().square().sum()) for start in starts)
