"""The call in which peers tell each other records: what it says of the other side, and what it never does."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from noloco_node.directory.records import SignedRecord
from noloco_node.directory.records_call import FEW_TOLD, MOST_TOLD, RECORDS, RecordsMessage, serve_records, tell
from noloco_node.identity.peer_id import PeerId
from noloco_node.transport.calls import call
from noloco_node.transport.errors import Refusal, Refused
from noloco_node.transport.memory import Fault, FaultKind, MemoryNetwork, MemoryTransport
from noloco_node.transport.messages import Message
from tests.memory_directory import MemoryDirectory, MemoryDirectoryHub

RUN = "run-under-test"
ONE, TWO = PeerId("peer-number-one"), PeerId("peer-number-two")


class Book(MemoryDirectory):
    """A directory that says what it is given, and remembers what it was told."""

    def __init__(self, *says: SignedRecord) -> None:
        super().__init__(MemoryDirectoryHub(1))
        self.says = says
        self.heard: list[tuple[PeerId, tuple[SignedRecord, ...]]] = []

    def to_tell(self, most: int) -> tuple[SignedRecord, ...]:
        return self.says[:most]

    def told(self, teller: PeerId, records: Sequence[SignedRecord]) -> int:
        self.heard.append((teller, tuple(records)))
        return len(records)


def row(number: int) -> SignedRecord:
    """What some peer signed."""
    return SignedRecord(0, PeerId(f"peer-number-{number}"), 2e9 + number / 7, bytes(range(number, number + 200)))


async def test_both_sides_tell_and_hear_whole_records_and_no_more_than_fit() -> None:
    """Bytes, stage and expiry arrive as they were sent; of many only the first few travel."""
    network, many = MemoryNetwork(), [row(number) for number in range(MOST_TOLD + 5)]
    caller, server = MemoryTransport(network, ONE), MemoryTransport(network, TWO)
    asking, asked = Book(*many), Book(row(50))
    serve_records(server, RUN, asked)
    assert (await tell(caller, TWO, RUN, asking)).answered
    assert asked.heard == [(ONE, tuple(many[:MOST_TOLD]))]
    assert asking.heard == [(TWO, (row(50),))]


@pytest.mark.parametrize("says", [{"stage": 0}, {}], ids=["what it serves", "nothing"])
async def test_a_newcomer_is_told_many_in_its_first_answer_and_few_from_then_on(says: dict[str, int]) -> None:
    """One that never says what it serves would have a hundred times the bytes that it sends, again and again."""
    network, many = MemoryNetwork(), [row(number) for number in range(MOST_TOLD)]
    caller, server, book = MemoryTransport(network, ONE), MemoryTransport(network, TWO), Book()
    serve_records(server, RUN, Book(*many))
    for _ in range(3):
        assert (await tell(caller, TWO, RUN, book, **says)).answered
    assert [len(rows) for _, rows in book.heard] == [MOST_TOLD, FEW_TOLD, FEW_TOLD]


async def test_who_wants_few_is_told_no_more_and_who_tells_many_as_many() -> None:
    """A stranger that tells many knows many already, or the directory brings it nothing: its records grow old. A peer
    that says nothing of either, as an older release, is told as many as go in."""
    network = MemoryNetwork()
    caller, server = MemoryTransport(network, ONE), MemoryTransport(network, TWO)
    book, known = Book(*map(row, range(MOST_TOLD))), Book(*map(row, range(MOST_TOLD)))
    serve_records(server, RUN, known)
    for most in (1, 1, MOST_TOLD):
        assert (await tell(caller, TWO, RUN, book, stage=0, most=most)).answered
    assert [len(rows) for _, rows in book.heard] == [1, FEW_TOLD, MOST_TOLD]
    older = MemoryTransport(network, PeerId("peer-of-an-older-release"))
    answer = await call(older, TWO, RECORDS, RecordsMessage.model_validate({"run": RUN, "stage": 0}), seconds=1.0)
    assert len(answer.records) == MOST_TOLD
    later = MemoryTransport(network, PeerId("peer-of-a-later-release"))
    wish = RecordsMessage.model_validate({"run": RUN, "stage": 0, "wanted": 5 * MOST_TOLD})
    assert len((await call(later, TWO, RECORDS, wish, seconds=1.0)).records) == MOST_TOLD


@pytest.mark.parametrize("run", [RUN, "another-run"])
async def test_a_refusal_is_an_answer_and_a_dead_link_is_none(run: str) -> None:
    """A peer of another run, or without the method, is there; nothing of it is taken."""
    network = MemoryNetwork()
    caller, server = MemoryTransport(network, ONE), MemoryTransport(network, TWO)
    book = Book()
    if run != RUN:
        serve_records(server, run, Book(row(1)))
    assert (await tell(caller, TWO, RUN, book)).answered
    network.inject(Fault(FaultKind.UNREACHABLE, method=RECORDS.name))
    assert not (await tell(caller, TWO, RUN, book)).answered
    assert book.heard == []


async def test_an_answer_that_breaks_the_protocol_is_an_offence_and_none_of_it_is_taken() -> None:
    """That holds also if only one row of several is no row."""
    network, book = MemoryNetwork(), Book()
    caller, server = MemoryTransport(network, ONE), MemoryTransport(network, TWO)

    async def handle(_peer: PeerId, _message: Message) -> Message:
        return Message({"run": RUN, "records": [{"stage": 0}]})

    server.serve(RECORDS.name, lambda *_: None, handle, max_concurrent_per_peer=1)
    assert not (await tell(caller, TWO, RUN, book)).answered
    assert caller.conduct.offences.total() == 1
    assert book.heard == []


async def test_more_than_fit_are_refused() -> None:
    """Checked by its schema before anything is looked at."""
    network, book = MemoryNetwork(), Book()
    caller, server = MemoryTransport(network, ONE), MemoryTransport(network, TWO)
    serve_records(server, RUN, book)
    rows = [{"stage": 0, "peer": TWO, "expires": 1.0, "signed": ""}] * (MOST_TOLD + 1)
    with pytest.raises(Refused) as refused:
        await caller.call(
            TWO, RECORDS.name, Message({"run": RUN, "records": rows}), timeout=5, progress=5, max_answer_bytes=0
        )
    assert refused.value.reason is Refusal.MALFORMED
    assert book.heard == []
