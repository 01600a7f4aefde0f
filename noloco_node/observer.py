"""A whole swarm from outside, without taking part in it. An onlooker reads the directory and asks the peers that it
shows. The view is what their records claim, as far as those behind them answer: pure, look by look."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

from noloco_node import __version__, ambient
from noloco_node.config.run_spec import RunSpec
from noloco_node.directory.health_checks import HealthChecks
from noloco_node.directory.live_estimate import is_there
from noloco_node.directory.records import (
    FIRST_LOOK_SECONDS,
    REFRESH_SECONDS,
    Directory,
    DirectoryView,
    LiveRecord,
    PeerRecord,
    PeerState,
    look_for_others,
)
from noloco_node.directory.summary import believed, node_seen
from noloco_node.identity.peer_id import PeerId
from noloco_node.tallies import RECENT
from noloco_node.telemetry.node_state import MOST_NODES, NodeSeen
from noloco_node.telemetry.swarm_state import (
    OTHER_VERSIONS,
    SERVING,
    STATES,
    Departed,
    Followed,
    Happening,
    Middle,
    NodeChange,
    StageSeen,
    SwarmView,
    version_labels,
)
from noloco_node.transport.interface import Transport
from noloco_node.trust.admission import Access
from noloco_node.trust.screened_directory import ScreenedDirectory

FAREWELLS = ("finishing", "draining", "paused")

_Said = Literal["training_loss", "validation_loss", "replica_divergence"]
"""A figure that a node's record shows."""


@dataclass(frozen=True, slots=True)
class _Claim:
    """The newest live record of one peer, and what it is worth."""

    record: PeerRecord
    published: float
    """DHT time."""
    answers: bool

    @property
    def trains(self) -> bool:
        return self.answers and self.record.state is PeerState.TRAINING

    @property
    def settled(self) -> bool:
        """It trains, and others average with it."""
        return self.trains and not self.record.newcomer

    @property
    def serves(self) -> bool:
        return self.answers and self.record.state.value in SERVING


def nothing_seen(spec: RunSpec, *, over: bool = False) -> SwarmView:
    """What is known of a run's swarm before the first look. That it is `over`, by somebody's word, holds until a node
    of the first stage trains."""
    return SwarmView(
        time=0.0,
        run_id=spec.run_id,
        run_name=spec.name,
        target=spec.inner.target_tokens,
        stages=tuple(_stage({}, {}, stage, 0.0, over=over) for stage in range(spec.stages)),
        named_versions=(__version__,),
        over=over,
    )


def view_swarm(
    spec: RunSpec, directory: DirectoryView, answering: Collection[str], earlier: SwarmView, now: float, time: float
) -> SwarmView:
    """The swarm at DHT time `now`, which is wall time `time`, after it was seen as `earlier`.

    `answering` are the peers that have said over their own links that they serve what their records say. A record is
    its owner's claim: medians bear a minority of false ones, and what is summed is bounded by a multiple of the median.
    A peer that answers under many keys is that many nodes here: an onlooker has seen nobody's work.
    """
    life, target, before = spec.limits.record_seconds, spec.inner.target_tokens, earlier.followed
    records = newest_records(directory, now)
    claims = {
        peer: _Claim(row.record, min(now, row.expires - life), peer in answering)
        for peer, row in records.items()
        if row.record.state is not PeerState.GONE
    }
    passed = min(life, max(0.0, now - earlier.looked)) if earlier.time else 0.0  # the clock may be set back
    gone = {one.peer_id: one for one in earlier.departed}
    followed = {peer: _followed(before.get(peer), claim, gone.get(peer), passed) for peer, claim in claims.items()}
    speed, speed_from = _speed(claims, followed)
    clocks = {peer: _present_clock(claim, now, life, speed or 0.0, target) for peer, claim in claims.items()}
    clock, behind_since = _clock(claims, clocks, earlier, now, life)
    over = _is_over(target, claims, records, before, was=earlier.over)
    happened = [Happening(time, *change) for change in _changes(before, followed, records)]
    seen = Counter(one.what for one in happened)
    counted = Counter(claim.record.version for claim in claims.values() if claim.answers)
    labels = version_labels(earlier.named_versions, counted)
    return replace(
        earlier,
        time=time,
        stages=tuple(
            _stage(claims, clocks, stage, clock, over=over, each=directory.scale(stage).each)
            for stage in range(spec.stages)
        ),
        nodes=_nodes(claims, clocks, clock, followed),
        introduced=len(claims),
        looked=now,
        clock=clock,
        behind_since=behind_since,
        training_loss=_middle(claims, "training_loss", spec.stages - 1) or earlier.training_loss,
        validation_loss=_middle(claims, "validation_loss", 0) or earlier.validation_loss,
        replica_divergence=_middle(claims, "replica_divergence") or earlier.replica_divergence,
        tokens_per_second=speed,
        speed_from=speed_from,
        versions=_versions(counted, labels),
        named_versions=labels,
        joins=earlier.joins + seen["joined"],
        left=earlier.left + seen["left"],
        lost=earlier.lost + seen["lost"],
        reassignments=earlier.reassignments + seen["reassigned"],
        happenings=(*earlier.happenings, *(happened if earlier.time else ()))[-RECENT:],
        over=over,
        departed=_departed(earlier, followed, time),
        followed=followed,
    )


