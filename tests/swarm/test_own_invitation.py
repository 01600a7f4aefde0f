"""A guest is warned before its invitation ends, and leaves when its peers refuse it for that.

It leaves neither by its own clock, nor by one peer's word while others let it in.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from noloco_node.config.run_spec import AccessSpec, RunSpec
from noloco_node.diagnostics.status import status_lines
from noloco_node.errors import ExitCode, UserError
from noloco_node.identity.invitations import Proof, invite
from noloco_node.identity.keys import Identity, load_or_create_identity
from noloco_node.identity.peer_id import PeerId
from noloco_node.storage.run_folder import RunFolder
from noloco_node.telemetry.events import EventFile, Warned
from noloco_node.transport.memory import MemoryNetwork, MemoryTransport
from noloco_node.trust.admission import Access
from noloco_node.trust.own_invitation import DAY, HOUR, OwnInvitation, marks_passed
from noloco_node.trust.screened_directory import ScreenedDirectory
from tests.memory_directory import MemoryDirectory, MemoryDirectoryHub
from tests.telemetry import made_events
from tests.worlds import micro_spec, record_of

END = 1_000_000
GUEST = PeerId("an-invited-peer")


@dataclass
class Node:
    """One node, by its own clock."""

    peer: PeerId
    transport: MemoryTransport
    access: Access
    directory: MemoryDirectory
    clock: list[float]
    said: list[Warned] = field(default_factory=list[Warned])
    own: OwnInvitation | None = None

    async def looks(self) -> UserError | None:
        """Reads the directory, and finds out whether it must leave."""
        await self.directory.refresh()
        assert self.own is not None
        return await self.own.look()


@dataclass
class Circle:
    """Nodes of one run, all of them in its directory, at a time of their own."""

    owner: Identity
    listed: tuple[str, ...] = ()
    network: MemoryNetwork = field(default_factory=MemoryNetwork)
    hub: MemoryDirectoryHub = field(default_factory=lambda: MemoryDirectoryHub(1, lambda: 0.0))
    nodes: list[Node] = field(default_factory=list[Node])

    @property
    def spec(self) -> RunSpec:
        """The run."""
        access = AccessSpec(mode="invited", owner=self.owner.peer_id, peers=self.listed)
        return micro_spec(stages=1).model_copy(update={"access": access})

    def proof(self, peer: PeerId, expires: int = END) -> Proof:
        """By the owner, for any holder."""
        return invite(self.owner, self.spec.run_id, expires, None).proof_for(peer)

    async def add(self, peer: PeerId, proof: Proof | None, ahead: float = 0.0) -> Node:
        """A node that is there, its clock so far `ahead` of the end of an invitation."""
        clock, transport = [END + ahead], MemoryTransport(self.network, peer)
        access = Access(self.spec, proof, now=lambda: clock[0])
        access.serve(transport)
        made = Node(peer, transport, access, MemoryDirectory(self.hub), clock)
        made.own = OwnInvitation(access, transport, made.directory, "micro", now=lambda: clock[0])
        made.own.emit = made.said.append
        record = record_of(peer, invitation=proof)
        assert await made.directory.publish(record, 60)
        self.nodes.append(made)
        return made


@pytest.fixture
def owner(tmp_path: Path) -> Identity:
    """The run's owner."""
    return load_or_create_identity(tmp_path / "owner.key")


@contextlib.asynccontextmanager
async def circle(owner: Identity, *listed: str) -> AsyncIterator[Circle]:
    """Nobody is in it yet."""
    made = Circle(owner, listed)
    try:
        yield made
    finally:
        for node in made.nodes:
            await node.transport.close()


@pytest.mark.parametrize(
    ("life", "moments"),
    [
        (30 * DAY, (DAY, HOUR, 0.0)),
        (72 * HOUR, (7.2 * HOUR, HOUR, 0.0)),
        (10 * HOUR, (HOUR, 0.0)),
        (2 * HOUR, (HOUR, 0.2 * HOUR, 0.0)),
        (72.0, (36.0, 7.2, 0.0)),
        (0.0, (0.0,)),
    ],
)
def test_a_node_says_that_its_invitation_ends_some_time_before_and_again_in_the_last_hour(
    life: float, moments: tuple[float, ...]
) -> None:
    """A day before at the most; where both moments are one, once."""
    for number, left in enumerate(moments):
        assert marks_passed(END, END - life, END - left - 0.5) == number
        assert marks_passed(END, END - life, END - left) == number + 1
    assert marks_passed(END, END - life, END + DAY) == len(moments)


