"""The peer that listens at an address, and the question whether others can reach a node, which nobody can abuse to
scan."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Sequence
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtensionOID

from noloco_node.bootstrap.reachability import (
    MAX_PORTS,
    MOST_ASKED,
    PEER_SECONDS,
    DialBackTurns,
    Dialled,
    Reached,
    ask_dial_back,
    hosts_of,
    serve_dial_back,
)
from noloco_node.config.node_settings import NodeSettings
from noloco_node.identity.addresses import parse_address
from noloco_node.identity.keys import Identity, load_or_create_identity
from noloco_node.identity.peer_id import PeerId
from noloco_node.libp2p.start import running_p2p
from noloco_node.libp2p.tls_probe import EXTENSION, SIGNED_PREFIX, NoAnswer, peer_of_certificate, who_answers
from noloco_node.node.checks import CheckOutcome
from noloco_node.node.start_checks import check_reached, relayed_instead
from noloco_node.transport.errors import Refusal, Refused
from noloco_node.transport.libp2p import Libp2pTransport
from noloco_node.transport.messages import Message

pytestmark = pytest.mark.usefixtures("temporary")

ID = PeerId("12D3KooWKrCeA5nCWnQ5gm5FLAszTb6cDMk2hX8BH7Hj8MhGeFx9")


def octets(data: bytes) -> bytes:
    """A DER octet string."""
    return bytes((0x04, len(data))) + data


def certificate(
    identity: Identity, *, signs_for: bytes | None = None, tail: bytes = b"", more: Sequence[tuple[str, str]] = ()
) -> bytes:
    """A certificate such as libp2p makes, for which `identity` vouches. It may be of `signs_for`'s key instead of its
    own, and have `more` extensions, each an object identifier and its content in hexadecimal digits."""
    key = ec.generate_private_key(ec.SECP256R1())
    encoded = key.public_key().public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    content = octets(identity.public_key) + octets(identity.sign(SIGNED_PREFIX + (signs_for or encoded)))
    vouching = x509.UnrecognizedExtension(EXTENSION, bytes((0x30, len(content))) + content + tail)
    name, now = x509.Name([]), datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now)
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(vouching, critical=True)
    )
    for oid, content in more:
        extension = x509.UnrecognizedExtension(x509.ObjectIdentifier(oid), bytes.fromhex(content))
        builder = builder.add_extension(extension, critical=False)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)


def test_a_certificate_names_the_peer_that_vouches_for_it(tmp_path: Path) -> None:
    """It names no other: one that was signed for another key, or carries more than it should, names nobody."""
    identity = load_or_create_identity(tmp_path / "key")
    assert peer_of_certificate(certificate(identity)) == identity.peer_id
    for forged in (certificate(identity, signs_for=b"another key"), certificate(identity, tail=b"\0"), b"nonsense"):
        with pytest.raises(ValueError):
            peer_of_certificate(forged)


def test_a_certificate_that_the_library_cannot_read_names_nobody(tmp_path: Path) -> None:
    """A subject may be an EDI party or have an X.400 address, and an extension may occur twice. The listener chooses
    them, and the library raises exceptions of its own for each."""
    identity = load_or_create_identity(tmp_path / "key")
    names = ExtensionOID.SUBJECT_ALTERNATIVE_NAME.dotted_string
    unread = [certificate(identity, more=[(names, content)]) for content in ("3004a5023000", "3004a3023000")]
    unknown = certificate(identity, more=[("1.2.3.4", "0400"), ("1.2.3.5", "0400")])
    unread.append(unknown.replace(bytes.fromhex("06032a0305"), bytes.fromhex("06032a0304")))
    for der in unread:
        with pytest.raises(ValueError, match="no certificate that can be read"):
            peer_of_certificate(der)


@pytest.mark.daemons
async def test_who_listens_is_told_without_a_p2pd_of_our_own(tmp_path: Path) -> None:
    """A real p2pd is named by its peer id; nobody, somebody else and somebody mute are told apart from it."""

    async def talk(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.0 400 Bad Request\r\n\r\n")
        await writer.drain()

    async def mute(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with running_p2p(NodeSettings(), load_or_create_identity(tmp_path / "key")) as daemon:
        address = parse_address(daemon.visible_addresses()[0])
        assert await who_answers(address.host, address.port, 20.0) == daemon.own_id
    for listener, words in ((None, "nothing listens"), (talk, "no peer"), (mute, "timed out")):
        port = 9
        server = None
        if listener is not None:
            server = await asyncio.start_server(listener, "127.0.0.1", 0)
            port = server.sockets[0].getsockname()[1]
        with pytest.raises(NoAnswer, match=words):
            await who_answers("127.0.0.1", port, 1.0)
        if server is not None:
            server.close()


def test_only_the_other_end_of_a_direct_connection_is_dialled() -> None:
    """A relay's host is not the peer's, a name is not looked up, and there are few."""
    assert hosts_of(["/ip4/203.0.113.7/tcp/31337", "/ip4/203.0.113.7/tcp/40000"]) == ("203.0.113.7",)
    assert hosts_of(["/ip6/2001:db8::7/tcp/1"]) == ("2001:db8::7",)
    assert hosts_of([f"/ip4/203.0.113.7/tcp/1/p2p/{ID}/p2p-circuit", "/dns4/example.org/tcp/1", "nonsense"]) == ()
    assert len(hosts_of([f"/ip4/203.0.113.{n}/tcp/1" for n in range(9)])) == 2


def test_a_peer_asks_once_in_a_while_and_few_at_a_time() -> None:
    """The rest is told to come back."""
    turns, peers = DialBackTurns(), [PeerId(f"{ID[:-1]}{n}") for n in range(MOST_ASKED + 1)]
    assert [turns.begin(peer, 0.0) for peer in peers] == [True] * MOST_ASKED + [False]
    turns.end()
    assert turns.begin(peers[-1], 1.0)
    turns.end()
    assert not turns.begin(peers[0], PEER_SECONDS - 1)
    assert turns.begin(peers[0], PEER_SECONDS)


@pytest.mark.daemons
@pytest.mark.timeout(90)
async def test_a_peer_dials_back_and_says_what_it_found(tmp_path: Path) -> None:
    """The asker's own port is reached, a dead one is not, and another node's is known for another's. Too many ports,
    ports that are none, and a second question at once are refused."""
    keys = [load_or_create_identity(tmp_path / name) for name in "abc"]
    async with (
        running_p2p(NodeSettings(), keys[0]) as helper,
        running_p2p(NodeSettings(initial_peers=tuple(helper.visible_addresses())), keys[1]) as asker,
        running_p2p(NodeSettings(), keys[2]) as third,
    ):
        serving, asking = Libp2pTransport(helper), Libp2pTransport(asker)
        for transport in (serving, asking):
            await transport.start()
        serve_dial_back(serving, helper.connections)
        own, other = (parse_address(daemon.visible_addresses()[0]).port for daemon in (asker, third))
        for wrong in ([0], [70000], list(range(1, MAX_PORTS + 2)), [], "22"):
            with pytest.raises(Refused) as caught:
                await asking.call(
                    helper.own_id,
                    "hello.dial_back",
                    Message({"ports": wrong}),
                    timeout=20.0,
                    progress=20.0,
                    max_answer_bytes=0,
                )
            assert caught.value.reason is Refusal.MALFORMED, wrong
        answer = await ask_dial_back(asking, helper.own_id, [own, other])
        assert answer.seen_at == ("127.0.0.1",)
        assert answer.results == {f"127.0.0.1 {own}": Reached.YES, f"127.0.0.1 {other}": Reached.ANOTHER}
        with pytest.raises(Refused) as caught:
            await ask_dial_back(asking, helper.own_id, [9])
        assert caught.value.reason is Refusal.BUSY
        for transport in (serving, asking):
            await transport.close()


def answer(*results: Reached) -> Dialled:
    """A peer's answer with these results."""
    return Dialled(seen_at=("203.0.113.7",), results={f"203.0.113.7 {n}": r for n, r in enumerate(results, 1)})


