"""The codecs that send of the motion only a part: what crosses, what stays, and that nothing is lost."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from noloco_node.outer import CodecName
from noloco_node.outer.codec import BLOCK, CODECS
from noloco_node.outer.decoupled import GROUP, Signs, dct_matrix, decoupled_bytes
from noloco_node.outer.replica import OuterReplica
from noloco_node.outer.update import OuterRule
from tests.outer.groups import meet, replica_of, replicas, step, vectors

RULE = OuterRule(0.5, 0.5, 0.5, "averaged")
BOTH: list[CodecName] = ["dct", "sign"]
SIZE = 2 * GROUP * BLOCK + 5 * BLOCK + 77


def spread(group: list[OuterReplica]) -> float:
    """Root mean square over weights of the deviation across replicas."""
    return float(torch.stack([replica.slow for replica in group]).var(0).mean().sqrt())


def test_the_transform_is_orthonormal() -> None:
    """Its transpose takes it back."""
    matrix = dct_matrix().double()
    assert float((matrix @ matrix.T - torch.eye(64)).abs().max()) < 1e-6
    constant = matrix @ torch.ones(64, dtype=torch.float64)
    assert float(constant[0]) == pytest.approx(8.0)
    assert float(constant[1:].abs().max()) < 1e-6


@given(size=st.integers(1, 3 * GROUP * BLOCK), seed=st.integers(0, 99), codec_name=st.sampled_from(BOTH))
def test_both_sides_find_the_same_difference_and_bytes_are_as_promised(
    size: int, seed: int, codec_name: CodecName
) -> None:
    """Antisymmetric bit by bit for every length, in fewer than 1/16 of the bytes of fp32 where it is long enough (a
    sign 1/25)."""
    codec, name = CODECS[codec_name], str(seed)
    pair, pulls = vectors(2, torch.float32, seed, size), vectors(2, torch.float32, seed + 1000, size)
    sketches = [codec.sketch(name, values) for values in pair]
    coding = codec.coding(name, size, sketches)
    wires = [coding.encode(values, 0, pull) for values, pull in zip(pair, pulls, strict=True)]
    there, back = coding.difference(wires[1], wires[0], 0), coding.difference(wires[0], wires[1], 0)
    assert there.shape == (size,)
    assert torch.equal(there, -back)
    assert wires[0].nbytes + sketches[0].nbytes == codec.wire_bytes(size)
    assert codec.wire_bytes(size) <= size / 4 + 2 * BLOCK
    shorter = {"dct": 16.5, "sign": 25.0}[codec_name]
    assert codec.wire_bytes(100 * GROUP * BLOCK) * shorter < 4 * 100 * GROUP * BLOCK


def test_the_largest_waves_cross_and_one_block_in_sixteen_crosses_whole() -> None:
    """Partners that differ by pure waves, at most four in a place, find the whole difference; their φ only where the
    window is."""
    basis, generator = dct_matrix(), torch.Generator().manual_seed(1)
    amplitudes = torch.zeros(SIZE // 64, 64)
    for row in amplitudes:
        row[torch.randperm(64, generator=generator)[:4]] = torch.randn(4, generator=generator)
    waves = torch.zeros(SIZE)
    waves[: amplitudes.numel()] = (amplitudes @ basis).flatten()
    slow = vectors(1, torch.float32, size=SIZE)[0]
    still = replica_of(RULE, slow, codec="dct")
    moved = replica_of(RULE, slow + 1.0, fast=slow + 1.0 + 0.1 * waves, codec="dct")
    before = still.slow.clone()
    meet([still, moved])
    change = still.commit(1.0) + 0.0
    found = change - 0.5 * 0.5 * 0.1 * waves
    whole = (found.abs() > 0.1).view(-1)
    pulled = whole[: 37 * BLOCK].view(-1, BLOCK).float().mean(1) > 0.99
    assert int(pulled.sum()) + int(bool(whole[37 * BLOCK :].all())) == 3
    assert float((found[whole] - 0.25).abs().max()) < 0.05
    assert float(found[~whole].abs().max()) < 2e-3
    assert torch.allclose(still.slow, before + change, atol=1e-6)


@pytest.mark.parametrize("kind", ["gaussian", "one large value", "equal"])
def test_a_sign_and_a_scale_hold_most_of_a_motion_whatever_it_is_like(kind: str) -> None:
    """2/π of a Gaussian block's energy, after the rotation of most blocks': what has not crossed is 1 − 2/π of it. What
    is given back is a sign times one scale, and the nearest such to the motion."""
    rows = torch.randn(50, BLOCK, generator=torch.Generator().manual_seed(5)) * 1e-3
    if kind == "one large value":
        rows[:, 7] = 1.0
    elif kind == "equal":
        rows[:] = 2.5
    motion = Signs("e")
    wire = motion.encode(rows)
    crossed = motion.difference(wire, torch.zeros_like(wire))
    left = (rows - crossed).square().sum(1) / rows.square().sum(1)
    assert wire.shape == (50, Signs.bytes_per_block)
    if kind == "gaussian":
        assert float(left.mean()) == pytest.approx(1 - 2 / torch.pi, abs=0.01)
    assert float(left.max()) < 0.45 if kind == "gaussian" else float(left.max()) < 1.0
    for shorter in (0.9, 1.1):  # no other scale would leave less
        assert bool(((rows - shorter * crossed).square().sum(1) > (rows - crossed).square().sum(1)).all())


@pytest.mark.parametrize("codec", BOTH)
def test_nothing_waits_and_nothing_is_lost(codec: CodecName) -> None:
    """Each of four replicas has a constant and different Δ. The mean over replicas moves by all of it in every round,
    as without a codec, and the spread stays bounded."""
    size, rounds = GROUP * BLOCK + 77, 40
    group = [replica_of(RULE, vectors(1, size=size)[0], codec=codec) for _ in range(4)]
    learnt = [0.01 * x for x in vectors(4, torch.float64, 77, size)]
    start = torch.stack([r.slow for r in group]).mean(0)
    generator = torch.Generator().manual_seed(3)
    mean, velocity = start.clone(), torch.zeros_like(start)
    late: list[float] = []
    for number in range(rounds):
        for replica, delta in zip(group, learnt, strict=True):
            replica.snapshot.copy_(replica.slow + delta)
        order = torch.randperm(4, generator=generator).tolist()
        for a, b in zip(order[::2], order[1::2], strict=True):
            step([group[a], group[b]], exchange=f"{number}/{a}")
        velocity = 0.5 * velocity + 0.5 * torch.stack(learnt).mean(0)
        mean += velocity
        late.append(spread(group))
    assert float((torch.stack([r.slow for r in group]).mean(0) - mean).abs().max()) < 1e-9
    alone = rounds * float(torch.stack(learnt).var(0).mean().sqrt())
    assert max(late) < 0.5 * alone
    assert late[-1] < 1.6 * late[rounds // 2]


PLAIN = OuterRule(0.0, 1.0, 1.0, "averaged")


def test_what_did_not_cross_goes_on_crossing() -> None:
    """Two replicas that began together have different progress: eight meetings leave a tenth of it. The windows alone
    would leave 0.21 of the variance."""
    slow = vectors(1, torch.float32, size=SIZE)[0]
    group = [replica_of(PLAIN, slow, fast=slow + 0.01 * x, codec="sign") for x in vectors(2, torch.float32, 7, SIZE)]
    apart = float((group[0].snapshot - group[1].snapshot).square().sum())
    for number in range(8):
        step(group, exchange=str(number))
    assert float((group[0].slow - group[1].slow).square().sum()) < 0.15 * apart


def test_a_copy_with_its_trail_stays_where_its_donor_is() -> None:
    """A newcomer that takes over φ, δ and trail and learns the same is not moved by its donor at all; with a trail that
    began anew it would be."""
    learnt = 0.01 * vectors(1, torch.float32, 9, SIZE)[0]
    veteran = replica_of(RULE, vectors(1, torch.float32, size=SIZE)[0], codec="sign")
    for number in range(25):
        veteran.snapshot.copy_(veteran.slow + learnt)
        step([veteran], exchange=f"alone/{number}")
    moved: list[float] = []
    for trail in (veteran.trail, None):
        newcomer = replica_of(RULE, veteran.slow, codec="sign")
        newcomer.load(veteran.slow, veteran.momentum, trail)
        for replica in (veteran, newcomer):
            replica.snapshot.copy_(replica.slow + learnt)
        meet([veteran, newcomer])
        moved.append(newcomer.difference_norm())
    assert moved[0] == 0.0
    assert moved[1] > 0.5 * newcomer.own_motion()


@pytest.mark.parametrize("codec", BOTH)
def test_the_spread_shrinks_by_the_window_alone(codec: CodecName) -> None:
    """No progress, only different φ: halved where the window was, so a sixteenth of the variance goes each round."""
    group = replicas(8, OuterRule(0.0, 0.0, 1.0, "averaged"), codec, size=SIZE)
    for replica in group:
        replica.snapshot.copy_(replica.slow)
    before, generator = spread(group), torch.Generator().manual_seed(2)
    for number in range(5):
        order = torch.randperm(8, generator=generator).tolist()
        for a, b in zip(order[::2], order[1::2], strict=True):
            step([group[a], group[b]], exchange=f"{number}/{a}")
    expected = (1 - 4 / 7 / GROUP) ** 5  # c = 4/7 of a deviation's variance where two of eight meet
    assert (spread(group) / before) ** 2 == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("name", BOTH)
def test_cutting_into_chunks_of_whole_groups_changes_nothing(name: CodecName) -> None:
    """The bits are equal in one piece and by groups of blocks. The window's blocks, which lie a thousandth apart, are
    right in every group."""
    codec = CODECS[name]
    own, apart = vectors(2, torch.float32, 3, SIZE)
    other = own + 1e-3 * apart
    coding = codec.coding("e", SIZE, [codec.sketch("e", own), codec.sketch("e", other)])

    def found(chunk: int) -> Tensor:
        arrived: list[Tensor] = []
        for first in range(0, SIZE, chunk):
            part = slice(first, first + chunk)
            wires = [coding.encode(values[part], first, values[part]) for values in (other, own)]
            arrived.append(coding.difference(wires[0], wires[1], first))
        return torch.cat(arrived)

    whole = found(3 * GROUP * BLOCK)
    assert torch.equal(found(GROUP * BLOCK), whole)
    exact = (whole - 1e-3 * apart).abs() < 6e-4  # where only the pull differs, the other blocks find nothing
    per_block = exact[: 37 * BLOCK].view(-1, BLOCK).float().mean(1)
    assert [int((group > 0.9).sum()) for group in per_block.split(GROUP)][:2] == [1, 1]


def test_bytes_by_blocks() -> None:
    """One block alone crosses whole; sixteen are one whole and fifteen by their motion."""
    assert decoupled_bytes(1, 8, 192) == BLOCK
    assert decoupled_bytes(GROUP, 8, 192) == BLOCK + 15 * 16 * 4 * 3
    assert decoupled_bytes(GROUP, 4, 130) == BLOCK // 2 + 15 * (128 + 2)
