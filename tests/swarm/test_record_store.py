"""Records of strangers: what a node takes in of them, at what cost, and which peers a flood of them can push out
(none)."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noloco_node.directory import store as record_store
from noloco_node.directory import validator
from noloco_node.directory.asked_key import KEY_BYTES
from noloco_node.directory.records import PeerRecord, PeerState
from noloco_node.directory.store import MOST_HEARSAY, Esteem, HeldRecord, NoRoom, RecordStore
from noloco_node.directory.validator import (
    CHECKS_A_SECOND,
    CHECKS_AT_ONCE,
    MAX_RECORD_BYTES,
    POOLS,
    SKEW_SECONDS,
    Intake,
    RecordValidator,
    sign_record,
)
from noloco_node.identity.peer_id import PeerId
from noloco_node.peers.scorecard import ANSWER_SECONDS
from noloco_node.tallies import EXAMINED
from noloco_node.telemetry.events import Strangers
from noloco_node.telemetry.metrics import Metrics
from tests.inside import rows_of
from tests.swarm.hostile_dht import ghost, key_ids, throw_away_key
from tests.telemetry import made_events as made

RUN, STAGES, LIFE = "run-under-test", 2, 60.0
OWN = PeerId("own-peer-id")
KEY = b"k" * 20


def held(storer: str, expires: float = 1e9, sequence: int = 0) -> HeldRecord:
    """Some record."""
    record = PeerRecord(
        peer_id="peer-number-0", stage=0, state=PeerState.TRAINING, protocol=3, version="0", sequence=sequence
    )
    return HeldRecord(record, b"signed", expires, PeerId(storer))


def store_of(
    known: dict[str, Esteem] | None = None,
    *,
    most_records: int = record_store.MOST_RECORDS,
    most_in_all: int = record_store.MOST_IN_ALL,
) -> RecordStore:
    """An empty store whose owner knows these peers."""
    return RecordStore(
        OWN,
        lambda peer: (known or {}).get(peer, Esteem.HEARSAY),
        random.Random(7),
        most_records=most_records,
        most_in_all=most_in_all,
    )


def fill(store: RecordStore, count: int, storer: Callable[[int], str], first: int = 0) -> None:
    """Ghosts, each brought by `storer` of its number."""
    for number in range(first, first + count):
        store.put(KEY, PeerId(f"ghost-{number}"), held(storer(number)), 0.0)


def names(store: RecordStore, now: float = 0.0, key: bytes = KEY) -> set[str]:
    """The signers of the held records."""
    return set(store.live(key, now))


def test_the_replay_of_an_older_record_takes_nothing_away() -> None:
    """The newer one stays to its own end."""
    store = store_of()
    assert store.put(KEY, PeerId("peer"), held("peer", 100.0, 2), 0.0)
    assert not store.put(KEY, PeerId("peer"), held("stranger", 50.0, 1), 0.0)
    assert names(store, 99.0) == {"peer"}
    [row] = store.live(KEY, 99.0).values()
    assert row.record.sequence == 2
    assert names(store, 100.0) == set()
    assert len(store) == 0


def test_what_one_peer_brings_of_others_is_bounded_and_pushes_out_nobody_elses() -> None:
    """Records whose signers this node knows do not count against the peer that brings them."""
    known = {f"friend-{number}": Esteem.KNOWN for number in range(2 * MOST_HEARSAY)}
    store = store_of(known)
    fill(store, 20, lambda _: "another")
    fill(store, 10 * MOST_HEARSAY, lambda _: "stranger", first=1000)
    assert len(store) == 20 + MOST_HEARSAY
    assert {f"ghost-{number}" for number in range(20)} <= names(store)
    for friend in known:
        assert store.put(KEY, PeerId(friend), held("stranger"), 0.0)
    assert known.keys() <= names(store)


def test_of_what_one_peer_brings_of_others_no_name_stays_longer_than_another() -> None:
    """Nobody keeps a place by an id that was sought to come late in the order of ids, nor by one that comes early."""
    store, stayed = store_of(), Counter[bool]()
    for round_ in range(20):
        bring = [f"{'a' if number % 2 else 'z'}-{round_}-{number}" for number in range(8 * MOST_HEARSAY)]
        for name in bring:
            store.put(KEY, PeerId(name), held("stranger"), 0.0)
        stayed.update(name.startswith("z") for name in names(store))
    assert 0.4 < stayed[True] / stayed.total() < 0.6


def test_floods_are_counted_by_what_had_no_room_for_them_and_metrics_say_so() -> None:
    """More of others than one may bring, a full key, and more than may be checked."""
    store, extra, key = store_of(most_records=2 * MOST_HEARSAY), 5, KEY
    for number in range(MOST_HEARSAY + extra):
        store.put(key, PeerId(f"brought-{number}"), held("stranger"), 0.0)
    assert store.no_room[NoRoom.BRINGER] == extra
    for number in range(MOST_HEARSAY + extra):
        store.put(key, PeerId(f"direct-{number}"), held(f"direct-{number}"), 0.0)
    assert store.no_room[NoRoom.PLACES] == extra
    desk = Desk()
    for _ in range(int(CHECKS_AT_ONCE) + extra):
        desk.take("stranger", ("nobody", b"no record"), 1e6 + 1.0)
    assert desk.store.no_room == {NoRoom.CHECKS: extra}
    told = Metrics()
    no_room = {reason.value: count for reason, count in (store.no_room + desk.store.no_room).items()}
    told.observe(made.account(strangers=Strangers(no_room=no_room)))
    seen = {each: told.registry.get_sample_value("noloco_directory_no_room_total", {"reason": each}) for each in NoRoom}
    assert seen == {NoRoom.PLACES: extra, NoRoom.BRINGER: extra, NoRoom.CHECKS: extra}


def test_those_that_did_not_answer_lose_their_places_first() -> None:
    """Among what one peer brought, and where a key is full; one that answers by then keeps its place."""
    known: dict[str, Esteem] = {}
    store = store_of(known, most_records=MOST_HEARSAY)
    fill(store, MOST_HEARSAY, lambda _: "one")
    known |= {f"ghost-{number}": Esteem.SILENT for number in range(MOST_HEARSAY // 2)}
    fill(store, 3, lambda _: "one", first=1000)
    fill(store, 3, lambda _: "another", first=2000)
    assert len(names(store) & known.keys()) <= MOST_HEARSAY // 2 - 5, "eight or more are looked at for each"
    known |= {f"ghost-{number}": Esteem.SILENT for number in range(3000)}
    known["ghost-20"] = Esteem.KNOWN
    fill(store, 50, lambda _: "third", first=4000)
    assert "ghost-20" in names(store)


def test_a_record_lives_no_longer_than_honest_ones_unless_it_is_renewed_and_the_own_one_to_its_end() -> None:
    """By the time since it came here, whatever end it claims; known signers are no exception."""
    time = [0.0]
    store = RecordStore(OWN, lambda _: Esteem.KNOWN, random.Random(0), longest=30.0, clock=lambda: time[0])
    for name in ("leaves", "stays", OWN):
        store.put(KEY, PeerId(name), held(name, 320.0), 0.0)
    for second in (20, 40):
        time[0] = float(second)
        store.put(KEY, PeerId("stays"), held("another", 320.0 + second), float(second))
        if second < 30:
            store.put(KEY, PeerId("leaves"), held("leaves", 320.0), float(second))
    assert names(store, 40.0) == {"stays", OWN}, "the same record again is no renewal"


def test_a_flood_by_any_number_of_peers_leaves_those_that_this_node_knows_and_its_own() -> None:
    """Some places are free for all the others, more or less by chance."""
    known = {f"friend-{number}": Esteem.WORKS for number in range(64)}
    store = store_of(known, most_records=128)
    store.put(KEY, OWN, held(OWN), 0.0)
    for friend in known:
        store.put(KEY, PeerId(friend), held(friend), 0.0)
    fill(store, 4000, lambda number: f"storer-{number // 30}")
    fill(store, 4000, lambda number: f"ghost-{number}", first=10_000)
    assert len(store) == 128
    assert known.keys() | {OWN} <= names(store)


def test_a_newcomer_gets_a_place_in_a_full_stage_and_few_of_its_members_lose_theirs() -> None:
    """That holds also if the stage is full of peers that this node knows; strangers without number cost it a small
    share."""
    known = {f"friend-{number}": Esteem.WORKS for number in range(128)}
    store = store_of(known, most_records=128)
    for friend in known:
        store.put(KEY, PeerId(friend), held(friend), 0.0)
    assert store.put(KEY, PeerId("newcomer"), held("newcomer"), 0.0)
    fill(store, 2000, lambda number: f"ghost-{number}")
    assert len(known.keys() & names(store)) > 128 * 0.8
    assert not store.put(KEY, PeerId("hearsay"), held("stranger"), 0.0) or "hearsay" in names(store)


def test_a_crowd_that_answers_like_everybody_takes_no_place_from_those_that_were_there_before() -> None:
    """Five times as many keys as there are places, each known by a hello and storing its record again and again."""
    friends = [f"friend-{number}" for number in range(12)]
    crowd = [f"crowd-{number}" for number in range(640)]
    store = store_of(dict.fromkeys((*friends, *crowd), Esteem.KNOWN), most_records=128)
    for friend in friends:
        store.put(KEY, PeerId(friend), held(friend), 0.0)
    missed = 0
    for second in range(6):
        for name in crowd:
            store.put(KEY, PeerId(name), held(name, 1e9 + second), float(second))
        missed += len(set(friends) - names(store))
        for friend in friends:
            store.put(KEY, PeerId(friend), held(friend, 1e9 + second), float(second))
    assert len(store) == 128
    assert missed == 0


def test_a_newcomer_that_renews_is_seen_most_of_the_time_beside_a_flood_of_new_keys() -> None:
    """Three keys a second, each with a link of its own, a record of its own and 33 of others, for 64 places; it renews
    each seven seconds. Once it has been there for a minute no stranger takes its place."""
    store, seen, later = store_of(most_records=64), 0, 0
    for second in range(180):
        for number in range(3):
            name = f"ghost-{second}-{number}"
            store.put(KEY, PeerId(name), held(name), float(second))
            for other in range(33):
                store.put(KEY, PeerId(f"{name}-{other}"), held(name), float(second))
        if second % 7 == 0:
            store.put(KEY, PeerId("newcomer"), held("newcomer", 1e9 + second), float(second))
        seen += "newcomer" in names(store, float(second))
        later += second >= ANSWER_SECONDS + 10 and "newcomer" in names(store, float(second))
    assert len(store) == 64
    assert seen > 0.8 * 180
    assert later > 0.95 * (180 - ANSWER_SECONDS - 10)


def test_a_seed_keeps_the_records_of_runs_beside_keys_without_number() -> None:
    """Of the nodes that come again and again nearly all keep their places beside strangers with a key each."""
    store = store_of(most_in_all=256)
    honest = [bytes([number]) * 20 for number in range(16)]
    for time in range(0, 70, 7):
        for number, key in enumerate(honest):
            store.put(key, PeerId(f"node-{number}"), held(f"node-{number}", 1e9 + time), float(time))
    for number in range(2000):
        key = number.to_bytes(20, "big")
        store.put(key, PeerId(f"ghost-{number}"), held("stranger"), 70.0)
        store.put(key, PeerId(f"direct-{number}"), held(f"direct-{number}"), 70.0)
    assert len(store) <= 256
    assert len(set(honest) & rows_of(store).keys()) >= 12


def test_the_whole_is_bounded_and_what_has_ended_makes_room() -> None:
    """Under many keys, none of them full."""
    store = store_of(most_in_all=200)
    for number in range(2000):
        key = (number % 40).to_bytes(20, "big")
        store.put(key, PeerId(f"peer-{number}"), held(f"peer-{number}", 100.0), 0.0)
        assert len(store) <= 200
    assert store.put(KEY, PeerId("late"), held("late", 300.0), 200.0)
    assert len(store) == 1


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_whatever_comes_the_counts_are_true_the_bounds_hold_and_the_own_record_stays(data: st.DataObject) -> None:
    """Any order of stores by any peers, with time that goes on."""
    known = {f"peer-{number}": Esteem.KNOWN for number in range(3)}
    store, now = store_of(known, most_records=6, most_in_all=10), 0.0
    store.put(KEY, OWN, held(OWN), 0.0)
    moves = st.tuples(st.integers(0, 3), st.integers(0, 12), st.integers(0, 12), st.floats(0.1, 30.0), st.booleans())
    for key, signer, storer, life, direct in data.draw(st.lists(moves, max_size=60)):
        now += 1.0
        name = f"peer-{signer}"
        row = held(name if direct else f"peer-{storer}", now + life)
        store.put(KEY if key == 3 else bytes([key]) * 20, PeerId(name), row, now)
        every = [(each, store.held(each, peer)) for each, rows in rows_of(store).items() for peer in rows]
        assert len(every) == len(store) <= 10
        assert all(len(rows) <= 6 for rows in rows_of(store).values())
        assert OWN in rows_of(store)[KEY]
        hearsay = Counter(
            (each, row.storer)
            for each, rows in rows_of(store).items()
            for peer, row in rows.items()
            if row.storer != peer
        )
        assert hearsay == {place: len(brought) for place, brought in store._hearsay.items()}


def test_a_peer_that_brings_many_again_and_again_costs_little() -> None:
    """What one peer brings of others beyond its share changes places; each time at the cost of a few looks."""
    looks = 0

    def esteem(_: PeerId) -> Esteem:
        nonlocal looks
        looks += 1
        return Esteem.HEARSAY

    store = RecordStore(OWN, esteem, random.Random(0))
    for time in range(10):
        for number in range(400):
            store.put(KEY, PeerId(f"peer-{number}"), held("storer", 1e6), float(time))
    assert len(store) <= MOST_HEARSAY + 1
    assert looks <= 10 * 400 * (EXAMINED + 1)


class Desk:
    """An intake over a store, with a clock of its own."""

    def __init__(self, *known: str) -> None:
        self.time = 0.0
        self.known = set(known)
        self.store = store_of()
        self.validator = RecordValidator(RUN, STAGES)
        self.intake = Intake(
            OWN,
            self.validator,
            self.store,
            lambda peer: peer in self.known,
            lambda: 1e6 + self.time,
            LIFE,
            lambda: self.time,
        )
        self.key = key_ids(RUN, STAGES)[0].to_bytes()

    def take(self, storer: str, row: tuple[str, bytes], expires: float) -> bool:
        return self.intake.take(PeerId(storer), self.key, *row, expires)


@pytest.mark.parametrize(
    ("life", "held"), [(LIFE, True), (LIFE + SKEW_SECONDS, True), (LIFE + SKEW_SECONDS + 1, False), (-1.0, False)]
)
def test_life_is_judged_where_a_record_is_stored_with_room_for_clocks_that_differ(life: float, held: bool) -> None:
    """It is judged anew each time: what lives too long now may be held later, by the same signature."""
    desk = Desk()
    expires = 1e6 + life
    row = ghost(RUN, 0, expires)
    assert desk.take("storer", row, expires) is held
    desk.time = 2.0 if life > 0 else 0.0
    assert desk.take("storer", row, expires) is (life > 0)


def test_a_record_is_no_larger_than_honest_ones_and_has_few_fields_that_nobody_knows() -> None:
    """What pads it is refused."""
    desk, expires = Desk(), 1e6 + LIFE
    assert desk.take("storer", ghost(RUN, 0, expires, padding=200), expires)
    assert not desk.take("storer", ghost(RUN, 0, expires, padding=MAX_RECORD_BYTES), expires)


@pytest.mark.parametrize("length", [KEY_BYTES, KEY_BYTES + 1, 60_000])
def test_a_seed_of_any_run_holds_no_longer_keys_than_the_dhts(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One stranger's 16,384 records at keys of 60 kB each were a gigabyte of a seed's memory."""
    key, signer = b"k" * length, throw_away_key()
    monkeypatch.setattr(validator, "_digest", lambda _: key)
    record = PeerRecord(peer_id=signer.peer_id, stage=0, state=PeerState.TRAINING, protocol=1, version="0")
    signed = sign_record(signer, "", record, 1e6)
    found = RecordValidator(None, 0).read(key, signer.peer_id, signed, 1e6)
    assert (found is not None) is (length == KEY_BYTES)


