"""What stage 0 trains on and is measured by, however it comes about, and the rows of blocks that replicas share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from noloco_node.data.mixture import MixedPosition
from noloco_node.data.sampler import SamplerPosition
from noloco_node.data.shared_turns import Claim, Said, SharedPosition, SharedTurns, SlotEvent


class SharedRows:
    """Tells of several rows in one list of claims: slot s of row r of n is slot s · n + r there.

    `heard` brings the stage peers' words, `claims` is what the own record is to say.
    """

    def __init__(self, rows: Sequence[SharedTurns]) -> None:
        assert rows, "a text has a source"
        self._rows = rows

    @property
    def claims(self) -> tuple[Claim, ...]:
        """What the own record is to say."""
        return tuple(
            Claim(claim.slot * len(self._rows) + number, claim.position, claim.begun)
            for number, row in enumerate(self._rows)
            for claim in row.claims
        )

    @property
    def counts(self) -> dict[str, int]:
        """Slots by what became of them."""
        found: Counter[str] = Counter()
        for row in self._rows:
            found.update(row.counts.by_name)
        return dict(found)

    def heard(self, said: Iterable[Said], live: int) -> None:
        """The newest words of the stage peers that count, of which `live` replicas train in all, this one included."""
        words = list(said)
        for number, row in enumerate(self._rows):
            row.heard([Said(word.peer, self._of_row(number, word.claims)) for word in words], live)

    def events(self) -> list[tuple[int | None, SlotEvent]]:
        """What became of slots since they were asked for last, each with the row's number where there are several."""
        several = len(self._rows) > 1
        return [(number if several else None, event) for number, row in enumerate(self._rows) for event in row.events()]

    def _of_row(self, number: int, claims: Iterable[Claim]) -> tuple[Claim, ...]:
        count = len(self._rows)
        return tuple(Claim(c.slot // count, c.position, c.begun) for c in claims if c.slot % count == number)


Position = SamplerPosition | SharedPosition | MixedPosition
"""The position where drawing goes on. It is in a walk over numbered windows, in the row of blocks that replicas share,
or in several such rows."""

Batch = tuple[Tensor, Tensor]
"""Inputs and labels, both int64 [b, T]; the labels with marks where documents begin (`document_marks.BEGINS`)."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Stage 0's text. Windows are rows of token ids, int32 [b, T + 1], with marks where documents begin if attention
    ends there."""

    draw: Callable[[], Awaitable[Tensor]]
    """The next microbatch's windows. Raises UserError (DATA) where the text cannot be read on."""
    held_out: Tensor
    """The fixed windows of every evaluation."""
    position: Callable[[], Position] = SamplerPosition
    """Where `draw` goes on."""
    waited_seconds: Callable[[], float] = float
    """Time that drawing has had to wait for the text, so far."""
    held_out_of: tuple[tuple[str, int], ...] = ()
    """Each source's name in a mixture and the number of its held-out windows, which lie together, in this order."""
    tokens: int | None = None
    """Tokens to train on in one pass over a text; None where it is streamed."""
    blocks: int | None = None
    """The number of blocks of a text that is read in blocks; in a mixture, of the source with the fewest."""
    shared: SharedRows | None = None
    """The rows by which the replicas share the text, if they do."""
    passed_over: Callable[[], list[str]] = list
    """What could not be read, and so is not trained on, since it was asked for last; for a person."""
    close: Callable[[], None] = lambda: None
    """Read no further; may take as long as the reading of one document."""


def by_source(windows: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """Rows that lie together: so many of each source; all of them where no counts are named."""
    ends = list(accumulate(counts)) or [len(windows)]
    return [windows[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
