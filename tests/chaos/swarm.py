"""A swarm of real daemons under test: nodes come and go while it runs, and every fault is done from here."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import psutil

from noloco_node.launch.local_swarm import Observer, SwarmNode
from noloco_node.telemetry.events import InnerStep, NodeStarted
from tests.chaos.paced_node import OPERATION_SECONDS

T = TypeVar("T")

CONFIG = Path(__file__).with_name("chaos.yaml")
ENDLESS = "run.inner.target_tokens=1_000_000_000"
PACED = (sys.executable, "-m", "tests.chaos.paced_node")
PLAIN = (sys.executable, "-m", "noloco_node")
LOOK_SECONDS = 0.1
START_SECONDS = 180.0
STOP_SECONDS = 15.0
INTRODUCERS = 3
"""Addresses that a joiner is given; some of their nodes may be dead by then."""


def program() -> tuple[str, ...]:
    """`noloco-node`, on a device of a set speed where the environment says one."""
    return PACED if OPERATION_SECONDS in os.environ else PLAIN


class Node(SwarmNode):
    """One daemon, with what faults need to know of it."""

    killed_at: float | None = None
    """Wall time of its kill -9 by this suite."""
    launched_at: float = 0.0

    def p2pd(self) -> psutil.Process:
        """Its p2pd. LookupError where there is none."""
        for child in psutil.Process(self.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if "p2pd" in child.name() or any(part.endswith("/p2pd") for part in child.cmdline()[:1]):
                    return child
        raise LookupError(f"{self.name} has no p2pd")

    @property
    def joined_at(self) -> float:
        """Wall time of its first event."""
        assert self.started is not None
        return self.started.time


@dataclass(frozen=True)
class Place:
    """Where and how a daemon runs."""

    command: tuple[str, ...] = PACED
    prefix: tuple[str, ...] = ()
    """Before the command: another network namespace, for example."""
    options: tuple[str, ...] = ()
    """Further options of `noloco-node run`."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])


HERE = Place()


def behind(port: int, shown: int) -> Place:
    """Here, listening on `port`, and announced at the port `shown`, where something stands that passes it on."""
    announced = f"/ip4/127.0.0.1/tcp/{shown}"
    return Place(options=("--set", f"node.port={port}", "--set", f'node.announce=["{announced}"]'))


