"""A node's identity: a private key file, the peer id that follows from it, and signatures by it.

The file is libp2p's: a protobuf `PrivateKey`, always of an Ed25519 key. The public key is the peer id itself, and a
signature takes 64 bytes. Anybody can check a signed statement later.
"""

from __future__ import annotations

import errno
import logging
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import base58
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from noloco_node import ambient
from noloco_node.errors import ExitCode, UserError
from noloco_node.identity.peer_id import PeerId
from noloco_node.storage import atomic
from noloco_node.storage.held import FileLock, LockHeld, lock_holder

logger = logging.getLogger(__name__)


PUBLIC_HEAD, PRIVATE_HEAD = b"\x08\x01\x12\x20", b"\x08\x01\x12\x40"
"""libp2p's protobuf messages of an Ed25519 key begin so: its type, and the number of bytes that follow. They are 32 of
the public key, or 32 of the seed and those. Importing hivemind's code for it takes seconds."""
SEED_BYTES = 32
PUBLIC_KEY_BYTES = len(PUBLIC_HEAD) + SEED_BYTES
PEER_ID_BYTES = 2 + PUBLIC_KEY_BYTES
"""A peer id is the identity multihash of its public key."""
BACKUP_LABEL = b"-----BEGIN ENCRYPTED PRIVATE KEY-----"
BACKUP_OWNER = b"noloco-node identity "
"""The line above the label begins so and goes on with the peer id. Other tools skip it (RFC 7468, section 2)."""
NO_HARD_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
"""A file system without hard links, as on most memory sticks, answers with one of these errors."""


class BadKey(Exception):
    """Bytes that are no key this version can use."""


class WrongPassphrase(Exception):
    """A backup that this passphrase does not open (or one that was damaged: the two cannot be told apart)."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A private key and what follows from it."""

    path: Path
    """The file it was read from; p2pd reads the same."""
    peer_id: PeerId
    public_key: bytes
    """Encoded as libp2p does (protobuf `PublicKey`)."""
    created: bool
    """Made just now: nobody else can hold it."""
    _private: Ed25519PrivateKey

    def sign(self, data: bytes) -> bytes:
        """A signature that `verify` accepts with this identity's public key."""
        return self._private.sign(data)

    def backup(self, passphrase: bytes) -> bytes:
        """The private key as PKCS#8 in PEM form, encrypted under `passphrase` (1 to 1,023 bytes).

        The key is derived by PBES2's PBKDF2 with the library's number of rounds, so the passphrase must be a good one.
        PBES2 does not notice a changed byte, which would give another key: the peer id above it does.
        """
        form, lock = serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(passphrase)
        encrypted = self._private.private_bytes(serialization.Encoding.PEM, form, lock)
        return BACKUP_OWNER + self.peer_id.encode() + b"\n" + encrypted


def load_or_create_identity(path: Path) -> Identity:
    """Load the private key at `path`, or make one (mode 0600, written atomically). UserError if the file is no key."""
    created = not path.exists() and _create(path)
    return _load(path, created)


def load_identity(path: Path) -> Identity:
    """Load the private key at `path`. UserError (CONFIG) if there is none, or the file is no key."""
    if not path.exists():
        raise UserError(
            ExitCode.CONFIG,
            f"node.identity: {path} does not exist",
            "name the identity file of a node; a node makes one at its first start, in its run folder, and noloco-node "
            "identity create before that",
        )
    return _load(path, created=False)


def identity_of_seed(seed: bytes) -> Identity:
    """An Ed25519 identity without a file, that of these 32 bytes: for nodes of a simulation, which hide nothing."""
    private = Ed25519PrivateKey.from_private_bytes(seed)
    public = _encode_public(private)
    return Identity(Path(), peer_id_of(public), public, True, private)


def key_of_backup(backup: bytes, passphrase: bytes) -> bytes:
    """The content of the identity file behind `Identity.backup`.

    Raises BadKey where this is no such backup, or one of a key that a node cannot use; WrongPassphrase.
    """
    head, label, body = backup.partition(BACKUP_LABEL)
    if not label:
        raise BadKey("no encrypted private key in PEM form")
    try:
        private = serialization.load_pem_private_key(label + body, passphrase)
    except UnsupportedAlgorithm as error:
        raise BadKey(str(error)) from None
    except (ValueError, TypeError):
        raise WrongPassphrase from None
    if not isinstance(private, Ed25519PrivateKey):
        raise BadKey("it is no Ed25519 key")
    if head.strip() != BACKUP_OWNER + peer_id_of(_encode_public(private)).encode():
        raise BadKey("its key is not the one of the peer id in its first line: the file was changed or damaged")
    return _encode_private(private)


def _load(path: Path, created: bool) -> Identity:
    try:
        data = path.read_bytes()
        private = _parse_private(data)
    except (OSError, BadKey) as error:
        raise UserError(
            ExitCode.CONFIG,
            f"node.identity: {path} cannot be used as a private key ({error})",
            "name another file with --identity, or move this one away to have a new key made",
        ) from None
    public = _encode_public(private)
    return Identity(path, peer_id_of(public), public, created, private)


def peer_id_of(public_key: bytes) -> PeerId:
    """The peer id of an encoded public key of at most `PUBLIC_KEY_BYTES`: base58 of its identity multihash."""
    return PeerId(base58.b58encode(bytes((0x00, len(public_key))) + public_key).decode())


