"""Hostile messages that parse: thousands of mutated requests against every method of a live replica.

Each starts as a valid request of a stranger and is then changed: header fields, tensors, values, order, repetition.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import math
import random
import secrets
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from noloco_node import tallies
from noloco_node.accounting import receipts
from noloco_node.accounting.statements import ContributionFile, Receipt, statement_text
from noloco_node.averaging import session as exchange
from noloco_node.averaging.side import Phase
from noloco_node.bootstrap import reachability, spec_fetch
from noloco_node.config.run_spec import AccessSpec, LimitsSpec, OuterSpec, PipelineSpec, RunSpec
from noloco_node.directory import records_call
from noloco_node.directory.records import PeerState
from noloco_node.identity.invitations import invite
from noloco_node.identity.peer_id import PeerId
from noloco_node.node.replica import Replica
from noloco_node.peers import partners as patience
from noloco_node.peers import scorecard as conduct
from noloco_node.peers.partners import Partners
from noloco_node.pipeline import messages as microbatch
from noloco_node.pipeline import server as repeats
from noloco_node.state_transfer import copies as copy_messages
from noloco_node.state_transfer import fetch as state_messages
from noloco_node.state_transfer import fetch as state_transfer
from noloco_node.state_transfer.backups import StageCopies
from noloco_node.tallies import Doubling
from noloco_node.telemetry.events import AnyEvent, OuterStep
from noloco_node.transport.errors import Refusal, Refused, TransportError
from noloco_node.transport.interface import RequestDesk, Transport
from noloco_node.transport.libp2p import Libp2pTransport
from noloco_node.transport.memory import MemoryTransport
from noloco_node.transport.messages import FrameError, Message
from noloco_node.trust import admission as access
from tests.chaos.attacks.life import throw_away_key
from tests.inside import desk_of, remembered, repeats_of, thread_of
from tests.profiles import tries
from tests.support import alongside, eventually, one_turn
from tests.swarm.mutated_requests import METHODS, REQUESTS, Recipe, changed_tensors, fields_of, recipe
from tests.swarm.wire_examples import served_methods
from tests.worlds import LENGTH, VOCABULARY, WINDOWS, Swarm, micro_spec, trainer_of, world

ALL = (2500, 500, 300)
SINGLE, EXCHANGES, BURSTS = (tries(number, one_of=6) for number in ALL)
"""Examples, for each of two targets."""
IDS_KEPT, ANSWERS_KEPT = 40, 10
"""Lowered, so that the limits are reached."""
HIDDEN = 32
LAG = 10_000
EXCHANGE = "e" * 32
OWNER = throw_away_key()
INVITED = invite(OWNER, secrets.token_hex(16), 1 << 33, "the-peer-that-is-invited").proof_for(PeerId("stranger-0"))


@dataclass
class Target:
    """A live replica, two strangers that talk to it, and what came of it."""

    spec: RunSpec
    replica: Replica
    transport: Transport
    strangers: list[Transport]
    timeout: float = 20.0
    outcomes: Counter[str] = field(default_factory=Counter[str])
    handled: Counter[str] = field(default_factory=Counter[str])
    """By method: requests that got past admission."""
    snapshot: str = ""
    copy_root: str = "none"
    trained: int = 0
    events: list[AnyEvent] = field(default_factory=list[AnyEvent])
    tasks: list[asyncio.Task[None]] = field(default_factory=list[asyncio.Task[None]])
    folder: tempfile.TemporaryDirectory[str] = field(default_factory=tempfile.TemporaryDirectory[str])

    def valid(self, recipe: Recipe) -> tuple[dict[str, Any], tuple[Tensor, ...]]:
        """Header and tensors before any change."""
        run, stage, contract = self.spec.run_id, self.replica.stage, self.replica.worker.contract
        outer, clock = self.replica.worker.outer, self.replica.worker.progress.clock
        index = recipe.number % outer.chunks
        match recipe.method:
            case microbatch.MICROBATCH.name:
                rows = 1 + recipe.number % WINDOWS
                generator = torch.Generator().manual_seed(recipe.number)
                activations = torch.randn(rows, LENGTH, HIDDEN, generator=generator)
                labels = torch.randint(VOCABULARY, (rows, LENGTH), generator=generator, dtype=torch.int32)
                header = {"id": f"{recipe.number:032x}", "budget_ms": 3000, "mode": recipe.mode, "run": run}
                drawn = {"origin": self.strangers[recipe.peer].peer_id, "origin_clock": clock}
                return {**header, **drawn, "stage": stage}, (activations, labels)
            case exchange.PROPOSE.name:
                named = {"exchange": EXCHANGE, "run": run, "stage": stage, "contract": contract}
                return {**named, "clock": clock, "tokens": 64}, ()
            case exchange.OPEN.name:
                specs = self.replica.averaging.side.opening_specs()
                return {"exchange": EXCHANGE, "clock": clock}, tuple(torch.randn(spec.shape) for spec in specs)
            case exchange.CHUNK.name:
                size = outer.codec.wire_elements(outer.chunk_size(index))
                chunk = torch.randint(256, (size,), dtype=torch.uint8) if outer.codec.modulo else torch.randn(size)
                return {"exchange": EXCHANGE, "index": index}, (chunk,)
            case exchange.LEAVE.name:
                return {"exchange": EXCHANGE}, ()
            case state_messages.OFFER.name | state_transfer.OPEN.name:
                return {"run": run, "stage": stage, "contract": contract}, ()
            case state_transfer.CHUNK.name:
                named = {"snapshot": self.snapshot, "index": recipe.number % 40}
                return {"run": run, "stage": stage, "contract": contract, **named}, ()
            case _:
                return self.beside_the_training(recipe), ()

    def beside_the_training(self, recipe: Recipe) -> dict[str, Any]:
        """The header of a method that has no tensors and is no part of training or averaging."""
        run, stage, stranger = self.spec.run_id, self.replica.stage, self.strangers[recipe.peer]
        match recipe.method:
            case copy_messages.OPEN_COPY.name:
                return {"run": run, "stage": stage}
            case copy_messages.COPY_CHUNK.name:
                return {"run": run, "stage": stage, "root": self.copy_root, "index": recipe.number % 20}
            case receipts.RECEIPT.name:
                statement = Receipt(
                    run=run, since=0.0, until=1.0, server=self.transport.peer_id, session=f"{recipe.number:016x}",
                    serial=recipe.number, microbatches=1, tokens=1,
                )  # fmt: skip
                text = statement_text(statement)
                return {"statement": text, "seal": stranger.sign(text.encode()).hex()}
            case access.ACCESS.name:
                return {"proof": INVITED.model_dump(mode="json", exclude_none=True)}
            case reachability.DIAL_BACK.name:
                return {"ports": [1 + recipe.number]}
            case records_call.RECORDS.name:
                told = {"stage": stage, "peer": f"somebody-{recipe.number}", "expires": 2e9, "signed": "AAAA"}
                return {"run": run, "records": [told] * (recipe.number % 13)}
            case _:
                return {}

    async def send(self, recipe: Recipe) -> str:
        """Send one request; its outcome: `answered`, a refusal's reason, `closed`, or `unsendable`."""
        header, tensors = self.valid(recipe)
        header |= dict(recipe.changed)
        for name in recipe.removed:
            header.pop(name, None)
        message = Message(header, changed_tensors(tensors, recipe.tensor_change, recipe.which))
        try:
            answer = await self.strangers[recipe.peer].call(
                self.transport.peer_id, recipe.method, message,
                timeout=self.timeout, progress=self.timeout, max_answer_bytes=1 << 20,
            )  # fmt: skip
        except Refused as refused:
            return str(refused.reason)
        except TransportError:
            return "closed"
        except (ValueError, FrameError):
            return "unsendable"
        self.look_at(recipe, answer)
        return "answered"

    def look_at(self, recipe: Recipe, answer: Message) -> None:
        """An answer holds nothing that would harm its reader."""
        assert all(bool(torch.isfinite(tensor).all()) for tensor in answer.tensors if tensor.is_floating_point()), (
            recipe
        )
        if recipe.method == state_transfer.OPEN.name:
            self.snapshot = json.loads(answer.header["manifest"])["snapshot"]
        if recipe.method == copy_messages.OPEN_COPY.name:
            self.copy_root = json.loads(answer.header["manifest"])["root"]
        if recipe.method == microbatch.MICROBATCH.name:
            assert math.isfinite(answer.header["loss_sum"])

    def state(self) -> tuple[object, ...]:
        """Everything that a refused request must leave as it is; the weights, moments and gradient as a hash."""
        worker = self.replica.worker
        trainer = trainer_of(worker)
        digest = hashlib.blake2b(digest_size=16)
        for vector in (trainer.master, trainer.gradient, worker.outer.slow):
            digest.update(vector.numpy().data)
        averaging = self.replica.averaging
        return (
            digest.hexdigest(), worker.progress, trainer.tokens_accumulated, worker.live_versions,
            self.replica.pipeline.server.pending, averaging.side.catch_up_from,
        )  # fmt: skip

    async def settled(self) -> None:
        """An exchange that was complete is committed, an abandoned one given up, and the next may begin at once."""
        averaging = self.replica.averaging
        averaging.side.partners = Partners()
        while (session := averaging.side.engagement.session) is not None:
            averaging.responder.give_up_if_stalled(-1.0)
            await eventually(
                lambda session=session: averaging.side.engagement.session is not session, what="the commit is done"
            )
        await eventually(
            lambda: not thread_of(self.replica.worker).waiting and not self.replica.pipeline.server.pending
        )

    async def try_one(self, recipe: Recipe) -> str:
        """Send one request and hold the replica to its promises."""
        if self.replica.averaging.side.engagement.phase is Phase.COMMITTING:  # it would look like this request's doing
            await self.settled()
        before, session = self.state(), self.replica.averaging.side.engagement.session
        outcome = await self.send(recipe)
        self.outcomes[outcome] += 1
        assert outcome != Refusal.INTERNAL, recipe
        if outcome != "answered":
            assert self.state() == before, (recipe, outcome)
            assert self.replica.averaging.side.engagement.session in (session, None)
        assert all(not task.done() for task in self.tasks), "a background task has died"
        return outcome

    def check_books(self) -> None:
        """Nothing has grown beyond its limit, and nothing is left under way."""
        server, averaging = self.replica.pipeline.server, self.replica.averaging
        trained, answers, ids = remembered(repeats_of(server))
        assert max(len(trained), len(ids)) <= IDS_KEPT
        assert len(answers) <= ANSWERS_KEPT
        assert not server._under_way
        assert server.pending == 0
        assert self.replica.worker.live_versions == 1
        for norms in (averaging.side.bound.difference._latest, averaging.side.bound._regress._latest):
            assert len(norms) <= 64
            assert all(math.isfinite(norm) for norm in norms.values())
        assert thread_of(self.replica.worker).waiting == 0
        assert set(self.transport.traffic.received) <= {*METHODS, "unknown"}
        for event in self.events:
            if isinstance(event, OuterStep) and event.kind == "paired":
                assert event.replica_divergence is not None
                assert math.isfinite(event.replica_divergence)
                assert event.difference_norm is not None
                assert math.isfinite(event.difference_norm)
        trainer = trainer_of(self.replica.worker)
        for vector in (trainer.master, self.replica.worker.outer.slow):
            assert bool(torch.isfinite(vector).all())

    async def still_trains(self) -> None:
        """A valid microbatch is trained, and takes an inner step that is not skipped."""
        await self.settled()
        self.check_books()
        self.trained += 1
        before = self.replica.worker.progress
        weights = trainer_of(self.replica.worker).master.clone()
        for number in range(4):
            fresh = Recipe(
                microbatch.MICROBATCH.name, 3, changed=(("id", f"{1 << 100 | self.trained << 8 | number:032x}"),)
            )
            assert await self.send(fresh) == "answered"
        after = self.replica.worker.progress
        assert after.tokens > before.tokens
        assert after.steps > before.steps
        assert not torch.equal(weights, trainer_of(self.replica.worker).master), "the step was skipped"


