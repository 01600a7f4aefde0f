"""Leanings: what is small in each answer and the same in all is found, and chance alone never is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from noloco_node.training.bounds import WINDOW, Leanings

WEIGHTS = 256


class Answers:
    """Signs of gradients that have a mean, and noise of so many dimensions, as those of honest peers do."""

    def __init__(self, seed: int, dimensions: int = 64) -> None:
        self._chance = torch.Generator().manual_seed(seed)
        self._noise = self._drawn(dimensions, WEIGHTS) / dimensions**0.5
        self.mean = 0.2 * self._drawn(WEIGHTS)
        self.lean = self._drawn(WEIGHTS)

    def _drawn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._chance)

    def one(self, lean: float = 0.0) -> Tensor:
        """The signs that an answer brings about, with so many times the noise's size in one direction."""
        return (self.mean + self._drawn(len(self._noise)) @ self._noise + lean * self.lean).sign().to(torch.int8)


def found(leans: dict[str, float], answers: int, seed: int = 0) -> dict[str, int]:
    """Which of these peers are found, and after how many answers each that they give in turn."""
    book, drawn, first = Leanings(), Answers(seed), dict[str, int]()
    for number in range(answers):
        for peer, lean in leans.items():
            if book.leans(peer, drawn.one(lean)):
                first.setdefault(peer, number + 1)
    return first


@pytest.mark.parametrize("seed", range(4))
def test_honest_peers_are_never_found_and_one_that_leans_is_within_sixteen_answers(seed: int) -> None:
    """Beside two honest ones, by a lean that is as large as the noise of one answer."""
    assert not found(dict.fromkeys("abc", 0.0), 3 * WINDOW, seed)
    first = found({"a": 0.0, "b": 1.0, "c": 0.0}, WINDOW - 1, seed)
    assert set(first) == {"b"}
    assert first["b"] <= 16


def test_two_liars_of_five_are_found_and_of_two_camps_of_two_neither() -> None:
    """More than half of all that are compared must be apart from a peer."""
    assert set(found({"a": 0.0, "b": 1.0, "c": 0.0, "d": 1.0, "e": 0.0}, WINDOW - 1)) == {"b", "d"}
    assert not found({"a": 0.0, "b": 1.0, "c": 0.0, "d": 1.0}, WINDOW - 1)
    assert not found({"a": 0.0, "b": 1.0}, WINDOW - 1)


def test_what_all_learn_meanwhile_is_nobodys_lean_also_for_a_peer_that_comes_later() -> None:
    """The gradients' mean turns round within two windows."""
    book, drawn = Leanings(), Answers(1)
    other = drawn.lean * 0.2
    begin = drawn.mean
    for number in range(2 * WINDOW):
        turned = number / (2 * WINDOW)
        drawn.mean = (1.0 - turned) * begin + turned * other
        for peer in "abc" if number > WINDOW // 2 else "ab":
            assert not book.leans(peer, drawn.one()), (number, peer)


def test_a_peer_that_was_found_begins_anew() -> None:
    """One that goes on is found again and again."""
    book, drawn = Leanings(), Answers(2)
    times = 0
    for _ in range(WINDOW - 1):
        times += book.leans("liar", drawn.one(1.0))
        assert not book.leans("a", drawn.one()) | book.leans("b", drawn.one())
    assert times >= 3