def ed25519_peer_id(key: Ed25519PrivateKey) -> PeerId:
    """The peer id of an Ed25519 key."""
    return peer_id_of(_encode_public(key))


def ed25519_public_key(peer_id: str) -> bytes:
    """The encoded public key that an Ed25519 peer id is made of; ValueError for any other."""
    multihash = base58.b58decode(peer_id)
    key = multihash[2:]
    if multihash[:2] != bytes((0x00, len(key))) or peer_id_of(key) != peer_id:
        raise ValueError(f"{peer_id} is not the peer id of an Ed25519 key")
    return key


def verify(public_key: bytes, signature: bytes, data: bytes) -> bool:
    """Whether `signature` over `data` was made by the private half of this encoded public key. Never raises."""
    if len(public_key) != PUBLIC_KEY_BYTES or not public_key.startswith(PUBLIC_HEAD):
        return False
    try:
        Ed25519PublicKey.from_public_bytes(public_key[len(PUBLIC_HEAD) :]).verify(signature, data)
    except (ValueError, UnsupportedAlgorithm, InvalidSignature):
        return False
    return True


def lock_path_of(path: Path) -> Path:
    """The lock file beside an identity file, the same whatever name the identity is reached by."""
    real = path.resolve()
    return real.with_name(real.name + ".lock")


def holder_of(path: Path) -> str | None:
    """The process on this machine that runs under the identity file now, in words; None if there is none. Raises
    OSError if it cannot be told. Never makes the lock file."""
    return lock_holder(lock_path_of(path))


class IdentityLock:
    """Holds an identity file for this process, so that no second node on this machine runs under the same peer id.

    A context manager; the system releases the lock when the process dies, whatever the reason.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.resolve()
        self._lock = FileLock(lock_path_of(self._path))

    def __enter__(self) -> IdentityLock:
        lock_path = lock_path_of(self._path)
        try:
            lock_path.parent.mkdir(parents=True, exist_ok=True)
            self._lock.__enter__()
        except OSError as error:
            raise UserError(
                ExitCode.RUN_FOLDER,
                f"node.identity: {lock_path} cannot be written ({error.strerror})",
                "put the identity into a folder that this user may write",
            ) from None
        except LockHeld as held:
            raise identity_taken(self._path, str(held)) from None
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.__exit__()


def identity_taken(path: Path, holder: str) -> UserError:
    """The error for an identity that someone else runs under."""
    return UserError(
        ExitCode.IDENTITY_TAKEN,
        f"node.identity: {path} is in use by {holder}",
        "give each node an identity file of its own (--identity or --run-folder), or stop the other node first",
    )


def write_new_private_file(path: Path, data: bytes) -> bool:
    """Write a file that only its owner can read (mode 0600), whole or not at all; its folder is made where missing.

    False, and nothing written, where `path` exists already. OSError as the file system says.
    """
    draft = path.with_name(f".{path.name}.{ambient.token(4)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        written = _link_unless_taken(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    atomic.sync(path.parent)
    return written


def _create(path: Path) -> bool:
    """Write a new key unless another process was faster; True if it was written."""
    try:
        return write_new_private_file(path, _encode_private(Ed25519PrivateKey.generate()))
    except OSError as error:
        raise UserError(
            ExitCode.RUN_FOLDER,
            f"the identity {path} cannot be written: {error.strerror}",
            "name a file, or a run folder, that this user may write",
        ) from None


def _link_unless_taken(draft: Path, path: Path) -> bool:
    try:
        os.link(draft, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in NO_HARD_LINKS:
            raise
        if path.exists():
            return False
        draft.rename(path)
    return True


def _parse_private(data: bytes) -> Ed25519PrivateKey:
    if len(data) != len(PRIVATE_HEAD) + 2 * SEED_BYTES or not data.startswith(PRIVATE_HEAD):
        raise BadKey("it is no Ed25519 key as libp2p writes one")
    private = Ed25519PrivateKey.from_private_bytes(data[len(PRIVATE_HEAD) :][:SEED_BYTES])
    if _encode_private(private) != data:
        raise BadKey("its two halves do not belong together")
    return private


def _encode_public(private: Ed25519PrivateKey) -> bytes:
    return PUBLIC_HEAD + private.public_key().public_bytes_raw()


def _encode_private(private: Ed25519PrivateKey) -> bytes:
    """The content of an identity file, as libp2p writes it."""
    return PRIVATE_HEAD + private.private_bytes_raw() + private.public_key().public_bytes_raw()


_DOMAIN = b"noloco statement 1\0"
_LENGTH = struct.Struct(">H")


def sign_statement(identity: Identity, statement: bytes) -> bytes:
    """A seal over `statement`: the public key and a signature. `signed_by` accepts it for this identity's peer id."""
    signature = identity.sign(_DOMAIN + statement)
    return _LENGTH.pack(len(identity.public_key)) + identity.public_key + signature


def signed_by(peer: PeerId, seal: bytes, statement: bytes) -> bool:
    """Whether the owner of `peer` made this seal over exactly this statement. Never raises."""
    if len(seal) < _LENGTH.size:
        return False
    end = _LENGTH.size + _LENGTH.unpack_from(seal)[0]
    public_key, signature = seal[_LENGTH.size : end], seal[end:]
    if len(public_key) != PUBLIC_KEY_BYTES or peer_id_of(public_key) != peer:
        return False
    return verify(public_key, signature, _DOMAIN + statement)
