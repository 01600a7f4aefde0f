"""The end of a run as a seed sees it: it trains with nobody, and asks the origins themselves whether they are at work.

A record alone decides nothing, since a key costs nothing. One record of a free key without a process had a seed forget
an ended run for good.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from noloco_node import ambient
from noloco_node.config.run_spec import RunSpec
from noloco_node.directory.health_checks import HealthChecks
from noloco_node.directory.live_estimate import is_there
from noloco_node.directory.records import SERVING, Directory, PeerRecord
from noloco_node.directory.signed_end import SignedEnd
from noloco_node.transport.interface import Transport

LOOKS_A_LIFE = 3
"""Looks within the life of a record, so that no last word is missed."""


class LastWords:
    """Follows the origins of a run. `end` gets what they say; `keep` is told once that the run has come to its end."""

    def __init__(
        self, transport: Transport, directory: Directory, spec: RunSpec, end: SignedEnd, keep: Callable[[], None]
    ) -> None:
        self._transport = transport
        self._directory = directory
        self._end = end
        self._keep = keep
        self._life = spec.limits.record_seconds
        self.checks = HealthChecks(
            transport,
            directory,
            spec.run_id,
            lambda: None,
            self._life,
            self._introduced,
            self._judge,
            ambient.chance(),
        )
        """Asks the origins that records introduce whether they are there."""

    @property
    def over(self) -> bool | None:
        """Whether the run is over; None where this seed has never seen an origin at work."""
        return self._end.ended or (False if self._end.origins else None)

    async def run(self) -> None:
        """Look again and again, and ask the origins, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.checks.run())
            while True:
                await self.look()
                await asyncio.sleep(self._life / LOOKS_A_LIFE)

    async def look(self) -> None:
        """Read the records anew."""
        await self._directory.refresh()
        self.checks.look()
        self._judge()

    def _introduced(self) -> list[PeerRecord]:
        view, now = self._directory.view, self._directory.now()
        own = self._transport.peer_id
        return [record for record in view.live(0, now) if record.peer_id != own] if view.stages else []

    def _judge(self) -> None:
        known = self._transport.peer_stats
        self._end.look(lambda record: record.state in SERVING and is_there(known, record))
        if self._end.known and not self._end.ended:
            self._end.ended = True
            self._keep()
