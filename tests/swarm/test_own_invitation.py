"""A guest is warned before its invitation ends, and leaves when it has ended."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
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
from noloco_node.trust.admission import DAY, HOUR, Access, OwnInvitation, marks_passed
from noloco_node.trust.screened_directory import ScreenedDirectory
from tests.memory_directory import MemoryDirectory, MemoryDirectoryHub
from tests.telemetry import made_events
from tests.worlds import micro_spec, record_of

END = 1_000_000
GUEST = PeerId("an-invited-peer")


@dataclass
class Circle:
    """A run by invitation, with one clock."""

    owner: Identity
    now: float = END - 72 * HOUR

    @property
    def spec(self) -> RunSpec:
        """The run."""
        access = AccessSpec(mode="invited", owner=self.owner.peer_id, peers=("a-listed-peer",))
        return micro_spec(stages=1).model_copy(update={"access": access})

    def proof(self, peer: PeerId) -> Proof:
        """By the owner, for any holder."""
        return invite(self.owner, self.spec.run_id, END, None).proof_for(peer)

    def access(self, peer: PeerId) -> Access:
        """What this peer knows of the members."""
        return Access(self.spec, self.proof(peer), now=lambda: self.now)

    def invited(self, peer: PeerId = GUEST) -> tuple[OwnInvitation, list[Warned]]:
        """What this peer makes of its invitation, and what it says of it."""
        own, said = OwnInvitation(self.access(peer), peer, "micro", now=lambda: self.now), list[Warned]()
        own.emit = said.append
        return own, said


@pytest.fixture
def circle(tmp_path: Path) -> Circle:
    """Its owner has just made a key."""
    return Circle(load_or_create_identity(tmp_path / "owner.key"))


@pytest.mark.parametrize(
    ("life", "moments"),
    [
        (30 * DAY, (DAY, HOUR)),
        (72 * HOUR, (7.2 * HOUR, HOUR)),
        (10 * HOUR, (HOUR,)),
        (2 * HOUR, (HOUR, 0.2 * HOUR)),
        (72.0, (36.0, 7.2)),
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


def test_each_warning_comes_once_and_a_guest_leaves_at_the_end(circle: Circle) -> None:
    """The warnings name the end and the remedy. Of several whose moments have passed while the machine slept one is
    told."""
    (guest, said), (slept, of_slept) = circle.invited(), circle.invited(PeerId("who-slept-meanwhile"))
    for left in (50 * HOUR, 7 * HOUR, 6 * HOUR, 0.9 * HOUR, 60.0):
        circle.now = END - left
        assert guest.look() is None
    assert [warning.what for warning in said] == ["invitation_ends"] * 2
    assert "ends in 7.0 h, on 1970-01-12 13:46 UTC" in said[0].detail
    assert "--invitation FILE" in said[0].detail
    circle.now = END - 1.0
    assert [slept.look() for _ in range(3)] == [None] * 3
    assert len(of_slept) == 1
    circle.now = END
    error = guest.look()
    assert error is not None
    assert error.exit_code is ExitCode.NOT_ADMITTED
    assert "'micro' ended on 1970-01-12 13:46 UTC" in error.message
    assert "--invitation FILE" in error.remedy


def test_owner_and_listed_peers_are_members_for_ever_and_so_are_all_of_an_open_run(circle: Circle) -> None:
    """Whatever invitation they hold besides."""
    circle.now = END + DAY
    for peer in (PeerId("a-listed-peer"), circle.owner.peer_id):
        own, said = circle.invited(peer)
        assert own.look() is None
        assert (said, own.expires) == ([], math.inf)
        assert circle.access(GUEST).admits(peer)
    open_run = circle.spec.model_copy(update={"access": AccessSpec()})
    assert not Access(open_run, circle.proof(GUEST), now=lambda: circle.now).as_guest(GUEST)


async def test_a_member_ignores_the_record_of_a_guest_whose_invitation_has_ended(circle: Circle) -> None:
    """Which still says that it was one."""
    hub = MemoryDirectoryHub(1, lambda: 0.0)
    assert await MemoryDirectory(hub).publish(record_of(GUEST, invitation=circle.proof(GUEST)), 60)
    access, directory = circle.access(PeerId("a-listed-peer")), MemoryDirectory(hub)
    screened = ScreenedDirectory(directory, access)
    assert GUEST in (await screened.refresh()).stages[0]
    circle.now = END
    assert GUEST not in screened.view.stages[0]
    assert not access.deals(GUEST, directory.view.stages[0][GUEST])


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


async def test_a_guest_looks_until_its_invitation_has_ended(circle: Circle, monkeypatch: pytest.MonkeyPatch) -> None:
    """It raises the reason beside work of which nothing is to be kept."""
    monkeypatch.setattr("noloco_node.trust.admission.LOOK_SECONDS", 0.01)
    leaving = asyncio.create_task(circle.invited()[0].raised_at_its_end())
    done, _ = await asyncio.wait((leaving,), timeout=0.1)
    assert not done
    circle.now = END
    with pytest.raises(UserError, match="ended on"):
        await asyncio.wait_for(leaving, 20)