class Swarm:
    """Daemons that know each other only through the swarm. Made by `running_swarm`, which ends them all."""

    def __init__(self, folder: Path, overrides: Sequence[str], operation_seconds: float, config: Path = CONFIG) -> None:
        self.folder = folder
        self._config = config
        self.nodes: list[Node] = []
        self._overrides = [part for override in overrides for part in ("--set", override)]
        self._operation_seconds = operation_seconds
        self._temporary = Path(tempfile.mkdtemp(prefix="nlc-"))
        self._pipe = os.pipe()
        self._exits: list[asyncio.Task[None]] = []

    @property
    def live(self) -> list[Node]:
        """Nodes that are up."""
        return [node for node in self.nodes if node.running and node.started]

    def of_stage(self, stage: int) -> list[Node]:
        """Live nodes of a stage."""
        return [node for node in self.live if node.stage == stage]

    async def start(self, layout: Sequence[int], place: Callable[[int], Place] = lambda _: HERE) -> None:
        """Start one node for each stage number in `layout`, the n-th at `place(n)`; return when all are up."""
        first = await self.launch(layout[0], place(0))
        await self.until_up(first)
        others = [await self.launch(stage, place(number)) for number, stage in enumerate(layout) if number]
        for node in others:
            await self.until_up(node)

    async def launch(self, stage: int, place: Place = HERE) -> Node:
        """Start a daemon that joins through nodes that are up now; return at once."""
        node = Node(f"s{stage}-n{len(self.nodes)}", stage, self.folder / f"s{stage}-n{len(self.nodes)}", Observer())
        node.folder.mkdir(parents=True)
        node.launched_at = time.time()
        introducers = [other.started.addresses[0] for other in self.live if other.started][-INTRODUCERS:]
        with node.log.open("wb") as log:
            node.process = await asyncio.create_subprocess_exec(
                *(*place.prefix, *place.command, "run", str(self._config), *self._overrides, "--stage", str(stage)),
                *("--run-folder", str(node.folder), "--metrics-port", "0", "--end-with-stdin"),
                *place.options,
                *(("--initial-peers", *introducers) if introducers else ()),
                stdin=self._pipe[0],
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={
                    **os.environ,
                    "TMPDIR": str(self._temporary),
                    OPERATION_SECONDS: str(self._operation_seconds),
                    **place.environment,
                },
            )
        self.nodes.append(node)
        self._exits.append(asyncio.create_task(self._reap(node)))
        return node

    async def until_up(self, node: Node, within: float = START_SECONDS) -> NodeStarted:
        """Wait for a node's first event; AssertionError with its last words where it ends before."""

        def up() -> NodeStarted | None:
            assert node.running or node.started, f"{node.name}: {node.describe_exit()}\n{node.last_lines()}"
            return node.started

        return await self.until(up, within, f"{node.name} is up")

    async def until(self, check: Callable[[], T], within: float, what: str) -> T:
        """Read all events until `check()` is truthy; AssertionError naming `what` after `within` seconds."""
        deadline = time.monotonic() + within
        while True:
            self.read_events()
            if result := check():
                return result
            assert time.monotonic() < deadline, f"not within {within:g} s: {what}"
            # Event files give no sign that could be awaited.
            await asyncio.sleep(LOOK_SECONDS)

    async def holds(self, check: Callable[[], bool], within: float) -> bool:
        """Whether `check()` comes to hold within so many seconds."""
        try:
            await self.until(check, within, "")
        except AssertionError:
            return False
        return True

    async def rest(self, seconds: float, margin: float = 30.0) -> None:
        """Let so much time pass while events are read; AssertionError where that takes `margin` seconds more."""
        until = time.monotonic() + seconds
        await self.until(lambda: time.monotonic() > until, seconds + margin, "time passes")

    async def until_training(self, steps: int = 3) -> None:
        """Wait until every live node has taken `steps` inner steps."""
        await self.until(
            lambda: all(sum(isinstance(e, InnerStep) for e in node.events) >= steps for node in self.live),
            START_SECONDS,
            f"all nodes have taken {steps} inner steps",
        )

    async def until_ended(self, within: float) -> None:
        """Wait until every daemon has ended."""
        await self.until(lambda: not any(node.running for node in self.nodes), within, "the end of all nodes")

    def read_events(self) -> None:
        """Take in what all nodes have written."""
        for node in self.nodes:
            node.read_events()

    def kill(self, node: Node) -> None:
        """kill -9, as a power cut would."""
        node.killed_at = time.time()
        os.kill(node.pid, signal.SIGKILL)

    async def stop(self) -> None:
        """End what still runs, frozen ones too, and remove what it left."""
        for node in self.nodes:
            if node.running:
                node.signal_group(signal.SIGCONT)
                with contextlib.suppress(LookupError, psutil.NoSuchProcess):
                    node.p2pd().resume()
                with contextlib.suppress(ProcessLookupError):  # it has ended, and that is not noted yet
                    os.kill(node.pid, signal.SIGTERM)
        if self._exits:
            await asyncio.wait(self._exits, timeout=STOP_SECONDS)
            for node in self.nodes:
                if node.running:
                    node.signal_group(signal.SIGKILL)
            await asyncio.wait(self._exits)
        self.read_events()
        for end in self._pipe:
            os.close(end)
        shutil.rmtree(self._temporary, ignore_errors=True)

    async def _reap(self, node: Node) -> None:
        assert node.process is not None
        code = await node.process.wait()
        node.read_events()
        node.exit_code = code


@contextlib.asynccontextmanager
async def running_swarm(
    folder: Path, layout: Sequence[int], *overrides: str, operation_seconds: float = 0.05
) -> AsyncIterator[Swarm]:
    """A swarm with one node for each stage number in `layout`, all training; ended with the block."""
    swarm = Swarm(folder, overrides, operation_seconds)
    try:
        if layout:
            await swarm.start(layout)
            await swarm.until_training()
        yield swarm
    finally:
        await swarm.stop()
