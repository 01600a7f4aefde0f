"""A device that does the arithmetic of outer steps: the same bits, nothing left there, and the host if it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from noloco_node.outer.codec import CODECS
from tests.outer.card_exchanges import case, refuses_to_mix


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """What is to be known of each codec that may go there."""
    assert refuses_to_mix(), "tensors of two places meet there unseen"
    cases = [case(name) for name, codec in CODECS.items() if codec.on_a_device]
    assert [each["differences"]["codec"] for each in cases] == ["int8", "int4", "sign"]
    return cases


def test_a_difference_has_the_same_bits_there_and_the_opposite_ones_at_the_partner(found: list[dict[str, Any]]) -> None:
    """Or the mean over replicas would not be kept between a node with a card and one without."""
    assert all(each["differences"]["same"] and each["differences"]["opposite"] for each in found)
    assert all(each["differences"]["wires"][0] > 1 for each in found), "there are several chunks"


def test_a_step_leaves_what_it_leaves_on_the_host(found: list[dict[str, Any]]) -> None:
    """The device of this test rounds as the processor does. A sketch, made otherwise there, is nearly the same."""
    assert all(each["state"] and each["norms"][0] == each["norms"][1] for each in found)
    assert all(each["sketch apart"] < 1e-4 for each in found)


def test_nothing_is_left_on_the_device_wherever_an_exchange_ends(found: list[dict[str, Any]]) -> None:
    """Also where a chunk was not finite, which shows there."""
    assert all(not any(each["half way"].values()) for each in found)
    assert "not finite" in found[-1]["half way"]


def test_a_device_without_memory_anywhere_changes_nothing_of_a_step(found: list[dict[str, Any]]) -> None:
    """The host does that work again, and the rest of the step."""
    for each in found:
        assert each["out of memory"]["tried"] >= 4
        assert each["out of memory"]["right"]
        assert each["out of memory"]["nothing more was asked of it"]


def test_the_plan_has_the_bytes_that_a_chunk_takes(found: list[dict[str, Any]]) -> None:
    """Without so many no tensor is sent there."""
    assert all(0.8 < each["peak"] <= 1.0 for each in found), [each["peak"] for each in found]
    assert not any(each["without room"] for each in found)
