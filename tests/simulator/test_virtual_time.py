"""Whole replicas in virtual time: to the end of their run, the same again from the same seed, and nobody waits."""

from __future__ import annotations

import asyncio
import hashlib
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import OuterSpec
from noloco_node.identity.peer_id import PeerId
from noloco_node.simulator.device import SimulatedDevice
from noloco_node.simulator.loop import in_virtual_time
from noloco_node.telemetry.events import Evaluation, OuterStep
from noloco_node.training.compute_thread import Priority
from noloco_node.transport.memory import Fault, FaultKind
from tests.worlds import World, last_accounts, micro_spec, peer_name, world

SECONDS = {Priority.STEP: 0.01, Priority.BACKWARD: 0.4, Priority.FORWARD: 0.2, Priority.DRAW: 0.2}
"""What the modelled device takes for each kind of work."""
REPLICAS = 4
SPEC = micro_spec(steps=8, microbatches_a_step=4, outer=OuterSpec(inner_steps=2, min_inner_steps=1))


def link(source: PeerId, target: PeerId, octets: int) -> float:
    """10 to 30 ms, as the pair of peers has it, and 10 MB/s."""
    return 0.01 + 0.02 * int(hashlib.sha256(f"{source}{target}".encode()).hexdigest()[:8], 16) / 2**32 + octets / 1e7


@dataclass(frozen=True)
class Course:
    """What came of a simulated run: everything that was told, with its teller and time, and the weights at its end."""

    events: tuple[str, ...]
    weights: str
    seconds: float


def trouble(made: World, lives: Sequence[asyncio.Task[None]], seed: int) -> set[int]:
    """A replica of each stage dies and some calls fail, at moments that the seed draws; the numbers of the dead."""
    rng, loop = random.Random(f"trouble/{seed}"), asyncio.get_running_loop()
    dead = {rng.randrange(REPLICAS), REPLICAS + rng.randrange(REPLICAS)}

    def die(number: int) -> None:
        made.network.kill(peer_name(*divmod(number, REPLICAS)))
        lives[number].cancel()

    for number in sorted(dead):
        loop.call_later(rng.uniform(0.5, 4.0), die, number)
    for kind in (FaultKind.LOSE_REQUEST, FaultKind.LOSE_ANSWER, FaultKind.UNREACHABLE):
        loop.call_later(rng.uniform(0.5, 4.0), made.network.inject, Fault(kind, times=rng.randint(1, 9)))
    return dead


async def run_of_eight(seed: int, *, troubled: bool) -> Course:
    """Two stages of four replicas each, from the first microbatch to the end; of those that live so long."""
    threads = threading.active_count()
    settings = NodeSettings(in_flight=2, drain_seconds=1, seed=seed)
    async with world(SPEC, REPLICAS, settings, lambda: SimulatedDevice(SECONDS.__getitem__), link) as made:
        lives = [asyncio.ensure_future(replica.run()) for replica in made.replicas]
        dead = trouble(made, lives, seed) if troubled else set[int]()
        async with asyncio.timeout(600.0):
            ends = await asyncio.gather(*lives, return_exceptions=True)
        assert {number for number, end in enumerate(ends) if end is not None} == dead
        assert (made.network.fired.keys() >= {FaultKind.LOSE_ANSWER, FaultKind.LOSE_REQUEST}) is troubled
        weights, events = hashlib.sha256(), list[str]()
        for number, (replica, told) in enumerate(zip(made.replicas, made.events, strict=True)):
            peer = peer_name(*divmod(number, REPLICAS))
            events += [f"{peer} {event.model_dump_json()}" for event in told]
            for each in await replica.worker.named_weights():
                for name in sorted(each):
                    weights.update(each[name].numpy().tobytes())
        accounts = {number: account for number, account in enumerate(last_accounts(made)) if number not in dead}
        assert all(accounts[number].clock >= SPEC.inner.target_tokens for number in {*range(REPLICAS)} - dead)
        assert all(each.drawn == each.trained + each.dropped + each.held_at_end for each in accounts.values())
        every = [event for told in made.events for event in told]
        assert any(isinstance(event, OuterStep) and event.kind == "paired" for event in every)
        assert any(isinstance(event, Evaluation) for event in every)
        assert threading.active_count() <= threads, "something works on a thread of its own"
        return Course(tuple(events), weights.hexdigest(), asyncio.get_running_loop().time())


def simulated(seed: int, *, troubled: bool = False) -> Course:
    """The run of this seed."""
    return in_virtual_time(lambda: run_of_eight(seed, troubled=troubled), seed=seed)


def test_eight_replicas_come_to_the_end_of_their_run_and_the_same_seed_gives_the_same_trace() -> None:
    """Every event with its time, and every weight; another seed gives another course."""
    first, again, other = simulated(1), simulated(1), simulated(2)
    assert first == again
    assert other.events != first.events
    assert other.weights != first.weights
    assert first.seconds > SPEC.inner.target_tokens / SPEC.microbatch_tokens / REPLICAS * SECONDS[Priority.BACKWARD]


def test_deaths_and_lost_calls_repeat_with_their_seed() -> None:
    """The survivors reach the end of the run, their accounts are closed, and it is the same course again."""
    first = simulated(1, troubled=True)
    assert first == simulated(1, troubled=True)
    assert first.events != simulated(1).events
