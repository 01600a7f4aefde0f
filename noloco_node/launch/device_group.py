"""Several devices of one machine: one daemon each, from one command, with an identity and a folder of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from noloco_node import ambient
from noloco_node.ambient import SOON_SECONDS
from noloco_node.config.node_settings import NodeSettings
from noloco_node.diagnostics.pausing import tell_nodes
from noloco_node.errors import ExitCode, UserError, describe_exit
from noloco_node.launch.local_swarm import ORDERLY_EXITS, signal_all
from noloco_node.libp2p.arguments import announced_address
from noloco_node.node.interrupts import WORDS, Word, heeded_signals
from noloco_node.storage import atomic
from noloco_node.storage.run_folder import RunFolder
from noloco_node.telemetry.events import EventReader, NodeStarted
from noloco_node.telemetry.web import TARGETS, scrape_targets
from noloco_node.training.compute_device import all_devices

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Member:
    """One daemon of the group: what its command line has besides what all have in common."""

    name: str
    device: str
    folder: Path
    identity: Path
    port: int
    metrics_port: int | None

    @property
    def options(self) -> list[str]:
        """Its own options, to be put after the common ones, which they overrule."""
        own: list[object] = ["--set", f"node.device={self.device}", "--run-folder", self.folder]
        own += ["--identity", self.identity, "--port", self.port, "--devices", "", "--end-with-stdin"]
        own += [] if self.metrics_port is None else ["--metrics-port", self.metrics_port]
        return [str(part) for part in own]


def devices_of(text: str) -> list[str]:
    """The devices that `--devices` names: `all` GPUs, or a list with commas. Raises UserError (USAGE)."""
    if text != "all":
        named = [device.strip() for device in text.split(",")]
        if not all(named):
            raise UserError(
                ExitCode.USAGE, f"--devices {text}: a name is missing", "for example --devices cuda:0,cuda:1"
            )
        return named
    found = all_devices()
    if not found:
        raise UserError(
            ExitCode.USAGE,
            "--devices all: torch finds no GPU on this machine",
            "leave it out to train on the processor, or name devices: --devices cpu,cpu",
        )
    return found


def members_of(devices: Sequence[str], settings: NodeSettings) -> list[Member]:
    """One daemon for each device, with a folder and an identity of its own. Ports count up from the first one's; 0 lets
    the system choose for each. Raises UserError (CONFIG) where all would announce the same address."""

    def nth(first: int, index: int) -> int:
        return first + index if first else 0

    def member(index: int, device: str) -> Member:
        name = f"{index}-{device.replace(':', '')}"
        folder, given = settings.run_folder / name, settings.identity
        metrics = None if settings.metrics_port is None else nth(settings.metrics_port, index)
        identity = (
            RunFolder(folder).identity if given is None else given.with_name(f"{given.stem}-{name}{given.suffix}")
        )
        return Member(name, device, folder, identity, nth(settings.port, index), metrics)

    members = [member(index, device) for index, device in enumerate(devices)]
    for text in settings.announce:
        if len({announced_address(text, settings.host, each.port) for each in members}) < len(members):
            raise UserError(
                ExitCode.CONFIG,
                f"node.announce: '{text}' has one port, and the nodes of {len(members)} devices each have their own",
                "announce the host alone, and have others reach the ports from --port on",
            )
    return members


def heard_or_not(say: Say) -> Say:
    """`say`, where nobody may listen any more. A closed pipe or a full disk ended all devices as one of them died."""

    def said(line: str) -> None:
        with contextlib.suppress(OSError):
            say(line)

    return said


@dataclass(frozen=True, slots=True)
class _Life:
    """One daemon's process, and its first word."""

    ended: asyncio.Task[int]
    up: asyncio.Task[NodeStarted | None]


