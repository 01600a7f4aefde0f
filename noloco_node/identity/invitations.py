"""Invitations by a run's owner: what is handed out, what is shown to others, and how either is checked.

The owner's key signs a right to take part in one run until some moment. It is for one peer by its id, or for any holder
of the key inside the invitation. That key never travels: its holder signs its own peer id with it, and shows the
owner's signature and this one. So the proof, which lies in the public directory, is of no use to anybody else.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Annotated

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from noloco_node.errors import ExitCode, UserError
from noloco_node.identity.keys import Identity, ed25519_peer_id, ed25519_public_key, verify
from noloco_node.identity.peer_id import PeerId

PREFIX = "noloco-invitation-"
"""The text of every invitation begins so."""

_GRANT_DOMAIN = b"noloco invitation 1\0"
_HOLDER_DOMAIN = b"noloco invitation holder 1\0"

RunId = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Signature = Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]


class BadInvitation(Exception):
    """Text that is no invitation."""


class Grant(BaseModel):
    """What the owner signs: `subject` may take part in `run` until `expires`."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    run: RunId
    expires: Annotated[int, Field(gt=0, le=1 << 40)]
    """Seconds since 1970."""
    subject: Annotated[str, Field(min_length=10, max_length=128)]
    """The peer id invited; or, where `by_key`, the peer id of the key that makes others guests."""
    by_key: bool = False
    signature: Signature

    def holds(self, owner: str) -> bool:
        """Whether the key behind the peer id `owner` signed this."""
        signed = _grant_text(self.run, self.expires, self.subject, self.by_key)
        return _verified(owner, self.signature, signed)


class Proof(BaseModel):
    """What a peer shows to others: the grant, and where it is by key that key's signature on the peer's id."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    grant: Grant
    holder: Signature | None = None

    def admits(self, peer: PeerId, *, run: str, owner: str) -> bool:
        """Whether it makes `peer` a guest of `owner`'s run, its expiry aside. Never raises."""
        grant = self.grant
        if grant.run != run or not grant.holds(owner):
            return False
        if not grant.by_key:
            return grant.subject == peer
        return self.holder is not None and _verified(grant.subject, self.holder, _holder_text(grant.run, peer))


class Invitation(BaseModel):
    """What the owner hands out."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    grant: Grant
    seed: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """The private key behind the grant's subject, where it is by key."""

    def proof_for(self, peer: PeerId) -> Proof:
        """The proof that `peer`, a holder of this invitation, shows to others."""
        if self.seed is None:
            return Proof(grant=self.grant)
        key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(self.seed))
        return Proof(grant=self.grant, holder=key.sign(_holder_text(self.grant.run, peer)).hex())

    def text(self) -> str:
        """One word that can be copied into a message."""
        packed = base64.urlsafe_b64encode(self.model_dump_json(exclude_none=True).encode())
        return PREFIX + packed.decode().rstrip("=")


def invite(owner: Identity, run: str, expires: int, peer: str | None) -> Invitation:
    """An invitation to the run until `expires` (seconds since 1970), for one peer, or for any holder."""
    if peer is not None:
        return Invitation(grant=_signed(owner, run, expires, peer, by_key=False))
    key = Ed25519PrivateKey.generate()
    subject = ed25519_peer_id(key)
    seed = key.private_bytes_raw().hex()
    return Invitation(grant=_signed(owner, run, expires, subject, by_key=True), seed=seed)


def read_invitation(text: str) -> Invitation:
    """Parse what `Invitation.text` gave. Raises BadInvitation; signatures are not looked at."""
    word = "".join(text.split())
    if not word.startswith(PREFIX):
        raise BadInvitation(f"it does not begin with {PREFIX}")
    packed = word.removeprefix(PREFIX)
    try:
        return Invitation.model_validate_json(base64.urlsafe_b64decode(packed + "=" * (-len(packed) % 4)))
    except (ValueError, ValidationError):
        raise BadInvitation("it was cut off or changed on its way") from None


def named_invitation(setting: str) -> Invitation:
    """The invitation that `node.invitation` is, or that lies in the file of that name. UserError (CONFIG) where it is
    none; signatures are not looked at."""
    text = setting
    if not setting.lstrip().startswith(PREFIX):
        try:
            text = Path(setting).read_text(encoding="utf-8")
        except (OSError, ValueError):
            raise UserError(
                ExitCode.CONFIG,
                f"node.invitation is '{setting[:60]}', which is neither an invitation nor a file that can be read",
                f"name a file that holds the word that begins with {PREFIX}",
            ) from None
    try:
        return read_invitation(text)
    except BadInvitation as error:
        raise UserError(
            ExitCode.CONFIG,
            f"node.invitation is no invitation: {error}",
            "copy it whole, as the owner of the run sent it",
        ) from None


def _signed(owner: Identity, run: str, expires: int, subject: str, *, by_key: bool) -> Grant:
    signature = owner.sign(_grant_text(run, expires, subject, by_key))
    return Grant(run=run, expires=expires, subject=subject, by_key=by_key, signature=signature.hex())


def _verified(signer: str, signature: str, text: bytes) -> bool:
    try:
        key = ed25519_public_key(signer)
    except ValueError:
        return False
    return verify(key, bytes.fromhex(signature), text)


def _grant_text(run: str, expires: int, subject: str, by_key: bool) -> bytes:
    return _GRANT_DOMAIN + f"{run}\n{expires}\n{subject}\n{by_key:d}".encode()


def _holder_text(run: str, peer: PeerId) -> bytes:
    return _HOLDER_DOMAIN + f"{run}\n{peer}".encode()
