"""Peers seen before, and the addresses that are of use to anyone."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from noloco_node.directory.known_peers import MOST_PEERS, KnownPeers, live_peers
from noloco_node.directory.records import DirectoryView, LiveRecord
from noloco_node.errors import ExitCode, UserError
from noloco_node.identity.addresses import MOST_ADDRESSES, dialable, to_hand_out
from noloco_node.identity.peer_id import PeerId
from noloco_node.libp2p.arguments import announced_address, check_port_free, explain, one_family
from noloco_node.node.network import seen_before
from tests.support import eventually
from tests.worlds import record_of

ID = "12D3KooWKrCeA5nCWnQ5gm5FLAszTb6cDMk2hX8BH7Hj8MhGeFx9"
OTHER = "12D3KooWAL5zALa3ZR1piSRmK8WGNFojeALVyS3vgSZQYawt1PGF"


def at(host: str, peer: str = ID, port: int = 31337) -> str:
    """An address of a peer."""
    kind = "ip4" if host[0].isdigit() else "dns4"
    return f"/{kind}/{host}/tcp/{port}/p2p/{peer}"


def test_public_addresses_come_first_and_loopback_only_where_there_is_nothing_else() -> None:
    """A peer's loopback is our own machine; what is no TCP address of a peer is left out."""
    public, private, loopback = at("203.0.114.7"), at("192.168.1.4"), at("127.0.0.1")
    assert dialable([loopback, private, public, "nonsense", at("0.0.0.0")]) == (public, private)
    assert dialable([loopback]) == (loopback,)
    assert to_hand_out([public, private, loopback]) == [public], "others were told to join by 192.168.1.7"
    assert to_hand_out([private, loopback]) == [private, loopback]
    assert dialable(["/ip4/1.2.3.4/udp/4/quic", at("0.0.0.0")]) == ()
    assert len(dialable([at(f"203.0.114.{n}") for n in range(20)])) == MOST_ADDRESSES


def test_peers_are_kept_bounded_newest_first_and_come_back_from_the_file(tmp_path: Path) -> None:
    """One met again moves to the front; beyond the bound the oldest goes."""
    known = KnownPeers(tmp_path / "peers.json")
    for number in range(MOST_PEERS + 5):
        known.learn(PeerId(f"{ID[:-3]}{number:03d}"), [at("203.0.114.7", port=1000 + number)])
    first = PeerId(f"{ID[:-3]}010")
    known.learn(first, [at("203.0.114.9")])
    known.learn(PeerId(OTHER), [at("0.0.0.0")])
    known.save("run-a")
    again = KnownPeers(tmp_path / "peers.json")
    assert len(again.addresses) == MOST_PEERS
    assert list(again.addresses) == list(known.addresses)
    assert next(iter(again.addresses)) == first
    assert OTHER not in again.addresses
    assert again.texts("run-a")[0] == at("203.0.114.9")
    assert again.texts("run-b") == (), "peers of another run are no way in"


@pytest.mark.parametrize("content", ["", "[]", '{"run": 3}', '{"run": "a", "peers": {"x": "y"}}', "x" * 300_000])
def test_a_damaged_file_is_passed_over(tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture) -> None:
    """Said once, and the node starts without it."""
    (tmp_path / "peers.json").write_text(content)
    assert KnownPeers(tmp_path / "peers.json").addresses == {}
    assert "passed over" in caplog.text


def test_what_the_file_claims_is_held_to_the_same_rules(tmp_path: Path) -> None:
    """An address in it that is none does not get in."""
    (tmp_path / "peers.json").write_text(json.dumps({"run": "a", "peers": {ID: ["rm -rf", at("203.0.114.7")]}}))
    assert KnownPeers(tmp_path / "peers.json").texts() == (at("203.0.114.7"),)


def test_an_address_that_is_too_long_costs_no_other_its_place(tmp_path: Path) -> None:
    """Any live peer may announce one: neither it nor a file with it keeps the next start from the others."""
    path, too_long = tmp_path / "peers.json", at("a" * 250)
    known = KnownPeers(path)
    known.learn(PeerId(ID), [too_long, at("203.0.114.7")])
    known.save("run-a")
    assert KnownPeers(path).texts("run-a") == (at("203.0.114.7"),)
    path.write_text(json.dumps({"run": "a", "peers": {ID: [too_long, at("203.0.114.7")]}}))
    assert KnownPeers(path).texts("a") == (at("203.0.114.7"),)


def test_a_named_run_is_entered_by_its_own_peers_only(tmp_path: Path) -> None:
    """A user that names an address means the run behind it. Peers of the last run do not stand in for it, unless the
    named peer was met in that run."""
    known = KnownPeers(tmp_path / "peers.json")
    known.learn(PeerId(ID), [at("203.0.114.7")])
    known.save("run-a")
    here = (at("203.0.114.7"),)
    assert seen_before(known, "run-a", ()) == here
    assert seen_before(known, "run-b", ()) == ()
    assert seen_before(known, None, ()) == here
    assert seen_before(known, None, [at("198.51.100.9", OTHER)]) == ()
    assert seen_before(known, None, [at("198.51.100.9", ID)]) == here


