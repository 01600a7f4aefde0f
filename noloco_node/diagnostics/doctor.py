"""`noloco-node doctor`: what can be known about this machine and its network before, or instead of, a run."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from noloco_node import ambient
from noloco_node.bootstrap.hello import measure_hello
from noloco_node.bootstrap.reach_watch import MOST_ASKED
from noloco_node.bootstrap.spec_fetch import fetch_run_spec
from noloco_node.config.load import OwnData
from noloco_node.config.node_settings import NodeSettings
from noloco_node.directory.known_peers import KnownPeers
from noloco_node.errors import UserError
from noloco_node.identity.addresses import parse_address
from noloco_node.identity.invitations import named_invitation
from noloco_node.identity.keys import holder_of, load_identity
from noloco_node.identity.peer_id import PeerId
from noloco_node.libp2p.arguments import check_port_free, node_arguments, one_family
from noloco_node.libp2p.relay_places import ask_for_place
from noloco_node.libp2p.start import reached_by_a_stranger
from noloco_node.libp2p.tls_probe import NoAnswer, who_answers
from noloco_node.node.checks import (
    Check,
    CheckOutcome,
    check_disk,
    check_files,
    check_memory,
    free_disk,
    memory,
    raise_file_limit,
)
from noloco_node.node.network import Entrance, entrance, out_of_reach
from noloco_node.node.start_checks import check_reached, dialled_back, judge_peers, own_ports, relayed_instead
from noloco_node.storage.run_folder import RunFolder
from noloco_node.telemetry.words import as_utc
from noloco_node.training.compute_device import all_devices, check_device, idle_gpu, resolve_device
from noloco_node.trust.admission import own_access


async def examine(settings: NodeSettings) -> list[Check]:
    """Every check, in the order in which a person would mend things; never raises for what it finds. It runs no
    training. It takes part in the swarm only for a moment, under a peer id made for the purpose."""
    checks = [
        *_machine(settings),
        await ambient.elsewhere(_device, settings.device),
        _identity(_identity_file(settings)),
        _listening(settings),
    ]
    if settings.invitation is not None:
        checks.append(check_invitation(settings.invitation))
    known = KnownPeers(RunFolder(settings.run_folder).peers)
    addresses = settings.initial_peers or known.texts()
    reached = await asyncio.gather(*(_address(text) for text in addresses))
    checks += reached
    live = tuple(text for text, check in zip(addresses, reached, strict=True) if check.outcome is CheckOutcome.PASS)
    # An invitation that cannot be used was reported above: the run's admission rule is of no use then.
    judged = not any(check.name == "invitation" and check.outcome is CheckOutcome.FAIL for check in checks)
    return checks + await _network(settings, live, judged)


def lines(checks: Sequence[Check]) -> list[str]:
    """The checks as a table for a person: outcome, name, what was found; below it what to do."""
    width = max(len(check.name) for check in checks)
    rows: list[str] = []
    for check in checks:
        rows.append(f"{check.outcome.value:<5} {check.name:<{width}}  {check.found}")
        if check.remedy:
            rows.append(f"{'':<5} {'':<{width}}  -> {check.remedy}")
    failed = sum(check.outcome is CheckOutcome.FAIL for check in checks)
    warned = sum(check.outcome is CheckOutcome.WARN for check in checks)
    return [*rows, f"{len(checks)} checks: {failed} failed, {warned} with a warning"]


def as_json(checks: Sequence[Check]) -> list[dict[str, str]]:
    """The checks as JSON values, in the same order."""
    return [{"check": c.name, "outcome": c.outcome.value, "found": c.found, "remedy": c.remedy} for c in checks]


def _machine(settings: NodeSettings) -> list[Check]:
    available, total = memory()
    folder = settings.run_folder
    try:
        disk = check_disk(free_disk(folder), str(folder))
    except OSError as error:
        disk = Check(
            "disk", CheckOutcome.FAIL, f"{folder}: {error.strerror or error}", "name another with --run-folder"
        )
    return [check_files(raise_file_limit()), disk, check_memory(available, total, 0)]


def _device(name: str) -> Check:
    gpus = all_devices()
    what = f"auto ({resolve_device(name)})" if name == "auto" else name
    found = f"torch {torch.__version__}, node.device {what}, {len(gpus)} GPU{'s' * (len(gpus) != 1)}"
    try:
        check_device(name)
    except UserError as error:
        return _failed("device", error)
    if idle := idle_gpu(name):
        why, remedy = idle
        return Check("device", CheckOutcome.WARN, f"{found}; this machine's GPU lies idle: {why}", remedy)
    if gpus and name == "cpu":
        return Check("device", CheckOutcome.WARN, found, f"a GPU lies idle: --set node.device={gpus[0]} uses it")
    return Check("device", CheckOutcome.PASS, found)


def _identity_file(settings: NodeSettings) -> Path:
    return settings.identity or RunFolder(settings.run_folder).identity


def _identity(path: Path) -> Check:
    if not path.exists():
        return Check("identity", CheckOutcome.PASS, f"none at {path} yet: the first start makes one")
    try:
        identity, holder = load_identity(path), holder_of(path)
    except UserError as error:
        return _failed("identity", error)
    except OSError as error:
        return Check("identity", CheckOutcome.WARN, f"{path}: {error.strerror or error}", "look at its permissions")
    if path.stat().st_mode & 0o077:
        return Check("identity", CheckOutcome.WARN, f"{path} can be read by other users", f"chmod 600 {path}")
    used = f", in use by {holder}" if holder else ""
    return Check("identity", CheckOutcome.PASS, f"{identity.peer_id} ({path}{used})")


def _listening(settings: NodeSettings) -> Check:
    try:
        node_arguments(settings, Path("unused"))
        check_port_free(settings.host, settings.port)
    except UserError as error:
        return _failed("port", error)
    if (family := one_family(settings.host)) is not None:
        return Check("port", CheckOutcome.WARN, *family.split("; ", 1))
    if settings.port == 0:
        remedy = "choose one with --port, if others are to reach this node through a firewall or a router"
        return Check("port", CheckOutcome.WARN, f"any free one on {settings.host}", remedy)
    return Check("port", CheckOutcome.PASS, f"{settings.port} on {settings.host} is free")


async def _address(text: str) -> Check:
    name = "peer"
    try:
        address = parse_address(text)
        found = await who_answers(address.host, address.port, 5.0)
    except ValueError as error:
        return Check(name, CheckOutcome.FAIL, f"{text}: {error}", "copy the whole line that the node printed")
    except NoAnswer as error:
        return Check(name, CheckOutcome.FAIL, f"{text}: {error}", "see that it runs, and look for firewalls between")
    if found != address.dialled:
        remedy = "ask its owner for the address that it prints now"
        return Check(name, CheckOutcome.FAIL, f"{text}: another peer answers there ({found})", remedy)
    return Check(name, CheckOutcome.PASS, f"{text} answers")


async def _network(settings: NodeSettings, live: tuple[str, ...], judged: bool) -> list[Check]:
    """What only a running p2pd can tell: whether it starts, clock and versions, and whether others reach this node. If
    the node is to be `judged`, it also tells whether their run lets it in."""
    began = ambient.monotonic()
    with tempfile.TemporaryDirectory(prefix="noloco-doctor-") as folder:
        own = settings.model_copy(update={"initial_peers": live, "identity": None, "run_folder": Path(folder)})
        try:
            async with entrance(own, RunFolder(Path(folder)), run=None, may_found=True) as door:
                up = f"p2pd is up after {ambient.monotonic() - began:.1f} s"
                checks = [Check("p2pd", CheckOutcome.PASS, up)]
                checks += await _among_peers(own, door)
                if judged:
                    checks += await check_admitted(
                        door, door.daemon.joined_peers, settings.invitation, _own_id(settings, door)
                    )
                return checks
        except UserError as error:
            return [_failed("p2pd", error)]


def _own_id(settings: NodeSettings, door: Entrance) -> PeerId:
    """The peer id that a run is asked to admit: the node's own. If it has none yet, it is a new one, as its first start
    will make."""
    try:
        return load_identity(_identity_file(settings)).peer_id
    except UserError:
        return door.identity.peer_id


async def _among_peers(settings: NodeSettings, door: Entrance) -> list[Check]:
    joined = door.daemon.joined_peers
    answers = await asyncio.gather(*(measure_hello(door.transport, parse_address(text).peer) for text in joined))
    told = {text: answer for text, answer in zip(joined, answers, strict=True) if answer is not None}
    if settings.relay == "always":
        return [*judge_peers(told), await _through_relays(settings, door)]
    ports = own_ports(door.daemon.visible_addresses())
    try:
        connected = list(await door.daemon.connections())
    except (OSError, TimeoutError, EOFError):  # p2pd is busy, or has died: there are no others then
        connected = []
    asked = list(dict.fromkeys([parse_address(text).peer for text in joined] + connected))
    results = await asyncio.gather(*(dialled_back(door.transport, peer, ports) for peer in asked[:MOST_ASKED]))
    answered = {peer: result for peer, result in zip(asked, results, strict=False) if result is not None}
    reached = check_reached(answered, ports, local_only=out_of_reach(settings, joined))
    if reached.outcome is CheckOutcome.FAIL and settings.relay == "auto" and not settings.announce:
        offers = await asyncio.gather(*(ask_for_place(door.daemon, peer) for peer in asked[:MOST_ASKED]))
        reached = relayed_instead(reached, offers.count(None))
    return [*judge_peers(told), reached]


async def _through_relays(settings: NodeSettings, door: Entrance) -> Check:
    """Whether a stranger reaches this node by the addresses that it tells others."""
    hosts = ", ".join(relay.host for relay in door.daemon.relays)
    found = f"through a relay only ({hosts}): no state is copied to or from nodes that this one cannot dial"
    failure = await reached_by_a_stranger(settings, door.daemon)
    if failure is None:
        return Check("reachable", CheckOutcome.PASS, found)
    return Check("reachable", CheckOutcome.FAIL, f"not even {found}; {failure[:200]}", "try another relay")


def _failed(name: str, error: UserError) -> Check:
    return Check(name, CheckOutcome.FAIL, error.message, error.remedy)


def check_invitation(setting: str) -> Check:
    """Whether `node.invitation` can be read and has not ended, whatever run it is for."""
    name = "invitation"
    try:
        grant = named_invitation(setting).grant
    except UserError as error:
        return Check(name, CheckOutcome.FAIL, error.message, error.remedy)
    until = as_utc(grant.expires)
    if grant.expires <= ambient.wall():
        remedy = "ask the owner of the run for a new one; if that is in the future, set this machine's clock"
        return Check(name, CheckOutcome.FAIL, f"to run {grant.run}: it ended on {until}", remedy)
    whom = "for any holder" if grant.by_key else f"for {grant.subject}"
    return Check(name, CheckOutcome.PASS, f"to run {grant.run}, {whom}, until {until}")


async def check_admitted(door: Entrance, joined: Sequence[str], setting: str | None, own: PeerId) -> list[Check]:
    """Tell whether the run that the peers at these addresses serve admits `own`, by its rule. There is no check if no
    peer tells its run, such as a seed that was given none: `join` asks another then."""
    if not joined:
        return []
    name = "admission"
    try:
        spec = await fetch_run_spec(door.transport, joined, OwnData(), reads_text=False)
    except UserError as error:
        remedy = "name a node of the run, or a seed that was started with the run's CONFIG"
        return [Check(name, CheckOutcome.WARN, f"not known: {error.message}", remedy)]
    run = f"run '{spec.name}' ({spec.run_id})"
    try:
        own_access(spec, setting, own)
    except UserError as error:
        return [Check(name, CheckOutcome.FAIL, error.message, error.remedy)]
    whom = {"open": "everybody", "listed": "this node by its name", "invited": "this node"}[spec.access.mode]
    return [Check(name, CheckOutcome.PASS, f"{run} admits {whom}")]
