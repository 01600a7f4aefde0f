"""Houses behind routers that translate addresses, and a world outside with servers in several networks. Needs root."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator

from tests.chaos.namespaces import ip, why_impossible

SERVERS = ("11.1.0.1", "11.2.0.1")
"""Addresses of the world, in two networks."""
PORT = 31337


def why_no_routers() -> str:
    """Why this machine cannot do it; empty where it can (as far as can be told without trying)."""
    return why_impossible() or ("" if shutil.which("iptables") else "iptables not installed")


class Routers:
    """The world and houses behind routers of their own. Made by `houses_behind_routers`."""

    def __init__(self, houses: int) -> None:
        prefix = f"nlw{os.getpid()}"
        self.world = f"{prefix}w"
        self.routers = [f"{prefix}r{number}" for number in range(houses)]
        self.houses = [f"{prefix}h{number}" for number in range(houses)]

    @staticmethod
    def outside(house: int) -> str:
        """The address under which the world sees that house."""
        return f"11.9.{house}.2"

    async def make(self) -> None:
        """Create namespaces, cables, routes, and the translation of addresses."""
        for name in (self.world, *self.routers, *self.houses):
            await ip("netns", "add", name)
            await ip("-n", name, "link", "set", "lo", "up")
        for server in SERVERS:
            await ip("-n", self.world, "addr", "add", f"{server}/32", "dev", "lo")
        for forwarding in (self.world, *self.routers):
            await _run("ip", "netns", "exec", forwarding, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        for house in range(len(self.houses)):
            await self._connect(house)

    async def _connect(self, house: int) -> None:
        router, inside, near = self.routers[house], self.houses[house], f"11.9.{house}.1"
        await ip("-n", self.world, "link", "add", f"out{house}", *_cable("wan", router))
        await ip("-n", self.world, "addr", "add", f"{near}/24", "dev", f"out{house}")
        await ip("-n", self.world, "link", "set", f"out{house}", "up")
        await ip("-n", router, "addr", "add", f"{self.outside(house)}/24", "dev", "wan")
        await ip("-n", router, "link", "set", "wan", "up")
        await ip("-n", router, "route", "add", "default", "via", near)
        await ip("-n", router, "link", "add", "lan", *_cable("eth0", inside))
        await ip("-n", router, "addr", "add", "192.168.1.1/24", "dev", "lan")
        await ip("-n", router, "link", "set", "lan", "up")
        await ip("-n", inside, "addr", "add", "192.168.1.2/24", "dev", "eth0")
        await ip("-n", inside, "link", "set", "eth0", "up")
        await ip("-n", inside, "route", "add", "default", "via", "192.168.1.1")
        await self.translate(house, "POSTROUTING", "-o", "wan", "-j", "MASQUERADE")

    async def translate(self, house: int, chain: str, *rule: str) -> None:
        """Add a rule to the table by which a house's router translates addresses."""
        await _run("ip", "netns", "exec", self.routers[house], "iptables", "-t", "nat", "-A", chain, *rule)

    async def forward(self, house: int, port: int = PORT) -> None:
        """What comes to that port of the router goes to the house."""
        to = ("-j", "DNAT", "--to-destination", f"192.168.1.2:{port}")
        await self.translate(house, "PREROUTING", "-i", "wan", "-p", "tcp", "--dport", str(port), *to)

    async def remove(self) -> None:
        """Delete all of it; what was never made is passed over."""
        for name in (*self.houses, *self.routers, self.world):
            with contextlib.suppress(OSError):
                await ip("netns", "del", name)


def inside(name: str) -> tuple[str, ...]:
    """Runs what follows in that network namespace."""
    return ("nsenter", f"--net=/run/netns/{name}")


@contextlib.asynccontextmanager
async def houses_behind_routers(houses: int) -> AsyncIterator[Routers]:
    """So many houses, removed with the block. OSError where the system does not allow it."""
    routers = Routers(houses)
    try:
        await routers.make()
        yield routers
    finally:
        await routers.remove()


def _cable(end: str, name: str) -> tuple[str, ...]:
    return ("type", "veth", "peer", "name", end, "netns", name)


async def _run(*command: str) -> None:
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    _, complaint = await process.communicate()
    if process.returncode:
        raise OSError(f"{' '.join(command)}: {complaint.decode().strip()}")
