"""NoLoCo's outer update in its one-tensor form (arXiv 2506.10911; derivation in docs/outer-step.md).

A member j of a group of n contributes one tensor s_j of the size of its parameters:

    momentum local      s_j =         β n w_j Δ_j + γ φ_j      δ_i ← α δ_i + mean(s) − γ φ_i
    momentum averaged   s_j = α δ_j + β n w_j Δ_j + γ φ_j      δ_i ←         mean(s) − γ φ_i

and then φ_i ← φ_i + δ_i, with Δ_j = θ_j − φ_j. Both equal the published two-tensor rule (the second with the momentum
averaged over the group as well). A step alone is the same with n = 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from noloco_node.outer import Momentum

MIN_TOKEN_WEIGHT = 2.0 / 3.0
"""The least n·w of a member. Replicas exchange after H/2 to H inner steps, so the token counts of an honest pair differ
up to twofold. A member that claims endless tokens takes a third of its partner's weight, and no more."""
MAX_TOKEN_WEIGHT = 2.0


@dataclass(frozen=True, slots=True)
class OuterRule:
    """Coefficients of the outer update: momentum α, outer learning rate β, pull γ, and what happens to the momentum."""

    alpha: float
    beta: float
    gamma: float
    momentum: Momentum


def contribution(
    rule: OuterRule, *, fast: Tensor, slow: Tensor, momentum: Tensor | None, weight: float = 1.0
) -> Tensor:
    """s_j, a new tensor of the inputs' shape. `weight` is n·w_j, the member's token weight (1 for equal work). No
    momentum is given where α is 0."""
    s = (fast - slow).mul_(rule.beta * weight).add_(slow, alpha=rule.gamma)
    if rule.momentum == "averaged" and momentum is not None:
        s.add_(momentum, alpha=rule.alpha)
    return s


def step_(rule: OuterRule, mean_contribution: Tensor, *, slow: Tensor, momentum: Tensor | None) -> None:
    """Replace φ and δ in place by their values after the outer step. All three have one shape. Without a momentum,
    which an α of 0 does not need, the mean's memory is used up."""
    if momentum is None:
        momentum = mean_contribution
    elif rule.momentum == "averaged":
        momentum.copy_(mean_contribution)
    else:
        momentum.mul_(rule.alpha).add_(mean_contribution)
    momentum.sub_(slow, alpha=rule.gamma)
    slow.add_(momentum)


def token_weights(tokens: Sequence[int]) -> tuple[float, ...]:
    """n·w_j for the members of a group: proportional to their tokens, each within [2/3, 2], summing to n.

    The sum must be exactly n whatever was clipped, or the group's Δ would be scaled. What clipping takes from one
    member is shared among those that are not at a bound. A group without tokens gets equal weights.

    Raises ValueError for an empty group or negative counts.
    """
    n = len(tokens)
    if n == 0 or min(tokens) < 0:
        raise ValueError(f"token counts must be a non-empty list of numbers >= 0, got {list(tokens)}")
    tokens = [max(1, count) for count in tokens]  # no scale lifts a zero, and the others may all be at their bound
    total = sum(tokens)
    weights = [1.0] * n
    low, high = 0.0, n * MAX_TOKEN_WEIGHT * total
    for _ in range(200):  # bisection: the sum of the clipped weights rises with the scale
        scale = (low + high) / 2
        weights = [min(MAX_TOKEN_WEIGHT, max(MIN_TOKEN_WEIGHT, scale * t / total)) for t in tokens]
        low, high = (scale, high) if sum(weights) < n else (low, scale)
    return tuple(weights)
