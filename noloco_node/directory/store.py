"""The signed records that a node holds, for itself and for others: bounded, and hard to fill with strangers' keys.

Records cost their signers nothing. If places are short, what counts is this node's knowledge of the signer: that it
works, that it answers, that it brought its record itself. Among equals chance takes one from the half that came last.
Those that were there first keep their places, and in the other half no crowd keeps a newcomer out.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import TypeVar

from noloco_node import ambient
from noloco_node.ambient import LOOK_SECONDS
from noloco_node.directory.buckets import CROWDED
from noloco_node.directory.records import PeerRecord
from noloco_node.identity.peer_id import PeerId
from noloco_node.peers.scorecard import ANSWER_SECONDS, SILENCES_TOLERATED, PeerStats
from noloco_node.tallies import EXAMINED

T = TypeVar("T")

MOST_RECORDS = 512
"""At most so many records are held under one key."""
MOST_HEARSAY = CROWDED
"""One peer may bring so many records of others under one key, if this node knows nothing more of the others. A bucket
may be read from one of its holders alone, which brings as many as show that it is crowded."""
MOST_IN_ALL = 32 * MOST_RECORDS
"""At most so many records are held, of the stages of all runs: a seed holds those of other people's."""


class Esteem(IntEnum):
    """What is known of a record's signer, the least first."""

    SILENT = -1
    """Somebody else brought the record, and this node's calls to the signer came to nothing."""
    HEARSAY = 0
    """Somebody else brought the record."""
    DIRECT = 1
    """The signer brought it itself, over its own link."""
    KNOWN = 2
    """It has answered this node, or has brought its record for a while."""
    WORKS = 3
    OWN = 4


def hearsay(_peer: PeerId) -> Esteem:
    """The esteem of a peer in a node that has dealt with nobody."""
    return Esteem.HEARSAY


def esteem_by(known: PeerStats) -> Callable[[PeerId], Esteem]:
    """What is known of a peer by its dealings with this node alone."""

    def esteem(peer: PeerId) -> Esteem:
        if known.works(peer):
            return Esteem.WORKS
        if known.answers(peer):
            return Esteem.KNOWN
        return Esteem.HEARSAY if known.of(peer).silences <= SILENCES_TOLERATED else Esteem.SILENT

    return esteem


class NoRoom(StrEnum):
    """Why a record of another was not taken in, or gave way to one that was."""

    PLACES = "places"
    """Every place of its key, or of all keys, is taken."""
    BRINGER = "bringer"
    """The peer that brought it had brought as many records of others as one may bring."""
    CHECKS = "checks"
    """No more new signatures are checked for now, of the peer that brought it or of its kind."""


@dataclass(slots=True)
class HeldRecord:
    """One record. Expiry in DHT time, seconds; `signed` is what its owner signed."""

    record: PeerRecord
    signed: bytes
    expires: float
    storer: PeerId
    """The peer that brought it when it took its place."""
    first_direct: float | None = None
    """When its signer first brought it itself."""
    last_direct: float = 0.0
    since: float = -math.inf
    """When this record, with this expiry, came here: monotonic seconds."""
    placed: float = -math.inf
    """When its signer took its place: monotonic seconds."""