def newest_records(directory: DirectoryView, now: float) -> dict[str, LiveRecord]:
    """Each peer's last word that lives at DHT time `now`, farewells included: a peer that moves has records at two
    stages."""
    newest: dict[str, LiveRecord] = {}
    for rows in directory.stages:
        for peer, row in rows.items():
            if row.expires > now and (peer not in newest or row.record.sequence > newest[peer].record.sequence):
                newest[peer] = row
    return newest


def _clock(
    claims: Mapping[str, _Claim], clocks: Mapping[str, float], earlier: SwarmView, now: float, life: float
) -> tuple[float, float | None]:
    """The swarm's clock, and since when those that train are behind it. A joiner, and a record that comes late, do not
    turn it back. A swarm that goes on from older weights does, once all older records have died."""
    origins = [peer for peer, claim in claims.items() if claim.record.stage == 0 and claim.trains]
    settled = [peer for peer in origins if claims[peer].settled]
    timekeepers = settled or origins or [peer for peer, claim in claims.items() if claim.serves]
    if not timekeepers:
        resting = [claim.record.clock for claim in claims.values() if claim.answers and claim.record.shown.paused]
        return max(earlier.clock, median(resting or [0.0])), None
    middle = median(clocks[peer] for peer in timekeepers)
    since = now if earlier.behind_since is None else earlier.behind_since
    if middle >= earlier.clock or now - since >= life:
        return middle, None
    return earlier.clock, since


def _middle(claims: Mapping[str, _Claim], said: _Said, stage: int | None = None) -> Middle | None:
    """The median of what those say that train at `stage`, or anywhere; newcomers only where nobody else trains."""
    here = [claim for claim in claims.values() if claim.trains and stage in (None, claim.record.stage)]
    speakers = [claim for claim in here if claim.settled] or here
    return Middle.of(getattr(claim.record.shown, said) for claim in speakers)


def _followed(before: Followed | None, claim: _Claim, departed: Departed | None, passed: float) -> Followed:
    """`passed`: seconds since the last look."""
    record, points = claim.record, () if before is None else before.points
    same = before is not None and (before.stage, before.state) == (record.stage, record.shown_state)
    if not same or (points and record.clock < points[-1][1]):
        points = ()
    if not points or claim.published > points[-1][0]:
        points = (*points, (claim.published, record.clock))
    counted = claim.answers or (before is not None and before.counted)
    known = before or departed
    seen_seconds = (known.seen_seconds if known else 0.0) + (passed if claim.trains else 0.0)
    shown = record.shown
    return Followed(
        record.stage,
        record.shown_state,
        record.finished,
        counted,
        points[-RECENT:],
        shown.name,
        shown.tokens,
        seen_seconds,
    )


