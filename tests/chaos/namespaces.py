"""Two network namespaces joined by a bridge that can be taken down: a partition as a cut cable makes it.

Packets vanish without a word on both sides, and all addresses stay. Needs root.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import sys
from collections.abc import AsyncIterator

from tests.chaos.swarm import Place

NETWORK = "10.77.0"


def why_impossible() -> str:
    """Why this machine cannot do it; empty where it can (as far as can be told without trying)."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "nsenter") if shutil.which(tool) is None]
    return f"{', '.join(missing)} not installed" if missing else ""


class Halves:
    """Two halves of a network. Made by `two_halves`."""

    def __init__(self) -> None:
        prefix = f"nlc{os.getpid()}"
        self.names = (f"{prefix}a", f"{prefix}b")
        self.middle = f"{prefix}m"

    def place(self, half: int) -> Place:
        """Where a node of half 0 or 1 runs."""
        return Place(
            prefix=("nsenter", f"--net=/run/netns/{self.names[half]}"),
            options=("--set", f"node.host={self.address(half)}"),
        )

    def address(self, half: int) -> str:
        """The one address of that half."""
        return f"{NETWORK}.{half + 1}"

    async def cut(self) -> None:
        """From now on nothing passes."""
        await ip("-n", self.middle, "link", "set", "bridge", "down")

    async def heal(self) -> None:
        """It passes again."""
        await ip("-n", self.middle, "link", "set", "bridge", "up")

    async def reaches(self) -> bool:
        """Tell whether a packet of the first half comes to the second. It asks the kernel for a connection to a closed
        port, which is refused at once if the way is open."""
        code = f"import socket; s = socket.socket(); s.settimeout(1); exit(s.connect_ex(('{self.address(1)}', 9)))"
        inside = await asyncio.create_subprocess_exec(*self.place(0).prefix, sys.executable, "-c", code)
        return await inside.wait() == errno.ECONNREFUSED

    async def make(self) -> None:
        """Create namespaces, bridge and cables."""
        await ip("netns", "add", self.middle)
        await ip("-n", self.middle, "link", "add", "bridge", "type", "bridge")
        await ip("-n", self.middle, "link", "set", "bridge", "up")
        for half, name in enumerate(self.names):
            await ip("netns", "add", name)
            await ip("-n", name, "link", "set", "lo", "up")
            port = f"port{half}"
            await ip("-n", self.middle, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            await ip("-n", self.middle, "link", "set", port, "master", "bridge", "up")
            await ip("-n", name, "addr", "add", f"{self.address(half)}/24", "dev", "eth0")
            await ip("-n", name, "link", "set", "eth0", "up")

    async def remove(self) -> None:
        """Delete all of it; what was never made is passed over."""
        for name in (*self.names, self.middle):
            with contextlib.suppress(OSError):
                await ip("netns", "del", name)


async def ip(*arguments: str) -> None:
    """Run `ip` with these arguments. OSError with its complaint."""
    process = await asyncio.create_subprocess_exec("ip", *arguments, stderr=asyncio.subprocess.PIPE)
    _, complaint = await process.communicate()
    if process.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {complaint.decode().strip()}")


@contextlib.asynccontextmanager
async def two_halves() -> AsyncIterator[Halves]:
    """Two joined halves, removed with the block. OSError where the system does not allow it."""
    halves = Halves()
    try:
        await halves.make()
        yield halves
    finally:
        await halves.remove()
