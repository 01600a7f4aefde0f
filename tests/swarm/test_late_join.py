"""Whose state a joiner takes, what it does when a donor fails, and what donors grant."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from noloco_node import ambient
from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import LimitsSpec, OuterSpec
from noloco_node.directory.records import PeerState
from noloco_node.errors import ExitCode, UserError
from noloco_node.identity.peer_id import PeerId
from noloco_node.node.first_state import FirstState, become_current
from noloco_node.node.replica import Replica
from noloco_node.peers.scorecard import ANSWER_SECONDS
from noloco_node.simulator.loop import in_virtual_time
from noloco_node.simulator.node import SimulatedDevice
from noloco_node.state_transfer import donor as state_donor
from noloco_node.state_transfer import donor_choice as late_join
from noloco_node.state_transfer import fetch as state_messages
from noloco_node.state_transfer.donor_choice import DonorPaces, rank_donors
from noloco_node.state_transfer.fetch import Download, SignedManifest, StateManifest, StateOffer
from noloco_node.state_transfer.rate import FASTER, KEPT_SHARE, DonorRate, Readers, next_rate
from noloco_node.tallies import Doubling
from noloco_node.telemetry.events import OuterStep, StateDownload, StateSourceFailed
from noloco_node.training.compute_thread import Priority
from noloco_node.training.frozen_state import Sizes
from noloco_node.training.progress import LastTrained
from noloco_node.transport import calls
from noloco_node.transport.calls import Reply
from noloco_node.transport.errors import Refusal, Refused
from noloco_node.transport.interface import Transport
from noloco_node.transport.memory import Fault, FaultKind, MemoryTransport
from noloco_node.transport.messages import JsonObject, Message
from tests.inside import served_by
from tests.support import SkewedClock, alongside, eventually
from tests.worlds import NAMED, Swarm, World, micro_spec, peer_name, world

OUTER = OuterSpec(inner_steps=2, min_inner_steps=1, max_lag_tokens=1000)
LIMITS = LimitsSpec(chunk_bytes=4096, exchange_progress_seconds=2, record_seconds=20)
FIRST, SECOND = peer_name(0, 0), peer_name(0, 1)


async def make_veteran(replica: Replica) -> None:
    """Past its first outer step, advertised, and ready to give."""
    assert replica.pipeline.origin is not None
    for _ in range(3):
        await replica.pipeline.origin.train_one()
    await replica.averaging.step_alone()
    replica.donor.open()
    await replica.membership.announce(PeerState.TRAINING)


@asynccontextmanager
async def donors_and_joiner(donors: int = 2) -> AsyncIterator[tuple[World, Replica]]:
    """Veterans 0 to `donors` - 1 in memory, and a replica that has just come."""
    settings = NodeSettings(in_flight=1, drain_seconds=1, initial_peers=(NAMED,))
    async with world(micro_spec(stages=1, layers=4, outer=OUTER, limits=LIMITS), donors + 1, settings) as made:
        for veteran in made.replicas[:-1]:
            await make_veteran(veteran)
        yield made, made.replicas[-1]


def failures(made: Swarm) -> dict[str, str]:
    """Why donors failed, as the last replica said."""
    return {event.source: event.reason for event in made.events[-1] if isinstance(event, StateSourceFailed)}


async def fast_weights(replica: Replica) -> torch.Tensor:
    return (await replica.worker.joiner_state())[1]["fast"]


async def is_copy_of(replica: Replica, donor: Replica) -> bool:
    return torch.equal(await fast_weights(replica), await fast_weights(donor))


def forge(replica: Replica, change: Callable[[JsonObject], JsonObject], method: str = state_messages.OPEN.name) -> None:
    """This donor's answers to a method, its signed manifests for example, are changed before they go out."""
    served = served_by(replica.context.transport)[method]
    honest = served.handle

    async def forged(peer: PeerId, message: Message) -> Message:
        answer = await honest(peer, message)
        return Message({**answer.header, **change(answer.header)}, answer.tensors)

    served.handle = forged


async def join_until_the_first_has_failed(made: World, joiner: Replica, *, honest: bool = False) -> str:
    """Join from the second donor again and again, until chance has led to the first one before; why that one failed.
    What no honest node gives is held against it once."""
    made.events[-1].clear()
    while FIRST not in failures(made):
        assert await become_current(joiner) == SECOND
    assert await is_copy_of(joiner, made.replicas[1])
    assert joiner.context.transport.conduct.offences == ({} if honest else {"bad_answer": 1})
    return failures(made)[FIRST]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda h: {"manifest": h["manifest"].replace('"clock":', '"clock":9')}, "not signed by its source"),
        (lambda _: {"seal": None}, "bad SignedManifest: seal"),
    ],
)
async def test_a_manifest_that_its_donor_did_not_sign_is_refused_and_the_next_donor_gives(
    change: Callable[[JsonObject], JsonObject], complaint: str
) -> None:
    """Whatever was changed after the signature was made, or where there is none."""
    async with donors_and_joiner() as (made, joiner):
        forge(made.replicas[0], change)
        assert complaint in await join_until_the_first_has_failed(made, joiner)


def request_of(joiner: Replica) -> Message:
    """What this joiner asks a donor."""
    request = state_messages.StateRequest(run=joiner.context.spec.run_id, stage=0, contract=joiner.worker.contract)
    return Message(request.model_dump(mode="json"))


