"""Hunting the node's faults: schedules drawn from seeds, each carried out on a swarm in virtual time, and what then is
against the invariants. A failing schedule shrinks to the shortest that still fails, and is told as the command that
repeats it."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import shlex
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from noloco_node.aio import cancel_and_wait
from noloco_node.averaging.session import STALE_SECONDS
from noloco_node.config.data_spec import DataSpec
from noloco_node.config.experiments import HuntSpec
from noloco_node.config.model_spec import ModelSpec
from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import EvaluationSpec, InnerSpec, LimitsSpec, OuterSpec, RunSpec
from noloco_node.errors import ExitCode, UserError
from noloco_node.simulator.faults import (
    ENDS_NODES,
    KINDS,
    Crash,
    DrawnFault,
    Freeze,
    FullDisk,
    LateMessages,
    Leave,
    Partition,
    Schedule,
    draw,
)
from noloco_node.simulator.invariants import Run, Told, breaches
from noloco_node.simulator.links import Links, PlainWay
from noloco_node.simulator.loop import in_virtual_time
from noloco_node.simulator.outer_ledger import Watched
from noloco_node.simulator.strikes import Strikes
from noloco_node.simulator.world import World
from noloco_node.sizing.footprint import Footprint, footprint_of
from noloco_node.training.compute_thread import Priority
from noloco_node.workers import Workers, cores

STEPS = 24
"""The inner steps of the swarm."""
BATCH_MICROBATCHES = 4
"""The number of microbatches behind an inner step. A stage of more replicas has one of each. Otherwise a run would be
over before all have taken part in an outer step."""
IN_FLIGHT = BATCH_MICROBATCHES // 2
SECONDS = {Priority.STEP: 0.02, Priority.BACKWARD: 0.6, Priority.FORWARD: 0.3, Priority.DRAW: 0.3}
"""Seconds of the fastest device for each kind of work."""


@dataclass(frozen=True, slots=True)
class HuntOutcome:
    """What came of one schedule."""

    schedule: Schedule
    breaches: tuple[str, ...]
    fired: tuple[bool, ...]
    """For each fault, whether it did something."""
    seconds: float
    """Virtual."""
    trace: str
    """Hash of all that was told."""


def run_spec(stages: int, standby_copies: int = 0, replicas: int = 1) -> RunSpec:
    """The run of every schedule: as small as a stage can be, with the limits that nodes have by default. Copies are
    renewed as often as a run so short asks for."""
    windows, length = 2, 4
    renewed = {"standby_seconds": 5.0} if standby_copies else {}
    batch = max(BATCH_MICROBATCHES, replicas) * windows * length
    return RunSpec(
        name="hunt",
        model=ModelSpec(
            config={
                "model_type": "llama",
                "vocab_size": 11,
                "hidden_size": 8,
                "intermediate_size": 8,
                "num_hidden_layers": max(2, stages),
                "num_attention_heads": 1,
                "num_key_value_heads": 1,
                "max_position_embeddings": 8,
                "tie_word_embeddings": False,
            },
            stages=stages,
        ),
        data=DataSpec(sequence_length=length),
        inner=InnerSpec(
            target_tokens=batch * STEPS,
            global_batch_tokens=batch,
            microbatch_windows=windows,
            learning_rate=1e-2,
            warmup_tokens=2 * batch,
        ),
        outer=OuterSpec(inner_steps=3, min_inner_steps=1, codec="int8"),
        evaluation=EvaluationSpec(every_tokens=batch * STEPS, windows=windows),
        limits=LimitsSpec(chunk_bytes=4096, **renewed),
        standby_copies=standby_copies,
    )


class _Complaints(logging.Handler):
    """Collects what nobody may have to log."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self.lines.append(f"{record.getMessage()}{'' if error is None else f': {error!r}'}")


