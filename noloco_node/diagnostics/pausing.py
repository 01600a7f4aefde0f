"""Tell nodes on this machine to rest or to go on, and wait for what they say to it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from noloco_node import ambient
from noloco_node.aio import STUCK_SECONDS
from noloco_node.diagnostics.status import Events, node_folders
from noloco_node.errors import ExitCode, UserError
from noloco_node.node.interrupts import WORDS, Word
from noloco_node.storage.held import NODE_LOCK
from noloco_node.storage.run_folder import RunFolder
from noloco_node.telemetry.events import AnyEvent, Doing, EventReader, NodeStopped
from noloco_node.telemetry.words import one_line

ABOUT_PROCESSES = Path("/proc")
SIGNALS = {word: signal.Signals(number) for number, word in WORDS.items()}


def tell_nodes(path: Path, word: Word) -> Iterator[str]:
    """Send the word to the node in this folder, or to all nodes with folders in it; a line for what becomes of each.
    UserError (RUN_FOLDER) if none runs there, (FAILURE) if one cannot be told, after the lines of all others."""
    running = [RunFolder(member) for member in node_folders(path)]
    running = [folder for folder in running if folder.in_use]
    if not running:
        raise UserError(
            ExitCode.RUN_FOLDER,
            f"no node runs in '{path}': there is nothing to {word}",
            "name the run folder of a running node (runs/node where --run-folder was not given)",
        )
    asked, untold = list[_Asked](), dict[Path, UserError]()
    for folder in running:
        try:
            asked.append(_Asked(folder, word))
        except UserError as error:
            if folder.in_use:
                untold[folder.path] = error
            else:
                yield one_line(f"{folder.path}: it has ended just now")
    until = ambient.monotonic() + STUCK_SECONDS  # a node that trains takes two
    for one in asked:
        yield one_line(f"{one.folder.path}: {one.answer(until)}")
    if untold:
        told = "; ".join(f"{path}: {error.message}" for path, error in untold.items())
        raise UserError(ExitCode.FAILURE, told, next(iter(untold.values())).remedy)


class _Asked:
    """A node that has been told the word just now."""

    def __init__(self, folder: RunFolder, word: Word) -> None:
        self.folder, self._word = folder, word
        events = Events(folder.events)
        doing, stopped = events.last(Doing), events.last(NodeStopped)
        self._doing = None if folder.silent_so_far or events.follows(stopped, doing) else doing
        self._reader = EventReader(folder.events)
        list(self._reader.new_events())
        _send(folder, _pid_of(folder), word)

    def answer(self, until: float) -> str:
        """What the node makes of it, in one line; what it does then, if it says nothing until that monotonic time."""
        if self._is_so(self._doing):
            return "it is paused already" if self._word == "pause" else "it is not paused"
        while ambient.monotonic() < until:
            for event in self._reader.new_events():
                if (said := self._heard(event)) is not None:
                    return said
            time.sleep(0.1)
        if self._doing is not None and self._doing.what in ("finishing", "draining"):
            return f"it is about to leave, with everything saved, and does not {self._word}"
        now = "it is still starting" if self._doing is None else f"it is {self._doing.what.replace('_', ' ')}"
        return f"it has been told, and {now}; it will {self._word} as soon as it can, and say so (noloco-node status)"

    def _heard(self, event: AnyEvent) -> str | None:
        if isinstance(event, NodeStopped):
            return "it has left, with everything saved"
        if isinstance(event, Doing):
            self._doing = event
            if self._is_so(event):
                return event.detail if self._word == "pause" else "it goes on"
        return None

    def _is_so(self, doing: Doing | None) -> bool:
        return doing is not None and (doing.what == "paused") == (self._word == "pause")


def _pid_of(folder: RunFolder) -> int:
    pid = folder.pid
    if pid is None:
        raise UserError(
            ExitCode.FAILURE,
            f"the process of the node in '{folder.path}' is not known: it starts, or leaves with everything saved",
            "say it again in a moment, or send SIGUSR1 (pause) or SIGUSR2 (resume) to its process id",
        )
    return pid


def _send(folder: RunFolder, pid: int, word: Word) -> None:
    """Raise UserError (FAILURE) where the process is not the node, or does not listen: the signal would end it."""
    number = SIGNALS[word]
    remedy = f"wait until it is up; where it runs in a container, tell it there: docker exec NAME noloco-node {word}"
    if not ABOUT_PROCESSES.is_dir():  # macOS
        raise UserError(
            ExitCode.FAILURE,
            f"this system does not say whether process {pid} listens for {number.name}",
            f"tell it yourself once it trains (noloco-node status): kill -{number.name.removeprefix('SIG')} {pid}",
        )
    try:
        if not _has_open(pid, folder.path / NODE_LOCK):
            raise UserError(ExitCode.FAILURE, f"process {pid} of this machine is not the node", remedy)
        if not _listens(pid, number):
            what = f"process {pid} does not listen for {number.name}: it is not up yet, or is about to end"
            raise UserError(ExitCode.FAILURE, what, remedy)
        os.kill(pid, number)
    except OSError as error:
        why = error.strerror or str(error)
        raise UserError(ExitCode.FAILURE, f"process {pid} cannot be told to {word}: {why}", remedy) from None


def _has_open(pid: int, file: Path) -> bool:
    """Whether the process has this file open. A node in a container has written down the number that it has there, and
    outside that is another process."""
    wanted = file.stat()
    for link in (ABOUT_PROCESSES / str(pid) / "fd").iterdir():
        with contextlib.suppress(OSError):  # it was closed just now
            if os.path.samestat(link.stat(), wanted):
                return True
    return False


def _listens(pid: int, number: int) -> bool:
    """Whether the process has a handler for this signal, as its system says."""
    lines = (ABOUT_PROCESSES / str(pid) / "status").read_text("ascii", "replace").splitlines()
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)
