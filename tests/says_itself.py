"""A process that says what it is, for the test of processes that are forked instead of spawned.

Run as `python -m tests.says_itself HOW`. It prints one line of JSON, and one to stderr, and then ends as HOW says. That
may be with an exit code, by an exception ("fails"), with words ("says"), or at the end of its code ("ends"). With
"waits" it does not end before it is told to.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any


def itself() -> dict[str, Any]:
    """What a process can see of how it was started."""
    return {
        "arguments": sys.argv[1:],
        "environment": {name: text for name, text in os.environ.items() if name != "PYTEST_CURRENT_TEST"},
        "folder": os.getcwd(),
        "path": sys.path[0],
        "parent": os.getppid(),
        "leads a session": os.getsid(0) == os.getpid(),
        "signals": [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)],
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "files": sorted(int(name) for name in os.listdir("/proc/self/fd") if Path("/proc/self/fd", name).exists()),
        "threads": len(threading.enumerate()),
        "name": sys.modules["__main__"].__spec__.name,
        "buffered by lines": [sys.stdout.line_buffering, sys.stderr.line_buffering],
        "read": "" if sys.stdin.isatty() else sys.stdin.readline(),
    }


def main() -> None:
    """Speak, and end."""
    how = sys.argv[1]
    print(json.dumps([itself(), random.random()]), flush=True)
    print("a complaint", file=sys.stderr)
    if how == "waits":
        time.sleep(600)
    if how == "fails":
        raise ValueError("a failure")
    if how != "ends":
        sys.exit(int(how) if how.isdigit() else how)


if __name__ == "__main__":
    main()
