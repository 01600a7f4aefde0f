"""What a node remembers of its peers if it sees two buckets of a stage.

It remembers audits, receipts, addresses for its next start, and the keepers of a copy of a lost stage.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

import pytest

from noloco_node import tallies
from noloco_node.accounting import receipts as receipts_module
from noloco_node.accounting.receipts import open_receipts
from noloco_node.accounting.statements import read_contribution
from noloco_node.directory.buckets import RENEWED_SECONDS, bucket_of, prefix_of
from noloco_node.directory.known_peers import MOST_PEERS, HeldState, KnownPeers
from noloco_node.directory.store import Esteem
from noloco_node.identity.peer_id import PeerId
from noloco_node.pipeline.messages import Ledger
from noloco_node.state_transfer.backups import standby_rank
from noloco_node.tallies import PeerTable
from noloco_node.training.progress import Progress
from noloco_node.transport.memory import MemoryNetwork, MemoryTransport
from tests.swarm.test_known_peers import at
from tests.swarm.test_partial_view import HELD, LEVEL, MANY, by_bucket, membership_of, names, view_of
from tests.swarm.test_sampled_view import LOOK, Keys, Observer
from tests.swarm.worlds import AllAnswer


class Enough(Exception):
    """The test has seen enough."""


async def kept_by(known: KnownPeers, observer: Observer, looks: int, answers: set[PeerId]) -> None:
    """Let a node keep addresses for so many minutes of a view, of whose peers these answer it."""
    left = [looks]

    class Book:
        async def addresses_of(self, peer: PeerId) -> tuple[str, ...]:
            return (at("203.0.114.7", port=1024 + prefix_of(peer) % 60_000),)

    def live() -> list[PeerId]:
        left[0] -= 1
        if left[0] < 0:
            raise Enough
        view = observer.look(round(60 / LOOK))
        return sorted({peer for stage in view.stages for peer in stage})

    with pytest.raises(Enough):
        await known.keep(Book(), "run", live, esteem=lambda p: Esteem.KNOWN if p in answers else Esteem.HEARSAY)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pauses between two looks, and files that nobody waits for."""
    monkeypatch.setattr("noloco_node.directory.known_peers.LOOK_SECONDS", 0.0)
    monkeypatch.setattr(KnownPeers, "save", lambda *_: None)


@pytest.mark.usefixtures("quick")
async def test_addresses_are_kept_of_everybody_alike_and_no_file_is_like_another(tmp_path: Path) -> None:
    """100 nodes that see some 300 of 1,200 keep 32 each. Nearly all are in a file, and nobody is in many, so that those
    that start again do not all knock at the same doors. Over the years a file holds another part of the swarm."""
    keys, kept = Keys(MANY, MANY), Counter[PeerId]()
    for seed in range(100):
        known = KnownPeers(tmp_path / "peers.json")
        await kept_by(known, Observer(keys, seed=seed), 2, set())
        assert len(known.addresses) == MOST_PEERS
        kept.update(known.addresses.keys())
    assert len(kept) > 0.85 * 2 * MANY
    assert max(kept.values()) <= 12, "2.7 is the mean"
    assert 0.35 < sum(many for peer, many in kept.items() if peer.startswith("peer-0")) / kept.total() < 0.65


@pytest.mark.usefixtures("quick")
async def test_who_answers_has_its_place_in_the_file_before_a_crowd_that_sought_its_ids(tmp_path: Path) -> None:
    """Ids that come first in any order are all over the view, and answer nobody. After ten minutes, in which the view
    was changed five times, the file has 32 peers that have answered, of more buckets than are seen at once."""
    keys, honest = Keys(MANY, MANY), {PeerId(f"peer-{s}-{i:06}") for s in (0, 1) for i in range(MANY)}
    for number in range(160):
        keys.write(PeerId(f"aaaa-{number:06}"), number % 2, LEVEL, 75.0)
    observer, answers = Observer(keys, seed=3), set(random.Random(0).sample(sorted(honest), 400))
    known = KnownPeers(tmp_path / "peers.json")
    await kept_by(known, observer, 1 + round(5 * RENEWED_SECONDS / 60), answers)
    assert len(known.addresses) == MOST_PEERS
    assert known.addresses.keys() <= answers
    assert len({(peer[:6], bucket_of(prefix_of(peer), LEVEL)) for peer in known.addresses}) >= 4


