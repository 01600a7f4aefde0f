"""The readers of blocks: pure decisions, and a model swarm that takes them. No replica sees a coordinator."""

from __future__ import annotations

import random
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noloco_node import ambient
from noloco_node.data.claims import FURTHEST, MOST_CLAIMS, REACH_AT_LEAST, Claim, Said, SharedPosition, SlotBook
from noloco_node.data.shared_turns import SharedTurns
from noloco_node.directory.records import PeerRecord, PeerState
from noloco_node.directory.shared_text import in_record
from tests.data.claim_swarm import IN_PART, LIARS, SHAPE, ClaimSwarm
from tests.support import Clock

LIFE = 20.0


def turns_of(own: str, clock: Clock, row: int = 64, **kept: object) -> SharedTurns:
    position = kept.get("position")
    return SharedTurns(row, 0, own, LIFE, random.Random(own), position, clock, clock)  # pyright: ignore[reportArgumentType]


def say(turns: SharedTurns, own: str) -> Said:
    turns.published(turns.claims)
    return Said(own, turns.claims)


def test_a_pass_is_shared_out_though_a_third_of_the_replicas_are_replaced_in_it() -> None:
    swarm = ClaimSwarm(SHAPE)
    swarm.run()
    assert swarm.events["killed"] > 0
    assert swarm.events["drained"] > 0
    assert swarm.overlap() < 0.03
    assert swarm.coverage() > 0.97


def test_who_sees_a_quarter_of_the_records_at_a_time_shares_as_well() -> None:
    swarm = ClaimSwarm(IN_PART)
    swarm.run()
    assert swarm.overlap() < 0.03
    assert swarm.coverage() > 0.97


def test_liars_keep_others_from_so_many_blocks_and_make_nobody_read_twice() -> None:
    """One key in forty claims what others hold and what lies ahead."""
    swarm = ClaimSwarm(LIARS)
    swarm.run()
    assert swarm.overlap() < 0.03
    assert swarm.coverage() > 0.7
    honest = [node for node in swarm.nodes if node.name not in swarm.lying]
    assert max(node.turns.claims[-1].slot for node in honest) < 6 * swarm.shape.row, "a far claim drew them away"


@given(st.integers(0, 1 << 30), st.integers(0, 1 << 30), st.integers(0, 1 << 40), st.booleans(), st.booleans())
def test_of_two_claims_on_a_slot_just_one_stands(one: int, two: int, slot: int, begun: bool, other_begun: bool) -> None:
    a, b = f"peer{one}", f"peer{two}x"
    claims = {a: Claim(slot, begun=begun), b: Claim(slot, begun=other_begun)}
    kept: list[bool] = []
    for own, other in ((a, b), (b, a)):
        book = SlotBook(own, 60.0, 10**9, base=slot, started=True)
        book.look([Said(other, (Claim(slot),))], 0.0, 2)
        book.look([Said(other, (claims[other],))], 1.0, 2)
        kept.append(book.keeps(claims[own], settled=False))
    assert sum(kept) == 1


def test_who_leaves_gives_back_exactly_what_it_has_not_drawn() -> None:
    clock = Clock()
    one, two = turns_of("one", clock), turns_of("two", clock)
    one.heard([], 1)
    first = one.take()
    assert first is not None
    one.reached(first.slot, 17)
    two.heard([say(one, "one")], 2)
    two.heard([Said("one", one.leave(), leaving=True)], 1)
    clock.now += LIFE
    two.published(two.claims)
    taken = {}
    for _ in range(50):
        two.heard([], 1)
        two.published(two.claims)
        clock.now += LIFE / 2
        turn = two.take()
        if turn is not None:
            taken[turn.slot] = turn.start
            two.finished(turn.slot)
    assert taken[first.slot] == 17
    assert one.take() is None
    assert set(range(30)) <= set(taken), "no slot is left out"


def test_the_slot_of_one_that_vanished_is_taken_up_where_its_last_word_was() -> None:
    book = SlotBook("own", 60.0, 64, base=3, started=True)
    book.look([Said("other", (Claim(3, 12, begun=True), Claim(5)))], 0.0, 2)
    book.look([Said("other", (Claim(3, 20, begun=True), Claim(5)), overdue=True)], 10.0, 2)
    book.look([], 40.0, 2)
    assert 3 not in book.holes, "it may still come back"
    book.look([], 90.0, 1)
    rng = random.Random(0)
    drawn = dict(book.choose((), rng) for _ in range(200))
    assert drawn == {3: 20}
    book.claimed(3)
    book.claimed(4)
    assert book.choose((), rng) == (5, 0)