@pytest.mark.parametrize(
    ("results", "local_only", "outcome", "remedy"),
    [
        ([Reached.YES, Reached.YES], False, CheckOutcome.PASS, ""),
        ([Reached.YES, Reached.NO], False, CheckOutcome.WARN, "forward it in the router"),
        ([Reached.NO, Reached.NO], False, CheckOutcome.FAIL, "forward it in the router"),
        ([Reached.NO], True, CheckOutcome.FAIL, "--host 0.0.0.0"),
        ([Reached.ANOTHER], False, CheckOutcome.FAIL, "a port of its own"),
        ([], False, CheckOutcome.WARN, "doctor ADDRESS"),
    ],
)
def test_what_several_peers_say_makes_one_judgement(
    results: list[Reached], local_only: bool, outcome: CheckOutcome, remedy: str
) -> None:
    """With the remedy that fits."""
    answers = {PeerId(f"{ID[:-1]}{n}"): answer(result) for n, result in enumerate(results)}
    check = check_reached(answers, [31337], local_only=local_only)
    assert check.outcome is outcome
    assert remedy in check.remedy
    assert bool(check.remedy) == bool(remedy)
    relayed = relayed_instead(check, 1)
    assert relayed_instead(check, 0) == check
    assert relayed.outcome is (CheckOutcome.WARN if outcome is CheckOutcome.FAIL else outcome)
    assert ("by relay, 1 of its peers offers that" in relayed.found) == (outcome is CheckOutcome.FAIL)


@pytest.mark.parametrize(("host", "told"), [("192.168.1.7", True), ("9.9.9.9", False), ("127.0.0.1", False)])
def test_who_is_reached_at_a_private_address_alone_is_told_that_others_do_not_learn_it(host: str, told: bool) -> None:
    """It said that all is well, and nodes beyond the house never found the node."""
    said = Dialled(seen_at=(host,), results={f"{host} 31337": Reached.YES})
    check = check_reached({PeerId(ID): said}, [31337], local_only=False)
    assert check.outcome is CheckOutcome.PASS
    assert ("nodes beyond do not learn private addresses" in check.found) is told