def _departed(earlier: SwarmView, followed: Mapping[str, Followed], time: float) -> tuple[Departed, ...]:
    """Those that were seen at work and have gone, with those that have gone since the last look."""
    new = [
        Departed(peer, was.stage, was.name, was.tokens, was.seen_seconds, time)
        for peer, was in earlier.followed.items()
        if was.counted and was.seen_seconds > 0.0 and peer not in followed
    ]
    still = [one for one in earlier.departed if one.peer_id not in followed]
    kept = sorted((*new, *still), key=lambda one: -one.seen_seconds)[:MOST_NODES]
    return tuple(sorted(kept, key=lambda one: -one.until))


def _speed(
    claims: Mapping[str, _Claim], followed: Mapping[str, Followed]
) -> tuple[float | None, Literal["progress", "records"] | None]:
    """Swarm tokens/s by the clocks of those that train, or else by the word of the first stage's."""
    origins = [peer for peer, claim in claims.items() if claim.record.stage == 0 and claim.trains]
    training = origins or [peer for peer, claim in claims.items() if claim.trains]
    measured = [speed for peer in training if (speed := _slope(followed[peer].points)) is not None]
    if measured and 2 * len(measured) >= len(training):
        return median(measured), "progress"
    said = believed(claims[peer].record.tokens_per_second for peer in origins)
    return (said, "records") if said else (None, None)


def _slope(points: Sequence[tuple[float, float]]) -> float | None:
    if len(points) < 2 or points[-1][0] <= points[0][0]:
        return None
    return (points[-1][1] - points[0][1]) / (points[-1][0] - points[0][0])


def _present_clock(claim: _Claim, now: float, life: float, speed: float, target: float) -> float:
    said = claim.record.clock
    if not claim.trains:
        return said
    return min(said + min(max(0.0, now - claim.published), life) * speed, max(said, target))


def _is_over(
    target: float,
    claims: Mapping[str, _Claim],
    records: Mapping[str, LiveRecord],
    before: Mapping[str, Followed],
    *,
    was: bool,
) -> bool:
    """Tell whether the run is over: half of the first stage's nodes say that they have trained to the end. Those that
    have just left are included. While one of them trains it is said anew at each look."""
    origins = [claim for claim in claims.values() if claim.record.stage == 0]
    voices = [claim.record.finished for claim in origins if claim.answers]
    for peer, row in records.items():
        left = row.record.state is PeerState.GONE and row.record.stage == 0
        if left and peer in before and before[peer].counted:
            voices.append(row.record.finished)
    trained = [claim.record.clock for claim in origins if claim.trains]
    ends = (bool(voices) and 2 * sum(voices) >= len(voices)) or (bool(trained) and median(trained) >= target)
    return ends or (was and not trained)


def _changes(
    before: Mapping[str, Followed], followed: Mapping[str, Followed], records: Mapping[str, LiveRecord]
) -> Iterator[tuple[NodeChange, str, int, str]]:
    """The nodes that came, moved and went since the last look."""
    for peer, seen in followed.items():
        was = before.get(peer)
        if seen.counted and not (was and was.counted):
            yield "joined", peer, seen.stage, seen.name
        elif was and was.counted and was.stage != seen.stage:
            yield "reassigned", peer, seen.stage, seen.name
    for peer, was in before.items():
        if was.counted and peer not in followed:
            yield ("left" if peer in records or was.state in FAREWELLS else "lost"), peer, was.stage, was.name