def test_one_storer_makes_a_node_check_so_many_signatures_and_others_are_still_heard() -> None:
    """Bad ones count like good ones; what is held already costs nothing; time gives more."""
    desk, expires = Desk(), 1e6 + LIFE
    row = ghost(RUN, 0, expires)
    for number in range(1000):
        desk.take("stranger", (row[0], row[1] + bytes([number % 256, number // 256])), expires)
    assert desk.intake.checked == CHECKS_AT_ONCE
    assert not desk.take("stranger", row, expires)
    assert desk.take("another", row, expires)
    checked = desk.intake.checked
    assert all(desk.take("stranger", row, expires) for _ in range(1000))
    assert desk.intake.checked == checked
    desk.time = 1.0
    for number in range(1000):
        desk.take("stranger", (row[0], row[1] + bytes([1, number % 256, number // 256])), expires + 1)
    assert desk.intake.checked == checked + CHECKS_A_SECOND


def test_a_flood_by_peers_without_number_shuts_out_neither_newcomers_nor_acquaintances() -> None:
    """However many bring hearsay, a record that its signer brings, and what a known peer brings, are checked."""
    desk, expires = Desk("friend"), 1e6 + LIFE
    row = ghost(RUN, 0, expires)
    for number in range(3000):
        desk.take(f"stranger-{number // 100}", (row[0], row[1] + number.to_bytes(2, "big")), expires)
    assert desk.intake.checked == POOLS[Esteem.HEARSAY][0]
    assert not desk.take("yet-another", row, expires)
    newcomer = throw_away_key()
    assert desk.take(newcomer.peer_id, ghost(RUN, 0, expires, identity=newcomer), expires)
    assert desk.take("friend", row, expires)


def test_nothing_of_any_type_raises() -> None:
    """As it comes out of a stranger's MessagePack."""
    desk = Desk()
    for odd in (None, 1, -1.5, float("nan"), float("inf"), "x" * 999, b"", [], {}, True):
        assert not desk.intake.take(PeerId("stranger"), desk.key, odd, b"x", 1e6 + 1)
        assert not desk.intake.take(PeerId("stranger"), desk.key, "peer", odd, 1e6 + 1)
        assert not desk.intake.take(PeerId("stranger"), desk.key, "peer", b"x", odd)
        assert not desk.intake.take(PeerId("stranger"), b"", "peer", b"x", 1e6 + 1)
    assert len(desk.store) == 0
