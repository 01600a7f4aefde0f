"""How replicas of stage 0 tell each other which blocks of the text they read: in their own signed records."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from noloco_node.data.samples import SharedRows
from noloco_node.data.shared_turns import Claim, Said, SlotEvent
from noloco_node.directory.records import Directory, SlotClaim
from noloco_node.identity.peer_id import PeerId
from noloco_node.telemetry.events import TextBlock


class SharedText:
    """Between the turns of one replica and the records of its stage peers."""

    def __init__(self, turns: SharedRows, directory: Directory, emit: Callable[[TextBlock], None]) -> None:
        self._turns = turns
        self._directory = directory
        self._emit = emit
        self._said: set[tuple[int, bool]] = set()
        """Slots in the own newest record, and whether they are begun."""

    @property
    def news(self) -> bool:
        """Whether the own record should be renewed before its time."""
        return _in_short(self._turns.claims) != self._said

    @property
    def counts(self) -> dict[str, int]:
        """Slots by what became of them."""
        return self._turns.counts

    def to_say(self) -> tuple[SlotClaim, ...]:
        """What the own record is to say, which is published now."""
        claims = self._turns.claims
        self._said = _in_short(claims)
        self.tell()
        return tuple(SlotClaim(claim.slot, claim.position, claim.begun) for claim in claims)

    def heard(self, counted: Iterable[PeerId], live: int) -> None:
        """The directory was read: `counted` stage peers count, `live` replicas train, this one included."""
        rows = self._directory.view.stages[0]
        said = [(peer, rows[peer].record.slots) for peer in counted if peer in rows]
        words = [Said(peer, tuple(Claim(c.slot, c.position, c.begun) for c in slots)) for peer, slots in said]
        self._turns.heard(words, live)
        self.tell()

    def tell(self) -> None:
        """What became of blocks since, as events."""
        for source, event in self._turns.events():
            self._emit(_told(source, event))


def _in_short(claims: Iterable[Claim]) -> set[tuple[int, bool]]:
    return {(claim.slot, claim.begun) for claim in claims}


def _told(source: int | None, event: SlotEvent) -> TextBlock:
    return TextBlock(
        source=source, slot=event.slot, block=event.block, epoch=event.epoch, position=event.position, what=event.what
    )
