"""A whole swarm as an onlooker sees it: counted by answers, timed by clocks, bounded whatever is claimed."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest
from pydantic import ValidationError

from noloco_node import PROTOCOL_VERSION, __version__
from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import AccessSpec, LimitsSpec
from noloco_node.directory.records import DirectoryView, LiveRecord, PeerRecord, PeerState
from noloco_node.directory.summary import believed
from noloco_node.errors import SHOWN
from noloco_node.identity.peer_id import PeerId
from noloco_node.observer import Onlooker, nothing_seen, view_swarm
from noloco_node.peers.scorecard import NOBODY
from noloco_node.telemetry.metrics import SEED_TABLE
from noloco_node.telemetry.node_state import MOST_NODES
from noloco_node.telemetry.swarm_metrics import rows_of
from noloco_node.telemetry.swarm_state import Middle, SwarmView, document
from noloco_node.transport.memory import MemoryTransport
from tests.memory_directory import MemoryDirectory
from tests.support import alongside, eventually
from tests.worlds import MICROBATCH, all_train, micro_spec, world

SPEC = micro_spec(steps=10_000)
LIFE = SPEC.limits.record_seconds
START = 1000.0


def record(name: str, stage: int = 0, at: float = START, **changes: object) -> LiveRecord:
    """A node's record as it published it at DHT time `at`."""
    given: dict[str, object] = {
        "state": PeerState.TRAINING,
        "sequence": int(at * 1000),
        "version": __version__,
    } | changes
    known = PeerRecord.model_validate(
        {"peer_id": f"a-peer-of-{name}", "stage": stage, "protocol": PROTOCOL_VERSION} | given
    )
    return LiveRecord(known, at + LIFE)


def seen(
    rows: Iterable[LiveRecord],
    earlier: SwarmView | None = None,
    now: float = START,
    silent: tuple[str, ...] = ("ghost",),
) -> SwarmView:
    """The swarm of these records; those with a `silent` name do not answer."""
    stages: tuple[dict[PeerId, LiveRecord], ...] = ({}, {})
    for row in rows:
        stages[row.record.stage][PeerId(row.record.peer_id)] = row
    answering = {peer for stage in stages for peer in stage if not any(name in peer for name in silent)}
    return view_swarm(SPEC, DirectoryView(stages), answering, earlier or nothing_seen(SPEC), now, now)


def test_nodes_are_counted_by_stage_and_state_and_claims_apart_from_answers() -> None:
    """A stage that only ghosts claim has nobody."""
    view = seen([record("a"), record("b", state=PeerState.JOINING), record("ghost", 1), record("c", state="finishing")])
    assert dict(view.stages[0].nodes) == {"joining": 1, "training": 1, "finishing": 1, "draining": 0}
    assert (view.stages[0].serving, view.stages[0].unreachable, view.stages[0].missing) == (2, 0, False)
    assert (view.stages[1].present, view.stages[1].unreachable, view.stages[1].missing) == (0, 1, True)
    assert (view.present, view.introduced, view.missing, view.joins) == (3, 4, (1,), 3)
    assert [(node.peer_id, node.answers) for node in view.nodes if node.stage == 1] == [("a-peer-of-ghost", False)]


def test_speed_and_lag_are_by_the_motion_of_clocks_and_one_liar_moves_neither() -> None:
    """Three at 500 tokens/s of the swarm, one of them 1,000 tokens behind, and one that claims the sky."""

    def published(at: float) -> list[LiveRecord]:
        clock = 10_000.0 + 500.0 * (at - START)
        honest = [record("a", 0, at, clock=clock), record("b", 0, at, clock=clock)]
        sky = record("liar", 0, at, clock=1e14 * at, tokens_per_second=1e12, capacity=1e12)
        return [*honest, record("c", 1, at, clock=clock - 1000.0, capacity=900.0), sky]

    first = seen(published(START))
    assert first.speed_from == "records", "nothing has moved yet, and the liar alone says anything"
    view = seen(published(START + LIFE / 3), first, now=START + LIFE / 3)
    later = START + LIFE / 2
    view = seen(published(START + LIFE / 3), view, now=later)
    assert (view.tokens_per_second, view.speed_from) == (500.0, "progress")
    assert view.clock == 10_000.0 + 500.0 * (later - START), "moved on from the records by their age"
    assert view.stages[1].lag == 1000.0
    assert view.stages[1].clock == view.clock - 1000.0
    assert view.stages[1].capacity == 900.0


