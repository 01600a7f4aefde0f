"""`noloco-node identity` makes a node's identity file, shows it, takes an encrypted backup of it and brings one back.
`invite` signs an invitation with the owner's."""

from __future__ import annotations

import getpass
import shlex
import stat
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from noloco_node import ambient
from noloco_node.config.load import NO_ENVIRONMENT, load_join
from noloco_node.config.run_spec import RunSpec
from noloco_node.errors import ExitCode, UserError
from noloco_node.storage.run_folder import RunFolder

if TYPE_CHECKING:
    from noloco_node.identity.keys import Identity


MIN_PASSPHRASE = 12
"""A new passphrase has at least so many characters: it is all that protects a backup."""
MAX_PASSPHRASE_BYTES = 1023
"""The encryption takes at most so many bytes."""
OTHERS = stat.S_IRWXG | stat.S_IRWXO


def default_identity(environ: Mapping[str, str] = NO_ENVIRONMENT) -> Path:
    """The identity file of `noloco-node run` where neither --run-folder nor --identity is given. UserError as
    loading settings does."""
    settings = load_join((), environ).node
    return settings.identity or RunFolder(settings.run_folder).identity


def show_identity(path: Path) -> list[str]:
    """What a person wants to know of an identity file, as lines. UserError (CONFIG) where it is none."""
    from noloco_node.identity.keys import load_identity

    identity = load_identity(path)
    return [
        f"peer id      {identity.peer_id}",
        f"file         {path.resolve()}",
        f"permissions  {_permissions(path)}",
        f"in use       {_in_use(path)}",
    ]


def create_identity(path: Path) -> list[str]:
    """Make an identity file where none is, and say of it what `show_identity` does. UserError: RUN_FOLDER where it
    cannot be written, CONFIG where something else is there."""
    from noloco_node.identity.keys import load_or_create_identity

    try:
        load_or_create_identity(path)
    except OSError as error:
        raise _not_writable(path, error) from None
    return show_identity(path)


def export_identity(path: Path, target: Path, passphrase_file: Path | None) -> str:
    """Write an encrypted copy of the identity file `path` to `target` (PKCS#8, PEM, mode 0600); returns the peer id.

    It asks for the passphrase twice if no file holds it. Raises UserError: CONFIG (no such key, a target that exists, a
    weak passphrase), RUN_FOLDER (`target` cannot be written). It raises USAGE without a passphrase file and without a
    terminal to ask on.
    """
    from noloco_node.identity.keys import load_identity, write_new_private_file

    identity = load_identity(path)
    _refuse_existing(target)
    backup = identity.backup(new_passphrase(passphrase_file))
    try:
        written = write_new_private_file(target, backup)
    except OSError as error:
        raise _not_writable(target, error) from None
    if not written:
        _refuse_existing(target)
    return identity.peer_id


def import_identity(backup: Path, target: Path, passphrase_file: Path | None) -> str:
    """Write the key inside `backup` as a new identity file `target` (mode 0600); returns its peer id. Raises UserError:
    CONFIG (no backup, a wrong passphrase, a target that exists), RUN_FOLDER (`target` cannot be written). It raises
    USAGE without a passphrase file and without a terminal to ask on."""
    from noloco_node.identity.keys import BadKey, WrongPassphrase, key_of_backup, load_identity, write_new_private_file

    _refuse_existing(target)
    try:
        with backup.open("rb") as file:
            content = file.read(64 * 1024)
        key = key_of_backup(content, known_passphrase(passphrase_file))
        written = write_new_private_file(target, key)
    except WrongPassphrase:
        raise UserError(
            ExitCode.CONFIG,
            f"passphrase: it does not open {backup}",
            "give the passphrase of the export; if it is right, the file was damaged: take another copy",
        ) from None
    except BadKey as error:
        raise _no_backup(backup, str(error)) from None
    except OSError as error:
        if error.filename == str(backup):
            raise _no_backup(backup, error.strerror or str(error)) from None
        raise _not_writable(target, error) from None
    if not written:
        _refuse_existing(target)
    return load_identity(target).peer_id


def new_passphrase(file: Path | None) -> bytes:
    """A passphrase for a new backup, from the first line of `file` or asked for twice. UserError if it is weak."""
    passphrase = _first_line(file) if file else _ask("passphrase for the backup: ")
    if len(passphrase) < MIN_PASSPHRASE:
        raise UserError(
            ExitCode.CONFIG,
            f"passphrase: it has {len(passphrase)} characters, fewer than {MIN_PASSPHRASE}",
            "take a longer one, for example five words drawn at random; a guesser can run as this node",
        )
    if file is None and _ask("once more: ") != passphrase:
        raise UserError(ExitCode.CONFIG, "passphrase: the two differ", "start again and type the same one twice")
    return _encoded(passphrase)