def _stage(
    claims: Mapping[str, _Claim],
    clocks: Mapping[str, float],
    stage: int,
    swarm: float,
    *,
    over: bool,
    each: float = 1.0,
) -> StageSeen:
    """One stage as seen. In a large one the seen nodes stand for others, so many `each`."""
    here = {peer: claim for peer, claim in claims.items() if claim.record.stage == stage}
    states = Counter(claim.record.state.value for claim in here.values() if claim.answers)
    serving = [clocks[peer] for peer, claim in here.items() if claim.serves]
    training = [clocks[peer] for peer, claim in here.items() if claim.trains]
    return StageSeen(
        nodes={state: round(states[state] * each) for state in STATES},
        unreachable=round(sum(not claim.answers for claim in here.values()) * each),
        capacity=each * believed(claim.record.capacity for claim in here.values() if claim.serves),
        clock=median(serving) if serving else None,
        lag=max(0.0, swarm - min(training)) if training else None,
        missing=not serving and not over,
        replica_divergence=_middle(claims, "replica_divergence", stage),
    )


def _versions(counted: Mapping[str, int], labels: Sequence[str]) -> dict[str, int]:
    named = {version: counted.get(version, 0) for version in labels}
    return named | {OTHER_VERSIONS: sum(count for version, count in counted.items() if version not in named)}


def _nodes(
    claims: Mapping[str, _Claim], clocks: Mapping[str, float], swarm: float, followed: Mapping[str, Followed]
) -> tuple[NodeSeen, ...]:
    shown = sorted(claims, key=lambda peer: (not claims[peer].answers, peer))[:MOST_NODES]
    by_place = sorted(shown, key=lambda peer: (claims[peer].record.stage, peer))
    return tuple(
        node_seen(claims[peer].record, clock=clocks[peer], against=swarm, answers=claims[peer].answers).model_copy(
            update={"seen_seconds": followed[peer].seen_seconds}
        )
        for peer in by_place
    )


class Onlooker:
    """An onlooker. It does not show peers that cannot take part: outsiders of an invited run, nodes of another protocol
    version.

    `over`: the run has come to its end, as far as is known before the first look.
    """

    def __init__(self, transport: Transport, directory: Directory, spec: RunSpec, *, over: bool = False) -> None:
        self._transport = transport
        self._directory = ScreenedDirectory(directory, Access(spec))
        self._spec = spec
        self._roll = HealthChecks(
            transport,
            self._directory,
            spec.run_id,
            lambda: None,
            spec.limits.record_seconds,
            self._introduced,
            lambda: None,
            ambient.chance(),
            # Four times those of a node, which knows its neighbours by work as well. It asks 960 nodes within the time
            # that an answer counts. Of a larger swarm those that were asked of late are counted, and the others are
            # unreachable.
            calls_a_second=16.0,
        )
        self.last = nothing_seen(spec, over=over)
        """What was seen last. It is replaced as a whole: any thread may read it."""

    async def first_look(self, seconds: float) -> SwarmView:
        """Look until a node is seen, `seconds` at most, and ask everybody once whether it is there."""
        await look_for_others(self._directory, self._transport.peer_id, seconds)
        await self._roll.sweep(FIRST_LOOK_SECONDS)
        return self._see()

    async def run(self, on_look: Callable[[SwarmView], None] = lambda _: None) -> None:
        """Look every two seconds, or oftener where records live short, until cancelled."""
        pause = min(REFRESH_SECONDS, self._spec.limits.record_seconds / 5)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._roll.run())
            while True:
                await self._directory.refresh()
                self._roll.look()
                on_look(self._see())
                await asyncio.sleep(pause)

    def _see(self) -> SwarmView:
        known, now = self._transport.peer_stats, self._directory.now()
        answering = {record.peer_id for record in self._introduced() if is_there(known, record)}
        self.last = view_swarm(self._spec, self._directory.view, answering, self.last, now, ambient.wall())
        return self.last

    def _introduced(self) -> list[PeerRecord]:
        now, own = self._directory.now(), self._transport.peer_id
        view = self._directory.view
        records = [record for stage in range(len(view.stages)) for record in view.live(stage, now)]
        return [record for record in records if PeerId(record.peer_id) != own]
