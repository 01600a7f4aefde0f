"""p2pd dies and comes back under the node: same identity, same port, everything served as before."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import psutil
import pytest

from noloco_node.config.node_settings import NodeSettings
from noloco_node.directory.dht import join_directory
from noloco_node.errors import ExitCode, UserError
from noloco_node.identity.keys import load_or_create_identity
from noloco_node.identity.peer_id import PeerId
from noloco_node.libp2p.daemon import PrivateP2P
from noloco_node.libp2p.start import running_p2p
from noloco_node.libp2p.supervisor import (
    MOST_DEATHS,
    WINDOW_SECONDS,
    DescriptorWatch,
    Probes,
    Supervisor,
    descriptors_of,
    restart_delay,
)
from noloco_node.simulator.loop import in_virtual_time
from noloco_node.storage.held import sweep_dead_folders
from noloco_node.transport.errors import PeerUnreachable
from noloco_node.transport.libp2p import Libp2pTransport
from noloco_node.transport.messages import Message
from tests.support import eventually, one_turn
from tests.worlds import no_tensors, record_of

pytestmark = pytest.mark.usefixtures("temporary")

RUN = "ab" * 32


def test_the_first_restart_is_at_once_the_next_ones_wait_and_then_it_is_enough() -> None:
    """Within the window; older deaths are forgiven."""
    deaths: list[float] = []
    delays: list[float | None] = []
    for second in range(MOST_DEATHS):
        deaths.append(float(second))
        delays.append(restart_delay(deaths, float(second)))
    assert delays == [0.0, 1.0, 2.0, 4.0, None]
    later = WINDOW_SECONDS + MOST_DEATHS
    assert restart_delay([*deaths, later], later) == 0.0


def test_a_p2pd_without_descriptors_is_said_once_with_a_remedy(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody new got in, and nothing stood in the log; again only when it was over in between."""
    watch = DescriptorWatch()
    told: list[int] = []
    for used in (100, 950, 990, 800, 960, 600, 950):
        watch.look(used, 1000)
        told.append(sum("LimitNOFILE" in record.message for record in caplog.records))
    assert told == [0, 1, 1, 1, 1, 1, 2]
    with open(os.devnull):
        used, limit = descriptors_of(os.getpid()) or (0, 0)
    assert 3 < used < limit == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert descriptors_of(2**22 + 1) is None
    monkeypatch.delattr(resource, "prlimit")  # as on macOS
    assert descriptors_of(os.getpid()) is None


def kill(daemon: PrivateP2P, number: int = signal.SIGKILL) -> int:
    """kill -9 of its p2pd, or another signal; the process id."""
    os.kill(daemon.pid, number)
    return daemon.pid


async def echo(_peer: PeerId, message: Message) -> Message:
    """Answers with what came."""
    return message


async def ask(caller: Libp2pTransport, peer: PeerId) -> bool:
    """Whether a request gets its answer."""
    answer = await caller.call(peer, "echo", Message({"word": "hi"}), timeout=30.0, progress=20.0, max_answer_bytes=0)
    return answer.header == {"word": "hi"}


@pytest.mark.daemons
@pytest.mark.timeout(60)
async def test_others_are_told_a_new_address_without_a_restart_of_the_node(tmp_path: Path) -> None:
    """Another p2pd comes in the place of the sound one, under the same identity and port. That counts as no death, and
    is told to nobody as one; both sides reach each other as before."""
    one, two = (load_or_create_identity(tmp_path / name) for name in ("one", "two"))
    async with running_p2p(NodeSettings(), one) as first:
        listening = first.visible_addresses()
        async with running_p2p(NodeSettings(initial_peers=tuple(listening)), two) as second:
            server, caller = Libp2pTransport(first), Libp2pTransport(second)
            for transport in (server, caller):
                transport.serve("echo", no_tensors, echo, max_concurrent_per_peer=4)
                await transport.start()

            async def rejoin() -> None:
                """There is no directory here."""

            supervisor = Supervisor(first, 60.0, lambda: {second.own_id: second.visible_addresses()}, rejoin)
            causes: list[str] = []
            supervisor.on_restart = causes.append

            async def work() -> None:
                own = listening[0].rpartition("/p2p/")[0]
                first.readdress((own, "/ip4/203.0.113.7/tcp/31337"), ())
                before = first.pid
                await supervisor.renew()
                assert await ask(server, second.own_id)
                assert first.pid != before
                assert first.visible_addresses() == [f"/ip4/203.0.113.7/tcp/31337/p2p/{one.peer_id}", *listening]
                assert await eventually_reached(caller, first.own_id)

            await supervisor.beside(work())
            assert (causes, supervisor.restarts) == ([], 0)
            for transport in (server, caller):
                await transport.close()


