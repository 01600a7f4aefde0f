"""What must hold after every simulated run, whatever befell it: pure functions of what the nodes told and left behind.

Each gives what is against it, for a person; nothing where it holds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from noloco_node.averaging.side import Phase
from noloco_node.node.replica import Replica
from noloco_node.placement.run_end import HELD_UP_GRACES, IDLE_GRACES, NEAR_BY_CLOCK
from noloco_node.simulator.outer_ledger import OuterEntry, strays
from noloco_node.telemetry.events import Account, AnyEvent, InnerStep, OuterStep
from noloco_node.training.progress import FREE_LAG, PACE_A_LAG, SLOWEST_PACE

OUTSIDE_SECONDS = 60.0
"""The seconds for which the peers that a joiner names may be frozen, dead or cut off, one after the other. A joiner
that is kept out for longer is cut off by something that no fault has told."""
KEPT_OUT = "node.initial_peers: none of"
"""The error of a node that gives up for that reason says this (`identity.addresses`)."""


@dataclass(frozen=True, slots=True)
class Told:
    """What is known of one node after a run."""

    number: int
    stage: int
    peer: str
    condition: str
    """How it ended (`node.Condition`)."""
    error: str
    account: Account | None
    events: Sequence[AnyEvent]
    clock: float
    late: bool = False
    """It came to its stage when the run was under way: the end may come before it has gone all of the way."""
    slept: bool = False
    """It stood still for longer than records live. The others may have come to the end meanwhile, and it cannot go on
    alone."""
    cut_off: bool = False
    """A partition lay between it and others for as long."""
    left_open: tuple[str, ...] = ()
    """What it had open as it left."""
    outside: float = 0.0
    """Seconds for which nobody let it in."""
    ended_at: float = math.inf
    """When it ended by itself; seconds."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run after its end."""

    target: float
    batch: float
    """Tokens of an inner step of the swarm."""
    round_tokens: float
    """Tokens of an outer step of the swarm, or of what all origins have under way at most, where that is more."""
    replica_round: float
    """Tokens by which a replica's own clock runs between two outer steps. Each of its inner steps stands for a batch of
    the swarm, or for a microbatch of every replica if that is more."""
    under_way: float
    """Tokens, by an origin's clock, of what it keeps under way at most: its microbatches tell a clock as far ahead."""
    seconds: float
    over: bool
    """Every node has ended within the deadline."""
    nodes: Sequence[Told]
    struck: frozenset[int] = frozenset()
    """Nodes that a fault ended, or made hostile or double: they owe nothing."""
    fallen: frozenset[int] = frozenset()
    """The honest nodes that a fault ended: what they had trained was trained."""
    max_lag: float = math.inf
    """Tokens by which the clocks of two stages may differ, twice."""
    grace: float = math.inf
    """`limits.grace_seconds`."""
    lost_stage: bool = False
    """A stage has lost all of its replicas, and begins again from what is left of it, or from the seed."""
    retraced: bool = False
    """An origin came back from its checkpoint, which may be behind the others by all of the allowed lag. What was
    trained since is trained again."""
    late_seconds: float = 0.0
    """By which messages were late, or for which nothing went between two sides, at most."""
    held_up: bool = False
    """Messages were late, sides apart or somebody frozen for no longer than an exchange's opening may be late."""
    hostile: bool = False
    """A node lied, or two nodes had one identity."""
    lossy: bool = False
    """Somebody died, or was told to leave."""
    complaints: tuple[str, ...] = field(default=())
    """Errors in the log."""
    tasks: tuple[str, ...] = field(default=())
    """Tasks that outlived their nodes."""
    stages: int = 1
    """The number of stages of the run, served or not."""
    ledger: Sequence[OuterEntry] = ()
    """What each outer step did to the weights."""

    @property
    def survivors(self) -> list[Told]:
        """Nodes that owe the run's end."""
        return [node for node in self.nodes if node.number not in self.struck]


def left_open(replica: Replica) -> tuple[str, ...]:
    """What a replica that has run to its end holds still: an exchange, microbatches, versions, readers."""
    open_still: list[str] = []
    if replica.averaging.side.engagement.phase is not Phase.FREE:
        open_still.append(f"an exchange ({replica.averaging.side.engagement.phase})")
    if replica.pipeline.server.pending:
        open_still.append(f"{replica.pipeline.server.pending} microbatches of others")
    if replica.pipeline.origin is not None and replica.pipeline.origin.under_way:
        open_still.append(f"{replica.pipeline.origin.under_way} microbatches of its own")
    if replica.worker.live_versions > 1:
        open_still.append(f"{replica.worker.live_versions} versions of the weights")
    if replica.worker.queued:
        open_still.append(f"{replica.worker.queued} calls of the device")
    return tuple(open_still)


def breaches(run: Run) -> list[str]:
    """All that is against any of the invariants."""
    return [line for invariant in INVARIANTS for line in invariant(run)]


