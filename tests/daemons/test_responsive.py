"""The event loop answers quickly while a large exchange streams and the arithmetic runs."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from noloco_node.config.model_spec import ModelSpec
from noloco_node.config.run_spec import LimitsSpec, OuterSpec
from noloco_node.telemetry.events import OuterStep
from tests.support import eventually
from tests.worlds import libp2p_world, micro_spec

BEAT = 0.02
WORST_LAG = 0.4
"""CPU seconds of the loop's thread between two beats. A whole-model operation on the loop takes longer; what others on
the machine take does not count."""


@pytest.mark.daemons
async def test_the_loop_beats_while_fifty_megabytes_cross(tmp_path: Path, temporary: Path) -> None:
    """Two replicas of 13 M weights average over p2pd; a heartbeat measures how long the loop computes meanwhile."""
    small = micro_spec(stages=1, outer=OuterSpec(inner_steps=2, min_inner_steps=0, codec="fp32"))
    config = {**small.model.config, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 14}
    spec = small.model_copy(
        update={"model": ModelSpec(config=config, seed=3, stages=1), "limits": LimitsSpec(chunk_bytes=1 << 20)}
    )
    lags: list[float] = []

    async def beat() -> None:
        while True:
            before = time.thread_time()
            await asyncio.sleep(BEAT)
            lags.append(time.thread_time() - before)

    async with libp2p_world(spec, tmp_path, replicas=2) as made, asyncio.TaskGroup() as group:
        running = [group.create_task(replica.averaging.run()) for replica in made.replicas]
        for replica in made.replicas:
            replica.averaging.open()
            assert replica.pipeline.origin is not None
            await replica.pipeline.origin.train_one()
        heart = group.create_task(beat())
        partner = made.replicas[1].context.transport.peer_id
        assert await made.replicas[0].averaging.dial(partner)
        await eventually(lambda: not made.replicas[1].averaging.under_way, what="the partner has committed")
        for task in (heart, *running):
            task.cancel()
    steps = [[event for event in events if isinstance(event, OuterStep)] for events in made.events]
    assert [[event.kind for event in each] for each in steps] == [["paired"], ["paired"]]
    assert steps[0][0].bytes_sent > 50e6
    assert len(lags) >= 5, "it must have beaten during the exchange"
    assert max(lags) < WORST_LAG, sorted(lags)[-5:]
