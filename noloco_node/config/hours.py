"""The hours of the day in which a node works (`node.hours`), as text and as minutes. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

DAY = 24 * 60
"""Minutes of a day."""

_RANGE = re.compile(r"(?P<h1>\d{1,2}):(?P<m1>\d{2})\s*-\s*(?P<h2>\d{1,2}):(?P<m2>\d{2})")


class Range(NamedTuple):
    """From the one minute of the day to the other, which is no part of it. It may go over midnight."""

    begins: int
    ends: int

    def holds(self, minute: int) -> bool:
        """Whether this minute of the day lies in it."""
        if self.begins < self.ends:
            return self.begins <= minute < self.ends
        return minute >= self.begins or minute < self.ends


Hours = tuple[Range, ...]
"""Ranges that do not overlap; none stands for the whole day."""


def parse_hours(text: str) -> Hours:
    """The ranges in `22:00-07:00, 12:30-13:30`. ValueError, with a sentence for a person, where they are none, overlap,
    or never begin or end."""
    found = tuple(_parse_range(part.strip()) for part in text.split(",")) if text.strip() else ()
    for number, one in enumerate(found):
        for other in found[:number]:
            if one.holds(other.begins) or other.holds(one.begins):
                raise ValueError(
                    f"node.hours: {as_text([other])} and {as_text([one])} overlap: write them as one range"
                )
    if found and sum((one.ends - one.begins) % DAY for one in found) == DAY:
        raise ValueError(f"node.hours: '{text}' is the whole day: leave the setting out, and the node always works")
    return found


def inside(hours: Hours, minute: int) -> bool:
    """Whether a node with these hours works at this minute of the day."""
    return not hours or any(one.holds(minute) for one in hours)


def next_begin(hours: Hours, minute: int) -> int:
    """The minute of the day at which the hours begin next, for a node that has some."""
    return min((one.begins for one in hours), key=lambda begins: (begins - minute - 1) % DAY)


def as_text(hours: Sequence[Range]) -> str:
    """As a person writes them."""
    return ", ".join(f"{as_time(one.begins)}-{as_time(one.ends)}" for one in hours)


def as_time(minute: int) -> str:
    """`22:00`."""
    return f"{minute // 60:02}:{minute % 60:02}"


def _parse_range(text: str) -> Range:
    match = _RANGE.fullmatch(text)
    if match is None:
        raise ValueError(f"node.hours: '{text}' is no range of hours: write it as 22:00-07:00, several with commas")
    h1, m1, h2, m2 = map(int, match.group("h1", "m1", "h2", "m2"))
    for hour, minute in ((h1, m1), (h2, m2)):
        if minute > 59 or 60 * hour + minute > DAY:
            raise ValueError(f"node.hours: {hour:02}:{minute:02} in '{text}' is no time of the day")
    begins, ends = 60 * h1 + m1, 60 * h2 + m2
    if begins % DAY == ends % DAY:
        what = "is the whole day: leave the setting out" if begins != ends else "never comes: it ends as it begins"
        raise ValueError(f"node.hours: '{text}' {what}")
    return Range(begins % DAY, ends % DAY)
