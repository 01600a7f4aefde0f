"""Many daemons on this machine: for a demo, a test, a soak. They know each other only through the swarm."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from asyncio.subprocess import Process
from collections.abc import Sequence
from pathlib import Path

from noloco_node import ambient
from noloco_node.ambient import SOON_SECONDS
from noloco_node.config.environment import variable_of, without_settings
from noloco_node.config.load import Config, render
from noloco_node.errors import ExitCode, UserError, describe_exit
from noloco_node.storage import atomic
from noloco_node.storage.checkpoint import CheckpointFolder
from noloco_node.storage.held import SHARED_PREFIX
from noloco_node.storage.run_folder import RunFolder
from noloco_node.telemetry.events import AnyEvent, EventReader, NodeReassigned, NodeStarted, NodeStopped
from noloco_node.telemetry.web import TARGETS, scrape_targets

DAEMON = (sys.executable, "-m", "noloco_node", "run")
"""The command of a daemon; configuration file and options follow."""
STOP_SECONDS = 6.0
"""Seconds from SIGTERM to SIGKILL; a daemon's own drain ends before."""
ORDERLY_EXITS = (ExitCode.OK, ExitCode.INTERRUPTED)


def signal_all(leader: int, number: signal.Signals) -> None:
    """Signal a daemon and its children, since one that was killed could stop none; nothing where all are gone."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, number)


class Observer:
    """Is told what happens in a local swarm; a subclass overrides what it wants to know."""

    def on_event(self, node: SwarmNode, event: AnyEvent) -> None:
        """A node has written an event."""

    def on_death(self, node: SwarmNode) -> None:
        """A node's process ended out of order, and not because the swarm was stopped."""

    def on_poll(self) -> None:
        """All event files were read; called several times a second."""


class SwarmNode:
    """One daemon: its process, its folder and the events it has written so far."""

    def __init__(self, name: str, stage: int, folder: Path, observer: Observer, *, keeps: bool = True) -> None:
        """`keeps`: its events stay in `events`. Each takes a kilobyte, to the end of the swarm."""
        self.name = name
        self.stage = stage
        self.folder = folder
        self.log = RunFolder(folder).log
        """Its standard output and error."""
        self._keeps, self.events = keeps, list[AnyEvent]()
        self.started: NodeStarted | None = None
        self.stopped: NodeStopped | None = None
        self.serves = stage
        """The stage that it serves now, or served last; `stage` is the one that it began with."""
        self.process: Process | None = None
        self.exit_code: int | None = None
        """None while it runs; negative: the signal that ended it."""
        self._observer = observer
        self._reader = EventReader(RunFolder(folder).events)

    @property
    def pid(self) -> int:
        """Process id, which is also its process group's. RuntimeError before it was started."""
        if self.process is None:
            raise RuntimeError(f"{self.name} was not started")
        return self.process.pid

    @property
    def running(self) -> bool:
        """True from its start to its end."""
        return self.process is not None and self.exit_code is None

    @property
    def died(self) -> bool:
        """True where the process ended out of order: killed, failed, or without its last event."""
        if self.exit_code is None:
            return False
        return self.exit_code not in ORDERLY_EXITS or self.stopped is None or self.stopped.reason == "failed"

    def read_events(self) -> None:
        """Take in what it has written since the last call."""
        for event in self._reader.new_events():
            if self._keeps:
                self.events.append(event)
            if isinstance(event, NodeStarted):
                self.started, self.stopped, self.serves = event, None, event.stage
            elif isinstance(event, NodeReassigned):
                self.serves = event.stage
            elif isinstance(event, NodeStopped):
                self.stopped = event
            self._observer.on_event(self, event)

    def recall(self) -> None:
        """Take in what it wrote in earlier lives; they are over, whatever their last word was."""
        self.read_events()
        self.started = None

    @property
    def ended(self) -> bool:
        """True where the run has come to its end in this node's folder."""
        return RunFolder(self.folder).ended

    def brings_state(self, run_id: str) -> bool:
        """Whether the run has not ended in its folder and it can go on from a checkpoint. Reads it whole."""
        return not self.ended and CheckpointFolder(RunFolder(self.folder).checkpoints, 1).any_sound(run_id)

    def describe_exit(self) -> str:
        """Exit code with its meaning, for a person."""
        return "still running" if self.exit_code is None else describe_exit(self.exit_code)

    def last_lines(self) -> str:
        """The end of its log, indented."""
        if not self.log.exists():
            return ""
        with self.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
            text = file.read().decode(errors="replace")
        return "\n".join("    " + line for line in text.splitlines()[-8:])

    def signal_group(self, number: signal.Signals) -> None:
        """Signal the daemon and its children; nothing where all are gone."""
        signal_all(self.pid, number)