def test_of_holders_each_stage_has_its_share(tmp_path: Path) -> None:
    """A node of a small stage before a large one works with hundreds of that: the holders of its own stage are
    remembered."""
    known = KnownPeers(tmp_path / "peers.json")
    for now in (1.0, 2.0):
        many = {peer: HeldState(stage=0, clock=5.0, seen=now) for peer in names(0)[:150]}
        few = {peer: HeldState(stage=1, clock=5.0, seen=now) for peer in names(1)[:3]}
        known.worked_with(many | few)
    known.run = "run"
    assert {peer for peer, _ in known.holders("run", 1)} == set(names(1)[:3])
    assert len(known.held) == MOST_PEERS


async def test_receipts_count_for_whoever_worked_and_are_forgotten_without_losing_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No directory is asked: 60 peers of which none is seen any more serve one node in turn and are receipted. So is a
    peer that comes again after all of them. Nothing in either's books grows with those that came by."""
    most = 16
    monkeypatch.setattr(tallies, "MOST_PEERS", most)
    monkeypatch.setattr(receipts_module, "LEAST_SECONDS", 0.0)
    network, ledger = MemoryNetwork(), Ledger()
    own = MemoryTransport(network, PeerId("served-of-stage-0"))
    served = await open_receipts(tmp_path / "served", "r" * 32, 0, own, ledger, Progress)
    server_ledger, server = Ledger(), MemoryTransport(network, PeerId("server-of-stage-1"))
    serving = await open_receipts(tmp_path / "server", "r" * 32, 1, server, server_ledger, Progress)

    async def between(one: Ledger, other: Ledger, peer: PeerId, by: PeerId) -> None:
        one.note_received(peer, 20)
        other.note_served(by, 20)

    passers = [MemoryTransport(network, peer) for peer in names(2)[:60]]
    for passer in [passers[0], *passers, passers[0]]:
        theirs = Ledger()
        await between(theirs, server_ledger, server.peer_id, passer.peer_id)
        sends = await open_receipts(tmp_path / f"file-{passer.peer_id}", "r" * 32, 0, passer, theirs, Progress)
        await between(ledger, theirs, passer.peer_id, own.peer_id)
        await between(ledger, server_ledger, server.peer_id, own.peer_id)
        await asyncio.gather(sends.settle(), served.settle())
        assert not theirs.done_by, "the server has filed what it did for who came by"
        sends.close()
    for books in (served, serving):
        grows = [book for book in vars(books).values() if isinstance(book, dict) and not isinstance(book, PeerTable)]
        assert max(map(len, grows)) <= most
    total = read_contribution(tmp_path / "server", server.peer_id, server.signed_by)
    assert {peer: row.microbatches for peer, row in total.receipts.items()} == {
        own.peer_id: 62,
        passers[0].peer_id: 3,
        **{passer.peer_id: 1 for passer in passers[1:]},
    }
    again = read_contribution(tmp_path / f"file-{passers[0].peer_id}", passers[0].peer_id, server.signed_by)
    assert again.receipts[own.peer_id].microbatches == 3
    for transport in (own, server, *passers):
        await transport.close()


def test_whoever_comes_to_a_lost_stage_sees_a_copy_nearly_always_whatever_buckets_it_sees() -> None:
    """Of the 600 of the first stage some twelve keep a copy of the second: a node that comes there sees a quarter."""
    rng, found = random.Random(5), list[bool]()
    for of in range(12):
        everybody = names(0, of=f"{of}-")
        buckets = by_bucket(everybody)

        def seen(buckets: dict[int, list[PeerId]] = buckets) -> list[PeerId]:
            return [p for b in rng.sample(range(8), HELD) for p in buckets[b]]

        keepers = {
            own
            for own in sorted(everybody)[:90]
            if standby_rank(membership_of(own, 0, view_of([seen(), [], []], [MANY, 0, 0]), AllAnswer())) == 0
        }
        found.append(not keepers.isdisjoint(seen()))
    assert sum(found) >= 10