def test_what_is_summed_is_bounded_by_the_median() -> None:
    """Nobody's word counts for more than eight median nodes, and a node that says nothing is no median."""
    assert believed([100.0, 0.0, 120.0, 400.0]) == 620.0
    assert believed([100.0, 100.0, 1e12]) == 1000.0
    assert believed([]) == 0.0


def test_a_word_that_no_json_can_say_takes_no_page_away() -> None:
    """The only node that says its speed says the least number there is: what is left then takes for ever."""
    view = seen([record("a", tokens_per_second=5e-324), record("b", 1)])
    assert (view.tokens_per_second, view.seconds_left) == (5e-324, None)
    assert json.loads(json.dumps(document(view), allow_nan=False))["seconds_left"] is None


def test_a_joiner_does_not_turn_the_swarms_clock_back_and_a_swarm_set_back_does() -> None:
    """One of two that train the first stage has just come, with the clock of its donor's last outer step."""
    view = seen([record("a", clock=143_000.0), record("b", 1, clock=143_000.0)])
    joiner = record("c", clock=109_668.0, newcomer=True)
    view = seen([record("a", clock=143_000.0), joiner, record("b", 1, clock=143_000.0)], view)
    assert view.clock == 143_000.0
    trained = record("c", 0, START + 1.0, clock=109_668.0)
    view = seen([record("a", 0, START + 1.0, clock=143_100.0), trained], view, now=START + 1.0)
    assert view.clock == 143_000.0, "nor does it once it counts, while the others are ahead"
    late = START + 2.0 * LIFE
    for _ in range(2):
        late += 2.0 * LIFE
        view = seen([record("a", 0, late, clock=50_000.0), record("c", 0, late, clock=50_000.0)], view, now=late)
    assert (view.clock, view.behind_since) == (50_000.0, None), "all of them went on from older weights"


def test_loss_and_spread_are_medians_over_those_that_train_and_one_liar_moves_neither() -> None:
    """The training loss of the last stage, the held-out one of the first; a newcomer and a ghost are not asked."""

    def shown(loss: float, spread: float, **more: float) -> dict[str, object]:
        return {"training_loss": loss, "replica_divergence": spread, **more}

    rows = [record(name, 1, shown=shown(2.0 + n / 8, 1e-5)) for n, name in enumerate("abc")]
    rows += [
        record("liar", 1, shown=shown(0.0, 1e12)),
        record("newcomer", 1, newcomer=True, shown=shown(9.0, 1e6)),
        record("ghost", 1, shown=shown(9.0, 1e6)),
        record("silent-of-losses", 1),
        record("origin", 0, shown=shown(7.0, 3e-5, validation_loss=2.5)),
    ]
    view = seen(rows)
    assert view.training_loss == Middle(2.0625, 4)
    assert view.validation_loss == Middle(2.5, 1)
    assert view.replica_divergence == Middle(1e-5, 5)
    assert [stage.replica_divergence for stage in view.stages] == [Middle(3e-5, 1), Middle(1e-5, 4)]
    ended = seen([], view, now=START + 10 * LIFE)
    assert (ended.training_loss, ended.replica_divergence) == (view.training_loss, view.replica_divergence), (
        "as they last were"
    )


