"""The optimizer of inner steps on a stage's flat vector: AdamW, or Muon for the matrices of layers beside it.

Muon takes steps of orthogonalised momentum (Jordan et al., 2024). The momentum of a matrix is replaced by a matrix with
the same singular vectors and singular values near 1, by a Newton-Schulz iteration. The scale 0.2·√max(m, n) gives a
step the root mean square of AdamW's steps, so that one learning rate serves both (arXiv 2502.16982).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, cast

import torch
from torch import Tensor

from noloco_node.config.run_spec import InnerSpec
from noloco_node.training.frozen_state import Vectors
from noloco_node.training.layout import FlatLayout, Kind, LayoutEntry

MUON_MOMENTUM = 0.9
"""The share of its momentum that a step of Muon keeps."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of the optimizer's vectors: momenta of all weights, and mean squares of those that AdamW changes."""


def rate_of(kind: Kind, inner: InnerSpec) -> float:
    """By what the learning rate is multiplied for weights of that kind."""
    rates = {"embedding": inner.embedding_rate, "head": inner.head_rate, "vector": inner.norm_rate, "matrix": 1.0}
    return rates[kind]


def is_for_muon(kind: Kind, inner: InnerSpec) -> bool:
    return inner.optimizer == "muon" and kind == "matrix"


def moment_sizes(layout: FlatLayout, inner: InnerSpec) -> dict[str, int]:
    """Numbers in each of the optimizer's vectors."""
    squares = sum(entry.shape.numel() for entry in layout.entries if not is_for_muon(entry.kind, inner))
    return {"exp_avg": layout.size, "exp_avg_sq": squares}