def carry_out(schedule: Schedule) -> HuntOutcome:
    """Run a schedule to its end, in virtual time and on quadratics."""
    complaints = _Complaints()
    package = logging.getLogger()
    package.addHandler(complaints)
    try:
        with tempfile.TemporaryDirectory(prefix="hunt-") as folder:
            return in_virtual_time(lambda: _run(schedule, complaints, Path(folder)), seed=schedule.seed)
    finally:
        package.removeHandler(complaints)


def shrunk(outcome: HuntOutcome) -> HuntOutcome:
    """The shortest part of a failing schedule that fails in a like way: in the first word of one of its breaches."""
    ways = {line.partition(":")[0] for line in outcome.breaches}
    found = {outcome.schedule.faults: outcome}

    def fails(faults: Sequence[DrawnFault]) -> bool:
        tried = carry_out(outcome.schedule.with_faults(tuple(faults)))
        found[tried.schedule.faults] = tried
        return any(line.partition(":")[0] in ways for line in tried.breaches)

    return found[tuple(shortest_failing(outcome.schedule.faults, fails, 200))]


async def _run(schedule: Schedule, complaints: _Complaints, folder: Path) -> HuntOutcome:
    spec = run_spec(schedule.stages, schedule.standby_copies, max(schedule.replicas))
    loop = asyncio.get_running_loop()
    own = asyncio.all_tasks()
    learning = Watched(0, 0.5)
    async with World(
        spec,
        NodeSettings(
            in_flight=IN_FLIGHT, seed=schedule.seed, checkpoint_outer_steps=2, checkpoint_seconds=5, min_stay_seconds=60
        ),
        footprint=_footprint(schedule.stages),
        learning=learning,
        device=partial(_device, schedule.seed),
        links=Links(PlainWay(lambda _source, _target, octets: 0.02 + octets / 1e6)),
        seed=schedule.seed,
        folder=folder,
        disks=frozenset(fault.node for fault in schedule.faults if isinstance(fault, Crash | Leave | FullDisk)),
    ) as world:
        for stage, replicas in enumerate(schedule.replicas):
            for _ in range(replicas):
                world.start(stage)
        strikes = Strikes(world, schedule)
        striking = loop.create_task(strikes.run())
        over = True
        try:
            # A node waits at most an hour for a lost stage: what is not over after three never will be.
            await world.ended(3 * 3600.0)
        except TimeoutError:
            over = False
        await cancel_and_wait((striking,))
        strikes.settle()
        tasks = (
            [task for task in asyncio.all_tasks() - own if not task.done()] if over and not world.links.nowhere else []
        )
        complained = tuple(complaints.lines)
        run = _told(world, strikes, over=over, complaints=complained, tasks=tuple(sorted(map(_name, tasks))))
        run = replace(run, ledger=learning.ledger)
        return HuntOutcome(schedule, tuple(breaches(run)), tuple(strikes.fired), loop.time(), world.trace)


def _device(seed: int, number: int) -> Callable[[Priority], float]:
    """What a node's device takes: one may be four times as fast as another."""
    slowness = 4.0 ** random.Random(f"device/{seed}/{number}").random()
    return lambda work: slowness * SECONDS[work]


@cache
def _footprint(stages: int) -> Footprint:
    return footprint_of(run_spec(stages))


def _name(task: asyncio.Task[object]) -> str:
    return getattr(task.get_coro(), "__qualname__", task.get_name())


