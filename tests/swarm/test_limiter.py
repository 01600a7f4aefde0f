"""A sender that has not asked around is sent on to others if work waits for the device; one that has may wait."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from contextlib import nullcontext, suppress
from functools import partial

import pytest
import torch

from noloco_node.aio import cancel_and_wait
from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import PipelineSpec, RoutingName, RunSpec
from noloco_node.identity.peer_id import PeerId
from noloco_node.peers.hop import ASK_SECONDS
from noloco_node.pipeline.admission import ASKS_TO_WAIT, MicrobatchLimiter, Rations
from noloco_node.pipeline.messages import MICROBATCH, MicrobatchHeader
from noloco_node.simulator.links import Attachment, Links, SharedWay
from noloco_node.simulator.loop import in_virtual_time
from noloco_node.simulator.node import SimulatedDevice
from noloco_node.training.compute_thread import DeviceLoad, Priority
from noloco_node.transport.errors import Refusal, Refused, TransportError
from noloco_node.transport.interface import Release
from noloco_node.transport.memory import MemoryTransport
from noloco_node.transport.messages import Message
from tests.support import eventually
from tests.worlds import LENGTH, VOCABULARY, WINDOWS, last_accounts, micro_spec, peer_name, run_to_the_end, world

SENDER, FLOOD = PeerId("sender"), PeerId("flooding-stranger")
SECONDS = {Priority.STEP: 0.01, Priority.BACKWARD: 0.1, Priority.FORWARD: 1.0, Priority.DRAW: 0.05}
DEVICE = partial(SimulatedDevice, SECONDS.__getitem__)
QUICK = partial(SimulatedDevice, {**dict.fromkeys(Priority, 0.2), Priority.STEP: 0.01, Priority.DRAW: 0.4}.__getitem__)


class Device:
    """Each microbatch takes it so many seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.load = DeviceLoad()
        self.places = MicrobatchLimiter(128, load=lambda: self.load)

    def carry(self, count: int = 1) -> None:
        """It takes and answers so many, none of which waits."""
        for _ in range(count):
            release = self.places.take(SENDER)
            self.load = self.load._replace(busy_seconds=self.load.busy_seconds + self.seconds)
            self.places.answered(SENDER)
            release()

    def lets_wait(self, asks: int) -> int:
        """How many may wait, of as many senders, of such as have asked so often before."""
        held: list[Release] = []
        try:
            for waiting in range(64):
                self.load = self.load._replace(waiting=waiting)
                held.append(self.places.take(PeerId(f"sender {waiting}"), asks))
        except Refused:
            pass
        for release in held:
            release()
        return len(held)


@pytest.mark.parametrize(("seconds", "most"), [(12.0, 1), (0.75, 1), (0.25, 3), (0.05, 11), (1e-4, 64)])
def test_no_more_work_waits_for_who_has_not_asked_around_than_it_takes_to_ask_another(
    seconds: float, most: int
) -> None:
    """That is one at a slow device, so that it never stands idle, and many at a quick one. A sender that has asked
    around waits."""
    device = Device(seconds)
    device.carry(8)
    for asks in range(ASKS_TO_WAIT):
        assert device.lets_wait(asks) == most
    assert most == 1 or (most - 1) * seconds <= ASK_SECONDS + 1e-9
    assert device.lets_wait(ASKS_TO_WAIT) == 64


def test_before_the_first_answer_nobody_is_sent_on_and_a_device_that_has_become_slow_is_noticed() -> None:
    """What a microbatch takes is not known before; afterwards the last ones count."""
    device = Device(0.01)
    assert device.lets_wait(0) == 64
    device.carry()
    assert device.lets_wait(0) > 32
    device.seconds = 5.0
    device.carry(16)
    assert device.lets_wait(0) == 1


@pytest.mark.parametrize(("own", "others", "refused"), [(0, 1, False), (0, 2, True), (1, 0, True)])
def test_who_fills_a_device_sends_nobody_else_on(own: int, others: int, refused: bool) -> None:
    """Senders take turns: of twenty waiting ones of one sender, one more than another has itself are before that
    other's. If all twenty counted, every honest sender would be sent on, and the device left to the flooding one."""
    device = Device(0.2)
    device.carry(8)
    for peer in (20 * ["flood"], own * [SENDER], [f"sender {number}" for number in range(others)]):
        for name in peer:
            device.places.take(PeerId(name))
    device.load = device.load._replace(waiting=20 + own + others)
    with pytest.raises(Refused) if refused else nullcontext():
        device.places.take(SENDER, 0)


@pytest.mark.parametrize("routing", ["balanced", "uniform"])
def test_who_is_sent_on_trains_all_the_same_and_nobody_is_where_the_strategy_says_who_gets_it(
    routing: RoutingName,
) -> None:
    """Whole nodes, two origins with four under way each before two devices: every sample is trained, and microbatches
    ask around under `balanced` only."""
    refused, trained = in_virtual_time(lambda: _asks_around(routing), seed=1)
    assert trained >= 8
    assert (refused > 0) == (routing == "balanced")


