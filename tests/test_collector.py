"""While libraries are loaded nothing is collected, and afterwards they are not gone through again."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from noloco_node.process_memory import loading

LOADED = "tests.a_library"


@pytest.fixture
def thawed() -> Iterator[None]:
    """Nothing is frozen before and afterwards."""
    gc.unfreeze()
    yield
    gc.unfreeze()
    sys.modules.pop(LOADED, None)


@pytest.mark.usefixtures("thawed")
def test_what_is_loaded_is_gone_through_neither_meanwhile_nor_afterwards() -> None:
    """A block within the block does not go through it either; and the collector is back after an error too."""
    seen: list[str] = []

    def loads_and_fails() -> None:
        with loading():
            with loading():
                made.extend([number] for number in range(10_000))
            assert not gc.isenabled()
            sys.modules[LOADED] = ModuleType(LOADED)
            assert not seen
            raise LookupError

    made: list[list[int]] = []
    gc.callbacks.append(lambda phase, info: seen.append(phase))
    try:
        with pytest.raises(LookupError):
            loads_and_fails()
    finally:
        gc.callbacks.pop()
    assert gc.isenabled()
    assert gc.get_freeze_count() > len(made)


@pytest.mark.usefixtures("thawed")
def test_where_nothing_is_loaded_nothing_is_kept_from_the_collector() -> None:
    """What is garbage by then can still be taken away."""
    with loading():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