def _told(world: World, strikes: Strikes, *, over: bool, complaints: tuple[str, ...], tasks: tuple[str, ...]) -> Run:
    accounts, spec = world.accounts(), world.spec
    nodes = [
        Told(
            number=node.number,
            stage=node.stage,
            peer=node.peer,
            condition=node.condition,
            error=repr(node.error),
            account=accounts.get(node.number),
            events=world.events[node.number],
            clock=node.replica.worker.progress.clock if node.replica else 0.0,
            late=node.number >= strikes.schedule.nodes or node.set_out,
            slept=node.number in strikes.slept,
            cut_off=node.number in strikes.cut_off,
            left_open=node.left_open,
            outside=node.outside,
            ended_at=node.ended_at,
        )
        for node in world.nodes
    ]
    kinds = {fault.kind for fault in strikes.schedule.faults}
    batch = spec.inner.global_batch_tokens
    more = sum(fault.kind in ("join", "twin") for fault in strikes.schedule.faults)
    most = spec.microbatch_tokens * (max(strikes.schedule.replicas) + more)
    return Run(
        target=spec.inner.target_tokens,
        batch=batch,
        round_tokens=max(spec.outer.inner_steps * batch, IN_FLIGHT * most),
        replica_round=spec.outer.inner_steps * max(batch, most),
        under_way=IN_FLIGHT * most,
        seconds=asyncio.get_running_loop().time(),
        over=over,
        nodes=nodes,
        struck=frozenset(strikes.dead | strikes.liars | strikes.twins),
        fallen=frozenset(strikes.dead - strikes.liars - strikes.twins),
        max_lag=spec.max_lag_tokens,
        grace=spec.limits.grace_seconds,
        lost_stage=strikes.lost_stage,
        retraced=strikes.retraced,
        late_seconds=max(
            (fault.seconds for fault in strikes.schedule.faults if isinstance(fault, LateMessages | Partition)),
            default=0.0,
        ),
        held_up=any(
            fault.seconds <= STALE_SECONDS
            for fault in strikes.schedule.faults
            if isinstance(fault, LateMessages | Partition | Freeze)
        ),
        hostile=bool(kinds & {"liar", "twin"}),
        lossy=bool(kinds & ENDS_NODES),
        complaints=complaints,
        tasks=tasks,
        stages=strikes.schedule.stages,
    )


T = TypeVar("T")