def test_who_did_not_see_the_last_word_of_one_that_vanished_leaves_its_slots_to_others() -> None:
    book = SlotBook("own", 60.0, 64, base=3, started=True)
    book.look([Said("other", (Claim(3, 12, begun=True), Claim(5)))], 0.0, 2)
    book.look([], 90.0, 1)
    rng = random.Random(0)
    assert not {3, 5} & {book.choose((), rng)[0] for _ in range(200)}


@pytest.mark.parametrize("first", [True, False], ids=["winner heard first", "loser heard first"])
@pytest.mark.parametrize("known", [True, False], ids=["known", "new"])
def test_a_slot_that_one_yielded_is_gone_on_with_when_the_other_leaves(first: bool, known: bool) -> None:
    """A replica that ceases to speak of a slot that another claims, and has read nothing of it, has not finished it."""
    book = SlotBook("own", 60.0, 64, base=3, started=True)
    winner, loser = Said("winner", (Claim(3), Claim(7))), Said("loser", (Claim(3, begun=True), Claim(5)))
    book.look([loser, winner] if known else [loser], 0.0, 3)
    words = [Said("winner", (Claim(3, begun=True), Claim(7))), Said("loser", (Claim(5),))]
    book.look(words if first else words[::-1], 1.0, 3)
    book.look([Said("winner", (Claim(3, 12, begun=True), Claim(7)), leaving=True), words[1]], 9.0, 2)
    assert book.holes == {3: 12}


def test_a_slot_that_was_finished_is_not_read_again_because_another_who_claimed_it_leaves() -> None:
    """A replica that has read of it and speaks of it no more was at its end, whatever another says."""
    book = SlotBook("own", 60.0, 64, base=3, started=True)
    liar = Said("liar", (Claim(3, begun=True),))
    book.look([Said("reader", (Claim(3, 300, begun=True), Claim(5))), liar], 0.0, 3)
    book.look([Said("reader", (Claim(5, begun=True),)), liar], 5.0, 3)
    book.look([Said("reader", (Claim(5, begun=True),)), Said("liar", (Claim(3, 1),), leaving=True)], 9.0, 2)
    assert not book.holes
    assert 3 not in {book.choose((), random.Random(seed))[0] for seed in range(50)}


def test_a_slot_finished_between_two_records_is_not_read_again_because_a_liar_that_claimed_it_leaves() -> None:
    """Its reader told of nothing that it had drawn, but it had begun, and would not have left the slot to a later
    one."""
    book = SlotBook("own", 60.0, 64, base=3, started=True)
    book.look([Said("reader", (Claim(3, begun=True), Claim(5)))], 0.0, 3)
    for second, claims in ((1.0, (Claim(3, begun=True), Claim(5))), (2.0, (Claim(5, begun=True), Claim(6)))):
        book.look([Said("reader", claims), Said("liar", (Claim(3),))], second, 3)
    book.look([Said("reader", (Claim(5, begun=True), Claim(6))), Said("liar", (Claim(3),), leaving=True)], 3.0, 2)
    assert 3 not in {book.choose((), random.Random(seed))[0] for seed in range(50)} | book.holes.keys()


@pytest.mark.parametrize("first", [True, False], ids=["winner heard first", "loser heard first"])
def test_a_slot_that_one_yielded_to_another_who_leaves_at_once_is_gone_on_with(first: bool) -> None:
    """One look shows both: of two claims one is gone, and the other's owner leaves."""
    book = SlotBook("own", 60.0, 64, base=3, started=True)
    book.look([Said("winner", (Claim(3), Claim(7))), Said("loser", (Claim(3), Claim(5)))], 0.0, 3)
    words = [Said("winner", (Claim(3, 12, begun=True), Claim(7)), leaving=True), Said("loser", (Claim(5),))]
    book.look(words if first else words[::-1], 2.0, 2)
    assert book.holes == {3: 12}
    book.look([Said("next", (Claim(3, 12, begun=True),))], 4.0, 2)
    book.look([Said("next", (Claim(3, 20, begun=True),), leaving=True)], 6.0, 1)
    assert book.holes == {3: 20}, "and again, when that one leaves"


claims_said = st.lists(st.builds(Claim, st.integers(0, 9), st.integers(0, 3), st.booleans()), max_size=2 * MOST_CLAIMS)
words_said = st.builds(Said, st.sampled_from("abc"), claims_said.map(tuple), st.booleans(), st.booleans())
looks_said = st.lists(words_said, max_size=3, unique_by=lambda word: word.peer)


@settings(max_examples=30)
@given(st.lists(st.tuples(looks_said, st.sampled_from((1.0, 70.0))), max_size=12))
def test_no_word_of_a_peer_ends_a_look_and_who_claims_a_slot_keeps_it_from_others(
    looks: list[tuple[list[Said], float]],
) -> None:
    """Slots named twice in one record, too: a peer signs whatever it likes."""
    book, now = SlotBook("own", 60.0, 64, started=True), 0.0
    for said, seconds in looks:
        now += seconds
        book.look(said, now, 3)
        assert all(slot in book.taken for seen in book.stage_peers.values() for slot in seen.claims)
        book.choose((), random.Random(0))


