"""Find out which peer listens at an address, by a handshake and without a p2pd: cheap enough to do it for strangers.

On TCP both sides of libp2p agree by multistream-select on TLS 1.3 (`/tls/1.0.0`). The listener's certificate carries
its public key with a signature over the certificate's own key (libp2p's TLS specification). The handshake proves that
the listener holds the certificate's key, so it is the peer that the public key names.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.x509 import ObjectIdentifier, UnrecognizedExtension

from noloco_node.identity.keys import peer_id_of, verify
from noloco_node.identity.peer_id import PeerId

MULTISTREAM = b"/multistream/1.0.0\n"
TLS = b"/tls/1.0.0\n"
EXTENSION = ObjectIdentifier("1.3.6.1.4.1.53594.1.1")
SIGNED_PREFIX = b"libp2p-tls-handshake:"
KEY_HEAD, SIGNATURE_HEAD = b"\x30\x68\x04\x24", b"\x04\x40"
"""The extension is a sequence of two octet strings: the encoded Ed25519 key, and its signature of 64 bytes."""


class NoAnswer(Exception):
    """Nobody is reached at an address, or the listener is no libp2p peer; the text says why."""


async def who_answers(host: str, port: int, within: float) -> PeerId:
    """The peer that listens there. Raises NoAnswer within `within` seconds and a little."""
    try:
        async with asyncio.timeout(within):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                return await _handshake(reader, writer)
            finally:
                writer.transport.abort()
    except TimeoutError:
        raise NoAnswer(f"timed out after {within:g} s") from None
    except ConnectionRefusedError:
        raise NoAnswer("refused: nothing listens on that port") from None
    except (asyncio.IncompleteReadError, ssl.SSLError, ConnectionError, ValueError):
        raise NoAnswer("something listens there that is no peer") from None
    except OSError as error:
        raise NoAnswer(f"unreachable: {error.strerror or error}") from None


async def _handshake(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> PeerId:
    for word in (MULTISTREAM, TLS):
        writer.write(bytes((len(word),)) + word)
    for word in (MULTISTREAM, TLS):
        if await reader.readexactly(1) != bytes((len(word),)) or await reader.readexactly(len(word)) != word:
            raise ValueError("not the answer of a peer")
    await writer.start_tls(_context())
    secured: Any = writer.get_extra_info("ssl_object")
    return peer_of_certificate(secured.getpeercert(binary_form=True))


def _context() -> ssl.SSLContext:
    """No authority signs peers' certificates: what they say of the key is checked by hand."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(["libp2p"])
    return context


def peer_of_certificate(der: bytes) -> PeerId:
    """The peer whose key vouches for a certificate. Raises ValueError if none does."""
    try:
        vouching, encoded = _vouching_and_key(x509.load_der_x509_certificate(der))
    except Exception as error:  # noqa: BLE001 - a stranger wrote it, and what the library raises has no common class
        raise ValueError(f"no certificate that can be read: {error!r}") from None
    if vouching is None:
        raise ValueError("no peer vouches for this certificate")
    public_key, head, signature = vouching[4:40], vouching[40:42], vouching[42:]
    if (vouching[:4], head) != (KEY_HEAD, SIGNATURE_HEAD):
        raise ValueError("the peer's key is of another kind")
    if not verify(public_key, signature, SIGNED_PREFIX + encoded):
        raise ValueError("the peer's signature is not over this certificate's key")
    return peer_id_of(public_key)


def _vouching_and_key(certificate: x509.Certificate) -> tuple[bytes | None, bytes]:
    """What libp2p's extension says, if there is one, and the certificate's own public key."""
    found = [extension.value for extension in certificate.extensions if extension.oid == EXTENSION]
    vouching = found[0].value if found and isinstance(found[0], UnrecognizedExtension) else None
    encoding, form = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    return vouching, certificate.public_key().public_bytes(encoding, form)