SECONDS = {Priority.STEP: 0.01, Priority.BACKWARD: 0.04, Priority.FORWARD: 0.02, Priority.DRAW: 0.04}
"""What the modelled device takes where a test runs in virtual time."""


async def test_a_manifest_that_another_peer_signed_is_refused() -> None:
    """A peer cannot pass another one's state off as its own."""
    async with donors_and_joiner() as (made, joiner):
        first, second = made.replicas[:2]
        asked = state_messages.StateRequest.model_validate(request_of(joiner).header)
        stolen = await second.donor.handle_open(joiner.context.transport.peer_id, asked)
        forge(first, lambda _: stolen.header.model_dump())
        assert "is another peer's and not the state source's" in await join_until_the_first_has_failed(made, joiner)


def first_claims(rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first donor signs so many outer steps from now on."""
    sign = state_donor.sign_manifest

    def lying(transport: Transport, manifest: StateManifest, digests: torch.Tensor) -> Reply[SignedManifest]:
        lies = {"outer_rounds": rounds} if transport.peer_id == FIRST else {}
        return sign(transport, manifest.model_copy(update=lies), digests)

    monkeypatch.setattr(state_donor, "sign_manifest", lying)


async def test_rounds_with_which_a_joiner_could_say_nothing_more_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signed by the donor itself: after one outer step more they would not go into the joiner's record."""
    first_claims(1 << 40, monkeypatch)
    async with donors_and_joiner() as (made, joiner):
        assert "bad manifest" in await join_until_the_first_has_failed(made, joiner)


async def test_who_has_copied_as_many_rounds_as_go_in_gives_its_own_state_after_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It could say nothing of its state any more: nobody could join it, and no guard kept a copy."""
    first_claims(1 << 32, monkeypatch)
    async with donors_and_joiner() as (made, joiner):
        victim = made.replicas[1]
        await victim.copier.copy_from(FIRST, [FIRST])
        await victim.averaging.step_alone()
        await joiner.copier.copy_from(SECOND, [SECOND])
        assert await is_copy_of(joiner, victim)


async def test_an_altered_chunk_is_refused_and_the_next_donor_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit of one chunk; the donor is named with the reason."""
    async with donors_and_joiner() as (made, joiner):
        method = served_by(made.replicas[0].context.transport)[state_messages.CHUNK.name]
        honest = method.handle

        async def altered(peer: PeerId, message: Message) -> Message:
            answer = await honest(peer, message)
            if message.header["index"] == 3:
                answer.tensors[0][0] ^= 1
            return answer

        monkeypatch.setattr(method, "handle", altered)
        assert "chunk 3 of its state does not match" in await join_until_the_first_has_failed(made, joiner)


async def test_an_offer_that_is_none_is_an_offence() -> None:
    """The first donor claims to have fewer than no readers; the second one gives."""
    async with donors_and_joiner() as (made, joiner):
        forge(made.replicas[0], lambda _: {"readers": -1}, state_messages.OFFER.name)
        assert "bad StateOffer: readers" in await join_until_the_first_has_failed(made, joiner)


async def test_a_donor_that_is_slow_full_or_away_offends_nobody() -> None:
    """Refusals and silence are ordinary life."""
    async with donors_and_joiner(3) as (made, joiner):
        made.network.inject(Fault(FaultKind.UNREACHABLE, target=FIRST))
        made.network.inject(Fault(FaultKind.REFUSE, target=SECOND, reason=Refusal.DRAINING))
        assert await become_current(joiner) == peer_name(0, 2)
        assert not joiner.context.transport.conduct.offences


@pytest.mark.timeout(120)
def test_a_joiner_whose_download_outlasts_max_lag_is_drawn_in_and_does_not_copy_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It goes over a slow link, while two veterans train on: what it has copied is behind by more than twice max_lag
    when it begins.

    Its first exchange takes over the swarm's clock, its probation ends, and it counts. The veterans, which are of one
    time, are not parted by it. Steps are many enough that a veteran is free between two exchanges. `max_lag` is ten of
    the swarm's: what a replica waits for the shared compute thread is no lag.
    """
    monkeypatch.setattr(calls, "MOST_PIECES", 4)
    in_virtual_time(drawn_in, seed=1)


async def drawn_in() -> None:
    """The course of it."""
    limits = LIMITS.model_copy(update={"exchange_progress_seconds": 30.0, "record_seconds": 3.0, "chunk_bytes": 1024})
    outer = OUTER.model_copy(update={"inner_steps": 8, "min_inner_steps": 2, "max_lag_tokens": 2000})
    spec = micro_spec(stages=1, layers=1, steps=10**6, outer=outer, limits=limits)
    async with world(
        spec, 3, NodeSettings(in_flight=1, drain_seconds=1), lambda: SimulatedDevice(SECONDS.__getitem__)
    ) as made:
        *veterans, joiner = made.replicas

        async def slow_link() -> None:
            """No chunk comes before the swarm has trained a few more tokens."""
            before = veterans[0].worker.progress.clock
            await eventually(lambda: veterans[0].worker.progress.clock > before, 30)

        made.network.inject(Fault(FaultKind.DELAY, method=state_messages.CHUNK.name, wait=slow_link))
        for veteran in veterans:
            await make_veteran(veteran)
        async with running(*veterans):
            assert await become_current(joiner) is not None
            behind = min(v.worker.progress.clock for v in veterans) - joiner.worker.progress.clock
            assert behind > 2 * spec.max_lag_tokens, "or this proves nothing"
            async with running(joiner):
                await eventually(lambda: not joiner.averaging.standing.newcomer, 60, "its probation ends")
                rounds = joiner.worker.progress.outer_rounds
                await eventually(lambda: joiner.worker.progress.outer_rounds > rounds + 3, 60, "it averages on")
                apart = veterans[0].worker.progress.clock - joiner.worker.progress.clock
        assert not caught_up(made)
        assert abs(apart) < spec.max_lag_tokens
        assert not any(replica.context.transport.refusals_given[Refusal.LAGGING] for replica in made.replicas)


@asynccontextmanager
async def running(*replicas: Replica) -> AsyncIterator[None]:
    """They train while the block lasts."""
    async with alongside(*(replica.run() for replica in replicas)):
        yield


def caught_up(made: Swarm) -> list[OuterStep]:
    """How often the last replica copied a stage peer's state again."""
    return [event for event in made.events[-1] if isinstance(event, OuterStep) and event.kind == "caught_up"]


@pytest.fixture
def quick_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Donors that are away are asked again at once."""
    monkeypatch.setattr(late_join, "AWAY_PAUSES", Doubling(0.001, 0.1))


@pytest.mark.usefixtures("quick_tries")
async def test_a_donor_is_asked_again_after_lost_requests_and_while_it_is_not_ready_and_not_for_ever() -> None:
    """A link that loses some requests, a donor that does not serve yet, a directory that shows none for a moment: none
    of them ends a joiner's life. Each failed donor is told once."""
    lost = Fault(FaultKind.LOSE_REQUEST, method=state_messages.OFFER.name, times=2)
    early = Fault(FaultKind.REFUSE, method=state_messages.OFFER.name, times=2, reason=Refusal.DRAINING)
    for fault in (lost, early):
        async with donors_and_joiner(1) as (made, joiner):
            made.network.inject(fault)
            assert await become_current(joiner) == FIRST
            assert len([event for event in made.events[-1] if isinstance(event, StateSourceFailed)]) == 1
    async with donors_and_joiner(1) as (made, joiner):
        donors = [[], [FIRST]]
        assert (await joiner.copier.copy_best(lambda: asyncio.sleep(0, donors.pop(0))))[0] == FIRST
        asked = made.network.inject(Fault(FaultKind.UNREACHABLE, method=state_messages.OFFER.name, times=99))
        with pytest.raises(UserError):
            await become_current(joiner)
        assert asked.times == 99 - late_join.AWAY_TRIES


@pytest.mark.usefixtures("quick_tries")
async def test_when_nobody_gives_its_state_each_donor_is_named_with_its_reason() -> None:
    """One is gone, one refuses, one answers for another contract."""
    async with donors_and_joiner(3) as (made, joiner):
        made.network.inject(Fault(FaultKind.UNREACHABLE, target=FIRST, method=state_messages.OFFER.name))
        made.network.inject(
            Fault(FaultKind.REFUSE, target=SECOND, method=state_messages.OFFER.name, reason=Refusal.DRAINING)
        )
        contract = Fault(
            FaultKind.REFUSE, target=peer_name(0, 2), method=state_messages.OFFER.name, reason=Refusal.WRONG_CONTRACT
        )
        made.network.inject(contract)
        with pytest.raises(UserError) as error:
            await become_current(joiner)
        assert error.value.exit_code is ExitCode.NO_STATE_SOURCE
        lines = dict(line.strip().split(": ", 1) for line in error.value.message.splitlines()[1:])
        assert set(lines) == {FIRST, SECOND, peer_name(0, 2)}
        assert "injected fault" in lines[FIRST]
        assert "draining" in lines[SECOND]
        assert "wrong_contract" in lines[peer_name(0, 2)]


@pytest.mark.parametrize("relayed_looks", [2, 1000])
async def test_no_state_crosses_a_relay(monkeypatch: pytest.MonkeyPatch, relayed_looks: int) -> None:
    """A donor that is connected by relay only refuses with the reason. The joiner asks a few times more, since it may
    be making a direct connection. If that comes the donor gives, else the reason is told."""
    monkeypatch.setattr(late_join, "AWAY_PAUSES", Doubling(0.01, 0.02))
    looks = 0

    async def relayed(peer: PeerId) -> bool:
        nonlocal looks
        assert peer == joiner.context.transport.peer_id
        looks += 1
        return looks <= relayed_looks

    async with donors_and_joiner(1) as (made, joiner):
        made.replicas[0].donor.relayed = relayed
        if relayed_looks < late_join.AWAY_TRIES:
            assert await become_current(joiner) == FIRST
            return
        with pytest.raises(UserError) as error:
            await become_current(joiner)
        assert error.value.exit_code is ExitCode.NO_STATE_SOURCE
        assert "a state is not sent through a relay" in error.value.message
        assert looks == late_join.AWAY_TRIES
        with pytest.raises(Refused, match="through a relay"):
            await joiner.context.transport.call(
                FIRST, state_messages.OPEN.name, request_of(joiner), timeout=5, progress=5, max_answer_bytes=1 << 20
            )


async def test_a_laggard_that_only_relays_connect_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told again and again that it lags. It makes room for a state only if one comes, and catches up as soon as
    there is a direct connection."""
    looks, rooms, relays = 0, 0, True
    plain = late_join.new_download

    def counted(*arguments: Any) -> Download:
        nonlocal rooms
        rooms += 1
        return plain(*arguments)

    async def relayed(_peer: PeerId) -> bool:
        nonlocal looks
        looks += 1
        return relays

    monkeypatch.setattr(late_join, "new_download", counted)
    async with donors_and_joiner(1) as (made, laggard):
        made.replicas[0].donor.relayed = relayed
        await laggard.membership.refresh()
        for _ in range(5):
            await laggard.outer_steps.catch_up(FIRST)
        assert (looks, rooms) == (5, 0)
        told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert len(told) == 1
        assert f"{FIRST}, which is connected by relay only" in told[0]
        assert not caught_up(made)
        relays = False
        await laggard.outer_steps.catch_up(FIRST)
        assert len(caught_up(made)) == rooms == 1


async def test_a_laggard_without_room_on_its_disk_goes_on_says_so_once_and_catches_up_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A laptop that had slept for hours ended with an error, and its service does not start again after that one. One
    that comes back with a checkpoint goes on with it in the same way."""
    full = True

    def room(size: int, chunk: int, folder: Path | None) -> Download:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return Download(size, chunk, folder)

    monkeypatch.setattr(state_messages, "Download", room)
    async with donors_and_joiner(1) as (made, laggard):
        await laggard.membership.refresh()
        for _ in range(3):
            await laggard.outer_steps.catch_up(FIRST)
        told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert len(told) == 1
        assert "there is no room for a stage peer's state" in told[0]
        assert not caught_up(made)
        assert await become_current(laggard, -1e6) is None
        full = False
        await laggard.outer_steps.catch_up(FIRST)
        assert len(caught_up(made)) == 1


async def test_a_laggard_that_finds_all_places_taken_has_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It read in the offer that its donor was full, and asked for nothing. Whoever came later had the place before it,
    again and again."""
    clock = SkewedClock()
    monkeypatch.setattr(ambient, "monotonic", clock.monotonic)
    monkeypatch.setattr(state_donor, "DONOR_PLACES", 1)
    async with donors_and_joiner(1) as (made, laggard):
        donor, asks = made.replicas[0].donor, state_messages.StateRequest.model_validate(request_of(laggard).header)
        await donor.handle_open(READER, asks)
        for peer in (laggard.copier.copy_from(FIRST), donor.handle_open(THIRD, asks)):
            with pytest.raises(Refused, match="serves no more"):
                await peer
        clock.ahead += 5.0  # the reader comes for no chunk
        with pytest.raises(Refused, match="serves no more"):
            await donor.handle_open(THIRD, asks)
        await laggard.copier.copy_from(FIRST)
        assert await is_copy_of(laggard, made.replicas[0])


async def test_a_reader_that_has_begun_comes_to_its_end_while_its_donor_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that saves before it ends refused each further chunk as `draining`. Nobody begins anew with it."""
    async with donors_and_joiner(1) as (made, joiner):
        donor = made.replicas[0].donor
        came = count_chunks(joiner.context.transport, monkeypatch)
        joining = asyncio.create_task(become_current(joiner))
        await eventually(lambda: len(came) >= 5, what="some chunks came")
        assert not joining.done()
        donor.rate.giving.clear()
        donor.shut()
        assert await joining == FIRST
        assert await is_copy_of(joiner, made.replicas[0])
        with pytest.raises(Refused) as refused:
            await joiner.copier.copy_from(FIRST)
        assert refused.value.reason is Refusal.DRAINING


async def test_a_laggard_makes_no_room_while_its_donor_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every few seconds it took the room of a whole state, and gave it back as it heard `busy`; macOS writes it all. A
    place that it has itself keeps it from nothing."""
    rooms, plain = 0, late_join.new_download

    def counted(*arguments: Any) -> Download:
        nonlocal rooms
        rooms += 1
        return plain(*arguments)

    monkeypatch.setattr(late_join, "new_download", counted)
    async with donors_and_joiner(1) as (made, laggard):
        donor, asks = made.replicas[0].donor, state_messages.StateRequest.model_validate(request_of(laggard).header)
        with monkeypatch.context() as patch:
            patch.setattr(state_donor, "SNAPSHOT_SHARED_SECONDS", 0.0)
            await donor.handle_open(PeerId("another-joiner"), asks)
        with pytest.raises(Refused) as refused:
            await laggard.copier.copy_from(FIRST)
        assert (refused.value.reason, rooms) == (Refusal.BUSY, 0), "an older snapshot is being read"
        donor.close()
        for reader in ("another-joiner", "and-another"):
            await donor.handle_open(PeerId(reader), asks)
        with pytest.raises(Refused) as refused:
            await laggard.copier.copy_from(FIRST)
        assert (refused.value.reason, rooms) == (Refusal.BUSY, 0), "its places are taken"
        donor.close()
        for reader in (PeerId("another-joiner"), laggard.context.transport.peer_id):
            await donor.handle_open(reader, asks)
        await laggard.copier.copy_from(FIRST)
        assert rooms == 1


def count_chunks(transport: Transport, monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[PeerId, int]]:
    """How often each chunk of each donor has come."""
    came: Counter[tuple[PeerId, int]] = Counter()
    plain = transport.call

    async def counted(peer: PeerId, method: str, request: Message, **limits: Any) -> Message:
        answer = await plain(peer, method, request, **limits)
        if method == state_messages.CHUNK.name:
            came[peer, request.header["index"]] += 1
        return answer

    monkeypatch.setattr(transport, "call", counted)
    return came


async def test_a_broken_transfer_goes_on_where_it_broke(monkeypatch: pytest.MonkeyPatch) -> None:
    """The donor still holds the snapshot: what has come need not come again, and the copy is of that one moment."""
    monkeypatch.setattr(late_join, "AWAY_PAUSES", Doubling(0.01, 0.02))
    async with donors_and_joiner(1) as (made, joiner):
        came = count_chunks(joiner.context.transport, monkeypatch)
        fault = Fault(FaultKind.LOSE_ANSWER, target=FIRST, method=state_messages.CHUNK.name, times=0)
        made.network.inject(fault)
        joining = asyncio.create_task(become_current(joiner))
        await eventually(lambda: len(came) >= 5, what="some chunks came")
        fault.times = 12  # each of four streams gives up after three tries
        veteran = made.replicas[0]
        frozen = await fast_weights(veteran)
        await eventually(lambda: made.network.fired[FaultKind.LOSE_ANSWER] >= 3, what="the transfer broke")
        assert veteran.pipeline.origin is not None
        await veteran.pipeline.origin.train_one()
        assert await joining == FIRST
        assert max(came.values()) == 1, "no chunk came twice"
        assert torch.equal(await fast_weights(joiner), frozen)
        assert not torch.equal(await fast_weights(veteran), frozen)
        assert failures(made) == {}


async def test_a_donor_that_falls_silent_is_left_after_the_progress_deadline() -> None:
    """It answered with a manifest and some chunks, then with nothing: the next donor gives."""
    async with donors_and_joiner() as (made, joiner):
        never = asyncio.Event()
        made.network.inject(Fault(FaultKind.DELAY, target=FIRST, method=state_messages.CHUNK.name, wait=never.wait))
        async with asyncio.timeout(30):
            reason = await join_until_the_first_has_failed(made, joiner, honest=True)
        assert "no part of its state came for 2 s" in reason


def test_the_only_donor_is_kept_however_slow() -> None:
    """That holds even if others are known that do not offer now."""
    paces = DonorPaces(floor=100.0)
    assert paces.goes_on(FIRST, 0.001, [FIRST])
    assert not paces.goes_on(FIRST, 0.001, [FIRST, SECOND])
    assert paces.next([FIRST]) == FIRST
    assert paces.goes_on(FIRST, 0.001, [FIRST])


@given(st.lists(st.floats(0.0, 1000.0), min_size=1, max_size=12))
def test_slowness_of_ones_own_costs_a_few_windows_and_ends_with_the_fastest(rates: list[float]) -> None:
    """Donors have constant rates: at most four windows are lost. The kept one is not much slower than any that was
    tried, or fast enough."""
    peers = [PeerId(f"donor-{index}") for index in range(len(rates))]
    true, paces, tried = dict(zip(peers, rates, strict=True)), DonorPaces(floor=100.0), list[float]()
    for _ in range(20):
        donor = paces.next(peers)
        tried.append(true[donor])
        if paces.goes_on(donor, true[donor], peers):
            break
    assert len(tried) <= 5
    assert true[donor] >= 100.0 or true[donor] * 2.0 >= max(tried)


async def test_a_full_donor_says_busy_and_the_joiner_waits_for_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Busy is no failure of the donor: nobody is named, and as soon as a place is free the joiner gets the state."""
    monkeypatch.setattr(late_join, "BUSY_PAUSE_SECONDS", (0.05, 0.1))
    monkeypatch.setattr(state_donor, "DONOR_PLACES", 1)
    async with donors_and_joiner(1) as (made, joiner):
        donor = made.replicas[0].donor
        stranger = MemoryTransport(made.network, PeerId("another-joiner"))
        request = {"timeout": 5.0, "progress": 5.0, "max_answer_bytes": 1 << 20}
        await stranger.call(FIRST, state_messages.OPEN.name, request_of(joiner), **request)
        assert donor.readers == 1
        with pytest.raises(Refused, match="1 joiners read this node's state") as refused:
            await joiner.context.transport.call(FIRST, state_messages.OPEN.name, request_of(joiner), **request)
        assert refused.value.reason is Refusal.BUSY
        joining = asyncio.create_task(become_current(joiner))
        asked = made.replicas[0].context.transport.traffic.received
        before = asked.get(state_messages.OFFER.name, 0)
        await eventually(lambda: asked.get(state_messages.OFFER.name, 0) > before, what="the joiner has asked")
        assert not joining.done()
        assert await joining == FIRST  # the stranger never came for its chunks: its place falls free
        assert failures(made) == {}
        assert donor.readers == 0, "who has had all chunks takes no place"
        await stranger.close()


async def test_a_donor_without_room_for_a_copy_says_busy_and_gives_when_there_is_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is no failure, and the next that asks may get one."""
    monkeypatch.setattr(late_join, "BUSY_PAUSE_SECONDS", (0.01, 0.02))
    async with donors_and_joiner(1) as (made, joiner):
        full = [True, True, False]

        def room(sizes: Sizes, folder: Path | None) -> state_messages.PackedState:
            if full.pop(0):
                raise OSError(errno.ENOSPC, "No space left on device")
            return plain(sizes, folder)

        plain = state_messages.PackedState
        monkeypatch.setattr(state_messages, "PackedState", room)
        request = {"timeout": 5.0, "progress": 5.0, "max_answer_bytes": 1 << 20}
        with pytest.raises(Refused, match="no room for a copy") as refused:
            await joiner.context.transport.call(FIRST, state_messages.OPEN.name, request_of(joiner), **request)
        assert refused.value.reason is Refusal.BUSY
        assert await become_current(joiner) == FIRST
        assert failures(made) == {}
        assert full == []


async def test_busy_donors_are_named_when_the_joiners_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The joiner does not wait for ever, and names the donors that it waited for."""
    monkeypatch.setattr(late_join, "BUSY_PAUSE_SECONDS", (0.05, 0.1))
    async with donors_and_joiner() as (made, joiner):
        made.network.inject(Fault(FaultKind.REFUSE, method=state_messages.OPEN.name, reason=Refusal.BUSY))
        with pytest.raises(late_join.NoDonor) as error:
            await joiner.copier.copy_best(FirstState(joiner).possible_donors, patience=0.5)
        assert set(error.value.reasons) == {FIRST, SECOND}
        assert all("busy" in reason for reason in error.value.reasons.values())


async def test_progress_is_told_from_nothing_to_all() -> None:
    """The events from which bar and log are made rise and end with the whole."""
    async with donors_and_joiner(1) as (made, joiner):
        await become_current(joiner)
        told = [event for event in made.events[-1] if isinstance(event, StateDownload)]
        assert told[0].received == 0
        assert told[-1].received == told[-1].total > 100_000
        assert [e.received for e in told] == sorted(e.received for e in told)


def test_only_chunks_that_differ_are_missing() -> None:
    """Whatever donor they came from; the last chunk may be short."""
    download = Download(10, 4)
    digests = [state_messages.digest(part) for part in (b"abcd", b"efgh", b"ij")]
    assert download.missing(digests) == [0, 1, 2]
    download.put(1, digests[1], memoryview(b"efgh"))
    download.put(2, digests[2], memoryview(b"ij"))
    assert download.missing(digests) == [0]
    assert download.missing([digests[1], digests[1], digests[0]]) == [0, 2]
    assert bytes(download.buffer) == b"\0\0\0\0efghij"


def offer(clock: float, readers: int = 0) -> StateOffer:
    """A donor's offer."""
    return StateOffer(clock=clock, outer_rounds=1, readers=readers, places=2)


def test_the_fresh_come_before_the_stale_and_the_idle_before_the_busy() -> None:
    """Among equals it is a random one; a claim of the far future makes nobody look stale."""
    offers = {
        PeerId("stale"): offer(700.0),
        PeerId("full"): offer(1000.0, 2),
        PeerId("idle"): offer(990.0),
        PeerId("twin"): offer(1010.0),
        PeerId("one"): offer(1000.0, 1),
        PeerId("liar"): offer(1e17, 1),
    }
    orders = [rank_donors(offers, 1000.0, random.Random(seed)) for seed in range(20)]
    assert {tuple(sorted(order[:2])) for order in orders} == {("idle", "twin")}
    assert {order[0] for order in orders} == {"idle", "twin"}
    assert {tuple(sorted(order[2:4])) for order in orders} == {("liar", "one")}
    assert all(order[4:] == ["full", "stale"] for order in orders)
    assert rank_donors({}, 1000.0, random.Random(0)) == []
    of_two = {PeerId("honest"): offer(1000.0), PeerId("liar"): offer(1e17)}
    assert {rank_donors(of_two, 1000.0, random.Random(seed))[0] for seed in range(20)} == set(of_two)


@given(st.floats(1, 1e9), st.floats(-2, 1), st.floats(0, 1))
def test_a_donor_that_is_slowed_gives_slower_and_no_other_does(rate: float, lost: float, taken: float) -> None:
    """Never below the least that keeps a transfer alive, never up by much at once or beyond what is taken."""
    lowest = 0.5
    after = next_rate(rate, taken * rate, lost, lowest)
    assert lowest <= after <= max(lowest, FASTER * rate)
    if taken == 1.0 and lost < 0.999 * (1.0 - KEPT_SHARE):
        assert after > rate
    elif taken < 1.0 / FASTER:
        assert after <= max(lowest, rate)
    if lost > 1.001 * (1.0 - KEPT_SHARE):
        assert after < rate or after == lowest


class PacedDonor:
    """A donor in its own time, of `microbatch` tokens each.

    It trains 1000 tokens a second while nothing is given. If something is, it loses `cost` times the rate, with `noise`
    on that.
    """

    def __init__(self, *, microbatch: int, cost: float, noise: float = 0.0, before: int = 0) -> None:
        self._now = self._born = 1000.0
        self._trained = LastTrained(0, 0.0)
        self.cost, self.working = cost, True
        self._microbatch, self._noise = microbatch, noise
        self._generator = random.Random(0)
        self.rate = DonorRate(lambda: self._trained, lowest=1e5, window=4.0, now=lambda: self._now)
        self._trained = LastTrained(before, 0.0)

    async def rates(self, seconds: float) -> list[float]:
        """Every two seconds; the first twenty seconds of all are silent."""
        history: list[float] = []
        done, begin = 0.0, self._now
        end = begin + seconds
        while self._now < end:
            self._now += 0.1
            self.rate.free_at = 0.0
            silent = not self.rate.giving.is_set() or self._now < self._born + 20
            if not silent:
                await self.rate.take(int(0.1 * self.rate.rate))
            lost = 0.0 if silent else min(0.9, self.cost * self.rate.rate)
            done += 0.1 * 1000.0 * (1.0 - lost) * (1.0 + self._noise * self._generator.gauss(0.0, 1.0))
            if done >= self._microbatch and self.working:
                done -= self._microbatch
                self._trained = LastTrained(self._trained.tokens + self._microbatch, self._now)
            if int((self._now - begin) / 2) > len(history):
                self.rate.tend()
                history.append(self.rate.rate)
        return history


async def test_the_rate_settles_where_training_is_hardly_slowed() -> None:
    """A donor whose pace falls by 1 % for each MB/s that it gives, and whose single windows are 2 % off."""
    settled = (await PacedDonor(microbatch=100, cost=1e-8, noise=0.1).rates(1200))[300:]
    assert max(settled) < 10e6, "never more than 10 % is lost"
    assert min(settled) > 2e6, "and it gives what costs little"


async def test_a_donor_that_loses_nothing_gives_fifty_megabytes_a_second_within_a_minute() -> None:
    """The first twenty seconds are silent; it goes up by as much again and again until something is lost."""
    donor = PacedDonor(microbatch=100, cost=2e-11)
    assert (await donor.rates(80))[-1] > 50e6
    donor.cost = 1e-7
    assert min(await donor.rates(30)) < 1e6
    donor.cost = 2e-11
    assert (await donor.rates(30))[-1] < 50e6, "who has once lost something goes up by less"


async def test_a_line_that_others_fill_is_left_at_once() -> None:
    """What giving costs rises thirtyfold: the rate is near the new one within half a minute."""
    donor = PacedDonor(microbatch=100, cost=1e-9)
    assert (await donor.rates(600))[-1] > 30e6
    donor.cost = 3e-8
    assert min(await donor.rates(30)) < 3e6


async def test_a_donor_of_long_microbatches_is_not_taken_for_slowed() -> None:
    """A window of 4 s holds one or two microbatches of 2.9 s, though nothing changes: the rate only rises."""
    rates = await PacedDonor(microbatch=2900, cost=0.0).rates(300)
    assert rates == sorted(rates)
    assert rates[-1] > 10 * rates[0]


async def test_a_donor_whose_microbatches_outlast_a_window_settles_too() -> None:
    """7 s each: a window with no end of one in it says nothing."""
    settled = (await PacedDonor(microbatch=7000, cost=1e-8).rates(2400))[600:]
    assert 2e6 < min(settled) <= max(settled) < 10e6


async def test_what_a_resumed_donor_trained_before_is_not_its_pace() -> None:
    """Ten million tokens from a checkpoint, and a clock that did not start with the node."""
    fresh, resumed = PacedDonor(microbatch=100, cost=1e-8), PacedDonor(microbatch=100, cost=1e-8, before=10_000_000)
    assert await resumed.rates(60) == await fresh.rates(60)


@pytest.mark.parametrize("again", [None, 0])
@pytest.mark.parametrize("keys", [1, 2])
async def test_who_keeps_asking_and_reads_nothing_new_keeps_no_joiner_out(
    monkeypatch: pytest.MonkeyPatch, keys: int, again: int | None
) -> None:
    """Every 19 s, just within the progress deadline, they open the held snapshot again, or ask for the same chunk. As
    many of them as there are places: a joiner that asks now and then gets its turn within three deadlines."""
    clock = SkewedClock()
    monkeypatch.setattr(ambient, "monotonic", clock.monotonic)
    settings = NodeSettings(in_flight=1, drain_seconds=1, initial_peers=(NAMED,))
    limits = LIMITS.model_copy(update={"exchange_progress_seconds": 20.0})
    async with world(micro_spec(stages=1, layers=4, outer=OUTER, limits=limits), 2, settings) as made:
        veteran, joiner = made.replicas
        await make_veteran(veteran)
        holders = [MemoryTransport(made.network, PeerId(f"holder-{n}")) for n in range(keys)]
        request = {"timeout": 5.0, "progress": 5.0, "max_answer_bytes": 1 << 20}
        named, snapshot = request_of(joiner), ""
        for holder in holders:
            answer = await holder.call(FIRST, state_messages.OPEN.name, named, **request)
            snapshot = json.loads(answer.header["manifest"])["snapshot"]
        named = Message({**named.header, "snapshot": snapshot, "index": again or 0})
        method = state_messages.OPEN.name if again is None else state_messages.CHUNK.name
        refused = 0
        for _ in range(8):
            clock.ahead += 19.0
            for holder in holders:
                with contextlib.suppress(Refused):
                    await holder.call(FIRST, method, named, **request)
            with contextlib.suppress(Refused):
                await joiner.context.transport.call(FIRST, state_messages.OPEN.name, request_of(joiner), **request)
                break
            refused += 1
        assert refused <= 3
        assert set(veteran.context.transport.refusals_given) <= {Refusal.BUSY, Refusal.UNKNOWN_SNAPSHOT}
        for holder in holders:
            await holder.close()


MB = 1 << 20
READER, JOINER, THIRD = PeerId("reader"), PeerId("joiner"), PeerId("third")


def place_is_taken_at(step: float, *, rate: float, chunks: int, wanted: bool = True) -> float:
    """Seconds until a joiner that asks every 4 s has the one place, of a reader of one chunk in `step` seconds."""
    readers = Readers(1, 20.0, MB)
    readers.begin(chunks)
    assert readers.enter(READER, 0.0)
    now, index, asks = 0.0, 0, 0.0
    while readers.has_place(READER) and index < chunks:
        now = min(index * step, asks)
        if now == asks:
            asks += 4.0
            if wanted and readers.enter(JOINER, now):
                break
        else:
            readers.gave(READER, index, now, rate)
            index += 1
    return now


def test_who_drips_loses_its_place_to_those_who_wait_and_an_honest_reader_keeps_it() -> None:
    """One new chunk within each deadline is not enough of a large state while somebody waits, and ends after minutes.
    While nobody waits it may go on. A reader that takes a quarter of its share of the rate comes to its end."""
    rate = 8.0 * MB
    assert place_is_taken_at(19.0, rate=rate, chunks=1000) < 60.0
    assert place_is_taken_at(19.0, rate=rate, chunks=1000, wanted=False) == pytest.approx(999 * 19.0, abs=40.0)
    assert place_is_taken_at(0.45, rate=rate, chunks=10000) == pytest.approx(9999 * 0.45, abs=40.0)
    assert place_is_taken_at(0.85, rate=4000.0 * MB, chunks=1000) == pytest.approx(999 * 0.85, abs=40.0)


def test_a_donor_that_gives_as_slowly_as_it_may_throws_no_reader_out() -> None:
    """It gives four chunks in a deadline to two readers, and is silent for most of a deadline now and then, whichever
    peers wait."""
    readers, rate = Readers(2, 20.0, MB), 4 * MB / 20.0
    readers.begin(10000)
    assert readers.enter(READER, 0.0)
    assert readers.enter(THIRD, 0.0)
    now = 0.0
    for index in range(200):
        for _ in range(5):
            now += 2.0
            assert not readers.enter(JOINER, now)
        now += 16.0 if index % 8 == 7 else 0.0
        assert not readers.enter(JOINER, now)
        readers.gave(READER, index, now, rate)
        readers.gave(THIRD, index, now, rate)


def test_asking_and_hanging_up_is_no_reading_nor_is_the_same_chunk_again() -> None:
    """Only a chunk that is new to its reader pays for time."""
    readers = Readers(1, 20.0, MB)
    readers.begin(100)
    assert readers.enter(READER, 0.0)
    for second in range(41):
        assert readers.enter(READER, float(second))
        readers.gave(READER, 0, float(second), MB)
        assert not readers.enter(JOINER, float(second))
    assert readers.enter(JOINER, 41.0)


def test_who_waited_longest_comes_first_and_not_who_asks_most_often() -> None:
    """A peer that has lost its place asks at once and all the time: the place is for the other, until that comes no
    more."""
    readers = Readers(1, 20.0, MB)
    readers.begin(100)
    assert readers.enter(READER, 0.0)
    for now in (10.0, 22.0, 34.0):
        assert not readers.enter(JOINER, now)
        assert readers.enter(READER, now + 2.0), "it asks for its snapshot again"
    assert not readers.enter(THIRD, 37.0)
    assert not readers.enter(THIRD, 41.0), "the place is the joiner's"
    assert not readers.renew(THIRD, 41.0)
    assert not readers.renew(READER, 41.0), "nor has it a new snapshot, and with it new time"
    assert readers.enter(JOINER, 43.0)
    assert not readers.enter(READER, 43.0)
    readers.begin(100)  # the joiner is gone
    assert not readers.enter(PeerId("fourth"), 44.0)
    assert readers.enter(READER, 41.0 + ANSWER_SECONDS + 1.0), "who asks no more is not waited for"


def test_who_has_had_all_chunks_may_ask_once_more_until_its_place_is_wanted() -> None:
    """The link may break within the last one. It loses its place before a reader that lags, and to whoever comes; where
    it begins anew it has a place like anybody else."""
    readers = Readers(2, 20.0, MB)
    readers.begin(1)
    assert readers.enter(READER, 0.0)
    assert readers.enter(THIRD, 0.0)
    readers.gave(THIRD, 0, 1.0, MB)
    assert readers.has_place(THIRD)
    assert readers.reading(1.0) == [READER]
    assert readers.renew(READER, 1.0), "nobody reads besides"
    assert readers.enter(JOINER, 50.0), "the other lags by now"
    assert [readers.has_place(each) for each in (READER, THIRD, JOINER)] == [True, False, True]
    readers.gave(JOINER, 0, 51.0, MB)
    assert readers.enter(JOINER, 51.0)
    assert readers.reading(52.0) == [JOINER]
