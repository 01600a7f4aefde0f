"""Whether this machine can do what a node asks of it: each check is a pure judgement of what was measured.

Its clock is compared while the node runs as well. With a wrong clock the directory shows it no node, and others do not
see it. It could say only that they are gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from statistics import median
from typing import NoReturn

from noloco_node import ambient
from noloco_node.ambient import LOOK_SECONDS
from noloco_node.bootstrap.hello import measure_hello
from noloco_node.errors import ExitCode, UserError, version_remedy
from noloco_node.identity.peer_id import PeerId
from noloco_node.process_memory import address_space_left
from noloco_node.storage.run_folder import SMALLEST_DISK
from noloco_node.telemetry.events import Warned
from noloco_node.telemetry.memory_limit import memory_uses
from noloco_node.telemetry.words import as_bytes
from noloco_node.transport.calls import ASKED_AT_ONCE
from noloco_node.transport.interface import Transport

CLOCK_LIMIT_SECONDS = 3.0
"""hivemind's directory takes no peer whose clock is off by more seconds than this."""
CLOCK_WARNING_SECONDS = CLOCK_LIMIT_SECONDS / 2
WANTED_FILES = 65536
FEWEST_FILES = 1024


class CheckOutcome(StrEnum):
    """How a check ended."""

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """One check: its name, how it ended, what was found, and what to do about it (empty where it passed)."""

    name: str
    outcome: CheckOutcome
    found: str
    remedy: str = ""


def check_disk(free: int, where: str, wanted: int = 0, least: int = 0) -> Check:
    """Room in the run folder, of which a stage wants so much at the most and needs `least` at its end; all in bytes.
    `wanted` is 0 before the run is known."""
    found = f"{as_bytes(free)} free in {where}"
    found += f", up to {as_bytes(wanted)} wanted" if wanted else "; a run says at the start what it wants"
    least += SMALLEST_DISK
    if free < least:
        return Check("disk", CheckOutcome.FAIL, found, "free some, or name a folder on a larger disk with --run-folder")
    if free < wanted:
        return Check(
            "disk", CheckOutcome.WARN, found, "free some before the checkpoints fill it, or keep fewer of them"
        )
    return Check("disk", CheckOutcome.PASS, found)


def check_memory(available: int, total: int, needed: int, least: int = 0) -> Check:
    """Check the host's memory for a stage that needs `needed` at the highest, and `least` between two checkpoints. All
    are bytes; a container's limit is included."""
    found = f"{as_bytes(available)} of {as_bytes(total)} free"
    if needed:
        found += f", about {as_bytes(needed)} needed"
    if least > total:
        return Check(
            "memory", CheckOutcome.FAIL, found, "serve a smaller stage with --stage, or use a machine with more"
        )
    if needed > available:
        return Check("memory", CheckOutcome.WARN, found, "end other programs, or the system may kill this one")
    return Check("memory", CheckOutcome.PASS, found)


def check_files(soft: int) -> Check:
    """The number of files and streams that this process may have open."""
    if soft < FEWEST_FILES:
        remedy = f"raise it before the start: ulimit -n {WANTED_FILES}, or docker run --ulimit nofile={WANTED_FILES}"
        return Check("open files", CheckOutcome.WARN, f"at most {soft:,}", remedy)
    return Check("open files", CheckOutcome.PASS, f"at most {soft:,}")


def check_clock(skews: Sequence[tuple[float, float]]) -> Check:
    """This machine's clock against peers': for each the seconds that it is ahead of ours, and how far off that may be.

    Judged by the median peer, so that one with a wrong clock of its own does not fail the others.
    """
    if not skews:
        return Check("clock", CheckOutcome.PASS, "not compared: no peer told its time")
    skew = median(seconds for seconds, _ in skews)
    doubt = max(uncertainty for _, uncertainty in skews)
    word = "behind" if skew > 0 else "ahead of"
    found = f"{abs(skew):.2f} s {word} {len(skews)} peer{'s' * (len(skews) > 1)} (± {doubt:.2f} s)"
    if abs(skew) - doubt > CLOCK_LIMIT_SECONDS:
        remedy = f"set this machine's clock (NTP): beyond {CLOCK_LIMIT_SECONDS:g} s others do not accept this node"
        return Check("clock", CheckOutcome.FAIL, found, remedy)
    if abs(skew) > CLOCK_WARNING_SECONDS:
        return Check("clock", CheckOutcome.WARN, found, "set this machine's clock (NTP) before it drifts further")
    return Check("clock", CheckOutcome.PASS, found)


