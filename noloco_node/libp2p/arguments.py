"""What p2pd is told, from a node's settings; what is wrong with them before anything is started; and why p2pd did not
start, from what can be seen to the likely cause and what to do about it."""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
from collections.abc import Sequence
from pathlib import Path

from noloco_node.config.node_settings import NodeSettings
from noloco_node.errors import ExitCode, UserError
from noloco_node.identity.addresses import Reach, peers_unreachable, reach_of

ALWAYS = ("-connManager=1", "-autonat=0", "-autoRelay=0", "-relay=0", "-relayService=0", "-tls=1", "-idleTimeout=30s")

MAPS_PORT = "-natPortMap=1"
"""This argument has a router asked, by UPnP or NAT-PMP, to open the port for as long as p2pd runs."""
_ANNOUNCES = "-announceAddrs="
_ANNOUNCED = re.compile(r"/(?P<kind>ip4|ip6|dns|dns4|dns6)/(?P<host>[^/\s]+)/tcp/(?P<port>\d{1,5})(?:/p2p/[^/\s]+)?/?")
_SHORT = re.compile(r"(?:\[(?P<six>[0-9a-fA-F:.]+)\]|(?P<host>[^:/\s\[\]]+))(?::(?P<port>\d{1,5}))?")
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*")


def node_arguments(settings: NodeSettings, identity: Path, circuits: Sequence[str] = ()) -> tuple[str, ...]:
    """p2pd's arguments for a node. With `circuits`, addresses through relays, it tells others no address that it merely
    listens on. UserError (CONFIG) for a host or an announced address that is none."""
    arguments = [*ALWAYS, f"-id={identity.resolve()}", "-dhtServer=1"]
    arguments.append(f"-hostAddrs={listen_address(settings.host, settings.port)}")
    announced = [announced_address(text, settings.host, settings.port) for text in settings.announce]
    if announced or circuits:
        return announcing(arguments, (*announced, *circuits))
    behind_a_router = settings.map_port and not ipaddress.ip_address(settings.host).is_loopback
    return (*arguments, MAPS_PORT) if behind_a_router else tuple(arguments)


def announcing(arguments: Sequence[str], addresses: Sequence[str], *, maps_port: bool = False) -> tuple[str, ...]:
    """The arguments with these addresses as those that others are told, whatever p2pd listens on; with none, p2pd tells
    those, and asks a router if it `maps_port`. Told an address, it keeps a router's to itself, so it asks for none."""
    rest = tuple(each for each in arguments if not each.startswith(_ANNOUNCES) and each != MAPS_PORT)
    if addresses:
        return (*rest, f"{_ANNOUNCES}{','.join(addresses)}")
    return (*rest, MAPS_PORT) if maps_port else rest


def listen_address(host: str, port: int) -> str:
    """`/ip4/HOST/tcp/PORT` (or ip6). UserError (CONFIG) where the host is no IP address."""
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        raise UserError(
            ExitCode.CONFIG,
            f"node.host: '{host}' is no IP address to listen on",
            "use 127.0.0.1 for this machine only, 0.0.0.0 for all networks, or an address of this machine",
        ) from None
    return f"/ip{version}/{host}/tcp/{port}"


def announced_address(text: str, host: str, port: int) -> str:
    """The address that others are told, as libp2p writes it, for `/ip4/H/tcp/P`, `H:P`, or `H` alone with the port that
    this node listens on. `host` and `port` are those it listens on.

    UserError (CONFIG) for an address under which nobody could reach the node.
    """
    match = _ANNOUNCED.fullmatch(text) or _SHORT.fullmatch(text)
    if match is None:
        raise _unusable(text, "it is no address")
    parts = match.groupdict()
    named = parts.get("six") or parts["host"]
    number = port if parts["port"] is None else int(parts["port"])
    if not 0 < number < 65536:
        raise _unusable(text, f"nobody can reach port {number}; set port, and announce the port that others reach")
    try:
        address = ipaddress.ip_address(named)
    except ValueError:
        kind = parts.get("kind") or "dns"
        if not kind.startswith("dns") or not _NAME.fullmatch(named) or named.replace(".", "").isdigit():
            raise _unusable(text, f"'{named}' is neither an IP address nor a name") from None
    else:
        kind = f"ip{address.version}"
    reach = reach_of(named)
    if reach is Reach.NOWHERE:
        raise _unusable(text, f"{named} is no address that can be reached")
    if reach is Reach.LOOPBACK and reach_of(host) is not Reach.LOOPBACK:
        raise _unusable(text, f"{named} is this machine only, and others would dial themselves")
    return f"/{kind}/{named}/tcp/{number}"