def test_one_far_claim_draws_nobody_after_it() -> None:
    book = SlotBook("own", 60.0, 10**6)
    words = [Said(f"peer{n}", (Claim(n, 1, begun=True), Claim(20 + n))) for n in range(9)]
    book.look([*words, Said("liar", (Claim(10**9), Claim(5000)))], 0.0, 11)
    assert book.frontier < 40
    assert all(book.choose((), random.Random(seed))[0] < 100 for seed in range(50))


def test_a_peer_that_claims_and_gives_back_what_was_read_long_ago_has_nothing_read_again() -> None:
    """A hundred times in 400 seconds: each of the 400 slots was a hole for who had not seen it read."""
    book = SlotBook("own", 60.0, 10**6)
    honest = [Said(f"peer{n}", (Claim(1000 + n, 5, begun=True), Claim(1010 + n))) for n in range(6)]
    book.look(honest, 0.0, 8)
    book.choose((), random.Random(0))
    for number in range(100):
        old = tuple(Claim(900 - 4 * number + each) for each in range(MOST_CLAIMS))
        for leaving in (False, True):
            book.look([*honest, Said("liar", old, leaving=leaving)], 2.0 * number, 8)
    assert not book.holes


def test_a_pair_of_replicas_believe_each_other_for_as_long_as_they_read() -> None:
    clock = Clock()
    pair = {name: turns_of(name, clock, row=400) for name in ("one", "two")}
    drawn: dict[str, list[int]] = {"one": [], "two": []}
    for _ in range(120):
        words = {name: say(turns, name) for name, turns in pair.items()}
        for name, turns in pair.items():
            turns.heard([words["two" if name == "one" else "one"]], 2)
            turn = turns.take()
            if turn is not None:
                drawn[name].append(turn.slot)
                turns.finished(turn.slot)
        clock.now += 20.0
    assert len(drawn["one"]) > 50
    assert not set(drawn["one"]) & set(drawn["two"])


def test_a_node_that_starts_again_goes_on_with_its_own_slot_unless_another_took_it() -> None:
    clock = Clock()
    one = turns_of("one", clock)
    other = Said("other", (Claim(40, 3, begun=True), Claim(41)))
    one.heard([other], 2)
    one.published(one.claims)
    clock.now += LIFE
    turn = one.take()
    assert turn is not None
    one.reached(turn.slot, 9)
    kept = one.position
    clock.now += LIFE
    again = turns_of("one", clock, position=kept)
    again.heard([other], 2)
    assert Claim(turn.slot, 9) in again.claims
    late = turns_of("one", clock, position=kept)
    late.heard([other, Said("third", (Claim(turn.slot, 9, begun=True),))], 3)
    assert turn.slot not in {claim.slot for claim in late.claims}


@pytest.mark.parametrize("step", [-3600.0, 3600.0])
def test_a_wall_clock_that_is_set_neither_stops_the_reading_nor_gives_away_what_others_read(
    monkeypatch: pytest.MonkeyPatch, step: float
) -> None:
    """NTP sets it while a node runs: what has been waited for has been waited for, and nobody has vanished by it."""
    monotonic, wall = Clock(), Clock()
    monkeypatch.setattr(ambient, "time", SimpleNamespace(monotonic=monotonic, time=wall))
    one = SharedTurns(64, 0, "one", LIFE, random.Random("one"))
    other = Said("other", (Claim(0, 3, begun=True), Claim(1)), overdue=True)
    one.heard([other], 2)
    one.published(one.claims)
    wall.now += step
    for clock in (monotonic, wall):
        clock.now += LIFE
    one.heard([], 2)
    turn = one.take()
    assert turn is not None, "its claim has stood for long enough"
    one.reached(turn.slot, 1)
    assert one.position.time == wall.now
    assert 0 not in {slot for slot, _ in one.position.open}, "the other has not been silent for long"


def test_a_swarm_that_starts_again_as_a_whole_reads_nothing_twice() -> None:
    clock = Clock()
    one = turns_of("one", clock, row=16)
    one.heard([], 1)
    done: list[int] = []
    for _ in range(7):
        turn = one.take()
        assert turn is not None
        done.append(turn.slot)
        one.finished(turn.slot)
        one.heard([], 1)
    clock.now += 86_400.0
    kept = SharedPosition.model_validate_json(one.position.model_dump_json())
    again = turns_of("one", clock, row=16, position=kept)
    again.heard([], 1)
    for _ in range(9):
        turn = again.take()
        assert turn is not None
        done.append(turn.slot)
        again.finished(turn.slot)
    assert len(set(done)) == len(done)
    assert set(range(12)) <= set(done)