def _nobody_waits_for_ever(run: Run) -> Iterator[str]:
    if not run.over:
        still = [node.number for node in run.nodes if node.condition == "running"]
        yield f"waits for ever: nodes {still} still run after {run.seconds:.0f} s"


def _nobody_waits_in_vain(run: Run) -> Iterator[str]:
    """A node that waits for a lost stage until it gives up is right if fewer nodes are left than stages: somebody may
    come. If enough are left, one of them should have gone there, or all should have ended."""
    in_vain = HELD_UP_GRACES * run.grace / 2  # half of what a node gives a lost stage
    waited = any(node.condition == "failed" or node.ended_at > in_vain for node in run.survivors)
    left_behind = any(node.condition == "failed" and _left_behind(run, node) for node in run.survivors)
    long = run.over and run.seconds > in_vain
    if long and waited and len(run.survivors) >= run.stages and not left_behind:
        yield f"in vain: {len(run.survivors)} nodes are left for {run.stages} stages, and {run.seconds:.0f} s passed"


def _joiners_are_let_in(run: Run) -> Iterator[str]:
    for node in run.survivors:
        if node.outside > OUTSIDE_SECONDS and not node.cut_off:
            yield f"outside: node {node.number} of stage {node.stage} was let in by nobody for {node.outside:.0f} s"


def _survivors_come_to_the_end(run: Run) -> Iterator[str]:
    for node in run.survivors:
        few = len(run.survivors) < run.stages or _left_behind(run, node)
        alone = few and "a stage has no replica" in node.error
        if node.condition == "failed" and not alone and not _came_too_late(run, node):
            yield f"fails: node {node.number} of stage {node.stage}: {node.error}"
        owes_all = node.stage == 0 and not (node.late or node.slept or _left_behind(run, node) or _outlived(run, node))
        short = run.target - _furthest(node) > (0.0 if owes_all else run.max_lag)
        of_a_twin = run.hostile and node.late  # what it copied may have been trained by half of two with one identity
        if node.condition == "ended" and short and not run.lost_stage and not of_a_twin:
            yield f"short: node {node.number} of stage {node.stage} ends at {node.clock:.0f} of {run.target:.0f}"


def _left_behind(run: Run, node: Told) -> bool:
    """Tell whether others came to the end while the node was cut off from them. Alone it can train nothing any more. It
    did not see them leave, and cannot tell that from their death."""
    return node.cut_off and _reached(run) >= run.target


