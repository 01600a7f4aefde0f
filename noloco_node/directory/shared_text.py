"""How replicas of stage 0 tell each other which blocks of the text they read: in their own signed records."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from noloco_node.data.claims import Claim, Said
from noloco_node.data.samples import SharedRows
from noloco_node.data.shared_turns import SlotEvent
from noloco_node.directory.records import MOST_SAID, Directory, LiveRecord, PeerState, SlotClaim
from noloco_node.identity.peer_id import PeerId
from noloco_node.telemetry.events import TextBlock

OVERDUE = 0.45
"""A record is overdue after this share of its life: it should be renewed at a third."""


class SharedText:
    """Between the turns of one replica and the records of its stage peers. `own` names the replica."""

    def __init__(
        self,
        turns: SharedRows,
        directory: Directory,
        own: PeerId,
        record_seconds: float,
        emit: Callable[[TextBlock], None],
    ) -> None:
        self._turns = turns
        self._directory = directory
        self._own = own
        self._life = record_seconds
        self._emit = emit
        self._known: set[PeerId] = set()
        """Stage peers that have counted: what they say when they leave counts as well."""

    @property
    def news(self) -> bool:
        """Whether the own record should be renewed before its time."""
        return self._turns.news

    @property
    def counts(self) -> dict[str, int]:
        """Slots by what became of them, and windows read twice."""
        return self._turns.counts

    def to_say(self, *, leaving: bool) -> tuple[Claim, ...]:
        """What the own record is to say; a leaving node gives everything back."""
        claims = self._turns.leave() if leaving else self._turns.claims
        self.tell()
        return claims

    def said(self, claims: tuple[Claim, ...]) -> None:
        """A record that says so was published."""
        self._turns.published(claims)

    def heard(self, counted: Iterable[PeerId], live: int) -> None:
        """The directory was read: `counted` stage peers count, `live` replicas train, this one included."""
        now, rows = self._directory.now(), self._directory.view.stages[0]
        counting = set(counted) - {self._own}
        self._known = (self._known & rows.keys()) | counting
        words = [self._word(rows[peer], now) for peer in self._known if rows[peer].expires > now]
        heard = [word for word in words if word.peer in counting or self._is_last(word, rows[PeerId(word.peer)])]
        self._turns.heard(heard, live)
        self.tell()

    def tell(self) -> None:
        """What became of blocks since, as events."""
        for source, event in self._turns.events():
            self._emit(_told(source, event))

    @staticmethod
    def _is_last(word: Said, row: LiveRecord) -> bool:
        """Tell whether the node has died: it answers nobody, and counts no more, before its record shows it."""
        return word.leaving or word.overdue or row.record.state is PeerState.DRAINING

    def _word(self, row: LiveRecord, now: float) -> Said:
        record = row.record
        claims = tuple(Claim(claim.slot, claim.position, claim.begun) for claim in record.slots)
        if record.state is PeerState.GONE or record.shown.paused:
            return Said(record.peer_id, claims, leaving=True)
        published = row.expires - self._life
        return Said(record.peer_id, claims, overdue=now - published > OVERDUE * self._life)


def in_record(claims: Iterable[Claim]) -> tuple[SlotClaim, ...]:
    """Claims as a record says them."""
    return tuple(SlotClaim(claim.slot, claim.position, claim.begun) for claim in claims)[:MOST_SAID]


def _told(source: int | None, event: SlotEvent) -> TextBlock:
    return TextBlock(
        source=source,
        slot=event.slot,
        block=event.block,
        epoch=event.epoch,
        position=event.position,
        what=event.what,
    )