def known_passphrase(file: Path | None) -> bytes:
    """The passphrase of a backup, from the first line of `file` or asked for."""
    return _encoded(_first_line(file) if file else _ask("passphrase of the backup: "))


def _ask(prompt: str) -> str:
    try:
        with warnings.catch_warnings():
            # Without a terminal getpass would warn and read with echo.
            warnings.simplefilter("error", getpass.GetPassWarning)
            return getpass.getpass(prompt)
    except (getpass.GetPassWarning, EOFError):
        raise UserError(
            ExitCode.USAGE,
            "passphrase: there is no terminal to ask for it on",
            "put it into the first line of a file that only you can read, and name that with --passphrase-file",
        ) from None


def _first_line(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            return opened.readline(MAX_PASSPHRASE_BYTES + 2).decode().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UserError(
            ExitCode.CONFIG,
            f"passphrase_file: {file} cannot be read ({reason})",
            "name a text file whose first line is the passphrase",
        ) from None


def _encoded(passphrase: str) -> bytes:
    encoded = passphrase.encode()
    if len(encoded) > MAX_PASSPHRASE_BYTES:
        message = f"passphrase: it is longer than {MAX_PASSPHRASE_BYTES} bytes"
        raise UserError(ExitCode.CONFIG, message, "take a shorter one")
    return encoded


def _permissions(path: Path) -> str:
    mode = stat.S_IMODE(path.stat().st_mode)
    if not mode & OTHERS:
        return f"{mode:04o}, for its owner only"
    remedy = f"chmod 600 {shlex.quote(str(path))}"
    return f"{mode:04o}, WARNING: readable by others; a reader can run as this node; remedy: {remedy}"


def _in_use(path: Path) -> str:
    from noloco_node.identity.keys import holder_of

    try:
        holder = holder_of(path)
    except OSError as error:
        return f"not known ({error.strerror})"
    return f"by {holder}" if holder else "by no node on this machine"


def _refuse_existing(target: Path) -> None:
    if target.exists() or target.is_symlink():
        raise UserError(
            ExitCode.CONFIG,
            f"to: {target} exists already, and is left as it is",
            "name a file that does not exist yet with --to, or move this one away",
        )


def _not_writable(target: Path, error: OSError) -> UserError:
    return UserError(
        ExitCode.RUN_FOLDER,
        f"to: {target} cannot be written ({error.strerror})",
        "name a file in a folder that this user may write, on a disk with space left",
    )


def _no_backup(backup: Path, reason: str) -> UserError:
    return UserError(
        ExitCode.CONFIG,
        f"backup: {backup} cannot be used ({reason})",
        "name a file that `noloco-node identity export` wrote",
    )


def make_invitation(run: RunSpec, key: Path, *, peer: str | None, hours: float) -> tuple[str, list[str]]:
    """An invitation to `run` as it is handed out, and lines to tell with it. It is signed by the owner's key file,
    which is made where it is missing and the run names no owner yet.

    Raises UserError (CONFIG) where the run names no owner or another, or the time or the peer id is none.
    """
    from noloco_node.config.own_paths import join_line, join_note
    from noloco_node.identity.addresses import parse_peer
    from noloco_node.identity.invitations import invite
    from noloco_node.identity.keys import load_or_create_identity
    from noloco_node.telemetry.words import as_utc

    if not 0 < hours <= 24 * 3650:
        raise UserError(ExitCode.CONFIG, f"--hours is {hours:g}", "choose more than 0, and no more than ten years")
    if peer is not None:
        try:
            parse_peer(peer)
        except ValueError:
            message, remedy = f"--peer is {peer[:60]!r}, no peer id", "copy it from `noloco-node identity show` there"
            raise UserError(ExitCode.CONFIG, message, remedy) from None
    owner = load_or_create_identity(key) if run.access.owner is None else _named_owner(run.access.owner, key)
    if run.access.owner != owner.peer_id:
        raise _not_the_owner(run, owner)
    if run.access.mode != "invited":
        message = f"run.access.mode is '{run.access.mode}', where nobody is asked for an invitation: none was written"
        remedy = "set run.access.mode: invited in the configuration before the run starts, and call this again"
        raise UserError(ExitCode.CONFIG, message, remedy)
    expires = int(ambient.wall() + hours * 3600)
    invitation = invite(owner, run.run_id, expires, peer)
    whom = f"for {peer} only" if peer else "for any holder: send it in private"
    lines = [
        f"invitation to run {run.name} ({run.run_id})",
        f"  {whom}, until {as_utc(expires)}",
        f"  join with: {join_line(run, 'ADDRESS')}",
    ]
    return invitation.text(), [*lines, *(f"  {note}" for note in [join_note(run)] if note)]


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
