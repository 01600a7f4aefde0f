"""The contribution file: only what was signed counts, once, and nothing that was written is lost."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from noloco_node.accounting import receipts as receipts_module
from noloco_node.accounting.receipts import RECEIPT, Receipts, open_receipts
from noloco_node.accounting.statements import (
    ContributionFile,
    Receipt,
    Work,
    read_contribution,
    read_entries,
    statement_text,
)
from noloco_node.aio import Pulse
from noloco_node.identity.keys import Identity, load_or_create_identity, sign_statement
from noloco_node.identity.peer_id import PeerId
from noloco_node.pipeline.messages import Ledger
from noloco_node.tallies import MOST_PEERS
from noloco_node.training.progress import Progress
from noloco_node.transport.calls import ASKED_AT_ONCE
from noloco_node.transport.errors import Refusal, Refused
from noloco_node.transport.memory import Fault, FaultKind, MemoryNetwork, MemoryTransport
from noloco_node.transport.messages import Message
from tests.inside import served_by
from tests.support import eventually, files_up_to, one_turn
from tests.worlds import micro_spec, run_to_the_end, virtually, world

RUN = "r" * 32
SERVER, SERVED, STRANGER = PeerId("server-of-stage-1"), PeerId("served-of-stage-0"), PeerId("stranger")


def work(**changes: int) -> Work:
    """An hour's work."""
    counts = {"tokens": 100, "drawn": 5, "served": 7, "outer_rounds": 2, **changes}
    return Work(run=RUN, since=1000.0, until=4600.0, stage=1, **counts)


def receipt(server: PeerId, serial: int = 0, microbatches: int = 3, tokens: int = 60) -> Receipt:
    """What `server` did for the signer."""
    return Receipt(
        run=RUN,
        since=1.0,
        until=2.0,
        server=server,
        session="0" * 16,
        serial=serial,
        microbatches=microbatches,
        tokens=tokens,
    )


@pytest.fixture
def owner(tmp_path: Path) -> Identity:
    return load_or_create_identity(tmp_path / "owner.key")


@pytest.fixture
def peer(tmp_path: Path) -> Identity:
    return load_or_create_identity(tmp_path / "peer.key")


def write(path: Path, identity: Identity, statement: Work | Receipt) -> None:
    """Append a statement signed by `identity`."""
    text = statement_text(statement)
    ContributionFile(path).append(identity.peer_id, text, sign_statement(identity, text.encode()))


def test_work_and_receipts_of_many_lives_add_up(tmp_path: Path, owner: Identity, peer: Identity) -> None:
    """The file is opened anew for each line, as by restarts; a receipt that was filed twice counts once."""
    path = tmp_path / "contribution.jsonl"
    for _ in range(3):
        write(path, owner, work())
    write(path, peer, receipt(owner.peer_id, serial=0))
    write(path, peer, receipt(owner.peer_id, serial=0))
    write(path, peer, receipt(owner.peer_id, serial=1, microbatches=4, tokens=80))
    total = read_contribution(path, owner.peer_id)
    assert (total.tokens, total.drawn, total.served, total.outer_rounds) == (300, 15, 21, 6)
    assert (total.seconds, total.first) == (3 * 3600.0, 1000.0)
    assert {p: (r.microbatches, r.tokens) for p, r in total.receipts.items()} == {peer.peer_id: (7, 140)}
    assert total.refused == 0


def test_a_torn_last_line_is_left_out_and_the_next_one_stands_alone(tmp_path: Path, owner: Identity) -> None:
    """Cut at any byte: what was whole before counts, and so does what is written afterwards."""
    path = tmp_path / "contribution.jsonl"
    write(path, owner, work())
    whole = path.read_bytes()
    for cut in range(1, len(whole)):
        path.write_bytes(whole + whole[:cut])
        assert read_contribution(path, owner.peer_id).tokens == 100
    write(path, owner, work(tokens=11))
    total = read_contribution(path, owner.peer_id)
    assert total.tokens in (111, 211)  # a line cut right before its end is whole once it is closed


def test_a_full_disk_costs_the_line_that_it_refuses_and_no_other(tmp_path: Path, owner: Identity) -> None:
    """What it took of the line stayed, the next statement was written behind it, and both were lost."""
    path = tmp_path / "contribution.jsonl"
    file, text = ContributionFile(path), statement_text(work())
    line = owner.peer_id, text, sign_statement(owner, text.encode())
    file.append(*line)
    with files_up_to(path.stat().st_size + 50), pytest.raises(OSError, match="No space left"):
        file.append(*line)
    file.append(*line)
    total = read_contribution(path, owner.peer_id)
    assert (total.tokens, total.refused) == (200, 0)


