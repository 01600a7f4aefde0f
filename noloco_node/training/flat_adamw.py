"""AdamW on a stage's flat vector: two tensors instead of hundreds, and its state as flat vectors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from noloco_node.config.run_spec import InnerSpec
from noloco_node.training.layout import FlatLayout

MOMENTS = ("exp_avg", "exp_avg_sq")


class FlatAdamW:
    """Changes `master` in place by `gradient`, both flat and on one device. Vectors are not decayed, matrices are."""

    def __init__(self, layout: FlatLayout, master: Tensor, gradient: Tensor, inner: InnerSpec) -> None:
        self._size = layout.size
        cut = layout.decayed
        assert 0 < cut < layout.size, "a stage has matrices and vectors"
        self._parts = [slice(0, cut), slice(cut, layout.size)]
        """The decayed and the other elements of the flat vector."""
        groups: list[dict[str, Any]] = []
        for part, decay in zip(self._parts, (inner.weight_decay, 0.0), strict=True):
            parameter = master[part]
            parameter.grad = gradient[part]
            groups.append({"params": [parameter], "weight_decay": decay})
        self.torch = torch.optim.AdamW(groups, lr=1.0, betas=(inner.beta1, inner.beta2), eps=inner.eps, fused=True)
        for _, parameter in self._by_part():
            state = self.torch.state[parameter]  # from the start on, so that no step ever asks a device for memory
            state["step"] = torch.zeros((), device=master.device)
            state.update({name: torch.zeros_like(parameter) for name in MOMENTS})

    def step(self, learning_rate: float) -> None:
        """One step on the gradient as it is."""
        for group in self.torch.param_groups:
            group["lr"] = learning_rate
        self.torch.step()  # pyright: ignore[reportUnknownMemberType]

    def state(self) -> dict[str, Tensor]:
        """Copies (host) of the moments as flat vectors and of the step count as an int64 scalar."""
        room = {name: torch.zeros(self._size) for name in MOMENTS}
        room["optimizer_steps"] = torch.tensor(0)
        self.copy_into(room)
        return room

    def copy_into(self, room: Mapping[str, Tensor]) -> None:
        """Fill zeroed host tensors with what `state()` gives."""
        for part, parameter in self._by_part():
            state = self.torch.state[parameter]
            room["optimizer_steps"].copy_(state["step"])
            for name in MOMENTS:
                room[name][part].copy_(state[name])

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Replace moments and step count, as `state()` gives them. Those that are there are written over: beside them a
        device may have no memory for others."""
        for part, parameter in self._by_part():
            own = self.torch.state[parameter]
            own["step"].copy_(state["optimizer_steps"])
            for name in MOMENTS:
                own[name].copy_(state[name][part])

    def _by_part(self) -> list[tuple[slice, Tensor]]:
        """Where in the flat vector each of the optimizer's tensors lies."""
        groups = self.torch.param_groups
        return [(part, group["params"][0]) for part, group in zip(self._parts, groups, strict=True)]