def test_names_are_plain_and_short_and_stand_beside_what_was_seen_of_a_node() -> None:
    """That holds for one that has gone, too; back again, it goes on from there. A name that speaks to a terminal is
    refused."""
    rows = [record("a", shown={"name": "alice", "tokens": 512}), record("b", 1)]
    view = seen(rows)
    view = seen(rows, view, now=START + LIFE / 4)
    named = {node.peer_id: (node.name, node.tokens, node.seen_seconds) for node in view.nodes}
    assert named == {"a-peer-of-a": ("alice", 512, LIFE / 4), "a-peer-of-b": ("", 0, LIFE / 4)}
    view = seen(rows[1:], view, now=START + LIFE / 2)
    assert [(one.name, one.tokens, one.seen_seconds, one.until) for one in view.departed] == [
        ("alice", 512, LIFE / 4, START + LIFE / 2)
    ]
    view = seen(rows, view, now=START + 3 * LIFE / 4)
    assert (view.departed, view.nodes[0].seen_seconds) == ((), LIFE / 2)
    for bad in ("a\x1b[2J", "a\nb", "\u202eb", "\u0430lice", "x" * 33):
        with pytest.raises(ValidationError):
            record("a", shown={"name": bad})
        with pytest.raises(ValidationError):
            NodeSettings(name=bad)
    crowd = [record(f"n{n:03}") for n in range(MOST_NODES + 20)]
    full = seen([], seen(crowd, seen(crowd), now=START + LIFE / 4), now=START + LIFE / 2)
    assert len(full.departed) == MOST_NODES


def test_four_hundred_ghosts_add_nothing_to_what_is_counted_and_little_to_what_is_shown() -> None:
    """Each under a version of its own; also where they all answer, names and rows stay bounded."""
    honest = [record("a", version="1.2.3"), record("b", 1, version="1.2.3")]
    alone = seen(honest)
    ghosts = [record(f"ghost-{n:03}", n % 2, version=f"v{n}", clock=1e18, capacity=1e12) for n in range(400)]
    beside, answering = seen([*honest, *ghosts]), seen([*honest, *ghosts], silent=())
    figures = ("clock", "tokens_per_second", "versions", "present", "joins")
    assert [getattr(alone, name) for name in figures] == [getattr(beside, name) for name in figures]
    assert beside.stages[0].capacity == alone.stages[0].capacity
    assert sum(stage.unreachable for stage in beside.stages) == 400
    for view in (beside, answering):
        assert len(view.nodes) == MOST_NODES
        assert {"a-peer-of-a", "a-peer-of-b"} <= {node.peer_id for node in view.nodes} or view is answering
        rows = rows_of(view)
        assert rows.keys() < SEED_TABLE.keys()
        shape = {name: {labels for labels, _ in each} for name, each in rows_of(alone).items()}
        bare = {name for name in rows if name != "noloco_swarm_version_nodes"}
        assert {name: {labels for labels, _ in rows[name]} for name in bare} == {name: shape[name] for name in bare}
        assert len(rows["noloco_swarm_version_nodes"]) <= SHOWN + 1
        assert len(json.dumps(document(view), allow_nan=False)) < 400 * MOST_NODES
    assert sum(answering.versions.values()) == 402
    again = seen([record("a", version="9.9"), *honest[1:]], answering)
    assert again.named_versions == answering.named_versions, "a name that is full takes no new one"
    assert again.versions["other"] >= 1


def test_comings_goings_and_moves_are_counted_once() -> None:
    """They are counted with a farewell or without; a peer that was only a record never came."""
    rows = {name: record(name, stage) for name, stage in (("a", 0), ("b", 1), ("c", 1), ("d", 0), ("ghost", 0))}
    view = seen(rows.values())
    for _ in range(3):
        view = seen(rows.values(), view)
    assert (view.joins, view.left, view.lost, view.reassignments) == (4, 0, 0, 0)
    silent = seen(rows.values(), view, silent=("ghost", "a-peer-of-d"))
    assert (silent.lost, silent.stages[0].unreachable) == (0, 2), "its record lives: it may answer again"
    assert seen(rows.values(), silent).joins == 4
    gone = record("a", 0, START + 1.0, state=PeerState.GONE)
    moved = [record("b", 1, START + 1.0, state=PeerState.GONE), record("b", 0, START + 2.0)]
    view = seen([gone, *moved, rows["d"]], silent)
    assert (view.joins, view.left, view.lost, view.reassignments) == (4, 1, 1, 1)
    assert [(one.what, one.peer_id, one.stage) for one in view.happenings] == [
        ("reassigned", "a-peer-of-b", 0),
        ("left", "a-peer-of-a", 0),
        ("lost", "a-peer-of-c", 1),
    ]
    assert seen([gone, *moved, rows["d"]], view).happenings == view.happenings


