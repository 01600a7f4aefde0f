"""Identities: the file, the peer id, signatures, and one process at a time."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hivemind.p2p import P2P
from hivemind.proto import crypto_pb2
from hypothesis import given
from hypothesis import strategies as st

from noloco_node.errors import ExitCode, UserError
from noloco_node.identity.keys import (
    BACKUP_LABEL,
    BadKey,
    IdentityLock,
    WrongPassphrase,
    holder_of,
    key_of_backup,
    load_identity,
    load_or_create_identity,
    lock_path_of,
    peer_id_of,
    verify,
    write_new_private_file,
)
from noloco_node.identity.peer_id import PeerId
from noloco_node.libp2p import start as p2pd_start

PASSPHRASE = b"correct horse battery"


def test_a_new_identity_is_private_and_is_found_again(tmp_path: Path) -> None:
    """Mode 0600, no draft left, the same peer id after a restart, folders made as needed."""
    path = tmp_path / "deep" / "identity.key"
    first = load_or_create_identity(path)
    second = load_or_create_identity(path)
    assert first.created
    assert not second.created
    assert (first.peer_id, first.public_key) == (second.peer_id, second.public_key)
    assert first.peer_id.startswith("12D3KooW")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == ["identity.key"]


def test_keys_are_encoded_as_protobuf_does(tmp_path: Path) -> None:
    """By hand here, by hivemind's generated code there: byte for byte. What was cut off or changed is no key."""
    path = tmp_path / "identity.key"
    identity, written = load_or_create_identity(path), path.read_bytes()
    private, public = crypto_pb2.PrivateKey.FromString(written), crypto_pb2.PublicKey.FromString(identity.public_key)
    assert private.key_type == public.key_type == crypto_pb2.Ed25519
    assert private.data[32:] == public.data
    assert private.SerializeToString() == written
    assert public.SerializeToString() == identity.public_key
    for damaged in (written[:-1], written + b"x", written[2:] + written[:2], written[:-1] + bytes((written[-1] ^ 1,))):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="cannot be used as a private key"):
            load_or_create_identity(path)


def test_a_key_of_another_kind_is_the_users_error(tmp_path: Path) -> None:
    """hivemind writes RSA keys, whose peer ids do not hold the key."""
    path = tmp_path / "rsa.key"
    P2P.generate_identity(str(path))
    with pytest.raises(UserError, match="no Ed25519 key"):
        load_or_create_identity(path)


def test_a_signature_holds_for_its_text_and_key_only(tmp_path: Path) -> None:
    """Another text, another key or a changed signature is refused."""
    one, other = (load_or_create_identity(tmp_path / name) for name in ("one.key", "other.key"))
    signature = one.sign(b"text")
    assert verify(one.public_key, signature, b"text")
    assert not verify(one.public_key, signature, b"texT")
    assert not verify(other.public_key, signature, b"text")
    assert not verify(one.public_key, signature[:-1] + bytes((signature[-1] ^ 1,)), b"text")
    assert peer_id_of(one.public_key) == one.peer_id != other.peer_id


@given(public_key=st.binary(max_size=1200), signature=st.binary(max_size=300), data=st.binary(max_size=50))
def test_verifying_never_raises(public_key: bytes, signature: bytes, data: bytes) -> None:
    """Whatever a stranger sends as key and signature is just not valid."""
    assert not verify(public_key, signature, data)
    assert not verify(b"\x08\x01\x12\x20" + public_key[:32], signature, data)


@pytest.mark.parametrize("content", [b"", b"no key at all", b"\x08\x01\x12\x02ab", b"\x08\x00\x12\x03abc", bytes(100)])
def test_a_file_that_is_no_key_is_the_users_error(tmp_path: Path, content: bytes) -> None:
    """It is named, and left as it was."""
    path = tmp_path / "identity.key"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        load_or_create_identity(path)
    assert caught.value.exit_code is ExitCode.CONFIG
    assert str(path) in caught.value.message
    assert path.read_bytes() == content


def test_a_folder_that_cannot_be_made_is_the_users_error(tmp_path: Path) -> None:
    """The run folder's exit code."""
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError) as caught:
        load_or_create_identity(tmp_path / "file" / "identity.key")
    assert caught.value.exit_code is ExitCode.RUN_FOLDER


HOLDER = """
import sys
from pathlib import Path
from noloco_node.identity.keys import IdentityLock
with IdentityLock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_an_identity_is_held_by_one_process_and_free_once_that_is_killed(tmp_path: Path) -> None:
    """The second is told the first one's pid, also through a link; `kill -9` frees it at once."""
    path = tmp_path / "identity.key"
    load_or_create_identity(path)
    link = tmp_path / "link.key"
    link.symlink_to(path)
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n"
            for name in (path, link):
                with pytest.raises(UserError) as caught, IdentityLock(name):
                    pass
                assert caught.value.exit_code is ExitCode.IDENTITY_TAKEN
                assert f"pid {holder.pid}" in caught.value.message
        finally:
            holder.kill()
    with IdentityLock(path), pytest.raises(UserError), IdentityLock(path):
        pass
    with IdentityLock(path):
        pass