def test_a_disk_that_takes_no_list_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A node whose disk had become read-only said so every half minute; it says so again after it has worked."""
    (tmp_path / "folder").write_text("in the way")
    known = KnownPeers(tmp_path / "folder" / "peers.json")
    for _ in range(2):
        known.save("run-a")
        known.save("run-a")
        assert caplog.text.count("the peers seen cannot be kept") == 1
        caplog.clear()
        (tmp_path / "folder").unlink()
        (tmp_path / "folder").mkdir()
        known.save("run-a")
        (tmp_path / "folder" / "peers.json").unlink()
        (tmp_path / "folder").rmdir()
        (tmp_path / "folder").write_text("in the way")


async def test_the_file_follows_the_live_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they listen is asked again and again; one that nobody finds keeps its last address."""
    monkeypatch.setattr("noloco_node.directory.known_peers.LOOK_SECONDS", 0.01)
    answers = {PeerId(ID): (at("203.0.114.7"),), PeerId(OTHER): ()}

    class Book:
        async def addresses_of(self, peer: PeerId) -> tuple[str, ...]:
            return answers[peer]

    known = KnownPeers(tmp_path / "peers.json")
    known.learn(PeerId(OTHER), [at("203.0.114.8", OTHER)])
    keeping = asyncio.create_task(known.keep(Book(), "run-a", lambda: list(answers)))
    await eventually(lambda: PeerId(ID) in KnownPeers(tmp_path / "peers.json").addresses, what="the file is written")
    answers[PeerId(ID)] = (at("203.0.114.99"),)
    await eventually(
        lambda: at("203.0.114.99") in KnownPeers(tmp_path / "peers.json").texts("run-a"), what="it is kept up to date"
    )
    keeping.cancel()
    assert KnownPeers(tmp_path / "peers.json").addresses[PeerId(OTHER)] == (at("203.0.114.8", OTHER),)


