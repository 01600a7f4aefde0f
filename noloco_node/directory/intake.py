"""What a node takes in of the records that others bring: judged one by one, at a bounded cost, and kept in bounds.

A record comes by a store, in an answer to a look-up, or told over an own link; the same holds for all three. One bad
record never takes others with it: between two honest clocks or versions that would be a weapon.
"""

from __future__ import annotations

from collections.abc import Callable

from noloco_node import ambient
from noloco_node.directory.records import PeerRecord, SignedRecord
from noloco_node.directory.store import Esteem, HeldRecord, NoRoom, RecordStore
from noloco_node.directory.validator import RecordValidator
from noloco_node.identity.peer_id import PeerId
from noloco_node.tallies import Budget, PeerBudgets

SKEW_SECONDS = 300.0
"""The clock of an honest node may be so many seconds ahead of this node's: only ghosts live longer by it."""
CHECKS_AT_ONCE, CHECKS_A_SECOND = 256.0, 32.0
"""One peer can make this node check so many new signatures at once, and so many a second, at a tenth of a millisecond
each. Honest peers bring whole keys when they meet a node, and then what has been renewed since."""
POOLS: dict[Esteem, tuple[float, float]] = {
    Esteem.HEARSAY: (512.0, 128.0),
    Esteem.DIRECT: (256.0, 64.0),
    Esteem.KNOWN: (2048.0, 512.0),
}
"""New signatures that are checked at once, and a second, for all peers of a kind together. The kinds are peers that
bring records of others, that bring their own, and that have answered this node. Each has its own pool, so that a flood
of one kind shuts nobody of another out."""


class Intake:
    """Checks records and puts them into the store. `now` gives DHT time, `known` whether a peer has answered here."""

    def __init__(
        self,
        own: PeerId,
        validator: RecordValidator,
        store: RecordStore,
        known: Callable[[PeerId], bool],
        now: Callable[[], float],
        longest_life: float,
        clock: Callable[[], float] = ambient.monotonic,
    ) -> None:
        self._own = own
        self._validator = validator
        self._store = store
        self._known = known
        self.now = now
        self._longest_life = longest_life
        self._of_peers = PeerBudgets[PeerId](CHECKS_AT_ONCE, CHECKS_A_SECOND, clock)
        self._pools = {esteem: Budget(*pool, clock) for esteem, pool in POOLS.items()}
        self.checked = 0
        """Signatures so far."""

    @property
    def latest_expiry(self) -> float:
        """DHT time beyond which no record is believed to live."""
        return self.now() + self._longest_life + SKEW_SECONDS

    def take(self, storer: PeerId, key: bytes, signer: object, signed: object, expires: object) -> bool:
        """Take in one record as `storer` brought it, of any types; whether it is held now. Never raises."""
        if not isinstance(signer, str) or not isinstance(signed, bytes) or not isinstance(expires, float):
            return False
        now, peer = self.now(), PeerId(signer)
        if not now < expires <= self.latest_expiry:
            return False
        held = self._store.held(key, peer)
        if held is not None and held.expires >= expires:
            same = held.signed == signed and held.expires == expires
            if same:
                self._store.touch(held, peer, storer, now)
            return same
        if not self._may_check(storer, peer):
            return False
        self.checked += 1
        record = self._validator.read_at(key, signer, signed, expires)
        return record is not None and self._store.put(key, peer, HeldRecord(record, signed, expires, storer), now)

    def read(self, key: bytes, row: SignedRecord) -> PeerRecord | None:
        """The record as its owner signed it for `key`; None where it did not. Nothing is taken in."""
        return self._validator.read_at(key, row.peer, row.signed, row.expires)

    def _may_check(self, storer: PeerId, signer: PeerId) -> bool:
        if storer == self._own:
            return True
        if self._known(storer):
            kind = Esteem.KNOWN
        elif storer == signer:
            kind = Esteem.DIRECT
        else:
            kind = Esteem.HEARSAY
        own, pool = self._of_peers.of(storer), self._pools[kind]
        if own.left < 1.0 or pool.left < 1.0:
            self._store.no_room[NoRoom.CHECKS] += 1
            return False
        own.spend()
        pool.spend()
        return True
