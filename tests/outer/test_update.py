"""The outer step against its textbook forms."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from noloco_node.outer.update import OuterRule, contribution, step_, token_weights
from tests.outer.groups import replica_of, replicas, step, vectors


def textbook(
    rule: OuterRule,
    fast: Sequence[Tensor],
    slow: Sequence[Tensor],
    momentum: Sequence[Tensor],
    weights: Sequence[float],
) -> list[tuple[Tensor, Tensor]]:
    """The published two-tensor rule (three tensors where the momentum is averaged), for every member of one group."""
    n = len(fast)
    mean_delta = sum(w * (f - s) for w, f, s in zip(weights, fast, slow, strict=True)) / n
    mean_slow = sum(slow) / n
    mean_momentum = sum(momentum) / n
    after: list[tuple[Tensor, Tensor]] = []
    for s, m in zip(slow, momentum, strict=True):
        carried = mean_momentum if rule.momentum == "averaged" else m
        new = rule.alpha * carried + rule.beta * mean_delta - rule.gamma * (s - mean_slow)
        after.append((s + new, new))
    return after


@pytest.mark.parametrize("momentum", ["averaged", "local"])
@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("weighted", [False, True])
def test_one_tensor_equals_the_textbook_form(n: int, momentum: str, weighted: bool) -> None:
    """In fp64 to 1e-12, for groups of 2, 3 and 4, in both momentum modes, with and without token weights."""
    rule = OuterRule(0.5, 0.7, 0.4, momentum)  # pyright: ignore[reportArgumentType]
    fast, slow, delta = vectors(n, seed=1), vectors(n, seed=2), vectors(n, seed=3)
    weights = token_weights([100 * (i + 1) for i in range(n)]) if weighted else (1.0,) * n
    expected = textbook(rule, fast, slow, delta, weights)
    parts = [
        contribution(rule, fast=f, slow=s, momentum=d, weight=w)
        for f, s, d, w in zip(fast, slow, delta, weights, strict=True)
    ]
    mean = torch.stack(parts).mean(0)
    for s, d, (new_slow, new_momentum) in zip(slow, delta, expected, strict=True):
        step_(rule, mean, slow=s, momentum=d)
        assert float((s - new_slow).abs().max()) < 1e-12
        assert float((d - new_momentum).abs().max()) < 1e-12


def test_all_replicas_in_one_group_are_diloco() -> None:
    """n = N from equal states: every replica takes Nesterov-free DiLoCo's step on the mean Δ, whatever γ is."""
    rule = OuterRule(0.3, 0.7, 0.9, "local")
    start, velocity = vectors(1, seed=4)[0], vectors(1, seed=5)[0]
    fast = vectors(4, seed=6)
    parts = [contribution(rule, fast=f, slow=start, momentum=velocity) for f in fast]
    expected = 0.3 * velocity + 0.7 * (torch.stack(fast).mean(0) - start)
    for _ in fast:
        slow, momentum = start.clone(), velocity.clone()
        step_(rule, torch.stack(parts).mean(0), slow=slow, momentum=momentum)
        assert float((momentum - expected).abs().max()) < 1e-12
        assert float((slow - start - expected).abs().max()) < 1e-12


def test_a_step_alone_keeps_only_momentum_and_own_progress() -> None:
    """n = 1: δ ← αδ + βΔ, no pull, in both modes."""
    for mode in ("averaged", "local"):
        rule = OuterRule(0.5, 0.7, 0.4, mode)
        fast, slow, delta = vectors(3, seed=7)
        expected = 0.5 * delta + 0.7 * (fast - slow)
        before = slow.clone()
        step_(rule, contribution(rule, fast=fast, slow=slow, momentum=delta), slow=slow, momentum=delta)
        assert float((delta - expected).abs().max()) < 1e-12
        assert float((slow - before - expected).abs().max()) < 1e-12


@pytest.mark.parametrize("momentum", ["averaged", "local"])
@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("weighted", [False, True])
def test_replicas_that_exchange_chunks_take_the_textbook_step(
    n: int, momentum: str, dtype: torch.dtype, weighted: bool
) -> None:
    """Through `OuterReplica`, chunk by chunk in fp32: the same φ and δ as the published rule."""
    rule = OuterRule(0.5, 0.7, 0.4, momentum)  # pyright: ignore[reportArgumentType]
    weights = token_weights([100 * (i + 1) for i in range(n)]) if weighted else (1.0,) * n
    group = replicas(n, rule, dtype=dtype)
    states = [[r.snapshot.double(), r.slow.double(), r.momentum.double()] for r in group]
    expected = textbook(rule, *zip(*states, strict=True), weights=weights)
    step(group, weights=weights)
    for replica, (slow, delta) in zip(group, expected, strict=True):
        assert float((replica.slow - slow).abs().max()) < 3e-6  # differences travel as fp32
        assert float((replica.momentum - delta).abs().max()) < 3e-6


def test_replicas_that_all_meet_are_diloco() -> None:
    """n = N through `OuterReplica`, from equal states, for three rounds: all stay equal, on DiLoCo's path."""
    rule = OuterRule(0.3, 0.7, 0.9, "local")
    start = vectors(1, torch.float64, 4)[0]
    group = [replica_of(rule, start) for _ in range(4)]
    slow, velocity = start.clone(), torch.zeros_like(start)
    for round_ in range(3):
        moves = vectors(4, torch.float64, 10 + round_)
        for replica, move in zip(group, moves, strict=True):
            replica.snapshot.copy_(replica.slow + move)
        step(group, exchange=str(round_))
        velocity = 0.3 * velocity + 0.7 * torch.stack(moves).mean(0)
        slow += velocity
        for replica in group:
            assert float((replica.slow - slow).abs().max()) < 1e-5


def test_plain_averaging_keeps_the_mean_and_halves_the_variance() -> None:
    """α = 0, β = 0, γ = 1 over all pairs of many replicas: the mean stays, the expected variance halves."""
    rule = OuterRule(0.0, 0.0, 1.0, "averaged")
    group = replicas(64, rule)
    before = torch.stack([r.slow.double() for r in group])
    order = torch.randperm(64, generator=torch.Generator().manual_seed(9)).tolist()
    for a, b in zip(order[::2], order[1::2], strict=True):
        step([group[a], group[b]])
    after = torch.stack([r.slow.double() for r in group])
    assert float((after.mean(0) - before.mean(0)).abs().max()) < 1e-6
    ratio = float(after.var(0).mean() / before.var(0).mean())
    assert ratio == pytest.approx(0.5, abs=0.02)


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=8))
@example([0, 0, 0, 1])
@example([0, 0])
def test_token_weights_sum_to_the_group_and_stay_in_bounds(tokens: list[int]) -> None:
    """Σ n·w = n always; each within [2/3, 2]; more tokens never weigh less."""
    weights = token_weights(tokens)
    assert sum(weights) == pytest.approx(len(tokens), rel=1e-6)
    assert all(2 / 3 - 1e-9 <= w <= 2.0 + 1e-9 for w in weights) or len(tokens) == 1
    for (a, wa), (b, wb) in itertools.combinations(zip(tokens, weights, strict=True), 2):
        assert (a - b) * (wa - wb) >= 0


def test_token_weights_are_proportional_where_no_bound_is_hit() -> None:
    """2 : 3 gives 0.8 and 1.2."""
    assert token_weights([200, 300]) == pytest.approx((0.8, 1.2))
