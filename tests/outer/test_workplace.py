"""Where the arithmetic of an outer step is done, step after step."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch

from noloco_node.outer.workplace import HOST, Workplace

META = torch.device("meta")


class Small:
    """An accelerator with so many free bytes; what it gives the caller once it keeps for it."""

    device = META

    def __init__(self, free: int) -> None:
        self.free = free
        self.asked = 0

    def has_room(self, size: int) -> bool:
        """As many as there are."""
        self.asked += 1
        return size <= self.free

    @contextmanager
    def beside(self) -> Generator[None]:
        """Nothing is beside it."""
        yield


def refuse_on(device: torch.device, error: RuntimeError, tried: list[torch.device]) -> torch.device:
    """Work that the device refuses."""
    tried.append(device)
    if device == META:
        raise error
    return device


def test_without_memory_the_rest_of_the_step_is_for_the_host_and_the_next_one_looks_for_room() -> None:
    """Whatever else it refuses by would come again: then it is asked for nothing any more."""
    for error, next_time in ((torch.OutOfMemoryError("none"), META), (RuntimeError("unknown"), HOST)):
        place, tried = Workplace(Small(100)), list[torch.device]()
        place.begin(50)
        assert place.do(lambda device, error=error, tried=tried: refuse_on(device, error, tried)) == HOST
        assert tried == [META, HOST]
        assert place.do(lambda device: device) == HOST
        place.begin(50)
        assert place.do(lambda device: device) == next_time


def test_room_that_was_taken_once_need_not_be_free_again() -> None:
    """torch keeps it for the next step, and the device counts it as taken."""
    small = Small(100)
    place = Workplace(small)
    place.begin(80)
    small.free = 20
    place.begin(60)
    assert place.do(lambda device: device) == META
    place.begin(90)
    assert place.do(lambda device: device) == HOST
    assert small.asked == 2


def test_without_a_device_it_is_the_host() -> None:
    """As with one that has no room."""
    for place in (Workplace(), Workplace(Small(10))):
        place.begin(50)
        assert place.do(lambda device: device) == HOST
