"""`noloco-node invite`: the owner of a run lets somebody in, and signs the run that it is for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from noloco_node import ambient
from noloco_node.config.run_spec import RunSpec
from noloco_node.errors import ExitCode, UserError


@dataclass(frozen=True, slots=True)
class Invited:
    """An invitation as it is handed out, and what to tell with it."""

    text: str
    lines: list[str]


def make_invitation(run: RunSpec, key: Path, *, peer: str | None, hours: float) -> Invited:
    """An invitation to `run`, signed by the owner's key file, which is made where it is missing.

    Raises UserError (CONFIG) where the run names another owner, or the time or the peer id is none.
    """
    from noloco_node.identity.invitations import invite
    from noloco_node.identity.keys import load_or_create_identity
    from noloco_node.telemetry.words import as_utc

    if not 0 < hours <= 24 * 3650:
        raise UserError(ExitCode.CONFIG, f"--hours is {hours:g}", "choose more than 0, and no more than ten years")
    owner = load_or_create_identity(key)
    if run.access.owner != owner.peer_id:
        named = f"names {run.access.owner}" if run.access.owner else "names none"
        raise UserError(
            ExitCode.CONFIG,
            f"{key} is the key of {owner.peer_id}, but run.access.owner {named}",
            f"set run.access.owner: {owner.peer_id} before the run starts, or name the owner's key with --key",
        )
    expires = int(ambient.wall() + hours * 3600)
    invitation = invite(owner, run.run_id, expires, peer)
    whom = f"for {peer} only" if peer else "for whoever holds it: send it in private"
    return Invited(
        invitation.text(),
        [
            f"invitation to run {run.name} ({run.run_id})",
            f"  {whom}, until {as_utc(expires)}",
            "  join with: noloco-node join ADDRESS --invitation FILE",
        ],
    )