def test_on_a_slow_line_a_refusal_costs_no_bytes_of_a_microbatch() -> None:
    """The same nodes, on lines that a microbatch takes 0.8 s of. 33 of 87 were refused when their bytes had crossed the
    line; now a microbatch asks before they do."""
    body = WINDOWS * LENGTH * (32 + 1) * 4

    async def narrow() -> tuple[int, int, float]:
        way = SharedWay([[0.1]])
        for stage, index in itertools.product(range(2), range(2)):
            way.attach(peer_name(stage, index), Attachment(0, body / 0.8, 100.0 * body))
        links = Links(way)
        refused, trained = await _asks_around("balanced", links)
        return refused, trained, sum(links.sent[peer_name(0, index)]["microbatch"] for index in range(2)) / body

    refused, trained, bodies = in_virtual_time(narrow, seed=1)
    assert refused > 0.3 * trained
    assert bodies < 1.3 * trained


async def _asks_around(routing: RoutingName, links: Links | None = None) -> tuple[int, int]:
    """The microbatches that were refused in the course of it, and those that were trained, which are all."""
    pipeline = PipelineSpec(routing=routing)
    spec = micro_spec(layers=2, steps=8, microbatches_a_step=4, pipeline=pipeline)
    async with world(spec, replicas=2, settings=NodeSettings(in_flight=4), device=DEVICE, carrier=links) as made:
        await run_to_the_end(made)
        refused = sum(replica.context.transport.refusals_given.get(Refusal.BUSY, 0) for replica in made.replicas)
        heads = last_accounts(made)[:2]
    trained = sum(account.trained for account in heads)
    assert trained == sum(account.drawn for account in heads)
    return refused, trained


def test_a_flood_at_one_device_takes_a_part_of_it_and_no_more() -> None:
    """Whole nodes, four origins before four devices that are quicker than they, one of which a stranger keeps full.
    Honest senders were sent on by what the stranger had waiting: of 93 microbatches of that device 5 were theirs."""
    served, of_flood = in_virtual_time(_flooded, seed=1)
    assert of_flood > 0.5 * served
    assert served - of_flood > 0.15 * served


async def _flooded() -> tuple[int, int]:
    """Microbatches that the flooded device answered, and those of the flood among them."""
    spec, answered = micro_spec(steps=1000, microbatches_a_step=4), Counter[PeerId]()
    async with world(spec, replicas=4, settings=NodeSettings(in_flight=2, max_pending=16), device=QUICK) as made:
        flood = MemoryTransport(made.network, FLOOD)
        origins = [replica.pipeline.ledger for replica in made.replicas[:4]]
        at_work = [asyncio.create_task(replica.run()) for replica in made.replicas]
        at_work += [asyncio.create_task(_flood(flood, spec, number, answered)) for number in range(8)]
        try:
            await eventually(lambda: sum(ledger.trained for ledger in origins) >= 60, what="60 are trained")
            return made.replicas[4].pipeline.ledger.served, answered[FLOOD]
        finally:
            await cancel_and_wait(at_work)
            await flood.close()


async def _flood(transport: MemoryTransport, spec: RunSpec, number: int, answered: Counter[PeerId]) -> None:
    """Send one microbatch after the other, of labels that nobody could learn."""
    activations = torch.randn(WINDOWS, LENGTH, 32)
    for turn in itertools.count():
        header = MicrobatchHeader(
            id=f"{number:016x}{turn:016x}", budget_ms=60_000, run=spec.run_id, stage=1, origin=FLOOD, origin_clock=0.0
        )
        labels = torch.randint(VOCABULARY, (WINDOWS, LENGTH), dtype=torch.int32)
        message = Message(header.model_dump(mode="json"), (activations, labels))
        with suppress(Refused, TransportError):
            await transport.call(
                peer_name(1, 0), MICROBATCH.name, message, timeout=60, progress=60, max_answer_bytes=1 << 20
            )
            answered[FLOOD] += 1
        await asyncio.sleep(0.05)


def test_askers_get_what_was_saved_and_then_a_share_of_what_is_trained_however_many_keys_ask() -> None:
    """None of them takes more than half of it all."""
    trained = 0
    rations = Rations(0.05, 512.0, lambda: trained)
    peers = [PeerId(f"asker-{number}") for number in range(40)]

    def had(asked: list[PeerId]) -> int:
        came = 0
        for peer in asked:
            with suppress(Refused):
                while True:
                    rations.check(peer, 16)
                    rations.spend(peer, 16)
                    came += 16
        return came

    assert (had(peers[:1]), had(peers[1:])) == (256, 256)
    trained = 64_000
    assert had(peers) == 512, "no more is saved up than at first"
    served = 0
    for _ in range(100):
        trained += 1000
        served += had(peers)
    assert served == pytest.approx(0.05 * 100_000, rel=0.01)
    trained = 0
    assert had(peers) == 0
