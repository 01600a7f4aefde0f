"""The end of a run as a seed knows it: a fact that its origins have signed, and that is kept. Nothing takes it back.

An origin trains at stage 0, and says in its signed record that it has come to the run's end. A record alone decides
nothing, since a key costs nothing: an origin counts that has answered here while it trained. The owner's word counts
alone. One record of a free key without a process had a seed forget an ended run for good.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from noloco_node import ambient
from noloco_node.config.run_spec import RunSpec
from noloco_node.directory.health_checks import HealthChecks
from noloco_node.directory.live_estimate import is_there
from noloco_node.directory.records import SERVING, Directory, LiveRecord, PeerRecord, PeerState
from noloco_node.directory.signed_end import SignedEnd, end_word
from noloco_node.identity.peer_id import PeerId
from noloco_node.peer_table import PeerTable
from noloco_node.transport.interface import Transport

LOOKS_A_LIFE = 3
"""Looks within the life of a record, so that no last word is missed."""


def is_over(origins: Iterable[PeerRecord], last_tokens: float) -> bool:
    """Whether more than half of these origins have come to the run's end. One that has left without a word counts
    against it, but not where its clock was beyond `last_tokens`: it was told to leave just before the end."""
    words = [each.finished for each in origins if not _left_at_the_end(each, last_tokens)]
    return 2 * sum(words) > len(words)


def _left_at_the_end(record: PeerRecord, last_tokens: float) -> bool:
    return record.state is PeerState.GONE and not record.finished and record.clock > last_tokens


class LastWords:
    """Follows the origins of a run. `over`: the end is known from an earlier life; `last_tokens` is the clock from
    which a run is near its end. `end` gets the words on which the end stands, and `keep` is told once that it has
    come."""

    def __init__(
        self,
        transport: Transport,
        directory: Directory,
        spec: RunSpec,
        over: bool,
        last_tokens: float,
        end: SignedEnd,
        keep: Callable[[], None],
    ) -> None:
        self._transport = transport
        self._directory = directory
        self._owner = spec.access.owner
        self._last_tokens = last_tokens
        self._end = end
        self._keep = keep
        self._life = spec.limits.record_seconds
        self._at_work = PeerTable[PeerId, None]()
        """Origins that have answered here while their records said that they train."""
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
        self.over = over
        self.knows = over
        """Whether it has ever seen an origin at work, in this life or in an earlier one that saw the end."""

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
        for record in self._introduced():
            if record.state in SERVING and is_there(known, record):
                self._at_work[PeerId(record.peer_id)] = None
        self.knows = self.knows or bool(self._at_work)
        rows = self._rows()
        owners = [row for row in rows if row.record.finished and row.record.peer_id == self._owner]
        seen = [row for row in rows if PeerId(row.record.peer_id) in self._at_work]
        if not self.over and (owners or is_over((row.record for row in seen), self._last_tokens)):
            self.over = self.knows = True
            words = [row for row in owners or seen if row.record.finished]
            self._end.origins.update({PeerId(row.record.peer_id): None for row in words})
            self._end.take(map(end_word, words))
            self._keep()

    def _rows(self) -> list[LiveRecord]:
        """Of stage 0, those that live, farewells among them."""
        view, now = self._directory.view, self._directory.now()
        return [row for row in view.stages[0].values() if row.expires > now] if view.stages else []
