"""Stages that a node does not deal with: each is known to be served, by a few of its nodes.

What is read of all of them together does not grow with their number.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection
from dataclasses import replace
from statistics import fmean
from typing import cast

import pytest
from hivemind.dht.routing import DHTID  # pyright: ignore[reportMissingTypeStubs]

from noloco_node.directory.asked_key import pack_asked, unpack_asked
from noloco_node.directory.buckets import Place
from noloco_node.directory.dht_node import REPLICAS, DhtNode
from noloco_node.directory.dht_walk import Walker
from noloco_node.directory.far_stages import IDLE_AGAIN, LEAST_ROWS, MOST_ROWS, TURN, drawn_of, few_again, rows_of_each
from noloco_node.directory.records import LiveRecord, PeerState
from noloco_node.directory.sampled_view import WHOLE
from noloco_node.directory.store import Esteem
from noloco_node.identity.peer_id import PeerId
from noloco_node.peers.stats import PeerStats
from noloco_node.placement.balancing import servers_of, supply_of
from noloco_node.simulator.loop import in_virtual_time
from tests.swarm.test_bucket_holders import Net, peers
from tests.swarm.test_look_ups import KEY, fill, intake_of, members, node_of
from tests.swarm.test_sampled_view import LIFE, LOOK, OWN, Keys, Observer

FAR = range(2, 16)
"""The far ones of sixteen stages, for a node of the first."""


def read_a_second(each: int, stages: int) -> float:
    """Records that a node reads, once it has settled."""
    keys = Keys(*[each] * stages)
    observer = Observer(keys, stages=stages)
    observer.look(60)
    keys.read = 0
    observer.look(300)
    return keys.read / (300 * LOOK)


@pytest.mark.parametrize("each", [90, 250, 1000])
def test_what_is_read_does_not_go_with_the_number_of_stages(each: int) -> None:
    """Sixteen stages cost hardly more than four, be they seen whole or in part; all of each would be four times."""
    few, many = read_a_second(each, 4), read_a_second(each, 16)
    at_once = each * 2 / LOOK if each < 96 else 0.0  # of the own stage and the next, whose records a mark leaves out
    assert many - at_once < 1.4 * (few - at_once)
    assert many - at_once < 60.0


@pytest.mark.parametrize("each", [20, 90, 1000])
def test_each_of_many_stages_is_seen_to_be_served_at_every_look_and_its_number_known(each: int) -> None:
    observer, numbers = Observer(Keys(*[each] * 16), stages=16), list[float]()
    observer.look(60)
    for _ in range(200):
        view = observer.look()
        assert all(len(view.live(stage, observer.now)) >= rows_of_each(len(FAR)) for stage in range(16))
        numbers += [view.number(stage, observer.now) / each for stage in FAR]
    assert fmean(numbers) == pytest.approx(1.0, abs=0.03)
    assert all(0.6 < number < 1.5 for number in numbers)


def test_of_a_small_swarm_everybody_is_seen_whatever_the_stages() -> None:
    observer = Observer(Keys(*[WHOLE // 16] * 16), stages=16)
    for _ in range(20):
        assert all(len(rows) == WHOLE // 16 for rows in observer.look().stages)
        assert not any(observer.sampled.followed_at(Place(stage, 0, 0)) for stage in FAR)


@pytest.mark.parametrize("each", [90, 1000])
def test_a_far_stage_that_is_lost_is_seen_to_be_within_a_records_life_and_one_that_is_served_again_at_once(
    each: int,
) -> None:
    keys = Keys(*[each] * 16)
    observer = Observer(keys, stages=16)
    observer.look(60)
    kept = {place: rows for place, rows in keys.rows.items() if place.stage == 9}
    for place in kept:
        del keys.rows[place]
    observer.look(int(LIFE / LOOK))
    assert not observer.view.live(9, observer.now)
    assert observer.view.scale(9).each == 1.0, "nobody is taken for the rest of it"
    keys.rows |= kept
    observer.look(int(IDLE_AGAIN * LIFE / LOOK) + 1)
    assert observer.view.live(9, observer.now)


def test_a_far_stage_that_grows_is_served_at_every_look_and_soon_known_to_be_large() -> None:
    """From twenty to a thousand while its turn comes once in four minutes."""
    keys = Keys(*[20] * 16)
    observer = Observer(keys, stages=16)
    observer.look(60)
    names = [PeerId(f"peer-9-{number:06}") for number in range(1000)]
    for many, level in ((60, 0), (200, 1), (1000, 4)):
        for place in [place for place in keys.rows if place.stage == 9]:
            del keys.rows[place]
        for peer in names[:many]:
            keys.write(peer, 9, level, many / (1 << level))
        for _ in range(int(60.0 / LOOK)):
            observer.look()
            assert observer.view.live(9, observer.now)
    observer.look(int(3 * TURN * LIFE * 14 / LOOK))
    assert observer.view.number(9, observer.now) == pytest.approx(1000, rel=0.4)


def test_a_far_stage_whose_nodes_have_gone_to_another_level_is_served_at_every_look() -> None:
    """Where its buckets are read nobody writes any more."""
    keys = Keys(*[200] * 5)
    observer = Observer(keys, stages=5)
    observer.look(60)
    for place in [place for place in keys.rows if place.stage == 3]:
        del keys.rows[place]
    for number in range(2500):
        keys.write(PeerId(f"peer-3-{number:06}"), 3, 5, 78.0)
    for _ in range(300):
        observer.look()
        assert observer.view.live(3, observer.now)
    assert observer.view.number(3, observer.now) == pytest.approx(2500, rel=0.25)


@pytest.mark.parametrize("each", [90, 1000])
def test_a_stage_that_a_node_comes_to_is_seen_as_its_own_at_the_next_look(each: int) -> None:
    """Everybody of a small one, all of a bucket of a large one."""
    observer = Observer(Keys(*[each] * 16), stages=16)
    for _ in range(5):
        observer.look(60)
        assert len(observer.view.stages[9]) == rows_of_each(len(FAR))
        observer.sampled.to_write(OWN, 9, LIFE)
        view = observer.look()
        assert all(len(view.stages[stage]) > 40 for stage in (9, 10))
        assert each > 90 or view.scale(9).each == 1.0
        observer.sampled.to_write(OWN, 0, LIFE)


def test_who_serves_no_stage_yet_sees_all_of_each() -> None:
    """By what it sees it chooses one."""
    observer = Observer(Keys(*[90] * 16), stages=16, serves=False)
    assert [len(rows) for rows in observer.look().stages] == [90] * 16


def test_who_asks_for_those_that_it_follows_wants_nothing_of_others() -> None:
    """It does not want what it has of them either; a node that asks for all wants what it has not."""
    key, held = bytes(range(20)), [("one", 100.0), ("another", 50.0)]
    asked = unpack_asked(pack_asked(key, held, b"saltsalt", 20, only_marked=True))
    assert (asked.key, asked.neighbours, asked.only_marked) == (key, 20, True)
    assert [asked.wants("one", expires) for expires in (99.0, 100.0, 101.0)] == [False, False, True]
    assert asked.wants("another", 51.0)
    assert not asked.wants("a third", 100.0)
    assert not unpack_asked(pack_asked(key, [], b"saltsalt", 0, only_marked=True)).wants("one", 1.0)
    every = unpack_asked(pack_asked(key, held, b"saltsalt", 20))
    assert not every.only_marked
    assert every.wants("a third", 100.0)


async def test_a_holder_tells_of_those_that_are_followed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, holder = await members(2)
    fill(holder, 40)
    told, wanted = list[str](), [f"a-signer-of-a-record-{number}" for number in (3, 17, 99)]
    monkeypatch.setattr(intake_of(reader.directory), "take", lambda _, __, signer, *___: told.append(str(signer)))
    assert await node_of(reader.directory).find(holder.p2p.peer_id, [KEY], only=wanted) is not None
    assert sorted(set(told) - {holder.peer}) == sorted(wanted[:2])


def test_both_holders_that_are_asked_are_asked_for_those_that_are_followed() -> None:
    """One of the two that says nothing hides nobody."""

    async def scenario() -> None:
        net = Net(peers(0, 30))
        walker = Walker(cast("DhtNode", net), random.Random(1), asyncio.get_running_loop().time)
        key = DHTID.generate(source="a bucket")
        assert await walker.glance(key, ["one"])
        assert [only for _, only in net.asked if only] == [["one"]] * REPLICAS
        net.asked.clear()
        assert await walker.glance(key, ["one"])
        assert [only for _, only in net.asked] == [["one"], ["one"]]

    in_virtual_time(scenario)


def test_who_is_followed_is_drawn_from_all_and_where_nobody_was_at_work_from_those_that_are() -> None:
    """A crowd that never answers stands for as many as it is, and hides nobody for longer than it takes to ask."""
    rows = Keys(50).at(Place(0, 0, 0), 0.0)
    silent = set(sorted(rows)[:40])

    def standing(peer: PeerId) -> Esteem:
        return Esteem.SILENT if peer in silent else Esteem.HEARSAY

    every = [drawn_of(rows, 3, random.Random(seed), lambda _: Esteem.HEARSAY) for seed in range(200)]
    drawn = [peer for peers, _ in every for peer in peers]
    assert sum(peer in silent for peer in drawn) / len(drawn) == pytest.approx(0.8, abs=0.06)
    assert set(drawn) == set(rows)
    assert {share for _, share in every} == {1.0}
    shares = set[float]()
    for seed in range(200):
        followed, share = drawn_of(rows, 3, random.Random(seed), standing)
        assert set(followed) - silent
        assert share == 1.0 or (share == 0.2 and not silent.intersection(followed))
        shares.add(share)
    assert shares == {0.2, 1.0}
    assert drawn_of(rows, 3, random.Random(1), lambda _: Esteem.SILENT)[1] == 1.0


def test_as_few_are_followed_as_there_are_many_stages() -> None:
    assert [rows_of_each(far) for far in (1, 2, 6, 14, 62)] == [MOST_ROWS, MOST_ROWS, 8, LEAST_ROWS, LEAST_ROWS]
    assert few_again(LIFE) + LOOK < LIFE * 2 / 3, "before the eldest of them ends"


def test_those_that_are_followed_stay_until_all_are_read_again_and_are_others_then() -> None:
    """A peer that is asked for its work or its record is asked once for all, and everybody is seen in the long run."""
    observer, seen, changes = Observer(Keys(*[90] * 16), stages=16), set[PeerId](), 0
    observer.look(60)
    before = observer.peers(9)
    for _ in range(int(10 * 14 * TURN * LIFE / LOOK)):
        observer.look()
        few = observer.peers(9)
        assert len(few) == rows_of_each(len(FAR))
        seen |= few
        changes += few != before
        before = few
    assert 8 <= changes <= 11
    assert len(seen) > 20


@pytest.mark.parametrize(("stages", "before", "after"), [(5, 160, 100), (5, 1000, 600), (16, 300, 150), (16, 60, 30)])
def test_what_befalls_a_far_stage_is_known_after_a_few_of_its_turns(stages: int, before: int, after: int) -> None:
    """That holds also if level 0 is read as well: its number is that of its latest buckets."""
    keys = Keys(*[before] * stages)
    observer, far = Observer(keys, stages=stages), stages - 2
    observer.look(60)
    gone = {PeerId(f"peer-3-{number:06}") for number in range(after, before)}
    for place, rows in keys.rows.items():
        if place.stage == 3:
            rows[:] = [peer for peer in rows if peer not in gone]
    observer.look(int(6 * far * TURN * LIFE / LOOK) + 10)
    numbers = list[float]()
    for _ in range(10):
        numbers.append(observer.look().number(3, observer.now))
    assert fmean(numbers) == pytest.approx(after, rel=0.18)


@pytest.mark.parametrize("each", [60, 150, 1000])
def test_a_stage_that_a_node_has_left_is_as_large_as_it_was(each: int) -> None:
    """Though it held all of its buckets while it served there, and follows a few now."""
    observer = Observer(Keys(*[each] * 5), stages=5)
    observer.look(60)
    for own in (3, 0, 3):
        observer.sampled.to_write(OWN, own, LIFE)
        for _ in range(60):
            view = observer.look()
            assert all(0.75 * each < view.number(stage, observer.now) < 1.3 * each for stage in range(5))


@pytest.mark.parametrize("why", ["silent", "joining"])
def test_where_few_are_at_work_some_of_these_are_seen_and_speak_for_as_many_as_they_are(why: str) -> None:
    """Five of six of each stage are ghosts, or have just come: drawn alone they would show one that nobody serves."""
    keys = Keys(*[60] * 16)
    observer = Observer(keys, stages=16)
    unfit = {PeerId(f"peer-{stage}-{number:06}") for stage in range(16) for number in range(60) if number % 6}
    if why == "silent":
        observer.known = dict.fromkeys(unfit, Esteem.SILENT)
    else:
        at = keys.at

        def joining(place: Place, now: float, only: Collection[PeerId] | None = None) -> dict[PeerId, LiveRecord]:
            return {
                peer: replace(row, record=row.record.model_copy(update={"state": PeerState.JOINING}))
                if peer in unfit
                else row
                for peer, row in at(place, now, only).items()
            }

        keys.at = joining
    observer.look(60)
    numbers = list[float]()
    for _ in range(600):
        view = observer.look()
        assert all(set(view.stages[stage]) - unfit for stage in FAR)
        numbers += [sum(peer not in unfit for peer in view.stages[s]) * view.scale(s).each for s in FAR]
    assert 9.0 < fmean(numbers) < 17.0, "ten of sixty, and hardly more where some one of three is at work by chance"


@pytest.mark.parametrize("each", [50, 90, 1000])
def test_a_far_stage_of_which_few_have_answered_seems_no_poorer_when_it_is_read_whole(each: int) -> None:
    """Only peers that are seen are asked whether they are there. In a stage that is shown whole, a peer that nobody has
    asked counts nothing."""
    observer, known, seen = Observer(Keys(*[each] * 16), stages=16), PeerStats(lambda: 0.0), 0
    observer.look(60)
    for _ in range(200):
        view = observer.look()
        supply = supply_of(servers_of(view, (1.0,) * 16, observer.now, known, without=OWN), (1.0,) * 16)
        assert all(supply.strength[stage] > each / 2 for stage in FAR if supply.strength[stage])
        for stage in FAR:
            for peer in sorted(peer for peer in observer.peers(stage) if not known.answers(peer))[:1]:
                known.answered(peer)
                known.said(peer, stage)
        seen += sum(supply.strength[stage] > 0.0 for stage in FAR)
    assert seen > 150 * len(FAR)


def test_a_far_stage_of_which_all_have_just_come_is_known_to_be_large() -> None:
    """As at the start of a run; and read no more often for it than before."""
    keys, at = Keys(60, 60, *[1000] * 4), Keys.at

    def joining(place: Place, now: float, only: Collection[PeerId] | None = None) -> dict[PeerId, LiveRecord]:
        rows = at(keys, place, now, only)
        if place.stage > 1:
            coming = {"state": PeerState.JOINING}
            rows = {p: replace(row, record=row.record.model_copy(update=coming)) for p, row in rows.items()}
        return rows

    keys.at = joining
    observer = Observer(keys, stages=6)
    observer.look(60)
    assert observer.view.settled
    keys.read = 0
    for _ in range(100):
        view = observer.look()
        assert all(view.number(stage, observer.now) == pytest.approx(1000, rel=0.4) for stage in range(2, 6))
    near, often = 60 * 2 / LOOK, 1.0 / (IDLE_AGAIN * LIFE) + 1.0 / few_again(LIFE)
    assert keys.read / (100 * LOOK) < near + 4 * 75 * often


def test_a_far_bucket_whose_holders_never_answer_hides_nobody() -> None:
    observer = Observer(Keys(60, 60, *[250] * 4), stages=6)
    observer.look(60)
    for _ in range(600):
        view = observer.look(fails=lambda place: place.level > 0 and place.bucket == 1)
        assert all(view.live(stage, observer.now) for stage in range(6))
