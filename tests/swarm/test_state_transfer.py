"""Late joiners and laggards: a stage peer's full state, verified, or no change at all."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import LimitsSpec, OuterSpec, RunSpec
from noloco_node.directory.records import PeerState
from noloco_node.errors import ExitCode, UserError
from noloco_node.node.first_state import become_current
from noloco_node.node.replica import Replica
from noloco_node.outer import CodecName
from noloco_node.state_transfer import donor_choice as late_join
from noloco_node.state_transfer import fetch as state_transfer
from noloco_node.state_transfer.fetch import PackedState, digest, packed_size, unpack
from noloco_node.tallies import Doubling
from noloco_node.telemetry.events import OuterStep, ProbationEnded
from noloco_node.transport.calls import BadAnswer
from tests.support import alongside, eventually
from tests.worlds import IN_SUBSPACE, NAMED, World, micro_spec, peer_name, run_ahead, world

OUTER = OuterSpec(inner_steps=2, min_inner_steps=1, max_lag_tokens=1000)


@contextlib.asynccontextmanager
async def veteran_and_joiner(
    replicas: int = 2, outer: OuterSpec = OUTER, subspace: dict[str, object] | None = None
) -> AsyncIterator[tuple[World, list[Replica]]]:
    """The first replica (all but the last, if more) is past its first outer step and says so; the last is new."""
    limits = LimitsSpec(chunk_bytes=4096, exchange_progress_seconds=2, record_seconds=60)
    spec = micro_spec(stages=1, layers=4, outer=outer, limits=limits, subspace=subspace)
    async with world(spec, replicas, NodeSettings(in_flight=1, drain_seconds=1, initial_peers=(NAMED,))) as made:
        for veteran in made.replicas[:-1]:
            assert veteran.pipeline.origin is not None
            for _ in range(5):
                await veteran.pipeline.origin.train_one()
            await veteran.averaging.step_alone()
            veteran.donor.open()
            veteran.averaging.open()
            await veteran.membership.announce(PeerState.TRAINING)
        yield made, made.replicas


@pytest.mark.parametrize(("codec", "subspace"), [("int8", IN_SUBSPACE), ("sign", None)])
async def test_a_joiner_becomes_a_copy(codec: CodecName, subspace: dict[str, object] | None) -> None:
    """Weights, slow weights, momentum, trail, Adam's moments and step count, clock and round are those of the donor,
    bitwise; and both then take the same next step."""
    outer = OUTER.model_copy(update={"codec": codec})
    async with veteran_and_joiner(outer=outer, subspace=subspace) as (made, (veteran, joiner)):
        assert await become_current(joiner) == peer_name(0, 0)
        progress, state = await veteran.worker.joiner_state()
        copied_progress, copied = await joiner.worker.joiner_state()
        assert state.keys() == copied.keys()
        assert all(torch.equal(state[name], copied[name]) for name in state)
        assert ("trail" in state) is (codec == "sign")
        assert int(state["optimizer_steps"]) == 5
        assert (copied_progress.clock, copied_progress.outer_rounds) == (progress.clock, progress.outer_rounds)
        made.drawn[1].start, made.drawn[1].batches = 10**5, []
        made.drawn[0].start, made.drawn[0].batches = 10**5, []
        for replica in (veteran, joiner):
            assert replica.pipeline.origin is not None
            replica.worker.live_replicas = 1
            await replica.pipeline.origin.train_one()
        after = [(await replica.worker.joiner_state())[1]["fast"] for replica in (veteran, joiner)]
        assert torch.equal(*after)
        assert not torch.equal(after[0], state["fast"])


async def test_in_a_young_swarm_the_seeded_weights_stand() -> None:
    """Before anyone's first outer step nothing is copied."""
    async with world(micro_spec(stages=1, outer=OUTER), replicas=2) as made:
        await made.replicas[0].membership.announce(PeerState.TRAINING)
        assert await become_current(made.replicas[1]) is None


def begun_with_weights() -> RunSpec:
    """A run that began with weights of which nobody here has a folder."""
    spec = micro_spec(stages=1, outer=OUTER)
    return spec.model_copy(update={"model": spec.model.model_copy(update={"fingerprint": "weights-" + "0" * 32})})


