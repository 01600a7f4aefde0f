"""One stranger against the directory, on real p2pd processes: with one key under many node ids, and with many keys."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from noloco_node.config.node_settings import NodeSettings
from noloco_node.directory.dht import join_directory
from noloco_node.identity.keys import Identity, load_or_create_identity
from noloco_node.libp2p.start import running_p2p
from tests.inside import node_of
from tests.support import eventually, nothing_left_behind
from tests.swarm.hostile_dht import Stranger, ghost, key_ids
from tests.swarm.test_directory import RUN, STAGES, dht_nodes, live_ids
from tests.worlds import record_of

pytestmark = pytest.mark.daemons

LIFE = 4.0
"""Seconds that records hold: on a busy machine all nodes store and look within it."""


@contextlib.asynccontextmanager
async def a_stranger(folder: Path, address: str) -> AsyncIterator[Stranger]:
    """With a p2pd of its own that is connected to the node at `address`."""
    settings = NodeSettings(initial_peers=(address,))
    async with running_p2p(settings, load_or_create_identity(folder / "stranger.key")) as p2p:
        stranger = Stranger(p2p.hivemind_p2p, key_ids(RUN, STAGES))
        await stranger.answer()
        yield stranger
        await stranger.leave()


async def publish_all(nodes: list[tuple[Any, Identity]], life: float) -> list[set[str]]:
    """Every node stores its record anew and looks; returns the peers that each sees at its stage 0."""
    for directory, identity in nodes:
        assert await directory.publish(record_of(identity.peer_id), life)
    for directory, _ in nodes:
        await directory.refresh()
    return [live_ids(directory, 0) for directory, _ in nodes]


async def test_one_peer_under_many_node_ids_blinds_nobody(tmp_path: Path) -> None:
    """It pings everybody under twenty ids beside each stage's key, takes every record and keeps none. It answers every
    look-up with nothing that never expires, and itself as all neighbours. A record's life later all see all."""
    with nothing_left_behind():
        async with dht_nodes(tmp_path, 3) as nodes:
            ids = {identity.peer_id for _, identity in nodes}
            assert await publish_all(nodes, LIFE) == [ids] * 3
            async with a_stranger(tmp_path, address_of(nodes[0][0])) as stranger:
                await stranger.ping_under_all_ids(ids)
                await eventually(lambda: not any(live_ids(each, 0) for each, _ in nodes), what="the records end")
                for _ in range(3):
                    seen = await publish_all(nodes, LIFE)
                assert seen == [ids] * 3


async def test_ghosts_of_throw_away_keys_hide_no_node_while_the_stranger_is_there_or_afterwards(tmp_path: Path) -> None:
    """There are more padded ghosts than a message holds, for decades, for the longest life, and as small as they can
    be. All nodes go on seeing each other, and a joiner sees them all when the stranger has left."""
    with nothing_left_behind():
        async with dht_nodes(tmp_path, 3) as nodes:
            ids = {identity.peer_id for _, identity in nodes}
            key, now = key_ids(RUN, STAGES)[0], nodes[0][0].now()
            async with a_stranger(tmp_path, address_of(nodes[0][0])) as stranger:
                for expires, padding in ((now + 1e9, 2900), (now + 3500, 2900), (now + 3500, 0)):
                    rows = [ghost(RUN, 0, expires, padding) for _ in range(400)]
                    for peer in ids:
                        for first in range(0, 400, 200):
                            await stranger.store(peer, key, rows[first : first + 200], expires)
                seen = await publish_all(nodes, 30.0)
                assert [ids - each for each in seen] == [set()] * 3
            assert ids <= await seen_by_a_newcomer(tmp_path, address_of(nodes[0][0]))


async def seen_by_a_newcomer(folder: Path, address: str) -> set[str]:
    """The peers that a node which joins now sees at stage 0."""
    identity = load_or_create_identity(folder / "newcomer.key")
    async with running_p2p(NodeSettings(initial_peers=(address,)), identity) as p2p:
        directory = await join_directory(p2p, identity, RUN, STAGES)
        await directory.refresh()
        seen = live_ids(directory, 0)
        await directory.close()
        return seen


def address_of(directory: Any) -> str:
    """Where a node of the directory listens."""
    p2p = node_of(directory).protocol.p2p if hasattr(node_of(directory), "protocol") else node_of(directory)._p2p
    return f"{p2p._visible_maddrs[0]}/p2p/{p2p.peer_id}"