def check_versions(own: tuple[int, str], others: Mapping[str, tuple[int, str]]) -> Check:
    """Check the protocol and package version of this node against those of peers, by address."""
    protocol, package = own
    foreign = {address: theirs for address, theirs in others.items() if theirs[0] != protocol}
    if others and len(foreign) == len(others):
        their_protocol, their_package = next(iter(foreign.values()))
        found = f"peers speak protocol {their_protocol} (noloco-node {their_package}), this node {protocol} ({package})"
        return Check("versions", CheckOutcome.FAIL, found, version_remedy(protocol, their_protocol, their_package))
    different = sorted({theirs[1] for theirs in others.values()} - {package})
    if different:
        found = f"noloco-node {package} here, {', '.join(different)} elsewhere"
        return Check("versions", CheckOutcome.WARN, found, "install the same version where something does not work")
    return Check("versions", CheckOutcome.PASS, f"noloco-node {package}, protocol {protocol}")


def free_disk(path: Path) -> int:
    """Bytes that this user may still write where `path` lies or will lie; OSError as the system says."""
    there = next(place for place in (path, *path.resolve().parents) if place.exists())
    return shutil.disk_usage(there).free


def memory() -> tuple[int, int]:
    """Bytes of memory (available, total), no more than what a container or this process may have."""
    uses, left = list(memory_uses()), address_space_left()
    available, total = min(use.left for use in uses), min(use.limit for use in uses)
    return available if left is None else min(available, left), total


def raise_file_limit() -> int:
    """Let this process have as many open files as it wants and the system grants; how many that are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_FILES if hard == resource.RLIM_INFINITY else min(WANTED_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return WANTED_FILES if soft == resource.RLIM_INFINITY else soft


def first_failure(checks: Sequence[Check]) -> UserError | None:
    """The error for the first check that failed; None where none did."""
    for check in checks:
        if check.outcome is CheckOutcome.FAIL:
            return UserError(ExitCode.CHECK_FAILED, f"{check.name}: {check.found}", check.remedy)
    return None


logger = logging.getLogger(__name__)


class ClockWatch:
    """Says once that this machine's clock has become wrong, and once that it is right again, by what others that answer
    say of theirs. It ends nothing: the node goes on by itself once the clock is right."""

    def __init__(self, transport: Transport, emit: Callable[[Warned], None]) -> None:
        self._transport = transport
        self._emit = emit
        self._chance = ambient.chance()
        self._wrong = False

    async def keep(self) -> NoReturn:
        """Look now and then, and soon after the wall's clock was set or the machine slept. It has moved more than the
        monotonic one then, or less."""
        asked, apart = ambient.monotonic(), _apart()
        while True:
            # Nothing tells that the clock was set: looking again is the only way.
            await asyncio.sleep(LOOK_SECONDS)
            # Drift is slow while the clock runs evenly.
            pause = 30.0 if self._wrong else 600.0
            if ambient.monotonic() - asked >= pause or abs(_apart() - apart) > CLOCK_WARNING_SECONDS:
                asked, apart = ambient.monotonic(), _apart()
                await self.look()

    async def look(self) -> None:
        """Compare with some that answer; where none tells its time, nothing is known."""
        check = await self._compare(self._transport.peer_stats.answering())
        if check is None:
            return
        if check.outcome is CheckOutcome.FAIL and not self._wrong:
            self._wrong = True
            self._emit(Warned(what="clock_wrong", detail=wrong(check)))
        elif check.outcome is not CheckOutcome.FAIL and self._wrong:
            self._wrong = False
            logger.warning("this machine's clock is right again: %s", check.found)

    async def _compare(self, answering: Sequence[PeerId]) -> Check | None:
        asked = self._chance.sample(answering, min(ASKED_AT_ONCE, len(answering)))
        answers = await asyncio.gather(*(measure_hello(self._transport, peer) for peer in asked))
        skews = [(each.skew, each.doubt) for each in answers if each is not None and each.skew is not None]
        return check_clock(skews) if skews else None


def _apart() -> float:
    """By how much the wall's clock is ahead of the monotonic one, which nobody sets: seconds."""
    return ambient.wall() - ambient.monotonic()


def wrong(check: Check) -> str:
    """What to say to the user that runs the node."""
    return (
        f"THIS MACHINE'S CLOCK IS WRONG: {check.found}. Beyond {CLOCK_LIMIT_SECONDS:g} s this node and the others lose "
        "sight of each other, and it trains with nobody. Set the clock (NTP): the node goes on by itself then"
    )
