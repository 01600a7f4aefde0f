"""A node's first look at the directory: it is read until it shows somebody.

An empty first look would make a joining node start from the seed beside a trained swarm.
"""

from __future__ import annotations

import asyncio

from noloco_node.directory.records import Directory, DirectoryView
from noloco_node.identity.peer_id import PeerId

FIRST_LOOK_SECONDS = 10.0
LOOK_AGAIN_SECONDS = 0.3


async def look_for_others(directory: Directory, own: PeerId, seconds: float) -> DirectoryView:
    """The directory without `own`'s former record, as soon as it shows another node, after `seconds` at the latest."""
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    while True:
        view = (await directory.refresh()).without(own)
        if view.anyone(directory.now()) or loop.time() >= until:
            return view
        # The directory gives no sign of a change: asking again is the only way.
        await asyncio.sleep(LOOK_AGAIN_SECONDS)