def test_forged_lines_do_not_count(tmp_path: Path, owner: Identity, peer: Identity) -> None:
    """Altered numbers, work signed by another, receipts signed by oneself or made out to another, and rubbish."""
    path = tmp_path / "contribution.jsonl"
    write(path, owner, work())
    honest = json.loads(path.read_bytes())
    altered = {**honest, "statement": honest["statement"].replace('"tokens":100', '"tokens":999')}
    with path.open("a") as file:
        file.write(json.dumps(altered) + "\n")
        file.write(json.dumps({**honest, "signer": peer.peer_id}) + "\n")
        file.write("{}\nrubbish\n[1]\n" + json.dumps({**honest, "seal": "xyz"}) + "\n")
        file.write(json.dumps({**honest, "signer": 5}) + "\n" + "x" * 20000 + "\n")
    write(path, peer, work())
    write(path, owner, receipt(owner.peer_id))
    write(path, peer, receipt(peer.peer_id))
    total = read_contribution(path, owner.peer_id)
    assert (total.tokens, total.receipts) == (100, {})
    assert total.refused == 11


# Between peers


@asynccontextmanager
async def two_nodes(folder: Path) -> AsyncIterator[tuple[MemoryNetwork, Receipts, Receipts, Ledger, Ledger]]:
    """One that serves and one that is served, each with a file in `folder`."""
    network = MemoryNetwork()
    server, served = (MemoryTransport(network, name) for name in (SERVER, SERVED))
    ledgers = Ledger(), Ledger()
    one = await open_receipts(folder / "server", RUN, 1, server, ledgers[0], Progress)
    two = await open_receipts(folder / "served", RUN, 0, served, ledgers[1], Progress)
    try:
        yield network, one, two, *ledgers
    finally:
        await server.close()
        await served.close()


def serve(server: Ledger, served: Ledger, microbatches: int) -> None:
    """The server trains microbatches of 20 tokens for the served."""
    for _ in range(microbatches):
        server.note_served(SERVED, 20)
        served.note_received(SERVER, 20)


def filed(folder: Path) -> list[tuple[int, int, int]]:
    """Serial, microbatches and tokens of the receipts in the server's file."""
    check = MemoryTransport(MemoryNetwork(), STRANGER).signed_by
    entries = [entry for entry in read_entries(folder / "server", check) if entry is not None]
    receipts = [entry.statement for entry in entries if isinstance(entry.statement, Receipt)]
    return [(row.serial, row.microbatches, row.tokens) for row in receipts]


async def test_what_a_peer_did_comes_back_as_a_receipt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Increments, each once; a peer that did nothing since gets none."""
    monkeypatch.setattr(receipts_module, "LEAST_SECONDS", 0.0)
    async with two_nodes(tmp_path) as (_, _, served, at_server, at_served):
        serve(at_server, at_served, 3)
        await served.settle()
        await served.settle()
        serve(at_server, at_served, 2)
        await served.settle()
    assert filed(tmp_path) == [(0, 3, 60), (1, 2, 40)]
    assert not at_server.done_for
    assert not at_served.done_by


async def test_a_lost_receipt_comes_again_and_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost on its way there: it is filed later. Lost on its way back: it is filed once, and known again."""
    monkeypatch.setattr(receipts_module, "LEAST_SECONDS", 0.0)
    async with two_nodes(tmp_path) as (network, _, served, at_server, at_served):
        serve(at_server, at_served, 3)
        network.inject(Fault(FaultKind.LOSE_REQUEST, method=RECEIPT.name, times=1))
        await served.settle()
        assert filed(tmp_path) == []
        network.inject(Fault(FaultKind.LOSE_ANSWER, method=RECEIPT.name, times=1))
        await served.settle()
        assert filed(tmp_path) == [(0, 3, 60)]
        serve(at_server, at_served, 2)
        await served.settle()  # the one in doubt goes first
        await served.settle()
        assert network.fired == {FaultKind.LOSE_REQUEST: 1, FaultKind.LOSE_ANSWER: 1}
    assert filed(tmp_path) == [(0, 3, 60), (1, 2, 40)]


