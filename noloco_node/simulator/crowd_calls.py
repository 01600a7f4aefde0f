"""Health checks of a crowd: an account of their bytes alone, in which all nodes answer.

The peers that nodes ask, how often, and what they tell follow `directory.roll_call` and `directory.records_call`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from noloco_node.directory.bucket_turns import HELD, Floats, Ints
from noloco_node.directory.health_checks import (
    ALL_TOLD,
    ASK_AGAIN,
    ASK_FOR_RECORD,
    CALLS_A_SECOND,
    LONGEST_QUIET,
)
from noloco_node.directory.records_call import FEW_TOLD, FEWEST_TOLD, MANY, MOST_TOLD
from noloco_node.transport.calls import ASKED_AT_ONCE

MESSAGE_BYTES = 119.0
"""The bytes of a call or its answer without records."""
TOLD_BYTES = 1.17
"""A told record has so many times the bytes it has in the directory: it is text, with its peer, stage and life. Both
were measured on messages of 64 whole nodes, of one record (522 bytes) and of twelve (4,950)."""

GROWN = 1.25
"""A view has grown if it is so many times as large as at the last tick: below that it is an estimate that moves."""


class Sights(NamedTuple):
    """What those that live have in their views, each a row. Numbers are of others."""

    who: Ints
    own: Floats
    """Peers in view of the own stage."""
    next: Floats
    """Peers in view of the next stage."""
    previous: Floats
    """Peers in view of the stage before it, if that is seen whole."""
    further: Floats
    """Peers in view of all other stages."""
    senders: Floats
    """Peers that send a node microbatches and are not in its view."""
    own_share: Floats
    """The part of the own stage's peers in view that has the node in view, too."""
    other_share: Floats
    """The part of all other peers in view that has the node in view, too."""
    population: Floats
    """How many there are of the two stages that a node deals with."""


def share_held(level: Ints) -> Floats:
    """Part of a near stage that a node sees which takes it to lie at this level."""
    return np.minimum(1.0, HELD / np.exp2(level))


def asks_a_second(quiet: float, heard: float) -> float:
    """How often a peer is asked a second. It is asked after `quiet` seconds without a word, and is `heard` so often a
    second besides, at times that are independent."""
    words = min(500.0, max(heard * quiet, 1e-9))
    return words / math.expm1(words) / quiet


class HealthCheckTraffic:
    """The bytes that the nodes of a crowd send in health checks.

    Of two that have each other in view one asks, and both tell. A peer that works with a node is heard without being
    asked. A newcomer to a view is asked at once, as far as calls are allowed, and told the more the fewer peers the
    asker knows.
    """

    def __init__(self, most: int, life: float, record_bytes: float) -> None:
        self._quiet = min(LONGEST_QUIET, ASK_AGAIN * life)
        self._again = ASK_FOR_RECORD * life
        self._record = TOLD_BYTES * record_bytes
        self._seen = np.zeros(most)
        """How many each had in view at the last tick."""
        self._waiting = np.zeros(most)
        """The number of peers in view that were not asked yet."""
        self._strangers = np.zeros(most)
        """The number of them that were never in view before."""
        self._met = np.zeros(most)
        """About how many living peers of its two stages each has ever had in view."""
        self._allowance = np.full(most, float(ASKED_AT_ONCE))

    def forget(self, i: int) -> None:
        """A node's view begins anew."""
        self._seen[i] = self._waiting[i] = self._strangers[i] = 0.0

    def tick(self, sights: Sights, exchanged: Floats, asks: float, born: float, seconds: float) -> float:
        """The bytes that all of them send in so many `seconds`. In that time `exchanged` peers took the places of
        others in each view. Peers of the next stage were asked for work `asks` times a second, and a share `born` of
        all living nodes came."""
        who = sights.who
        seen = sights.own + sights.next + sights.previous + sights.further
        grown = np.where(seen > GROWN * self._seen[who], seen - self._seen[who], 0.0)
        fresh = grown + exchanged + born * seen
        met = (1.0 - born) * self._met[who]
        strange = fresh * np.clip(1.0 - met / np.maximum(1.0, sights.population), 0.0, 1.0)
        self._seen[who], self._met[who] = seen, np.minimum(sights.population, met + strange)
        waiting = np.minimum(self._waiting[who] + fresh, seen)
        strangers = np.minimum(self._strangers[who] + strange, waiting)
        due = seconds * self._due(sights, asks / seconds) * (1.0 - waiting / np.maximum(1.0, seen))
        allowed = np.minimum(ASKED_AT_ONCE, self._allowance[who]) + seconds * CALLS_A_SECOND
        first = np.minimum(waiting, np.maximum(allowed / 2.0, allowed - due))
        again = np.minimum(due, allowed - first)
        to_strangers = first * strangers / np.maximum(1e-9, waiting)
        self._waiting[who], self._strangers[who] = waiting - first, strangers - to_strangers
        self._allowance[who] = allowed - first - again
        own = sights.own / np.maximum(1.0, seen)
        mutual = own * sights.own_share + (1.0 - own) * sights.other_share
        unheard = (waiting / np.maximum(1.0, seen)) ** (1.0 + mutual)  # nor has it asked
        few = np.where(seen + 1.0 >= MANY, FEWEST_TOLD, FEW_TOLD)
        some = ALL_TOLD * MOST_TOLD + (1.0 - ALL_TOLD) * few
        most = np.where(seen * (1.0 - unheard) >= MANY, some, MOST_TOLD)
        told = few * (first + again) + (most - few) * to_strangers * (1.0 - mutual / 2.0)
        return 2.0 * float((MESSAGE_BYTES * (first + again) + self._record * told).sum())

    def _due(self, sights: Sights, asks: float) -> Floats:
        """How many of the peers that it has met each would ask in a second; `asks` for work are made in a second."""
        heard = asks / max(1.0, float(sights.next.sum()))
        usual, working = 1.0 / self._quiet, asks_a_second(self._quiet, heard)
        others = (sights.next + sights.previous) * working + sights.further * usual
        own = sights.own * usual * (1.0 - sights.own_share / 2.0)
        return own + others * (1.0 - sights.other_share / 2.0) + sights.senders / self._again