async def test_each_warning_comes_once_and_names_the_end_and_the_remedy(owner: Identity) -> None:
    """That holds even if the moments of several have passed while the machine slept."""
    async with circle(owner) as made:
        guest = await made.add(GUEST, made.proof(GUEST), ahead=-72 * HOUR)
        for left in (50 * HOUR, 7 * HOUR, 6 * HOUR, 0.9 * HOUR, 60.0):
            guest.clock[0] = END - left
            assert await guest.looks() is None
        assert [warning.what for warning in guest.said] == ["invitation_ends"] * 2
        assert "ends in 7.0 h, on 1970-01-12 13:46 UTC" in guest.said[0].detail
        assert "--invitation FILE" in guest.said[0].detail
        slept = await made.add(PeerId("who-slept-meanwhile"), made.proof(PeerId("who-slept-meanwhile")), -72 * HOUR)
        slept.clock[0] = END - 1.0
        for _ in range(3):
            assert await slept.looks() is None
        assert len(slept.said) == 1


async def test_a_guest_whose_invitation_has_ended_leaves_when_most_peers_refuse_it(owner: Identity) -> None:
    """Its own clock may be ahead, and so may a single peer's."""
    async with circle(owner, "a-member-no-0", "a-member-no-1", "a-member-no-2") as made:
        members = [await made.add(PeerId(f"a-member-no-{number}"), None, ahead=-30.0) for number in range(3)]
        guest = await made.add(GUEST, made.proof(GUEST), ahead=-1.0)
        members[0].clock[0] = END
        assert await guest.looks() is None, "by its own clock it is not over yet"
        guest.clock[0] = END
        for _ in range(2):
            assert await guest.looks() is None, "one refuses it, two let it in"
        members[1].clock[0] = END
        error = await guest.looks()
        assert error is not None
        assert error.exit_code is ExitCode.NOT_ADMITTED
        assert "'micro' ended on 1970-01-12 13:46 UTC" in error.message
        assert "--invitation FILE" in error.remedy
        assert [member.transport.conduct.offences.total() for member in members] == [0, 0, 0]


async def test_whom_nobody_answers_is_only_told_that_its_invitation_has_ended(owner: Identity) -> None:
    """Cut off, or the last one there, with a clock that may be wrong."""
    async with circle(owner, "the-member") as made:
        member = await made.add(PeerId("the-member"), None)
        await member.transport.close()
        guest = await made.add(GUEST, made.proof(GUEST), ahead=9.0)
        for _ in range(2):
            assert await guest.looks() is None
        assert len(guest.said) == 1
        assert "ended on 1970-01-12 13:46 UTC: it stops as soon as peers refuse it" in guest.said[0].detail


async def test_outsiders_have_no_say_on_who_leaves(owner: Identity, tmp_path: Path) -> None:
    """However many put themselves into the directory and refuse everybody."""
    stranger = load_or_create_identity(tmp_path / "stranger.key")
    async with circle(owner, "the-member") as made:
        await made.add(PeerId("the-member"), None, ahead=-30.0)
        for number in range(20):
            peer = PeerId(f"an-outsider-{number}")
            await made.add(peer, invite(stranger, made.spec.run_id, END + 99, peer).proof_for(peer), ahead=9.0)
        guest = await made.add(GUEST, made.proof(GUEST), ahead=9.0)
        for _ in range(5):
            assert await guest.looks() is None


@pytest.mark.parametrize("at_once", [True, False])
async def test_guests_whose_invitations_end_together_all_leave(owner: Identity, at_once: bool) -> None:
    """Each hears it of the others, be they gone by the time that it is the last: none is left to train alone. Nobody is
    a member any more, so those say it that were."""
    async with circle(owner) as made:
        names = [PeerId(f"guest-number-{number}") for number in range(4)]
        guests = [await made.add(peer, made.proof(peer)) for peer in names]
        if at_once:
            assert all(await asyncio.gather(*(guest.looks() for guest in guests)))
            return
        first, second, third, last = guests
        last.clock[0] = END - 3.0
        assert await last.looks() is None
        last.clock[0] = END + 0.1
        assert await last.looks()
        for gone in (first, second, third):
            await gone.transport.close()
        assert await last.looks(), "what they said still counts"