def fuzz_spec(stages: int) -> RunSpec:
    """Exchanges are accepted at any time; deadlines are short; the rate stays up however far the clock goes. Of three
    stages, the exchanges are by a modulo codec."""
    return micro_spec(
        stages=stages,
        steps=1_000_000,
        outer=OuterSpec(
            inner_steps=10**6, min_inner_steps=0, max_lag_tokens=LAG, codec="fp32" if stages == 2 else "int4"
        ),
        pipeline=PipelineSpec(budget_seconds=4.0, progress_seconds=2.0),
        limits=LimitsSpec(chunk_bytes=4096, exchange_progress_seconds=5, record_seconds=5),
        microbatches_a_step=1,
    )


async def serve_the_rest(target: Target, file: ContributionFile) -> None:
    """All that a daemon serves and a replica alone does not."""
    spec, replica, transport = target.spec, target.replica, target.transport
    spec_fetch.serve_spec(transport, spec)
    replica.signed.serve()
    rule = AccessSpec(mode="invited", owner=OWNER.peer_id)
    access.Access(spec.model_copy(update={"access": rule})).serve(transport)
    transport.guard(lambda _: True)  # or none of the strangers would come to anything else

    async def nowhere() -> dict[PeerId, list[str]]:
        return {}

    reachability.serve_dial_back(transport, nowhere)
    progress = lambda: replica.worker.progress  # noqa: E731 - as the daemon passes it
    receipts.Receipts(spec.run_id, replica.stage, transport, replica.pipeline.ledger, progress, file).start()
    copies = StageCopies(spec, [0] * spec.stages, transport, random.Random(0))
    copies.serve()
    target.tasks.append(asyncio.create_task(copies.keep(replica.membership, replica.worker)))


