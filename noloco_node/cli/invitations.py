"""`noloco-node invite`: the owner of a run lets somebody in, and signs the run that it is for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from noloco_node import ambient
from noloco_node.config.run_spec import RunSpec
from noloco_node.errors import ExitCode, UserError

if TYPE_CHECKING:
    from noloco_node.identity.keys import Identity


@dataclass(frozen=True, slots=True)
class Invited:
    """An invitation as it is handed out, and what to tell with it."""

    text: str
    lines: list[str]


def make_invitation(run: RunSpec, key: Path, *, peer: str | None, hours: float) -> Invited:
    """An invitation to `run`, signed by the owner's key file, which is made where it is missing and the run names no
    owner yet.

    Raises UserError (CONFIG) where the run names no owner or another, or the time or the peer id is none.
    """
    from noloco_node.config.own_paths import join_line, join_note
    from noloco_node.identity.invitations import invite
    from noloco_node.identity.keys import load_or_create_identity
    from noloco_node.telemetry.words import as_utc

    if not 0 < hours <= 24 * 3650:
        raise UserError(ExitCode.CONFIG, f"--hours is {hours:g}", "choose more than 0, and no more than ten years")
    owner = load_or_create_identity(key) if run.access.owner is None else _named_owner(run.access.owner, key)
    if run.access.owner != owner.peer_id:
        raise _not_the_owner(run, owner)
    expires = int(ambient.wall() + hours * 3600)
    invitation = invite(owner, run.run_id, expires, peer)
    whom = f"for {peer} only" if peer else "for any holder: send it in private"
    lines = [
        f"invitation to run {run.name} ({run.run_id})",
        f"  {whom}, until {as_utc(expires)}",
        f"  join with: {join_line(run, 'ADDRESS')}",
    ]
    return Invited(invitation.text(), [*lines, *(f"  {note}" for note in [join_note(run)] if note)])


def _named_owner(named: str, key: Path) -> Identity:
    """The key behind the owner that the run names. None is made: a new one would be another's."""
    from noloco_node.identity.keys import load_identity

    if not key.exists():
        raise UserError(
            ExitCode.CONFIG,
            f"--key names {key}, where no key is, and run.access.owner is {named}: a new key would be another owner's",
            "name the file that holds that key, or bring it back from its backup (noloco-node identity import BACKUP "
            "--to FILE)",
        )
    return load_identity(key)


def _not_the_owner(run: RunSpec, owner: Identity) -> UserError:
    invited = run.access.mode == "invited"
    if run.access.owner is None:
        made = f"{owner.path} was made now: it is" if owner.created else f"{owner.path} is"
        return UserError(
            ExitCode.CONFIG,
            f"{made} the key of {owner.peer_id}, but run.access.owner names none; no invitation was written",
            f"set run.access.owner: {owner.peer_id} and run.access.mode: invited in the configuration before the run "
            "starts, back the key up (noloco-node identity export), and call this again",
        )
    return UserError(
        ExitCode.CONFIG,
        f"{owner.path} is the key of {owner.peer_id}, but run.access.owner names {run.access.owner}",
        f"name the owner's key with --key; or, before the run starts, set run.access.owner: {owner.peer_id}"
        + ("" if invited else " and run.access.mode: invited"),
    )
