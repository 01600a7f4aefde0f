"""The second process of a benchmark: it says where it answers in one line of JSON, and ends when its input does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from typing import Any


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