def count_handled(target: Target, desk: RequestDesk) -> None:
    """Count the requests that get past admission, so that their bodies are looked at."""
    for name, method in desk._methods.items():
        original = method.handle

        async def handle(peer: PeerId, message: Message, name: str = name, original: Any = original) -> Message:
            target.handled[name] += 1
            return await original(peer, message)

        method.handle = handle


async def start(made: Swarm, spec: RunSpec, stage: int, strangers: list[Transport]) -> Target:
    """Let all replicas accept; the one of `stage` is the target."""
    replica = made.of_stage(stage)[0]
    transport = replica.context.transport
    assert isinstance(transport, MemoryTransport | Libp2pTransport)
    target = Target(spec, replica, transport, strangers, events=made.events[made.replicas.index(replica)])
    file = ContributionFile(Path(target.folder.name) / "contribution.jsonl")
    await serve_the_rest(target, file)
    count_handled(target, desk_of(transport))
    for each in made.replicas:
        for participant in each.participants:
            participant.open()
        await each.membership.announce(PeerState.TRAINING)
    target.tasks.append(asyncio.create_task(replica.averaging.run()))
    if spec.stages != stage + 1:
        await replica.membership.refresh()
    return target


async def end(target: Target) -> None:
    """Stop the target's own loops."""
    for task in target.tasks:
        task.cancel()
    await asyncio.wait(target.tasks)
    target.folder.cleanup()