class LocalSwarm:
    """stages × replicas daemons as processes of their own, each in its own session.

    `start` brings them up, `wait` returns when all have ended, `stop` ends them. After `stop` no process and no socket
    of theirs is left. They end by themselves should this process vanish: only it can write to their standard input, a
    pipe. Not reusable: one object, one run.
    """

    def __init__(
        self,
        config: Config,
        run_folder: Path,
        *,
        observer: Observer | None = None,
        command: Sequence[str] = DAEMON,
        keeps_events: bool = True,
    ) -> None:
        self.config = _for_daemons(config)
        self.run_folder = run_folder
        self._observer = observer or Observer()
        self._stopping = False
        self.nodes = tuple(
            SwarmNode(name, stage, run_folder / "nodes" / name, self._observer, keeps=keeps_events)
            for name, stage in layout(config).items()
        )
        self._command = tuple(command)
        self._exits: dict[str, asyncio.Task[None]] = {}
        self._pipe: tuple[int, int] | None = None
        self._temporary: Path | None = None

    def node(self, name: str) -> SwarmNode:
        """The node `sS-rR`. KeyError where there is none."""
        return {node.name: node for node in self.nodes}[name]

    @property
    def start_seconds(self) -> float:
        """For all daemons to be up."""
        return self.config.local_swarm.start_seconds + self._compiling_seconds

    @property
    def _compiling_seconds(self) -> float:
        """Each daemon that compiles its stage has as long again: they share the machine's cores."""
        return self.config.local_swarm.start_seconds * len(self.nodes) if self.config.node.compile else 0.0

    async def start(self) -> None:
        """Start the first daemon, and once it is up all others with its address; return when all are up.

        If the run folder holds this run already, all of them go on. If the run has come to its end there for a replica
        of every stage, none is started.

        Raises UserError: RUN_FOLDER if the folder holds another run or cannot be written. It raises the exit code of a
        daemon that ends during the start, and NODE_DIED if they are not up within `start_seconds`.
        """
        config_path = self.prepare_folder()
        for node in self.nodes:
            node.recall()
        if {node.stage for node in self.nodes if node.ended} == set(range(self.config.run.stages)):
            return
        self._pipe = os.pipe()
        self._temporary = Path(tempfile.mkdtemp(prefix=SHARED_PREFIX))
        try:
            async with asyncio.timeout(self.start_seconds):
                first, *others = await ambient.elsewhere(self.in_order_of_start)
                addresses = (await self._up(first, config_path, ())).addresses
                for node in others:
                    await self._launch(node, config_path, addresses)
                for node in others:
                    await self._until_up(node)
        except TimeoutError:
            missing = [node for node in self.nodes if node.started is None]
            seconds, names = self.config.local_swarm.start_seconds, ", ".join(node.name for node in missing)
            more = f" and {self._compiling_seconds:g} s for compiling" if self._compiling_seconds else ""
            raise UserError(
                ExitCode.NODE_DIED,
                f"{names} not up within local_swarm.start_seconds ({seconds:g}){more}",
                f"raise it if this machine is slow; what they said is in {missing[0].log}",
            ) from None
        with contextlib.suppress(OSError):  # a full disk has the screen to name it, and ends no swarm that trains
            up = {node.name: node.started for node in self.nodes if node.started is not None}
            atomic.write_json(self.run_folder / TARGETS, scrape_targets(up))

    def in_order_of_start(self) -> list[SwarmNode]:
        """The nodes, first one that brings the run's state with it. One with damaged checkpoints would start the run
        from the seed, and can take the state from nodes that are up already."""
        run_id, nodes = self.config.run.run_id, sorted(self.nodes, key=lambda node: node.ended)
        first = next((node for node in nodes if node.brings_state(run_id)), nodes[0])
        return [first, *(node for node in nodes if node is not first)]

    async def wait(self) -> None:
        """Return when every daemon has ended, reading events meanwhile."""
        while any(node.running for node in self.nodes):
            pending = [task for task in self._exits.values() if not task.done()]
            await asyncio.wait(pending, timeout=SOON_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            self.read_events()

    def read_events(self) -> None:
        """Take in what all nodes have written since the last call."""
        for node in self.nodes:
            node.read_events()
        self._observer.on_poll()

    def kill(self, node: SwarmNode) -> None:
        """kill -9, as a power cut would: the daemon gets no chance to say anything."""
        if node.running:
            os.kill(node.pid, signal.SIGKILL)

    def kill_all(self) -> None:
        """kill -9 for every daemon and its children, at once."""
        for node in self.nodes:
            if node.running:
                node.signal_group(signal.SIGKILL)

    async def stop(self, grace: float = STOP_SECONDS) -> None:
        """End what still runs: SIGTERM, after `grace` seconds SIGKILL, then remove what sockets are left."""
        self._stopping = True
        for node in self.nodes:
            if node.running:
                os.kill(node.pid, signal.SIGTERM)
        if self._exits:
            await asyncio.wait(self._exits.values(), timeout=grace)
            self.kill_all()
            await asyncio.wait(self._exits.values())
        self.read_events()
        if self._pipe:
            os.close(self._pipe[0])
            os.close(self._pipe[1])
            self._pipe = None
        if self._temporary:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def prepare_folder(self) -> Path:
        """Make the folders, or find there what an earlier life of the same swarm left; the configuration's file.

        Raises UserError (RUN_FOLDER) where another run lies there, and writes nothing then, or where nothing can be
        written.
        """
        self._check_folder()
        folder = RunFolder(self.run_folder)
        try:
            self.run_folder.mkdir(parents=True, exist_ok=True)
            folder.claim(self.config.run.run_id, self.config.run.name)
            for node in self.nodes:
                node.folder.mkdir(parents=True, exist_ok=True)
            config_path = self.run_folder / "config.yaml"
            config_path.write_text(render(self.config), encoding="utf-8")
        except OSError as error:
            raise UserError(
                ExitCode.RUN_FOLDER,
                f"the run folder {self.run_folder} cannot be written: {error.strerror}",
                "choose a folder that you may write to with --run-folder",
            ) from None
        return config_path

    def _check_folder(self) -> None:
        folder, run = RunFolder(self.run_folder), self.config.run
        folder.judge(run.run_id, run.name)
        if (self.run_folder / "nodes").exists() and not folder.claimed:
            raise UserError(
                ExitCode.RUN_FOLDER,
                f"the run folder {self.run_folder} already holds a run, and not by this version of noloco-node",
                "choose another with --run-folder, or remove it",
            )

    async def _up(self, node: SwarmNode, config_path: Path, peers: Sequence[str]) -> NodeStarted:
        await self._launch(node, config_path, peers)
        return await self._until_up(node)

    async def _launch(self, node: SwarmNode, config_path: Path, peers: Sequence[str]) -> None:
        assert self._pipe is not None
        assert self._temporary is not None
        options = ["--stage", str(node.stage), "--run-folder", str(node.folder), "--end-with-stdin"]
        joining = ["--initial-peers", *peers] if peers else []
        with node.log.open("ab") as log:
            node.process = await asyncio.create_subprocess_exec(
                *self._command,
                str(config_path),
                *options,
                *joining,
                stdin=self._pipe[0],
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**without_settings(os.environ), variable_of("name"): node.name, "TMPDIR": str(self._temporary)},
            )
        self._exits[node.name] = asyncio.create_task(self._reap(node), name=f"exit of {node.name}")

    async def _reap(self, node: SwarmNode) -> None:
        assert node.process is not None
        code = await node.process.wait()
        # A daemon that was killed could stop no child of its own.
        node.signal_group(signal.SIGKILL)
        node.read_events()
        node.exit_code = code
        if node.started and node.died and not self._stopping:
            self._observer.on_death(node)

    async def _until_up(self, node: SwarmNode) -> NodeStarted:
        while node.started is None:
            await asyncio.wait([self._exits[node.name]], timeout=SOON_SECONDS)
            self.read_events()
            for any_node in self.nodes:
                if any_node.exit_code is not None and any_node.started is None:
                    raise _failed_start(any_node)
        return node.started


