"""Which way a replica has been learning, of a stage that is looked at in part."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from noloco_node.outer import CodecName, learnt
from noloco_node.outer.learnt import LearntWay, learnt_bytes
from noloco_node.outer.modulo_codes import BLOCK
from noloco_node.outer.replica import OuterReplica
from noloco_node.outer.update import OuterRule
from tests.outer.groups import meet, replicas, vectors

BLOCKS = 512
SIZE = BLOCKS * BLOCK + 329


def looked_at(size: int, seed: int = 1) -> LearntWay:
    """After one step of the whole that brought Δ = 1 everywhere, and with the next one opened."""
    found = LearntWay(size, torch.float32, seed)
    for start in range(0, size, 100 * BLOCK):
        end = min(start + 100 * BLOCK, size)
        found.begin()
        found.learn(torch.ones(end - start), torch.zeros(end - start), start)
    return found


def test_a_part_of_a_large_stage_says_what_all_of_it_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """To a few percent: how far a difference leads back, and how far the own motion has come."""
    slow, noise, other = (vector.float() for vector in vectors(3, size=SIZE))
    fast, difference = slow + 0.5 + noise, -0.25 + 0.5 * other
    found: list[tuple[float, float]] = []
    for most in (BLOCKS + 1, 64):
        monkeypatch.setattr(learnt, "MOST_BLOCKS", most)
        way = looked_at(SIZE)
        way.begin()
        for at in range(0, SIZE, 100 * BLOCK):
            way.see(difference[at : at + 100 * BLOCK], at)
        found.append(way.taken_back(fast, slow, math.inf))
    assert found[0] == pytest.approx((0.25 * SIZE**0.5, 0.5 * SIZE**0.5), rel=0.02)
    assert found[1] == pytest.approx(found[0], rel=0.1)


def test_the_memory_does_not_grow_with_the_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is planned."""
    monkeypatch.setattr(learnt, "MOST_BLOCKS", 64)
    for size in (10 * BLOCK + 1, 64 * BLOCK, SIZE):
        held = [value for value in vars(LearntWay(size, torch.float32, 0)).values() if isinstance(value, torch.Tensor)]
        floats = sum(tensor.nbytes for tensor in held if tensor.is_floating_point())
        assert floats == learnt_bytes(size) == 8 * min(size, 64 * BLOCK)


def test_blocks_are_drawn_one_of_each_stretch_and_by_the_replicas_own_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A partner that knew them would take back everything else."""
    monkeypatch.setattr(learnt, "MOST_BLOCKS", 64)
    drawn = [
        next(value for value in vars(LearntWay(SIZE, torch.float32, seed)).values() if value.dtype == torch.int64)
        for seed in (1, 1, 2)
    ]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert (drawn[0] // (BLOCKS // 64)).tolist() == list(range(64))


@pytest.mark.parametrize("codec", ["int8", "int4", "dct", "sign"])
def test_the_codes_of_a_large_stage_say_what_its_whole_difference_would(
    codec: CodecName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How far the partner is and what is seen of it, without decoding all; and the step that is taken is the same."""
    found: list[list[Tensor]] = []
    norms: list[float] = []
    for decodes in (False, True):
        monkeypatch.setattr(learnt, "MOST_BLOCKS", 16)
        if decodes:
            monkeypatch.setattr(OuterReplica, "_sampled", lambda *_: None)
        pair = replicas(2, OuterRule(0.0, 0.7, 1.0, "averaged"), codec, size=64 * BLOCK + 5)
        meet(pair)
        own = pair[0]
        back, made = own.taken_back()
        norms += [own.difference_norm()]
        own.limit_values(1e-3)
        found.append([torch.tensor([back, made]), own.commit(0.7), own.slow])
    assert norms[0] == pytest.approx(norms[1], rel=1e-2)
    assert all(torch.equal(quick, whole) for quick, whole in zip(*found, strict=True))
