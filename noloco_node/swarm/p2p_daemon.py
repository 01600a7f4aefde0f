"""hivemind's p2pd as this node's child process: started, watched, and gone without a trace.

Sockets lie in a private folder that is removed at the end. The daemon is in a session of its own, so a Ctrl-C in the
terminal reaches the node only, and the kernel kills it when the node dies without a word.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, cast

from hivemind.p2p import P2P, PeerID  # pyright: ignore[reportMissingTypeStubs]
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, read_pbmsg_safe, write_pbmsg  # pyright: ignore[reportMissingTypeStubs]
from hivemind.proto import p2pd_pb2  # pyright: ignore[reportMissingTypeStubs]
from hivemind.utils.multiaddr import Multiaddr  # pyright: ignore[reportMissingTypeStubs]

from noloco_node.aio import cancel_and_wait, run_to_end
from noloco_node.config.node_settings import NodeSettings
from noloco_node.errors import ExitCode, UserError
from noloco_node.swarm.identity import Identity, identity_taken
from noloco_node.swarm.peer_addresses import PeerAddress, answering_peers, log_passed_over, peers_unreachable
from noloco_node.swarm.private_folder import PrivateFolder, sweep_dead_folders
from noloco_node.swarm.stream_pool import StreamHandler
from noloco_node.swarm.transport import PeerId, PeerUnreachable

logger = logging.getLogger(__name__)

PEERS_ANSWER_SECONDS = 10.0
PROBE_SECONDS = 8.0
STOP_SECONDS = 3.0
LAST_LINES = 20
BOOTSTRAP_FAILED = "failed to connect to bootstrap peers"
"""What p2pd says before it ends, when every initial peer accepted a TCP connection and none was a peer."""
NOT_THIS_PEER = "something listens there, but it is not this peer"
STREAM_BUFFER_BYTES = 256 * 1024

_BASE_ARGUMENTS = (
    "-connManager=1",
    "-autonat=0",
    "-autoRelay=0",
    "-natPortMap=0",
    "-relay=0",
    "-relayService=0",
    "-tls=1",
    "-idleTimeout=30s",
)
_pb: Any = p2pd_pb2


class PrivateP2P:
    """A running p2pd and the connection to it. Made by `start_p2p` or `running_p2p`. Implements `StreamHost`."""

    def __init__(self, folder: PrivateFolder, child: asyncio.subprocess.Process) -> None:
        self._folder = folder
        self._child = child
        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        self._started = asyncio.Event()
        self._reading = asyncio.create_task(self._read_output())
        self._p2p: Any = None
        self._addresses: list[str] = []
        self.joined_peers: tuple[str, ...] = ()
        """Initial peers that this node is connected to."""

    @property
    def own_id(self) -> PeerId:
        """This node's peer id."""
        return PeerId(str(self._p2p.peer_id))

    @property
    def hivemind_p2p(self) -> P2P:
        """hivemind's view of the same daemon, for its DHT."""
        return cast("P2P", self._p2p)

    @property
    def pid(self) -> int:
        """Process id of p2pd."""
        return self._child.pid

    @property
    def folder(self) -> Path:
        """Where its sockets lie; gone after `close`."""
        return self._folder.path

    def visible_addresses(self) -> list[str]:
        """Addresses under which other nodes can join through this one."""
        return list(self._addresses)

    def last_output(self) -> str:
        """p2pd's last lines, for an error message."""
        return "\n  ".join(self._lines) or "(it said nothing)"

    async def wait_until_dead(self) -> int:
        """Return p2pd's exit status once it has ended, whatever the reason."""
        return await self._child.wait()

    async def open_stream(self, peer: PeerId, protocol: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """See `StreamHost.open_stream`."""
        try:
            peer_bytes = PeerID.from_base58(peer).to_bytes()
            reader, writer = await asyncio.open_unix_connection(self.folder / "d", limit=STREAM_BUFFER_BYTES)
        except (OSError, ValueError) as error:
            raise PeerUnreachable(f"{peer}: {error}") from None
        try:
            opening = _pb.StreamOpenRequest(peer=peer_bytes, proto=[protocol])
            await write_pbmsg(writer, _pb.Request(type=_pb.Request.STREAM_OPEN, streamOpen=opening))
            response = _pb.Response()
            await read_pbmsg_safe(reader, response)
        except (OSError, asyncio.IncompleteReadError) as error:
            writer.transport.abort()
            raise PeerUnreachable(f"{peer}: p2pd went away ({error})") from None
        except BaseException:
            writer.transport.abort()
            raise
        if response.type == _pb.Response.ERROR:
            writer.transport.abort()
            raise PeerUnreachable(f"{peer}: {response.error.msg}")
        return reader, writer

    async def serve_streams(self, protocol: str, handler: StreamHandler) -> None:
        """See `StreamHost.serve_streams`."""

        async def handle(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await handler(PeerId(str(info.peer_id)), reader, writer)

        await self._p2p.add_binary_stream_handler(protocol, handle)

    async def stop_serving(self, protocol: str) -> None:
        """See `StreamHost.stop_serving`."""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, P2PDaemonError, KeyError, TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                await self._p2p.remove_binary_stream_handler(protocol)

    async def connect(self, peer: PeerId, addresses: Sequence[str] = ()) -> str | None:
        """Connect to a peer, at these addresses or wherever it can be found; None, or why it failed."""
        maddrs = [Multiaddr(text.rpartition("/p2p/")[0]) for text in addresses]
        try:
            await self._p2p._client.connect(PeerID.from_base58(peer), maddrs)
        except (P2PDaemonError, OSError, asyncio.IncompleteReadError) as error:
            return str(error)
        return None

    async def attach(self, within: float) -> None:
        """Wait until the daemon has started, then connect to it. UserError (P2P_DAEMON) if it does not."""
        died = asyncio.create_task(self._child.wait())
        started = asyncio.create_task(self._started.wait())
        try:
            await asyncio.wait((died, started), timeout=within, return_when=asyncio.FIRST_COMPLETED)
            if died.done():
                await self._reading
                raise _daemon_failed(f"ended at once with status {died.result()}", self.last_output())
            if not started.done():
                raise _daemon_failed(f"did not start within p2pd_start_seconds ({within:g})", self.last_output())
        finally:
            await cancel_and_wait((died, started))
        # hivemind puts its own socket where this class attribute says, and has no other way to be told.
        kind = type("FolderP2P", (P2P,), {"_UNIX_SOCKET_PREFIX": f"/unix{self.folder}/"})
        try:
            async with asyncio.timeout(within):
                self._p2p = await cast("Any", kind).replicate(Multiaddr(f"/unix{self.folder}/d"))
                _, addresses = await self._p2p._client.identify()
                self._addresses = [f"{address}/p2p/{self.own_id}" for address in addresses]
        except (OSError, TimeoutError, P2PDaemonError, asyncio.IncompleteReadError) as error:
            raise _daemon_failed(f"does not answer ({error!r})", self.last_output()) from None

    async def close(self) -> None:
        """Stop the daemon and remove its folder. Runs to its end even if the caller is cancelled; may be repeated."""
        await run_to_end(self._stop())

    async def _stop(self) -> None:
        if self._p2p is not None:
            control = self._p2p._client.control
            tasks = (self._p2p._listen_task, control._read_task, control._write_task)
            await self._p2p.shutdown()
            await cancel_and_wait([task for task in tasks if task is not None])
        await _end_process(self._child)
        await cancel_and_wait((self._reading,))
        self._folder.remove()

    async def _read_output(self) -> None:
        """Keep p2pd's pipe empty, remember its last lines, and notice when it is up."""
        assert self._child.stdout is not None
        while data := await self._child.stdout.readline():
            line = data.decode(errors="replace").rstrip()[:500]
            self._lines.append(line)
            logger.debug("p2pd: %s", line)
            if line.startswith("Peer ID:"):
                self._started.set()


async def start_p2p(settings: NodeSettings, identity: Identity) -> PrivateP2P:
    """Start p2pd as the settings say and connect it to the initial peers that answer.

    Raises UserError: PORT_IN_USE, PEERS_UNREACHABLE, IDENTITY_TAKEN (another live node has this peer id), P2P_DAEMON,
    or CONFIG (a host or announced address that is none). Leaves nothing behind when it raises or is cancelled.
    """
    listen = _listen_address(settings.host, settings.port)
    for address in settings.announce:
        _check_announced(address)
    _check_port_free(settings.host, settings.port)
    sweep_dead_folders()
    peers: list[PeerAddress] = []
    if settings.initial_peers:
        peers = await answering_peers(settings.initial_peers, PEERS_ANSWER_SECONDS)
        await _check_identity_free(settings, identity, peers)
    arguments = [f"-id={identity.path.resolve()}", "-dhtServer=1", f"-hostAddrs={listen}"]
    if settings.announce:
        arguments.append(f"-announceAddrs={','.join(settings.announce)}")
    daemon = await _launch(arguments, peers, settings.p2pd_start_seconds)
    try:
        await _connect_to_some(daemon, peers)
    except BaseException:
        await daemon.close()
        raise
    return daemon


@contextlib.asynccontextmanager
async def running_p2p(settings: NodeSettings, identity: Identity) -> AsyncGenerator[PrivateP2P]:
    """`start_p2p`, closed at the end of the block."""
    daemon = await start_p2p(settings, identity)
    try:
        yield daemon
    finally:
        await daemon.close()


async def _launch(arguments: Sequence[str], peers: Sequence[PeerAddress], within: float) -> PrivateP2P:
    folder = PrivateFolder()
    bootstrap = ["-b=1", f"-bootstrapPeers={','.join(peer.text for peer in peers)}"] if peers else ["-b=0"]
    binary = resources.files("hivemind.hivemind_cli").joinpath("p2pd")
    launcher = [sys.executable, "-I", "-S", str(Path(__file__).with_name("p2pd_launcher.py")), str(os.getpid())]
    try:
        child = await asyncio.create_subprocess_exec(
            *launcher,
            str(binary),
            f"-listen=/unix{folder.path}/d",
            *_BASE_ARGUMENTS,
            *bootstrap,
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, "GOLOG_LOG_LEVEL": os.environ.get("GOLOG_LOG_LEVEL", "error")},
            start_new_session=True,
        )
    except BaseException as error:
        folder.remove()
        if isinstance(error, OSError):
            raise _daemon_failed(f"cannot be started ({error})", str(binary)) from None
        raise
    daemon = PrivateP2P(folder, child)
    try:
        await daemon.attach(within)
    except BaseException as error:
        await daemon.close()
        if isinstance(error, UserError) and BOOTSTRAP_FAILED in daemon.last_output():
            raise peers_unreachable({peer.text: NOT_THIS_PEER for peer in peers}) from None
        raise
    return daemon


async def _check_identity_free(settings: NodeSettings, identity: Identity, peers: Sequence[PeerAddress]) -> None:
    """Ask the swarm, through a short-lived nameless p2pd, whether a live node answers under our peer id.

    Our own p2pd cannot ask: to it the id is its own. A key made just now needs no question. A node that crashed does
    not answer, so it comes straight back under its old id.
    """
    if identity.created:
        return
    own = [peer for peer in peers if peer.peer == identity.peer_id]
    if own:
        raise identity_taken(identity.path, f"the initial peer {own[0].text}")
    probe = await _launch(["-dhtClient=1", "-noListenAddrs=1"], peers, settings.p2pd_start_seconds)
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            answered = await probe.connect(identity.peer_id) is None
    except TimeoutError:
        answered = False
    finally:
        await probe.close()
    if answered:
        raise identity_taken(identity.path, f"a live node of the swarm (peer id {identity.peer_id})")


async def _connect_to_some(daemon: PrivateP2P, peers: Sequence[PeerAddress]) -> None:
    """A port that answers may belong to anything: go on only with the peers that are who their address says."""
    failures = await asyncio.gather(*(daemon.connect(peer.peer, [peer.text]) for peer in peers))
    daemon.joined_peers = tuple(peer.text for peer, failure in zip(peers, failures, strict=True) if failure is None)
    failed = zip(peers, failures, strict=True)
    reasons = {peer.text: f"{NOT_THIS_PEER} ({why[:200]})" for peer, why in failed if why is not None}
    if peers and not daemon.joined_peers:
        raise peers_unreachable(reasons)
    log_passed_over(reasons)


async def _end_process(child: asyncio.subprocess.Process) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        if child.returncode is not None:
            return
        # Not child.terminate(): it polls, and may take the exit status away from asyncio's watcher.
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, number)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                await child.wait()