async def test_who_has_no_first_weights_copies_a_stage_peer_before_any_outer_round() -> None:
    """A seed would not give what the run began with."""
    async with world(begun_with_weights(), replicas=2) as made:
        first, second = made.replicas
        first.donor.open()
        await first.membership.announce(PeerState.TRAINING)
        shift = torch.full_like((await first.worker.slow_weights())[1], 0.5)
        await first.worker.load_slow_weights(0.0, 0, shift)
        assert await become_current(second) == peer_name(0, 0)
        assert torch.equal((await second.worker.slow_weights())[1], shift)


async def test_who_has_no_first_weights_and_finds_nobody_is_told_what_to_bring(monkeypatch: pytest.MonkeyPatch) -> None:
    """It neither begins from a seed nor waits."""
    monkeypatch.setattr(late_join, "AWAY_PAUSES", Doubling(0.001, 0.1))
    async with world(begun_with_weights()) as made:
        with pytest.raises(UserError, match="begins with the weights weights-0000") as error:
            await become_current(made.replicas[0])
        assert error.value.exit_code is ExitCode.NO_STATE_SOURCE
        assert "--set run.model.from_pretrained=FOLDER" in error.value.remedy


async def test_a_laggard_takes_its_partners_state() -> None:
    """Dialling a stage peer that is more than max_lag ahead: no averaging, the laggard becomes a copy and goes on."""
    async with veteran_and_joiner() as (made, (veteran, laggard)):
        await run_ahead(veteran, 50_000.0)
        await veteran.membership.announce(PeerState.TRAINING)
        async with alongside(laggard.run()):
            caught = await eventually(
                lambda: [e for e in made.events[1] if isinstance(e, OuterStep) and e.kind == "caught_up"],
                what="the laggard has caught up",
            )
        assert caught[0].partner == peer_name(0, 0)
        assert caught[0].clock >= 50_000
        assert laggard.averaging.standing.newcomer or any(isinstance(e, ProbationEnded) for e in made.events[1])


async def test_a_busy_donor_serves_one_snapshot_to_many() -> None:
    """Two joiners at the same time read the same snapshot."""
    async with veteran_and_joiner(3) as (_, (veteran, second, joiner)):
        await second.membership.announce(PeerState.GONE)
        taken: list[int] = []
        frozen = veteran.worker.frozen

        def counted(*names: str) -> object:
            taken.append(1)
            return frozen(*names)

        veteran.worker.frozen = counted  # pyright: ignore[reportAttributeAccessIssue]
        donors = await asyncio.gather(become_current(joiner), become_current(second))
        assert donors == [peer_name(0, 0)] * 2
        assert len(taken) == 1


def test_a_packed_state_is_its_tensors_one_after_another() -> None:
    """Scalars and 64-bit numbers as well, whatever the size of a chunk; unpacked, it is the same state, and NaN in it
    is refused."""
    state = {
        "fast": torch.arange(7, dtype=torch.float32),
        "exp_avg": torch.randn(3, 5),
        "optimizer_steps": torch.tensor(11),
    }
    plain = b"".join(state[name].numpy().tobytes() for name in sorted(state))
    sizes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()}
    packed = PackedState(sizes)
    packed.take((name, 0, tensor) for name, tensor in state.items())
    assert packed.size == len(plain)
    for size in (1, 7, 16, 64, 1000):
        parts = [bytes(packed.part(start, start + size)) for start in range(0, packed.size, size)]
        assert b"".join(parts) == plain
        assert [bytes(row.tolist()) for row in packed.digests(size)] == [digest(part) for part in parts]
    assert packed_size(sizes) == len(plain)
    unpacked = unpack(bytearray(plain), sizes)
    assert all(torch.equal(unpacked[name], state[name]) for name in state)
    packed.take([("fast", 3, torch.tensor([float("nan")]))])
    with pytest.raises(BadAnswer, match="NaN"):
        unpack(packed.part(0, packed.size), sizes)


async def test_a_fetched_state_is_checked_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large state takes seconds to look at; the loop answers peers meanwhile."""
    threads: list[int] = []
    checked = state_transfer.unpack

    def noted(*arguments: Any) -> dict[str, torch.Tensor]:
        threads.append(threading.get_ident())
        return checked(*arguments)

    monkeypatch.setattr(state_transfer, "unpack", noted)
    async with veteran_and_joiner() as (_, (_, joiner)):
        assert await become_current(joiner) == peer_name(0, 0)
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()
