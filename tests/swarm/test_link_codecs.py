"""Which codec a link takes: by what carrying takes beside the work, measured; pure but for the book."""

from __future__ import annotations

import random

import pytest
import torch

from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import INT8_BLOCK, ActivationCodec, PipelineSpec, token_bytes
from noloco_node.identity.peer_id import PeerId
from noloco_node.pipeline.activations import CARRIED_SHARE, LinkCodecs, codec_for
from noloco_node.simulator.links import Links, PlainWay
from noloco_node.simulator.loop import in_virtual_time
from noloco_node.simulator.node import peer_of
from noloco_node.simulator.quadratic import Quadratic
from noloco_node.simulator.world import World as SimulatedWorld
from tests.simulator.populated import populate
from tests.worlds import micro_spec

ALLOWED: tuple[ActivationCodec, ...] = ("fp32", "bf16", "int8")
SIZES: dict[ActivationCodec, int] = {codec: token_bytes(INT8_BLOCK, codec) for codec in ALLOWED}
PEER = PeerId("some peer of the next stage")
WORK = 0.4


@pytest.mark.parametrize(
    ("carrying", "wanted"),
    [
        ({"int8": 0.001}, "fp32"),
        ({"int8": 0.09}, "int8"),
        ({"int8": 0.04}, "bf16"),
        ({"int8": 9.0}, "int8"),
        ({"int8": 0.09, "fp32": 0.0999}, "fp32"),
        ({"int8": 0.04, "bf16": 0.2, "fp32": 0.3}, "int8"),
    ],
    ids=["quick", "slow", "between", "hopeless", "long but wide", "measured beats estimated"],
)
def test_the_widest_that_costs_little_beside_the_work(
    carrying: dict[ActivationCodec, float], wanted: ActivationCodec
) -> None:
    """0.1 s beside 0.4 s of work; what was not tried is estimated by its bytes."""
    assert pytest.approx(0.1) == CARRIED_SHARE * WORK
    assert codec_for(SIZES, carrying, WORK) == wanted


@pytest.mark.parametrize(
    ("bytes_per_second", "latency", "wanted"),
    [(1e9, 0.0, "fp32"), (2e6, 0.0, "int8"), (1e9, 0.08, "fp32"), (8e6, 0.01, "bf16")],
    ids=["fibre", "slow uplink", "far and fast", "between"],
)
def test_a_link_comes_to_its_codec_and_stays(bytes_per_second: float, latency: float, wanted: ActivationCodec) -> None:
    """A microbatch has 512 tokens of 512 numbers, and so has its gradient. After a while nearly all go by that codec,
    even if distance alone makes a first guess wrong."""
    codecs = LinkCodecs(ALLOWED, random.Random(3))
    chosen: list[ActivationCodec] = []
    for _ in range(800):
        codec = codecs.choose(PEER)
        took = WORK + latency + 512 * token_bytes(512, codec) / bytes_per_second
        codecs.carried(PEER, codec, took, WORK)
        chosen.append(codec)
    assert chosen[0] == "int8", "nothing is known yet"
    late = chosen[400:]
    assert late.count(wanted) > 0.9 * len(late)
    assert set(late) == set(ALLOWED), "others are tried now and then"


def test_one_codec_is_no_choice_and_a_peer_that_says_nothing_stays_narrow() -> None:
    """No random number is drawn where there is nothing to choose."""
    rng = random.Random(1)
    state = rng.getstate()
    lone = LinkCodecs(("fp16",), rng)
    lone.carried(PEER, "fp16", 1.0, 0.5)
    assert lone.choose(PEER) == lone.widest == "fp16"
    assert rng.getstate() == state
    silent = LinkCodecs(("fp32", "int8"), rng)
    silent.carried(PEER, "int8", 1.0, None)
    assert {silent.choose(PEER) for _ in range(8)} == {"int8"}