def one_family(host: str) -> str | None:
    """What to tell of a host that stands for all addresses of IPv6 and, unlike with other programs, for none of IPv4.
    None for any other host."""
    if ipaddress.ip_address(host) != ipaddress.IPv6Address("::"):
        return None
    return "host is ::, so this node listens by IPv6 only; --host 0.0.0.0 listens by IPv4, which most others have"


def check_port_free(host: str, port: int) -> None:
    """UserError: PORT_IN_USE where the port cannot be listened on (0, any free one, always can), CONFIG where the host
    is no address of this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise UserError(
                    ExitCode.CONFIG,
                    f"node.host: '{host}' is no address of this machine, so it cannot be listened on",
                    "listen on all of this machine's addresses with --host 0.0.0.0, and where others reach it by "
                    f"another one, behind a router, tell them: --announce {host}:{port or 'PORT'}",
                ) from None
            raise port_taken(host, port, error.strerror or str(error)) from None


def port_taken(host: str, port: int, why: str) -> UserError:
    """The error for a port that p2pd cannot listen on."""
    return UserError(
        ExitCode.PORT_IN_USE,
        f"node.port: {port} on {host} cannot be listened on ({why})",
        "stop the program that uses it, or choose another port (0 lets the system choose; below 1024 takes special "
        "rights)",
    )


def _unusable(text: str, why: str) -> UserError:
    return UserError(
        ExitCode.CONFIG,
        f"node.announce: '{text}' cannot be announced: {why}",
        "write it as 203.0.113.7:31337 or /ip4/203.0.113.7/tcp/31337, with the port that others reach",
    )


BOOTSTRAP_FAILED = "failed to connect to bootstrap peers"
"""p2pd says this before it ends, when every initial peer accepted a TCP connection and none was a peer."""
ADDRESS_IN_USE = "address already in use"
NOT_THIS_PEER = "something listens there, but it is not this peer"
NOT_IN_TIME = f"{NOT_THIS_PEER}, or it is too busy to answer"
"""p2pd does not tell which of these two it was."""


def explain(what: str, output: str, *, status: int | None, load: float, peers: Sequence[str], probe: bool) -> UserError:
    """The error of a start of p2pd that came to nothing: what happened, the likely cause, the remedy.

    `what`: `did not start within ...`, or how it ended. `output`: its last words. `status` is its exit status: None
    where it still ran, negative where a signal ended it. `load`: processes waiting for each core, as the mean over the
    last minute. `peers`: initial peers that it was told to connect to. `probe`: it was the short-lived one that asks
    whether the identity is free.
    """
    if BOOTSTRAP_FAILED in output and peers:
        return peers_unreachable(dict.fromkeys(peers, NOT_IN_TIME))
    code, longer = ExitCode.P2P_DAEMON, "wait and start again, or raise node.p2pd_start_seconds"
    if ADDRESS_IN_USE in output:
        code, cause = ExitCode.PORT_IN_USE, "the port was taken while it started"
        remedy = "stop the program that uses the port, or choose another with --port"
    elif status == -9:
        cause = "the system killed it, most often for want of memory"
        remedy = "free memory, or look into the system's log"
    elif status is not None:
        cause = "it refused its arguments or its files"
        remedy = "see its last words, which name what it does not take; if they name nothing of yours, report this"
    elif load > 2.0:
        cause, remedy = f"a busy machine: {load:.1f} processes wait for each core", longer
    elif peers:
        stuck, fine = ("the identity probe is stuck: ", "; the identity is fine") if probe else ("", "")
        cause = f"{stuck}a dead seed, which takes connections and answers nothing ({', '.join(peers)})"
        remedy = f"name other initial peers, or none of these{fine}"
    else:
        cause, remedy = "none that can be seen", f"{longer}; if it happens again, report this"
    purpose = " (the one that asks whether this identity is free)" if probe else ""
    return UserError(
        code, f"hivemind's p2pd{purpose} {what}. Likely cause: {cause}. Its last words:\n  {output}", remedy
    )
