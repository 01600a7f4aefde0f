"""The readers of blocks: pure decisions, and a model swarm that takes them. No replica sees a coordinator."""

from __future__ import annotations

import random
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from noloco_node.data.shared_turns import (
    FURTHEST,
    LOOKS,
    MOST_CLAIMS,
    REACH_AT_LEAST,
    Claim,
    Said,
    SharedPosition,
    SharedTurns,
)
from noloco_node.directory.records import PeerRecord, PeerState, SlotClaim
from tests.data.claim_swarm import IN_PART, LIARS, SHAPE, ClaimSwarm


def turns_of(own: str, row: int = 64, position: SharedPosition | None = None) -> SharedTurns:
    return SharedTurns(row, 0, own, random.Random(own), position)


def say(turns: SharedTurns, own: str) -> Said:
    return Said(own, turns.claims)


def finish(turns: SharedTurns) -> None:
    """All that it has begun."""
    for claim in turns.claims:
        if claim.begun:
            turns.finished(claim.slot)


def hear(turns: SharedTurns, *said: Said) -> None:
    """So often that it may begin."""
    for _ in range(1 + LOOKS):
        turns.heard(said, 1 + len(said))


def test_a_node_that_stops_before_it_has_looked_around_keeps_where_it_was() -> None:
    """A pause that comes so soon found no place in the text, and between two looks it ended the node."""
    kept = SharedPosition(row=64, base=40, taken="6", own=((3, 5), (39, 0)))
    turns = turns_of("a", position=kept)
    assert turns.position == kept
    turns.heard((), 1)
    assert turns.position == SharedPosition(row=64, base=40, taken="6", own=kept.own)
    hear(turns)
    assert turns.position.own[:2] == kept.own


def test_a_pass_is_shared_out_though_a_third_of_the_replicas_are_replaced_in_it() -> None:
    swarm = ClaimSwarm(SHAPE)
    swarm.run()
    assert swarm.events["gone"] > 0
    assert swarm.events["restarted"] > 0
    assert swarm.overlap() < 0.05
    assert swarm.coverage() > 0.9


def test_who_sees_a_quarter_of_the_records_at_a_time_shares_as_well() -> None:
    swarm = ClaimSwarm(IN_PART)
    swarm.run()
    assert swarm.overlap() < 0.05
    assert swarm.coverage() > 0.9


def test_liars_keep_others_from_so_many_blocks_and_make_nobody_read_twice() -> None:
    """One key in forty claims what others hold and what lies ahead."""
    swarm = ClaimSwarm(LIARS)
    swarm.run()
    assert swarm.overlap() < 0.05
    assert swarm.coverage() > 0.7
    honest = [node for node in swarm.nodes if node.name not in swarm.lying]
    assert max(node.turns.claims[-1].slot for node in honest) < 6 * swarm.shape.row, "a far claim drew them away"


@given(st.integers(0, 1 << 30), st.integers(0, 1 << 30), st.booleans())
def test_of_two_claims_on_a_slot_just_one_stands(one: int, two: int, begun: bool) -> None:
    """Unless both have begun it. A begun one stands."""
    a, b = turns_of(f"peer{one}", row=1), turns_of(f"peer{two}x", row=1)
    for turns in (a, b):
        turns.heard([], 1)
    if begun:
        assert a.take() is not None
    words = [say(a, f"peer{one}"), say(b, f"peer{two}x")]
    for turns in (a, b):
        turns.heard(words, 2)
    slots = [{claim.slot for claim in turns.claims} for turns in (a, b)]
    assert not slots[0] & slots[1]
    assert a.counts.yielded + b.counts.yielded == 1 + begun * (a.counts.yielded > 0)
    assert not begun or 0 in slots[0]


def test_what_was_begun_is_read_to_its_end_whatever_another_says() -> None:
    turns = turns_of("own")
    turns.heard([], 1)
    turn = turns.take()
    assert turn is not None
    turns.heard([Said(f"liar{number}", (Claim(turn.slot, 10**6, begun=True),)) for number in range(9)], 10)
    assert Claim(turn.slot, begun=True) in turns.claims


