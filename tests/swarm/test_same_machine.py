"""Nodes of one user on one machine talk without p2pd: who is believed there, and what follows where that way ends."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from noloco_node.identity.keys import Identity, identity_of_seed
from noloco_node.identity.peer_id import PeerId
from noloco_node.transport import same_machine
from noloco_node.transport.errors import BrokenStream
from noloco_node.transport.pacing import line_of
from noloco_node.transport.same_machine import SameMachine
from tests.support import eventually, nothing_left_behind
from tests.swarm.test_transport_contract import Handler, welcome
from tests.swarm.worlds import nearby_world, real_world

WITHIN = 30.0
NOBODY = 65534
"""A user that no process here has."""

OF_ANOTHER_USER = """
import os, socket, sys
os.setuid(int(sys.argv[3]))
own, other = (socket.socket(socket.AF_UNIX) for _ in range(2))
own.bind(bytes.fromhex(sys.argv[1]).decode())
own.listen()
other.connect(bytes.fromhex(sys.argv[2]).decode())
print("there", flush=True)
print("got", other.recv(1), flush=True)
sys.stdin.read()
"""
"""It answers under the first name, and says nothing to who answers under the second."""


@pytest.fixture
def temporary() -> Iterator[Path]:
    """Names of these tests are nobody else's."""
    with nothing_left_behind() as base:
        yield base