def _outlived(run: Run, node: Told) -> bool:
    """Most origins ended so long before it that the later stages waited for it no longer. The last one of many trains
    the swarm's whole batch alone."""
    ended = sorted(other.ended_at for other in run.survivors if other.stage == 0)
    return node.ended_at - ended[len(ended) // 2] > IDLE_GRACES * run.grace


def _came_too_late(run: Run, node: Told) -> bool:
    """Tell whether the node came when none trained any more. It is told that the run is over, and ends. A node that was
    let in only after all were gone has nobody to be told by."""
    told = "has come to its end" in node.error and _near_its_end(run)
    return node.late and (told or KEPT_OUT in node.error)


def _furthest(node: Told) -> float:
    """The last outer steps may meet partners' clocks below the target."""
    told = (event.clock for event in node.events if isinstance(event, InnerStep | OuterStep | Account))
    return max([node.clock, *told])


def _somebody_trains_to_the_end(run: Run) -> Iterator[str]:
    """A run that is over for all was finished by one of them, or nearly so. If its origins die in the last tenth they
    leave it at that, also at a stage that is behind since it was lost."""
    ended = any(node.condition == "ended" for node in run.survivors)
    if ended and not _near_its_end(run):
        yield f"unfinished: nobody has come further than {_reached(run):.0f} of {run.target:.0f}, and all left in order"


def _near_its_end(run: Run) -> bool:
    """A later stage goes by the clocks that origins will have once all that they have under way is trained."""
    return _reached(run) + run.under_way >= NEAR_BY_CLOCK * run.target


def _reached(run: Run) -> float:
    """Where the run was: the furthest clock of nodes that left in order, and of origins that fell."""
    ended = (node for node in run.survivors if node.condition == "ended")
    origins = (node for node in run.nodes if node.number in run.fallen and node.stage == 0)
    return max(map(_furthest, (*ended, *origins)), default=0.0)


def _no_clock_runs_past(run: Run) -> Iterator[str]:
    """No clock passes the target by more than the rules allow.

    Later stages' clocks are tied to those of the origins that are heard. When the quickest origins end, the slowest are
    behind them by no more than the allowed lag, or they would take their state. While these train on, a later stage
    passes the target (`tied_past`). It passes by its own round more, since what it was told of them is as old as that.
    If messages were late the quick ones are believed for a quarter of the lag more, half of which counts. The whole lag
    counts if more train than are counted, as two with one identity do. If stage 0 begins again, or origins come back to
    it from checkpoints, it is behind theirs, which go half as fast at the slowest.

    Origins pass it by a round of their own work, whatever befell messages. An exchange moves both by half of what their
    snapshots are apart. That is the more the later its opening is: half of that lag at the most. A late joiner may meet
    origins that have passed it already, and has its own round under way.
    """
    tied = run.max_lag if run.hostile or run.retraced else tied_past(run.max_lag)
    tied += run.replica_round + (run.target / 2 if run.lost_stage else 0.0)
    tied += run.max_lag / 8 if run.late_seconds else 0.0
    own = max(run.round_tokens, run.replica_round)
    origins = own + (run.max_lag / 2 if run.held_up else 0.0)
    for node in run.survivors:
        late = run.round_tokens if node.late else 0.0
        if node.clock - run.target > (origins + late if node.stage == 0 else tied):
            yield f"past: node {node.number} of stage {node.stage} ends at {node.clock:.0f} of {run.target:.0f}"
        if node.stage == 0 and (more := _trained_past(node, run.target)) > own:
            yield f"past: node {node.number} of stage 0 has trained {more:.0f} tokens beyond {run.target:.0f}"


def tied_past(lag: float) -> float:
    """Tokens by which a later stage's clock passes the target while origins train on that are behind it by `lag`
    tokens. Origins that have ended there tell of them (`schedule.tied_pace`). The clock is as fast as they within what
    is free, slower the further it is, at last at the slowest."""
    free, slowest = FREE_LAG * lag, (FREE_LAG + (1.0 - SLOWEST_PACE) / PACE_A_LAG) * lag
    way = free - math.log(SLOWEST_PACE) * lag / PACE_A_LAG
    return slowest + SLOWEST_PACE * (lag - way)


def _trained_past(node: Told, target: float) -> float:
    """Tokens by which its inner steps moved its clock beyond the target."""
    clock = past = 0.0
    for event in node.events:
        if isinstance(event, InnerStep):
            past += max(event.clock - max(clock, target), 0.0)
        if isinstance(event, InnerStep) or (isinstance(event, OuterStep) and event.kind != "aborted"):
            clock = event.clock
    return past


def _accounts_close(run: Run) -> Iterator[str]:
    for node in run.survivors:
        account = node.account
        if account is None:
            continue
        rest = account.drawn - account.trained - account.dropped - account.held_at_end
        if node.stage == 0 and rest:
            yield f"account: node {node.number} has {rest} samples nowhere ({account.drawn} drawn)"


def _nothing_is_dropped(run: Run) -> Iterator[str]:
    if run.lossy or run.hostile:
        return
    for node in run.survivors:
        if node.account is not None and node.account.dropped:
            yield f"dropped: node {node.number} dropped {node.account.dropped} samples, and nobody died"


def _nothing_is_left_open(run: Run) -> Iterator[str]:
    for node in run.survivors:
        for what in node.left_open:
            yield f"open: node {node.number} of stage {node.stage} left {what}"
    for task in run.tasks:
        yield f"task: {task}"


def _nobody_complains(run: Run) -> Iterator[str]:
    for line, times in Counter(run.complaints).items():
        yield f"log: {line} ({times} times)"


def _the_mean_is_kept(run: Run) -> Iterator[str]:
    """For each pair's step both sides have committed, unless an abort on one of them says otherwise."""
    if run.hostile or run.lossy:
        return
    made, broken = _steps(run.nodes)
    for pair, (one, other) in made.items():
        gone = broken.get(pair, 0)
        if abs(one - other) > gone:
            yield f"one-sided: {pair[0]} committed {one} steps with {pair[1]}, which committed {other}; {gone} aborted"


def _outer_steps_do_what_the_rule_says(run: Run) -> Iterator[str]:
    """This holds whatever befell the nodes: a liar lies in its records and gradients, or ruins its own weights."""
    for line in strays(run.ledger, hostile=run.hostile):
        yield f"weights: {line}"


def _steps(nodes: Sequence[Told]) -> tuple[Mapping[tuple[str, str], tuple[int, int]], Mapping[tuple[str, str], int]]:
    """For each pair the steps that each side committed, and those that either aborted."""
    sides: Counter[tuple[str, str]] = Counter()
    aborted: Counter[tuple[str, str]] = Counter()
    for node in nodes:
        for event in node.events:
            if isinstance(event, OuterStep) and event.partner and not event.one_sided:
                first, second = sorted((node.peer, event.partner))
                if event.kind == "paired":
                    sides[node.peer, event.partner] += 1
                elif event.kind == "aborted":
                    aborted[first, second] += 1
    pairs = {(min(pair), max(pair)) for pair in sides}
    return {pair: (sides[pair], sides[pair[1], pair[0]]) for pair in pairs}, aborted


INVARIANTS = (
    _nobody_waits_for_ever,
    _nobody_waits_in_vain,
    _joiners_are_let_in,
    _survivors_come_to_the_end,
    _somebody_trains_to_the_end,
    _no_clock_runs_past,
    _accounts_close,
    _nothing_is_dropped,
    _nothing_is_left_open,
    _nobody_complains,
    _the_mean_is_kept,
    _outer_steps_do_what_the_rule_says,
)
