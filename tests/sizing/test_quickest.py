"""Advice on codec and H is what the laboratory measured and what the link lets through, and no more."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deploy.loss_table import made
from noloco_node.config.load import Config, load_config
from noloco_node.sizing.advice import expect, outlook_on
from noloco_node.sizing.footprint import footprint_of
from noloco_node.sizing.loss_table import TABLE, loss_table
from noloco_node.sizing.quickest import LEVEL
from noloco_node.sizing.utilisation import Link

SPEED = 1e12
MBITS = (0.1, 1.0, 5.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 10_000.0)
SHAPES = ((), ("run.model.stages=1",), ("run.outer.codec=int4", "run.outer.inner_steps=64"))


def tiny(*overrides: str) -> Config:
    return load_config(Path("tiny"), overrides)


def link(mbit: float) -> Link:
    return Link(mbit * 125e3, 0.1)


def test_the_table_is_what_its_command_makes_of_the_results() -> None:
    """But for the day on which they were committed."""
    held = json.loads(TABLE.read_text())
    del held["date"]
    assert held == made()


def test_of_one_family_a_larger_h_is_never_sooner_nor_better() -> None:
    """And between two that were measured lies what is between them."""
    for family in loss_table().families:
        losses = [point.loss for point in family.points]
        tokens = [point.tokens or float("inf") for point in family.points]
        assert losses == sorted(losses)
        assert tokens == sorted(tokens)
        low, high = family.points[:2]
        between = family.at((low.inner_steps * high.inner_steps) ** 0.5)
        assert between is not None
        assert between.loss == pytest.approx((low.loss + high.loss) / 2)
        assert family.at(low.inner_steps / 2) is None
        assert family.at(family.points[-1].inner_steps * 2) is None


@pytest.mark.parametrize("shape", SHAPES, ids=["two stages", "one stage", "seldom"])
def test_a_thinner_link_never_advises_more_bytes(shape: tuple[str, ...]) -> None:
    """An inner step; neither with the codec and H alone nor with all settings."""
    config = tiny(*shape)
    found = [expect(config, link(mbit), SPEED).quickest for mbit in MBITS]
    assert any(found)
    for which in (0, 1):
        sent = [advice[which].sent for advice in found if len(advice) > which]
        assert sent == sorted(sent)


@pytest.mark.parametrize("mbit", [5.0, 50.0, 1000.0])
@pytest.mark.parametrize("shape", SHAPES, ids=["two stages", "one stage", "seldom"])
def test_advice_is_valid_gives_what_it_says_and_is_content_with_itself(shape: tuple[str, ...], mbit: float) -> None:
    """Tokens to the loss by tokens a second, of the file with those settings; which then needs no others."""
    config, on = tiny(*shape), link(mbit)
    for advice in expect(config, on, SPEED).quickest:
        changed = tiny(*shape, *advice.settings)
        taken: list[float] = []
        for run in (config, changed):
            outlook = outlook_on(run, footprint_of(run.run), on, SPEED)
            family = loss_table().family_of(run.run)
            point = None if family is None else family.at(outlook.inner_steps)
            if point is not None and point.tokens is not None:
                taken.append(point.tokens / outlook.microbatches_a_second)
        if len(taken) == 2:
            assert advice.time == pytest.approx(taken[1] / taken[0])
            assert advice.time <= LEVEL
        after = expect(changed, on, SPEED).quickest
        assert after[0].settings == (), "the codec and H cannot be bettered"
        assert changed.run.inner.learning_rate == pytest.approx(
            config.run.inner.learning_rate * (0.5 if "run.inner.beta1=0.0" in advice.settings else 1.0)
        )