def shortest_failing(items: Sequence[T], fails: Callable[[Sequence[T]], bool], most_tries: int = 500) -> list[T]:
    """A part of `items`, in their order, that still `fails`, and does so without none of its own. `items` itself must
    fail. Gives up growing shorter after `most_tries`."""
    kept, parts, tries = list(items), 2, 0
    while kept:
        size = max(1, -(-len(kept) // parts))
        for start in range(0, len(kept), size):
            rest = kept[:start] + kept[start + size :]
            tries += 1
            if tries > most_tries:
                return kept
            if fails(rest):
                kept, parts = rest, max(2, parts - 1)
                break
        else:
            if size == 1:
                break
            parts = min(len(kept), 2 * parts)
    return kept


HUNT = "sim/hunt"
"""The name of the configuration that comes along."""


@dataclass(frozen=True, slots=True)
class Hunted:
    """What came of a hunt."""

    schedules: int
    failed: tuple[dict[str, Any], ...]
    """Seed and shortest failing schedule of each that failed, and what it breached."""
    drawn: dict[str, int]
    """Faults by kind."""
    fired: dict[str, int]
    """The number of them that did something, by kind."""
    virtual_hours: float
    cpu_seconds: float
    trace: str
    """Hash of the courses of all."""


def schedules_of(hunt: HuntSpec) -> Iterator[Schedule]:
    """What a hunt carries out. Raises UserError (CONFIG) for faults that are none, and for a schedule that another
    version has printed."""
    if unknown := sorted(set(hunt.faults) - set(KINDS)):
        raise UserError(ExitCode.CONFIG, f"sim.faults names {', '.join(unknown)}", f"name some of: {', '.join(KINDS)}")
    if hunt.schedule is not None:
        try:
            schedule = Schedule.model_validate(hunt.schedule)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(str(part) for part in first["loc"])
            said = first["msg"].removeprefix("Value error, ")
            raise UserError(
                ExitCode.CONFIG,
                f"sim.schedule is none that this version can carry out: {place}{': ' if place else ''}{said}",
                "carry it out with the version that printed it, or hunt its seed: --set sim.first=SEED --seeds 1",
            ) from None
        return iter((schedule,))
    seeds = range(hunt.first, hunt.first + hunt.seeds)
    return (draw(seed, hunt.fewest, hunt.most, hunt.faults or KINDS) for seed in seeds)


@dataclass(frozen=True, slots=True)
class _Carried:
    """What came of a schedule; `shortest` where it failed."""

    outcome: HuntOutcome
    shortest: HuntOutcome | None
    cpu_seconds: float


def go_hunting(hunt: HuntSpec, tell: Callable[[str], None], progress: Callable[[float, float], None]) -> Hunted:
    """Carry all schedules out, in `hunt.workers` processes, and tell of each that fails in the order of their seeds.
    Raises UserError (CONFIG) as `schedules_of`, (FAILURE) where a process died."""
    schedules = list(schedules_of(hunt))
    drawn: Counter[str] = Counter()
    fired: Counter[str] = Counter()
    failed: list[dict[str, Any]] = []
    courses = hashlib.sha256()
    seconds, cpu = 0.0, 0.0
    for number, carried in enumerate(_in_order(schedules, hunt), 1):
        outcome, shortest = carried.outcome, carried.shortest
        seconds, cpu = seconds + outcome.seconds, cpu + carried.cpu_seconds
        courses.update(outcome.trace.encode())
        for fault, has in zip(outcome.schedule.faults, outcome.fired, strict=True):
            drawn[fault.kind] += 1
            fired[fault.kind] += has
        if shortest is not None:
            made = shortest.schedule.model_dump(mode="json")
            failed.append({"seed": outcome.schedule.seed, "schedule": made, "breaches": list(shortest.breaches)})
            tell(_verdict(outcome, shortest))
        if number % 100 == 0 or number == len(schedules):
            tell(f"{number} of {len(schedules)} schedules, {len(failed)} failed")
        progress(number, len(schedules))
    kinds = dict(sorted(drawn.items())), {kind: fired[kind] for kind in sorted(drawn)}
    return Hunted(len(schedules), tuple(failed), *kinds, seconds / 3600, cpu, courses.hexdigest())


def _in_order(schedules: Sequence[Schedule], hunt: HuntSpec) -> Iterator[_Carried]:
    """What comes of each, in their order; in this process where there is no use for a second. A schedule that was given
    was printed as the shortest already."""
    workers = hunt.workers or cores()
    if min(workers, len(schedules)) == 1:
        yield from (_carried(schedule, shrinks=hunt.schedule is None) for schedule in schedules)
        return
    ahead: dict[int, _Carried] = {}
    told = 0
    with Workers[tuple[int, Schedule], _Carried](workers, _numbered, "sim.workers") as pool:
        for (number, _), carried in pool.run(list(enumerate(schedules))):
            ahead[number] = carried
            while told in ahead:
                yield ahead.pop(told)
                told += 1


def _numbered(task: tuple[int, Schedule]) -> _Carried:
    return _carried(task[1])


def _carried(schedule: Schedule, *, shrinks: bool = True) -> _Carried:
    began = time.process_time()
    with _quiet():
        outcome = carry_out(schedule)
        shortest = None
        if outcome.breaches:
            shortest = shrunk(outcome) if shrinks else outcome
    return _Carried(outcome, shortest, time.process_time() - began)


def command_of(schedule: Schedule) -> str:
    """What repeats a schedule."""
    words = ["--set", f"sim.schedule={schedule.model_dump_json()}"]
    return f"noloco-node simulate {HUNT} --out DIR {shlex.join(words)}"


@contextmanager
def _quiet() -> Generator[None]:
    """Nodes log what befalls them, which is the point of it."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _verdict(outcome: HuntOutcome, shortest: HuntOutcome) -> str:
    lines = [f"seed {outcome.schedule.seed} failed, {len(outcome.schedule.faults)} faults, shortest as long as "]
    lines[0] += f"{len(shortest.schedule.faults)}, trace {shortest.trace[:16]}:"
    lines += [f"  {line}" for line in shortest.breaches]
    return "\n".join([*lines, f"  {command_of(shortest.schedule)}"])
