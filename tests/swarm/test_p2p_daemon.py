"""p2pd as a child process: it starts, refuses clearly, and leaves nothing behind, however it ends."""

from __future__ import annotations

import asyncio
import contextlib
import glob
import multiprocessing
import os
import signal
import socket
import stat
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
from hivemind.p2p import PeerID  # pyright: ignore[reportMissingTypeStubs]
from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerInfo  # pyright: ignore[reportMissingTypeStubs]
from hivemind.utils.multiaddr import Multiaddr  # pyright: ignore[reportMissingTypeStubs]

from noloco_node.config.node_settings import NodeSettings
from noloco_node.errors import ExitCode, UserError
from noloco_node.identity.addresses import dialable, parse_address, try_peers
from noloco_node.identity.keys import load_or_create_identity
from noloco_node.identity.peer_id import PeerId
from noloco_node.libp2p.start import Doors, running_p2p, start_p2p
from noloco_node.storage.held import SHARED_PREFIX, leave_shared_folder, sweep_dead_folders
from tests.support import eventually, free_port, one_turn, p2pd_children

pytestmark = [pytest.mark.daemons, pytest.mark.usefixtures("temporary")]

NOBODY = "12D3KooWAL5zALa3ZR1piSRmK8WGNFojeALVyS3vgSZQYawt1PGF"


def joining(*addresses: str, port: int = 0) -> NodeSettings:
    """Settings of a node that joins."""
    return NodeSettings(initial_peers=addresses, port=port)


@pytest.fixture
def taken_port() -> Iterator[int]:
    """A port on loopback where something listens that speaks no libp2p."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


async def failure(settings: NodeSettings, folder: Path) -> UserError:
    """The error that starting ends with."""
    with pytest.raises(UserError) as caught:
        await start_p2p(settings, load_or_create_identity(folder / "key"))
    return caught.value


async def test_a_node_starts_others_join_and_all_is_private(tmp_path: Path) -> None:
    """Sockets in a 0700 folder, p2pd in a session of its own, the peer id that of the file."""
    one, two = load_or_create_identity(tmp_path / "one"), load_or_create_identity(tmp_path / "two")
    async with running_p2p(NodeSettings(), one) as first:
        assert first.own_id == one.peer_id
        assert stat.S_IMODE(first.folder.stat().st_mode) == 0o700
        assert os.getsid(first.pid) == first.pid != os.getsid(0)
        [address] = first.visible_addresses()
        assert parse_address(address).peer == one.peer_id
        async with running_p2p(joining(address), two) as second:
            assert second.joined_peers == (address,)
        assert not second.folder.exists()
        assert p2pd_children() == [first.pid]


async def test_a_peer_at_an_address_of_an_unknown_kind_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """p2pd dials WebTransport, whose addresses hivemind cannot read: one stranger that listened so ended each node that
    had dialled it, by a traceback at its next look at how it is reached."""
    read, unread = Multiaddr("/ip4/192.0.2.7/tcp/31337").to_bytes(), bytes.fromhex("04c0000207910207d1cd03d103")
    with pytest.raises(ValueError, match="465"):
        str(Multiaddr(unread))
    async with running_p2p(NodeSettings(), load_or_create_identity(tmp_path / "key")) as node:

        async def list_peers() -> list[PeerInfo]:
            return [PeerInfo(PeerID.from_base58(NOBODY), [Multiaddr(unread), Multiaddr(read)])]

        monkeypatch.setattr(cast("Any", node.hivemind_p2p)._client, "list_peers", list_peers)
        assert await node.connections() == {PeerId(NOBODY): ["/ip4/192.0.2.7/tcp/31337"]}


async def test_a_taken_port_is_named(tmp_path: Path, taken_port: int) -> None:
    """Before anything is started."""
    error = await failure(NodeSettings(port=taken_port), tmp_path)
    assert error.exit_code is ExitCode.PORT_IN_USE
    assert str(taken_port) in error.message


async def test_each_initial_peer_is_told_off_for_its_own_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Malformed and refused addresses are listed with why."""
    monkeypatch.setattr("noloco_node.libp2p.start.REACH_SECONDS", 0.5)
    wrong = ("nonsense", f"/ip4/127.0.0.1/tcp/70000/p2p/{NOBODY}", "/ip4/127.0.0.1/tcp/9/p2p/QmNoPeer")
    refused = f"/ip4/127.0.0.1/tcp/9/p2p/{NOBODY}"
    error = await failure(joining(*wrong, refused), tmp_path)
    assert error.exit_code is ExitCode.PEERS_UNREACHABLE
    lines = {line.strip().partition(": ")[0]: line for line in error.message.splitlines()[1:]}
    assert all("malformed" in lines[address] for address in wrong)
    assert "refused" in lines[refused]


