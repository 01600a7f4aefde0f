"""What a node checks of itself on its way into a swarm: said in a line each, and an end where one fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from noloco_node import PROTOCOL_VERSION, __version__
from noloco_node.bootstrap.hello import MeasuredClock, measure_hello
from noloco_node.bootstrap.reachability import MAX_PORTS, Dialled, Reached, ask_dial_back
from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import RunSpec
from noloco_node.identity.addresses import Reach, parse_address, reach_of
from noloco_node.identity.peer_id import PeerId
from noloco_node.node.checks import (
    Check,
    CheckOutcome,
    check_clock,
    check_disk,
    check_files,
    check_memory,
    check_versions,
    first_failure,
    free_disk,
    memory,
    raise_file_limit,
)
from noloco_node.sizing.footprint import footprint_of
from noloco_node.sizing.memory import disk_wanted, memory_of
from noloco_node.storage.run_folder import RunFolder
from noloco_node.training.compute_device import has_own_memory
from noloco_node.transport.errors import Refused, TransportError
from noloco_node.transport.interface import Transport

logger = logging.getLogger(__name__)


def before_the_network() -> list[Check]:
    """Checks of the process: it takes as many open files as it may."""
    return [check_files(raise_file_limit())]


async def among_peers(transport: Transport, joined: Sequence[str]) -> list[Check]:
    """Checks of this node against the peers at these addresses: clock and versions."""
    answers = await asyncio.gather(*(measure_hello(transport, parse_address(text).peer) for text in joined))
    return judge_peers({text: answer for text, answer in zip(joined, answers, strict=True) if answer is not None})


def judge_peers(answers: dict[str, MeasuredClock]) -> list[Check]:
    """Clock and versions against the answers of peers, by address."""
    skews = [(answer.skew, answer.doubt) for answer in answers.values() if answer.skew is not None]
    versions = {text: (answer.hello.protocol, answer.hello.version) for text, answer in answers.items()}
    return [check_clock(skews), check_versions((PROTOCOL_VERSION, __version__), versions)]


def own_ports(visible: Sequence[str]) -> list[int]:
    """The TCP ports of a node that others would dial: announced ones, else the one that p2pd listens on."""
    direct = [address for address in map(parse_address, visible) if address.relay is None]
    return list(dict.fromkeys(address.port for address in direct if address.port))[:MAX_PORTS]


async def dialled_back(transport: Transport, peer: PeerId, ports: Sequence[int]) -> Dialled | None:
    """What a peer found that was asked to dial this node; None where it says nothing of use."""
    try:
        return await ask_dial_back(transport, peer, ports)
    except (Refused, TransportError):
        return None


def check_reached(answers: Mapping[PeerId, Dialled], ports: Sequence[int], *, local_only: bool) -> Check:
    """Whether others reach this node, by the word of the peers that dialled back."""
    name, listed = "reachable", ", ".join(map(str, ports))
    if not answers:
        remedy = "name the address of a node or seed: noloco-node doctor ADDRESS"
        return Check(name, CheckOutcome.WARN, "not known: no peer could be asked to dial back", remedy)
    seen = sorted({host for answer in answers.values() for host in answer.seen_at})
    yes = sum(Reached.YES in answer.results.values() for answer in answers.values())
    another = any(Reached.ANOTHER in answer.results.values() for answer in answers.values())
    found = f"{yes} of {len(answers)} peers reached port {listed} at {', '.join(seen) or 'no direct address'}"
    if yes == len(answers):
        if seen and all(reach_of(host) is Reach.PRIVATE for host in seen):
            found += ", where only machines of that network reach it: nodes beyond do not learn private addresses"
        return Check(name, CheckOutcome.PASS, found)
    if local_only:
        return Check(name, CheckOutcome.FAIL, found, "listen on all networks: --host 0.0.0.0 --port N")
    if another:
        found += "; another node answers there"
        return Check(
            name, CheckOutcome.FAIL, found, "give each node behind one router a port of its own, and forward each"
        )
    remedy = (
        f"open port {listed} in the firewall and forward it in the router (docker run -p {listed}:{listed}), and where "
        "others use another port tell them with --announce HOST:PORT; where no port can be forwarded, join by a seed "
        "that relays: the node asks it by itself"
    )
    return Check(name, CheckOutcome.WARN if yes else CheckOutcome.FAIL, found, remedy)


def relayed_instead(check: Check, willing: int) -> Check:
    """The judgement of a node that asks for relays by itself, with so many of its peers relaying for it. Even out of
    reach it joins all the same."""
    if check.outcome is not CheckOutcome.FAIL or not willing:
        return check
    found = f"{check.found}; the node will be reached by relay, {willing} of its peers offer{'s' * (willing == 1)} that"
    return Check(check.name, CheckOutcome.WARN, found, f"for the fastest way {check.remedy}")


def for_a_stage(spec: RunSpec, settings: NodeSettings, stage: int, folder: RunFolder) -> list[Check]:
    """Checks of the machine for the stage that it will serve: disk and memory. Loads transformers."""
    own_memory = has_own_memory(settings.device)
    needs = memory_of(spec, settings, footprint_of(spec), spec.most_sharing)
    need, wanted = needs[stage], disk_wanted(needs, settings, stage)
    available, total = memory()
    return [
        check_disk(free_disk(folder.path), str(folder.path), wanted, need.left),
        check_memory(available, total, need.total(own_memory=own_memory).host, need.always(own_memory=own_memory).host),
    ]


def report(checks: Sequence[Check]) -> None:
    """Log what was found. UserError (CHECK_FAILED) where a check failed."""
    for check in checks:
        if check.outcome is not CheckOutcome.FAIL:
            say(check)
    failure = first_failure(checks)
    if failure is not None:
        raise failure


def say(check: Check) -> None:
    """One line in the log: a warning with the remedy where the check did not pass. `doctor` shows the others, too."""
    if check.outcome is CheckOutcome.PASS:
        logger.debug("checked %s: %s", check.name, check.found)
    else:
        logger.warning("%s: %s; %s", check.name, check.found, check.remedy)
