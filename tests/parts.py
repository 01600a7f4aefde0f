"""Parts of the suite side by side, forked from one process that has imported what tests and daemons import.

`python -m tests.parts "tests/swarm -x" "tests/model tests/data"` runs pytest twice. Some parts run at a time, in the
order of the words, so that no core idles while the longest ends. Each part has a server of its own for the daemons
that it starts (`tests/fork_server.py`). Where nothing is forked, each part imports all for itself.
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
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from hypothesis import strategies

import noloco_node
from noloco_node.process_memory import loading
from tests import fork_server

AT_ONCE = 4
"""Parts that run at a time: on two cores the waits of some are filled by others."""
IN_MEMORY = ("ignore:Module already imported", "ignore:Slow code in plugin")
"""Warnings of libraries that pytest did not import itself."""


def _load() -> None:
    """Import what daemons and tests import, and the whole package."""
    fork_server.load()
    for module in pkgutil.walk_packages(noloco_node.__path__, f"{noloco_node.__name__}."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    strategies.text().validate()  # makes a table of all characters, which takes two seconds


def _begin(words: Sequence[str]) -> None:
    """Fork a process for one part, which ends with this one."""
    if os.fork() == 0:
        fork_server.end_with_its_parent()
        # The server ends when this part does and closes the connection. Nothing else of the part is changed: what it
        # forks by other means would inherit that.
        connection, _ = fork_server.fork_a_server()
        fork_server.install(fork_server.Client(connection))
        sys.argv = ["pytest", *(f"-W{each}" for each in IN_MEMORY), *words]
        runpy.run_module("pytest", run_name="__main__", alter_sys=True)


def _spawned(words: Sequence[str]) -> int:
    return subprocess.call([sys.executable, "-m", "pytest", *words])


def run(parts: Sequence[Sequence[str]]) -> int:
    """Run all parts to their ends; how many failed. After Ctrl-C, which each part hears by itself, none is begun."""
    if not fork_server.possible():
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return sum(code != 0 for code in pool.map(_spawned, parts))
    with loading():
        _load()
    interrupted = threading.Event()
    signal.signal(signal.SIGINT, lambda *_: interrupted.set())
    waiting, running, failed = deque(parts), 0, 0
    while running or (waiting and not interrupted.is_set()):
        if waiting and running < AT_ONCE and not interrupted.is_set():
            _begin(waiting.popleft())
            running += 1
        else:
            failed += os.wait()[1] != 0
            running -= 1
    return failed


if __name__ == "__main__":
    sys.exit(run(list(map(shlex.split, sys.argv[1:]))))
