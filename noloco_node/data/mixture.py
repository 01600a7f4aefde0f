"""Windows of several sources, of which every pass has each source's share."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from itertools import accumulate

from noloco_node.config.data_spec import PASS_WINDOWS, SHARDS, TEXT, DataSpec, apportioned
from noloco_node.data.walk import BEGINNING, Permutation, WalkPosition, WindowWalk
from noloco_node.errors import UserError


class MixedWalk:
    """An endless walk over the windows of several sources, numbered one source after the other.

    A pass takes PASS_WINDOWS of them, each source's share, in an order of its own; each source is walked as if it were
    alone, once through before any of its windows comes again. So the place in the pass says each source's place.
    """

    def __init__(
        self,
        counts: Sequence[int],
        weights: Sequence[float],
        seed: int,
        peer_id: str,
        position: WalkPosition = BEGINNING,
    ) -> None:
        """`counts`: windows of each source. ValueError where the position lies outside a pass."""
        if position.offset >= PASS_WINDOWS:
            raise ValueError(f"offset {position.offset} in a pass over {PASS_WINDOWS} windows")
        quotas = apportioned(weights, PASS_WINDOWS)
        self._ends = list(accumulate(quotas))
        self._bases = [0, *accumulate(counts)]
        self._seed, self._peer_id = seed, peer_id
        self._go_to(position)
        taken = Counter(self._source(offset) for offset in range(position.offset))
        self._walks: list[WindowWalk] = []
        for number, (count, quota) in enumerate(zip(counts, quotas, strict=True)):
            epoch, offset = divmod(position.epoch * quota + taken[number], count)
            at = WalkPosition(epoch=epoch, offset=offset)
            self._walks.append(WindowWalk.at(count, seed, f"{peer_id}/{number}", at))

    @property
    def position(self) -> WalkPosition:
        """Where the next window comes from: passes completed, and windows taken in the present one."""
        return WalkPosition(epoch=self._epoch, offset=self._offset)

    def take(self, count: int) -> list[int]:
        """The next `count` window indices."""
        return [self._next() for _ in range(count)]

    def _next(self) -> int:
        number = self._source(self._offset)
        [window] = self._walks[number].take(1)
        if self._offset + 1 == PASS_WINDOWS:
            self._go_to(WalkPosition(epoch=self._epoch + 1))
        else:
            self._offset += 1
        return self._bases[number] + window

    def _source(self, offset: int) -> int:
        return bisect_right(self._ends, self._order[offset])

    def _go_to(self, position: WalkPosition) -> None:
        self._epoch, self._offset = position.epoch, position.offset
        self._order = Permutation(PASS_WINDOWS, f"mixture/{self._seed}/{self._peer_id}/{position.epoch}")


Walk = WindowWalk | MixedWalk
"""The order in which a replica trains on windows that have numbers."""


@contextmanager
def naming_part(spec: DataSpec, number: int) -> Generator[None]:
    """A UserError within it says of which source of a mixture it is."""
    try:
        yield
    except UserError as error:
        if not spec.mixture:
            raise
        message = f"run.data.mixture[{number}]: {error.message}"
        raise UserError(error.exit_code, message, error.remedy) from error


def mixed_fingerprint(parts: Sequence[str]) -> str:
    """Of a mixture, from those of its sources in their order: of all documents, where each of these is."""
    begin = TEXT if all(part.startswith(TEXT) for part in parts) else SHARDS
    return begin + blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()
