"""Several looks at stages that are seen in part: each time it is another part, and together they tell more than one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from noloco_node.directory.bucket_turns import SAMPLED_AGAIN
from noloco_node.directory.buckets import KEPT
from noloco_node.identity.peer_id import PeerId
from noloco_node.placement.balancing import Server, Supply, supply_of

RECOUNTED = KEPT * SAMPLED_AGAIN
"""After so many record lives a stage's number is that of other buckets. Within that time no look is a wholly new one,
whichever peers are seen."""


@dataclass(slots=True)
class _StageSeen:
    """What was seen of one stage."""

    looks: int = 0
    strength: float = 0.0
    """Sum over the looks."""
    variance: float = 0.0
    independent: float = 0.0
    """So many looks that have nothing in common would tell as much."""
    peers: frozenset[PeerId] = frozenset()
    at: float = -math.inf


@dataclass(slots=True)
class SupplyHistory:
    """What one node has seen of all stages since it began. Times are seconds on a clock that never goes back."""

    record_seconds: float
    """Life of a record."""
    _began: float | None = None
    _stages: dict[int, _StageSeen] = field(default_factory=dict[int, _StageSeen])

    def age(self, now: float) -> float:
        """Seconds since the first look."""
        return now - self._began if self._began is not None else 0.0

    def look(self, now: float, servers: Sequence[Server], work: Sequence[float]) -> Supply:
        """What the stages have by this look and those before; a stage that is seen whole as it is now."""
        supply = supply_of(servers, work)
        self._began = now if self._began is None else self._began
        if not supply.errors:
            self._stages.clear()
            return supply
        strengths, errors = list(supply.strength), list(supply.errors)
        for stage, error in enumerate(supply.errors):
            if error <= 0.0:
                self._stages.pop(stage, None)
                continue
            seen = self._stages.setdefault(stage, _StageSeen())
            peers = frozenset(server.peer for server in servers if server.stage == stage)
            since = (now - seen.at) / (RECOUNTED * self.record_seconds)
            _take(seen, peers, supply.strength[stage], error, since)
            seen.at = now
            strengths[stage] = seen.strength / seen.looks
            errors[stage] = math.sqrt(seen.variance / seen.looks / seen.independent)
        return Supply(tuple(strengths), supply.work, tuple(errors))


def _take(seen: _StageSeen, peers: frozenset[PeerId], strength: float, error: float, since: float) -> None:
    fresh = min(since, len(peers - seen.peers) / max(1, len(peers)))
    seen.independent += fresh if seen.looks else 1.0
    seen.looks += 1
    seen.strength += strength
    seen.variance += error * error
    seen.peers = peers