def layout(config: Config) -> dict[str, int]:
    """Stage by node name, `sS-rR`, in the order of their start: every stage has a replica before any has two."""
    replicas, stages = range(config.local_swarm.replicas), range(config.run.stages)
    return {f"s{stage}-r{replica}": stage for replica in replicas for stage in stages}


def _for_daemons(config: Config) -> Config:
    """The configuration that all daemons share: what must differ between them is left to the system to choose."""
    node = config.node.model_copy(
        update={
            "identity": None,
            "start_replicas": config.local_swarm.replicas,
            "initial_peers": (),
            "announce": (),
            "host": "127.0.0.1",
            "port": 0,
            "metrics_host": "127.0.0.1",
            "metrics_port": 0,
            # All daemons stop at once: none is left to finish the others' work, and longer is waiting for nothing.
            "drain_seconds": min(config.node.drain_seconds, 2.0),
        }
    )
    return config.model_copy(update={"node": node})


def _failed_start(node: SwarmNode) -> UserError:
    known = node.exit_code in set(ExitCode) and node.exit_code != ExitCode.OK
    return UserError(
        ExitCode(node.exit_code) if known else ExitCode.NODE_DIED,
        f"{node.name} ended during the start ({node.describe_exit()}); its last lines:\n{node.last_lines()}",
        f"see above, or the whole log: {node.log}",
    )
