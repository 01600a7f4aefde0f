"""What one node makes of the buckets that it reads: which to read and write next, and a view that is a sample of each
stage.

The view also says how many records each of its rows stands for. How the keys are read and written is the directory's
affair.

While a stage lies at level 0 its whole key is read at every look, and the view is complete. Above that this node holds
two of its buckets, and reads them again before their records end. Every other minute another bucket, drawn at random,
takes the place of the older one. A bucket may be crowded because an attacker sought ids for it. It is held as any other
and counts for an ordinary one or two (`StageLevel.number`), so that it hides nobody for good.

Level 0 of a large stage is read the more rarely the larger the stage is. Otherwise all nodes would deal with the few
peers there, and ask their few holders.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from noloco_node.config.run_spec import LimitsSpec
from noloco_node.directory.buckets import (
    HELD,
    Place,
    StageLevel,
    bucket_of,
    drawn_again,
    draws,
    has_a_place,
    held_again,
    levels_to_write,
    prefix_of,
)
from noloco_node.directory.records import MAX_LIFE_SECONDS, DirectoryView, LiveRecord, Scale
from noloco_node.identity.peer_id import PeerId

NEXT_LOOK = 0.1
"""A record of a sample must still live for this part of a record's life. Records that end before the next look would be
missing from what stands for the stage."""
USUAL_LIFE = LimitsSpec().record_seconds
"""Seconds that a record lives until this node publishes one."""

_Rows = Mapping[PeerId, LiveRecord]


def root_again(level: int, life: float) -> float:
    """Seconds between two looks at level 0 of a stage that lies at a level above it, where records live so long.

    They double with each level, so that the key is read equally often however many nodes read it. They have a bound:
    two large swarms that meet may lie far apart.
    """
    return min(MAX_LIFE_SECONDS, life * (1 << level))


@dataclass(slots=True)
class _Stage:
    """One stage, as read so far. Times are DHT time, seconds."""

    level: StageLevel
    held: list[Place] = field(default_factory=list[Place])
    """Those that are read again and again, the older first; none at level 0."""
    rows: dict[Place, _Rows] = field(default_factory=dict[Place, _Rows])
    """What was found where, until its life ends."""
    read_at: dict[Place, float] = field(default_factory=dict[Place, float])
    drawn: Place | None = None
    """The bucket that is read for the number at this look."""
    drawn_at: float = -math.inf
    drawn_here: int = 0
    """Buckets of the present level that were read for the number so far."""
    renewed_at: float = -math.inf

    def age(self, place: Place, now: float) -> float:
        """Seconds since it was read."""
        return _since(self.read_at.get(place, -math.inf), now)

    def forget_ended(self, now: float, life: float) -> None:
        """Places of which no record lives any more, and when others were read, once that is long ago."""
        for place, rows in list(self.rows.items()):
            if self.read_at.get(place, now) > now or not _any_lives(rows, now):
                del self.rows[place]
        self.read_at = {
            place: at for place, at in self.read_at.items() if place.level == 0 or _since(at, now) < 2.0 * life
        }


class SampledView:
    """One node's."""

    def __init__(self, stages: int, rng: random.Random) -> None:
        self._stages = [_Stage(StageLevel(rng)) for _ in range(stages)]
        self._life = USUAL_LIFE

    def to_write(self, own: PeerId, stage: int, life: float) -> tuple[Place, ...]:
        """Under which keys this node, which serves `stage` now, publishes a record of so long a life."""
        self._life = life
        prefix, level = prefix_of(own), self._stages[stage].level
        written = levels_to_write(prefix, level.level, level.fullness)
        return tuple(Place(stage, at, bucket_of(prefix, at)) for at in written)

    def to_read(self, now: float) -> list[Place]:
        """What to read at this look."""
        wanted: list[Place] = []
        for stage, each in enumerate(self._stages):
            root, level = Place(stage, 0, 0), each.level.level
            if not level or each.age(root, now) >= root_again(level, self._life):
                wanted.append(root)
            if level or each.level.confirming:
                wanted += self._buckets_of(stage, each, now)
        return wanted

    def took(self, place: Place, rows: _Rows, now: float) -> None:
        """A place was read."""
        each = self._stages[place.stage]
        each.read_at[place] = now
        before = each.level.level
        if place == each.drawn or place.level == 0:
            each.level.took(place.level, place.bucket, [prefix_of(peer) for peer in rows])
        if place == each.drawn:
            each.drawn = None
            each.drawn_here += 1
        if each.level.level != before:
            each.held, each.drawn_here, each.drawn_at = [], 0, -math.inf
        elif place.level == each.level.level > 0:
            self._hold(each, place, now)
        if place in each.held or (place.level == 0 and not each.held):
            each.rows[place] = rows

    def view(self, now: float) -> DirectoryView:
        """All rows that live, and for how many each stands."""
        for each in self._stages:
            each.forget_ended(now, self._life)
        rows = tuple(_rows_of(each, now, self._life) for each in self._stages)
        scales = (_scale(each, here, now) for each, here in zip(self._stages, rows, strict=True))
        return DirectoryView(rows, tuple(scales))

    def _buckets_of(self, stage: int, each: _Stage, now: float) -> list[Place]:
        again = held_again(each.level.fullness, self._life)
        wanted = [place for place in each.held if each.age(place, now) >= again]
        drawn = self._drawn_of(stage, each, now)
        return wanted if drawn is None or drawn in wanted else [*wanted, drawn]

    def _drawn_of(self, stage: int, each: _Stage, now: float) -> Place | None:
        """The bucket that is read for the number, or none."""
        if each.drawn is not None and _since(each.drawn_at, now) > self._life:  # nobody answers for it
            each.drawn = None
        confirming, due = each.level.confirming, self._has_a_place(each, now)
        since, again = _since(each.drawn_at, now), drawn_again(each.level.fullness, self._life)
        draw = draws(each.drawn_here, confirming=confirming, has_place=due, since=since, again=again)
        if each.drawn is None and draw:
            each.drawn, each.drawn_at = Place(stage, *each.level.next_bucket()), now
        return each.drawn

    def _has_a_place(self, each: _Stage, now: float) -> bool:
        return has_a_place(each.level.level, len(each.held), _since(each.renewed_at, now))

    def _hold(self, each: _Stage, place: Place, now: float) -> None:
        """A drawn bucket takes the place of the older one if its time has come."""
        if place not in each.held and self._has_a_place(each, now):
            if len(each.held) >= HELD:
                each.held.pop(0)
            each.held.append(place)
            each.renewed_at = now


def _rows_of(each: _Stage, now: float, life: float) -> _Rows:
    """The longest-living row of each peer; if there are several buckets, only rows that outlive the next look."""
    merged: dict[PeerId, LiveRecord] = {}
    for rows in each.rows.values():
        for peer, row in rows.items():
            if peer not in merged or merged[peer].expires < row.expires:
                merged[peer] = row
    least = now + NEXT_LOOK * life if each.level.level else -math.inf
    return {peer: merged[peer] for peer in sorted(merged) if merged[peer].expires > least}


def _since(at: float, now: float) -> float:
    """Seconds since then; without end where that is still to come: this machine's clock has been set back."""
    return now - at if at <= now else math.inf


def _scale(each: _Stage, rows: _Rows, now: float) -> Scale:
    seen = sum(row.expires > now for row in rows.values())
    if not seen or len(each.held) >= 1 << each.level.level:  # every bucket is read: all that are there are seen
        return Scale()
    stands_for = max(1.0, each.level.number / seen)
    return Scale(stands_for, whole=each.level.level == 0 and stands_for == 1.0)


def _any_lives(rows: _Rows, now: float) -> bool:
    return any(row.expires > now for row in rows.values())
