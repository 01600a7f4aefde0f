"""What `doctor` says of an invitation, and of whether a run lets this node in: what ends a node that joins, before."""

from __future__ import annotations

from collections.abc import Sequence

from noloco_node import ambient
from noloco_node.bootstrap.spec_fetch import fetch_run_spec
from noloco_node.config.load import OwnData
from noloco_node.errors import UserError
from noloco_node.identity.invitations import named_invitation
from noloco_node.identity.peer_id import PeerId
from noloco_node.node.checks import Check, CheckOutcome
from noloco_node.node.network import Entrance
from noloco_node.telemetry.words import as_utc
from noloco_node.trust.admission import own_access


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