class Taken:
    """Notes the peers whose streams were taken, and ends the streams."""

    def __init__(self) -> None:
        self.peers: list[PeerId] = []

    async def __call__(self, peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        del reader
        self.peers.append(peer)
        writer.close()


def identity(number: int) -> Identity:
    """The same for the same number."""
    return identity_of_seed(bytes([number]) * 32)


HONEST, PEER, STRANGER = (identity(number) for number in (1, 2, 3))
POSING = (replace(STRANGER, peer_id=PEER.peer_id), replace(STRANGER, peer_id=PEER.peer_id, public_key=PEER.public_key))
"""A stranger that says it is a peer: with a key of its own, and with the public half of the peer's."""


def name_of(peer: PeerId) -> str:
    """The name under which it answers."""
    return same_machine._name_of(peer)  # pyright: ignore[reportPrivateUsage]


async def test_what_stays_on_the_machine_is_counted_and_does_not_wait_for_the_line() -> None:
    """A line of 125 bytes a second would take a quarter of an hour for it. Both sides count all of it."""
    async with nearby_world(line_of(0.001, 0.001)) as world:
        world.server.serve("echo", welcome, Handler(), max_concurrent_per_peer=1)
        await world.call("echo", torch.zeros(15_000))
        for side in (world.caller.traffic, world.server.traffic):
            assert side.nearby == side.sent["echo"] + side.received["echo"] > 120_000


@pytest.mark.parametrize("posing", POSING)
async def test_a_stranger_that_answers_for_a_peer_is_not_believed(posing: Identity, temporary: Path) -> None:
    """It has the peer's name on this machine and not its key: the stream goes by p2pd, and that is counted."""
    taken, stranger, caller = Taken(), SameMachine(posing), SameMachine(HONEST)
    await stranger.serve(taken, WITHIN)
    assert await caller.open(PEER.peer_id) is None
    assert caller.given_up == 1
    stranger.close()
    assert not taken.peers


@pytest.mark.parametrize("posing", POSING)
async def test_a_stranger_that_calls_as_a_peer_is_not_believed(posing: Identity, temporary: Path) -> None:
    """Nothing of it reaches who answers requests; a peer that holds its key does."""
    taken, server = Taken(), SameMachine(HONEST)
    await server.serve(taken, WITHIN)
    assert await SameMachine(posing).open(HONEST.peer_id) is None
    ends = await SameMachine(PEER).open(HONEST.peer_id)
    assert ends is not None
    await ends[0].read()
    server.close()
    assert taken.peers == [PEER.peer_id]


async def test_a_proof_serves_once(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a peer once said to prove itself proves nothing when it is said again."""
    taken, server = Taken(), SameMachine(HONEST)
    await server.serve(taken, WITHIN)
    said: list[tuple[bytes, ...]] = []
    put = same_machine._put  # pyright: ignore[reportPrivateUsage]

    def noted(writer: asyncio.StreamWriter, *parts: bytes) -> None:
        said.append(parts)
        put(writer, *parts)

    monkeypatch.setattr(same_machine, "_put", noted)
    assert await SameMachine(PEER).open(HONEST.peer_id) is not None
    asked, _, proof, _ = list(said)
    reader, writer = await asyncio.open_unix_connection(name_of(HONEST.peer_id))
    put(writer, *asked, *proof)
    assert len(await reader.read()) > 100, "it was answered, by a new number and a seal, and by nothing more"
    writer.close()
    server.close()
    assert taken.peers == [PEER.peer_id]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has processes of another user")
async def test_a_process_of_another_user_is_not_dealt_with(temporary: Path) -> None:
    """Neither where it has a peer's name, nor where it asks: nothing is said to it."""
    taken, node = Taken(), SameMachine(HONEST)
    await node.serve(taken, WITHIN)
    names = (name_of(peer.peer_id).encode().hex() for peer in (PEER, HONEST))
    stranger = await asyncio.create_subprocess_exec(
        *(sys.executable, "-S", "-c", OF_ANOTHER_USER, *names, str(NOBODY)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert stranger.stdout is not None
    assert await stranger.stdout.readline() == b"there\n"
    assert await node.open(PEER.peer_id) is None
    assert node.given_up == 1
    assert await stranger.stdout.readline() == b"got b''\n"
    await stranger.communicate(b"")
    node.close()
    assert not taken.peers


async def test_temporary_folders_of_their_own_keep_nodes_apart(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on two machines: so a test of cut links keeps its nodes from talking around the cut."""
    server, caller = SameMachine(HONEST), SameMachine(PEER)
    await server.serve(Taken(), WITHIN)
    monkeypatch.setattr(tempfile, "tempdir", "/")
    assert await caller.open(HONEST.peer_id) is None
    assert caller.given_up == 0
    server.close()


async def test_who_says_nothing_is_not_waited_for(temporary: Path) -> None:
    """A stream without a proof ends when its time is up, and all of them do when the node closes."""
    server = SameMachine(HONEST)
    await server.serve(Taken(), 0.2)
    reader, _ = await asyncio.open_unix_connection(name_of(HONEST.peer_id))
    assert await reader.read() == b""
    server.close()
    patient = SameMachine(PEER)
    await patient.serve(Taken(), 1000.0)
    reader, _ = await asyncio.open_unix_connection(name_of(PEER.peer_id))
    unproven: Any = patient._unproven  # pyright: ignore[reportPrivateUsage]
    await eventually(lambda: len(unproven) == 1)
    patient.close()
    assert await reader.read() == b""


async def test_those_that_say_nothing_hold_no_more_of_a_node_than_a_few_descriptors(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """5,000 held as many, each for as long as a proof may take. Who comes meanwhile goes by p2pd at once."""
    monkeypatch.setattr(same_machine, "FEW_PEERS", 3)
    server = SameMachine(HONEST)
    await server.serve(Taken(), WITHIN)
    silent = [await asyncio.open_unix_connection(name_of(HONEST.peer_id)) for _ in range(4)]
    assert await silent[3][0].read() == b""
    caller = SameMachine(PEER)
    assert await caller.open(HONEST.peer_id) is None
    assert not any(reader.at_eof() for reader, _ in silent[:3])
    for _, writer in silent:
        writer.close()
    ends = None
    async with asyncio.timeout(WITHIN):
        while ends is None:
            ends = await caller.open(HONEST.peer_id)
    ends[1].close()
    server.close()


async def test_a_process_without_descriptors_asks_by_p2pd(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's error went through to who had asked, which knows only those of a transport."""

    def refuses(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(same_machine.socket, "socket", refuses)
    assert await SameMachine(PEER).open(HONEST.peer_id) is None


@pytest.mark.daemons
async def test_the_way_goes_on_by_p2pd_where_the_near_one_ends(tmp_path: Path) -> None:
    """The call under way is broken, as by any stream that ends. The next one is answered all the same, and counts as no
    bytes that stayed here. A stream that was only kept breaks no call."""
    with nothing_left_behind():
        async with real_world(tmp_path, nearby=True) as world:
            handler, quick = Handler(open_gate=False), Handler()
            world.server.serve("slow", welcome, handler, max_concurrent_per_peer=1)
            world.server.serve("echo", welcome, quick, max_concurrent_per_peer=1)
            await world.call("echo", torch.zeros(1000))
            before = world.caller.traffic.nearby
            assert before > 8000
            calls = [asyncio.create_task(world.call(method)) for method in ("slow", "echo")]
            await calls[1]
            await eventually(lambda: handler.begun == 1)
            assert world.near is not None
            world.near.die()
            with pytest.raises(BrokenStream):
                await calls[0]
            await eventually(lambda: handler.cancelled == 1)
            near = world.caller.traffic.nearby
            sent = torch.arange(1000)
            assert torch.equal((await world.call("echo", sent)).tensors[0], sent)
            assert world.caller.traffic.nearby == near