def test_a_run_that_is_over_misses_no_stage() -> None:
    """Half of the first stage's nodes say so, those that left included; while one trains, it is asked anew."""
    ending = [record("a", finished=True, state="finishing", clock=9e9), record("b", 1)]
    view = seen([*ending, record("ghost", 0, finished=True)])
    assert view.over
    farewell = [record("a", 0, START + 1.0, state="gone", finished=True, clock=9e9)]
    view = seen(farewell, view)
    assert (view.over, view.missing, view.present, view.left, view.lost) == (True, (), 0, 1, 1)
    empty = seen([], view, now=START + 10 * LIFE)
    assert (empty.over, empty.missing, empty.clock) == (True, (), view.clock)
    again = seen([record("c"), record("d", 1)], empty)
    assert not again.over
    assert not seen([record("a"), record("ghost", 0, finished=True), record("b", 1)]).over


def test_a_run_whose_nodes_are_all_paused_stands_where_they_left_it() -> None:
    """For who looks for the first time, and for who has seen it further; a ghost's word is none."""
    rows = [record(name, n, state="draining", clock=7e5 + n, shown={"paused": True}) for n, name in enumerate("ab")]
    first = seen([*rows, record("ghost", 0, clock=9e9, state="draining", shown={"paused": True})])
    assert (first.clock, first.missing) == (7e5 + 0.5, (0, 1))
    assert seen(rows, seen([record("a", clock=8e5)])).clock == 8e5


async def test_who_looks_on_sees_a_swarm_that_trains_and_nobody_counts_it() -> None:
    """It publishes nothing, says hello only, and its view is that of the replicas themselves."""
    spec = micro_spec(limits=LimitsSpec(record_seconds=60, chunk_bytes=4096))
    async with world(spec, replicas=2) as made:
        await all_train(made)
        origin = made.replicas[0].pipeline.origin
        assert origin is not None
        for _ in range(4):
            assert await origin.train_one()
        for replica in made.replicas:
            await replica.membership.announce(PeerState.TRAINING)
        before = [dict(rows) for rows in made.hub.rows]
        eye = MemoryTransport(made.network, PeerId("who-only-looks-on"))
        onlooker = Onlooker(eye, MemoryDirectory(made.hub), spec)
        try:
            view = await onlooker.first_look(5.0)
            async with alongside(onlooker.run()):
                await eventually(lambda: onlooker.last is not view, what="it goes on looking")
        finally:
            await eye.close()
        assert [dict(rows) for rows in made.hub.rows] == before
        for replica in made.replicas:
            await replica.membership.refresh()
            assert replica.membership.nodes_per_stage() == [2, 2]
            assert replica.context.transport.peer_stats.of(eye.peer_id).stage is None
    assert [dict(stage.nodes)["training"] for stage in view.stages] == [2, 2]
    assert view.versions[__version__] == 4
    assert max(node.clock for node in view.nodes) >= 4 * MICROBATCH
    assert view.happenings == ()
    assert view.training_loss is not None
    assert sum(node.tokens for node in view.nodes if node.stage == 0) == 4 * MICROBATCH


async def test_of_an_invited_run_outsiders_are_not_shown() -> None:
    """They are not asked either; an onlooker needs no invitation itself."""
    rule = AccessSpec(mode="listed", peers=("a-peer-of-a-member",), owner=None)
    spec = SPEC.model_copy(update={"access": rule})
    async with world(SPEC) as made:
        hub = MemoryDirectory(made.hub)
        for name in ("a-member", "an-outsider"):
            await hub.publish(record(name).record, LIFE)
        eye = MemoryTransport(made.network, PeerId("who-only-looks-on"))
        try:
            view = await Onlooker(eye, hub, spec).first_look(0.0)
            assert eye.peer_stats.of(PeerId("a-peer-of-an-outsider")) is NOBODY
        finally:
            await eye.close()
    assert [node.peer_id for node in view.nodes] == ["a-peer-of-a-member"]


def test_a_clock_that_is_set_back_takes_nothing_from_what_was_seen_of_a_node() -> None:
    """By an hour: each node had worked an hour less, for as long as the seed lived."""
    rows = [record("a")]
    view = seen(rows, seen(rows), now=START + LIFE / 4)
    view = seen(rows, view, now=START + LIFE / 4 - 3600.0)
    assert [node.seen_seconds for node in view.nodes] == [LIFE / 4]