@contextlib.asynccontextmanager
async def memory_target(stages: int) -> AsyncIterator[Target]:
    """The replica of stage 1 in memory: the last of two, or the middle of three."""
    spec = fuzz_spec(stages)
    async with world(spec) as made:
        strangers: list[Transport] = [MemoryTransport(made.network, PeerId(f"stranger-{i}")) for i in (0, 1)]
        target = await start(made, spec, 1, strangers)
        yield target
        await end(target)
        for stranger in strangers:
            await stranger.close()


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """One loop for all examples."""
    with asyncio.Runner() as made:
        yield made


def keep_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small books, so that their limits are reached."""
    monkeypatch.setattr(tallies, "MOST_PEERS", IDS_KEPT)
    monkeypatch.setattr(repeats, "FEW_PEERS", ANSWERS_KEPT)
    never_tire_of_strangers(monkeypatch)


def never_tire_of_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or they would be banned, or left alone, after the first few examples."""
    monkeypatch.setattr(conduct, "TOLERATED", math.inf)
    monkeypatch.setattr(patience, "RESTS", Doubling(0.0, 0.0))
    monkeypatch.setattr(patience, "REST_A_SECOND", 0.0)


@pytest.fixture(params=[2, 3], ids=["last", "middle"])
def target(request: pytest.FixtureRequest, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch) -> Iterator[Target]:
    """A target in memory whose books are small."""
    keep_few(monkeypatch)
    context = memory_target(request.param)
    made = runner.run(context.__aenter__())
    try:
        yield made
    finally:
        runner.run(context.__aexit__(None, None, None))


def check_outcomes(target: Target, promised: int, caplog: pytest.LogCaptureFixture) -> None:
    """As many as promised were sent, a fifth of them reached a handler, and no handler failed."""
    outcomes = target.outcomes
    sent = outcomes.total() - outcomes["unsendable"]
    assert sent >= promised, outcomes
    assert set(outcomes) <= {"answered", "closed", "unsendable", *map(str, Refusal)}
    assert outcomes["closed"] <= sent // 50, outcomes
    assert target.handled.total() >= 0.2 * sent, (target.handled, outcomes)
    assert Refusal.INTERNAL not in target.transport.refusals_given
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