@pytest.mark.parametrize("lie", [0.0, 1e12])
def test_a_lie_about_the_work_only_moves_the_codec(lie: float) -> None:
    """Within what the run allows, and of that peer's link only."""
    codecs = LinkCodecs(("fp32", "int8"), random.Random(2))
    for _ in range(50):
        codecs.carried(PEER, "int8", 1.0, lie)
        codecs.carried(PeerId("an honest one"), "fp32", 0.41, 0.4)
    assert codecs.choose(PEER) == ("int8" if lie == 0.0 else "fp32")
    assert codecs.choose(PeerId("an honest one")) == "fp32"


def test_in_a_swarm_the_slow_link_carries_int8_and_the_quick_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole nodes run in virtual time: two first stages, and two last ones of which one lies behind a line of 160
    kbit/s. The sender finds out by itself; both are trained with."""
    carried: dict[PeerId, list[ActivationCodec]] = {}
    note = LinkCodecs.carried

    def noted(self: LinkCodecs, peer: PeerId, codec: ActivationCodec, took: float, work: float | None) -> float:
        carried.setdefault(peer, []).append(codec)
        return note(self, peer, codec, took, work)

    monkeypatch.setattr(LinkCodecs, "carried", noted)
    pipeline = PipelineSpec(activations=("fp32", "int8"), routing="uniform")
    spec = micro_spec(steps=30, microbatches_a_step=4, pipeline=pipeline)

    def seconds(source: PeerId, target: PeerId, octets: int) -> float:
        return octets / (2e4 if peer_of(3) in (source, target) else 1e8)

    async def work() -> list[int]:
        settings = NodeSettings(in_flight=1, drain_seconds=1, seed=1)
        async with SimulatedWorld(
            spec, settings, learning=Quadratic(), links=Links(PlainWay(seconds)), seed=1
        ) as world:
            populate(world, 2)
            await world.ended(3600.0)
            return [node.stage for node in world.nodes]

    assert in_virtual_time(work, seed=1) == [0, 0, 1, 1]
    quick, slow = carried[peer_of(2)], carried[peer_of(3)]
    found: tuple[tuple[list[ActivationCodec], ActivationCodec], ...] = ((quick, "fp32"), (slow, "int8"))
    for codecs, wanted in found:
        late = codecs[len(codecs) // 2 :]
        assert len(late) > 10
        assert late.count(wanted) > 0.9 * len(late), wanted


def test_a_microbatch_asks_first_where_its_bytes_take_long() -> None:
    """Also a large one of which nothing is known yet: it would fill the line."""
    codecs = LinkCodecs(("fp32",), random.Random(1))
    small, large = torch.zeros(1000), torch.zeros(100_000)
    assert [codecs.asks_first(PEER, wire, "fp32") for wire in (small, large)] == [False, True]
    codecs.carried(PEER, "fp32", WORK + 0.4, WORK)
    assert not codecs.asks_first(PEER, large, "fp32")
    for _ in range(8):
        codecs.carried(PEER, "fp32", WORK + 1.0, WORK)
    assert codecs.asks_first(PEER, small, "fp32")


def test_what_carrying_takes_beyond_the_least_of_late_is_waiting() -> None:
    """That holds also with one codec. A way that has become longer is believed after a while, and a lie about the work
    is no more than its answer took."""
    codecs = LinkCodecs(("fp16",), random.Random(1))
    assert codecs.carried(PEER, "fp16", 0.7, None) == 0.0
    waits = [codecs.carried(PEER, "fp16", took, WORK) for took in (WORK + 0.3, WORK + 0.1, WORK + 0.5)]
    assert waits == pytest.approx([0.0, 0.0, 0.4], abs=0.002)
    longer = [codecs.carried(PEER, "fp16", WORK + 0.5, WORK) for _ in range(2000)]
    assert longer[-1] < 0.01
    assert codecs.carried(PEER, "fp16", 0.6, 1e9) == 0.0
    assert codecs.carried(PEER, "fp16", 0.6, 0.0) <= 0.6
