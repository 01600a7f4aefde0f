"""Keeps a node reachable: has peers dial it, tells others the address at which they did, and asks for relays by itself
where nobody can.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from noloco_node.ambient import SOON_SECONDS
from noloco_node.bootstrap.reachability import (
    AGREED,
    MAX_PORTS,
    MOST_ASKED,
    PEER_SECONDS,
    Dialled,
    HostPort,
    Reached,
    ReachFinding,
    ReachStanding,
    Seen,
    Step,
    Way,
    ask_dial_back,
    hosts_of,
    is_elsewhere,
    judge,
    network_of,
    next_step,
)
from noloco_node.identity.addresses import REACH_SECONDS, PeerAddress, Reach, dialable, parse_address, reach_of
from noloco_node.identity.peer_id import PeerId
from noloco_node.libp2p.daemon import PrivateP2P
from noloco_node.libp2p.relay_places import MOST_RELAYS, ask_for_place, circuit_address
from noloco_node.tallies import NO_REST, Doubling, PeerTimes
from noloco_node.transport.errors import Refused, TransportError
from noloco_node.transport.interface import Transport

logger = logging.getLogger(__name__)

MOST_ASKED_TO_RELAY = 2 * MOST_ASKED
LOOK_SECONDS = 300.0
"""Seconds between two looks while all is well."""
SOON = Doubling(PEER_SECONDS + 5.0, 600.0)
"""Seconds to the next look after looks in a row that said nothing, or something else than the one before. By then the
same peers answer again. The longest is for a node that nobody reaches and nobody relays for."""
REMEDY = (
    "others wait for its calls: open the port in the firewall or forward it in the router (docker run -p), tell others "
    "another one with --announce HOST:PORT, or join by a seed that was started with --relay-for-others"
)


@dataclass(frozen=True, slots=True)
class Policy:
    """What the owner of a node has chosen."""

    may_announce: bool
    """Others may be told an address that was learnt; not where the owner has named some."""
    may_relay: bool
    """Relays may be asked for."""
    tells_own: bool
    """Others are told where this machine listens, too: its neighbours may reach it there."""


Readdress = Callable[[Sequence[str], tuple[PeerAddress, ...]], Awaitable[None]]
"""A function that has others told these addresses, without the peer itself, and be reached through these relays from
now on. With neither, p2pd tells all that it listens on."""


class ReachWatch:
    """How one node is reached. `readdress` puts another p2pd in the place of the present one; it may be set anew."""

    def __init__(
        self, host: PrivateP2P, transport: Transport, policy: Policy, readdress: Readdress, rng: random.Random
    ) -> None:
        self._host = host
        self._transport = transport
        self._policy = policy
        self.readdress = readdress
        self._rng = rng
        self._asked = PeerTimes[PeerId]()
        self._announced: HostPort | None = None
        self._changed = NO_REST
        self._misses = 0
        self._lost: bool = False
        self._unsettled = 0
        self._due = 0.0
        self._told: Callable[[ReachStanding], None] | None = None
        self.standing = ReachStanding()

    def tell(self, told: Callable[[ReachStanding], None]) -> None:
        """From now on tell of each standing; of the present one at once, where anything is known."""
        self._told = told
        if self.standing.way is not Way.UNKNOWN:
            told(self.standing)

    async def first_look(self) -> None:
        """Before anything is under way: where peers are elsewhere, learn how they reach this node, and see to it."""
        if not any(is_elsewhere(parse_address(text).host) for text in self._host.joined_peers):
            return
        await self._await_mapping()
        self._misses = AGREED  # nothing speaks for its being reached yet
        await self.look()

    async def keep(self) -> NoReturn:
        """Look again from time to time, and where all relays are gone for a while."""
        while True:
            now = asyncio.get_running_loop().time()
            self._mind_relays(now)
            if now >= self._due:
                await self.look()
            await asyncio.sleep(2.0)

    async def look(self) -> None:
        """One look, and what follows from it."""
        addresses = await self._told_directly()
        finding = await self._finding(addresses)
        missed = finding is not None and finding.place is None
        self._misses = self._misses + 1 if missed else 0
        step = next_step(
            finding,
            {HostPort(address.host, address.port) for address in addresses},
            relayed=bool(self._host.relays),
            relays_work=bool(self._working()),
            misses=self._misses,
        )
        settled = await self._follow(step, finding)
        self._unsettled = 0 if settled else self._unsettled + 1
        pause = LOOK_SECONDS if settled else SOON.after(self._unsettled - 1)
        self._due = asyncio.get_running_loop().time() + pause * self._rng.uniform(1.0, 1.3)

    async def _follow(self, step: Step, finding: ReachFinding | None) -> bool:
        """Whether it is known how others reach this node."""
        place = finding and finding.place
        match step:
            case Step.ANNOUNCE if place is not None and self._policy.may_announce:
                if self._may_change():
                    self._announced = place
                    await self._change((*self._host.listening(), _as_address(place)), ())
                    self._now(ReachStanding(Way.DIRECT, place))
                return not self._host.relays
            case Step.DIRECT | Step.ANNOUNCE:
                self._now(ReachStanding(Way.DIRECT, place))
                return True
            case Step.RELAYED:
                self._now(ReachStanding(Way.RELAYED, relays=self._working()))
                return True
            case Step.SEEK_RELAY:
                return await self._seek_relay(finding)
            case Step.LOOK_AGAIN:
                return False

    async def _seek_relay(self, finding: ReachFinding | None) -> bool:
        why = _why(finding)
        if self._policy.may_relay and self._may_change():
            relays = await self._willing()
            if relays:
                self._announced = None
                own = self._host.listening() if self._policy.tells_own else ()
                await self._change((*own, *map(circuit_address, relays)), relays)
                self._now(ReachStanding(Way.RELAYED, relays=self._working()))
                return True
            why += ", and no peer that could be asked relays for it"
            if self._announced is not None or (self._host.relays and SOON.after(self._unsettled) == SOON.longest):
                self._announced = None
                await self._change((), ())
        self._now(ReachStanding(Way.UNREACHED, why=why))
        return False

    async def _change(self, addresses: Sequence[str], relays: tuple[PeerAddress, ...]) -> None:
        self._changed = self._changed.ban(asyncio.get_running_loop().time())
        self._lost = False
        await self.readdress(addresses, relays)

    def _may_change(self) -> bool:
        """Each change costs all connections for a moment, so the next one waits as long as a banned peer."""
        return not self._changed.holds(asyncio.get_running_loop().time())

    def _now(self, standing: ReachStanding) -> None:
        if standing == self.standing:
            return
        self.standing = standing
        if standing.way is Way.UNREACHED:
            logger.warning("this node is not reachable: %s; %s", standing.why, REMEDY)
        else:
            logger.info("this node is %s", standing.words())
        if self._told is not None:
            self._told(standing)

    def _working(self) -> tuple[PeerId, ...]:
        return tuple(relay.peer for relay in self._host.relays if relay.peer not in self._host.lost_relays)

    def _mind_relays(self, now: float) -> None:
        """Where all relays are lost, or one is back, the next look does not wait its time. Lost ones may come back."""
        lost: bool = len(self._host.relays) > 0 and not self._working()
        if lost != self._lost:
            self._due = min(self._due, now + (SOON.first if lost else 0.0))
        self._lost = lost

    async def _told_directly(self) -> list[PeerAddress]:
        """The addresses that others are told, relays' left out."""
        try:
            told = await self._host.told_addresses()
        except (OSError, TimeoutError, EOFError):
            return []
        return [address for address in map(parse_address, told) if address.relay is None]

    async def _await_mapping(self) -> None:
        """Where a router may open the port: wait a moment for the address that it gives."""
        loop = asyncio.get_running_loop()
        until = loop.time() + REACH_SECONDS
        far = any(reach_of(parse_address(text).host) is Reach.PUBLIC for text in self._host.joined_peers)
        while far and self._host.maps_port and loop.time() < until:
            if any(reach_of(address.host) is Reach.PUBLIC for address in await self._told_directly()):
                return
            await asyncio.sleep(SOON_SECONDS)  # p2pd gives no sign of it

    async def _finding(self, addresses: Sequence[PeerAddress]) -> ReachFinding | None:
        """What the peers find that are asked now; None where nobody says anything of use."""
        try:
            connected = await self._host.connections()
        except (OSError, TimeoutError, EOFError):
            return None
        hosts = {peer: found[0] for peer, ends in connected.items() if (found := hosts_of(ends))}
        places = [HostPort(address.host, address.port) for address in addresses]
        loopback = places and all(reach_of(place.host) is Reach.LOOPBACK for place in places)
        if loopback and any(map(is_elsewhere, hosts.values())):
            return ReachFinding(None, ())
        ports = list(dict.fromkeys(place.port for place in places))[:MAX_PORTS]
        asked = self._to_ask(hosts) if ports else []
        answers = await asyncio.gather(*(self._dialled_back(peer, ports) for peer in asked))
        seen = [
            Seen(peer, network_of(hosts[peer]), place, reached)
            for peer, answer in zip(asked, answers, strict=True)
            for place, reached in _found(answer, ports)
        ]
        own = [place for place in places if place != self._announced]
        return judge(seen, own, {parse_address(text).peer for text in self._host.joined_peers})

    def _to_ask(self, hosts: Mapping[PeerId, str]) -> list[PeerId]:
        """Peers to ask now: of each network one before a second one of any; none that was asked a moment ago."""
        now = asyncio.get_running_loop().time()
        free = [peer for peer in sorted(hosts) if not self._asked.holds(peer, now)]
        self._rng.shuffle(free)
        before = Counter[str]()
        turns = dict[PeerId, int]()
        for peer in free:
            network = network_of(hosts[peer])
            turns[peer], before[network] = before[network], before[network] + 1
        asked = sorted(free, key=turns.__getitem__)[:MOST_ASKED]
        self._asked.update(dict.fromkeys(asked, now + PEER_SECONDS))
        return asked

    async def _dialled_back(self, peer: PeerId, ports: Sequence[int]) -> Dialled | None:
        try:
            return await ask_dial_back(self._transport, peer, ports)
        except (Refused, TransportError):
            return None

    async def _willing(self) -> tuple[PeerAddress, ...]:
        """Peers that relay for this node, at most `MOST_RELAYS`: those that it joined by, then others."""
        found = [parse_address(text) for text in self._host.joined_peers]
        try:
            connected = set(await self._host.connections()) - {address.peer for address in found}
        except (OSError, TimeoutError, EOFError):
            connected = set[PeerId]()
        others = self._rng.sample(sorted(connected), min(len(connected), MOST_ASKED_TO_RELAY))
        for texts in await asyncio.gather(*(self._host.addresses_of(peer) for peer in others)):
            found += [parse_address(text) for text in dialable(texts)[:1]]
        asked = [address for address in found if address.relay is None and is_elsewhere(address.host)]
        asked = asked[:MOST_ASKED_TO_RELAY]
        reasons = await asyncio.gather(*(ask_for_place(self._host, address.peer) for address in asked))
        for address, reason in zip(asked, reasons, strict=True):
            logger.debug("asked %s to relay for this node: %s", address.text, reason or "it does")
        return tuple(a for a, reason in zip(asked, reasons, strict=True) if reason is None)[:MOST_RELAYS]


def _found(answer: Dialled | None, ports: Sequence[int]) -> list[tuple[HostPort, bool]]:
    """Where a peer dialled, and whether it reached this node there. What it says of ports that it was not asked for, or
    of hosts that p2pd cannot announce, is passed over."""
    found: list[tuple[HostPort, bool]] = []
    for named, result in (answer.results if answer is not None else {}).items():
        host, _, port = named.rpartition(" ")
        try:
            ipaddress.ip_address(host)
            if int(port) in ports and "%" not in host:
                found.append((HostPort(host, int(port)), result is Reached.YES))
        except ValueError:
            continue
    return found


def _why(finding: ReachFinding | None) -> str:
    if finding is None:
        return "its relays are gone"
    if not finding.tried:
        return "it listens on this machine only"
    return f"no peer could dial it at {', '.join(f'{place.host} port {place.port}' for place in finding.tried)}"


def _as_address(place: HostPort) -> str:
    return f"/ip{ipaddress.ip_address(place.host).version}/{place.host}/tcp/{place.port}"
