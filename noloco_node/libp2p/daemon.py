"""hivemind's p2pd as this node's child process: started, watched, started again, and gone without a trace.

Sockets lie in a private folder that is removed at the end. The daemon is in a session of its own, so a Ctrl-C in the
terminal reaches the node only. The kernel kills it when the node dies without a word.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, cast

import base58
from hivemind.p2p import P2P, PeerID  # pyright: ignore[reportMissingTypeStubs]
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, read_pbmsg_safe, write_pbmsg  # pyright: ignore[reportMissingTypeStubs]
from hivemind.proto import p2pd_pb2  # pyright: ignore[reportMissingTypeStubs]
from hivemind.utils.multiaddr import Multiaddr  # pyright: ignore[reportMissingTypeStubs]

from noloco_node.aio import Pulse, cancel_and_wait, end_process, run_to_end
from noloco_node.ambient import SOON_SECONDS
from noloco_node.errors import UserError
from noloco_node.identity.addresses import (
    CIRCUIT,
    CONNECT_SECONDS,
    PeerAddress,
    Reach,
    parse_address,
    reach_of,
    widest_first,
)
from noloco_node.identity.peer_id import PeerId
from noloco_node.libp2p.arguments import MAPS_PORT, announcing, explain
from noloco_node.libp2p.hivemind_link import connect_hivemind, disconnect_hivemind, reconnect_hivemind, withdraw_handler
from noloco_node.libp2p.relay_messages import varint
from noloco_node.storage.held import PrivateFolder
from noloco_node.transport.errors import PeerUnreachable
from noloco_node.transport.pool import StreamHandler

MOST_ADDRESSES = 16
P2P_CODE = 421
CIRCUIT_CODE = 290


@dataclass(frozen=True, slots=True)
class RawAddress:
    """Stands for hivemind's `Multiaddr` where only its bytes are wanted."""

    raw: bytes

    def to_bytes(self) -> bytes:
        """The address in binary form."""
        return self.raw


def to_dial(text: str) -> RawAddress:
    """Where a connection to the peer of this address begins: the address without the peer itself.

    hivemind's codec writes a relay's peer id as a CID, which p2pd does not understand. ValueError for no address.
    """
    relay = parse_address(text).relay
    place = text.partition(CIRCUIT)[0] if relay is not None else text
    raw = bytes(Multiaddr(place.rpartition("/p2p/")[0]).to_bytes())
    if relay is not None:
        named = base58.b58decode(relay)
        raw += varint(P2P_CODE) + varint(len(named)) + named + varint(CIRCUIT_CODE)
    return RawAddress(raw)


def as_texts(addresses: Sequence[bytes]) -> list[str]:
    """Those addresses that have a text, of which a stranger's may be of any kind."""
    texts: list[str] = []
    for raw in list(addresses)[:MOST_ADDRESSES]:
        with contextlib.suppress(ValueError, LookupError):
            texts.append(str(Multiaddr(raw)))
    return texts


logger = logging.getLogger(__name__)

_pb: Any = p2pd_pb2


class _DaemonAway(Exception):
    """This node's own p2pd does not answer: it has died, or is being started again."""