def stopped(clock: Clock, *names: str) -> tuple[dict[str, SharedPosition], set[int]]:
    """Replicas that read for a while and are told to leave all at once: what each keeps, and what was finished."""
    made = {name: turns_of(name, clock) for name in names}
    finished: set[int] = set()
    for step in range(12):
        for name, turns in made.items():
            turns.heard([say(other, each) for each, other in made.items() if each != name], len(made))
            if (turn := turns.take()) is not None:
                turns.reached(turn.slot, 7)
                if step < 10:
                    finished.add(turn.slot)
                    turns.finished(turn.slot)
        clock.now += 4.0
    for turns in made.values():
        turns.leave()
    return {name: turns.position for name, turns in made.items()}, finished


@pytest.mark.parametrize("away", [10.0, 86_400.0], ids=["for seconds", "for a day"])
def test_of_a_swarm_that_was_told_to_stop_each_goes_on_with_its_own_blocks(away: float) -> None:
    """A node that comes when others are there already, and hears of what they go on with, does so too: at low slots."""
    clock = Clock()
    kept, finished = stopped(clock, "one", "two")
    clock.now += away
    one = turns_of("one", clock, position=kept["one"])
    one.heard([], 1)
    two = turns_of("two", clock, position=kept["two"])
    two.heard([say(one, "one")], 2)
    for name, turns in (("one", one), ("two", two)):
        assert {(claim.slot, claim.position) for claim in turns.claims} >= set(kept[name].own)
        assert any(position == 7 for _, position in kept[name].own)
    drawn: set[int] = set()
    for _ in range(200):
        for name, turns, other in (("one", one, two), ("two", two, one)):
            turns.heard([say(other, "two" if name == "one" else "one")], 2)
            if (turn := turns.take()) is not None:
                assert turn.slot not in drawn | finished
                drawn.add(turn.slot)
                turns.finished(turn.slot)
        clock.now += 4.0
    assert set(range(40)) <= drawn | finished, "and no block is left out"


def test_who_comes_back_when_others_have_come_further_leaves_what_it_gave_back_to_them() -> None:
    """They heard that it left: whether they have read its blocks since, it cannot know."""
    clock = Clock()
    kept, finished = stopped(clock, "one", "two")
    clock.now += 10.0
    further = Said("two", (Claim(30, 5, begun=True), Claim(31)))
    one = turns_of("one", clock, position=kept["one"])
    one.heard([further], 2)
    assert not {claim.slot for claim in one.claims} & ({slot for slot, _ in kept["one"].own} | finished)


def test_a_pass_takes_each_block_once() -> None:
    clock = Clock()
    turns = turns_of("one", clock, row=8)
    turns.heard([], 1)
    blocks: dict[int, set[int]] = {}
    for _ in range(64):
        turn = turns.take()
        assert turn is not None
        seen = blocks.setdefault(turn.epoch, set())
        assert turn.block not in seen
        seen.add(turn.block)
        turns.finished(turn.slot)
    assert all(blocks[epoch] == set(range(8)) for epoch in range(5))


def test_what_a_replica_says_is_bounded() -> None:
    clock = Clock()
    turns = turns_of("one", clock)
    turns.heard([], 1)
    slots = [turn.slot for _ in range(10) if (turn := turns.take()) is not None]
    assert len(turns.claims) <= MOST_CLAIMS
    assert len(slots) < MOST_CLAIMS, "it hands out no more than it can say"
    assert all(a != b for a, b in pairwise(slots))


def test_the_furthest_slot_that_can_be_claimed_draws_nobody_beyond_it() -> None:
    """The only stage peer is a liar: what this replica claims and keeps can still be told, and others are still
    heeded."""
    clock = Clock()
    turns = turns_of("own", clock)
    for slot in (1 << 48, FURTHEST, FURTHEST + REACH_AT_LEAST):
        turns.heard([Said("liar", (Claim(slot),))], 2)
        clock.now += LIFE
        (claim,) = in_record(turns.claims)
        told = PeerRecord(
            peer_id="Qm" + "1" * 44, stage=0, state=PeerState.TRAINING, slots=(claim,), protocol=1, version="1"
        )
        assert told.slots == (claim,)
        assert turns.position.own == ((claim.slot, 0),)
    book = SlotBook("own", 60.0, 64)
    book.look([Said("liar", (Claim(FURTHEST),))], 0.0, 2)
    book.look([Said("stage_peer", (Claim(FURTHEST + 5),))], 10.0, 2)
    assert FURTHEST + 5 in book.taken
