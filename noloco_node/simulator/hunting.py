"""Hunts by the hour: drawn schedules of faults, one after the other. Every one that fails is shortened and told as the
command that repeats it."""

from __future__ import annotations

import hashlib
import logging
import shlex
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from noloco_node.config.sim_spec import HuntSpec
from noloco_node.errors import ExitCode, UserError
from noloco_node.simulator.faults import KINDS, Schedule, draw
from noloco_node.simulator.hunt import HuntOutcome, carry_out, shrunk

HUNT = "sim/hunt"
"""The configuration that comes along."""
TOLD_EVERY = 100
"""Schedules between two words of how far it is."""


@dataclass(frozen=True, slots=True)
class Hunted:
    """What came of a hunt."""

    schedules: int
    failed: tuple[dict[str, Any], ...]
    """Seed and shortest failing schedule of each that failed, and what it breached."""
    drawn: dict[str, int]
    """Faults by kind."""
    fired: dict[str, int]
    """Those of them that did something."""
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


def go_hunting(hunt: HuntSpec, tell: Callable[[str], None], progress: Callable[[float, float], None]) -> Hunted:
    """Carry all schedules out, and tell of each that fails. Raises UserError (CONFIG) as `schedules_of`."""
    schedules, every = schedules_of(hunt), 1 if hunt.schedule else hunt.seeds
    real = hunt.tensors == "real"
    drawn: Counter[str] = Counter()
    fired: Counter[str] = Counter()
    failed: list[dict[str, Any]] = []
    courses = hashlib.sha256()
    seconds, began = 0.0, time.process_time()
    with _quiet():
        for number, schedule in enumerate(schedules, 1):
            outcome = carry_out(schedule, real_tensors=real)
            seconds += outcome.seconds
            courses.update(outcome.trace.encode())
            for fault, has in zip(schedule.faults, outcome.fired, strict=True):
                drawn[fault.kind] += 1
                fired[fault.kind] += has
            if outcome.breaches:
                shortest = outcome if hunt.schedule else shrunk(outcome, real_tensors=real)
                made = shortest.schedule.model_dump(mode="json")
                failed.append({"seed": schedule.seed, "schedule": made, "breaches": list(shortest.breaches)})
                tell(_verdict(outcome, shortest, real_tensors=real))
            if number % TOLD_EVERY == 0 or number == every:
                tell(f"{number} of {every} schedules, {len(failed)} failed")
            progress(number, every)
    cpu = time.process_time() - began
    kinds = dict(sorted(drawn.items())), {kind: fired[kind] for kind in sorted(drawn)}
    return Hunted(every, tuple(failed), *kinds, seconds / 3600, cpu, courses.hexdigest())


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