class RecordStore:
    """Records by key and signer. `esteem` says what is known of a peer; DHT time is handed in.

    Whatever end a record claims, it lives `longest` seconds of the monotonic `clock` here, unless a newer one comes in
    time. The room that is left for clocks that differ is no life for ghosts.
    """

    def __init__(
        self,
        own: PeerId,
        esteem: Callable[[PeerId], Esteem],
        rng: random.Random,
        *,
        longest: float = math.inf,
        clock: Callable[[], float] = ambient.monotonic,
        most_records: int = MOST_RECORDS,
        most_in_all: int = MOST_IN_ALL,
    ) -> None:
        self._own = own
        self._esteem = esteem
        self._rng = rng
        self._longest, self._clock = longest, clock
        self._most_records, self._most_in_all = most_records, most_in_all
        self._rows: dict[bytes, dict[PeerId, HeldRecord]] = {}
        self._hearsay: dict[tuple[bytes, PeerId], dict[PeerId, None]] = {}
        """By key and bringer: the signers of records that were brought by other peers than their signers."""
        self.no_room = Counter[NoRoom]()
        """Records so far that were not taken in or gave way, by what had no room."""
        self._count = 0
        self._swept = 0.0
        """When all ended records were last cleared away."""

    def __len__(self) -> int:
        return self._count

    def count(self, key: bytes) -> int:
        """Records under `key`; the life of some may have ended."""
        return len(self._rows.get(key, ()))

    def held(self, key: bytes, signer: PeerId) -> HeldRecord | None:
        """What is held of `signer` under `key`; its life may have ended."""
        return self._rows.get(key, {}).get(signer)

    def live(self, key: bytes, now: float) -> Mapping[PeerId, HeldRecord]:
        """All records under `key` that live, by signer."""
        self._drop_ended(key, now)
        return dict(self._rows.get(key, {}))

    def best_first(self, rows: list[tuple[PeerId, HeldRecord]], now: float) -> list[tuple[PeerId, HeldRecord]]:
        """Those of these held records that this node may hand on, best-known signers first, equals by chance.

        Nobody's word is passed on, since it would have no end.
        """
        self._rng.shuffle(rows)
        known = [(self.esteem_of(signer, held, now), signer, held) for signer, held in rows]
        known.sort(key=lambda row: -row[0])
        return [(signer, held) for esteem, signer, held in known if esteem > Esteem.HEARSAY]

    def esteem_of(self, signer: PeerId, held: HeldRecord, now: float) -> Esteem:
        """What is known of the signer of a record that is held."""
        if signer == self._own:
            return Esteem.OWN
        known = self._esteem(signer)
        if known >= Esteem.KNOWN or held.first_direct is None:
            return known
        # A peer that has brought its own record for as long as an answer counts, again and again, is known by that.
        regular = held.last_direct - held.first_direct >= ANSWER_SECONDS and now - held.last_direct < ANSWER_SECONDS
        return Esteem.KNOWN if regular else Esteem.DIRECT

    def standing(self, peer: PeerId) -> Esteem:
        """What is known of a peer by itself, whatever it has brought."""
        return self._esteem(peer)

    def forget(self, key: bytes, signer: PeerId) -> None:
        """Hold nothing of `signer` under `key`."""
        if self.held(key, signer) is not None:
            self._drop(key, signer)

    def touch(self, held: HeldRecord, signer: PeerId, storer: PeerId, now: float) -> None:
        """`storer` brought what is held already."""
        if storer == signer:
            held.first_direct = now if held.first_direct is None else held.first_direct
            held.last_direct = now

    def put(self, key: bytes, signer: PeerId, row: HeldRecord, now: float) -> bool:
        """Take in a checked record that `row.storer` brought; False where there is no place for it, or one that
        expires no earlier is held."""
        old = self.held(key, signer)
        if old is not None and old.expires > now:
            self.touch(old, signer, row.storer, now)
            if row.expires <= old.expires:
                return False
            old.record, old.signed, old.expires = row.record, row.signed, row.expires
            old.since = self._clock()
            return True
        if old is not None:
            self._drop(key, signer)
        self.touch(row, signer, row.storer, now)
        if not self._make_room(key, signer, row, now):
            return False
        row.since = row.placed = self._clock()
        self._rows.setdefault(key, {})[signer] = row
        self._count += 1
        if row.storer != signer:
            self._hearsay.setdefault((key, row.storer), {})[signer] = None
        return True

    def _make_room(self, key: bytes, signer: PeerId, row: HeldRecord, now: float) -> bool:
        esteem = self.esteem_of(signer, row, now)
        if esteem is Esteem.OWN:
            return True
        if esteem <= Esteem.HEARSAY and len(self._hearsay.get((key, row.storer), ())) >= MOST_HEARSAY:
            self._keep_hearsay_bounded(key, row.storer, now)
        if len(self._rows.get(key, ())) >= self._most_records:
            self._drop_ended(key, now)
        if len(self._rows.get(key, ())) >= self._most_records:
            return self._give_up_place([key], esteem, now)
        if self._count >= self._most_in_all:
            self._drop_all_ended(now)
        if self._count >= self._most_in_all:
            return self._give_up_place(self._sampled(self._rows), esteem, now)
        return True

    def _keep_hearsay_bounded(self, key: bytes, storer: PeerId, now: float) -> None:
        """A new record of hearsay takes the place of one that the same peer brought before, of equals by chance.

        By chance, since an id can be sought. Only a few are examined, since a peer may bring many, again and again; if
        none of them is hearsay any more, little else is.
        """
        rows, among = self._rows[key], self._sampled(self._hearsay[key, storer])
        of = {signer: self.esteem_of(signer, rows[signer], now) for signer in among}
        victim = min(among, key=of.__getitem__)
        if of[victim] <= Esteem.HEARSAY:
            self.no_room[NoRoom.BRINGER] += 1
            self._drop(key, victim)

    def _give_up_place(self, keys: Sequence[bytes], esteem: Esteem, now: float) -> bool:
        """Give up the place of a record under one of these keys for a newcomer of this `esteem`; True if there was one.

        A signer that is more than hearsay always gets a place, or newcomers would be shut out of a full stage. Only a
        small share of the places falls to the least known signers. All others are left alone while one of theirs is
        among those examined. Of equals the half that has been there longer stays: a later crowd that answers like all
        others takes no place from it.
        """
        self.no_room[NoRoom.PLACES] += 1
        rows = {(key, signer): held for key in keys for signer, held in self._rows[key].items() if signer != self._own}
        among = self._sampled(rows)
        if not among:
            return False
        of = {place: self.esteem_of(place[1], rows[place], now) for place in among}
        least = min(of.values())
        if esteem <= Esteem.HEARSAY and least > esteem:
            return False
        equals = sorted((place for place in among if of[place] is least), key=lambda place: rows[place].placed)
        self._drop(*self._rng.choice(equals[len(equals) // 2 :]))
        return True

    def _sampled(self, among: Iterable[T]) -> list[T]:
        every = list(among)
        return self._rng.sample(every, min(EXAMINED, len(every)))

    def _drop_all_ended(self, now: float) -> None:
        """Looks at everything, so not at every record of a flood."""
        if abs(now - self._swept) < LOOK_SECONDS:
            return
        self._swept = now
        for key in list(self._rows):
            self._drop_ended(key, now)

    def _drop_ended(self, key: bytes, now: float) -> None:
        oldest = self._clock() - self._longest
        rows = self._rows.get(key, {}).items()
        ended = [
            signer for signer, held in rows if held.expires <= now or (held.since < oldest and signer != self._own)
        ]
        for signer in ended:
            self._drop(key, signer)

    def _drop(self, key: bytes, signer: PeerId) -> None:
        rows = self._rows[key]
        held = rows.pop(signer)
        self._count -= 1
        if held.storer != signer:
            brought = self._hearsay[key, held.storer]
            del brought[signer]
            if not brought:
                del self._hearsay[key, held.storer]
        if not rows:
            del self._rows[key]
