"""One replica's side of an outer step: φ and δ on the host, and the arithmetic of an exchange, chunk by chunk.

The gauge estimates the spread of the weights across replicas from a few coordinates.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from noloco_node.finite import all_finite
from noloco_node.outer.codec import Codec, Coding
from noloco_node.outer.decoupled import add_where_whole_
from noloco_node.outer.learnt import LearntWay
from noloco_node.outer.update import OuterRule, contribution, step_
from noloco_node.outer.workplace import HOST, IN_CACHE, Accelerator, Workplace, on_host
from noloco_node.tallies import RECENT

_LARGEST_SQUARE = 1e60
"""A chunk with a larger sum of squares counts as not finite: decoded, its values might be."""
_DEVICE_BYTES = 30
"""Bytes of a device's memory that the arithmetic takes for each weight of a chunk, at the highest."""
TRAIL_STEPS = RECENT
"""A trail averages over so many outer steps (decision 4)."""


class NotFinite(ValueError):
    """A partner's chunk holds NaN or infinity."""


def device_bytes(chunk: int, size: int) -> int:
    """Bytes of a device that does the arithmetic of `size` weights in chunks of so many."""
    return _DEVICE_BYTES * min(chunk, size)


class OuterReplica:
    """Slow weights φ, momentum δ, and at most one open outer step, all flat vectors of one length on the host. A device
    with room for a chunk does the arithmetic (`Workplace`).

    An open step works on a frozen snapshot θ of the weights. With its own s_i exact and Q the
    codec, the receiver forms mean(s) = s_i + Σ_j (Q(s_j) − Q(s_i))/n. The mean over replicas is therefore kept to
    rounding whatever Q does.

    An open step that is not committed leaves no trace. `commit` changes φ, δ and the snapshot in their own memory, so
    nothing may read them before what it returns is in the fast weights (`StageWorker.commit`).

    Two vectors are as long as the stage: φ and the snapshot. δ is a third where α is not 0. The difference to the
    partners is kept as it came, in their codes, and made a chunk at a time: once to measure it, once to take the step.

    A codec that `trails` tells a replica's motion from its weights by their *trail* τ, a moving average of φ. What φ
    has moved lately is motion too, and crosses with δ and Δ. Where a block crosses whole, the difference moves the
    trail along as it moves s. Partners' trails need not agree for the mean to be kept. But a replica that takes over a
    φ takes its trail too, or what only one of them offers would move the two apart.

    `LearntWay` remembers which way this replica has been learning. No part of it came from partners; they are measured
    by it (`PartnerBound`). It is given to nobody.
    """

    def __init__(
        self,
        rule: OuterRule,
        slow: Tensor,
        *,
        codec: Codec,
        chunk_bytes: int,
        seed: int = 0,
        accelerator: Accelerator | None = None,
    ) -> None:
        """`slow` is taken over. `seed` draws what `LearntWay` looks at in a large stage; partners must not know it."""
        self.rule = rule
        self.slow = slow
        self.momentum = torch.zeros_like(slow) if rule.alpha else None
        """None where nothing of the last step is in the next."""
        self.snapshot = torch.empty_like(slow)
        self.codec = codec
        self.trail = slow.clone() if codec.trails else None
        self._learnt = LearntWay(slow.numel(), slow.dtype, seed)
        self._chunk = codec.values_within(chunk_bytes)
        self._place = Workplace(accelerator if codec.on_a_device else None)
        self._exchange = ""
        self._coding: Coding | None = None
        self._sketch: Tensor | None = None
        self._sent: dict[int, Tensor] = {}
        self._came: dict[int, list[Tensor]] = {}
        """Partners' chunks as they came."""
        self._squares: dict[int, float] = {}
        """The sum of the squares of n times the difference, for each chunk of which all partners' are there."""
        self._tallest = 0.0
        """The largest value of n times the difference."""
        self._most = math.inf
        self._weight = 1.0
        self._members = 1
        self._opened = False

    @property
    def size(self) -> int:
        return self.slow.numel()

    @property
    def chunks(self) -> int:
        return math.ceil(self.size / self._chunk)

    def load(self, slow: Tensor, momentum: Tensor | None = None, trail: Tensor | None = None) -> None:
        """Go on from this φ and δ; without a trail it begins anew, as does the way that was learnt."""
        self._learnt.forget()
        self.slow.copy_(slow)
        if self.momentum is not None:
            self.momentum.zero_() if momentum is None else self.momentum.copy_(momentum)
        if self.trail is not None:
            self.trail.copy_(slow if trail is None else trail)

    def chunk_size(self, index: int) -> int:
        """Weights in chunk `index`; IndexError outside."""
        if not 0 <= index < self.chunks:
            raise IndexError(index)
        return min(self._chunk, self.size - index * self._chunk)

    def open(self, *, members: int, weight: float, exchange: str = "") -> None:
        """Begin an outer step of a group of `members` on the present snapshot.

        `weight` is this replica's n·w; `exchange` is the step's name, the same for all members: dither and sketch come
        from it.
        """
        self._members, self._weight, self._exchange = members, weight, exchange
        self._opened = True
        self._place.begin(device_bytes(self._chunk, self.size))
        self._forget()
        self._learnt.begin()
        self._squares.clear()
        self._tallest, self._most = 0.0, math.inf

    def sketch(self) -> Tensor:
        """What the partners must know of s_i before they encode, fp32; empty where the codec needs none."""
        if not self.codec.modulo:
            return torch.empty(0)
        if self._sketch is None:
            chunks = map(self._slice, range(self.chunks))
            self._sketch = torch.cat([self._place.do(partial(self._sketched, part)) for part in chunks])
        return self._sketch

    def _sketched(self, part: slice, device: torch.device) -> Tensor:
        return self.codec.sketch(self._exchange, self._contribution(part, device)).to(HOST)

    def agree(self, others: Sequence[Tensor]) -> None:
        """Take in the partners' sketches; only then can chunks be made.

        Raises NotFinite, and ValueError for a wrong length.
        """
        sketches = [self.sketch(), *others] if self.codec.modulo else []
        if any(sketch.shape != sketches[0].shape for sketch in sketches):
            raise ValueError(f"sketches of {[len(sketch) for sketch in sketches]} values do not fit together")
        if not all(map(all_finite, sketches)):
            raise NotFinite("a sketch holds NaN or infinity")
        self._coding = self.codec.coding(self._exchange, self.size, sketches)

    def encoded_chunk(self, index: int) -> Tensor:
        """Q(s_i) of a chunk, as it travels. Codes are kept until the step is over, so that what the difference is taken
        from is what was sent."""
        assert self._coding is not None, "a chunk needs an agreed coding"
        if index in self._sent:
            return self._sent[index]
        wire = self._place.do(partial(self._encoded, self._coding, self._slice(index)))
        if self.codec.modulo:  # others take up to four times the memory, and encode in no time
            self._sent[index] = wire
        return wire

    def _encoded(self, coding: Coding, part: slice, device: torch.device) -> Tensor:
        kept_back = self.slow if self.trail is None else self.trail
        pull = self.rule.gamma * kept_back[part].to(device) if self.codec.decoupled else None
        return coding.encode(self._contribution(part, device), part.start, pull).to(HOST)

    def add_chunk(self, index: int, wire: Tensor) -> None:
        """Take in a partner's Q(s_j) of a chunk. It must come once: a second call counts as another partner's.

        Raises NotFinite, and ValueError where length or precision differ from what was agreed.
        """
        own = self.encoded_chunk(index)
        if wire.shape != own.shape or wire.dtype != own.dtype:
            raise ValueError(f"chunk {index} is {wire.dtype} {tuple(wire.shape)}, not {own.dtype} {tuple(own.shape)}")
        came = self._came.get(index, [])
        complete = len(came) == self._members - 2
        counted = [wire, *came] if complete else [wire]
        square, tallest = self._place.do(partial(self._looked_at, self._slice(index), own, counted, complete))
        if not math.isfinite(square):
            raise NotFinite(f"chunk {index} holds NaN or infinity")
        self._came[index] = [*came, wire]
        if complete:
            self._squares[index] = square
            self._tallest = max(self._tallest, tallest)

    def _looked_at(
        self, part: slice, own: Tensor, wires: Sequence[Tensor], complete: bool, device: torch.device
    ) -> tuple[float, float]:
        """What `_measured` says of the sum of these partners' differences in a chunk. `LearntWay` sees it once it is
        `complete`."""
        if complete and len(wires) == 1 and (found := self._sampled(wires[0], own, part, device)) is not None:
            return found
        total = self._total(self._differences(part, own, wires, device))
        square, tallest = _measured(total)
        if complete and math.isfinite(square):
            self._learnt.see(total, part.start)
        return square, tallest

    def _sampled(self, wire: Tensor, own: Tensor, part: slice, device: torch.device) -> tuple[float, float] | None:
        """What `_measured` says of a chunk, where the codes say it and only some blocks are looked at. The largest
        value is not known then."""
        assert self._coding is not None, "what came was coded"
        blocks = self._learnt.blocks(part.start, part.stop)
        if blocks is None:
            return None
        found = self._coding.measured(wire.to(device), own.to(device), part.start, blocks)
        if found is None:
            return None
        square, seen = found
        if not square <= _LARGEST_SQUARE:  # NaN is not
            return math.inf, math.inf
        self._learnt.see_blocks(seen, part.start, part.stop)
        return square, math.inf

    def _differences(self, part: slice, own: Tensor, wires: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """Q(s_j) − Q(s_i) of a chunk for each partner, from what came."""
        assert self._coding is not None, "what came was coded"
        coding, ours = self._coding, own.to(device)
        return [coding.difference(wire.to(device), ours, part.start) for wire in wires]

    def _total(self, differences: Sequence[Tensor]) -> Tensor:
        """Their sum: n times what the partners pull this replica's mean by."""
        first, *others = differences
        if not others:
            return first
        total = first.to(self.slow.dtype, copy=True)
        for each in others:
            total.add_(each)
        return total

    def difference_norm(self) -> float:
        """The norm of Σ_j (Q(s_j) − Q(s_i))/n, as it came: how far the partners pull this replica's mean. Chunks count
        once all partners' are there."""
        return math.sqrt(math.fsum(self._squares.values())) / self._members

    def own_motion(self) -> float:
        """The norm of βΔ: what this replica itself brings to the step.

        The momentum is left out, because earlier partners had a part in it (see `DifferenceBound`).
        """
        squares = (_square(self.snapshot[piece] - self.slow[piece]) for piece in _pieces(slice(0, self.size)))
        return self.rule.beta * math.sqrt(math.fsum(squares))

    def taken_back(self) -> tuple[float, float]:
        """How far the difference leads back along the way of this replica's own learning, and how far along it βΔ has
        come.

        The way is that of the last outer steps; the first figure is negative if the difference leads onwards. Before
        the first outer step the way is that of Δ. Without any, both are 0.
        """
        back, made = self._learnt.taken_back(self.snapshot, self.slow, self._limit)
        return back / self._members, self.rule.beta * made

    def limit_values(self, most: float) -> bool:
        """From now on the difference counts with each of its values within ± `most`. Tells whether any is beyond."""
        self._most = min(self._most, most)
        return self._tallest > self._limit

    @property
    def _limit(self) -> float:
        """No value of n times the difference counts as larger."""
        return min(self._members * self._most, torch.finfo(self.slow.dtype).max)

    def commit(self, scale: float = 1.0) -> Tensor:
        """Take the step, the difference to the partners scaled: φ and δ are replaced.

        Returns φ_new − θ_snapshot, to be added to the fast weights, in the snapshot's place: no chunk can be made any
        more.
        """
        assert self._opened, "a step is opened before it is taken"
        self._opened = False
        for index in range(self.chunks):
            self._step_chunk(index, scale)
        self._forget()
        return self.snapshot

    def _step_chunk(self, index: int, scale: float) -> None:
        part = self._slice(index)
        self._learnt.learn(self.snapshot[part], self.slow[part], part.start)
        wires = self._came.get(index, [])
        own = self.encoded_chunk(index) if wires else None
        self._place.do(partial(self._stepped, part, own, wires, scale))

    def _stepped(
        self, part: slice, own: Tensor | None, wires: Sequence[Tensor], scale: float, device: torch.device
    ) -> None:
        """Piece by piece: what is worked on stays in a processor's cache. On the host it is the vectors' own memory."""
        vectors = [
            None if each is None else each[part] for each in (self.slow, self.snapshot, self.momentum, self.trail)
        ]
        slow, snapshot, momentum, trail = there = [None if each is None else each.to(device) for each in vectors]
        assert slow is not None
        assert snapshot is not None
        total = None if own is None else self._total(self._differences(part, own, wires, device))
        if total is not None:
            if self._tallest > self._limit:
                total.clamp_(-self._limit, self._limit)
            if trail is not None:
                add_where_whole_(self._exchange, trail, total, scale / self._members)
        for piece in _pieces(slice(0, len(slow)), device):
            of_piece = None if momentum is None else momentum[piece]
            mean = self._contribution_of(snapshot[piece], slow[piece], of_piece)
            if total is not None:
                mean.add_(total[piece], alpha=scale / self._members)
            step_(self.rule, mean, slow=slow[piece], momentum=of_piece)
            torch.sub(slow[piece], snapshot[piece], out=snapshot[piece])
            if trail is not None:
                trail[piece].lerp_(slow[piece], 1 / TRAIL_STEPS)
        if not on_host(device):
            for vector, changed in zip(vectors, there, strict=True):
                if vector is not None and changed is not None:
                    vector.copy_(changed)

    def _forget(self) -> None:
        """What was exchanged is of no use any more."""
        self._coding = self._sketch = None
        self._sent.clear()
        self._came.clear()

    def _slice(self, index: int) -> slice:
        start = index * self._chunk
        return slice(start, start + self.chunk_size(index))

    def _contribution(self, part: slice, device: torch.device) -> Tensor:
        """s_i of a chunk, on this device."""
        momentum = None if self.momentum is None else self.momentum[part].to(device)
        return self._contribution_of(self.snapshot[part].to(device), self.slow[part].to(device), momentum)

    def _contribution_of(self, fast: Tensor, slow: Tensor, momentum: Tensor | None) -> Tensor:
        return contribution(self.rule, fast=fast, slow=slow, momentum=momentum, weight=self._weight)


def _pieces(part: slice, device: torch.device = HOST) -> list[slice]:
    """A range in pieces that stay in a processor's cache, or in one piece for another device."""
    size = IN_CACHE if on_host(device) else max(1, part.stop - part.start)
    return [slice(at, min(at + size, part.stop)) for at in range(part.start, part.stop, size)]


def _square(values: Tensor) -> float:
    """The sum of a piece's squares, in fp64: the square of a large finite number would be infinite otherwise. NaN and
    infinity show in it."""
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2  # pyright: ignore


def _measured(values: Tensor) -> tuple[float, float]:
    """The sum of the squares of a chunk, and the largest of its absolute values."""
    pieces = [values[piece] for piece in _pieces(slice(0, len(values)), values.device)]
    ends = [torch.aminmax(piece) for piece in pieces]
    tallest = max(max(-float(end.min), float(end.max)) for end in ends)
    return math.fsum(map(_square, pieces)), tallest


GAUGE_COORDINATES = 1 << 16
"""The weights that are sampled in each exchange for the replica divergence, in a stage that is large enough."""
SHARE_OF_STAGE = 512


def gauge_coordinates(seed: str, size: int) -> Tensor:
    """Coordinates (int64, drawn with replacement) of a vector of `size` weights, the same for all that know `seed`.

    They are at most 1/512 of the weights, so that in fp32 the gauge stays a small part of an exchange, by signs as
    well.
    """
    count = max(1, min(GAUGE_COORDINATES, size // SHARE_OF_STAGE))
    digest = hashlib.blake2b(seed.encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
    return torch.randint(size, (count,), generator=generator)


def spread(own: Tensor, other: Tensor) -> float:
    """mean((θ_i − θ_j)²)/2 over the sampled coordinates: estimates the variance of a weight across replicas."""
    return float((own.double() - other.double()).square().mean() / 2)
