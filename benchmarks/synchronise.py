"""What it takes to synchronise replicas in pairs, and all of them at once: the claims of NoLoCo's paper, computed anew.

    python -m benchmarks.synchronise --out benchmarks/results/synchronise.json

A message takes a log-normal time. In pairs each of two sends its tensors to the other. All at once is done over a
binomial tree (towards the root and back, as the paper compares) or around a ring (where each message carries an n-th,
which is what those use whom bandwidth binds). Times are carried through the rounds as they depend on each other
(max-plus), with a random number for each message. Nothing here is code of the node: `noloco-node simulate` runs that.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.command import command, not_negative, parser_of, positive, save, whole

Times = NDArray[np.float64]
"""Trials x replicas, seconds."""
Draw = Callable[[tuple[int, ...]], Times]
"""Times of messages, or of inner steps, in that shape."""

SIZES = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
ROUND_TRIPS = (0.01, 0.05, 0.1, 0.2)


def log_normal(rng: np.random.Generator, mean: float, sigma: float) -> Draw:
    """Log-normal times of this mean (seconds); `sigma` is the deviation of their logarithm."""
    return lambda shape: rng.lognormal(math.log(mean) - sigma**2 / 2, sigma, shape)


def in_pairs(ready: Times, message: Draw) -> Times:
    """When each replica has the tensors of the one it was paired with, where replicas 2i and 2i + 1 meet and begin as
    soon as both are ready; an odd one out is done at once."""
    done = ready.copy()
    both = ready.shape[1] // 2 * 2
    begun = np.maximum(ready[:, 0:both:2], ready[:, 1:both:2])
    done[:, 0:both:2] = begun + message(begun.shape)
    done[:, 1:both:2] = begun + message(begun.shape)
    return done


def by_tree(ready: Times, message: Draw) -> Times:
    """When each of n = 2^k replicas has the mean of all, over a binomial tree with its root at replica 0."""
    done, n = ready.copy(), ready.shape[1]
    strides = [1 << level for level in range(n.bit_length() - 1)]
    if 1 << len(strides) != n:
        raise ValueError(f"a binomial tree of {n} replicas: their number must be a power of two")
    for stride in strides:
        parents, children = done[:, 0 :: 2 * stride], done[:, stride :: 2 * stride]
        np.maximum(parents, children + message(children.shape), out=parents)
    for stride in reversed(strides):
        parents = done[:, 0 :: 2 * stride]
        done[:, stride :: 2 * stride] = parents + message(parents.shape)
    return done


def by_ring(ready: Times, message: Draw) -> Times:
    """When each replica has the mean of all, around a ring: 2 (n - 1) rounds, each waiting for its neighbour's."""
    done = ready.copy()
    for _ in range(2 * (ready.shape[1] - 1)):
        done = np.maximum(done, np.roll(done, 1, axis=1) + message(done.shape))
    return done


@dataclass(frozen=True)
class Synchronised:
    """Mean seconds from the moment that all are ready until the last replica is done, and of a pair."""

    replicas: int
    sigma: float
    pair: float
    tree: float


def latencies(rng: np.random.Generator, sigma: float, trials: int) -> list[Synchronised]:
    """Messages of mean 1, all ready at once: mean of a pair's two, and of all replicas of a tree."""
    found: list[Synchronised] = []
    for n in SIZES:
        ready, message = np.zeros((trials, n)), log_normal(rng, 1.0, sigma)
        pair = in_pairs(ready, message).reshape(trials, -1, 2).max(axis=2).mean()
        found.append(Synchronised(n, sigma, float(pair), float(by_tree(ready, message).max(axis=1).mean())))
    return found


@dataclass(frozen=True)
class Course:
    """Share of the time that devices work, with H inner steps between two synchronisations, which block."""

    replicas: int
    round_trip: float
    pair: float
    tree: float
    ring: float
    barrier: float
    """All wait for the last, and sending costs nothing: what a barrier takes by itself."""
    pair_barrier: float
    """The same of a pair that waits for its slower half."""


def working_share(rng: np.random.Generator, replicas: int, round_trip: float, options: argparse.Namespace) -> Course:
    """Inner steps of mean 1 s with log-normal times; every round replicas are paired anew."""
    step = log_normal(rng, 1.0, options.step_sigma)
    latency = log_normal(rng, round_trip / 2, options.sigma)
    slow = log_normal(rng, 1.0, options.sigma)
    send = options.mbytes * 8 / options.mbit
    ring_send = send / replicas

    def message(shape: tuple[int, ...]) -> Times:
        return latency(shape) + send * slow(shape)

    def part(shape: tuple[int, ...]) -> Times:
        return latency(shape) + ring_send * slow(shape)

    def nothing(shape: tuple[int, ...]) -> Times:
        return np.zeros(shape)

    def share(synchronise: Callable[[Times], Times]) -> float:
        at, rounds = np.zeros((options.trials, replicas)), options.rounds
        worked = np.zeros_like(at)
        for _ in range(rounds):
            order = rng.permutation(replicas)
            at, worked = at[:, order], worked[:, order]
            steps = step((options.trials, replicas, options.inner_steps)).sum(axis=2)
            worked += steps
            at = synchronise(at + steps)
        return float(worked.mean() / at.mean())

    def wait_for_all(ready: Times) -> Times:
        return np.broadcast_to(ready.max(axis=1, keepdims=True), ready.shape).copy()

    return Course(
        replicas,
        round_trip,
        share(lambda ready: in_pairs(ready, message)),
        share(lambda ready: by_tree(ready, message)),
        share(lambda ready: by_ring(ready, part)),
        share(wait_for_all),
        share(lambda ready: in_pairs(ready, nothing)),
    )


def main() -> None:
    """Compute both tables, print them, write the figures."""
    parser = parser_of(__doc__)
    parser.add_argument("--sigma", type=not_negative, default=0.7, help="deviation of the log of a message's time")
    parser.add_argument("--step-sigma", type=not_negative, default=0.5, help="the same of an inner step's")
    parser.add_argument("--inner-steps", type=whole, default=50)
    parser.add_argument("--mbytes", type=positive, default=100.0, help="of one replica's tensors")
    parser.add_argument("--mbit", type=positive, default=100.0, help="Mbit/s of a link")
    parser.add_argument("--rounds", type=whole, default=40)
    parser.add_argument("--trials", type=whole, default=20)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rng = np.random.default_rng(options.seed)
    times = [latencies(rng, sigma, 2000) for sigma in (0.25, 0.5, 1.0)]
    print("| replicas | " + " | ".join(f"tree / pair, σ {row[0].sigma:g}" for row in times) + " |\n|---|---|---|---|")
    for each in zip(*times, strict=True):
        print(f"| {each[0].replicas} | " + " | ".join(f"{one.tree / one.pair:.1f}" for one in each) + " |")
    courses = [working_share(rng, n, trip, options) for n in (8, 64, 512) for trip in ROUND_TRIPS]
    print("\n| replicas | round trip | pairs | tree | ring | a barrier alone | a pair's alone |\n" + "|---" * 7 + "|")
    for one in courses:
        shares = (one.pair, one.tree, one.ring, one.barrier, one.pair_barrier)
        print(f"| {one.replicas} | {1e3 * one.round_trip:.0f} ms | " + " | ".join(f"{s:.3f}" for s in shares) + " |")
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    found = {"latencies": [asdict(one) for row in times for one in row], "courses": [asdict(c) for c in courses]}
    save(options.out, settings | found)


if __name__ == "__main__":
    command(main)