async def test_a_peer_is_asked_for_as_soon_as_it_is_seen_and_seldom_where_nobody_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run may be over half a minute after a peer came; one that is never found costs a look-up now and then."""
    monkeypatch.setattr("noloco_node.directory.known_peers.LOOK_SECONDS", 0.002)
    looks, asked = 0, list[tuple[int, PeerId]]()

    class Book:
        async def addresses_of(self, peer: PeerId) -> tuple[str, ...]:
            asked.append((looks, peer))
            return (at("203.0.114.7"),) if peer == PeerId(ID) else ()

    def live() -> list[PeerId]:
        nonlocal looks
        looks += 1
        return [PeerId(OTHER), PeerId(ID)] if looks >= 10 else [PeerId(OTHER)]

    keeping = asyncio.create_task(KnownPeers(tmp_path / "peers.json").keep(Book(), "run-a", live))
    await eventually(lambda: looks > 100, what="many looks")
    keeping.cancel()
    assert [look for look, peer in asked if peer == PeerId(ID)][:3] == [10, 31, 61]
    assert [look for look, peer in asked if peer == PeerId(OTHER)][:3] == [1, 31, 61]


def test_live_peers_are_all_but_this_one_and_the_dead() -> None:
    """They are of all stages, each once."""

    def row(peer: str, stage: int, expires: float) -> LiveRecord:
        return LiveRecord(record_of(peer, stage), expires)

    own, one, two, dead = (PeerId(f"{ID[:-1]}{n}") for n in range(4))
    view = DirectoryView(
        (
            {own: row(own, 0, 9.0), one: row(one, 0, 9.0)},
            {one: row(one, 1, 9.0), two: row(two, 1, 9.0), dead: row(dead, 1, 1.0)},
        )
    )
    assert live_peers(view, 5.0, own) == [one, two]


@pytest.mark.parametrize(
    ("text", "announced"),
    [
        ("203.0.113.7:4000", "/ip4/203.0.113.7/tcp/4000"),
        ("203.0.113.7", "/ip4/203.0.113.7/tcp/31337"),
        ("/ip4/203.0.113.7/tcp/4000", "/ip4/203.0.113.7/tcp/4000"),
        (f"/ip4/203.0.113.7/tcp/4000/p2p/{ID}", "/ip4/203.0.113.7/tcp/4000"),
        ("gpu.example.org:4000", "/dns/gpu.example.org/tcp/4000"),
        ("/dns4/gpu.example.org/tcp/4000", "/dns4/gpu.example.org/tcp/4000"),
        ("[2001:db8::7]:4000", "/ip6/2001:db8::7/tcp/4000"),
    ],
)
def test_an_announced_address_is_understood_in_the_forms_people_write(text: str, announced: str) -> None:
    """With a port of its own, or the one that the node listens on."""
    assert announced_address(text, "0.0.0.0", 31337) == announced


@pytest.mark.parametrize(
    ("text", "port"),
    [
        ("0.0.0.0:4000", 31337),
        ("/ip4/0.0.0.0/tcp/4000", 31337),
        ("[::]:4000", 31337),
        ("224.0.0.1:4000", 31337),
        ("203.0.113.7:0", 31337),
        ("/ip4/203.0.113.7/tcp/0", 31337),
        ("203.0.113.7", 0),
        ("203.0.113.7:70000", 31337),
        ("127.0.0.1:4000", 31337),
        ("localhost", 31337),
        ("localhost:4000", 31337),
        ("/dns4/LOCALHOST/tcp/4000", 31337),
        ("gpu.localhost:4000", 31337),
        ("[::ffff:127.0.0.1]:4000", 31337),
        ("/ip4/gpu.example.org/tcp/4000", 31337),
        ("203.0.113.700:4000", 31337),
        ("http://gpu.example.org:4000", 31337),
        ("", 31337),
    ],
)
def test_an_address_that_nobody_could_reach_is_not_announced(text: str, port: int) -> None:
    """Port 0, no host, this machine only, or no address at all."""
    with pytest.raises(UserError, match="announce: ") as caught:
        announced_address(text, "0.0.0.0", port)
    assert caught.value.exit_code is ExitCode.CONFIG


def test_a_host_of_ipv6_only_is_said_to_be_one() -> None:
    """With other programs `::` means IPv4 as well; libp2p listens by IPv6 alone."""
    assert "by IPv6 only" in str(one_family("::"))
    assert "by IPv6 only" in str(one_family("0:0:0:0:0:0:0:0"))
    assert one_family("0.0.0.0") is one_family("2001:db8::7") is None


def failed(**known: object) -> UserError:
    """The error for a start about which this is known."""
    nothing = {"what": "did not start", "output": "", "status": None, "load": 0.1, "peers": [], "probe": False}
    return explain(**{**nothing, **known})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("known", "words", "code"),
    [
        ({"load": 9.0, "peers": ["a"]}, "busy machine: 9.0 processes", ExitCode.P2P_DAEMON),
        ({"peers": ["/ip4/1.2.3.4"]}, "dead seed, which takes connections", ExitCode.P2P_DAEMON),
        ({"peers": ["a"], "probe": True}, "identity probe is stuck", ExitCode.P2P_DAEMON),
        ({"output": "listen tcp4: bind: address already in use", "status": 1}, "port was taken", ExitCode.PORT_IN_USE),
        ({"status": -9}, "want of memory", ExitCode.P2P_DAEMON),
        ({"status": 2, "load": 9.0}, "refused its arguments", ExitCode.P2P_DAEMON),
        ({}, "none that can be seen", ExitCode.P2P_DAEMON),
        (
            {"output": "failed to connect to bootstrap peers", "status": 1, "peers": ["a"]},
            "it is not this peer",
            ExitCode.PEERS_UNREACHABLE,
        ),
    ],
)
def test_a_start_that_failed_names_its_likely_cause(known: dict[str, object], words: str, code: ExitCode) -> None:
    """From what can be seen at that moment, each with a remedy of its own."""
    error = failed(**known)
    assert words in error.message
    assert error.exit_code is code
    assert error.remedy


@pytest.mark.parametrize("port", [0, 31337])
def test_a_host_of_another_machine_is_named_before_p2pd_is_started(port: int) -> None:
    """It used to be answered with the advice to reinstall hivemind."""
    with pytest.raises(UserError, match=r"node\.host: '8\.8\.8\.8' is no address of this machine") as caught:
        check_port_free("8.8.8.8", port)
    assert caught.value.exit_code is ExitCode.CONFIG
    assert "--host 0.0.0.0" in caught.value.remedy
    assert "--announce 8.8.8.8" in caught.value.remedy
    check_port_free("0.0.0.0", 0)


@pytest.mark.parametrize(
    ("name", "changes"),
    [("\x1b[2J" * 3, {}), ("a" * 5000, {}), (ID, {"clock": 1e308}), (ID, {"seen": 1e308}), (ID, {"stage": -1})],
    ids=["escape", "long", "clock", "seen", "stage"],
)
def test_what_a_hostile_file_says_of_holders_is_not_shown(tmp_path: Path, name: str, changes: dict[str, float]) -> None:
    """Their names and clocks go to the screen where a stage's state is elsewhere."""
    path = tmp_path / "peers.json"
    held = {"stage": 1, "clock": 5.0, "seen": 1.0, **changes}
    path.write_text(json.dumps({"run": "r", "peers": {}, "held": {name: held}}))
    assert KnownPeers(path).holders("r", 1) == []
