"""Other processes of a benchmark: a second one that says where it answers in one line of JSON and ends when its input
does, and what a daemon takes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import psutil


def cpu_seconds(pid: int) -> float:
    """User and system time of a daemon and its p2pd."""
    process = psutil.Process(pid)
    return sum(sum(each.cpu_times()[:2]) for each in (process, *process.children(recursive=True)))


@contextlib.asynccontextmanager
async def other_process(module: str, *arguments: str, seconds: float) -> AsyncIterator[tuple[dict[str, Any], int]]:
    """`python -m module` with these arguments: what it printed, within so many seconds, and its process id. It ends
    with the block. Raises SystemExit where it ended without a word."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        async with asyncio.timeout(seconds):
            line = await child.stdout.readline()
        if not line:
            raise SystemExit(f"{module}: the other process ended at its start; its reason stands above")
        yield json.loads(line), child.pid
    finally:
        child.stdin.close()
        await child.wait()
