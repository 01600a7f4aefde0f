"""Crowds by events: the same by seed, true to arithmetic, and what befalls them takes effect."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import pytest

from noloco_node.config.crowd_spec import CrowdSettings
from noloco_node.config.load import CrowdConfig, HuntConfig, load_config, load_simulation
from noloco_node.directory.store import MOST_RECORDS
from noloco_node.errors import UserError
from noloco_node.placement.balancing import supply_of
from noloco_node.simulator.crowd import Crowd
from noloco_node.simulator.crowd_figures import CLASSES, CrowdRun, unevenness
from noloco_node.simulator.crowd_nodes import Agenda
from noloco_node.simulator.events import check_memory, simulate_sizes
from noloco_node.simulator.report import of_crowd, write_results


def settings(**fields: Any) -> CrowdSettings:
    """A crowd of 24 for half an hour, slow and with no links to speak of, unless said otherwise."""
    usual: dict[str, Any] = {
        "kind": "crowd",
        "nodes": [24],
        "seconds": 1800,
        "dimensions": 64,
        "work": {
            "stages": 2,
            "microbatch_bytes": 1,
            "exchange_bytes": 1,
            "state_bytes": 1,
            "in_flight": 8,
            "microbatches_a_step": 2,
            "inner_steps": 4,
            "min_inner_steps": 2,
        },
        "devices": {"fastest": 4.0, "forward_seconds": 40.0},
        "links": {"near_seconds": 0.0, "far_seconds": 0.0},
        "directory": {"record_seconds": 200.0, "look_seconds": 20.0},
    }
    return CrowdSettings.model_validate(usual | fields)


def crowd_of(many: int, **fields: Any) -> Crowd:
    """It has run."""
    crowd = Crowd(settings(nodes=[many], **fields), many)
    crowd.run(120.0)
    return crowd


def test_things_happen_in_the_order_of_their_times_and_of_their_entry() -> None:
    """Those that others enter while they happen too, at once and much later, in however many runs."""
    agenda, rng, seen = Agenda(), random.Random(3), list[tuple[float, int]]()

    def happens(number: int, due: float) -> None:
        assert agenda.now == due
        seen.append((due, number))
        if len(seen) < 300:
            for _ in range(2):
                enter(rng.choice((0.0, 0.01, 0.3, 40.0)) * rng.randrange(3))

    entered = 0

    def enter(seconds: float) -> None:
        nonlocal entered
        entered += 1
        agenda.after(seconds, happens, entered, agenda.now + seconds)

    for _ in range(20):
        enter(rng.random() * 5.0)
    for until in (0.1, 0.1, 3.0, 3.1, 200.0):
        agenda.run(until)
        assert agenda.now == until
        assert all(due <= until for due, _ in seen)
    assert seen == sorted(seen)
    assert len(seen) == entered == agenda.happened


def test_alike_devices_on_free_links_hardly_ever_wait() -> None:
    """Their time is work, and what is trained is what was worked for."""
    last = crowd_of(24, devices={"fastest": 1.0, "forward_seconds": 10.0}, seconds=600).moments[1:]
    working = sum(moment.working for moment in last) / len(last)
    assert 0.9 < working <= 1.0
    trained, best = (sum(getattr(moment, name) for moment in last) for name in ("trained", "best"))
    assert trained == pytest.approx(working * best, rel=0.1)  # some is half done at either end


def test_slow_devices_do_not_hold_up_quick_ones() -> None:
    """Devices of 1 to 16 times the same speed, on free links: nobody waits at a slow one while another stands idle."""
    crowd = Crowd(settings(devices={"fastest": 16.0, "forward_seconds": 4.0}), 40)
    crowd.agenda.run(60.0)
    before = crowd.pipeline.finished
    crowd.agenda.run(240.0)
    assert crowd.pipeline.finished - before > 0.88 * 180.0 * crowd.moment().best


def test_a_parcel_of_several_changes_nothing_at_rest() -> None:
    """Two microbatches as one, on devices twice as quick: as much work a second, within what chance gives."""
    rates: list[float] = []
    for parcel in (1, 2):
        crowd = crowd_of(24, parcel=parcel, devices={"fastest": 4.0, "forward_seconds": 40.0 / parcel}, seconds=3600)
        span = crowd.moments[10:]
        rates.append(sum(moment.working for moment in span) / len(span))
    assert rates[1] == pytest.approx(rates[0], rel=0.1)


def test_the_spread_shrinks_as_the_arithmetic_of_the_same_meetings_says() -> None:
    """Few meet twice where there are many; hardly anybody steps alone."""
    last = crowd_of(60, seconds=2400).moments[-1]
    assert last.spread < 0.2
    assert last.spread == pytest.approx(last.expected, rel=0.4)
    assert last.alone < 0.02 * last.paired


def test_a_quarter_dies_and_newcomers_come() -> None:
    """Deaths are seen, parcels are lost with them, and those that live go on; a crowd copies its state and serves."""
    dead = crowd_of(24, deaths=[{"at_seconds": 600, "share": 0.25}])
    assert dead.moments[-1].nodes == dead.moments[-1].serving == 18
    assert dead.pipeline.lost > 0
    assert dead.moments[-1].trained > 0.0
    grown = crowd_of(24, arrivals=[{"at_seconds": 200, "within_seconds": 300, "times": 2.0}], seconds=900)
    assert grown.moments[-1].serving == 72
    assert {grown.directory.replicas(i) for i in range(24) if grown.nodes.stage[i] == 0} == {grown.nodes.stage.count(0)}


def test_a_region_that_is_cut_off_sees_itself_alone() -> None:
    """For as long as it is cut off; nothing gets across, and both parts go on."""
    cut = {"at_seconds": 300, "for_seconds": 900, "region": 1}
    crowd = Crowd(settings(cuts=[cut], links={"regions": 2}), 24)
    crowd.agenda.run(340.0)
    meetings = len(crowd.averaging.meetings)
    crowd.agenda.run(1190.0)
    region = crowd.nodes.region
    assert len(crowd.averaging.meetings) > meetings
    assert all(region[i] == region[j] for i, j in crowd.averaging.meetings.rows[meetings:].tolist())
    of_one = [i for i in range(24) if region[i] == 1 and crowd.nodes.stage[i] == 0]
    assert {crowd.directory.replicas(i) for i in of_one} == {len(of_one)}
    crowd.agenda.run(1300.0)
    assert {crowd.directory.replicas(i) for i in of_one} == {crowd.nodes.stage.count(0)}


def test_nodes_move_to_a_stage_that_has_lost_many_and_then_no_more() -> None:
    """Half a stage dies: the others come to its help until nothing is gained by it, and take up work there."""
    crowd = Crowd(settings(min_stay_seconds=120.0), 24)
    crowd.agenda.run(60.0)
    assert crowd.moves == 0
    stage_0 = [i for i in range(24) if crowd.nodes.stage[i] == 0]
    for i in stage_0[: len(stage_0) * 2 // 3]:
        crowd.kill(i)
    crowd.agenda.run(1800.0)
    moves = crowd.moves
    assert moves > 0
    strengths = [0.0, 0.0]
    for i in crowd.nodes.living():
        assert crowd.nodes.serving[i]
        strengths[crowd.nodes.stage[i]] += crowd.nodes.speed[i]
    assert min(strengths) > 0.75 * max(strengths)
    crowd.agenda.run(2400.0)
    assert crowd.moves == moves


def test_who_moves_leaves_its_exchanges_and_its_dials_behind() -> None:
    """Calls take seconds, and at each of many moments half of a stage leave it. None of them carries at the rate of an
    exchanging node, then or when a call comes that was on its way."""
    fired = 0
    for seconds in range(300, 600, 30):
        crowd = Crowd(settings(links={"near_seconds": 30.0, "far_seconds": 30.0}), 24)
        crowd.agenda.run(seconds)
        gone = range(0, 24, 4)
        fired += sum(crowd.nodes.exchanging[i] for i in gone)
        for i in gone:
            crowd.nodes.serving[i] = False
            crowd.averaging.left(i)
        for later in range(0, 120, 5):
            crowd.agenda.run(seconds + later)
            assert not any(crowd.nodes.exchanging[i] for i in gone)
    assert fired > 3


@pytest.mark.parametrize("view", ["everybody", "buckets"])
def test_counts_are_right_in_either_view(view: str) -> None:
    """Many nodes of one stage are counted exactly, or within some hundredths by buckets."""
    crowd = Crowd(settings(work={"stages": 1}, devices={"forward_seconds": 1e6}, directory={"view": view}), 600)
    crowd.agenda.run(90.0)
    assert crowd.directory.error <= (0.0 if view == "everybody" else 0.12)
    assert 400 < crowd.directory.replicas(3) < 800


def test_a_stage_that_all_begin_at_once_comes_to_its_level() -> None:
    """Where what lies at level 0 speaks of a level that nobody writes at yet: they are counted meanwhile."""
    work = {"stages": 4, "state_bytes": 1}
    for many in (500, 1000):
        crowd = Crowd(settings(nodes=[many], work=work, devices={"forward_seconds": 1e6}), many)
        crowd.agenda.run(1200.0)
        assert crowd.directory.error < 0.12


def test_what_a_node_takes_each_stage_to_have_is_about_what_it_has() -> None:
    """It sees a bucket of the own stage or the next, some of a further one, also before anything is held. The number is
    right on average over nodes, and for each to twice the error that it says."""
    work = {"stages": 4, "state_bytes": 1}
    crowd = Crowd(settings(work=work, devices={"forward_seconds": 1e6}), 1200)
    crowd.agenda.run(1200.0)
    nodes, directory = crowd.nodes, crowd.directory
    truth = [math.fsum(s for i, s in enumerate(nodes.speed) if nodes.stage[i] == stage) for stage in range(4)]
    for some, begin in ((range(0, 1200, 10), False), (range(0, 1200, 60), True)):
        for i in some if begin else ():
            directory.forget(i)
        supplies = [supply_of(directory.servers(i), (1.0,) * 4) for i in some]
        for stage in range(4):
            parts = [supply.strength[stage] / truth[stage] - 1.0 for supply in supplies]
            said = [supply.errors[stage] / truth[stage] for supply in supplies]
            assert abs(fmean(parts)) < 0.15
            assert 0.3 * fmean(said) < math.sqrt(fmean(part * part for part in parts)) < 2.0 * fmean(said)


@pytest.mark.parametrize("view", ["everybody", "buckets"])
def test_at_the_start_everybody_is_seen(view: str) -> None:
    """A node that begins beside others sends to all of them, and renewals come each at a time of its own."""
    directory = {"view": view, "record_seconds": 20.0, "look_seconds": 2.0}
    crowd = Crowd(settings(directory=directory, devices={"forward_seconds": 1.0}), 24)
    crowd.agenda.run(60.0)
    of_stage = crowd.nodes.stage.count(1)
    asked = [j for j in range(24) if crowd.nodes.stage[j] == 1 and crowd.pipeline.busy[j] > 0.0]
    assert len(asked) == of_stage
    crowd.nodes.sent.clear()
    crowd.agenda.run(66.0)
    written = crowd.nodes.sent["directory written"]
    crowd.nodes.sent.clear()
    crowd.agenda.run(72.0)
    assert 0.3 < crowd.nodes.sent["directory written"] / written < 3.0


def test_who_leaves_its_stage_has_all_its_places_at_the_next_one() -> None:
    """What it held where it was is lost, and holds no place any more."""
    crowd = Crowd(settings(work=settings().work.model_dump() | {"in_flight": 1, "max_pending": 1}), 24)
    crowd.agenda.run(300.0)
    i = next(i for i in range(24) if crowd.nodes.stage[i] == 1 and crowd.nodes.works_until[i] > 300.0)
    crowd.pipeline.left(i)
    worked = crowd.pipeline.busy[i]
    crowd.agenda.run(1800.0)
    assert crowd.pipeline.busy[i] > worked


def test_of_a_stage_that_begins_at_once_each_sees_as_many_as_holders_keep() -> None:
    """Another part each, and all together everybody; as many as there are where these are few."""
    crowd = Crowd(settings(devices={"forward_seconds": 1e6}), 2400)
    of_stage = {crowd.nodes.peer[i] for i in range(2400) if crowd.nodes.stage[i] == 1}
    seen = [crowd.directory.seen(i, 1) for i in range(2400) if crowd.nodes.stage[i] == 0]
    assert max(map(len, seen)) <= MOST_RECORDS < len(of_stage)
    assert {peer for each in seen for peer in each} == of_stage
    few = Crowd(settings(), 24)
    assert len(few.directory.seen(few.nodes.stage.index(0), 1)) == few.nodes.stage.count(1)


def test_who_goes_to_another_stage_is_seen_no_longer() -> None:
    """It is not seen even by those that had asked the directory just before."""
    crowd = Crowd(settings(devices={"forward_seconds": 1e6}), 24)
    one, other, *_ = (i for i in range(24) if crowd.nodes.stage[i] == 1)
    assert crowd.nodes.peer[one] in crowd.directory.seen(other, 0)
    crowd.directory.forget(one)
    assert crowd.nodes.peer[one] not in crowd.directory.seen(other, 0)


def test_who_sends_slowly_keeps_nobody_off_a_downlink() -> None:
    """A downlink is taken for as long as the bytes need on it; in turn where several fill it."""
    nodes = Crowd(settings(), 24).nodes
    nodes.up[:4], nodes.down[4] = [1e4, 1e6, 1e6, 1e6], 1e6
    assert nodes.carry(0, 4, 1e5, 1.0) == pytest.approx(10.0)
    assert [nodes.carry(i, 4, 1e5, 1.0) for i in (1, 2, 3)] == pytest.approx([0.2, 0.3, 0.4])


def test_who_lags_takes_a_state_and_its_donor_goes_on() -> None:
    """It steps with nobody until it has it; all others, the donor included, step on meanwhile."""
    work = settings().work.model_copy(update={"state_bytes": 1_000_000_000})
    crowd = Crowd(settings(work=work.model_dump(), devices={"fastest": 1.0, "forward_seconds": 4.0}), 24)
    crowd.agenda.run(1200.0)
    stage, progress = [i for i in range(24) if crowd.nodes.stage[i] == 1], crowd.averaging.progress
    assert crowd.averaging.kinds["caught_up"] == 0
    late = next(i for i in stage if not crowd.nodes.exchanging[i])  # half of what it lags would be its partner's
    others = [i for i in stage if i != late]
    progress[late] = replace(progress[late], clock=0.0)
    crowd.agenda.run(1320.0)
    rounds = {i: progress[i].outer_rounds for i in stage}
    crowd.agenda.run(1920.0)
    went_on = {i for i in stage if progress[i].outer_rounds > rounds[i]}
    assert went_on == set(others)
    crowd.agenda.run(4000.0)
    assert crowd.averaging.kinds["caught_up"] == 1
    assert progress[late].clock == pytest.approx(progress[others[0]].clock, rel=0.1)


def test_an_exchange_waits_for_the_devices() -> None:
    """Its snapshots, and what it changes, come between two operations: here these take 40 s, and links nothing."""
    averaging = crowd_of(24, devices={"fastest": 1.0, "forward_seconds": 20.0}).averaging
    took = averaging.exchange_seconds / (averaging.kinds["paired"] / 2)
    assert 40.0 < took < 160.0


def test_an_origin_draws_when_the_nodes_own_decision_says_so() -> None:
    """What would only wait for devices is drawn after the next step, though there is a place for it."""
    crowd = crowd_of(24, devices={"fastest": 1.0, "forward_seconds": 4.0})
    places = crowd.settings.work.in_flight
    under_way = [crowd.pipeline.under_way[i] for i in range(24) if crowd.nodes.stage[i] == 0]
    assert 0 < min(under_way) < places
    assert max(under_way) <= places


def test_an_exchange_has_all_of_an_idle_link_and_half_of_one_while_something_goes_there() -> None:
    """A single chunk goes there and then back; many go both ways at once."""
    nodes = Crowd(settings(links={"sigma": 0.0, "near_seconds": 0.0, "far_seconds": 0.0}), 24).nodes
    octets = 64.0 * nodes.chunk_octets
    alone = octets / nodes.up[0]
    assert nodes.exchange_seconds(0, 1, octets) == pytest.approx(65.0 / 64.0 * alone)
    nodes.chunk_octets = math.inf
    assert nodes.exchange_seconds(0, 1, octets) == pytest.approx(2.0 * alone)
    nodes.carry(1, 2, 0.25 * octets, 1.0)
    assert nodes.exchange_seconds(0, 1, octets) == pytest.approx(2.25 * alone)
    nodes.carry(1, 2, 8.0 * octets, 1.0)
    assert nodes.exchange_seconds(0, 1, octets) == pytest.approx(3.0 * alone)
    work = nodes.settings.work.model_copy(update={"exchange_seconds": 3.0})
    nodes.settings = nodes.settings.model_copy(update={"work": work})
    assert nodes.exchange_seconds(0, 1, octets) == pytest.approx(3.0 * alone + 4.0)


def test_clocks_of_a_later_stage_are_tied_to_the_origins() -> None:
    """Ones that run ahead by much are told so by each microbatch, and come back to what time it is."""
    crowd = crowd_of(24, devices={"fastest": 1.0, "forward_seconds": 4.0}, seconds=1200)
    nodes, progress = crowd.nodes, crowd.averaging.progress
    for i in range(24):
        if nodes.stage[i] == 1:
            progress[i] = replace(progress[i], clock=1.6 * progress[i].clock)
    before = [_median(progress[i].clock for i in range(24) if nodes.stage[i] == stage) for stage in (0, 1)]
    crowd.agenda.run(2400.0)
    after = [_median(progress[i].clock for i in range(24) if nodes.stage[i] == stage) for stage in (0, 1)]
    assert after[1] - after[0] < 0.8 * (before[1] - before[0])


def _median(values: Iterable[float]) -> float:
    return median(list(values))


def test_unevenness_tells_chance_from_a_preference() -> None:
    """About 1 for pairs drawn at random, far more where one class is met twice as often by another."""
    rng = random.Random(2)
    of, one_stage = np.arange(1000) % CLASSES, np.zeros(1000, np.int64)
    pairs = [(rng.randrange(1000), rng.randrange(1000)) for _ in range(20_000)]
    assert 0.7 < unevenness(np.array(pairs), of, one_stage) < 1.3
    assert unevenness(np.array([*pairs, *[(16 * k, 16 * k + 1) for k in range(60)] * 2]), of, one_stage) > 1.5


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_class_that_has_more_nodes_in_one_stage_than_in_another_is_no_preference(ahead: int) -> None:
    """300 nodes of four stages meet, each pair of a stage equally likely, or each of one stage and the next. It would
    be 1.4 to 2.0 if stages were not told apart, and ever more the more meetings there are."""
    rng = random.Random(1)
    of, stage = np.array([rng.randrange(CLASSES) for _ in range(300)]), np.arange(300) % 4
    within = [[i for i in range(300) if stage[i] == s] for s in range(4)]

    def pair(s: int) -> tuple[int, int]:
        one, other = rng.sample(within[s], 2)
        return one, rng.choice(within[s + 1]) if ahead else other

    pairs = np.array([pair(rng.randrange(4 - ahead)) for _ in range(20_000)])
    assert 0.7 < unevenness(pairs, of, stage) < 1.3
    assert unevenness(pairs, of, np.zeros(300, np.int64)) > 1.3


def test_figures_are_of_the_time_after_the_warm_up() -> None:
    """All figures are there."""
    figures = CrowdRun(Crowd(settings(warm_up_seconds=600, churn_an_hour=4.0), 24)).run()
    assert figures.seconds == 1200.0
    assert 0.3 < figures.of_best < 1.0
    kinds = {"directory read", "directory written", "exchanges", "microbatches", "states"}
    assert set(figures.node_bytes) == kinds
    assert 1.0 < figures.outer_steps < 120.0


def test_a_crowd_of_one_node_for_each_stage_has_no_spread_to_lose() -> None:
    """Nobody has a stage peer."""
    figures = CrowdRun(Crowd(settings(seconds=60, churn_an_hour=0.0), 2)).run()
    assert math.isnan(figures.contraction)
    assert math.isnan(figures.contraction_expected)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ("links: {up_mbit: 0}", "links.up_mbit"),
        ("churn_an_hour: -1", "churn_an_hour"),
        ("nodes: [3]\nwork: {stages: 8}", "a stage would have none"),
        ("parcel: 64", "lower the one"),
        ("cuts: [{at_seconds: 1, for_seconds: 1, region: 9}]", "no region 9"),
        ("cuts: [{at_seconds: 1, for_seconds: 1}]\nlinks: {regions: 1}", "nobody is elsewhere"),
        ("cuts: [{at_seconds: 9, for_seconds: 1}, {at_seconds: 1, for_seconds: 10, region: 1}]", "one after the other"),
        ("cuts: [{at_seconds: 60, for_seconds: 1}]", r"sim\.cuts: what is to come at 60 s never does"),
        ("deaths: [{at_seconds: 61, share: 0.5}]", r"sim\.deaths: .* never does"),
        ("arrivals: [{at_seconds: 90, within_seconds: 1, times: 2}]", r"sim\.arrivals: .* never does"),
        ("deaths: [{at_seconds: 1, share: 1.0}]", r"deaths\[0\]\.share"),
        ("arrivals: [{at_seconds: 1, within_seconds: 1, times: 1e308}]", r"arrivals\[0\]\.times"),
        ("links: {up_mbit: 1e-9}", r"sim\.links\.up_mbit is 1e-09: .* takes 2.4e\+11 s"),
        ("links: {down_mbit: 1e-9}", r"sim\.links\.down_mbit is 1e-09"),
        ("links: {sigma: 400}", r"links\.sigma"),
        ("directory: {holders: 1000000000}", r"directory\.holders"),
        ("directory: {record_seconds: 3}", "nodes would lose sight"),
        ("directory: {look_seconds: 1e-300}", r"directory\.look_seconds"),
        ("directory: {record_seconds: 1e300}", r"directory\.record_seconds"),
        ("min_stay_seconds: 1e-300", r"sim\.min_stay_seconds"),
        ("deaths: [{at_seconds: 1, share: 0.01}]", r"sim\.deaths: 0\.01 .* nobody"),
        ("arrivals: [{at_seconds: 1, within_seconds: 1, times: 0.01}]", r"sim\.arrivals: 0\.01 .* nobody"),
        (
            "kind: crowds",
            r"a setting is wrong\n  sim\.kind: 'crowds' is not allowed: must be one of swarm, hunt",
        ),
        ("seed: -1", r"sim\.seed"),
        ("colour: red", "colour"),
    ],
)
def test_bad_settings_are_refused_by_name(tmp_path: Path, fields: str, said: str) -> None:
    """With what to do."""
    lines = {"kind": "kind: crowd", "nodes": "nodes: [10]", "seconds": "seconds: 60"}
    file = tmp_path / "crowd.yaml"
    own = fields.partition(":")[0]
    every = [*(line for name, line in lines.items() if name != own), *fields.split("\n")]
    file.write_text("\n  ".join(["sim:", *every]))
    with pytest.raises(UserError, match=said):
        load_simulation(file)


def test_what_is_simulated_alone_is_refused_as_a_run() -> None:
    """With the command that simulates it; what comes along is sound."""
    for name, kind in (("sim/crowd", CrowdConfig), ("sim/hunt", HuntConfig)):
        assert isinstance(load_simulation(Path(name)), kind)
        with pytest.raises(UserError) as refused:
            load_config(Path(name))
        assert f"noloco-node simulate {name}" in refused.value.remedy
    with pytest.raises(UserError, match=r"sim\.most"):
        load_simulation(Path("sim/hunt"), ["sim.most=65"])
    with pytest.raises(UserError, match=r"sim\.fewest \(9\) exceeds"):
        load_simulation(Path("sim/hunt"), ["sim.fewest=9"])


def test_each_size_is_written_as_soon_as_it_is_there(tmp_path: Path) -> None:
    """With settings, figures, a table and a plot as for every kind; progress comes to its end."""
    told = list[tuple[float, float]]()
    every = settings(nodes=[8, 12], seconds=300)
    sizes = list(simulate_sizes(every, lambda done, whole: told.append((done, whole))))
    assert told[-1] == (20.0, 20)
    for count in (1, 2):
        result = of_crowd(every, sizes[:count])
        files = write_results(result, "noloco-node simulate", tmp_path)
        written = json.loads(files["results.json"].read_text())
        assert (written["kind"], len(written["figures"]["sizes"])) == ("crowd", count)
        assert written["sim"]["nodes"] == [8, 12]
    assert all(path.stat().st_size for path in files.values())
    assert result.table.startswith("| figure | 8 nodes | 12 nodes |")
    assert files["table.md"].read_text().startswith("# A simulated crowd: `noloco-node simulate`\n\n| figure |")


def test_who_is_left_of_a_crowd_is_replaced_as_before() -> None:
    """One of those that nearly all died at once lives on, and it is drawn while nobody else lives."""
    crowd = crowd_of(24, deaths=[{"at_seconds": 300, "share": 0.999}], churn_an_hour=20.0, seconds=900)
    assert min(moment.nodes for moment in crowd.moments) == 1


def test_more_than_the_memory_holds_is_refused() -> None:
    """Before anything is built: nodes, what each weighs, and what it keeps under way."""
    check_memory(settings(), 8 << 30)
    with pytest.raises(UserError, match="simulate fewer"):
        check_memory(settings(nodes=[10**9]), 8 << 30)
    with pytest.raises(UserError, match=r"sim\.dimensions"):
        check_memory(settings(dimensions=10**9), 8 << 30)
    with pytest.raises(UserError, match=r"sim\.work\.in_flight"):
        check_memory(settings(work={"stages": 2, "in_flight": 10**7}), 8 << 30)
