"""Windows of several sources, of which every pass has each source's share."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from hashlib import blake2b
from itertools import accumulate

from pydantic import BaseModel, ConfigDict

from noloco_node.config.data_spec import PASS_WINDOWS, SHARDS, TEXT, DataSpec, apportioned
from noloco_node.data.sampler import BEGINNING, Permutation, SamplerPosition, WindowSampler
from noloco_node.data.shared_turns import SharedPosition
from noloco_node.errors import UserError


class SourceOrder:
    """An endless order of sources: a pass takes PASS_WINDOWS windows, each source's share by its weight, in an order by
    (seed, peer id, pass)."""

    def __init__(
        self, weights: Sequence[float], seed: int, peer_id: str, position: SamplerPosition = BEGINNING
    ) -> None:
        """ValueError where the position lies outside a pass."""
        if position.offset >= PASS_WINDOWS:
            raise ValueError(f"offset {position.offset} in a pass over {PASS_WINDOWS} windows")
        self.quotas = apportioned(weights, PASS_WINDOWS)
        self._ends = list(accumulate(self.quotas))
        self._seed, self._peer_id = seed, peer_id
        self._go_to(position)

    @property
    def position(self) -> SamplerPosition:
        """Where the next window comes from: passes completed, and windows taken in the present one."""
        return SamplerPosition(epoch=self._epoch, offset=self._offset)

    def next(self) -> int:
        """The number of the source that gives the next window."""
        number = self._source(self._offset)
        if self._offset + 1 == PASS_WINDOWS:
            self._go_to(SamplerPosition(epoch=self._epoch + 1))
        else:
            self._offset += 1
        return number

    def taken(self) -> list[int]:
        """Windows of each source so far, of all passes."""
        within = Counter(self._source(offset) for offset in range(self._offset))
        return [self._epoch * quota + within[number] for number, quota in enumerate(self.quotas)]

    def _source(self, offset: int) -> int:
        return bisect_right(self._ends, self._order[offset])

    def _go_to(self, position: SamplerPosition) -> None:
        self._epoch, self._offset = position.epoch, position.offset
        self._order = Permutation(PASS_WINDOWS, f"mixture/{self._seed}/{self._peer_id}/{position.epoch}")


class MixedSampler:
    """An endless walk over the windows of several sources, numbered one source after the other.

    Sources take turns by `SourceOrder`; each is walked as if it were alone, once through before any of its windows
    comes again. So the place in the pass says each source's place.
    """

    def __init__(
        self,
        counts: Sequence[int],
        weights: Sequence[float],
        seed: int,
        peer_id: str,
        position: SamplerPosition = BEGINNING,
    ) -> None:
        """`counts`: windows of each source. ValueError where the position lies outside a pass."""
        self._sources = SourceOrder(weights, seed, peer_id, position)
        self._bases = [0, *accumulate(counts)]
        self._walks: list[WindowSampler] = []
        for number, (count, taken) in enumerate(zip(counts, self._sources.taken(), strict=True)):
            epoch, offset = divmod(taken, count)
            at = SamplerPosition(epoch=epoch, offset=offset)
            self._walks.append(WindowSampler(count, seed, f"{peer_id}/{number}", at))

    @property
    def position(self) -> SamplerPosition:
        """See `SourceOrder`."""
        return self._sources.position

    def take(self, count: int) -> list[int]:
        """The next `count` window indices."""
        return [self._next() for _ in range(count)]

    def _next(self) -> int:
        number = self._sources.next()
        [window] = self._walks[number].take(1)
        return self._bases[number] + window


class MixedPosition(BaseModel):
    """How far a replica has come in a mixture whose sources are read in blocks."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    order: SamplerPosition
    """In the order of the sources."""
    sources: tuple[SharedPosition, ...]
    """In the row of each."""


Walk = WindowSampler | MixedSampler
"""The order in which a replica trains on windows that have numbers."""


@contextmanager
def naming_source(number: int, name: str | None = None) -> Generator[None]:
    """A UserError within it says of which source of a mixture it is, by its number and the name that it may have."""
    try:
        yield
    except UserError as error:
        message = f"run.data.mixture[{number}]{f' ({name})' if name else ''}: {error.message}"
        raise UserError(error.exit_code, message, error.remedy) from error


def naming_part(spec: DataSpec, number: int) -> AbstractContextManager[None]:
    """`naming_source`, where it is a mixture."""
    return naming_source(number, spec.mixture[number].name) if spec.mixture else nullcontext()


def mixed_fingerprint(parts: Sequence[str]) -> str:
    """The fingerprint of a mixture from its sources' in their order; it covers all documents if each of these does."""
    begin = TEXT if all(part.startswith(TEXT) for part in parts) else SHARDS
    return begin + blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()