@pytest.mark.daemons
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("number", "cause"), [(signal.SIGKILL, "died"), (signal.SIGSTOP, "frozen")])
async def test_a_killed_or_frozen_p2pd_comes_back_as_if_nothing_had_been(
    tmp_path: Path, number: int, cause: str
) -> None:
    """Same peer id, addresses, folder. The request that comes in the middle waits; others reach the node again; its
    directory still takes and gives records; nothing is left of the first p2pd. Its restart is told with its cause."""
    one, two = (load_or_create_identity(tmp_path / name) for name in ("one", "two"))
    async with running_p2p(NodeSettings(), one) as first:
        addresses = first.visible_addresses()
        async with running_p2p(NodeSettings(initial_peers=tuple(addresses)), two) as second:
            server, caller = Libp2pTransport(first), Libp2pTransport(second)
            for transport in (server, caller):
                transport.serve("echo", no_tensors, echo, max_concurrent_per_peer=4)
                await transport.start()
            here, there = await join_directory(first, one, RUN, 1), await join_directory(second, two, RUN, 1)
            known = {second.own_id: second.visible_addresses()}

            async def rejoin() -> None:
                assert await here.rejoin([second.own_id]) == 1

            supervisor = Supervisor(first, 60.0, lambda: known, rejoin, Probes(every=0.2, within=1.0, misses=3))
            causes: list[str] = []
            supervisor.on_restart = causes.append

            async def work() -> None:
                assert await ask(caller, first.own_id)
                killed = kill(first, number)
                if number == signal.SIGSTOP:  # what it takes on before it stands still is lost with it
                    await eventually(lambda: psutil.Process(killed).status() == psutil.STATUS_STOPPED)
                assert await ask(server, second.own_id), "it waited for the restart, and then went through"
                await eventually(lambda: supervisor.restarts == 1, what="it is back")
                assert first.pid != killed
                assert not psutil.pid_exists(killed)
                assert first.own_id == one.peer_id
                _, now = await first.hivemind_p2p._client.identify()
                assert [f"{address}/p2p/{first.own_id}" for address in now] == addresses
                assert await eventually_reached(caller, first.own_id)
                assert await here.publish(record_of(first.own_id, 0), 60.0)
                assert await there.publish(record_of(second.own_id, 0), 60.0)
                for directory in (here, there):
                    assert len((await directory.refresh()).live(0, directory.now())) == 2

            await supervisor.beside(work())
            assert causes == [cause]
            for directory in (here, there):
                await directory.close()
            for transport in (server, caller):
                await transport.close()


async def eventually_reached(caller: Libp2pTransport, peer: PeerId) -> bool:
    """Whether a peer answers again; libp2p does not dial one that has just refused for some seconds."""
    for _ in range(60):
        try:
            return await ask(caller, peer)
        except PeerUnreachable:
            await asyncio.sleep(0.5)
    return False


@pytest.mark.daemons
async def test_a_node_that_ends_does_not_wait_for_a_frozen_p2pd(tmp_path: Path) -> None:
    """It is gone within seconds, with its folder."""
    async with running_p2p(NodeSettings(), load_or_create_identity(tmp_path / "key")) as daemon:
        transport = Libp2pTransport(daemon)
        transport.serve("echo", no_tensors, echo, max_concurrent_per_peer=1)
        await transport.start()
        kill(daemon, signal.SIGSTOP)
        async with asyncio.timeout(20):
            await transport.close()
            await daemon.close()
        assert not psutil.pid_exists(daemon.pid)
        assert not daemon.folder.exists()


@pytest.mark.daemons
async def test_a_p2pd_that_cannot_be_asked_is_not_frozen(tmp_path: Path) -> None:
    """This process has no descriptor left: a healthy p2pd is not killed for it. Nor is one frozen that has died."""

    async def nothing() -> None:
        return None

    async with running_p2p(NodeSettings(), load_or_create_identity(tmp_path / "key")) as daemon:
        supervisor = Supervisor(daemon, 60.0, dict, nothing, Probes(every=0.02, within=5.0, misses=3))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await supervisor.until_frozen()
            assert await daemon.answers(5.0) is None
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert await daemon.answers(30.0)
        kill(daemon)
        await daemon.wait_until_dead()
        assert await daemon.answers(5.0) is None


class Hesitant:
    """Stands for a p2pd that answers some questions and not others; real ones freeze in the test above."""

    def __init__(self, answers: list[bool | None]) -> None:
        self.left = answers
        self.pid = os.getpid()

    async def answers(self, _within: float) -> bool | None:
        return self.left.pop(0)


@pytest.mark.parametrize(
    ("answers", "frozen"),
    [
        ([False, False, True] * 20, False),
        ([True, False, False, False], True),
        ([False, False, None, None], False),
        ([False, None, False, None, False], True),
    ],
    ids=["busy", "frozen", "not asked", "asked now and then"],
)
async def test_only_misses_in_a_row_mean_frozen(answers: list[bool | None], frozen: bool) -> None:
    """A busy p2pd that leaves two questions of three unanswered goes on for ever. A question that could not be put
    counts neither for nor against it."""

    async def nothing() -> None:
        return None

    daemon = cast("PrivateP2P", Hesitant(list(answers)))
    supervisor = Supervisor(daemon, 60.0, dict, nothing, Probes(every=0.0, within=1.0, misses=3))
    if frozen:
        await supervisor.until_frozen()
    else:
        with pytest.raises(IndexError, match="pop from empty"):
            await supervisor.until_frozen()