class InnerOptimizer:
    """Changes `master` in place by `gradient`, both flat and on one device; a step uses the gradient up.

    Matrices are decayed, vectors are not. A multiplier of the rate (`rate_of`) does not change the decay.
    """

    def __init__(self, layout: FlatLayout, master: Tensor, gradient: Tensor, inner: InnerSpec) -> None:
        self._sizes = moment_sizes(layout, inner)
        self._decay = inner.weight_decay
        muon: list[LayoutEntry] = []
        self._parts: list[tuple[slice, slice]] = []
        """Where each of AdamW's tensors lies in the flat vector, and where in the mean squares."""
        groups: list[dict[str, Any]] = []
        squares = 0
        for (by_muon, rate, decayed), run in groupby(layout.entries, lambda entry: _treatment(entry, inner)):
            entries = list(run)
            if by_muon:
                muon += entries
                continue
            part = slice(entries[0].offset, entries[-1].end)
            size = part.stop - part.start
            self._parts.append((part, slice(squares, squares + size)))
            squares += size
            parameter = master[part]
            parameter.grad = gradient[part]
            decay = inner.weight_decay / rate if decayed else 0.0
            groups.append({"params": [parameter], "weight_decay": decay, "rate": rate})
        betas = (inner.beta1, inner.beta2)
        self.torch = torch.optim.AdamW(groups, lr=1.0, betas=betas, eps=inner.eps, fused=True) if groups else None
        self._steps = torch.zeros((), dtype=torch.int64)
        """Inner steps so far."""
        for parameter in self._adamw_parameters():
            state = self._state_of(parameter)  # from the start on, so that no step ever asks a device for memory
            state["step"] = torch.zeros((), device=master.device)
            state.update({name: torch.zeros_like(parameter) for name in MOMENTS})
        self.muon = Muon(muon, master, gradient, MUON_MOMENTUM) if muon else None

    def step(self, learning_rate: float) -> None:
        self._steps += 1
        if self.torch is not None:
            for group in self.torch.param_groups:
                group["lr"] = learning_rate * group["rate"]
            self.torch.step()  # pyright: ignore[reportUnknownMemberType]
        if self.muon is not None:
            self.muon.step(learning_rate, self._decay)

    def state(self) -> dict[str, Tensor]:
        """Copies (host) of the moments as flat vectors and of the step count as an int64 scalar."""
        room = {name: torch.zeros(size) for name, size in self._sizes.items()}
        for whole, own in self._moments(room):
            whole.copy_(own)
        return {**room, "optimizer_steps": self._steps.clone()}

    def vectors(self) -> Vectors:
        """The live memory of what `state()` copies."""
        first: list[tuple[int, Tensor]] = []
        squares: list[tuple[int, Tensor]] = []
        for (part, where), parameter in zip(self._parts, self._adamw_parameters(), strict=True):
            own = self._state_of(parameter)
            first.append((part.start, own["exp_avg"]))
            squares.append((where.start, own["exp_avg_sq"]))
        if self.muon is not None:
            first += [(part.start, own) for part, own in zip(self.muon.parts, self.muon.buffers, strict=True)]
        return {"exp_avg": first, "exp_avg_sq": squares, "optimizer_steps": [(0, self._steps)]}

    def load(self, state: Mapping[str, Tensor], fill: Callable[[Tensor, Tensor], object] = Tensor.copy_) -> None:
        """Replace moments and step count, as `state()` gives them. Those that are there are written over by `fill`:
        beside them a device may have no memory for others."""
        self._steps.copy_(state["optimizer_steps"])
        for parameter in self._adamw_parameters():
            self._state_of(parameter)["step"].copy_(state["optimizer_steps"])
        for whole, own in self._moments(state):
            fill(own, whole)

    def _moments(self, state: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Pairs of a part of `state` and the optimizer's own vector."""
        own = self.vectors()
        return [(state[name][at : at + len(part)], part) for name in MOMENTS for at, part in own[name]]

    def _adamw_parameters(self) -> Sequence[Tensor]:
        return [] if self.torch is None else [group["params"][0] for group in self.torch.param_groups]

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        assert self.torch is not None, "only AdamW's parameters have one"
        return self.torch.state[parameter]


def _treatment(entry: LayoutEntry, inner: InnerSpec) -> tuple[bool, float, bool]:
    """Whether Muon changes it, the multiplier of its rate, and whether it is decayed."""
    return is_for_muon(entry.kind, inner), rate_of(entry.kind, inner), entry.decayed


ITERATIONS = 3
"""Iterations of Newton-Schulz. Five end at the same loss here and cost 1.7 times as much."""
COEFFICIENTS = (3.4445, -4.775, 2.0315)
"""Coefficients of the quintic polynomial: the steepest at zero whose values stay near 1."""
SCALE = 0.2
"""Root mean square of an AdamW step, in learning rates."""
WIDE = 2
"""Matrices so many times as long as short are orthogonalised by their products with themselves, where numbers have 32
bits. That takes two products of the matrices themselves in place of nine; bf16 does not bear it."""
AT_ONCE = 1 << 22
"""Numbers that one batch of matrices of equal shape may hold, unless a single matrix is larger."""


@dataclass(frozen=True, slots=True)
class Matrices:
    """One parameter's matrices: a layer's weight is one, the weights of its experts are several."""

    offset: int
    """Index of the first number in the flat vector."""
    count: int
    rows: int
    columns: int

    @classmethod
    def of(cls, entry: LayoutEntry) -> Matrices:
        """The last two dimensions are a matrix's."""
        *stacked, rows, columns = entry.shape
        return cls(entry.offset, math.prod(stacked), rows, columns)

    @property
    def short(self) -> int:
        return min(self.rows, self.columns)

    @property
    def long(self) -> int:
        return max(self.rows, self.columns)

    @property
    def flop(self) -> float:
        """Floating-point operations of one step, at most: see `WIDE`."""
        return ITERATIONS * self.count * (4.0 * self.short**2 * self.long + 2.0 * self.short**3)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Each matrix [rows, columns] as a view into the flat vector."""
        size = self.rows * self.columns
        return list(flat[self.offset : self.offset + self.count * size].view(self.count, self.rows, self.columns))


class Workspace:
    """Memory for the largest batch of matrices, held from the start on: a step never asks a device for more."""

    def __init__(self, numbers: int, gram: int, device: torch.device) -> None:
        """`numbers`: of a batch of matrices; `gram`: of their products with themselves."""
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        self._matrices = [torch.empty(numbers, dtype=dtype, device=device) for _ in range(2)]
        self._grams = [torch.empty(gram, dtype=dtype, device=device) for _ in range(2)]

    @property
    def nbytes(self) -> int:
        return sum(room.nbytes for room in (*self._matrices, *self._grams))

    def orthogonal(self, matrices: Sequence[Tensor]) -> Tensor:
        """The orthogonalised matrices [count, rows, columns], in this workspace until the next call. All have one
        shape, [rows, columns]. Zeros stay zeros."""
        count, shape = len(matrices), matrices[0].shape
        short, long = sorted(shape)
        current, spare = (room[: count * short * long].view(count, *shape) for room in self._matrices)
        gram, polynomial = (room[: count * short * short].view(count, short, short) for room in self._grams)
        for row, matrix in zip(current, matrices, strict=True):
            row.copy_(matrix)
        norms = cast(Tensor, torch.linalg.vector_norm(current, dim=(1, 2), keepdim=True))  # pyright: ignore
        current.div_(norms.clamp_(min=torch.finfo(torch.float32).eps))
        if tall := shape[0] > shape[1]:  # a product takes a matrix either way, and a copy of one takes long
            current, spare = current.mT, spare.mT
        if current.dtype is torch.float32 and long >= WIDE * short:
            current = _by_products(current, spare, gram, polynomial)
        else:
            current = _by_themselves(current, spare, gram, polynomial)
        return current.mT if tall else current


def _by_themselves(current: Tensor, spare: Tensor, gram: Tensor, polynomial: Tensor) -> Tensor:
    """Matrices [count, short, long], orthogonalised in one of the first two rooms."""
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        torch.bmm(current, current.mT, out=gram)
        torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=polynomial)
        torch.baddbmm(current, polynomial, current, beta=a, out=spare)
        current, spare = spare, current
    return current


def _by_products(matrices: Tensor, spare: Tensor, gram: Tensor, factor: Tensor) -> Tensor:
    """The same in `spare`, for wide matrices: their products with themselves are iterated, and so is the product of all
    factors. Each iteration multiplies the matrices by its factor; all factors and products commute."""
    count, short, _ = gram.shape
    inner = spare if spare.is_contiguous() else spare.mT
    rooms = inner.view(-1)[: WIDE * count * short * short].view(WIDE, count, short, short)
    product, room = rooms[0], rooms[1]
    a, b, c = COEFFICIENTS
    torch.bmm(matrices, matrices.mT, out=gram)
    for iteration in range(ITERATIONS):
        torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=factor)
        factor.diagonal(dim1=1, dim2=2).add_(a)
        if iteration == ITERATIONS - 1:
            break
        if iteration == 0:
            product.copy_(factor)
        else:
            torch.bmm(factor, product, out=room)
            product, room = room, product
        torch.bmm(factor, gram, out=room)
        torch.bmm(factor, room, out=gram)
    torch.bmm(factor, product, out=gram)
    return torch.bmm(gram, matrices, out=spare)


class Muon:
    """Changes matrices in a flat vector `master` in place by those of `gradient`, which it uses up."""

    def __init__(self, entries: Sequence[LayoutEntry], master: Tensor, gradient: Tensor, momentum: float) -> None:
        """`entries`: parameters of two dimensions or more, in the order of the vector."""
        self.parts = _joined(entries)
        """Where in the vector they lie."""
        self.buffers = [torch.zeros_like(master[part]) for part in self.parts]
        """Their momentum, part by part."""
        self._master, self._gradient, self._momentum = master, gradient, momentum
        kinds: defaultdict[tuple[int, int], list[Matrices]] = defaultdict(list)
        for matrices in map(Matrices.of, entries):
            kinds[matrices.rows, matrices.columns].append(matrices)
        self._batches = [batch for alike in kinds.values() for batch in _batches(alike, master, gradient)]
        self.workspace = Workspace(*workspace_numbers([*map(Matrices.of, entries)]), master.device)

    def step(self, learning_rate: float, weight_decay: float) -> None:
        """One step on the gradient as it is: Nesterov's momentum, orthogonalised, and decoupled weight decay."""
        with torch.no_grad():
            for part, buffer in zip(self.parts, self.buffers, strict=True):
                gradient = self._gradient[part]
                buffer.lerp_(gradient, 1.0 - self._momentum)
                gradient.lerp_(buffer, self._momentum)
                self._master[part].mul_(1.0 - learning_rate * weight_decay)
            for weights, gradients in self._batches:
                length = learning_rate * SCALE * math.sqrt(max(weights[0].shape))
                for weight, step in zip(weights, self.workspace.orthogonal(gradients), strict=True):
                    weight.add_(step, alpha=-length)


def workspace_numbers(matrices: Sequence[Matrices]) -> tuple[int, int]:
    """Numbers of the largest batch of matrices, and of its products with itself. Zeros without any matrix."""
    shapes: defaultdict[tuple[int, int], int] = defaultdict(int)
    for each in matrices:
        shapes[each.rows, each.columns] += each.count
    counts = {shape: min(count, _at_once(*shape)) for shape, count in shapes.items()}
    numbers = [count * math.prod(shape) for shape, count in counts.items()]
    grams = [count * min(shape) ** 2 for shape, count in counts.items()]
    return max(numbers, default=0), max(grams, default=0)


def _at_once(rows: int, columns: int) -> int:
    return max(1, AT_ONCE // (rows * columns))


def _batches(
    alike: Sequence[Matrices], master: Tensor, gradient: Tensor
) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Weights and gradients of matrices of one shape, [rows, columns] each."""
    weights = [view for matrices in alike for view in matrices.views(master)]
    gradients = [view for matrices in alike for view in matrices.views(gradient)]
    most = _at_once(alike[0].rows, alike[0].columns)
    for begin in range(0, len(weights), most):
        yield weights[begin : begin + most], gradients[begin : begin + most]


def _joined(entries: Sequence[LayoutEntry]) -> list[slice]:
    """The entries' places, those beside each other as one."""
    found: list[slice] = []
    for entry in entries:
        if found and found[-1].stop == entry.offset:
            found[-1] = slice(found[-1].start, entry.end)
        else:
            found.append(slice(entry.offset, entry.end))
    return found
