"""The directory without those peers that this node does not deal with.

They are banned peers, outsiders of the run, nodes of another life of it, and nodes of another protocol version.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from noloco_node import PROTOCOL_VERSION
from noloco_node.directory.records import Directory, DirectoryView, LiveRecord, PeerRecord, SignedRecord
from noloco_node.identity.invitations import Proof
from noloco_node.identity.peer_id import PeerId
from noloco_node.trust.lives import OwnLife

logger = logging.getLogger(__name__)


class Screen(Protocol):
    """Says with which peers this node deals. Implementations: `Bans`, `Access`, `OwnLife`."""

    @property
    def changes(self) -> int:
        """How often any of its answers may have changed so far, time's doing included: cheap to ask."""
        ...

    def deals(self, peer: PeerId, row: LiveRecord, /) -> bool:
        """Whether this node deals with the peer of a record."""
        ...


class ScreenedDirectory:
    """Implements `Directory` over another one: its view shows only records of this protocol version that pass `screen`.

    If `life` is given, they must also be of that life of the run. A peer that is left out is neither routed to, nor
    averaged or counted with, nor asked for its state. Nobody here hears its clock. A view is screened once, and again
    when the screen has changed: every microbatch may ask for it.
    """

    def __init__(
        self, directory: Directory, screen: Screen, proof: Proof | None = None, life: OwnLife | None = None
    ) -> None:
        self._directory = directory
        self._screen = screen
        self._proof = proof
        self._life = life
        self._from: tuple[DirectoryView, int] | None = None
        self._view = DirectoryView(())
        self._another_seen = False

    @property
    def view(self) -> DirectoryView:
        """The last view read, screened."""
        return self._screened(self._directory.view)

    @property
    def no_room(self) -> Mapping[str, int]:
        """See `Directory.no_room`."""
        return self._directory.no_room

    def now(self) -> float:
        """See `Directory.now`."""
        return self._directory.now()

    async def publish(self, record: PeerRecord, life: float) -> bool:
        """See `Directory.publish`. With the record go this node's own proof that it is invited, and the birth of its
        run, if it has them."""
        shown: dict[str, object] = {} if self._proof is None else {"invitation": self._proof}
        if self._life is not None:
            shown["birth"] = self._life.birth
        return await self._directory.publish(record.model_copy(update=shown) if shown else record, life)

    async def refresh(self) -> DirectoryView:
        """Read all stages anew; the view that it returns is screened."""
        return self._screened(await self._directory.refresh())

    def to_tell(self, most: int) -> tuple[SignedRecord, ...]:
        """See `Directory.to_tell`."""
        return self._directory.to_tell(most)

    def read(self, row: SignedRecord) -> PeerRecord | None:
        """See `Directory.read`; screened. Such a record may be years old: it says nothing of the life in which its peer
        takes part now, and counts only in the life of which it is."""
        record = self._directory.read(row)
        if record is None or (self._life is not None and not self._life.bears(record)):
            return None
        passes = self._is_understood(record) and self._screen.deals(
            row.peer, LiveRecord(record, row.expires, row.signed, row.level)
        )
        return record if passes else None

    def told(self, teller: PeerId, records: Sequence[SignedRecord]) -> int:
        """See `Directory.told`."""
        return self._directory.told(teller, records)

    def _screened(self, view: DirectoryView) -> DirectoryView:
        changes = self._screen.changes + (0 if self._life is None else self._life.changes)
        if self._from is None or self._from[0] is not view or self._from[1] != changes:
            self._view = replace(view, stages=self._rows_that_pass(view.stages))
            self._from = (view, changes)
        return self._view

    def _rows_that_pass(self, stages: Sequence[Mapping[PeerId, LiveRecord]]) -> tuple[dict[PeerId, LiveRecord], ...]:
        deals = self._passes
        return tuple({peer: row for peer, row in rows.items() if deals(peer, row)} for rows in stages)

    def _passes(self, peer: PeerId, row: LiveRecord) -> bool:
        return (
            self._is_understood(row.record)
            and self._screen.deals(peer, row)
            and (self._life is None or self._life.deals(peer, row))
        )

    def _is_understood(self, record: PeerRecord) -> bool:
        theirs = record.protocol
        if theirs == PROTOCOL_VERSION:
            return True
        if not self._another_seen:
            self._another_seen = True
            logger.warning(
                "somebody announces itself in this run with protocol version %d, this node speaks %d: "
                "such nodes cannot train together, and are not counted here",
                theirs,
                PROTOCOL_VERSION,
            )
        return False
