"""The outer step against its textbook forms, and the invariants that make it safe."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from noloco_node.outer.replica import NotFinite, OuterReplica
from noloco_node.outer.update import OuterRule, contribution, step_, token_weights

SIZE = 1000


def vectors(count: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
    """Independent random vectors."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(SIZE, generator=generator, dtype=torch.float64).to(dtype) for _ in range(count)]


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


def exchange(left: OuterReplica, right: OuterReplica, weights: tuple[float, float] = (1.0, 1.0)) -> None:
    """One paired outer step, chunk by chunk, as the wire carries it; both commit."""
    for replica, weight in zip((left, right), weights, strict=True):
        replica.open(members=2, weight=weight)
    for index in range(left.chunks):
        to_right, to_left = left.encoded_chunk(index), right.encoded_chunk(index)
        left.add_chunk(index, to_left)
        right.add_chunk(index, to_right)
    left.commit()
    right.commit()


def replicas(
    count: int, rule: OuterRule, codec: str = "fp32", dtype: torch.dtype = torch.float32
) -> list[OuterReplica]:
    """Replicas with independent weights, fast = slow, no momentum."""
    made: list[OuterReplica] = []
    for weights in vectors(count, dtype, seed=8):
        replica = OuterReplica(rule, weights, chunk_elements=300, codec=codec)  # pyright: ignore[reportArgumentType]
        replica.snapshot.copy_(weights)
        made.append(replica)
    return made


def test_plain_averaging_keeps_the_mean_and_halves_the_variance() -> None:
    """α = 0, β = 0, γ = 1 over all pairs of many replicas: the mean stays, the expected variance halves."""
    rule = OuterRule(0.0, 0.0, 1.0, "averaged")
    group = replicas(64, rule)
    before = torch.stack([r.slow.double() for r in group])
    order = torch.randperm(64, generator=torch.Generator().manual_seed(9)).tolist()
    for a, b in (
        itertools.batched(order, 2) if hasattr(itertools, "batched") else zip(order[::2], order[1::2], strict=True)
    ):
        exchange(group[a], group[b])
    after = torch.stack([r.slow.double() for r in group])
    assert float((after.mean(0) - before.mean(0)).abs().max()) < 1e-6
    ratio = float(after.var(0).mean() / before.var(0).mean())
    assert ratio == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("codec", ["fp32", "fp16"])
def test_the_difference_form_keeps_the_mean_whatever_the_codec(codec: str) -> None:
    """The pair's mean φ stays to 1e-10 in fp64 state, also when fp16 travels, and the pair still contracts."""
    rule = OuterRule(0.5, 0.5, 0.5, "averaged")
    left, right = replicas(2, rule, codec, torch.float64)
    left.slow.add_(100.0)  # far from zero, so that fp16 rounds hard
    left.snapshot.copy_(left.slow)
    start = (left.slow + right.slow) / 2
    difference = float((left.slow - right.slow).abs().mean())
    exchange(left, right)
    assert float(((left.slow + right.slow) / 2 - start).abs().max()) < 1e-10
    assert float((left.slow - right.slow).abs().mean()) < 0.51 * difference


def test_a_commit_returns_the_change_that_keeps_inner_steps_taken_meanwhile() -> None:
    """θ ← θ + (φ_new − θ_snapshot): with θ = θ_snapshot + later steps, the later steps survive exactly."""
    rule = OuterRule(0.5, 0.5, 0.5, "averaged")
    replica = replicas(1, rule)[0]
    replica.snapshot.add_(0.25)
    meanwhile = torch.full((SIZE,), 0.125)
    fast = replica.snapshot + meanwhile
    replica.open(members=1, weight=1.0)
    fast += replica.commit()
    assert float((fast - replica.slow - meanwhile).abs().max()) < 1e-6


def test_without_a_commit_nothing_changes() -> None:
    """Chunks taken in and then abandoned leave φ and δ as they were; the next step starts clean."""
    rule = OuterRule(0.5, 0.5, 0.5, "averaged")
    left, right = replicas(2, rule)
    slow, momentum = left.slow.clone(), left.momentum.clone()
    left.open(members=2, weight=1.0)
    right.open(members=2, weight=1.0)
    left.add_chunk(0, right.encoded_chunk(0))
    assert torch.equal(left.slow, slow)
    assert torch.equal(left.momentum, momentum)
    left.open(members=1, weight=1.0)
    assert left.difference_norm() == 0.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_chunk_that_is_not_finite_is_refused(bad: float) -> None:
    """One bad value is enough, and the difference stays as it was."""
    left, right = replicas(2, OuterRule(0.5, 0.5, 0.5, "averaged"))
    left.open(members=2, weight=1.0)
    right.open(members=2, weight=1.0)
    wire = right.encoded_chunk(1).clone()
    wire[7] = bad
    with pytest.raises(NotFinite):
        left.add_chunk(1, wire)
    assert left.difference_norm() == 0.0


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=8))
def test_token_weights_sum_to_the_group_and_stay_in_bounds(tokens: list[int]) -> None:
    """Σ n·w = n always; each within [1/2, 2]; more tokens never weigh less."""
    weights = token_weights(tokens)
    assert sum(weights) == pytest.approx(len(tokens), rel=1e-6)
    assert all(0.5 - 1e-9 <= w <= 2.0 + 1e-9 for w in weights) or len(tokens) == 1
    for (a, wa), (b, wb) in itertools.combinations(zip(tokens, weights, strict=True), 2):
        assert (a - b) * (wa - wb) >= 0


def test_token_weights_are_proportional_where_no_bound_is_hit() -> None:
    """2 : 3 gives 0.8 and 1.2."""
    assert token_weights([200, 300]) == pytest.approx((0.8, 1.2))