def _listen_address(host: str, port: int) -> str:
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        raise UserError(
            ExitCode.CONFIG,
            f"host: '{host}' is no IP address to listen on",
            "use 127.0.0.1 for this machine only, 0.0.0.0 for all networks, or an address of this machine",
        ) from None
    return f"/ip{version}/{host}/tcp/{port}"


def _check_announced(address: str) -> None:
    try:
        parsed: Any = Multiaddr(address)
        port = int(parsed["tcp"])
    except (ValueError, LookupError) as error:
        raise UserError(
            ExitCode.CONFIG,
            f"announce: '{address}' is no address ({error})",
            "write it as /ip4/203.0.113.7/tcp/31337, with the port that others reach",
        ) from None
    if port == 0:
        raise UserError(
            ExitCode.CONFIG,
            f"announce: '{address}' has port 0",
            "set port, and announce the port that others reach",
        )


def _check_port_free(host: str, port: int) -> None:
    if port == 0:
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UserError(
                ExitCode.PORT_IN_USE,
                f"port: {port} on {host} cannot be listened on ({error.strerror})",
                "stop the program that uses it, or choose another port (0 lets the system choose)",
            ) from None


def _daemon_failed(what: str, output: str) -> UserError:
    return UserError(
        ExitCode.P2P_DAEMON,
        f"hivemind's p2pd {what}. Its last words:\n  {output}",
        "raise p2pd_start_seconds on a slow machine; otherwise reinstall hivemind, or report this",
    )
