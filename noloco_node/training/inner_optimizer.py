"""The optimizer of inner steps on a stage's flat vector: AdamW, or Muon for the matrices of layers beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from noloco_node.config.run_spec import InnerSpec
from noloco_node.training.frozen_state import Vectors
from noloco_node.training.layout import FlatLayout, Kind, LayoutEntry
from noloco_node.training.muon import Muon

MUON_MOMENTUM = 0.9
"""The share of its momentum that a step of Muon keeps."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of the optimizer's vectors: momenta of all weights, and mean squares of those that AdamW changes."""


def rate_of(kind: Kind, inner: InnerSpec) -> float:
    """By what the learning rate is multiplied for weights of that kind."""
    rates = {"embedding": inner.embedding_rate, "head": inner.head_rate, "vector": inner.norm_rate, "matrix": 1.0}
    return rates[kind]


def is_for_muon(kind: Kind, inner: InnerSpec) -> bool:
    """Whether weights of that kind take Muon's steps."""
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
        """One step on the gradient as it is."""
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
        for there, own in self._vectors(room):
            there.copy_(own)
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

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Replace moments and step count, as `state()` gives them. Those that are there are written over: beside them a
        device may have no memory for others."""
        self._steps.copy_(state["optimizer_steps"])
        for parameter in self._adamw_parameters():
            self._state_of(parameter)["step"].copy_(state["optimizer_steps"])
        for there, own in self._vectors(state):
            own.copy_(there)

    def _vectors(self, state: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Pairs of a part of `state` and the optimizer's own vector."""
        first, squares = (state[name] for name in MOMENTS)
        pairs: list[tuple[Tensor, Tensor]] = []
        for (part, where), parameter in zip(self._parts, self._adamw_parameters(), strict=True):
            own = self._state_of(parameter)
            pairs += [(first[part], own["exp_avg"]), (squares[where], own["exp_avg_sq"])]
        if self.muon is not None:
            parts = zip(self.muon.parts, self.muon.buffers, strict=True)
            pairs += [(first[part], buffer) for part, buffer in parts]
        return pairs

    def _adamw_parameters(self) -> Sequence[Tensor]:
        return [] if self.torch is None else [group["params"][0] for group in self.torch.param_groups]

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        assert self.torch is not None, "only AdamW's parameters have one"
        return self.torch.state[parameter]


def _treatment(entry: LayoutEntry, inner: InnerSpec) -> tuple[bool, float, bool]:
    """Whether Muon changes it, the multiplier of its rate, and whether it is decayed."""
    return is_for_muon(entry.kind, inner), rate_of(entry.kind, inner), entry.decayed
