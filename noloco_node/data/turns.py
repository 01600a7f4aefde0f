"""The turns in which blocks of a text are read, taken one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Protocol

from pydantic import BaseModel, ConfigDict, Field

from noloco_node.data.claims import MOST_CLAIMS, SharedPosition
from noloco_node.data.sampler import Permutation

MOST_BEGUN = MOST_CLAIMS - 1
"""So many blocks may be begun and not drawn to their end: the claim beside them is for the next one."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A slot of the endless row of blocks that a replica has taken."""

    slot: int
    block: int
    epoch: int
    """Passes over all blocks that lie before the slot."""
    start: int = 0
    """Windows of the block that were read already."""


class TurnPosition(BaseModel):
    """How far a replica has come: its slot, and the windows of that slot's block that were drawn."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    slot: Annotated[int, Field(ge=0)] = 0
    start: Annotated[int, Field(ge=0)] = 0


class Turns(Protocol):
    """Hands out the slots. `take` is called by the reader's thread, the rest by the event loop's, in the order of what
    is drawn: implementations bear both at once."""

    @property
    def position(self) -> TurnPosition | SharedPosition:
        """Where drawing goes on, for a checkpoint."""
        ...

    def take(self) -> Turn | None:
        """The next slot for this replica; None where there is none now, and the reader asks again soon."""
        ...

    def reached(self, slot: int, position: int) -> None:
        """So many windows of the slot's block have been drawn."""
        ...

    def finished(self, slot: int) -> None:
        """All of the slot's block has been drawn."""
        ...

    def empty(self, slot: int) -> None:
        """No window of the slot's block is there to be drawn. Called by the reader's thread; `finished` follows."""
        ...

    def holds(self, slot: int) -> bool:
        """Whether the slot is still this replica's; else the rest of its block is another's."""
        ...


class OwnTurns:
    """An endless walk over `count` blocks: each pass takes each once, in an order by (seed, peer id, pass)."""

    def __init__(self, count: int, seed: int, peer_id: str, begin: TurnPosition) -> None:
        assert count > 0
        self._count, self._key = count, f"blocks/{seed}/{peer_id}"
        self._slot, self._start = begin.slot, begin.start
        self.position = begin

    def take(self) -> Turn:
        """The next slot; the first one from where it was left."""
        slot, start = self._slot, self._start
        self._slot, self._start = slot + 1, 0
        epoch, place = divmod(slot, self._count)
        return Turn(slot, Permutation(self._count, f"{self._key}/{epoch}")[place], epoch, start)

    def reached(self, slot: int, position: int) -> None:
        """Goes on after these windows."""
        self.position = TurnPosition(slot=slot, start=position)

    def empty(self, slot: int) -> None:
        """Nothing: what was read before it may still be drawn."""

    def holds(self, slot: int) -> bool:
        """Always: its turns are nobody else's."""
        return slot >= 0

    def finished(self, slot: int) -> None:
        """Goes on with the next slot."""
        self.position = TurnPosition(slot=slot + 1)