def test_who_asks_for_the_holder_sees_it_and_is_in_nobodys_way(tmp_path: Path) -> None:
    """It sees nobody without a lock file, which looking does not make. It sees the pid while it is held, also through a
    link. Afterwards it sees nobody again, and the lock can be taken."""
    path, link = tmp_path / "identity.key", tmp_path / "link.key"
    load_or_create_identity(path)
    link.symlink_to(path)
    assert holder_of(path) is None
    assert not lock_path_of(path).exists()
    with IdentityLock(path):
        assert holder_of(path) == holder_of(link) == f"the process with pid {os.getpid()} on this machine"
    assert holder_of(path) is None
    with IdentityLock(path):
        assert holder_of(path) is not None


def test_loading_makes_no_key(tmp_path: Path) -> None:
    """A wrong name is the user's error, not a new identity."""
    with pytest.raises(UserError) as caught:
        load_identity(tmp_path / "identity.key")
    assert caught.value.exit_code is ExitCode.CONFIG
    assert os.listdir(tmp_path) == []


def test_a_backup_gives_the_same_file_back_and_hides_the_key(tmp_path: Path) -> None:
    """Byte for byte; nothing of the key can be read in the backup."""
    path = tmp_path / "identity.key"
    identity = load_or_create_identity(path)
    backup = identity.backup(PASSPHRASE)
    assert backup.splitlines()[1] == BACKUP_LABEL
    assert key_of_backup(backup, PASSPHRASE) == path.read_bytes()
    assert backup != identity.backup(PASSPHRASE), "each has a salt of its own"
    for wrong in (b"", PASSPHRASE[:-1], PASSPHRASE.upper()):
        with pytest.raises(WrongPassphrase):
            key_of_backup(backup, wrong)


def test_what_is_no_backup_of_a_nodes_key_is_told_from_a_wrong_passphrase(tmp_path: Path) -> None:
    """A key file as it is, a key in plain PEM, another kind of key, one without its peer id or with another's."""
    form, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    pem = Ed25519PrivateKey.generate().private_bytes(serialization.Encoding.PEM, form, plain)
    locked = serialization.BestAvailableEncryption(PASSPHRASE)
    curve = ec.generate_private_key(ec.SECP256R1()).private_bytes(serialization.Encoding.PEM, form, locked)
    backups = [load_or_create_identity(tmp_path / name).backup(PASSPHRASE) for name in ("identity.key", "other.key")]
    (owner, _, _), (_, label, key) = (backup.partition(BACKUP_LABEL) for backup in backups)
    for content in (b"", pem, curve, (tmp_path / "identity.key").read_bytes(), label + key, owner + label + key):
        with pytest.raises(BadKey):
            key_of_backup(content, PASSPHRASE)


def test_a_damaged_backup_never_gives_another_identity(tmp_path: Path) -> None:
    """Whichever character is changed, and wherever it is cut off."""
    path = tmp_path / "identity.key"
    backup = load_or_create_identity(path).backup(PASSPHRASE)
    for place in range(0, len(backup), 7):
        changed = bytes((backup[place] ^ 1,))
        for damaged in (backup[:place], backup[:place] + changed + backup[place + 1 :]):
            try:
                assert key_of_backup(damaged, PASSPHRASE) == path.read_bytes()
            except (BadKey, WrongPassphrase):
                continue


@pytest.mark.parametrize("hard_links", [True, False])
def test_a_private_file_is_new_or_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hard_links: bool
) -> None:
    """Mode 0600 whatever the umask, no draft left, an existing file untouched; also on a memory stick."""

    def no_links(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    if not hard_links:
        monkeypatch.setattr(os, "link", no_links)
    path = tmp_path / "new" / "file"
    before = os.umask(0)
    try:
        assert write_new_private_file(path, b"first")
        assert not write_new_private_file(path, b"second")
    finally:
        os.umask(before)
    assert path.read_bytes() == b"first"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == ["file"]


async def test_a_twin_is_found_though_the_first_look_for_it_finds_nobody() -> None:
    """The nameless p2pd that asks has met the swarm a moment ago."""
    answers: list[str | None] = ["routing: not found", None]

    async def connect(_peer: PeerId) -> str | None:
        return answers.pop(0)

    probe: Any = SimpleNamespace(connect=connect)
    assert await p2pd_start.is_found(probe, PeerId("a-twin"))
    answers += ["routing: not found"] * 3
    assert not await p2pd_start.is_found(probe, PeerId("a-twin"))