async def test_something_else_on_the_peers_port_is_not_the_peer(tmp_path: Path, taken_port: int) -> None:
    """A port that takes connections without being that peer, or one that is too busy: an error that says so, not a
    traceback."""
    error = await failure(joining(f"/ip4/127.0.0.1/tcp/{taken_port}/p2p/{NOBODY}"), tmp_path)
    assert error.exit_code is ExitCode.PEERS_UNREACHABLE
    assert "not this peer, or it is too busy to answer" in error.message


async def test_one_live_peer_among_dead_ones_is_enough(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The dead address does not count; one with another peer's id or a malformed one does not either. Each is told on
    one line, with the reason."""
    async with running_p2p(NodeSettings(), load_or_create_identity(tmp_path / "one")) as first:
        [address] = first.visible_addresses()
        imposter = address.replace(first.own_id, NOBODY)
        dead = f"/ip4/127.0.0.1/tcp/9/p2p/{NOBODY}"
        settings = joining(dead, imposter, "nonsense", address)
        async with running_p2p(settings, load_or_create_identity(tmp_path / "two")) as second:
            assert second.joined_peers == (address,)
        told = {(dead, "nothing listens"), (imposter, "not this peer"), ("nonsense", "malformed")}
        lines = [line for line in caplog.messages if line.startswith("passed over")]
        assert len(lines) == len(told)
        assert all(any(text in line and why in line for line in lines) for text, why in told)


async def test_peers_seen_before_stand_in_for_dead_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the named peers are dead, another peer has their place, or none is named. With nobody left a node starts a
    swarm only if it may."""
    monkeypatch.setattr("noloco_node.libp2p.start.REACH_SECONDS", 0.5)
    dead = f"/ip4/127.0.0.1/tcp/9/p2p/{NOBODY}"
    key = load_or_create_identity(tmp_path / "two")
    async with running_p2p(NodeSettings(), load_or_create_identity(tmp_path / "one")) as first:
        [address] = first.visible_addresses()
        imposter = address.replace(first.own_id, NOBODY)
        for named in ((dead,), (imposter,), ()):
            async with running_p2p(joining(*named), key, Doors((dead, address), may_found=False)) as second:
                assert second.joined_peers == (address,)
        assert f"passed over {dead}: refused" in caplog.text
    async with running_p2p(joining(), key, Doors((dead, address))) as alone:
        assert alone.joined_peers == ()
    for settings, doors in ((joining(dead), Doors((address,))), (joining(), Doors((address,), may_found=False))):
        with pytest.raises(UserError) as caught:
            await start_p2p(settings, key, doors)
        assert caught.value.exit_code is ExitCode.PEERS_UNREACHABLE
        assert address in caught.value.message


async def test_a_host_that_no_resolver_takes_ends_no_start() -> None:
    """Any peer may announce a name with a part of more than 63 letters: kept in the file of those seen before, it ended
    each later start by a traceback."""
    named = f"/dns4/{'a' * 64}.example/tcp/31337/p2p/{NOBODY}"
    assert dialable([named]) == (named,)
    assert await try_peers([named], 0.0) == ([], {named: "its host is no name that can be looked up"})


async def test_a_peer_that_starts_a_little_later_is_waited_for(tmp_path: Path) -> None:
    """Its port is asked again until it answers."""
    port = free_port()
    address = f"/ip4/127.0.0.1/tcp/{port}/p2p/{NOBODY}"
    waiting = asyncio.create_task(try_peers([address], 10.0))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(waiting), 0.4)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen()
        live, reasons = await waiting
        assert ([peer.text for peer in live], reasons) == ([address], {})


async def test_the_death_of_p2pd_is_noticed(tmp_path: Path) -> None:
    """`wait_until_dead` returns, and closing afterwards cleans up."""
    async with running_p2p(NodeSettings(), load_or_create_identity(tmp_path / "key")) as daemon:
        dying = asyncio.create_task(daemon.wait_until_dead())
        os.kill(daemon.pid, signal.SIGKILL)
        assert await asyncio.wait_for(dying, 60) != 0