class SlowToStart:
    """Stands for a p2pd on a busy machine: it ends at once, and the next one takes 8 s to start."""

    def __init__(self) -> None:
        self.pid = 2**22 + 1  # nobody's
        self.ended = asyncio.Event()

    def supervised(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    async def wait_until_dead(self) -> int:
        await self.ended.wait()
        return 0

    async def answers(self, _within: float) -> bool:
        return True

    async def restart(self, _within: float) -> None:
        self.ended.clear()
        self.pid += 1
        await asyncio.sleep(8.0)
        assert not self.ended.is_set(), "it was killed as it started"

    def back(self) -> None: ...


def test_a_p2pd_that_starts_slowly_is_not_killed_in_place_of_the_one_that_it_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A new address is told: the one that was told to end has ended, and the node waits for the next one."""

    async def renewed() -> int:
        slow = SlowToStart()

        def end(pid: int, _number: int) -> None:
            if pid == slow.pid:
                slow.ended.set()

        async def nothing() -> None:
            return None

        monkeypatch.setattr(os, "kill", end)
        supervisor = Supervisor(cast("PrivateP2P", slow), 60.0, dict, nothing)
        before = slow.pid
        await supervisor.beside(supervisor.renew())
        assert asyncio.get_running_loop().time() >= 8.0, "it is there"
        return slow.pid - before

    assert in_virtual_time(renewed) == 1


@pytest.mark.daemons
async def test_a_p2pd_that_dies_again_and_again_ends_the_node_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bounded number of times; the work beside it is cancelled, and a request is not kept waiting for ever."""
    monkeypatch.setattr("noloco_node.libp2p.supervisor.MOST_DEATHS", 2)

    async def nothing() -> None:
        return None

    async with running_p2p(NodeSettings(), load_or_create_identity(tmp_path / "key")) as daemon:
        supervisor = Supervisor(daemon, 60.0, dict, nothing)

        async def work() -> None:
            kill(daemon)
            await eventually(lambda: supervisor.restarts == 1, what="it is back")
            kill(daemon)
            await asyncio.Event().wait()

        with pytest.raises(UserError, match="died 2 times") as caught:
            await supervisor.beside(work())
        assert caught.value.exit_code is ExitCode.P2P_DAEMON
        with pytest.raises(PeerUnreachable):
            await daemon.open_stream(daemon.own_id, "any")


@pytest.mark.daemons
async def test_the_work_ends_first_and_its_companions_with_it(tmp_path: Path) -> None:
    """The result comes through; what ran beside is cancelled."""
    ended = asyncio.Event()

    async def companion() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def nothing() -> None:
        return None

    async def work() -> int:
        await one_turn()
        return 7

    async with running_p2p(NodeSettings(), load_or_create_identity(tmp_path / "key")) as daemon:
        assert await Supervisor(daemon, 60.0, dict, nothing).beside(work(), companion()) == 7
    assert ended.is_set()


@pytest.mark.daemons
async def test_a_person_sees_the_error_of_the_work_and_no_group_of_groups(tmp_path: Path) -> None:
    """However many task groups it came through."""

    async def fails() -> None:
        raise UserError(ExitCode.NO_STATE_SOURCE, "nobody gave it", "try again")

    async def work() -> None:
        async with asyncio.TaskGroup() as outer, asyncio.TaskGroup() as inner:
            inner.create_task(fails())
            outer.create_task(asyncio.Event().wait())  # pyright: ignore[reportArgumentType]

    async def nothing() -> None:
        return None

    async with running_p2p(NodeSettings(), load_or_create_identity(tmp_path / "key")) as daemon:
        with pytest.raises(UserError, match="nobody gave it"):
            await Supervisor(daemon, 60.0, dict, nothing).beside(work())


@pytest.fixture
def own_base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for private folders that nobody else sweeps; short, or it would not be used."""
    with tempfile.TemporaryDirectory(prefix="nlt-") as made:
        monkeypatch.setattr(tempfile, "tempdir", made)
        yield Path(made)


async def test_an_orphan_is_reaped_only_if_it_is_ours(own_base: Path) -> None:
    """A process that names the dead folder is killed with it; one whose number merely stands there is not."""
    for name, ours in (("noloco-ours", True), ("noloco-reused", False)):
        folder = own_base / name
        folder.mkdir()
        (folder / "lock").touch()
        naming = [f"-listen=/unix{folder}/d"] if ours else []
        child = await asyncio.create_subprocess_exec("sh", "-c", "sleep 60; true", "sh", *naming)
        process = psutil.Process(child.pid)  # for a moment after the exec a process has no arguments (8 of 400)
        await eventually(process.cmdline, what="the child shows its arguments")
        (folder / "pid").write_text(str(child.pid))
        try:
            assert sweep_dead_folders() == 1
            if ours:
                assert await asyncio.wait_for(child.wait(), 60) == -signal.SIGKILL
            else:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(child.wait(), 0.3)
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()
