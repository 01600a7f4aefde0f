"""p2pd may die or freeze; the node lives on. Started again under the same identity and port, but not for ever.

The share of its allowed descriptors is watched too. Without any left p2pd takes no new peer, and says nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeVar

import psutil

from noloco_node.aio import Pulse, cancel_and_wait, first_alone
from noloco_node.errors import ExitCode, UserError
from noloco_node.identity.peer_id import PeerId
from noloco_node.libp2p.daemon import PrivateP2P
from noloco_node.tallies import Doubling
from noloco_node.telemetry.memory_limit import AMPLE, SHORT

logger = logging.getLogger(__name__)


class DescriptorWatch:
    """Says once that p2pd has hardly a descriptor left, until that is over."""

    def __init__(self) -> None:
        self.short = False

    def look(self, used: int, limit: int) -> None:
        """`used` of `limit` are open now."""
        if self.short and used < AMPLE * limit:
            self.short = False
            logger.warning("p2pd has descriptors to spare again: %d of %d are open", used, limit)
        elif not self.short and used >= SHORT * limit:
            self.short = True
            logger.warning(
                "p2pd has %d of %d descriptors open, so hardly anybody can connect any more: somebody may be opening "
                "connections without end. Raise the limit before the start (ulimit -n 65536, LimitNOFILE, --ulimit "
                "nofile), and have the firewall limit new connections for each address (docs/operations.md)",
                used,
                limit,
            )


def descriptors_of(pid: int) -> tuple[int, int] | None:
    """How many a process has open, and how many it may have; None where that cannot be told."""
    if not hasattr(resource, "prlimit"):  # macOS
        return None
    try:
        soft, _ = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        used = psutil.Process(pid).num_fds()
    except (OSError, psutil.Error):
        return None
    return None if soft == resource.RLIM_INFINITY else (used, soft)


WINDOW_SECONDS = 600.0
RESTARTS = Doubling(1.0, 4.0)
MOST_DEATHS = 5
"""After so many deaths within the window something is wrong that starting again does not mend."""

T = TypeVar("T")

Cause = Literal["died", "frozen"]


@dataclass(frozen=True, slots=True)
class Probes:
    """How p2pd is asked whether it still answers. A busy machine must not pass for a frozen p2pd: that takes more
    than a minute without one answer."""

    every: float = 10.0
    """Seconds from an answer to the next question."""
    within: float = 15.0
    """Seconds that an answer may take."""
    misses: int = 5
    """Questions in a row without an answer after which it is frozen."""


def restart_delay(deaths: Sequence[float], now: float) -> float | None:
    """Seconds to wait before the next start after deaths at these times; None: do not start again.

    The first is at once, then 1, 2 and 4 s; deaths longer ago than the window are forgiven.
    """
    recent = sum(now - death <= WINDOW_SECONDS for death in deaths)
    if recent >= MOST_DEATHS:
        return None
    return 0.0 if recent <= 1 else RESTARTS.after(recent - 2)


class Supervisor:
    """Restarts one p2pd. `known` gives the addresses of peers to connect to afterwards, `rejoin` is awaited when that
    is done (the directory finds its peers again).
    """

    def __init__(
        self,
        daemon: PrivateP2P,
        start_seconds: float,
        known: Callable[[], Mapping[PeerId, Sequence[str]]],
        rejoin: Callable[[], Awaitable[None]],
        probes: Probes | None = None,
    ) -> None:
        self._daemon = daemon
        self._start_seconds = start_seconds
        self._known = known
        self._rejoin = rejoin
        self._probes = probes or Probes()
        self._descriptors = DescriptorWatch()
        self._deaths: list[float] = []
        self._renewing = False
        self._renewed = Pulse()
        self.restarts = 0
        """Deaths that were mended so far."""
        self.on_restart: Callable[[Cause], None] | None = None
        """Told after each restart why it was needed."""

    async def beside(self, work: Awaitable[T], *companions: Coroutine[Any, Any, None]) -> T:
        """The result of `work`, with p2pd watched and `companions` running meanwhile; they are cancelled at its end.

        Raises what `work` raises, and UserError (P2P_DAEMON) where p2pd dies too often; `work` is cancelled then.
        """
        with first_alone(UserError):
            async with asyncio.TaskGroup() as group:
                others = [group.create_task(self._watch()), *(group.create_task(each) for each in companions)]
                result = await work
                await cancel_and_wait(others)
        return result

    async def renew(self) -> None:
        """Put another p2pd in the place of a sound one, since what it was told has changed; returns once it is there.
        To be called beside the work: it is the watch that starts it. It counts as no death."""
        self._renewing, sound = True, self._daemon.pid
        for number in (signal.SIGTERM, signal.SIGKILL):  # the first lets it take its port back from a router
            if self._daemon.pid == sound:  # the next one may be starting already, which takes long on a busy machine
                with contextlib.suppress(ProcessLookupError):
                    os.kill(sound, number)
            await self._renewed.wait(5.0)
            if not self._renewing:
                return
        while self._renewing:
            await self._renewed.wait()

    async def _watch(self) -> NoReturn:
        loop = asyncio.get_running_loop()
        with self._daemon.supervised():
            while True:
                cause, status = await self._its_end()
                if self._renewing:
                    await self._start_again(None)
                    continue
                self._deaths.append(loop.time())
                delay = restart_delay(self._deaths, loop.time())
                if delay is None:
                    raise self._given_up(status)
                logger.warning("p2pd %s (status %d); starting it again", cause, status)
                await asyncio.sleep(delay)
                await self._start_again(cause)

    async def _its_end(self) -> tuple[Cause, int]:
        """Why p2pd has ended, and its exit status. One that is frozen is killed."""
        cause: Cause = "died"

        async def kill_if_frozen() -> None:
            nonlocal cause
            await self.until_frozen()
            cause = "frozen"
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._daemon.pid, signal.SIGKILL)  # it listens to nothing milder

        async with asyncio.TaskGroup() as group:
            probing = group.create_task(kill_if_frozen())
            status = await self._daemon.wait_until_dead()
            probing.cancel()
        return cause, status

    async def until_frozen(self) -> None:
        """Return once p2pd has left so many questions in a row unanswered. One that could not be put (it has died, or
        this process has no descriptor left) says nothing about it."""
        misses = 0
        while misses < self._probes.misses:
            if (open_now := descriptors_of(self._daemon.pid)) is not None:
                self._descriptors.look(*open_now)
            answered = await self._daemon.answers(self._probes.within)
            if answered is False:
                misses += 1
                logger.debug("p2pd did not answer within %g s, %d times in a row", self._probes.within, misses)
                continue
            if answered:
                misses = 0
            await asyncio.sleep(self._probes.every)

    async def _start_again(self, cause: Cause | None) -> None:
        """None: it was ended to be told something else."""
        try:
            await self._daemon.restart(self._start_seconds)
        except UserError as error:
            logger.warning("%s", error.message)
            return
        finally:
            self._renewing = False
            self._renewed.fire()
        known = self._known()
        reached = await asyncio.gather(*(self._connect(peer, addresses) for peer, addresses in known.items()))
        await self._rejoin()
        self._daemon.back()
        if cause is None:
            logger.info("p2pd tells others new addresses; %d of %d peers reached", sum(reached), len(known))
            return
        self.restarts += 1
        logger.warning(
            "p2pd is back under the same identity and port; %d of %d peers reached", sum(reached), len(known)
        )
        if self.on_restart is not None:
            self.on_restart(cause)

    async def _connect(self, peer: PeerId, addresses: Sequence[str]) -> bool:
        try:
            async with asyncio.timeout(5.0):
                return await self._daemon.connect(peer, addresses) is None
        except TimeoutError:
            return False

    def _given_up(self, status: int) -> UserError:
        return UserError(
            ExitCode.P2P_DAEMON,
            f"p2pd died {MOST_DEATHS} times within {WINDOW_SECONDS / 60:g} minutes, now with status {status}; its last "
            f"words:\n  {self._daemon.last_output()}",
            "look for a lack of memory or of open files (noloco-node doctor), then start the node again",
        )