async def test_forged_and_exaggerated_receipts_are_refused(tmp_path: Path) -> None:
    """Not signed by the sender, made out to another, of another run, for more than was done, or no receipt at all:
    nothing of it is filed."""
    async with two_nodes(tmp_path) as (network, _, _, at_server, at_served):
        serve(at_server, at_served, 3)
        at_server.note_served(STRANGER, 20)
        stranger, peer = MemoryTransport(network, STRANGER), MemoryTransport(network, SERVED)
        good = receipt(SERVER)

        async def send(sender: MemoryTransport, signer: MemoryTransport, text: str) -> None:
            header = {"statement": text, "seal": signer.sign(text.encode()).hex()}
            await sender.call(SERVER, RECEIPT.name, Message(header), timeout=5, progress=5, max_answer_bytes=0)

        for sender, signer, text, complaint in (
            (stranger, peer, statement_text(good), "not signed by its sender"),
            (peer, stranger, statement_text(good), "not signed by its sender"),
            (peer, peer, statement_text(good.model_copy(update={"server": STRANGER})), "made out to another"),
            (peer, peer, statement_text(good.model_copy(update={"run": "other"})), "wrong_run"),
            (peer, peer, statement_text(good.model_copy(update={"microbatches": 4})), "more than this node"),
            (peer, peer, statement_text(good.model_copy(update={"tokens": 61})), "more than this node"),
            (stranger, stranger, statement_text(good), "more than this node"),
            (peer, peer, statement_text(work()), "no receipt"),
            (peer, peer, "{", "no receipt"),
        ):
            with pytest.raises(Refused, match=complaint):
                await send(sender, signer, text)
        assert filed(tmp_path) == []
        await send(peer, peer, statement_text(good))
        serve(at_server, Ledger(), 9)
        await send(peer, peer, statement_text(good.model_copy(update={"serial": 1})))
        with pytest.raises(Refused, match="busy"):
            await send(peer, peer, statement_text(good.model_copy(update={"serial": 2})))
    assert filed(tmp_path) == [(0, 3, 60), (1, 3, 60)]


