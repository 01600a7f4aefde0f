"""Which γ is admissible: closed forms, the known table, and simulation."""

from __future__ import annotations

import math

import pytest
import torch

from noloco_node.outer.stability import admissible_gamma, contraction_factor, safe_gamma
from noloco_node.outer.update import OuterRule, contribution, step_


@pytest.mark.parametrize(("alpha", "limit"), [(0.0, 2.0), (0.3, 1.82), (0.5, 1.5), (0.7, 1.02), (0.9, 0.38)])
def test_local_momentum_has_its_closed_form(alpha: float, limit: float) -> None:
    """n = 2 and very many replicas: γ < 2(1 − α²)."""
    assert admissible_gamma(alpha, momentum="local")[1] == pytest.approx(limit, abs=1e-9)


@pytest.mark.parametrize(("alpha", "limit"), [(0.0, 2.0), (0.3, 1.66), (0.5, 1.40), (0.7, 1.12), (0.9, 0.82)])
def test_averaged_momentum_has_the_known_limits(alpha: float, limit: float) -> None:
    """Largest stable γ to two digits, as computed independently."""
    assert admissible_gamma(alpha)[1] == pytest.approx(limit, abs=0.006)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 0.7])
def test_averaged_momentum_contracts_like_plain_averaging_at_one_minus_alpha(alpha: float) -> None:
    """The variance halves per round at γ = 1 − α."""
    assert contraction_factor(alpha, 1 - alpha) == pytest.approx(0.5, abs=1e-6)


@pytest.mark.parametrize("momentum", ["averaged", "local"])
@pytest.mark.parametrize("replicas", [2, 3, 4, 16, None])
@pytest.mark.parametrize("share", [0.05, 0.5, 1.0])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.9])
def test_below_the_safe_bound_everything_is_stable(
    alpha: float, share: float, replicas: int | None, momentum: str
) -> None:
    """γ < 2(1 − α) contracts for every N, both modes and any share of steps taken alone."""
    for part in (0.05, 0.5, 0.999):
        factor = contraction_factor(
            alpha,
            part * safe_gamma(alpha),
            replicas=replicas,
            momentum=momentum,  # pyright: ignore[reportArgumentType]
            paired_share=share,
        )
        assert factor < 1.0


@pytest.mark.parametrize(
    ("alpha", "gamma", "momentum"),
    [(0.5, 0.5, "averaged"), (0.5, 0.7, "averaged"), (0.5, 0.7, "local"), (0.7, 1.3, "averaged"), (0.9, 0.6, "local")],
)
def test_theory_predicts_the_simulated_second_moment(alpha: float, gamma: float, momentum: str) -> None:
    """64 replicas with many independent coordinates, random pairs, no gradients: the mean-square deviation over rounds
    follows the matrix, in stable and in diverging settings."""
    count, rounds, width = 64, 8, 6_000
    rule = OuterRule(alpha, 0.0, gamma, momentum)  # pyright: ignore[reportArgumentType]
    generator = torch.Generator().manual_seed(1)
    slow = torch.randn(count, width, generator=generator, dtype=torch.float64)
    delta = torch.zeros_like(slow)
    variances: list[float] = []
    for _ in range(rounds):
        # a pairing of its own for every block of coordinates, so that the mean over coordinates is one over pairings
        for block in range(0, width, 100):
            part = slice(block, block + 100)
            order = torch.randperm(count, generator=generator).view(-1, 2)
            x, v = slow[:, part], delta[:, part]
            s = contribution(rule, fast=x, slow=x, momentum=v)
            mean = s[order].mean(1)
            for side in (0, 1):
                rows = order[:, side]
                new_x, new_v = x[rows].clone(), v[rows].clone()
                step_(rule, mean, slow=new_x, momentum=new_v)
                x[rows], v[rows] = new_x, new_v
        variances.append(float(slow.var(0).mean()))
    measured = (variances[-1] / variances[2]) ** (1 / (rounds - 3))
    predicted = contraction_factor(alpha, gamma, replicas=count, momentum=momentum)  # pyright: ignore[reportArgumentType]
    assert math.log(measured) == pytest.approx(math.log(predicted), abs=0.08)
