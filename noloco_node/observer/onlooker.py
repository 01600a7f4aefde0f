"""Looks at a swarm without taking part in it: reads the directory, asks the peers that it shows, and publishes
nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from noloco_node import ambient
from noloco_node.config.run_spec import RunSpec
from noloco_node.directory.health_checks import SWEEP_SECONDS, HealthChecks
from noloco_node.directory.live_estimate import is_there
from noloco_node.directory.membership import REFRESH_SECONDS
from noloco_node.directory.records import Directory, PeerRecord, look_for_others
from noloco_node.identity.peer_id import PeerId
from noloco_node.observer.swarm_view import nothing_seen, view_swarm
from noloco_node.telemetry.swarm_state import SwarmView
from noloco_node.transport.interface import Transport
from noloco_node.trust.admission import Access
from noloco_node.trust.filtered_directory import ScreenedDirectory

CALLS_A_SECOND = 16.0
"""An onlooker makes so many calls a second, four times those of a node, which knows its neighbours by work as well. It
asks 960 nodes within the time that an answer counts. Of a larger swarm, those that were asked of late are counted, and
the others are claimed."""


class Onlooker:
    """An onlooker. It does not show peers that cannot take part: outsiders of an invited run, nodes of another protocol
    version.

    `over`: the run has come to its end, as far as is known before the first look. `wall` gives seconds since 1970.
    """

    def __init__(
        self,
        transport: Transport,
        directory: Directory,
        spec: RunSpec,
        *,
        over: bool = False,
        wall: Callable[[], float] = ambient.wall,
    ) -> None:
        self._transport = transport
        self._directory = ScreenedDirectory(directory, Access(spec))
        self._spec = spec
        self._wall = wall
        self._roll = HealthChecks(
            transport,
            self._directory,
            spec.run_id,
            lambda: None,
            spec.limits.record_seconds,
            self._introduced,
            lambda: None,
            ambient.chance(),
            calls_a_second=CALLS_A_SECOND,
        )
        self.last = nothing_seen(spec, over=over)
        """What was seen last. It is replaced as a whole: any thread may read it."""

    async def first_look(self, seconds: float) -> SwarmView:
        """Look until a node is seen, `seconds` at most, and ask everybody once whether it is there."""
        await look_for_others(self._directory, self._transport.peer_id, seconds)
        await self._roll.sweep(SWEEP_SECONDS)
        return self._see()

    async def run(self, on_look: Callable[[SwarmView], None] = lambda _: None) -> None:
        """Look every two seconds, or oftener where records live short, until cancelled."""
        pause = min(REFRESH_SECONDS, self._spec.limits.record_seconds / 5)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._roll.run())
            while True:
                await self._directory.refresh()
                self._roll.look()
                on_look(self._see())
                await asyncio.sleep(pause)

    def _see(self) -> SwarmView:
        known, now = self._transport.peer_stats, self._directory.now()
        answering = {record.peer_id for record in self._introduced() if is_there(known, record)}
        self.last = view_swarm(self._spec, self._directory.view, answering, self.last, now, self._wall())
        return self.last

    def _introduced(self) -> list[PeerRecord]:
        now, own = self._directory.now(), self._transport.peer_id
        view = self._directory.view
        records = [record for stage in range(len(view.stages)) for record in view.live(stage, now)]
        return [record for record in records if PeerId(record.peer_id) != own]
