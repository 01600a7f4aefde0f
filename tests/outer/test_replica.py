"""The open step: what every codec keeps, and what an abort and a half-taken step leave."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from noloco_node.outer import CodecName
from noloco_node.outer.codec import BLOCK, CODECS
from noloco_node.outer.replica import NotFinite, OuterReplica
from noloco_node.outer.update import OuterRule, contribution, step_
from tests.outer.groups import ERRORS, SIZE, meet, replica_of, replicas, step, vectors

ALL: list[CodecName] = list(CODECS)
RULE = OuterRule(0.5, 0.7, 0.5, "averaged")


def state(replica: OuterReplica) -> list[Tensor]:
    """Copies of φ and δ."""
    return [replica.slow.clone(), replica.momentum.clone()]


def equal(left: list[Tensor], right: list[Tensor]) -> bool:
    """Bit by bit."""
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("codec", ALL)
@pytest.mark.parametrize(("n", "momentum"), [(2, "averaged"), (4, "local")])
def test_every_codec_keeps_the_mean_of_every_group(codec: CodecName, n: int, momentum: str) -> None:
    """Far from zero, where floats round hard: Σφ and Σδ to 1e-10 as if nothing had been rounded, over three rounds."""
    rule = OuterRule(0.5, 0.7, 0.5, momentum)  # pyright: ignore[reportArgumentType]
    group = replicas(n, rule, codec, torch.float64)
    for replica in group:
        replica.slow.add_(100.0)
        replica.snapshot.add_(100.0)
    for round_ in range(3):
        slow = sum(r.slow for r in group)
        delta = sum(rule.alpha * r.momentum + rule.beta * (r.snapshot - r.slow) for r in group)
        step(group, exchange=str(round_))
        assert float((sum(r.momentum for r in group) - delta).abs().max()) < 1e-10  # pyright: ignore[reportAttributeAccessIssue]
        assert float((sum(r.slow for r in group) - slow - delta).abs().max()) < 1e-10  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("codec", [codec for codec, error in ERRORS.items() if error.left < 1.0])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_what_a_codec_leaves_of_the_spread(codec: CodecName, n: int) -> None:
    """Plain averaging (γ = 1) takes all of a group's spread but the codec's error: a known share is left."""
    group = replicas(n, OuterRule(0.0, 0.0, 1.0, "averaged"), codec)
    before = torch.stack([r.slow for r in group]).std(0).mean()
    step(group)
    after = torch.stack([r.slow for r in group]).std(0).mean()
    left = ERRORS[codec].left
    assert float(after / before) < left
    if codec.startswith("int"):
        assert float(after / before) > left / 10  # the figure above is no idle bound


@pytest.mark.parametrize("codec", [codec for codec in ALL if not CODECS[codec].decoupled])
def test_the_spread_shrinks_over_rounds(codec: CodecName) -> None:
    """Four replicas with momentum and without gradients, random pairs: down to the codec's floor, never up."""
    group = replicas(4, RULE, codec)
    for replica in group:
        replica.snapshot.copy_(replica.slow)
    start = float(torch.stack([r.slow for r in group]).std(0).mean())
    generator = torch.Generator().manual_seed(1)
    for round_ in range(16):
        order = torch.randperm(4, generator=generator).tolist()
        for a, b in zip(order[::2], order[1::2], strict=True):
            step([group[a], group[b]], exchange=f"{round_}/{a}")
    left = float(torch.stack([r.slow for r in group]).std(0).mean()) / start
    assert left < {"fp16": 2e-3}.get(codec, 5e-3)


def test_a_commit_returns_the_change_that_keeps_inner_steps_taken_meanwhile() -> None:
    """θ ← θ + (φ_new − θ_snapshot): with θ = θ_snapshot + later steps, the later steps survive exactly."""
    replica = replicas(1, RULE)[0]
    meanwhile = torch.full((SIZE,), 0.125)
    fast = replica.snapshot + meanwhile
    replica.open(members=1, weight=1.0)
    fast += replica.commit()
    assert float((fast - replica.slow - meanwhile).abs().max()) < 1e-6


@pytest.mark.parametrize("codec", ALL)
def test_an_abandoned_step_leaves_no_trace(codec: CodecName) -> None:
    """Opened, fully exchanged, not committed: φ and δ bitwise as before, and the next step as if it were the first."""
    group, twins = replicas(2, RULE, codec), replicas(2, RULE, codec)
    before = [state(r) for r in group]
    meet(group, exchange="abandoned")
    assert group[0].difference_norm() > 0
    assert all(equal(state(r), b) for r, b in zip(group, before, strict=True))
    step(group, exchange="next")
    step(twins, exchange="next")
    assert all(equal(state(r), state(t)) for r, t in zip(group, twins, strict=True))
    assert not equal(state(group[0]), before[0])


@pytest.mark.parametrize("codec", ALL)
def test_a_step_taken_by_one_side_shifts_the_mean_by_the_difference_over_all(codec: CodecName) -> None:
    """Left commits, right steps alone: Σφ and Σδ are too large by exactly left's d."""
    group, alone = replicas(2, RULE, codec, torch.float64), replicas(2, RULE, codec, torch.float64)
    meet(group)
    group[0].commit()
    group[1].open(members=1, weight=1.0)
    group[1].commit()
    for replica in alone:
        replica.open(members=1, weight=1.0)
        replica.commit()
    meet(both := replicas(2, RULE, codec, torch.float64))
    norm = both[0].difference_norm()
    shift = sum(r.slow for r in group) - sum(r.slow for r in alone)
    assert isinstance(shift, Tensor)
    assert float(shift.norm()) == pytest.approx(norm, rel=1e-9)
    both[0].commit()
    assert float((both[0].slow - alone[0].slow - shift).abs().max()) < 1e-12


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_chunk_that_is_not_finite_is_refused(bad: float) -> None:
    """One bad value is enough, and the difference stays as it was."""
    left, right = replicas(2, RULE)
    for replica in (left, right):
        replica.open(members=2, weight=1.0)
        replica.agree([])
    wire = right.encoded_chunk(1).clone()
    wire[7] = bad
    with pytest.raises(NotFinite):
        left.add_chunk(1, wire)
    assert left.difference_norm() == 0.0


