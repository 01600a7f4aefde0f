"""Where the origins are, by what microbatches say: a minority of senders or origins cannot move it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import OuterSpec
from noloco_node.directory.clocks import RECENT_MICROBATCHES, DrawnBy, OriginsSeen, furthest_clock, median_clock
from noloco_node.identity.peer_id import PeerId
from noloco_node.pipeline import messages as microbatch
from noloco_node.pipeline.messages import MicrobatchHeader
from noloco_node.tallies import FEW_PEERS
from noloco_node.transport.memory import MemoryTransport
from noloco_node.transport.messages import Message
from tests.worlds import MICROBATCH, micro_spec, peer_name, run_to_the_end, virtually, world


class Book(OriginsSeen):
    """With a clock that stands where it is set."""

    def __init__(self) -> None:
        self.time = self.own_clock = 0.0
        super().__init__(lambda: self.time)

    def hear(self, sender: str, origin: str, clock: float, tokens: int = 1) -> None:
        """One microbatch was trained."""
        self.saw(DrawnBy(PeerId(origin), clock), PeerId(sender), tokens=tokens, own_clock=self.own_clock)


@given(st.data())
def test_a_minority_of_the_work_moves_the_clock_no_further_than_anothers(data: st.DataObject) -> None:
    """Liars among the senders name as many origins and clocks as they like; liars among the origins claim them through
    everybody. With less than half of the tokens trained, whatever their number, they leave the median among the honest
    words, and the furthest within the lead of it."""
    book, clocks = Book(), st.floats(0.0, 1e18)
    words = [data.draw(st.floats(1e3, 2e3)) for _ in range(data.draw(st.integers(1, 3)))]
    honest = 100 * len(words)
    for sender in range(data.draw(st.integers(1, 3))):
        for number, word in enumerate(words):
            book.hear(f"sender {sender}", f"origin {number}", word, tokens=100)
        for liar in range(data.draw(st.integers(0, 4))):
            book.hear(f"sender {sender}", f"liar {liar}", data.draw(clocks), tokens=(honest - 1) // 4)
    for sender in range(data.draw(st.integers(0, 9))):
        for number in range(data.draw(st.integers(0, 2))):
            book.hear(f"hostile {sender}", f"invented {number}", data.draw(clocks), tokens=(honest - 1) // 18)
    middle, furthest, lead = median_clock(book.latest()), furthest_clock(book.latest(), 500.0), book.lead()
    assert middle is not None
    assert furthest is not None
    assert min(words) <= middle <= max(words)
    assert middle <= furthest <= middle + 500.0
    assert lead is not None


def test_how_far_ahead_the_origins_are_does_not_depend_on_how_long_ago_each_was_heard() -> None:
    """Two stand where this stage stands, one of them last heard of long ago. Only the latest microbatches count, and
    none from before this replica took over another's clock."""
    book = Book()
    book.hear("sender", "quiet", 0.0, tokens=RECENT_MICROBATCHES)
    for step in range(1, RECENT_MICROBATCHES):
        book.time = book.own_clock = 64.0 * step
        book.hear("other sender", "origin", 64.0 * step)
    assert book.lead() == 0.0
    assert median_clock(book.latest()) == 0.0, "its last word"
    book.own_clock -= 640.0
    for _ in range(2):
        book.time += 1.0
        book.hear("other sender", "origin", 64.0 * (RECENT_MICROBATCHES - 1))
    assert book.lead() == 0.0
    assert book.lead(since=book.time) == 640.0
    assert book.lead(since=book.time + 1.0) is None


def test_the_last_word_counts_and_no_maximum() -> None:
    """A lie of a moment is gone with the next word; when a clock last rose is known, and what was not heard lately
    can be left out."""
    book = Book()
    assert median_clock(book.latest()) is None
    assert furthest_clock(book.latest(), 1.0) is None
    for now, clock in ((1.0, 10.0), (2.0, 1e9), (3.0, 20.0), (4.0, 20.0)):
        book.time = now
        book.hear("sender", "origin", clock)
    (seen,) = book.latest()
    assert (seen.clock, seen.rose_at, seen.seen_at) == (20.0, 2.0, 4.0)
    book.time = 10.0
    assert book.latest(within=5.0) == []
    assert median_clock(book.latest(5.0)) is None


def test_the_book_is_bounded() -> None:
    """Invented names push out those heard of longest ago, of the same sender first."""
    book = Book()
    book.hear("quiet sender", "origin", 1.0)
    for number in range(1000):
        book.hear("sender", f"origin {number}", 1.0)
    assert len(book.latest()) == 1 + FEW_PEERS
    for number in range(1000):
        book.hear(f"sender {number}", "origin", 1.0)
    assert len(book.latest()) == FEW_PEERS


@virtually
async def test_every_later_stage_hears_which_origin_drew_a_microbatch_and_when(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over three stages the word travels unchanged, in audits' copies too, and is kept by the sender of the microbatch.
    Clocks end within half a run of the first stage's, however busy the machine; `test_stage_clocks` says how near they
    stay in the long run."""
    told: dict[int, set[tuple[str, float]]] = {1: set(), 2: set()}
    call = MemoryTransport.call

    async def noted(self: MemoryTransport, peer: PeerId, method: str, request: Message, **limits: float) -> Message:
        if method == microbatch.MICROBATCH.name and request.header["mode"] == "train":
            header = MicrobatchHeader.model_validate(request.header)
            told[header.stage].add((header.origin, header.origin_clock))
        return await call(self, peer, method, request, **limits)  # type: ignore[arg-type]

    monkeypatch.setattr(MemoryTransport, "call", noted)
    outer = OuterSpec(inner_steps=4, min_inner_steps=1)
    spec = micro_spec(stages=3, layers=3, steps=15, microbatches_a_step=2, outer=outer)
    async with world(spec, replicas=2, settings=NodeSettings(in_flight=2)) as made:
        await run_to_the_end(made)
        first, *others = [
            sum(replica.worker.progress.clock for replica in made.of_stage(stage)) / 2 for stage in range(3)
        ]
        assert all(abs(clock - first) <= 0.5 * spec.inner.target_tokens for clock in others), (first, others)
    names = [{peer_name(stage, index) for index in range(2)} for stage in range(3)]
    assert told[2] == told[1]
    assert min(clock for _, clock in told[1]) >= MICROBATCH
    assert {origin for origin, _ in told[1]} == names[0]
    for replica in made.of_stage(1):
        assert {(seen.sender, seen.origin) for seen in replica.pipeline.server.origins_seen.latest()} <= {
            (peer, peer) for peer in names[0]
        }
    for replica in made.of_stage(2):
        assert {seen.sender for seen in replica.pipeline.server.origins_seen.latest()} <= names[1]
        assert median_clock(replica.pipeline.server.origins_seen.latest()) in {clock for _, clock in told[2]}
