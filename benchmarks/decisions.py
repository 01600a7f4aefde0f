"""What each decision of a node costs by the size of the swarm: microseconds of CPU, everything in memory.

    python -m benchmarks.decisions --out benchmarks/results/decisions.json

Two tables. `in a swarm`: one node among so many replicas a stage, which holds of their records what it would hold, a
sample of large stages. `handed so many`: the pure decisions themselves, given that many peers, whoever may hold them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from benchmarks.command import command, results_file, whole
from benchmarks.directory import as_table, decide_among, median_us, reading
from noloco_node.averaging.matchmaking import PairingState, Window, answer_proposal, decide
from noloco_node.directory.buckets import TARGET, StageLevel
from noloco_node.directory.peer_clocks import PeerClocks
from noloco_node.identity.peer_id import PeerId
from noloco_node.pipeline.limiter import MicrobatchLimiter
from noloco_node.pipeline.routing import Candidate, RoutingBook, choose_peer
from noloco_node.placement.balancing import Server, choose_stage, plan_move, rescue_rank, supply_of
from noloco_node.state_transfer.donor_choice import rank_donors
from noloco_node.state_transfer.messages import StateOffer

COUNTS = (10, 100, 1_000, 10_000, 100_000)
WORK = (1.0, 1.3)
FULLEST = 96
"""Records of a bucket beyond which its stage's level is raised."""


@dataclass(frozen=True)
class HandedPoint:
    """Microseconds a call of decisions that are given so many peers: medians of some repeats."""

    peers: int
    book_choose: float
    """A microbatch's next-stage peer, of a book that knows so many."""
    choose_peer: float
    """The same where each is described: what a book does for few."""
    limiter: float
    """A place for a microbatch of one of so many, and given back."""
    decide: float
    """Whom to dial for an outer step."""
    answer_proposal: float
    met: float
    """A partner's clock, believed by those of so many."""
    supply: float
    """What each stage has."""
    choose_stage: float
    plan_move: float
    rescue_rank: float
    rank_donors: float
    bucket: float
    """A bucket that was read, of a stage of so many: its level and its estimate."""


def names_of(count: int) -> list[PeerId]:
    """So many peer ids, quickly made."""
    return [PeerId(f"12D3KooW{number:044d}") for number in range(count)]


def book_of(peers: list[PeerId]) -> RoutingBook:
    """A book in which some have said what they hold."""
    book = RoutingBook("balanced", random.Random(7), lambda: 1000.0)
    book.update(peers, 0)
    for peer in random.Random(7).sample(peers, min(64, len(peers))):
        book.reported(peer, 1)
    return book


def for_each_microbatch(count: int, peers: list[PeerId]) -> dict[str, Callable[[], object]]:
    """Decisions that are taken for every microbatch, of a node that knows so many peers."""
    limiter, turn = MicrobatchLimiter(8, lambda: 1000.0), iter(range(1 << 60))
    for peer in peers[:2048]:
        place = limiter.take(peer)
        limiter.answered(peer)
        place()
    book = book_of(peers)
    return {"book_choose": book.choose, "limiter": lambda: limiter.take(peers[next(turn) % count])()}


def of_a_bucket(count: int) -> Callable[[], object]:
    """What is made of a bucket of a stage of so many: its level and how many there are."""
    level = 0 if count <= FULLEST else max(0, round(math.log2(count / TARGET)))
    stage, rng = StageLevel(random.Random(5), level), random.Random(6)
    held = min(count, max(1, count >> level))
    shift = 32 - level
    buckets = [[(b << shift) + rng.getrandbits(shift) for _ in range(held)] for b in range(min(16, 1 << level))]
    turn = iter(range(1 << 60))

    def take() -> object:
        bucket = next(turn) % len(buckets)
        stage.took(level, bucket, buckets[bucket])
        return stage.estimate

    return take


def handed(count: int) -> HandedPoint:
    """Every decision, given so many."""
    return HandedPoint(peers=count, **{name: median_us(call) for name, call in decisions_of(count).items()})


def decisions_of(count: int) -> dict[str, Callable[[], object]]:
    """Each decision by its name, to be taken once more with each call, given so many."""
    peers, rng = names_of(count), random.Random(3)
    candidates = [Candidate(peer, 0, rng.randrange(4)) for peer in peers]
    window = Window(inner_steps=8, min_inner_steps=4)
    pairing = PairingState((9,), 0, lambda: peers, engaged=False, next_try=0.0)
    clocks = [1e6 + rng.random() for _ in peers]
    seen = PeerClocks(1e5, lambda: 1e6, lambda: clocks, lambda: clocks)
    servers = [Server(peer, number % 2, 400.0 + rng.random()) for number, peer in enumerate(peers)]
    supply = supply_of(servers, WORK)
    offers = {peer: StateOffer(clock=1e6, outer_rounds=3, readers=0, places=2) for peer in peers}
    return for_each_microbatch(count, peers) | {
        "choose_peer": lambda: choose_peer("balanced", candidates, own_rank=0, now=1000.0, rng=rng),
        "decide": lambda: decide(pairing, window, now=1000.0, rng=rng),
        "answer_proposal": lambda: answer_proposal(
            own=peers[0],
            dialler=peers[-1],
            dialling=None,
            exchange_open=False,
            too_often=False,
            steps_since_outer=9,
            window=window,
            last_round=False,
        ),
        "met": lambda: seen.met(1e6),
        "supply": lambda: supply_of(servers, WORK),
        "choose_stage": lambda: choose_stage(supply, (0, 1), rng),
        "plan_move": lambda: plan_move(supply, 0, 400.0, (0, 1), rng),
        "rescue_rank": lambda: rescue_rank(servers, WORK, peers[0], 1),
        "rank_donors": lambda: rank_donors(offers, 1e5, rng),
        "bucket": of_a_bucket(count),
    }


def main() -> None:
    """Measure, print the tables, write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", type=whole, nargs="+", default=list(COUNTS), help="replicas of a stage, or peers")
    parser.add_argument("--out", type=results_file)
    options = parser.parse_args()
    if min(options.counts) < 2:
        parser.error("--counts: there is nothing to decide among fewer than 2")
    signed = reading()
    print(
        "a signed record: {bytes:.0f} bytes, {first_us:.0f} µs the first time, {again_us:.1f} again\n".format(**signed)
    )
    pure = [handed(count) for count in options.counts]
    print(f"handed so many, µs\n\n{as_table(pure)}\n", flush=True)
    placed = [asyncio.run(decide_among(count)) for count in options.counts]
    print(f"in a swarm of so many replicas a stage, µs\n\n{as_table(placed)}")
    if options.out:
        machine = {"date": time.strftime("%Y-%m-%d"), "cores": os.cpu_count(), "load": os.getloadavg()[0]}
        points = {"handed": [asdict(point) for point in pure], "in_a_swarm": [asdict(point) for point in placed]}
        found = machine | {"reading": signed} | points
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    command(main)