@pytest.mark.parametrize("codec", ["int8", "int4", "dct", "sign"])
@pytest.mark.parametrize("claim", ["nan", "inf", "huge", "large", "zero", "equal", "tiny"])
def test_no_sketch_and_no_codes_bring_a_replica_down(codec: CodecName, claim: str) -> None:
    """Whatever a partner claims, with random codes behind it: refused as not finite, or a finite step."""
    left = replicas(1, RULE, codec)[0]
    left.open(members=2, weight=1.0, exchange="e")
    own = left.sketch()
    claims = {"nan": float("nan"), "inf": float("inf"), "huge": 3.4e38, "large": 1e25, "zero": 0.0, "tiny": 1e-44}
    sketch = own.clone() if claim == "equal" else torch.full_like(own, claims[claim])
    before = state(left)
    generator = torch.Generator().manual_seed(2)
    if claim in ("nan", "inf"):
        with pytest.raises(NotFinite):
            left.agree([sketch])
        return
    left.agree([sketch])
    try:
        for index in range(left.chunks):
            codes = left.encoded_chunk(index)
            left.add_chunk(index, torch.randint(0, 256, codes.shape, generator=generator).to(torch.uint8))
        scale = 1.0 / max(1.0, left.difference_norm())
        left.commit(scale)
    except NotFinite:
        assert claim == "huge" or CODECS[codec].decoupled  # random bytes hold a NaN among their bf16
        assert equal(state(left), before)
    assert all(bool(torch.isfinite(x).all()) for x in state(left))
    assert float((left.slow - before[0]).norm()) < 1.0 + float((0.5 * before[1]).norm() + 7.0)


def test_a_sketch_or_chunk_of_another_shape_is_refused() -> None:
    """Lengths and precision are agreed, so anything else is an error before it is used."""
    left = replicas(1, RULE, "int8")[0]
    left.open(members=2, weight=1.0)
    with pytest.raises(ValueError, match="fit together"):
        left.agree([left.sketch()[:-1]])
    left.agree([left.sketch()])
    codes = left.encoded_chunk(0)
    for wire in (codes[:-1], codes.float()):
        with pytest.raises(ValueError, match="chunk 0"):
            left.add_chunk(0, wire)


def test_the_own_motion_and_the_difference_are_what_they_say() -> None:
    """‖βΔ‖ and ‖(s_j − s_i)/n‖ over the weights, chunk by chunk or not."""
    slow, delta = vectors(1)[0], 0.1 * vectors(1, seed=5)[0]
    left = replica_of(RULE, slow, fast=slow + 0.25, momentum=delta)
    right = replica_of(RULE, slow + 1.0)
    meet([left, right])
    motion = 0.5 * delta + 0.7 * 0.25
    assert left.own_motion() == pytest.approx(0.7 * 0.25 * SIZE**0.5, rel=1e-9)
    assert left.difference_norm() == pytest.approx(float((0.5 * 1.0 - motion).norm() / 2), rel=1e-6)


@pytest.mark.parametrize("momentum", ["averaged", "local"])
def test_without_momentum_a_step_is_bitwise_that_of_a_momentum_of_no_weight(momentum: str) -> None:
    """With α = 0 nothing of the last step is in the next, so no vector is kept for it."""
    rule = OuterRule(0.0, 0.7, 0.9, momentum)  # pyright: ignore[reportArgumentType]
    (replica,) = replicas(1, rule)
    assert replica.momentum is None
    slow, fast, kept = replica.slow.clone(), replica.snapshot.clone(), torch.randn(SIZE)
    replica.open(members=1, weight=1.0)
    correction = replica.commit()
    step_(rule, contribution(rule, fast=fast, slow=slow, momentum=kept), slow=slow, momentum=kept)
    assert torch.equal(replica.slow, slow)
    assert torch.equal(correction, slow - fast)


def tensors_in(value: object) -> list[Tensor]:
    """All that are reached through lists, dicts and the attributes of a replica and its remembered way."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return tensors_in(list(value.values()))
    if isinstance(value, list):
        return [tensor for each in value for tensor in tensors_in(each)]
    return tensors_in(vars(value)) if isinstance(value, OuterReplica) else []


@pytest.mark.parametrize("codec", ALL)
def test_an_exchange_holds_two_vectors_and_the_codes_of_both_sides(codec: CodecName) -> None:
    """All tensors that an open step holds: none as long as the stage but φ and the snapshot, and the trail of a codec
    that has one. Afterwards nothing is left of the codes."""
    size, kind = 64 * BLOCK, CODECS[codec]
    pair = replicas(2, OuterRule(0.0, 0.7, 0.9, "averaged"), codec, size=size)
    meet(pair)
    vectors = (2 + kind.trails) * 4 * size
    codes = (2 if kind.modulo else 1) * kind.wire_elements(size) * kind.wire_dtype.itemsize
    sketch = 4 * kind.sketch_elements(size)
    assert sum(tensor.nbytes for tensor in tensors_in(pair[0])) == vectors + codes + sketch
    pair[0].commit()
    assert sum(tensor.nbytes for tensor in tensors_in(pair[0])) == vectors