def test_a_slot_that_was_claimed_is_read_by_nobody_else_though_its_replica_is_gone() -> None:
    turns = turns_of("own")
    turns.heard([Said("other", (Claim(20, 12, begun=True), Claim(24)))], 2)
    taken: set[int] = set()
    for _ in range(50):
        turns.heard([], 1)
        turn = turns.take()
        assert turn is not None
        taken.add(turn.slot)
        turns.finished(turn.slot)
    assert not taken & {20, 24}
    assert max(taken) - min(taken) < 60, "and nothing else is left out"


claims_said = st.lists(st.builds(Claim, st.integers(0, 9), st.integers(0, 3), st.booleans()), max_size=2 * MOST_CLAIMS)
words_said = st.builds(Said, st.sampled_from("abc"), claims_said.map(tuple))
looks_said = st.lists(words_said, max_size=3, unique_by=lambda word: word.peer)


@settings(max_examples=30)
@given(st.lists(looks_said, max_size=12))
def test_no_word_of_a_peer_ends_a_look_and_what_was_claimed_is_not_drawn(looks: list[list[Said]]) -> None:
    """Slots named twice in one record, too: a peer signs whatever it likes."""
    turns, heard = turns_of("own"), set[int]()
    turns.heard([], 1)
    for said in looks:
        before = {claim.slot for claim in turns.claims}
        turns.heard(said, 3)
        heard |= {claim.slot for word in said for claim in word.claims[:MOST_CLAIMS]}
        drawn = {claim.slot for claim in turns.claims} - before
        assert not drawn & heard
        turn = turns.take()
        if turn is not None:
            turns.finished(turn.slot)


def test_one_far_claim_draws_nobody_after_it() -> None:
    words = [Said(f"peer{n}", (Claim(n, 1, begun=True), Claim(20 + n))) for n in range(9)]
    for seed in range(50):
        turns = SharedTurns(10**6, 0, "own", random.Random(seed))
        turns.heard([*words, Said("liar", (Claim(10**9), Claim(5000)))], 11)
        assert all(claim.slot < 100 for claim in turns.claims)


def test_a_pair_of_replicas_share_for_as_long_as_they_read() -> None:
    """Each block takes two looks."""
    pair = {name: turns_of(name, row=400) for name in ("one", "two")}
    drawn: dict[str, list[int]] = {"one": [], "two": []}
    for look in range(240):
        words = [say(turns, name) for name, turns in pair.items()]
        for name, turns in pair.items():
            turns.heard(words, 2)
            if look % 2:
                continue
            finish(turns)
            turn = turns.take()
            if turn is not None:
                drawn[name].append(turn.slot)
    assert len(drawn["one"]) > 50
    assert not set(drawn["one"]) & set(drawn["two"])


def test_who_begin_together_and_take_two_blocks_at_once_take_none_twice() -> None:
    """Each claim is known to the others before its block is begun. Where the first alone was, a tenth of a pass was
    begun twice."""
    nodes, begun = {name: turns_of(name, row=160) for name in map(str, range(40))}, list[int]()
    for _ in range(9):
        words = [say(turns, name) for name, turns in nodes.items()]
        for turns in nodes.values():
            turns.heard(words, len(nodes))
        for turns in nodes.values():
            while sum(claim.begun for claim in turns.claims) < 2 and (turn := turns.take()) is not None:
                begun.append(turn.slot)
    assert len(begun) == 80
    assert len(set(begun)) == len(begun)