async def test_who_comes_with_a_new_invitation_stays_whatever_peers_knew_of_the_old_one(owner: Identity) -> None:
    """One has read its new record, one had seen the old proof only."""
    async with circle(owner, "a-member-no-0", "a-member-no-1") as made:
        members = [await made.add(PeerId(f"a-member-no-{number}"), None, ahead=9.0) for number in range(2)]
        old, new = made.proof(GUEST), made.proof(GUEST, END + 1000)
        for member in members:
            assert member.access.shown(GUEST, old)
            assert not member.access.admits(GUEST)
        assert members[0].access.shown(GUEST, new)
        guest = await made.add(GUEST, new, ahead=9.0)
        assert await guest.looks() is None
        guest.clock[0] = END + 1000.0  # ahead of all others
        assert await guest.looks() is None
        assert all(member.access.admits(GUEST) for member in members)


async def test_owner_and_listed_peers_are_members_for_ever_and_so_are_all_of_an_open_run(owner: Identity) -> None:
    """Whatever invitation they hold besides."""
    async with circle(owner, "a-listed-peer") as made:
        refusing = await made.add(PeerId("an-invited-member"), made.proof(PeerId("an-invited-member"), END + 1000))
        for peer in (PeerId("a-listed-peer"), owner.peer_id):
            node = await made.add(peer, made.proof(peer), ahead=DAY)
            assert await node.looks() is None
            assert node.said == []
            assert node.own is not None
            assert node.own.expires == math.inf
            assert refusing.access.admits(peer)
        open_run = made.spec.model_copy(update={"access": AccessSpec()})
        access = Access(open_run, made.proof(GUEST), now=lambda: END + 1.0)
        assert not access.as_guest(GUEST)


async def test_a_member_ignores_the_record_of_a_guest_whose_invitation_has_ended(owner: Identity) -> None:
    """Which still says that it was one."""
    async with circle(owner, "the-member") as made:
        member, guest = await made.add(PeerId("the-member"), None, ahead=-1.0), await made.add(GUEST, made.proof(GUEST))
        screened = ScreenedDirectory(member.directory, member.access)
        assert GUEST in (await screened.refresh()).stages[0]
        member.clock[0] = END
        assert GUEST not in screened.view.stages[0]
        row = member.directory.view.stages[0][guest.peer]
        assert member.access.has_let_in(GUEST, row)
        assert not member.access.deals(GUEST, row)


def test_the_warning_stands_in_the_status_of_a_node_that_runs(tmp_path: Path) -> None:
    """In this life of it only: the next one has another invitation."""
    warned = Warned(time=1060.0, what="invitation_ends", detail="this node's invitation ends in 7.0 h")
    folder = RunFolder.create(tmp_path)
    with folder.lock():
        diary = EventFile(folder.events)
        for event in (made_events.started("s0-r0"), made_events.inner_step(60), warned):
            diary.write(event)
        assert f"  invitation        2 min ago: {warned.detail}" in status_lines(tmp_path, 1180.0)
        diary.write(made_events.started("s0-r0").model_copy(update={"time": 1100.0}))
        diary.close()
        assert not any("invitation" in line for line in status_lines(tmp_path, 1180.0))


async def test_a_guest_looks_until_it_is_refused(owner: Identity, monkeypatch: pytest.MonkeyPatch) -> None:
    """It raises the refusal beside work of which nothing is to be kept."""
    monkeypatch.setattr("noloco_node.trust.own_invitation.LOOK_SECONDS", 0.01)
    async with circle(owner, "the-member") as made:
        await made.add(PeerId("the-member"), None)
        guest = await made.add(GUEST, made.proof(GUEST), ahead=-0.05)
        await guest.directory.refresh()
        assert guest.own is not None
        leaving = asyncio.create_task(guest.own.raised_at_its_end())
        done, _ = await asyncio.wait((leaving,), timeout=0.1)
        assert not done
        guest.clock[0] = float(END)
        with pytest.raises(UserError, match="ended on"):
            await asyncio.wait_for(leaving, 20)
