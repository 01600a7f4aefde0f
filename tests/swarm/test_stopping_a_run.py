"""Ways in which one machine with throw-away keys once stopped a run: each as small as it can be."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hivemind.proto import dht_pb2

from noloco_node.averaging.session import LEAVE, PROPOSE, LeaveExchange, Proposal
from noloco_node.bootstrap.hello import serve_hello
from noloco_node.directory.dht_node import node_id_of
from noloco_node.directory.health_checks import HealthChecks
from noloco_node.directory.records import PeerRecord
from noloco_node.directory.records_call import serve_records
from noloco_node.identity.peer_id import PeerId
from noloco_node.peers.scorecard import WORK_SECONDS, PeerStats
from noloco_node.pipeline.admission import MicrobatchLimiter
from noloco_node.simulator.loop import in_virtual_time
from noloco_node.tallies import FEW_PEERS, MOST_PEERS
from noloco_node.transport.calls import call
from noloco_node.transport.errors import Refused
from noloco_node.transport.interface import TransportLimits
from noloco_node.transport.libp2p import Libp2pTransport
from noloco_node.transport.memory import MemoryNetwork, MemoryTransport
from noloco_node.transport.messages import FrameKind, encode_envelope
from noloco_node.transport.streams import FramedStream
from tests.inside import incoming_streams_of
from tests.memory_directory import MemoryDirectory, MemoryDirectoryHub
from tests.support import alongside, eventually
from tests.swarm.hostile_dht import PING, throw_away_key
from tests.swarm.memory_dht import Member, MemoryP2P
from tests.swarm.test_directory import RUN as DHT_RUN
from tests.swarm.test_health_checks import OWN, RUN
from tests.worlds import micro_spec, record_of, world

FAR = PeerId("honest-peer-far-away")


def test_ghosts_at_the_near_stages_do_not_keep_a_far_one_from_being_asked() -> None:
    """They are always due, and the near stages came first: the far one was lost after a minute, and no microbatch was
    drawn any more."""

    async def away() -> int:
        network, seen_away = MemoryNetwork(), 0
        own, far = MemoryTransport(network, OWN), MemoryTransport(network, FAR)
        serve_records(far, RUN, MemoryDirectory(MemoryDirectoryHub(3)), lambda: 2)
        records: list[PeerRecord] = [record_of(FAR, 2)]
        checks = HealthChecks(
            own,
            MemoryDirectory(MemoryDirectoryHub(3)),
            RUN,
            lambda: 0,
            20.0,
            lambda: records,
            lambda: None,
            random.Random(1),
        )
        await checks.sweep(5.0)
        records += [record_of(f"ghost-{number:06d}", number % 2) for number in range(400)]
        async with alongside(checks.run()):
            for _ in range(100):
                checks.look()
                await asyncio.sleep(1.0)
                seen_away += not own.peer_stats.serves(FAR, 2)
        await asyncio.gather(own.close(), far.close())
        return seen_away

    assert in_virtual_time(away) == 0


async def test_call_backs_that_hang_turn_no_newcomer_away() -> None:
    """As many as there are places for hang: the newcomer was told that nobody can reach it, and gave up."""
    network: dict[str, MemoryP2P] = {}
    first = await Member(network).join(DHT_RUN, 1)
    asked, free = list[str](), asyncio.Event()

    async def hang(_request: Any, context: Any) -> Any:
        asked.append(str(context.remote_id))
        await free.wait()
        return dht_pb2.PingResponse()

    strangers = [MemoryP2P(network, throw_away_key().peer_id) for _ in range(FEW_PEERS)]
    pings: list[asyncio.Task[Any]] = []
    for stranger in strangers:
        await stranger.add_protobuf_handler(PING, hang, dht_pb2.PingRequest)
        info = dht_pb2.NodeInfo(node_id=node_id_of(stranger.peer_id).to_bytes())
        request = dht_pb2.PingRequest(peer=info, validate=True)
        call = stranger.call_protobuf_handler(first.p2p.peer_id, PING, request, dht_pb2.PingResponse)
        pings.append(asyncio.create_task(call))
    await eventually(lambda: len(asked) == FEW_PEERS)
    newcomer = await Member(network).join(DHT_RUN, 1, first.peer)
    assert first.peer in newcomer.directory.neighbours()
    free.set()
    await asyncio.gather(*pings)
    await newcomer.directory.close()
    await first.directory.close()


class Socket:
    """Stands for p2pd: streams of peers that are named, over a real socket."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.handler: Any = None
        self.peer = PeerId("")

    async def serve_streams(self, _protocol: str, handler: Any) -> None:
        """See `StreamHost`."""

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await handler(self.peer, reader, writer)

        self.handler = await asyncio.start_unix_server(handle, self.path)

    async def stop_serving(self, _protocol: str) -> None:
        """See `StreamHost`."""
        self.handler.close()

    async def open(self, peer: str) -> FramedStream:
        """A stream of that peer, once the other side has it."""
        self.peer = PeerId(peer)
        return FramedStream(*await asyncio.open_unix_connection(self.path))