def test_a_node_that_starts_again_goes_on_with_its_own_slot_unless_another_took_it() -> None:
    one = turns_of("one")
    other = Said("other", (Claim(40, 3, begun=True), Claim(41)))
    hear(one, other)
    turn = one.take()
    assert turn is not None
    one.reached(turn.slot, 9)
    kept = one.position
    again = turns_of("one", position=kept)
    again.heard([other], 2)
    assert Claim(turn.slot, 9) in again.claims
    late = turns_of("one", position=kept)
    late.heard([other, Said("third", (Claim(turn.slot, 9, begun=True),))], 3)
    assert turn.slot not in {claim.slot for claim in late.claims}


def test_a_swarm_that_starts_again_as_a_whole_reads_nothing_twice() -> None:
    one = turns_of("one", row=16)
    one.heard([], 1)
    done: list[int] = []
    for _ in range(7):
        turn = one.take()
        assert turn is not None
        done.append(turn.slot)
        one.finished(turn.slot)
        one.heard([], 1)
    kept = SharedPosition.model_validate_json(one.position.model_dump_json())
    again = turns_of("one", row=16, position=kept)
    again.heard([], 1)
    for _ in range(9):
        turn = again.take()
        assert turn is not None
        done.append(turn.slot)
        again.finished(turn.slot)
    assert done == list(range(16))


def stopped(*names: str) -> tuple[dict[str, SharedPosition], set[int]]:
    """Replicas that read for a while and end all at once: what each keeps, and what was finished."""
    made = {name: turns_of(name) for name in names}
    finished: set[int] = set()
    for step in range(12):
        for name, turns in made.items():
            hear(turns, *(say(other, each) for each, other in made.items() if each != name))
            if (turn := turns.take()) is not None:
                turns.reached(turn.slot, 7)
                if step < 10:
                    finished.add(turn.slot)
                    turns.finished(turn.slot)
    return {name: turns.position for name, turns in made.items()}, finished


def test_of_a_swarm_that_was_told_to_stop_each_goes_on_with_its_own_blocks() -> None:
    """A node that comes when others are there already, and hears of what they go on with, does so too: at low slots."""
    kept, finished = stopped("one", "two")
    one, two = (turns_of(name, position=kept[name]) for name in ("one", "two"))
    one.heard([], 1)
    two.heard([say(one, "one")], 2)
    for name, turns in (("one", one), ("two", two)):
        assert {(claim.slot, claim.position) for claim in turns.claims} >= set(kept[name].own)
        assert any(position == 7 for _, position in kept[name].own)
    drawn: set[int] = set()
    for _ in range(200):
        for name, turns, other in (("one", one, two), ("two", two, one)):
            hear(turns, say(other, "two" if name == "one" else "one"))
            if (turn := turns.take()) is not None:
                assert turn.slot not in drawn | finished
                drawn.add(turn.slot)
                turns.finished(turn.slot)
    assert set(range(40)) <= drawn | finished, "and no block is left out"


def test_a_pass_takes_each_block_once() -> None:
    turns = turns_of("one", row=8)
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
    turns = turns_of("one")
    turns.heard([], 1)
    slots = [turn.slot for _ in range(10) if (turn := turns.take()) is not None]
    assert len(turns.claims) <= MOST_CLAIMS
    assert len(slots) < MOST_CLAIMS, "it hands out no more than it can say"
    assert all(a != b for a, b in pairwise(slots))


def test_the_furthest_slot_that_can_be_claimed_draws_nobody_beyond_it() -> None:
    """The only stage peer is a liar: what this replica claims and keeps can still be told, and others are still
    heeded."""
    turns = turns_of("own")
    for slot in (1 << 48, FURTHEST, FURTHEST + REACH_AT_LEAST):
        turns.heard([Said("liar", (Claim(slot),))], 2)
        claims = tuple(SlotClaim(claim.slot, claim.position, claim.begun) for claim in turns.claims)
        told = PeerRecord(
            peer_id="Qm" + "1" * 44, stage=0, state=PeerState.TRAINING, slots=claims, protocol=1, version="1"
        )
        assert told.slots == claims
        assert len(turns.position.taken) < 4 * REACH_AT_LEAST