def test_each_mutated_request_is_answered_or_refused_and_a_refused_one_changes_nothing(
    runner: asyncio.Runner, target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    """Weights, gradient, clock, pending work and versions bitwise as before; the books within their limits."""

    async def one(asked: Recipe) -> None:
        async with asyncio.timeout(60):
            if asked.number % 5:
                await target.settled()
            await target.try_one(asked)
            if sum(target.outcomes.values()) % 100 == 0:
                await target.still_trains()

    for number in range(SINGLE):
        rng = random.Random(number)
        runner.run(one(recipe(rng, METHODS if rng.random() < 0.5 else (microbatch.MICROBATCH.name,))))
    runner.run(target.still_trains())
    check_outcomes(target, SINGLE * 9 // 10, caplog)
    assert set(target.handled) >= set(METHODS) - {"no.such.method", exchange.OPEN.name, exchange.CHUNK.name}
    assert len(remembered(repeats_of(target.replica.pipeline.server))[0]) == IDS_KEPT, (
        "the limit must have been reached"
    )
    assert len(remembered(repeats_of(target.replica.pipeline.server))[1]) == ANSWERS_KEPT
    for reason in ("malformed", "unknown_exchange", "unknown_method", "not_finite", "too_large", "wrong_run"):
        assert target.outcomes[reason] > 0, target.outcomes


def test_exchanges_that_go_wrong_anywhere_end_in_a_finite_step_or_in_none(
    runner: asyncio.Runner, target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    """Proposed, opened, chunks sent; anything of it mutated, repeated, left out, or said by somebody else."""
    committed = 0

    async def one(opening: Recipe, chunks: list[Recipe], complete: bool) -> None:
        nonlocal committed
        await target.settled()
        before = target.replica.worker.progress
        assert await target.try_one(Recipe(exchange.PROPOSE.name, 0)) == "answered"
        if await target.try_one(opening) != "answered":
            await target.try_one(Recipe(exchange.OPEN.name, 0))
        for chunk in chunks:
            await target.try_one(chunk)
        if complete:
            await asyncio.gather(
                *(
                    target.send(Recipe(exchange.CHUNK.name, index))
                    for index in range(target.replica.worker.outer.chunks)
                )
            )
        await target.settled()
        after = target.replica.worker.progress
        committed += after.outer_rounds - before.outer_rounds
        assert abs(after.clock - before.clock) <= LAG / 2
        target.check_books()
        if committed % 20 == 0:
            await target.still_trains()

    for number in range(EXCHANGES // 4):
        rng = random.Random(number)
        chunks = [recipe(rng, (exchange.CHUNK.name,)) for _ in range(rng.randint(2, 6))]
        parts = one(recipe(rng, (exchange.OPEN.name,)), chunks, rng.random() < 0.5)
        runner.run(asyncio.wait_for(parts, 60))
    runner.run(target.still_trains())
    assert committed >= EXCHANGES // 40, "some must have come to their end"
    assert set(target.handled) >= {exchange.PROPOSE.name, exchange.OPEN.name, exchange.CHUNK.name}
    check_outcomes(target, EXCHANGES, caplog)


def test_bursts_of_requests_leave_nothing_behind(
    runner: asyncio.Runner, target: Target, caplog: pytest.LogCaptureFixture
) -> None:
    """Several at once, repeats among them, some callers gone before the answer."""

    async def impatient(recipe: Recipe) -> None:
        async with alongside(target.send(recipe)):
            await one_turn()

    async def one(batch: list[Recipe], abandoned: Recipe) -> None:
        await target.settled()
        results = await asyncio.gather(*(target.send(recipe) for recipe in batch), impatient(abandoned))
        target.outcomes.update(str(result) for result in results[:-1])
        await target.settled()
        await target.still_trains()

    for number in range(BURSTS // 6):
        rng = random.Random(number)
        some = (METHODS, (microbatch.MICROBATCH.name, exchange.PROPOSE.name, exchange.OPEN.name))
        batch = [recipe(rng, rng.choice(some)) for _ in range(rng.randint(7, 9))]
        runner.run(asyncio.wait_for(one(batch[1:], batch[0]), 60))
    check_outcomes(target, BURSTS * 9 // 10, caplog)


def test_no_method_that_is_served_is_left_out() -> None:
    """Every name that is passed to `serve` in the code, and every field of its header."""
    assert served_methods() == set(METHODS) - {"no.such.method"}
    models = {model for model in REQUESTS.values() if model}
    assert all(set(fields_of(method)) > set(model.model_fields) for method, model in REQUESTS.items() if model)
    assert len(models) >= 11
