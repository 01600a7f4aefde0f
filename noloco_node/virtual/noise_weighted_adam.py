"""AdamW for a replica whose steps are averaged with others': noise counts less in the second moment.

Averaging N replicas' updates divides the noise of a gradient, but each replica's second moment is made of its own small
batch: v = signal² + noise². Under data parallelism it would be signal² + noise²/N, and the same learning rate would
carry the noisy weights further. The noise can be told from the signal without talking to anyone, by how far the
microbatches behind one step disagree. With its second moment u, this optimizer divides by

    sqrt(max(v − (1 − r) u, r v))        r in (0, 1]; r = 1 is AdamW, r = 1/N normalises as the whole swarm would
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True)
class NoiseWeightedAdam:
    """State and step of one replica's flat vector of weights [size]; the first `decayed` of them decay."""

    decayed: int
    weight_decay: float
    beta1: float
    beta2: float
    eps: float
    noise_weight: float
    size: InitVar[int]
    first: Tensor = field(init=False, repr=False)
    """m, [size]."""
    second: Tensor = field(init=False, repr=False)
    """v, [size]."""
    noise: Tensor = field(init=False, repr=False)
    """u: the second moment of the noise of a step's mean gradient, [size]."""
    steps: int = 0
    noise_steps: int = 0
    """Steps behind `noise`: those of two microbatches or more."""
    _scratch: Tensor = field(init=False, repr=False)

    def __post_init__(self, size: int) -> None:
        self.first, self.second, self.noise, self._scratch = (torch.zeros(size) for _ in range(4))

    def step_(self, weights: Tensor, gradient: Tensor, squares: Tensor, microbatches: int, rate: float) -> None:
        """One step on the mean `gradient` of `microbatches` equally large ones, whose own mean gradients have the sum
        of squares `squares` [size] (used up as scratch space). Weights change in place."""
        self.steps += 1
        self.first.lerp_(gradient, 1 - self.beta1)
        self.second.mul_(self.beta2).addcmul_(gradient, gradient, value=1 - self.beta2)
        if microbatches > 1:  # the variance of a mean of k: (mean square − squared mean) / (k − 1)
            self.noise_steps += 1
            squares.div_(microbatches).addcmul_(gradient, gradient, value=-1.0).clamp_(min=0.0)
            self.noise.mul_(self.beta2).add_(squares, alpha=(1 - self.beta2) / (microbatches - 1))
        weights[: self.decayed].mul_(1 - rate * self.weight_decay)
        weights.addcdiv_(self.first, self._divisor(), value=-rate / (1 - self.beta1**self.steps))

    def _divisor(self) -> Tensor:
        second = self._scratch.copy_(self.second).div_(1 - self.beta2**self.steps)
        if self.noise_steps == 0:
            return second.sqrt_().add_(self.eps)
        least = second * self.noise_weight
        second.sub_(self.noise, alpha=(1 - self.noise_weight) / (1 - self.beta2**self.noise_steps))
        return torch.maximum(second, least, out=second).sqrt_().add_(self.eps)

    def copy_(self, other: NoiseWeightedAdam) -> None:
        """Become a copy of another replica's state."""
        for own, theirs in zip(self.moments().values(), other.moments().values(), strict=True):
            own.copy_(theirs)
        self.steps, self.noise_steps = other.steps, other.noise_steps

    def moments(self) -> Mapping[str, Tensor]:
        """The vectors of the state, by name."""
        return {"first": self.first, "second": self.second, "noise": self.noise}
