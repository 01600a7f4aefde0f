"""A decision for each microbatch does not become dearer with the size of the swarm: a ratio within one run."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable

from noloco_node.directory.buckets import TARGET, StageLevel
from noloco_node.identity.peer_id import PeerId
from noloco_node.pipeline.admission import MicrobatchLimiter
from noloco_node.pipeline.routing import LoadBalancer

FEW, MANY = 100, 100_000
MOST_BY_SIZE = 5.0
"""The most that a decision for each microbatch, or look, takes among a hundred thousand beside a hundred. It was 0.9 to
1.3 when this was written. A look at everybody would take 1,000 times as long."""


def least_us(call: Callable[[], object]) -> float:
    """Microseconds of CPU of one call, the least of some turns, since others use the machine."""
    took: list[float] = []
    for _ in range(20):
        began = time.process_time()
        for _ in range(50):
            call()
        took.append(1e6 * (time.process_time() - began) / 50)
    return min(took)


def decisions(count: int) -> dict[str, Callable[[], object]]:
    """What a node does for every microbatch and every look, that knows so many peers."""
    peers = [PeerId(f"12D3KooW{number:044d}") for number in range(count)]
    balancer, limiter = LoadBalancer("balanced", random.Random(7), lambda: 1000.0), MicrobatchLimiter(8, lambda: 1000.0)
    balancer.update(peers, 0)
    for peer in peers[:2048]:
        place = limiter.take(peer)
        limiter.answered(peer)
        place()
    level = max(0, round(math.log2(count / TARGET)))
    stage, rng, turn = StageLevel(random.Random(5), level), random.Random(6), itertools.count()
    shift = 32 - level
    held = [[(bucket << shift) + rng.getrandbits(shift) for _ in range(count >> level)] for bucket in range(16)]

    def look() -> None:
        bucket = next(turn) % min(16, 1 << level)
        stage.took(level, bucket, held[bucket])
        assert stage.level == level

    return {"route": balancer.choose, "admit": lambda: limiter.take(peers[next(turn) % count])(), "look": look}


def test_decisions_for_each_microbatch_cost_the_same_among_many() -> None:
    """A look at everybody would take a thousand times as long."""
    few, many = decisions(FEW), decisions(MANY)
    for name, call in few.items():
        one, other = least_us(call), least_us(many[name])
        assert other < MOST_BY_SIZE * one, f"{name}: {one:.1f} µs among {FEW}, {other:.1f} µs among {MANY}"
