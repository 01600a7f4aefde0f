"""Two replicas over six outer steps come to the weights, losses and clocks that are written down, round by round.

What is moved, renamed or taken apart must not change what is learnt. After a deliberate change of the method:
`python -m tests.test_golden_trajectory`, and say in the commit why the figures are others.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from noloco_node.config.run_spec import LimitsSpec, OuterSpec
from noloco_node.node.replica import Replica
from noloco_node.telemetry.events import InnerStep, OuterStep
from tests.support import eventually
from tests.worlds import World, micro_spec, peer_name, world

E = TypeVar("E", InnerStep, OuterStep)

FILE = Path(__file__).parent / "fixtures" / "trajectory.json"
ROUNDS = 6
STEPS_A_ROUND = (2, 3)
"""The steps of the two replicas: their clocks and the weights of their tokens are not the same."""
WAYS: dict[str, tuple[str, dict[str, object]]] = {
    "fp32": ("fp32", {}),
    "int4": ("int4", {}),
    "fp32, muon": ("fp32", {"optimizer": "muon", "embedding_rate": 4.0, "head_rate": 2.0, "norm_rate": 3.0}),
}
"""Each way that is written down, by its name in the file: the codec, and settings of `run.inner`."""
TOLERANCE = {"fp32": 1e-6, "int4": 3e-3}
"""The tolerance by codec. A value that lies on the border of two codes of four bits falls to either side on another
processor. There norms differ by 5e-4, and single weights are not compared."""


def number_exchanges(patch: pytest.MonkeyPatch) -> None:
    """By an exchange's id, else drawn, its gauge and its dither come."""
    numbers = itertools.count(1)
    patch.setattr(secrets, "token_hex", lambda count: f"{next(numbers):0{2 * count}x}")


@asynccontextmanager
async def two_replicas(codec: str, inner: dict[str, object]) -> AsyncIterator[World]:
    """Two replicas of the only stage; they exchange when they are told to, with all the time in the world."""
    rule = {"inner_steps": 20, "min_inner_steps": 1, "alpha": 0.5, "beta": 0.5}
    spec = micro_spec(
        stages=1,
        layers=4,
        inner={"eps": 1e-5, **inner},
        outer=OuterSpec.model_validate({**rule, "codec": codec}),
        limits=LimitsSpec(chunk_bytes=4096, exchange_progress_seconds=60, record_seconds=3, grace_seconds=1),
    )
    async with world(spec, replicas=2) as made, asyncio.TaskGroup() as group:
        running = [group.create_task(replica.averaging.run()) for replica in made.replicas]
        for replica in made.replicas:
            replica.averaging.open()
        yield made
        for task in running:
            task.cancel()


def events_of(made: World, side: int, kind: type[E]) -> list[E]:
    """What one replica has emitted of this kind."""
    return [event for event in made.events[side] if isinstance(event, kind)]


async def state_of(replica: Replica) -> dict[str, Any]:
    """Where a replica is: its clock and counts, and of each vector its norm and every 2999th value."""
    progress, state = await replica.worker.joiner_state()
    vectors = {name: vector.double() for name, vector in state.items() if vector.is_floating_point()}
    counts = {"clock": progress.clock, "tokens": progress.tokens, "steps": progress.steps}
    norms = {name: float(vector.norm()) for name, vector in vectors.items()}
    samples = {name: vectors[name][::2999].tolist() for name in ("fast", "slow")}
    return {**counts, "norms": norms, **(samples if replica.worker.outer.codec.name == "fp32" else {})}


async def one_round(made: World, number: int) -> dict[str, Any]:
    """Both train, one of them dials the other; all that is known of both afterwards."""
    for replica, steps in zip(made.replicas, STEPS_A_ROUND, strict=True):
        assert replica.pipeline.origin is not None
        for _ in range(steps):
            await replica.pipeline.origin.train_one()
    dialler = number % 2
    assert await made.replicas[dialler].averaging.dial(peer_name(0, 1 - dialler))
    await eventually(lambda: all(len(events_of(made, side, OuterStep)) == number + 1 for side in (0, 1)))
    averaged = [events_of(made, side, OuterStep)[-1] for side in (0, 1)]
    return {
        "losses": [[step.loss for step in events_of(made, side, InnerStep)[-2:]] for side in (0, 1)],
        "differences": [step.difference_norm for step in averaged],
        "spreads": [step.replica_divergence for step in averaged],
        "clipped": [step.clipped for step in averaged],
        "bytes": [step.bytes_sent for step in averaged],
        "replicas": [await state_of(replica) for replica in made.replicas],
    }


async def trajectory(way: str) -> list[dict[str, Any]]:
    """All rounds, one after another."""
    with pytest.MonkeyPatch.context() as patch:
        number_exchanges(patch)
        async with two_replicas(*WAYS[way]) as made:
            return [await one_round(made, number) for number in range(ROUNDS)]


def flat(value: object, path: str = "") -> dict[str, float]:
    """Every number in a JSON value by its place."""
    if isinstance(value, dict):
        return {name: number for key, inner in value.items() for name, number in flat(inner, f"{path}.{key}").items()}
    if isinstance(value, list):
        return {name: number for at, inner in enumerate(value) for name, number in flat(inner, f"{path}.{at}").items()}
    assert isinstance(value, int | float)
    return {path: float(value)}


@pytest.mark.parametrize("way", WAYS)
async def test_two_replicas_go_the_way_that_is_written_down(way: str) -> None:
    """Each side dialling in turn, exact and by four bits; with Muon's steps too."""
    tolerance = TOLERANCE[WAYS[way][0]]
    found, written = flat(await trajectory(way)), flat(json.loads(FILE.read_text())[way])
    assert found.keys() == written.keys()
    rows = {name: (found[name], written[name]) for name in written}
    far = {name: row for name, row in rows.items() if abs(row[0] - row[1]) > tolerance * max(1.0, abs(row[1]))}
    assert not far, __doc__


if __name__ == "__main__":
    torch.set_num_threads(1)
    ways = {way: asyncio.run(trajectory(way)) for way in WAYS}
    rows = (f'"{way}": [\n' + ",\n".join(map(json.dumps, rounds)) + "\n]" for way, rounds in ways.items())
    FILE.write_text("{" + ",\n".join(rows) + "}\n")
