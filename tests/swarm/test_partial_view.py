"""What a swarm does where each node sees two buckets of a stage: pairs, routes, guards and the run's end."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from functools import lru_cache
from typing import cast

import pytest

from noloco_node.averaging.matchmaking import Dial, PairingState, Window, decide
from noloco_node.directory.buckets import RENEWED_SECONDS, bucket_of, prefix_of
from noloco_node.directory.clocks import DrawnBy, OriginsSeen
from noloco_node.directory.membership import Membership, OwnFigures
from noloco_node.directory.records import DirectoryView, LiveRecord, PeerState, Scale
from noloco_node.directory.signed_end import SignedEnd
from noloco_node.identity.peer_id import PeerId
from noloco_node.peers.scorecard import PeerStats
from noloco_node.pipeline.routing import LoadBalancer
from noloco_node.placement.run_end import EndOfRun, RunVerdict, verdict
from noloco_node.simulator.loop import in_virtual_time
from noloco_node.state_transfer.backups import standby_rank, standby_stage
from noloco_node.transport.memory import MemoryNetwork, MemoryTransport
from tests.inside import directory_of
from tests.memory_directory import MemoryDirectory, MemoryDirectoryHub
from tests.swarm.test_sampled_view import LIFE, LOOK, Keys, Observer
from tests.swarm.worlds import AllAnswer
from tests.worlds import micro_spec, record_of

MANY, LEVEL, HELD = 600, 3, 2


def names(stage: int, many: int = MANY, of: str = "") -> list[PeerId]:
    """So many ids, of one stage of many that `of` tells apart."""
    return [PeerId(f"peer-{stage}-{of}{i:07d}") for i in range(many)]


def by_bucket(peers: list[PeerId]) -> dict[int, list[PeerId]]:
    """Those of each bucket."""
    found: dict[int, list[PeerId]] = {bucket: [] for bucket in range(1 << LEVEL)}
    for peer in peers:
        found[bucket_of(prefix_of(peer), LEVEL)].append(peer)
    return found


class Shown(MemoryDirectory):
    """Shows what it is told to show."""

    shown = DirectoryView(())

    @property
    def view(self) -> DirectoryView:
        """See `MemoryDirectory.view`."""
        return self.shown


@lru_cache(maxsize=4096)
def row_of(peer: PeerId, stage: int, state: PeerState, clock: float, finished: bool) -> LiveRecord:
    """It lives for ever."""
    said = record_of(peer, stage, state, clock=clock, finished=finished)
    return LiveRecord(said, 1e12)


def view_of(
    stages: list[list[PeerId]],
    sizes: list[int],
    *,
    clock: float = 0.0,
    state: PeerState = PeerState.TRAINING,
    finished: bool = False,
) -> DirectoryView:
    """A view with these peers of each stage, which stand for all."""
    rows = tuple(
        {peer: row_of(peer, stage, state, clock, finished) for peer in peers} for stage, peers in enumerate(stages)
    )
    scales = (Scale(max(1.0, size / max(1, len(peers))), False) for peers, size in zip(stages, sizes, strict=True))
    return DirectoryView(rows, tuple(scales))


def membership_of(own: PeerId, stage: int, view: DirectoryView, known: PeerStats) -> Membership:
    """The membership of one node."""
    directory = Shown(MemoryDirectoryHub(len(view.stages), lambda: 1000.0))
    directory.shown = view
    return Membership(
        directory,
        known,
        own,
        stage,
        len(view.stages),
        LIFE,
        lambda: OwnFigures(clock=0.0, tokens_per_second=1.0, outer_rounds=0),
        lambda: None,
    )


def test_every_pair_of_replicas_is_as_likely_to_meet_as_any_other() -> None:
    """That holds whatever buckets the two lie in: chi-square of the dials, bucket by bucket, against uniform."""
    keys, rng, met = Keys(640), random.Random(1), Counter[tuple[int, int]]()
    replicas = [PeerId(f"peer-0-{i:06}") for i in range(640)]
    sizes = Counter(bucket_of(prefix_of(peer), 3) for peer in replicas)
    for own in rng.sample(replicas, 120):
        observer = Observer(keys, stages=1, seed=rng.getrandbits(30), serves=False)
        observer.sampled.to_write(own, 0, LIFE)
        observer.look(20)
        for _ in range(2):
            observer.look(int(RENEWED_SECONDS / LOOK))
            seen = [peer for peer in observer.peers() if peer != own]
            state = PairingState(9, 9, lambda seen=seen: seen, engaged=False, next_try=0.0)
            for _ in range(3):
                decision = decide(state, Window(inner_steps=8, min_inner_steps=4), now=1.0, rng=rng)
                assert isinstance(decision, Dial)
                met[bucket_of(prefix_of(own), 3), bucket_of(prefix_of(decision.partner), 3)] += 1
    by_own = Counter[int]()
    for (a, _), times in met.items():
        by_own[a] += times
    expected = {(a, b): by_own[a] * sizes[b] / 640 for a in range(8) for b in range(8)}
    chi = sum((met[pair] - e) ** 2 / e for pair, e in expected.items())
    # three draws of one view of two buckets go together, so that their scatter is up to three times that of chance
    assert chi / 56 < 3.5


def test_routes_reach_every_next_stage_peer_in_the_long_run() -> None:
    """There are 300 in four buckets, of which a node sees two. All are reached within an hour, each by the balancer
    that chooses."""
    keys = Keys(10, 300)
    observer, reached = Observer(keys, seed=5), set[PeerId]()
    balancer = LoadBalancer("uniform", random.Random(2), lambda: observer.now)
    for _ in range(30):
        view = observer.look(int(RENEWED_SECONDS / LOOK))
        assert 0 < len(view.stages[1]) < 300
        balancer.update(sorted(view.stages[1]), 0)
        chosen = {balancer.choose() for _ in range(1500)}
        assert chosen <= set(view.stages[1])
        reached |= {peer for peer in chosen if peer is not None}
    assert reached == {PeerId(f"peer-1-{i:06}") for i in range(300)}


def test_fixed_routing_stays_with_one_while_it_is_seen_and_crowds_nobody() -> None:
    """By a place among those that it sees: of 600 nodes in front of 600 each has its peer, and none has many."""
    rng, own_stage, next_stage = random.Random(4), by_bucket(names(0)), by_bucket(names(1))
    asked = Counter[PeerId]()
    for own in names(0)[::6]:
        seen = [[p for b in rng.sample(range(8), HELD) for p in stage[b]] for stage in (own_stage, next_stage)]
        members = membership_of(own, 0, view_of(seen, [MANY, MANY]), AllAnswer())
        assert 0 <= members.own_rank() < MANY
        balancer = LoadBalancer("fixed", random.Random(1), lambda: 0.0)
        balancer.update(members.next_stage_peers(), members.own_rank())
        chosen = {balancer.choose() for _ in range(4)}
        assert len(chosen) == 1
        asked.update(peer for peer in chosen if peer is not None)
    assert max(asked.values()) <= 4


@pytest.mark.parametrize("copies", [1, 2])
def test_a_stage_seen_in_part_has_its_guards_nearly_always_and_few_too_many(copies: int) -> None:
    """Each node takes its place among those that it sees: no two need agree, and yet somebody keeps the copy."""
    rng, without, kept = random.Random(7), 0, list[int]()
    for of in range(15):
        guards = Counter[int | None]()
        everybody = names(0, of=f"{of}-")
        stage = by_bucket(everybody)
        for own in sorted(everybody)[:90]:  # a node behind these never takes itself for a guard
            seen = [p for b in rng.sample(range(8), HELD) for p in stage[b]]
            size = round(MANY * rng.gauss(1.0, 0.1))
            members = membership_of(own, 0, view_of([seen, [], []], [size, 0, 0]), AllAnswer())
            guards[standby_stage(0, standby_rank(members), 3, copies)] += 1
        held = [guards[1 + copy] for copy in range(copies)]
        without += sum(not each for each in held)
        kept += held
    assert without == 0
    assert sum(kept) / len(kept) < 20.0


def test_a_stage_of_which_nobody_was_asked_yet_is_served_and_is_counted_by_those_that_were() -> None:
    """A further one, of which another bucket is seen every dozen of seconds: no microbatch is held back for that. One
    whose records have ended is unserved, and so is one where all that were asked are silent."""
    far = names(2, 75)
    known = PeerStats(lambda: 1000.0)
    members = membership_of(PeerId("watcher-wwww"), 0, view_of([[], names(1, 3), far], [0, 3, MANY]), known)
    for peer in names(1, 3):
        known.said(peer, 1)
        known.answered(peer)
    assert members.unserved() == []
    for peer in far[:9]:
        known.said(peer, 2)
        known.answered(peer)
    assert members.replicas_per_stage() == [1, 3, MANY]
    for peer in far:
        for _ in range(3):
            known.silent(peer)
    assert members.unserved() == [2]
    gone = membership_of(PeerId("watcher-wwww"), 0, view_of([[], names(1, 3), []], [0, 3, 0]), known)
    assert gone.unserved() == [2]


def test_who_was_not_asked_yet_in_a_stage_seen_in_part_counts_as_the_others_do() -> None:
    """Otherwise half of a view would count nothing for seconds every other minute, when another bucket takes a place.
    What is new counts as it turns out, as soon as it was asked."""
    old, new = names(0, 75), names(0, 75, "new-")
    known = PeerStats(lambda: 1000.0)
    for peer in old:
        known.said(peer, 0)
        known.answered(peer)

    def counted(peers: list[PeerId]) -> float:
        members = membership_of(PeerId("watcher-wwww"), 0, view_of([peers], [MANY]), known)
        return members.live_replicas() / MANY

    assert counted(old) == pytest.approx(1.0, abs=0.01)
    assert counted([*old, *new]) == pytest.approx(1.0, abs=0.01)
    for peer in new[:50]:
        known.silent(peer)
    assert 0.4 < counted([*old, *new]) < 0.61


def test_the_runs_end_is_known_where_few_of_the_origins_are_seen() -> None:
    """A replica of a further stage sees another 75 of 600 origins every dozen of seconds, and has trained for 40. While
    those that it has met train the run goes on; it is over a grace after they have come to the end, and at no time
    before."""
    now, rng, origins = [1000.0], random.Random(3), by_bucket(names(0))
    met, known, seen = rng.sample(names(0), 40), PeerStats(lambda: now[0]), OriginsSeen(lambda: now[0])
    members = membership_of(PeerId("watcher-wwww"), 2, view_of([[], [], []], [0, 0, 0]), known)
    directory = directory_of(members)
    assert isinstance(directory, Shown)
    trained, transport = [1000.0], MemoryTransport(MemoryNetwork(), PeerId("watcher-wwww"))
    end = EndOfRun(
        PeerId("watcher-wwww"),
        members,
        known,
        seen,
        SignedEnd(transport, directory, micro_spec(stages=3)),
        clock=lambda: 980.0,
        last_trained=lambda: trained[0],
        held_up=lambda: False,
        target=1000.0,
        max_lag=20.0,
        grace=20.0,
        now=lambda: now[0],
    )

    def look(seconds: int, *, finished: bool = False, state: PeerState = PeerState.TRAINING) -> list[RunVerdict]:
        found: list[RunVerdict] = []
        for _ in range(seconds // 2):
            now[0] += 2.0
            if now[0] % 12 < 2:
                bucket = origins[rng.randrange(8)]
                directory.shown = view_of([bucket, [], []], [MANY, 0, 0], clock=990.0, state=state, finished=finished)
            found.append(verdict(end.look()))
        return found

    for peer in met:
        known.worked(peer)
        seen.saw(DrawnBy(peer, 990.0), peer, tokens=10, own_clock=980.0)
    directory.shown = view_of([origins[0], [], []], [MANY, 0, 0], clock=990.0)
    while now[0] < 1120.0:
        trained[0] = now[0]
        assert look(4) == [RunVerdict.GOES_ON] * 2
    found = look(120, finished=True, state=PeerState.FINISHING)
    first = found.index(RunVerdict.OVER)
    assert 14.0 <= 2.0 * first <= 20.0 + 60.0, "it had trained last some seconds before"


def test_a_stage_that_shrinks_until_it_is_seen_whole_is_counted_whole() -> None:
    """Of 110 a node has seen 60 for two lives of a record, and has worked with five."""

    async def counted() -> list[int]:
        peers, known = names(0, 111), AllAnswer()
        own, *others = peers
        membership = membership_of(own, 0, view_of([others[:60]], [110]), known)
        found = list[int]()
        for seconds, seen in ((2 * LIFE, others[:60]), (0.0, others[:60]), (0.0, others)):
            shown = cast("Shown", directory_of(membership))
            shown.shown = view_of([seen], [110])
            await membership.refresh()
            for peer in others[:5]:
                known.worked(peer)
            found.append(membership.live_replicas())
            await asyncio.sleep(seconds)
        return found

    assert in_virtual_time(counted) == [111, 111, 111]
