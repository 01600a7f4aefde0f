"""A paced daemon that also writes down what it sees and does.

It notes the peers that each look at the directory showed, and the banned ones. It also notes the peers
that it asked for an exchange, a state or a copy, and the strangers that were there to be asked. The loop lag in its
books is its own alone. What its thread waited for a core goes to the notes, since this machine has few.
Run as `python -m tests.chaos.watched_node run ...`; the file is named in the environment. Beside it lies the list of
the honest nodes, once that is known.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, cast

from noloco_node import ambient
from noloco_node.accounting import stats
from noloco_node.aio import LoopLag
from noloco_node.averaging import session as exchange_messages
from noloco_node.directory.dht import DhtDirectory
from noloco_node.directory.live_estimate import is_there
from noloco_node.directory.records import DirectoryView
from noloco_node.identity.peer_id import PeerId
from noloco_node.peers.scorecard import Bans, Offence, PeerStats
from noloco_node.state_transfer import copies as copy_messages
from noloco_node.state_transfer import fetch as state_messages
from noloco_node.transport.interface import Transport
from noloco_node.transport.messages import Message
from tests.chaos import paced_node

WATCHED = "NOLOCO_CHAOS_WATCHED"
"""Path of the file."""
HONEST = "honest.json"
"""Peer ids of the honest nodes, in the folder above that of the file."""
ASKED = (exchange_messages.PROPOSE.name, state_messages.OFFER.name, copy_messages.OPEN_COPY.name)
"""Requests that a node makes of a peer of its own choice."""
LAG_SECONDS = 0.5


def write(**entry: Any) -> None:
    """One line, with the wall time."""
    with Path(os.environ[WATCHED]).open("a") as file:
        file.write(json.dumps({"time": time.time(), **entry}) + "\n")


def waited_for_a_core() -> float:
    """Seconds that this thread could have run, and that the kernel gave to others."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


class OwnLag(LoopLag):
    """Without the time in which the loop's thread waited for a core."""

    own = 0.0

    async def measure(self) -> None:
        """See `LoopLag.measure`."""
        loop = asyncio.get_running_loop()
        while True:
            due, before = loop.time() + ambient.SOON_SECONDS, waited_for_a_core()
            await asyncio.sleep(ambient.SOON_SECONDS)
            lag = loop.time() - due
            self.own = max(self.own, lag - (waited_for_a_core() - before))
            if lag >= LAG_SECONDS:
                write(lag=lag)

    def take(self) -> float:
        """See `LoopLag.take`."""
        worst, self.own = self.own, 0.0
        return worst


def watch() -> None:
    """Let this process write down what it sees."""
    refresh, offended, call = DhtDirectory.refresh, Bans.offended, Transport.call

    async def seen(self: DhtDirectory) -> DirectoryView:
        view, now = await refresh(self), self.now()
        peers = {record.peer_id for stage in range(len(view.stages)) for record in view.live(stage, now)}
        honest = Path(os.environ[WATCHED]).parent.parent / HONEST
        known = peers & set(json.loads(honest.read_text())) if honest.exists() else peers
        met: PeerStats = cast("Any", self)._peer_stats
        records = [record for stage in range(len(view.stages)) for record in view.live(stage, now)]
        there = {record.peer_id for record in records if is_there(met, record)} - known
        write(rows=len(peers), strangers=sorted(there))
        return view

    def judged(self: Bans, peer: PeerId, offence: Offence, detail: str = "") -> None:
        before = self.banned(peer)
        offended(self, peer, offence, detail)
        write(offence=offence.value, peer=peer, ban=self.banned(peer) and not before, detail=detail[:200])

    async def noted(self: Transport, peer: PeerId, method: str, request: Message, **limits: Any) -> Message:
        if method in ASKED:
            write(asked=method, peer=peer)
        return await call(self, peer, method, request, **limits)

    stats.LoopLag = OwnLag
    DhtDirectory.refresh = seen
    Transport.call = noted
    Bans.offended = judged


if __name__ == "__main__":
    sys.argv[0] = "noloco-node"
    watch()
    paced_node.main()