async def test_streams_that_a_few_keys_hold_open_shut_nobody_out(tmp_path: Path) -> None:
    """Two keys take all places and say nothing, or half a word. A third peer is answered all the same, and a peer that
    works here keeps its streams."""
    host: Any = Socket(tmp_path / "s")
    limits = TransportLimits(max_streams=16, max_streams_per_peer=8)
    transport = Libp2pTransport(host, limits)
    serve_hello(transport, None, lambda: None)
    await transport.start()
    transport.peer_stats.worked(PeerId("works-here"))
    worker = await host.open("works-here")
    await eventually(lambda: incoming_streams_of(transport) == 1)
    held: list[FramedStream] = []
    for number in range(15):
        held.append(await host.open(f"stranger-{number % 2}"))
        held[-1]._writer.write(b"N" * (number % 3 == 0))
        await eventually(lambda: incoming_streams_of(transport) == len(held) + 1)
    newcomer = await host.open("newcomer")
    for peer, stream in (("newcomer", newcomer), ("works-here", worker)):
        await stream.write_message(encode_envelope("hello", {}, ()), (), 5.0)
        assert (await stream.read_prefix(5.0, 5.0)).kind is FrameKind.HEADER, peer
    assert incoming_streams_of(transport) <= limits.max_streams
    extra = await host.open("stranger-0")
    await eventually(lambda: extra._reader.at_eof(), what="who holds most gets no more")
    for stream in (worker, newcomer, extra, *held):
        stream.abort()
    await eventually(lambda: incoming_streams_of(transport) == 0)
    await transport.close()


async def test_exchanges_that_come_to_nothing_cost_a_quarter_of_the_time_whoever_dials() -> None:
    """With a new key for each, or by one that commits one in between, a replica was engaged nearly all of the time. It
    averaged with nobody, and could not even step alone."""
    async with world(micro_spec()) as made:
        replica = made.of_stage(0)[0]
        side = replica.averaging.side
        replica.averaging.open()
        side.begin_last_round()

        async def abandon(name: str) -> None:
            caller = MemoryTransport(made.network, PeerId(name))
            exchange, seconds = secrets.token_hex(16), 20.0
            proposal = Proposal(
                exchange=exchange,
                run=replica.context.spec.run_id,
                stage=0,
                contract=replica.worker.contract,
                clock=0.0,
                tokens=1,
            )
            target = replica.context.transport.peer_id
            try:
                await call(caller, target, PROPOSE, proposal, seconds=5.0)
                assert side.engagement.session is not None
                side.engagement.session.started -= seconds
                await call(caller, target, LEAVE, LeaveExchange(exchange=exchange), seconds=5.0)
            finally:
                await caller.close()

        known = replica.context.transport.peer_stats
        for name in ("stage peer-at-work", "another-at-work"):
            known.worked(PeerId(name))
        for number in range(2):  # the first brings no rest: a stage peer that died and came back must not wait
            await abandon(f"throw-away-key-{number}")
            await abandon("stage peer-at-work")
            side.partners.committed(PeerId("stage peer-at-work"))
        for name in ("throw-away-key-2", "stage peer-at-work"):
            with pytest.raises(Refused):
                await abandon(name)
        await abandon("another-at-work")


def test_throw_away_keys_whose_bodies_drip_leave_half_of_the_places_to_who_works_here() -> None:
    """Bodies of theirs are on their way to every place that they can get, for minutes. A peer whose microbatches
    were trained here trains on. One that lets a place come to nothing is a stranger again; if nobody works nothing
    is kept."""
    now = 0.0
    places, honest, stage_peer = MicrobatchLimiter(8, lambda: now), PeerId("honest"), PeerId("its-stage peer")
    strangers = [PeerId(f"throw-away-{number}") for number in range(20)]

    def drip() -> list[Callable[[], None]]:
        held: list[Callable[[], None]] = []
        for stranger in strangers:
            try:
                held.append(places.take(stranger))
            except Refused:
                continue
        return held

    def works(peer: PeerId) -> None:
        release = places.take(peer)
        places.answered(peer)
        release()

    for peer in (honest, stage_peer):
        works(peer)
    assert len(drip()) == 4
    for _ in range(3):
        works(honest)
    places.take(honest)()
    with pytest.raises(Refused):
        places.take(honest)
    works(stage_peer)
    now += WORK_SECONDS + 1.0
    assert len(drip()) == 4, "all places are taken"


def test_keys_without_number_that_call_do_not_make_a_node_forget_who_goes_on_answering() -> None:
    """The first peer met was the first forgotten, however often it answered: a far stage was lost so."""
    known = PeerStats()
    known.said(FAR, 2)
    for number in range(2 * MOST_PEERS):
        known.answered(PeerId(f"throw-away-{number}"))
        if number % 1000 == 0:
            known.answered(FAR)
    assert known.serves(FAR, 2)
