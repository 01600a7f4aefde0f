"""Whole replicas in virtual time: to the end of their run, the same again from the same seed, and nobody waits."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from dataclasses import dataclass

from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import OuterSpec
from noloco_node.identity.peer_id import PeerId
from noloco_node.simulator.device import SimulatedDevice
from noloco_node.simulator.loop import in_virtual_time
from noloco_node.telemetry.events import Evaluation, OuterStep
from noloco_node.training.compute_thread import Priority
from tests.worlds import last_accounts, micro_spec, peer_name, run_to_the_end, world

SECONDS = {Priority.STEP: 0.01, Priority.BACKWARD: 0.4, Priority.FORWARD: 0.2, Priority.DRAW: 0.2}
"""What the modelled device takes for each kind of work."""
REPLICAS = 4
SPEC = micro_spec(steps=16, microbatches_a_step=4, outer=OuterSpec(inner_steps=4, min_inner_steps=2))


def link(source: PeerId, target: PeerId, octets: int) -> float:
    """10 to 30 ms, as the pair of peers has it, and 10 MB/s."""
    return 0.01 + 0.02 * int(hashlib.sha256(f"{source}{target}".encode()).hexdigest()[:8], 16) / 2**32 + octets / 1e7


@dataclass(frozen=True)
class Course:
    """What came of a simulated run: everything that was told, with its teller and time, and the weights at its end."""

    events: tuple[str, ...]
    weights: str
    seconds: float


async def run_of_eight(seed: int) -> Course:
    """Two stages of four replicas each, from the first microbatch to the end."""
    threads = threading.active_count()
    settings = NodeSettings(in_flight=2, drain_seconds=1, seed=seed)
    async with world(SPEC, REPLICAS, settings, lambda: SimulatedDevice(SECONDS.__getitem__), link) as made:
        await run_to_the_end(made, within=600.0)
        weights, events = hashlib.sha256(), list[str]()
        for number, (replica, told) in enumerate(zip(made.replicas, made.events, strict=True)):
            peer = peer_name(*divmod(number, REPLICAS))
            events += [f"{peer} {event.model_dump_json()}" for event in told]
            for each in await replica.worker.named_weights():
                for name in sorted(each):
                    weights.update(each[name].numpy().tobytes())
        accounts, every = last_accounts(made), [event for told in made.events for event in told]
        assert all(account.clock >= SPEC.inner.target_tokens for account in accounts[:REPLICAS])
        assert all(account.drawn == account.trained + account.dropped + account.held_at_end for account in accounts)
        assert any(isinstance(event, OuterStep) and event.kind == "paired" for event in every)
        assert any(isinstance(event, Evaluation) for event in every)
        assert threading.active_count() == threads, "something works on a thread of its own"
        return Course(tuple(events), weights.hexdigest(), asyncio.get_running_loop().time())


def simulated(seed: int) -> Course:
    """The run of this seed."""
    return in_virtual_time(lambda: run_of_eight(seed), seed=seed)


def test_eight_replicas_come_to_the_end_of_their_run_and_the_same_seed_gives_the_same_trace() -> None:
    """Every event with its time, and every weight; another seed gives another course."""
    first, again, other = simulated(1), simulated(1), simulated(2)
    assert first == again
    assert other.events != first.events
    assert other.weights != first.weights
    assert first.seconds > SPEC.inner.target_tokens / SPEC.microbatch_tokens / REPLICAS * SECONDS[Priority.BACKWARD]