class PrivateP2P:
    """A running p2pd and the connection to it. Made by `start_p2p` or `running_p2p`. Implements `StreamHost`.

    After the p2pd's death `restart` puts another in its place, behind the same object. While `supervised`, streams to
    peers wait for it, as long as their caller's deadline lets them.
    """

    def __init__(self, folder: PrivateFolder, arguments: Sequence[str], peers: Sequence[PeerAddress] = ()) -> None:
        self._folder = folder
        self._arguments = tuple(arguments)
        self._may_map_port = MAPS_PORT in arguments
        self._peers = tuple(peers)
        self._lines: deque[str] = deque(maxlen=20)
        self._started = asyncio.Event()
        self._child: asyncio.subprocess.Process
        self._reading: asyncio.Task[None] | None = None
        self._p2p: P2P | None = None
        self._addresses: list[str] = []
        self._listening: tuple[str, ...] = ()
        self._supervised = False
        self._away = False
        self._back = Pulse()
        self.on_messages: Callable[[int, int], None] = lambda _sent, _received: None
        """Told the bytes of each message of the DHT that is sent, and received."""
        self.joined_peers: tuple[str, ...] = ()
        """Initial peers that this node is connected to."""
        self.relays: tuple[PeerAddress, ...] = ()
        """Relays through which others reach this node."""
        self.lost_relays: set[PeerId] = set()
        """The relays that do not relay for this node now."""

    @property
    def own_id(self) -> PeerId:
        """This node's peer id."""
        return PeerId(str(cast("Any", self.hivemind_p2p).peer_id))

    @property
    def hivemind_p2p(self) -> P2P:
        """hivemind's own client of this daemon, for its DHT. The object stays the same over a restart."""
        assert self._p2p is not None
        return self._p2p

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

    def listening(self) -> tuple[str, ...]:
        """Addresses of this machine that others may dial, without the peer itself; loopback's are left out."""
        own = [(text, parse_address(text)) for text in self._listening]
        return tuple(
            text.rpartition("/p2p/")[0]
            for text, address in own
            if address.relay is None and reach_of(address.host) in (Reach.PUBLIC, Reach.PRIVATE)
        )

    async def told_addresses(self) -> list[str]:
        """Addresses that others are told now, a router's that has opened a port by now among them; the widest first.
        OSError, TimeoutError, EOFError."""
        with _refusals_as_os_errors():
            async with asyncio.timeout(CONNECT_SECONDS):
                await self._identify()
        return list(self._addresses)

    @property
    def maps_port(self) -> bool:
        """Whether p2pd asks a router to open its port."""
        return MAPS_PORT in self._arguments

    def readdress(self, addresses: Sequence[str], relays: tuple[PeerAddress, ...]) -> None:
        """From the next `restart` on have others told these addresses, without the peer itself, and be reached through
        these relays.

        Without any address p2pd tells all that it listens on.
        """
        self._arguments = announcing(self._with_the_same_port(), addresses, maps_port=self._may_map_port)
        self.relays, self.lost_relays = relays, set()

    def last_output(self) -> str:
        """p2pd's last lines, for an error message."""
        return "\n  ".join(self._lines) or "(it said nothing)"

    async def wait_until_dead(self) -> int:
        """Return p2pd's exit status once it has ended, whatever the reason."""
        return await self._child.wait()

    async def answers(self, within: float) -> bool | None:
        """Whether p2pd answers a request for its own id within so many seconds; None where it could not be asked."""
        try:
            async with asyncio.timeout(within):
                _, writer, _ = await self._request(_pb.Request(type=_pb.Request.IDENTIFY))
        except (_DaemonAway, OSError) as error:
            return False if isinstance(error, TimeoutError) else None
        writer.transport.abort()
        return True

    @contextlib.contextmanager
    def supervised(self) -> Generator[None]:
        """While the block runs somebody restarts p2pd where it dies."""
        self._supervised = True
        try:
            yield
        finally:
            self._supervised = False
            self._back.fire()

    async def open_stream(self, peer: PeerId, protocol: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """See `StreamHost.open_stream`."""
        try:
            wanted = PeerID.from_base58(peer).to_bytes()
        except ValueError as error:
            raise PeerUnreachable(f"{peer}: {error}") from None
        opening = _pb.StreamOpenRequest(peer=wanted, proto=[protocol])
        while True:
            while self._away and self._supervised:
                await self._back.wait(SOON_SECONDS)
            try:
                reader, writer, response = await self._request(
                    _pb.Request(type=_pb.Request.STREAM_OPEN, streamOpen=opening)
                )
            except _DaemonAway as error:
                if not self._supervised:
                    raise PeerUnreachable(f"{peer}: {error}") from None
                await self._back.wait(SOON_SECONDS)
                continue
            except OSError as error:
                raise PeerUnreachable(f"{peer}: {error}") from None
            if response.type == _pb.Response.ERROR:
                writer.transport.abort()
                raise PeerUnreachable(f"{peer}: {response.error.msg}")
            return reader, writer

    async def _request(self, request: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, Any]:
        """Put one request to p2pd on a connection of its own. _DaemonAway where nobody answers, OSError as the system
        says. Cancelling leaves nothing open."""
        try:
            reader, writer = await asyncio.open_unix_connection(self.folder / "d", limit=256 * 1024)  # bytes read ahead
        except (ConnectionError, FileNotFoundError) as error:
            raise _DaemonAway(f"p2pd is away ({error})") from None
        try:
            await write_pbmsg(writer, request)
            response = _pb.Response()
            await read_pbmsg_safe(reader, response)
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            writer.transport.abort()
            raise _DaemonAway(f"p2pd went away ({error})") from None
        except BaseException:
            writer.transport.abort()
            raise
        return reader, writer, response

    async def serve_streams(self, protocol: str, handler: StreamHandler) -> None:
        """See `StreamHost.serve_streams`."""

        async def handle(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await handler(PeerId(str(info.peer_id)), reader, writer)

        await self.hivemind_p2p.add_binary_stream_handler(protocol, handle)

    async def stop_serving(self, protocol: str) -> None:
        """See `StreamHost.stop_serving`."""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, P2PDaemonError, KeyError, TimeoutError):
            async with asyncio.timeout(CONNECT_SECONDS):
                await withdraw_handler(self.hivemind_p2p, protocol)

    async def connect(self, peer: PeerId, addresses: Sequence[str] = ()) -> str | None:
        """Connect to a peer, at these addresses or wherever it can be found; None, or why it failed."""
        maddrs = [to_dial(text) for text in addresses]
        try:
            await cast("Any", self.hivemind_p2p)._client.connect(PeerID.from_base58(peer), maddrs)
        except (P2PDaemonError, OSError, asyncio.IncompleteReadError) as error:
            return str(error)
        return None

    async def connect_anew(self, peer: PeerId, addresses: Sequence[str]) -> str | None:
        """Drop all connections to a peer and connect to it at these addresses; None, or why it failed."""
        with contextlib.suppress(P2PDaemonError, OSError, asyncio.IncompleteReadError):
            await cast("Any", self.hivemind_p2p)._client.disconnect(PeerID.from_base58(peer))
        return await self.connect(peer, addresses)

    async def addresses_of(self, peer: PeerId) -> tuple[str, ...]:
        """Where a peer listens, as it told this p2pd or as others know; empty where nobody does."""
        request = _pb.DHTRequest(type=_pb.DHTRequest.FIND_PEER, peer=PeerID.from_base58(peer).to_bytes())
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, writer, response = await self._request(_pb.Request(type=_pb.Request.DHT, dht=request))
        except (_DaemonAway, OSError):
            return ()
        writer.transport.abort()
        return tuple(f"{address}/p2p/{peer}" for address in as_texts(response.dht.peer.addrs))

    async def connections(self) -> dict[PeerId, list[str]]:
        """The peers that this p2pd is connected to, and the other ends of these connections. OSError, TimeoutError."""
        with _refusals_as_os_errors():
            async with asyncio.timeout(CONNECT_SECONDS):
                peers = await cast("Any", self.hivemind_p2p)._client.list_peers()
        ends: dict[PeerId, list[str]] = {}
        for peer in peers:
            texts = as_texts([address.to_bytes() for address in peer.addrs])
            ends.setdefault(PeerId(str(peer.peer_id)), []).extend(texts)
        return ends

    async def start(self, within: float) -> None:
        """Start the process and connect to it. UserError (P2P_DAEMON, PORT_IN_USE, PEERS_UNREACHABLE) if it fails."""
        await self._spawn()
        await self._wait_until_up(within)
        try:
            async with asyncio.timeout(within):
                self._p2p = await connect_hivemind(self.folder, lambda sent, received: self.on_messages(sent, received))
                await self._identify()
                self._listening = tuple(self._addresses)
        except (OSError, TimeoutError, P2PDaemonError, asyncio.IncompleteReadError) as error:
            raise self._failed(f"does not answer ({error!r})") from None

    async def restart(self, within: float) -> None:
        """Put a new p2pd in the place of a dead one: same identity, folder and port, everything served as before.

        It knows no peer yet: streams go on waiting until `back`. UserError as from `start`; nothing runs then.
        """
        self._away = True
        await self._end_child()
        (self.folder / "d").unlink(missing_ok=True)
        self._arguments = self._with_the_same_port()
        self._peers = ()
        try:
            await self._spawn()
            await self._wait_until_up(within)
            async with asyncio.timeout(within):
                await reconnect_hivemind(self.hivemind_p2p)
                await self._identify()
        except (OSError, TimeoutError, P2PDaemonError, asyncio.IncompleteReadError) as error:
            await run_to_end(self._end_child())
            raise self._failed(f"does not answer ({error!r})") from None
        except BaseException:
            await run_to_end(self._end_child())
            raise

    def back(self) -> None:
        """Let the streams go on that wait for a restart."""
        self._away = False
        self._back.fire()

    async def close(self) -> None:
        """Stop the daemon and remove its folder. Runs to its end even if the caller is cancelled; may be repeated."""
        await run_to_end(self._stop())

    async def _stop(self) -> None:
        if self._p2p is not None:
            await disconnect_hivemind(self._p2p)
        await self._end_child()
        self._folder.remove()

    async def _end_child(self) -> None:
        if self._reading is not None:
            await end_process(self._child, CONNECT_SECONDS)
            await cancel_and_wait((self._reading,))

    async def _identify(self) -> None:
        _, addresses = await cast("Any", self.hivemind_p2p)._client.identify()
        told = [f"{address}/p2p/{self.own_id}" for address in addresses]
        self._addresses = widest_first([text for text in told if _is_understood(text)])

    def _with_the_same_port(self) -> tuple[str, ...]:
        """The arguments, with the port that the system chose at the first start where it was left to choose."""
        port = next((own.port for own in map(parse_address, self._listening) if own.relay is None), 0)
        return tuple(
            f"{argument.rpartition('/')[0]}/{port}"
            if argument.startswith("-hostAddrs=") and argument.endswith("/tcp/0")
            else argument
            for argument in self._arguments
        )

    async def _spawn(self) -> None:
        binary = resources.files("hivemind.hivemind_cli").joinpath("p2pd")
        launcher = [sys.executable, "-I", "-S", str(Path(__file__).with_name("launcher.py")), str(os.getpid())]
        peers = [f"-bootstrapPeers={','.join(peer.text for peer in self._peers)}"] if self._peers else []
        self._lines.clear()
        self._started.clear()
        try:
            self._child = await asyncio.create_subprocess_exec(
                *launcher,
                str(binary),
                f"-listen=/unix{self.folder}/d",
                f"-b={int(bool(peers))}",
                *peers,
                *self._arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env={**os.environ, "GOLOG_LOG_LEVEL": os.environ.get("GOLOG_LOG_LEVEL", "error")},
                start_new_session=True,
            )
        except OSError as error:
            raise self._failed(f"cannot be started ({error})") from None
        self._reading = asyncio.create_task(self._read_output())
        self._folder.note_child(self._child.pid)

    async def _wait_until_up(self, within: float) -> None:
        died = asyncio.create_task(self._child.wait())
        started = asyncio.create_task(self._started.wait())
        try:
            await asyncio.wait((died, started), timeout=within, return_when=asyncio.FIRST_COMPLETED)
            if died.done():
                assert self._reading is not None
                await self._reading
                raise self._failed(f"ended at once with status {died.result()}")
            if not started.done():
                raise self._failed(f"did not start within p2pd_start_seconds ({within:g})")
        finally:
            await cancel_and_wait((died, started))

    def _failed(self, what: str) -> UserError:
        return explain(
            what,
            self.last_output(),
            status=self._child.returncode if self._reading is not None else None,
            load=os.getloadavg()[0] / (os.cpu_count() or 1),
            peers=[peer.text for peer in self._peers],
            probe="-dhtClient=1" in self._arguments,
        )

    async def _read_output(self) -> None:
        """Keep p2pd's pipe empty, remember its last lines, and notice when it is up."""
        output = self._child.stdout
        assert output is not None
        while True:
            try:
                data = await output.readline()
            except ValueError:  # a line beyond asyncio's bound is passed over, for a full pipe would stop p2pd
                continue
            if not data:
                return
            line = data.decode(errors="replace").rstrip()[:500]
            self._lines.append(line)
            logger.debug("p2pd: %s", line)
            if line.startswith("Peer ID:"):
                self._started.set()


@contextlib.contextmanager
def _refusals_as_os_errors() -> Generator[None]:
    """p2pd's refusals, as callers know what goes wrong with it."""
    try:
        yield
    except P2PDaemonError as error:
        raise OSError(str(error)) from None


def _is_understood(text: str) -> bool:
    """What p2pd says that others see of it may be of a kind that nobody here dials."""
    try:
        parse_address(text)
    except ValueError:
        return False
    return True
