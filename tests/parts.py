"""Parts of the suite side by side, forked from one process that has imported what tests and daemons import.

`python -m tests.parts "tests/swarm -x" "tests/model tests/data"` runs pytest twice. Each part has a server of its own
for the daemons that it starts (`tests/fork_server.py`). Where nothing is forked, each part imports all for itself.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import runpy
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence

from hypothesis import strategies

import noloco_node
from noloco_node.process_memory import loading
from tests import fork_server

IN_MEMORY = ("ignore:Module already imported", "ignore:Slow code in plugin")
"""Warnings of libraries that pytest did not import itself."""


def _load() -> None:
    """Import what daemons and tests import, and the whole package."""
    fork_server.load()
    for module in pkgutil.walk_packages(noloco_node.__path__, f"{noloco_node.__name__}."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    strategies.text().validate()  # makes a table of all characters, which takes two seconds


def _forked(words: Sequence[str]) -> int:
    """Begin one part; the id of its process, which ends with this one."""
    process = os.fork()
    if process == 0:
        fork_server.end_with_its_parent()
        # The server ends when this part does and closes the connection. Nothing else of the part is changed: what it
        # forks by other means would inherit that.
        connection, _ = fork_server.fork_a_server()
        fork_server.install(fork_server.Client(connection))
        sys.argv = ["pytest", *(f"-W{each}" for each in IN_MEMORY), *words]
        runpy.run_module("pytest", run_name="__main__", alter_sys=True)
    return process


def run(parts: Sequence[Sequence[str]]) -> int:
    """Run all parts to their ends; how many failed."""
    if not fork_server.possible():
        spawned = [subprocess.Popen([sys.executable, "-m", "pytest", *words]) for words in parts]
        return sum(process.wait() != 0 for process in spawned)
    with loading():
        _load()
    processes = [_forked(words) for words in parts]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches each part by itself, and each tells what it has done
    return sum(os.waitpid(process, 0)[1] != 0 for process in processes)


if __name__ == "__main__":
    sys.exit(run(list(map(shlex.split, sys.argv[1:]))))
