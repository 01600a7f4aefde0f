"""The birth of a run: an id that its first node draws. Two lives of one RunSpec are told apart by it.

A RunSpec's hash names what is trained, and stays the same when somebody begins the run anew with the same file. The
birth names one training of it: state, records and exchanges of another birth belong to another swarm.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Annotated

from pydantic import Field

from noloco_node import ambient

BirthId = Annotated[str, Field(pattern=r"^[0-9a-f]{24}$")]
"""Seconds since 1970 in 8 hexadecimal digits, then 16 random ones: of two births the elder sorts first."""


def draw_birth() -> str:
    """A birth of this moment."""
    return f"{min(int(ambient.wall()), 0xFFFFFFFF):08x}{ambient.token(8)}"


def born_at(birth: str) -> float:
    """When its first node drew it, by that node's clock: seconds since 1970."""
    return float(int(birth[:8], 16))


def most_named(births: Iterable[str]) -> str | None:
    """The birth that is named most often, of several the elder. None where none is named."""
    named = Counter(births)
    return min(named, key=lambda birth: (-named[birth], birth), default=None)