@pytest.mark.parametrize("letters", [0, 100_000])
async def test_a_p2pd_that_cannot_start_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, letters: int
) -> None:
    """With its last words, also where one of its lines is longer than asyncio reads."""
    monkeypatch.setattr("noloco_node.libp2p.arguments.ALWAYS", (f"-announceAddrs=nonsense{letters * 'x'}",))
    error = await failure(NodeSettings(), tmp_path)
    assert error.exit_code is ExitCode.P2P_DAEMON
    assert ("nonsense" in error.message) == (not letters)


async def test_a_p2pd_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    """After `p2pd_start_seconds`, which is named."""
    error = await failure(NodeSettings(p2pd_start_seconds=0.001), tmp_path)
    assert error.exit_code is ExitCode.P2P_DAEMON
    assert "p2pd_start_seconds" in error.message


@pytest.mark.parametrize("moment", [0.0, 0.05, 0.2])
async def test_a_cancelled_start_leaves_nothing(tmp_path: Path, moment: float) -> None:
    """Whenever the cancellation comes; the fixture looks for folders and sockets."""
    starting = asyncio.create_task(start_p2p(NodeSettings(), load_or_create_identity(tmp_path / "key")))
    await asyncio.wait((starting,), timeout=moment)
    starting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await (await starting).close()
    assert p2pd_children() == []


async def test_a_cancelled_close_closes_to_the_end(tmp_path: Path) -> None:
    """The cancellation is seen, after the work is done."""
    daemon = await start_p2p(NodeSettings(), load_or_create_identity(tmp_path / "key"))
    closing = asyncio.create_task(daemon.close())
    await one_turn()
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert not daemon.folder.exists()
    await daemon.close()


def node_of_a_key(key: Path, told: Connection) -> None:
    """A process that has a p2pd, of which it tells the id, and nothing else."""

    async def live() -> None:
        daemon = await start_p2p(NodeSettings(), load_or_create_identity(key))
        told.send(daemon.pid)
        await daemon.wait_until_dead()

    asyncio.run(live())


async def test_p2pd_dies_with_a_node_that_is_killed(tmp_path: Path) -> None:
    """`kill -9` of the node ends p2pd within moments, and the next node to start clears its sockets away. A p2pd
    that is frozen notices nothing itself: this one shows that the system ends it (PR_SET_PDEATHSIG)."""
    forks = multiprocessing.get_context("fork")  # what it needs is in memory already
    told, tell = forks.Pipe(duplex=False)
    node = forks.Process(target=node_of_a_key, args=(tmp_path / "key", tell))
    node.start()
    tell.close()
    p2pd = psutil.Process(await asyncio.to_thread(told.recv))
    told.close()
    assert p2pd.is_running()
    p2pd.suspend()
    node.kill()
    node.join()
    await eventually(lambda: not p2pd.is_running() or p2pd.status() == psutil.STATUS_ZOMBIE, what="p2pd dies too")
    assert len(glob.glob(tempfile.gettempdir() + "/noloco-*")) == 1
    async with running_p2p(NodeSettings(), load_or_create_identity(tmp_path / "key")) as next_one:
        assert glob.glob(tempfile.gettempdir() + "/noloco-*") == [str(next_one.folder)]
        assert sweep_dead_folders() == 0, "a living node's folder was swept"
        assert next_one.folder.exists()


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        (NodeSettings(host="no.such.host"), "host"),
        (NodeSettings(announce=("nonsense",)), "announce"),
        (NodeSettings(announce=("/ip4/127.0.0.1/tcp/0",)), "announce"),
    ],
)
async def test_a_wrong_address_setting_is_named(tmp_path: Path, settings: NodeSettings, word: str) -> None:
    """Host and announced addresses."""
    error = await failure(settings, tmp_path)
    assert error.exit_code is ExitCode.CONFIG
    assert error.message.startswith(f"node.{word}")


def test_the_last_daemon_of_a_killed_launcher_takes_their_temporary_folder_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not before it is the last, and never another's temporary folder."""
    shared = tmp_path / f"{SHARED_PREFIX}x"
    for base, left_alone in ((shared, False), (tmp_path / "usual", True)):
        base.mkdir()
        monkeypatch.setattr("tempfile.tempdir", str(base))
        (base / "another").mkdir()
        leave_shared_folder()
        assert base.exists()
        (base / "another").rmdir()
        leave_shared_folder()
        assert base.exists() == left_alone