class DeviceGroup:
    """The daemons of one machine's devices. `command` starts one of them; what they print goes to this terminal.

    Where Prometheus finds them is written to `TARGETS` in `folder` as they come up, if they show their metrics. A
    daemon that dies is not started again: the others go on, and its exit code becomes the group's. They end by
    themselves should this process vanish: only it can write to their standard input, a pipe.
    """

    def __init__(
        self, command: Sequence[str], members: Sequence[Member], folder: Path, *, founds: bool, say: Say
    ) -> None:
        self._command = tuple(command)
        self._folder = folder
        self._members = tuple(members)
        self._founds = founds
        self._say = heard_or_not(say)
        self._processes: dict[str, Process] = {}
        self._up: dict[str, NodeStarted] = {}
        self._ending = False
        self._telling: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Start all, wait until all have ended; returns the exit code of the first that failed, or the last one's. If
        the group founds a swarm (no address to join was given), the first daemon does, and the others join it. The
        first SIGINT, SIGTERM or SIGHUP is passed on and ends all in order, a second one kills them. SIGUSR1 pauses all,
        and SIGUSR2 lets all go on."""
        loop, signals = asyncio.get_running_loop(), (*heeded_signals(), *WORDS)
        for number in signals:
            loop.add_signal_handler(number, self._on_signal, number)
        reading, writing = os.pipe()
        try:
            return await self._run_all(reading)
        finally:
            os.close(reading)
            os.close(writing)
            for number in signals:
                loop.remove_signal_handler(number)

    async def _run_all(self, stdin: int) -> int:
        first, *others = self._members
        lives = [self._begin(first, stdin, [])]
        founder = await lives[0].up if self._founds and others else None
        addresses = [] if founder is None else founder.addresses[:1]
        if not lives[0].ended.done() and not self._ending:
            lives += [self._begin(member, stdin, addresses) for member in others]
        codes = await asyncio.gather(*(life.ended for life in lives))
        await asyncio.gather(*(life.up for life in lives))
        bad = [code for code in codes if code not in ORDERLY_EXITS]
        return bad[0] if bad else codes[0]

    def _begin(self, member: Member, stdin: int, addresses: Sequence[str]) -> _Life:
        reader = EventReader(RunFolder(member.folder).events)
        for _ in reader.new_events():  # of its former lives
            pass
        ended = asyncio.create_task(self._live(member, stdin, addresses))
        return _Life(ended, asyncio.create_task(self._until_up(member, reader, ended)))

    async def _live(self, member: Member, stdin: int, addresses: Sequence[str]) -> int:
        """One daemon from its start to its end; its exit code."""
        joining = ["--initial-peers", *addresses] if addresses else []
        process = self._processes[member.name] = await asyncio.create_subprocess_exec(
            *self._command, *member.options, *joining, stdin=stdin, start_new_session=True
        )
        if self._ending:
            process.send_signal(signal.SIGTERM)
        self._say(f"{member.device}: process {process.pid}, folder {member.folder}")
        code = await process.wait()
        signal_all(process.pid, signal.SIGKILL)
        self._say(f"{member.device}: ended, {describe_exit(code)}")
        return code if code >= 0 else int(ExitCode.NODE_DIED)

    async def _until_up(self, member: Member, reader: EventReader, living: asyncio.Task[int]) -> NodeStarted | None:
        """A daemon's first word once it is up; None where it ended before."""
        while not living.done():
            started = next((event for event in reader.new_events() if isinstance(event, NodeStarted)), None)
            if started is not None:
                self._up[member.name] = started
                self._write_targets()
                return started
            # The first daemon's event file cannot be awaited.
            await asyncio.wait((living,), timeout=SOON_SECONDS)
        return None

    def _write_targets(self) -> None:
        targets = scrape_targets(self._up)
        if targets:
            with contextlib.suppress(OSError):  # a full disk ends no training
                atomic.write_json(self._folder / TARGETS, targets)

    def _on_signal(self, heard: int) -> None:
        if (word := WORDS.get(heard)) is not None:
            telling = asyncio.create_task(ambient.elsewhere(self._tell, word))
            self._telling.add(telling)
            telling.add_done_callback(self._telling.discard)
            return
        number = signal.SIGKILL if self._ending else signal.SIGTERM
        self._ending = True
        for process in self._processes.values():
            if process.returncode is None:
                process.send_signal(number)

    def _tell(self, word: Word) -> None:
        try:
            for line in tell_nodes(self._folder, word):
                self._say(line)
        except UserError as error:
            self._say(f"{error.message}; {error.remedy}")


def run_devices(arguments: Sequence[str], devices: str, settings: NodeSettings, say: Say) -> int:
    """`noloco-node` with these arguments on each of the devices; `settings` are what the arguments come to."""
    members = members_of(devices_of(devices), settings)
    command = (sys.executable, "-m", "noloco_node", *arguments)
    group = DeviceGroup(command, members, settings.run_folder, founds=not settings.initial_peers, say=say)
    return asyncio.run(group.run())
