"""The signed end of a run: kept on disk by nodes and seeds, handed to any peer that asks, and judged by own work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from noloco_node.config.run_spec import AccessSpec, RunSpec
from noloco_node.directory.clocks import DrawnBy, OriginsSeen, places
from noloco_node.directory.records import PeerRecord, PeerState
from noloco_node.directory.signed_end import MOST_WORDS, SignedEnd
from noloco_node.identity.keys import load_or_create_identity
from noloco_node.identity.peer_id import PeerId
from noloco_node.storage.run_folder import MARK, RunFolder
from noloco_node.transport.memory import MemoryNetwork, MemoryTransport
from noloco_node.trust.admission import Access
from noloco_node.trust.lives import OwnLife
from noloco_node.trust.screened_directory import ScreenedDirectory
from tests.memory_directory import MemoryDirectory, MemoryDirectoryHub
from tests.swarm.test_last_words import SPEC, TARGET, name_of, record

KEEPER, SLEEPER, OLDER = 200, 201, 202


def nobody(_record: PeerRecord) -> bool:
    """No origin is at work any more."""
    return False


class Ends:
    """Nodes in memory, of which each knows the end by itself, and the directory that they share."""

    def __init__(self, spec: RunSpec = SPEC, birth: str = "b" * 24) -> None:
        self.spec, self.birth = spec, birth
        self.network = MemoryNetwork()
        self.hub = MemoryDirectoryHub(SPEC.stages)

    async def ended(self, *numbers: int) -> None:
        """These origins say for a while that they have come to the end."""
        for number in numbers:
            said = record(number, PeerState.GONE, finished=True, clock=TARGET).model_copy(update={"birth": self.birth})
            await MemoryDirectory(self.hub).publish(said, 60.0)

    async def node(self, number: int, *origins: int, folder: Path | None = None) -> SignedEnd:
        """One that has worked with these."""
        directory = ScreenedDirectory(MemoryDirectory(self.hub), Access(self.spec), life=OwnLife(self.birth))
        await directory.refresh()
        end = SignedEnd(MemoryTransport(self.network, name_of(number)), directory, self.spec)
        for origin in origins:
            end.seen_at_work(name_of(origin), 0.0)
        if folder is not None:
            end.kept_in(RunFolder.create(folder), self.spec)
        return end


@pytest.mark.parametrize(("signed", "known"), [((1, 2), True), ((1,), False), ((), False)])
async def test_a_node_that_comes_home_learns_the_end_from_the_folder_of_any_that_was_there(
    tmp_path: Path, signed: tuple[int, ...], known: bool
) -> None:
    """All records are gone, and only a former node is there again, with its folder. What half of the origins say is no
    end. An older release tells nothing."""
    ends = Ends()
    await ends.ended(*signed)
    (await ends.node(KEEPER, 1, 2, folder=tmp_path)).look(nobody)
    ends.hub.rows[0].clear()
    (await ends.node(KEEPER, folder=tmp_path)).serve()
    MemoryTransport(ends.network, name_of(OLDER))
    sleeper = await ends.node(SLEEPER, 1, 2)
    await sleeper.ask([name_of(OLDER), name_of(KEEPER), PeerId("nobody-is-there")])
    assert bool(sleeper.known) is known
    assert sleeper.may_be is bool(signed)


async def test_the_words_of_free_keys_end_nothing_and_take_no_place(tmp_path: Path) -> None:
    """A key costs nothing: those count with which this node has worked."""
    ends = Ends()
    await ends.ended(*range(10, 60))
    liar = await ends.node(KEEPER, *range(10, 60))
    liar.look(nobody)
    liar.serve()
    assert liar.known
    victim = await ends.node(SLEEPER, 1, 2, 3, folder=tmp_path)
    victim.look(nobody)
    await victim.ask([name_of(KEEPER)])
    assert (victim.known, victim.may_be, victim.records()) == ("", False, [])
    assert not (tmp_path / MARK).exists()


async def test_a_sender_that_names_free_keys_as_origins_ends_nothing(tmp_path: Path) -> None:
    """Their words are kept for others and for the median of the work, also in the next start."""
    ends = Ends()
    await ends.ended(*range(10, 20))
    victim = await ends.node(SLEEPER, 1, folder=tmp_path)
    victim.look(nobody, {name_of(number): 1.0 for number in range(10, 20)})
    assert (len(victim.records()), victim.known, victim.may_be) == (10, "", False)
    again = await ends.node(SLEEPER, 1, folder=tmp_path)
    assert (len(again.records()), again.known, again.may_be) == (10, "", False)


async def test_origins_that_were_gone_before_have_no_word_in_the_end() -> None:
    """Of two volunteers that came and went nobody waits for a word, nor of one that crashed an hour before the end. Two
    that were at work with the one that signed are waited for."""
    ends = Ends()
    await ends.ended(1)
    for number in (2, 3):
        await MemoryDirectory(ends.hub).publish(record(number, PeerState.GONE), 60.0)
    end = await ends.node(SLEEPER, 1, 2, 3, 4)
    end.look(nobody)
    assert not end.known
    end.seen_at_work(name_of(1), 3600.0)
    assert end.known
    end.seen_at_work(name_of(4), 3600.0)
    assert not end.known


async def test_free_keys_push_no_origin_at_work_out() -> None:
    """They may be many, and answer as nodes of the first stage do."""
    ends = Ends()
    end = await ends.node(SLEEPER, 1, 2)
    for number in range(10, 90):
        end.seen_at_work(name_of(number), SPEC.limits.record_seconds / 2)
    assert {name_of(1), name_of(2)} <= end.origins.keys()
    assert len(end.origins) == MOST_WORDS
    end.seen_at_work(name_of(99), 3600.0)
    assert name_of(99) in end.origins


async def test_free_keys_that_a_sender_names_fill_the_places_of_its_work_only() -> None:
    """One of three senders that do the same work names 64 keys, whose words come first. They took every place, and the
    words of the origins that the others name were lost."""
    work = OriginsSeen(lambda: 0.0)
    for _ in range(64):
        for sender, origins in ((150, range(60, 124)), (151, range(1, 11)), (152, range(11, 21))):
            for number in origins:
                origin = DrawnBy(name_of(number), TARGET)
                work.saw(origin, name_of(sender), tokens=64 // len(origins), own_clock=TARGET)
    ends = Ends()
    await ends.ended(*range(60, 124), *range(1, 21))
    end = await ends.node(SLEEPER)
    end.look(nobody, places(work.latest()))
    kept = {each.peer_id for each in end.records()}
    assert {name_of(number) for number in range(1, 21)} <= kept
    assert len(kept) == MOST_WORDS


async def test_the_owners_word_is_enough(tmp_path: Path) -> None:
    """Also for a node that has worked with many others."""
    owner = load_or_create_identity(tmp_path / "owner.key").peer_id
    ends = Ends(SPEC.model_copy(update={"access": AccessSpec(mode="open", owner=owner)}))
    said = record(9, PeerState.GONE, finished=True).model_copy(update={"peer_id": owner, "birth": ends.birth})
    await MemoryDirectory(ends.hub).publish(said, 60.0)
    end = await ends.node(SLEEPER, 1, 2, 3)
    end.look(nobody)
    assert end.known


async def test_only_a_new_birth_undoes_the_end(tmp_path: Path) -> None:
    """What was signed in another life is no word in this one; in its own it is known in every later start."""
    ends = Ends()
    await ends.ended(1, 2)
    (await ends.node(KEEPER, 1, 2, folder=tmp_path)).look(nobody)
    ends.hub.rows[0].clear()
    assert (await ends.node(KEEPER, 1, 2, folder=tmp_path)).known
    ends.birth = "c" * 24
    assert not (await ends.node(KEEPER, 1, 2, folder=tmp_path)).records()


async def test_a_word_of_an_earlier_life_says_nothing_in_a_later_one(tmp_path: Path) -> None:
    """Anybody has it, and hands it to nodes of a run that was begun anew. Their stage peer was taken for one of the
    earlier life, and refused. A founder that had not worked yet kept the owner's word, and left as soon as it idled."""
    owner = load_or_create_identity(tmp_path / "owner.key").peer_id
    spec = SPEC.model_copy(update={"access": AccessSpec(mode="open", owner=owner)})
    earlier, later = Ends(spec), OwnLife("c" * 24)
    await earlier.ended(1)
    said = record(9, PeerState.GONE, finished=True).model_copy(update={"peer_id": owner, "birth": earlier.birth})
    await MemoryDirectory(earlier.hub).publish(said, 60.0)
    stranger = await earlier.node(KEEPER, 1)
    stranger.look(nobody)
    stranger.serve()
    assert len(stranger.records()) == 2
    for number, life in ((SLEEPER, later), (OLDER, OwnLife(later.birth, settled=False))):
        directory = ScreenedDirectory(MemoryDirectory(MemoryDirectoryHub(SPEC.stages)), Access(spec), life=life)
        end = SignedEnd(MemoryTransport(earlier.network, name_of(number)), directory, spec)
        end.seen_at_work(name_of(1), 0.0)
        await end.ask([name_of(KEEPER)])
        life.settle()
        assert (end.known, end.records(), life.admits(name_of(1))) == ("", [], True)


async def test_a_damaged_word_is_passed_over(tmp_path: Path) -> None:
    """Nobody else's is lost by it."""
    ends = Ends()
    await ends.ended(1, 2)
    (await ends.node(KEEPER, 1, 2, folder=tmp_path)).look(nobody)
    mark = json.loads((tmp_path / MARK).read_text())
    mark["end"][0]["signed"] = "?"
    (tmp_path / MARK).write_text(json.dumps(mark))
    end = await ends.node(KEEPER, folder=tmp_path)
    assert [each.peer_id for each in end.records()] == [mark["end"][1]["peer"]]
