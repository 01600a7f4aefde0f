"""The values of γ for which the spread across replicas shrinks: second moments of a deviation from the mean over
replicas.

With fresh random groups of n out of N each round, c = N(n−1)/(n(N−1)) is the share of a deviation's variance that
averaging removes. If only a share q of the outer steps finds a partner, c becomes c·q. For n = N there is no other
group to deviate from, c = 1.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from noloco_node.outer import Momentum


def mixing_share(group_size: int, replicas: int | None, paired_share: float = 1.0) -> float:
    """c·q: the share of a deviation's variance that one round of averaging removes. `replicas` None means very many.

    Raises ValueError where the group is larger than the replicas, or a value is out of bounds.
    """
    if group_size < 2 or (replicas is not None and replicas < group_size) or not 0.0 <= paired_share <= 1.0:
        raise ValueError(f"no such group: {group_size} of {replicas} replicas, paired share {paired_share}")
    share = (group_size - 1) / group_size
    if replicas is not None:
        share *= replicas / (replicas - 1)
    return share * paired_share


def contraction_matrix(alpha: float, gamma: float, c: float, momentum: Momentum) -> npt.NDArray[np.float64]:
    """The 3×3 map of the second moments (E x², E v², E xv) of one deviation x and its momentum v over an outer step.

    With y the deviation taken to the group's mean, d ← a·v + b·y and x ← x + d. Averaged momentum contracts v with the
    group as well; local momentum leaves it (α²).
    """
    if momentum == "averaged":
        a2 = alpha * alpha * (1 - c)
        a1 = alpha * (1 - c)
        return np.array(
            [
                [1 - 2 * gamma * c + gamma * gamma * c, a2, 2 * a1],
                [gamma * gamma * c, a2, 0.0],
                [-gamma * (1 - gamma) * c, a2, a1],
            ]
        )
    # For the group mean m, v' = αv − γ(x − m) and x' = x + v'. Here E[(x−m)²] = E[x(x−m)] = c·E x² and E[v(x−m)] = c·E
    # xv.
    g2c = gamma * gamma * c
    return np.array(
        [
            [1 - 2 * gamma * c + g2c, alpha * alpha, 2 * alpha - 2 * alpha * gamma * c],
            [g2c, alpha * alpha, -2 * alpha * gamma * c],
            [-gamma * c + g2c, alpha * alpha, alpha - 2 * alpha * gamma * c],
        ]
    )


def contraction_factor(
    alpha: float,
    gamma: float,
    *,
    group_size: int = 2,
    replicas: int | None = None,
    momentum: Momentum = "averaged",
    paired_share: float = 1.0,
) -> float:
    """Factor by which the variance across replicas changes per outer step in the long run (below 1: it shrinks)."""
    matrix = contraction_matrix(alpha, gamma, mixing_share(group_size, replicas, paired_share), momentum)
    return float(np.max(np.abs(np.linalg.eigvals(matrix))))  # the spectral radius


def admissible_gamma(
    alpha: float, *, group_size: int = 2, replicas: int | None = None, momentum: Momentum = "averaged"
) -> tuple[float, float]:
    """The open interval of γ for which the spread shrinks.

    Local momentum has the closed form 2(1−α²)/(1+α−2αc); averaged momentum is found by bisection on the spectral
    radius, to 1e-6. Raises ValueError for α outside [0, 1).
    """
    if not 0.0 <= alpha < 1.0:
        raise ValueError(f"alpha must be in [0, 1), got {alpha}")
    if momentum == "local":
        c = mixing_share(group_size, replicas)
        return 0.0, 2 * (1 - alpha * alpha) / (1 + alpha - 2 * alpha * c)
    low, high = 0.0, 4.0  # at γ = 4 the first diagonal entry alone exceeds 1 for every c > 0
    while high - low > 1e-6:
        middle = (low + high) / 2
        shrinks = contraction_factor(alpha, middle, group_size=group_size, replicas=replicas, momentum=momentum) < 1.0
        low, high = (middle, high) if shrinks else (low, middle)
    return 0.0, low


def safe_gamma(alpha: float) -> float:
    """2(1 − α): every γ below it is stable for every N, n, both momentum modes and any share of steps taken alone."""
    return 2.0 * (1.0 - alpha)