def slow_server(server: Receipts, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Its answers take a while, as over a slow link."""
    method = served_by(server._transport)[RECEIPT.name]
    handle = method.handle

    async def slowly(peer: PeerId, message: Message) -> Message:
        await asyncio.sleep(seconds)
        return await handle(peer, message)

    monkeypatch.setattr(method, "handle", slowly)


async def test_the_last_receipt_has_time_on_a_slow_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That holds also if a first try is lost on its way."""
    async with two_nodes(tmp_path) as (network, server, served, at_server, at_served):
        slow_server(server, monkeypatch, 1.5)
        network.inject(Fault(FaultKind.REFUSE, method=RECEIPT.name, times=1, reason=Refusal.BUSY))
        serve(at_server, at_served, 3)
        await served.finish()
        assert network.fired == {FaultKind.REFUSE: 1}
    assert filed(tmp_path) == [(0, 3, 60)]


async def test_a_peer_that_is_gone_is_not_waited_for(tmp_path: Path) -> None:
    """The others may all have ended before."""
    async with two_nodes(tmp_path) as (network, _, served, at_server, at_served):
        network.inject(Fault(FaultKind.UNREACHABLE, target=SERVER))
        serve(at_server, at_served, 3)
        async with asyncio.timeout(receipts_module.SOON_SECONDS):
            await served.finish()


async def test_who_begins_to_leave_settles_at_once_and_who_leaves_at_once_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the work still goes on, and its peers are there; a second signal waits for no receipt."""
    async with two_nodes(tmp_path) as (_, server, served, at_server, at_served):
        moved, leaving = Pulse(), asyncio.Event()
        beside = asyncio.create_task(served.beside(_for_ever(), moved, leaving.is_set))
        serve(at_server, at_served, 3)
        await one_turn()
        moved.fire()
        await one_turn()
        assert filed(tmp_path) == []
        leaving.set()

        def settled() -> bool:
            moved.fire()
            return filed(tmp_path) == [(0, 3, 60)]

        await eventually(settled, what="it settles when it begins to leave")
        serve(at_server, at_served, 1)
        slow_server(server, monkeypatch, 3600.0)
        beside.cancel()
        async with asyncio.timeout(60):
            with pytest.raises(asyncio.CancelledError):
                await beside


@pytest.mark.parametrize("step", [-3600.0, 3600.0])
async def test_a_clock_that_is_set_makes_nobodys_time_at_work_longer_or_shorter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: float
) -> None:
    now, wall = 500.0, 9000.0
    monkeypatch.setattr(receipts_module.ambient, "monotonic", lambda: now)
    monkeypatch.setattr(receipts_module.ambient, "wall", lambda: wall)
    owner, progress = load_or_create_identity(tmp_path / "key"), Progress()
    transport = MemoryTransport(MemoryNetwork(), owner.peer_id)
    ledger, signed = Ledger(), list[bytes]()
    monkeypatch.setattr(transport, "sign", lambda text: signed.append(text) or sign_statement(owner, text))
    keeper = Receipts(RUN, 1, transport, ledger, lambda: progress, ContributionFile(tmp_path / "file"))
    for peer in (SERVER, SERVED):
        ledger.note_received(peer, 20)
        now, wall = now + 60.0, wall + 60.0 + step
        progress = replace(progress, tokens=progress.tokens + 100)
        await keeper.settle()
    given = [Receipt.model_validate_json(text) for text in signed if b'"receipt"' in text]
    await transport.close()
    assert [each.until - each.since for each in given] == pytest.approx([60.0, 60.0])
    assert read_contribution(tmp_path / "file", owner.peer_id).seconds == pytest.approx(120.0)


async def test_a_clock_before_1970_ends_no_book(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was worked since before that time was no statement, and the node ended with a traceback."""
    transport = MemoryTransport(MemoryNetwork(), SERVER)
    keeper = Receipts(RUN, 1, transport, Ledger(), lambda: Progress(tokens=100), ContributionFile(tmp_path / "file"))
    begun = receipts_module.ambient.monotonic()
    monkeypatch.setattr(receipts_module.ambient, "monotonic", lambda: begun + 60.0)
    monkeypatch.setattr(receipts_module.ambient, "wall", lambda: 10.0)
    await keeper.settle()
    total = read_contribution(tmp_path / "file", SERVER, transport.signed_by)
    await transport.close()
    assert (total.tokens, total.seconds) == (100, 10.0)


async def test_work_that_is_being_written_as_the_node_leaves_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keeper is cancelled while a slow disk takes its line: the line is on the disk, and the last one holds only
    what came since. No two threads write at once."""
    transport, file = MemoryTransport(MemoryNetwork(), SERVER), ContributionFile(tmp_path / "file")
    plain, writing, go_on = file.append, threading.Event(), threading.Event()
    writers: list[int] = []

    def slow(signer: PeerId, text: str, seal: bytes) -> None:
        writers.append(writers[-1] + 1 if writers else 1)
        writing.set()
        assert go_on.wait(20)
        plain(signer, text, seal)
        writers.append(writers[-1] - 1)

    monkeypatch.setattr(file, "append", slow)
    progress, ended, moved = Progress(), asyncio.Event(), Pulse()
    keeper = Receipts(RUN, 1, transport, Ledger(), lambda: progress, file)
    keeper.start()

    async def work() -> None:
        await ended.wait()

    beside = asyncio.create_task(keeper.beside(work(), moved, lambda: True))
    await one_turn()
    progress = Progress(tokens=100)

    def begun() -> bool:
        moved.fire()
        return writing.is_set()

    await eventually(begun, what="it writes")
    progress = Progress(tokens=130)
    ended.set()
    for _ in range(10):
        await one_turn()
    go_on.set()
    await beside
    assert read_contribution(tmp_path / "file", SERVER, transport.signed_by).tokens == 130
    assert writers == [1, 0, 1, 0]
    await transport.close()


async def test_a_keeper_that_fails_is_told_of_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It was told at the run's end, weeks later."""
    transport, ended, moved = MemoryTransport(MemoryNetwork(), SERVER), asyncio.Event(), Pulse()
    keeper = Receipts(RUN, 1, transport, Ledger(), Progress, ContributionFile(tmp_path / "file"))

    async def fails() -> None:
        raise RuntimeError("no file")

    async def work() -> None:
        await ended.wait()

    with monkeypatch.context() as broken:
        broken.setattr(keeper, "settle", fails)
        beside = asyncio.create_task(keeper.beside(work(), moved, lambda: True))

        def told() -> bool:
            moved.fire()
            return "the contribution file is no longer kept: RuntimeError('no file')" in caplog.text

        await eventually(told, what="it is told")
    ended.set()
    await beside
    await transport.close()


async def _for_ever() -> None:
    await asyncio.Event().wait()


async def test_a_restart_forgets_no_receipt_and_files_none_twice(tmp_path: Path) -> None:
    """The server's next life has counted nothing yet: the same receipt is refused, which is no offence."""
    async with two_nodes(tmp_path) as (_, _, served, at_server, at_served):
        serve(at_server, at_served, 3)
        await served.settle()
    network = MemoryNetwork()
    server, peer = MemoryTransport(network, SERVER), MemoryTransport(network, SERVED)
    await open_receipts(tmp_path / "server", RUN, 1, server, Ledger(), Progress)
    entry = next(read_entries(tmp_path / "server", server.signed_by))
    assert entry is not None
    text = statement_text(entry.statement)
    header = {"statement": text, "seal": peer.sign(text.encode()).hex()}
    with pytest.raises(Refused, match=Refusal.NOT_COUNTED):
        await peer.call(SERVER, RECEIPT.name, Message(header), timeout=5, progress=5, max_answer_bytes=0)
    assert filed(tmp_path) == [(0, 3, 60)]
    await server.close()
    await peer.close()


async def test_of_many_receipts_some_are_under_way_and_those_that_answer_come_first(tmp_path: Path) -> None:
    """A node of a large swarm was served by hundreds in a minute."""
    network, ledger = MemoryNetwork(), Ledger()
    served = MemoryTransport(network, SERVED)
    keeper = await open_receipts(tmp_path / "served", RUN, 0, served, ledger, Progress)
    order, under_way, most = list[PeerId](), 0, 0
    servers = [MemoryTransport(network, PeerId(f"server-{number:03}")) for number in range(3 * ASKED_AT_ONCE)]

    for server in servers:

        async def handle(_peer: PeerId, _message: Message, server: PeerId = server.peer_id) -> Message:
            nonlocal under_way, most
            under_way, most = under_way + 1, max(most, under_way + 1)
            order.append(server)
            await one_turn()
            under_way -= 1
            return Message({})

        server.serve(RECEIPT.name, lambda *_: None, handle, max_concurrent_per_peer=1)
        ledger.note_received(server.peer_id, 20)
    answering = [server.peer_id for server in servers[-ASKED_AT_ONCE:]]
    for peer in answering:
        served.peer_stats.answered(peer)
    await keeper.settle()
    assert len(order) == len(servers)
    assert most <= ASKED_AT_ONCE
    assert set(order[:ASKED_AT_ONCE]) == set(answering)
    for transport in (served, *servers):
        await transport.close()


async def test_own_work_is_written_as_increments(tmp_path: Path) -> None:
    """Nothing for nothing; the sum is what the counts say, whatever they began at."""
    transport, ledger = MemoryTransport(MemoryNetwork(), SERVER), Ledger()
    progress = Progress(tokens=1000, outer_rounds=40)  # copied or resumed: not this life's work
    keeper = Receipts(RUN, 1, transport, ledger, lambda: progress, ContributionFile(tmp_path / "file"))
    keeper.start()
    await keeper.settle()
    assert not (tmp_path / "file").exists()
    for rounds in (41, 43):
        progress = replace(progress, tokens=progress.tokens + 50, outer_rounds=rounds)
        ledger.served += 2
        await keeper.settle()
        await keeper.settle()
    progress = progress.as_copy_of(5000.0, 90)  # a stage peer's rounds are none of its own
    await keeper.settle()
    total = read_contribution(tmp_path / "file", SERVER, transport.signed_by)
    assert (total.tokens, total.served, total.outer_rounds) == (100, 4, 3)
    assert len((tmp_path / "file").read_bytes().splitlines()) == 2
    await transport.close()


def test_the_books_by_peer_are_bounded() -> None:
    """A crowd of names does not grow them without end."""
    ledger = Ledger()
    for number in range(MOST_PEERS + 50):
        ledger.note_served(PeerId(f"peer-{number}"), 1)
    assert len(ledger.done_for) == MOST_PEERS
    assert ledger.served == MOST_PEERS + 50


@virtually
async def test_a_training_swarm_counts_the_same_on_both_sides() -> None:
    """What stage 0 says that stage 1 did for it is what stage 1 counted, peer by peer, to the token."""
    async with world(micro_spec(stages=2, steps=12), replicas=2) as made:
        await run_to_the_end(made)
        await one_turn()
        by_server = {
            (server.context.transport.peer_id, peer): (done.microbatches, done.tokens)
            for server in made.of_stage(1)
            for peer, done in server.pipeline.ledger.done_for.items()
        }
        by_served = {
            (peer, served.context.transport.peer_id): (done.microbatches, done.tokens)
            for served in made.of_stage(0)
            for peer, done in served.pipeline.ledger.done_by.items()
        }
        assert by_server == by_served
        assert (
            sum(count for count, _ in by_server.values())
            == sum(r.pipeline.ledger.trained for r in made.of_stage(0))
            > 10
        )
