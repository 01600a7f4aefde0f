"""Hunts by the hour: `python -m noloco_node.simulator.hunting --seeds 10000`. Every schedule that fails is shortened
and printed as the command that repeats it."""

from __future__ import annotations

import argparse
import json
import logging
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from noloco_node.errors import ExitCode
from noloco_node.simulator.faults import KINDS, Schedule, draw
from noloco_node.simulator.hunt import HuntOutcome, carry_out, shrunk

MODULE = "python -m noloco_node.simulator.hunting"


def hunt(
    schedules: Sequence[Schedule],
    tell: Callable[[str], None],
    *,
    real_tensors: bool = False,
    shrinks: bool = True,
) -> dict[str, object]:
    """Carry all of them out, and tell of each that fails. What came of it, as plain values for a file."""
    drawn: Counter[str] = Counter()
    fired: Counter[str] = Counter()
    failed: list[dict[str, object]] = []
    seconds, began = 0.0, time.process_time()
    for number, schedule in enumerate(schedules, 1):
        outcome = carry_out(schedule, real_tensors=real_tensors)
        seconds += outcome.seconds
        for fault, has in zip(schedule.faults, outcome.fired, strict=True):
            drawn[fault.kind] += 1
            fired[fault.kind] += has
        if outcome.breaches:
            shortest = shrunk(outcome, real_tensors=real_tensors) if shrinks else outcome
            failed.append({"seed": schedule.seed, "schedule": shortest.schedule.model_dump(mode="json")})
            tell(_verdict(outcome, shortest, real_tensors=real_tensors))
        if number % 100 == 0 or number == len(schedules):
            tell(f"{number} of {len(schedules)} schedules, {len(failed)} failed")
    return {
        "schedules": len(schedules),
        "failed": failed,
        "drawn": dict(sorted(drawn.items())),
        "fired": dict(sorted(fired.items())),
        "virtual_hours": seconds / 3600,
        "cpu_seconds": time.process_time() - began,
    }


def command_of(schedule: Schedule, *, real_tensors: bool = False) -> str:
    """What repeats a schedule."""
    more = ["--real-tensors"] if real_tensors else []
    return f"{MODULE} {shlex.join([*more, '--schedule', schedule.model_dump_json()])}"


def _verdict(outcome: HuntOutcome, shortest: HuntOutcome, *, real_tensors: bool) -> str:
    lines = [f"seed {outcome.schedule.seed} failed, {len(outcome.schedule.faults)} faults, shortest as long as "]
    lines[0] += f"{len(shortest.schedule.faults)}, trace {shortest.trace[:16]}:"
    lines += [f"  {line}" for line in shortest.breaches]
    return "\n".join([*lines, f"  {command_of(shortest.schedule, real_tensors=real_tensors)}"])


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=MODULE, description="Run drawn schedules of faults on whole swarms.")
    parser.add_argument("--seeds", type=int, default=100, metavar="N", help="how many schedules (100)")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="seed of the first one (0)")
    parser.add_argument("--fewest", type=int, default=4, metavar="N", help="nodes of the smallest swarm (4)")
    parser.add_argument("--most", type=int, default=8, metavar="N", help="nodes of the largest one (8)")
    parser.add_argument("--kinds", default=",".join(KINDS), metavar="A,B", help="of faults; all of them")
    parser.add_argument("--real-tensors", action="store_true", help="tiny real stages in place of quadratics")
    parser.add_argument("--schedule", metavar="JSON", help="this one alone, as it was printed")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the counts go, as JSON")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Exit code 0 where nothing failed, else 1."""
    parser = _options()
    options = parser.parse_args(arguments)
    kinds = tuple(options.kinds.split(","))
    if unknown := sorted(set(kinds) - set(KINDS)):
        parser.error(f"--kinds names {', '.join(unknown)}: there are {', '.join(KINDS)}")
    if not 2 <= options.fewest <= options.most <= 64 or options.seeds < 1:
        parser.error("--fewest and --most are 2 to 64 nodes, --seeds is 1 or more")
    logging.disable(logging.WARNING)
    if options.schedule:
        schedules = [Schedule.model_validate_json(options.schedule)]
    else:
        seeds = range(options.first, options.first + options.seeds)
        schedules = [draw(seed, options.fewest, options.most, kinds) for seed in seeds]
    found = hunt(schedules, print, real_tensors=options.real_tensors, shrinks=not options.schedule)
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(ExitCode.OK) if not found["failed"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
