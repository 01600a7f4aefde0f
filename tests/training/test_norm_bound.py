"""The bound on what strangers send: honest norms pass, one hostile source neither passes nor raises it."""

from __future__ import annotations

import math
import random

from hypothesis import given
from hypothesis import strategies as st

from noloco_node.tallies import FEW_PEERS
from noloco_node.training.bounds import LARGEST_RISE, WINDOW, NormBound

MULTIPLE = 8.0


def honest(rng: random.Random, level: float = 1.0) -> float:
    """A norm such as honest microbatches have: within a factor of about 3 of the usual one."""
    return level * math.exp(rng.gauss(0.0, 0.35))


def test_honest_norms_are_never_touched_even_while_they_grow_a_hundredfold() -> None:
    """Growth over some hundreds of microbatches, as from random first weights, is followed."""
    rng, bound = random.Random(1), NormBound(MULTIPLE)
    for step in range(5000):
        level = min(100.0, math.exp(step / 100))
        assert bound.factor(f"peer-{step % 3}", honest(rng, level)) == 1.0
    assert bound.exceeded == 0


def test_one_hostile_source_of_three_neither_passes_nor_raises_the_bound() -> None:
    """Though it sends most of what comes, for a thousand norms, in any size."""
    rng, bound = random.Random(2), NormBound(MULTIPLE)
    for number in range(60):
        bound.factor(f"honest-{number % 2}", honest(rng))
    for number in range(1000):
        attack = 10.0 ** rng.uniform(2, 30)
        assert bound.factor("hostile", attack) * attack < MULTIPLE
        if number % 5 == 0:
            assert bound.factor(f"honest-{number % 2}", honest(rng)) == 1.0
    assert bound.usual < 2.0
    assert bound.exceeded == 1000


def test_the_larger_it_is_the_less_it_counts() -> None:
    """Beyond the bound the scaled norm falls: a gross outlier weighs less than an ordinary microbatch."""
    weighed = []
    for attack in (8.1, 20.0, 200.0, 2e6):
        bound = NormBound(MULTIPLE)
        for _ in range(9):
            bound.factor("honest", 1.0)
        weighed.append(bound.factor("hostile", attack) * attack)
    assert weighed == sorted(weighed, reverse=True)
    assert weighed[0] < MULTIPLE
    assert weighed[-1] < 1e-3


def test_small_norms_shut_out_nobody_who_is_below_the_floor() -> None:
    """One source of two that sends next to nothing must not make the other's ordinary norms look huge."""
    bound = NormBound(MULTIPLE, floor=1.0)
    for _ in range(50):
        bound.factor("hostile", 1e-20)
        assert bound.factor("honest", 1.0) == 1.0
    assert bound.factor("hostile", 100.0) < 1.0


def test_a_first_norm_that_is_a_lie_is_forgotten_as_soon_as_another_source_speaks() -> None:
    """The first sets the measure; it must not last."""
    bound = NormBound(MULTIPLE)
    bound.factor("hostile", 1e20)
    bound.factor("honest", 1.0)
    assert bound.usual == 1.0
    assert bound.factor("hostile", 1e20) < 1e-18


def test_a_first_norm_that_is_next_to_nothing_shuts_nobody_out_for_long() -> None:
    """The liar's one answer came before all others', and 1,400 honest ones after it taught nothing."""
    rng, bound = random.Random(3), NormBound(MULTIPLE)
    bound.factor("hostile", 1e-30)
    factors = [bound.factor(f"honest-{number // 2 % 3}", honest(rng)) for number in range(60)]
    assert all(factor == 1.0 for factor in factors[5:])


def test_a_lasting_change_of_all_sources_is_followed() -> None:
    """Where everyone's norms jump a hundredfold, some dozens are scaled down and then all pass again."""
    bound = NormBound(MULTIPLE)
    for number in range(90):
        bound.factor(f"peer-{number % 3}", 1.0)
    refused = 0
    while bound.factor(f"peer-{refused % 3}", 100.0) < 1.0:
        refused += 1
    assert 10 < refused < 150


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 1e30)), max_size=80))
def test_the_factor_is_sound_and_the_rise_is_bounded(norms: list[tuple[str, float]]) -> None:
    """In (0, 1], finite, and no norm of a source that is known raises what is usual by more than it may."""
    bound, known = NormBound(MULTIPLE), set[str]()
    for source, norm in norms:
        before = bound.usual
        factor = bound.factor(source, norm)
        assert 0.0 <= factor <= 1.0
        assert before == 0.0 or source not in known or bound.usual <= before * LARGEST_RISE * (1 + 1e-12)
        known |= {source} if norm > 0.0 else set()


def test_it_remembers_a_bounded_number_of_sources_and_forgets_those_that_left() -> None:
    """A source that sends nothing more has no say after a while."""
    bound = NormBound(MULTIPLE)
    for number in range(10_000):
        bound.factor(f"peer-{number}", 1.0)
    assert len(bound._norms) == FEW_PEERS
    left = NormBound(MULTIPLE)
    left.factor("gone", 1e-3)
    for _ in range(10 * WINDOW):
        left.factor("here", 1.0)
    assert left.usual == 1.0
