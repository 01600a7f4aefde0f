"""Hunts by the hour: drawn schedules of faults, one after the other. Every one that fails is shortened and told as the
command that repeats it."""

from __future__ import annotations

import hashlib
import logging
import shlex
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from noloco_node.config.sim_spec import HuntSpec
from noloco_node.errors import ExitCode, UserError
from noloco_node.simulator.faults import KINDS, Schedule, draw
from noloco_node.simulator.hunt import HuntOutcome, carry_out, shrunk
from noloco_node.workers import Workers, cores

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
class _Task:
    """One schedule, for whichever process is free."""

    schedule: Schedule
    real_tensors: bool
    given: bool
    """It was printed as the shortest already."""


@dataclass(frozen=True, slots=True)
class _Carried:
    """What came of it; `shortest` where it failed."""

    outcome: HuntOutcome
    shortest: HuntOutcome | None
    cpu_seconds: float


def go_hunting(hunt: HuntSpec, tell: Callable[[str], None], progress: Callable[[float, float], None]) -> Hunted:
    """Carry all schedules out, in `hunt.workers` processes, and tell of each that fails in the order of their seeds.
    Raises UserError (CONFIG) as `schedules_of`, (FAILURE) where a process died."""
    real = hunt.tensors == "real"
    tasks = [_Task(schedule, real, hunt.schedule is not None) for schedule in schedules_of(hunt)]
    drawn: Counter[str] = Counter()
    fired: Counter[str] = Counter()
    failed: list[dict[str, Any]] = []
    courses = hashlib.sha256()
    seconds, cpu = 0.0, 0.0
    for number, carried in enumerate(_in_order(tasks, hunt.workers or cores()), 1):
        outcome, shortest = carried.outcome, carried.shortest
        seconds, cpu = seconds + outcome.seconds, cpu + carried.cpu_seconds
        courses.update(outcome.trace.encode())
        for fault, has in zip(outcome.schedule.faults, outcome.fired, strict=True):
            drawn[fault.kind] += 1
            fired[fault.kind] += has
        if shortest is not None:
            made = shortest.schedule.model_dump(mode="json")
            failed.append({"seed": outcome.schedule.seed, "schedule": made, "breaches": list(shortest.breaches)})
            tell(_verdict(outcome, shortest, real_tensors=real))
        if number % 100 == 0 or number == len(tasks):
            tell(f"{number} of {len(tasks)} schedules, {len(failed)} failed")
        progress(number, len(tasks))
    kinds = dict(sorted(drawn.items())), {kind: fired[kind] for kind in sorted(drawn)}
    return Hunted(len(tasks), tuple(failed), *kinds, seconds / 3600, cpu, courses.hexdigest())


def _in_order(tasks: Sequence[_Task], workers: int) -> Iterator[_Carried]:
    """What comes of each, in the order of `tasks`; in this process where there is no use for a second."""
    if min(workers, len(tasks)) == 1:
        yield from map(_carried, tasks)
        return
    ahead: dict[int, _Carried] = {}
    told = 0
    with Workers[tuple[int, _Task], _Carried](workers, _numbered, "sim.workers") as pool:
        for (number, _), carried in pool.run(list(enumerate(tasks))):
            ahead[number] = carried
            while told in ahead:
                yield ahead.pop(told)
                told += 1


def _numbered(task: tuple[int, _Task]) -> _Carried:
    return _carried(task[1])


def _carried(task: _Task) -> _Carried:
    began = time.process_time()
    with _quiet():
        outcome = carry_out(task.schedule, real_tensors=task.real_tensors)
        shortest = None
        if outcome.breaches:
            shortest = outcome if task.given else shrunk(outcome, real_tensors=task.real_tensors)
    return _Carried(outcome, shortest, time.process_time() - began)


def command_of(schedule: Schedule, *, real_tensors: bool = False) -> str:
    """What repeats a schedule."""
    words = ["--set", f"sim.schedule={schedule.model_dump_json()}"]
    words += ["--set", "sim.tensors=real"] if real_tensors else []
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


def _verdict(outcome: HuntOutcome, shortest: HuntOutcome, *, real_tensors: bool) -> str:
    lines = [f"seed {outcome.schedule.seed} failed, {len(outcome.schedule.faults)} faults, shortest as long as "]
    lines[0] += f"{len(shortest.schedule.faults)}, trace {shortest.trace[:16]}:"
    lines += [f"  {line}" for line in shortest.breaches]
    return "\n".join([*lines, f"  {command_of(shortest.schedule, real_tensors=real_tensors)}"])
