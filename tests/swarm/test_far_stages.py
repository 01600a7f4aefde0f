"""Stages that a node does not deal with: each is known to be served, by a few of its nodes, and what is read of all of
them together does not go with how many they are."""

from __future__ import annotations

import asyncio
import random
from statistics import fmean
from typing import cast

import pytest
from hivemind.dht.routing import DHTID  # pyright: ignore[reportMissingTypeStubs]

from noloco_node.directory.asked_key import MOST_OF_FEW, AskedKey, Few, pack_asked, unpack_asked
from noloco_node.directory.buckets import Place
from noloco_node.directory.dht_node import DhtNode
from noloco_node.directory.dht_walk import Walker
from noloco_node.directory.far_stages import MOST_ROWS, TURN, few_again, rows_of_each
from noloco_node.directory.sampled_view import WHOLE
from noloco_node.identity.peer_id import PeerId
from noloco_node.placement.balancing import servers_of, supply_of
from noloco_node.simulator.loop import in_virtual_time
from noloco_node.transport.acquaintance import Acquaintances
from tests.swarm.test_bucket_holders import Net, peers
from tests.swarm.test_look_ups import KEY, fill, intake_of, members, node_of
from tests.swarm.test_sampled_view import LIFE, LOOK, OWN, Keys, Observer

FAR = range(2, 16)
"""Of sixteen stages, for a node of the first."""


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
    """Of sixteen stages hardly more than of four, be they seen whole or in part; all of each would be four times."""
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
        assert not any(observer.sampled.few_of(Place(stage, 0, 0)) for stage in FAR)


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
    observer.look(2)
    assert observer.view.live(9, observer.now)


def test_a_far_stage_that_grows_is_served_at_every_look_and_soon_known_to_be_large() -> None:
    """From twenty to a thousand while its turn comes once in four minutes."""
    keys = Keys(*[20] * 16)
    observer = Observer(keys, stages=16)
    observer.look(60)
    names = [PeerId(f"peer-9-{number:06}") for number in range(1000)]
    for many, level in ((60, 0), (200, 1), (500, 3), (1000, 4)):
        for place in [place for place in keys.rows if place.stage == 9]:
            del keys.rows[place]
        for peer in names[:many]:
            keys.write(peer, 9, level, many / (1 << level))
        for _ in range(int(60.0 / LOOK)):
            observer.look()
            assert observer.view.live(9, observer.now)
    observer.look(int(3 * TURN * LIFE * 14 / LOOK))
    assert observer.view.number(9, observer.now) == pytest.approx(1000, rel=0.4)


@pytest.mark.parametrize("each", [90, 1000])
def test_a_stage_that_a_node_comes_to_is_seen_as_its_own_at_the_next_look(each: int) -> None:
    """Everybody of a small one, all of a bucket of a large one."""
    observer = Observer(Keys(*[each] * 16), stages=16)
    for _ in range(20):
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


def test_few_are_the_same_at_each_holder_and_others_by_another_salt() -> None:
    """Also where one of them knows of fewer; and as many as are wanted of any crowd."""
    signers = [f"signer-{number}" for number in range(200)]
    few = Few(8, b"saltsalt")
    shown = set(few.of(signers))
    assert len(shown) == 8
    assert set(few.of([*reversed(signers[50:])])) >= shown.intersection(signers[50:])
    assert len(shown & set(Few(8, b"tlastlas").of(signers))) < 8
    assert few.of(signers[:8]) == signers[:8]
    seen = {signer for number in range(300) for signer in Few(8, number.to_bytes(8, "big")).of(signers)}
    assert seen == set(signers)


@pytest.mark.parametrize("most", [0, 2, 8, MOST_OF_FEW])
def test_how_many_are_wanted_goes_with_the_request(most: int) -> None:
    key = bytes(range(20))
    asked = unpack_asked(pack_asked(key, [("signer", 100.0)], b"saltsalt", 20, most))
    assert (asked.key, asked.neighbours, asked.most) == (key, 20, most)
    assert asked.holds("signer", 100.0)
    assert len(asked.of([f"signer-{number}" for number in range(500)])) == (most or 500)
    assert AskedKey(key).of(["signer"]) == ["signer"]


async def test_a_holder_tells_a_few_and_again_only_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, holder = await members(2)
    fill(holder, 40)
    told, few = list[str](), Few(8, b"saltsalt")
    taken = intake_of(reader.directory).take

    def take(teller: PeerId, key: bytes, signer: object, signed: object, expires: object) -> bool:
        told.append(str(signer))
        return taken(teller, key, signer, signed, expires)

    monkeypatch.setattr(intake_of(reader.directory), "take", take)
    assert await node_of(reader.directory).find(holder.p2p.peer_id, [KEY], few=few) is not None
    filled = {f"a-signer-of-a-record-{number}" for number in range(40)}
    assert set(told) - {holder.peer} == set(few.of(filled | {holder.peer, reader.peer})) - {holder.peer, reader.peer}


def test_of_few_the_first_that_answers_is_asked_and_no_second() -> None:
    async def scenario() -> None:
        net = Net(peers(0, 30))
        walker = Walker(cast("DhtNode", net), random.Random(1), asyncio.get_running_loop().time)
        key, few = DHTID.generate(source="a bucket"), Few(8, b"saltsalt")
        assert await walker.glance(key)
        net.asked.clear()
        assert await walker.glance(key, few)
        assert [asked for _, asked in net.asked] == [few]
        net.live -= {net.asked[0][0]}
        net.asked.clear()
        for _ in range(20):
            assert await walker.glance(key, few)
        assert len(net.asked) > 20, "who does not answer is passed over"

    in_virtual_time(scenario)


def test_rows_of_each_are_a_power_of_two_within_bounds() -> None:
    assert [rows_of_each(far) for far in (1, 2, 6, 14, 62)] == [MOST_ROWS, MOST_ROWS, 8, 2, 2]
    assert few_again(LIFE) + LOOK < LIFE * 2 / 3, "before the eldest of them ends"


def test_the_few_that_are_seen_stay_until_all_are_read_again_and_are_others_then() -> None:
    """Whoever is asked for its work or its record is asked once for all, and everybody is seen in the long run."""
    observer, seen, changes = Observer(Keys(*[90] * 16), stages=16), set[PeerId](), 0
    observer.look(60)
    before = observer.peers(9)
    for _ in range(int(40 * 14 * TURN * LIFE / LOOK)):
        observer.look()
        few = observer.peers(9)
        assert len(few) == rows_of_each(len(FAR))
        seen |= few
        changes += few != before
        before = few
    assert 38 <= changes <= 41
    assert len(seen) > 40


@pytest.mark.parametrize("each", [50, 90, 1000])
def test_a_far_stage_of_which_few_have_answered_seems_no_poorer_when_it_is_read_whole(each: int) -> None:
    """Only those that are seen are asked whether they are there. Of a stage that is shown whole, whom nobody has asked
    counts nothing."""
    observer, known, seen = Observer(Keys(*[each] * 16), stages=16), Acquaintances(lambda: 0.0), 0
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
