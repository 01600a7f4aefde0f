"""How a node learns whether others reach it, what it tells them then; no liar has it tell a stranger's address."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noloco_node.bootstrap import reachability
from noloco_node.bootstrap.reach_watch import Policy, ReachWatch
from noloco_node.bootstrap.reachability import (
    DialBack,
    Dialled,
    HostPort,
    Reached,
    ReachFinding,
    ReachStanding,
    Seen,
    Way,
    judge,
    network_of,
)
from noloco_node.config.node_settings import NodeSettings
from noloco_node.identity.addresses import PeerAddress, parse_address
from noloco_node.identity.peer_id import PeerId
from noloco_node.libp2p.arguments import node_arguments
from noloco_node.libp2p.daemon import PrivateP2P
from noloco_node.libp2p.relay_server import CircuitRelay
from noloco_node.tallies import Doubling
from noloco_node.transport.errors import PeerUnreachable
from noloco_node.transport.memory import MemoryNetwork, MemoryTransport
from noloco_node.transport.messages import Message
from tests.worlds import no_tensors

BASE = "12D3KooWKrCeA5nCWnQ5gm5FLAszTb6cDMk2hX8BH7Hj8MhGeFx"
OWN, SEED, OTHER, LIAR = (PeerId(BASE + letter) for letter in "9ABC")
LISTENING = "/ip4/192.168.1.2/tcp/31337"
OUTSIDE = HostPort("93.184.216.34", 31337)
"""Where the world sees this node."""
VICTIM = HostPort("8.8.8.8", 31337)
AT = {SEED: "1.1.1.1", OTHER: "9.9.9.9", LIAR: "208.67.222.222"}
FREE = Policy(may_announce=True, may_relay=True, tells_own=True)


def seen(host: str, place: HostPort, reached: bool, peer: PeerId = OTHER) -> Seen:
    """What a peer at that host found."""
    return Seen(peer, network_of(host), place, reached)


@given(
    st.lists(st.tuples(st.integers(1, 254), st.booleans()), max_size=20),
    st.booleans(),
    st.lists(st.booleans(), min_size=1, max_size=3),
    st.booleans(),
)
def test_peers_of_one_network_never_have_a_node_tell_a_strangers_address_where_others_can_be_asked(
    liars: list[tuple[int, bool]], named: bool, honest: list[bool], near: bool
) -> None:
    """However many of them agree, one of them the very peer that its owner named: peers of other networks were asked,
    and did not see it there."""
    lies = [seen(f"208.67.222.{number}", VICTIM, reached, LIAR) for number, reached in liars]
    own = HostPort("192.168.1.2", 31337)
    place = own if near else OUTSIDE
    truth = [seen(f"9.9.{number}.9", place, reached) for number, reached in enumerate(honest)]
    finding = judge([*lies, *truth], [own], [LIAR] if named else [])
    assert finding is not None
    assert finding.place != VICTIM
    if honest.count(True) >= 2 and honest.count(False) <= honest.count(True) and not (near and lies):
        assert finding.place == place, "and no liar keeps it from telling its own"


def test_where_a_node_is_reached_is_what_the_widest_and_most_say() -> None:
    """A neighbour's word does not count beside the world's. An address that it listens on needs one word. One that it
    has from others needs two, or that of the peer that its owner named if there is no other. A tie is for it."""
    own = HostPort("192.168.1.2", 31337)
    near = seen("192.168.1.9", own, True)
    assert judge([], [own], []) is None
    assert judge([near], [own], []) == judge([near, near], [own], []) == ReachFinding(own, (own,))
    far = [seen(AT[SEED], OUTSIDE, True, SEED), seen(AT[OTHER], OUTSIDE, True)]
    for rows, named, place in (
        ([near, seen(AT[OTHER], OUTSIDE, False)], [], None),
        (far[:1], [], None),
        (far[:1], [SEED], OUTSIDE),
        (far, [], OUTSIDE),
        ([*far, seen(AT[LIAR], OUTSIDE, False, LIAR)], [], OUTSIDE),
        ([far[0], seen(AT[OTHER], OUTSIDE, False)], [SEED], None),
    ):
        finding = judge(rows, [own], named)
        assert finding is not None
        assert finding.place == place
    tie = judge([far[0], seen(AT[OTHER], OUTSIDE, False)], [OUTSIDE], [])
    assert tie is not None
    assert tie.place == OUTSIDE


@dataclass
class World:
    """A node's p2pd and its connected peers, in memory; the messages between them are the real ones."""

    answers: dict[PeerId, dict[HostPort, bool]] = field(default_factory=dict[PeerId, "dict[HostPort, bool]"])
    """What each peer says when it is asked to dial back."""
    relaying: set[PeerId] = field(default_factory=set[PeerId])
    told: list[str] = field(default_factory=lambda: [LISTENING])
    joined_peers: tuple[str, ...] = ()
    relays: tuple[PeerAddress, ...] = ()
    lost_relays: set[PeerId] = field(default_factory=set[PeerId])
    maps_port: bool = False
    changes: list[tuple[str, ...]] = field(default_factory=list[tuple[str, ...]])
    ports: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    standings: list[ReachStanding] = field(default_factory=list[ReachStanding])
    _tasks: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])

    async def connections(self) -> Mapping[PeerId, Sequence[str]]:
        return {peer: [f"/ip4/{AT[peer]}/tcp/4001"] for peer in self.answers}

    async def addresses_of(self, peer: PeerId) -> Sequence[str]:
        return [f"/ip4/{AT[peer]}/tcp/4001/p2p/{peer}"]

    def listening(self) -> Sequence[str]:
        return [LISTENING]

    async def told_addresses(self) -> Sequence[str]:
        return [f"{text}/p2p/{OWN}" for text in self.told]

    async def connect(self, peer: PeerId, addresses: Sequence[str] = ()) -> str | None:
        return None

    connect_anew = connect

    async def open_stream(self, peer: PeerId, protocol: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if peer not in self.answers:
            raise PeerUnreachable(peer)
        relay = CircuitRelay(cast("Any", None), carry=peer in self.relaying)
        ends = [await asyncio.open_unix_connection(sock=end) for end in socket.socketpair()]
        task = asyncio.create_task(relay.serve_stream(OWN, *ends[0]))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return ends[1]

    async def serve_streams(self, protocol: str, handler: Any) -> None: ...

    async def stop_serving(self, protocol: str) -> None: ...

    async def readdress(self, addresses: Sequence[str], relays: tuple[PeerAddress, ...]) -> None:
        self.changes.append(tuple(addresses))
        self.told, self.relays, self.lost_relays = list(addresses) or [LISTENING], relays, set()

    @property
    def ways(self) -> list[Way]:
        """How it was reached, one after another."""
        return [standing.way for standing in self.standings]


@contextlib.asynccontextmanager
async def watching(world: World, monkeypatch: pytest.MonkeyPatch, policy: Policy = FREE) -> AsyncIterator[ReachWatch]:
    """The watch of a node in that world, which may ask the same peers again at once and change as often as it likes."""
    monkeypatch.setattr("noloco_node.bootstrap.reach_watch.PEER_SECONDS", 0.0)
    monkeypatch.setattr("noloco_node.tallies.BANS", Doubling(0.0, 0.0))
    network = MemoryNetwork()
    peers = [MemoryTransport(network, peer) for peer in world.answers]
    for transport in peers:

        async def dial(_: PeerId, message: Message, peer: PeerId = transport.peer_id) -> Message:
            world.ports.append(DialBack.model_validate(message.header).ports)
            said = {f"{place.host} {place.port}": ok for place, ok in world.answers[peer].items()}
            results = {name: Reached.YES if ok else Reached.NO for name, ok in said.items()}
            return Message(Dialled(seen_at=(), results=results).model_dump(mode="json"))

        transport.serve(reachability.DIAL_BACK.name, no_tensors, dial, max_concurrent_per_peer=4)
    own = MemoryTransport(network, OWN)
    watch = ReachWatch(world, own, policy, world.readdress, random.Random(1))
    watch.tell(world.standings.append)
    yield watch
    for transport in (*peers, own):
        await transport.close()


def says(peer: PeerId, place: HostPort, reached: bool) -> dict[PeerId, dict[HostPort, bool]]:
    """One peer's answer."""
    return {peer: {place: reached}}


def joined(*peers: PeerId) -> tuple[str, ...]:
    """The addresses by which a node entered."""
    return tuple(f"/ip4/{AT[peer]}/tcp/4001/p2p/{peer}" for peer in peers)


async def test_the_address_that_peers_have_dialled_is_told_beside_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, before anything is under way; later looks find it as it should be."""
    world = World(says(SEED, OUTSIDE, True) | says(OTHER, OUTSIDE, True), joined_peers=joined(SEED))
    async with watching(world, monkeypatch) as watch:
        await watch.first_look()
        await watch.look()
    assert world.changes == [(LISTENING, f"/ip4/{OUTSIDE.host}/tcp/{OUTSIDE.port}")]
    assert world.standings == [ReachStanding(Way.DIRECT, OUTSIDE)]
    assert set(world.ports) == {(31337,)}


async def test_a_port_that_the_router_opens_is_waited_for_and_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    """p2pd tells others of it itself, so nothing is changed; where none is opened, the wait has an end."""
    monkeypatch.setattr("noloco_node.bootstrap.reach_watch.SOON_SECONDS", 0.0)
    monkeypatch.setattr("noloco_node.bootstrap.reach_watch.REACH_SECONDS", 0.05)
    mapped = HostPort(OUTSIDE.host, 40000)

    class Opening(World):
        async def told_addresses(self) -> Sequence[str]:
            said = await super().told_addresses()
            self.told = [f"/ip4/{mapped.host}/tcp/{mapped.port}", LISTENING]
            return said

    world = Opening(says(SEED, mapped, True), joined_peers=joined(SEED), maps_port=True)
    async with watching(world, monkeypatch) as watch:
        await watch.first_look()
    assert (world.changes, world.standings) == ([], [ReachStanding(Way.DIRECT, mapped)])
    assert world.ports == [(mapped.port, 31337)]
    world = World(says(SEED, OUTSIDE, False), {SEED}, joined_peers=joined(SEED), maps_port=True)
    async with watching(world, monkeypatch) as watch:
        await watch.first_look()
    assert world.ways == [Way.RELAYED]


async def test_one_liar_never_has_a_strangers_address_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it was joined by: an honest peer of another network cannot dial the node, so it asks for a relay."""
    world = World(says(LIAR, VICTIM, True) | says(OTHER, OUTSIDE, False), {OTHER}, joined_peers=joined(LIAR))
    async with watching(world, monkeypatch) as watch:
        await watch.first_look()
    assert [VICTIM.host in text for told in world.changes for text in told] == [False, False]
    assert world.standings == [ReachStanding(Way.RELAYED, relays=(OTHER,))]


@pytest.mark.parametrize("place", [HostPort(VICTIM.host, 99999), HostPort("2606:4700::1%a", 31337)])
async def test_liars_of_two_networks_have_nothing_told_that_p2pd_would_refuse(
    monkeypatch: pytest.MonkeyPatch, place: HostPort
) -> None:
    """A port that they were not asked for, or a host with a zone: p2pd would end at every start."""
    world = World(says(LIAR, place, True) | says(OTHER, place, True), joined_peers=joined(LIAR))
    async with watching(world, monkeypatch) as watch:
        await watch.first_look()
    assert world.changes == []


async def test_what_a_liar_had_told_while_it_was_alone_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """As soon as a peer of another network can be asked."""
    world = World(says(LIAR, VICTIM, True), joined_peers=joined(LIAR))
    world.answers |= says(OTHER, OUTSIDE, False)
    async with watching(world, monkeypatch) as watch:
        world.answers, both = says(LIAR, VICTIM, True), world.answers
        await watch.first_look()
        assert world.standings[-1].place == VICTIM
        world.answers = both
        await watch.look()
        await watch.look()
    assert world.told == [LISTENING]
    assert world.ways == [Way.DIRECT, Way.UNREACHED]


async def test_out_of_reach_a_node_asks_for_relays_by_itself_and_says_where_there_are_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At its start; when its relays are gone it asks others; when its port is opened it needs none any more."""
    closed = says(SEED, OUTSIDE, False) | says(OTHER, OUTSIDE, False)
    world = World(closed, joined_peers=joined(SEED))
    async with watching(world, monkeypatch) as watch:
        await watch.first_look()
        assert world.ways == [Way.UNREACHED]
        assert f"no peer could dial it at {OUTSIDE.host} port {OUTSIDE.port}, and no peer" in caplog.text
        assert "--relay-for-others" in caplog.text
        world.relaying = {SEED}
        await watch.look()
        assert world.standings[-1].relays == (SEED,)
        assert world.told == [LISTENING, f"/ip4/{AT[SEED]}/tcp/4001/p2p/{SEED}/p2p-circuit"]
        await watch.look()
        assert len(world.changes) == 1, "all is well"
        world.lost_relays, world.relaying = {SEED}, {OTHER}
        await watch.look()
        assert world.standings[-1].relays == (OTHER,)
        world.answers.update(says(SEED, OUTSIDE, True) | says(OTHER, OUTSIDE, True))
        await watch.look()
    assert world.told == [LISTENING, f"/ip4/{OUTSIDE.host}/tcp/{OUTSIDE.port}"]
    assert world.ways == [Way.UNREACHED, Way.RELAYED, Way.RELAYED, Way.DIRECT]


async def test_relays_that_are_gone_for_good_are_let_go_of_and_a_router_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not at the first look, as a relay may come back. A node stayed on dead circuits for ever."""
    settings = NodeSettings(host="0.0.0.0", port=31337)
    daemon = PrivateP2P(cast("Any", tmp_path), node_arguments(settings, tmp_path / "key"))
    assert daemon.maps_port
    closed = says(SEED, OUTSIDE, False)
    world = World(closed, {SEED}, joined_peers=joined(SEED))
    async with watching(world, monkeypatch) as watch:
        await watch.first_look()
        daemon.readdress(world.changes[-1], world.relays)
        assert (world.ways, daemon.maps_port) == ([Way.RELAYED], False)
        world.lost_relays, world.relaying = {SEED}, set()
        await watch.look()
        assert len(world.changes) == 1, "it may come back"
        while len(world.changes) == 1:
            await watch.look()
        daemon.readdress(world.changes[-1], world.relays)
    assert (world.changes[-1], world.relays, daemon.maps_port) == ((), (), True)


async def test_one_look_in_vain_costs_a_node_that_was_reached_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second does: its port has stopped working."""
    own = parse_address(f"{LISTENING}/p2p/{OWN}")
    place = HostPort(own.host, own.port)
    world = World(says(SEED, place, True), {SEED}, joined_peers=joined(SEED))
    async with watching(world, monkeypatch) as watch:
        await watch.look()
        world.answers[SEED] = {place: False}
        await watch.look()
        assert world.ways == [Way.DIRECT]
        await watch.look()
    assert world.ways == [Way.DIRECT, Way.RELAYED]


@pytest.mark.parametrize(
    ("policy", "found"),
    [
        (Policy(may_announce=False, may_relay=False, tells_own=True), True),
        (Policy(may_announce=True, may_relay=False, tells_own=True), False),
    ],
)
async def test_what_the_owner_has_chosen_stands(monkeypatch: pytest.MonkeyPatch, policy: Policy, found: bool) -> None:
    """Addresses that the owner names are not added to, and no relay is asked for if none is wanted. How the node is
    reached is said all the same."""
    world = World(says(SEED, OUTSIDE, found), {SEED}, joined_peers=joined(SEED))
    async with watching(world, monkeypatch, policy) as watch:
        await watch.first_look()
    assert world.changes == []
    assert world.ways == [Way.DIRECT if found else Way.UNREACHED]


async def test_a_node_on_loopback_that_joins_others_asks_for_a_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody needs to dial it to know; on one machine with its peers it asks for nothing."""
    world = World(says(SEED, OUTSIDE, False), {SEED}, told=["/ip4/127.0.0.1/tcp/31337"], joined_peers=joined(SEED))
    async with watching(world, monkeypatch) as watch:
        await watch.first_look()
    assert world.ways == [Way.RELAYED]
    assert world.ports == []
