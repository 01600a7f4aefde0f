"""A run that is begun anew with the same file is another swarm: state, records and requests of its first life stay out.

A node of the first life came home with its folder. Stage 0's clock rose by 133,000 tokens in one step, old weights were
copied in, and nobody was told.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from noloco_node import PROTOCOL_VERSION
from noloco_node.bootstrap.hello import Hello, serve_hello
from noloco_node.directory.records import PeerState
from noloco_node.errors import ExitCode, UserError
from noloco_node.node.network import keep_life
from noloco_node.peers.scorecard import Bans
from noloco_node.storage.run_folder import MARK, RunFolder
from noloco_node.telemetry.events import Warned
from noloco_node.transport.calls import NOTHING, Method, Nothing, call, on
from noloco_node.transport.errors import Refusal, Refused
from noloco_node.transport.memory import MemoryTransport
from noloco_node.trust.lives import LifeWatch, OwnLife, agree_birth, most_named
from noloco_node.trust.screened_directory import ScreenedDirectory
from tests.memory_directory import MemoryDirectory, MemoryDirectoryHub
from tests.swarm.test_spec_fetch import OTHER, SPEC, Swarm, claim, swarm
from tests.worlds import record_of

ELDER, YOUNGER, YOUNGEST = ("65000000" + 16 * "a", "66000000" + 16 * "b", "67000000" + 16 * "c")
WORK = Method("work", Nothing, Nothing)


def says(made: Swarm, birth: str | None, *, unaware: bool = False, run: str = SPEC.run_id) -> None:
    """One more peer by which the joiner comes in."""
    header = Hello(
        run=run,
        name="micro",
        protocol=PROTOCOL_VERSION,
        version="1",
        stage=0,
        birth=birth,
        over=None if unaware else False,
    )
    claim(made.peer(), header)


@pytest.mark.parametrize(
    ("said", "kept", "agreed"),
    [
        (((YOUNGER, False),), None, YOUNGER),
        (((YOUNGER, False), (ELDER, True)), None, YOUNGER),
        (((YOUNGER, False), (YOUNGER, False), (ELDER, False)), None, YOUNGER),
        (((YOUNGER, True), (ELDER, True)), None, ELDER),
        (((None, False), (YOUNGER, False)), None, YOUNGER),
        ((), ELDER, ELDER),
        (((None, False),), ELDER, ELDER),
        (((YOUNGER, True),), ELDER, ELDER),
        (((YOUNGER, False), (ELDER, False)), ELDER, ELDER),
    ],
)
async def test_a_node_takes_part_in_the_life_of_its_state_else_in_that_of_its_peers(
    said: tuple[tuple[str | None, bool], ...], kept: str | None, agreed: str
) -> None:
    """A peer that has not trained (`unaware`) has no say beside others that have, and can take nobody's state out of a
    run."""
    async with swarm() as made:
        for birth, unaware in said:
            says(made, birth, unaware=unaware)
        says(made, YOUNGEST, run=OTHER.run_id)
        life = await agree_birth(made.joiner, SPEC, made.addresses, kept)
    assert (life.birth, life.settled) == (agreed, True)


async def test_the_first_node_draws_the_birth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each first node draws another one."""
    async with swarm() as made:
        says(made, None)
        lives = [await agree_birth(made.joiner, SPEC, joined, None) for joined in ((), made.addresses)]
    assert not any(life.settled for life in lives)
    assert lives[0].birth != lives[1].birth


async def test_a_node_that_comes_home_to_a_run_begun_anew_is_told_so_and_what_to_do() -> None:
    """In one message, before anything is announced or copied."""
    async with swarm() as made:
        for birth in (YOUNGER, YOUNGER, ELDER):
            says(made, birth)
        with pytest.raises(UserError) as caught:
            await agree_birth(made.joiner, SPEC, made.addresses, ELDER)
        assert caught.value.exit_code is ExitCode.RUN_FOLDER
        assert (
            "was begun anew: node.run_folder holds a state of the life that began on 2023-09-12" in caught.value.message
        )
        assert "name another folder with --run-folder" in caught.value.remedy


async def test_addresses_of_two_lives_are_refused() -> None:
    """By which of them it would go is chance."""
    async with swarm() as made:
        for birth in (YOUNGER, ELDER):
            says(made, birth)
        with pytest.raises(UserError, match="has several beginnings") as caught:
            await agree_birth(made.joiner, SPEC, made.addresses, None)
        assert caught.value.exit_code is ExitCode.WRONG_RUN


def test_of_births_named_as_often_the_elder_is_taken() -> None:
    """Nodes that have not worked yet thus come to the same one, whatever they see first."""
    assert most_named([YOUNGER, ELDER]) == most_named([ELDER, YOUNGER]) == ELDER
    assert most_named([YOUNGER, ELDER, YOUNGER]) == YOUNGER
    assert most_named([]) is None


def test_a_disk_that_refuses_the_birth_ends_no_node(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It was full as the birth settled, within the first minute, and the node ended. Its checkpoints hold the birth."""
    (tmp_path / MARK).mkdir()
    life = OwnLife(ELDER, settled=False)
    keep_life(life, RunFolder(tmp_path), SPEC)
    life.settle()
    assert life.settled
    assert "it is not written down in which life" in caplog.text


@dataclass
class Met:
    """A node in memory, and its view of a directory that others share."""

    made: Swarm
    hub: MemoryDirectoryHub
    life: OwnLife
    transport: MemoryTransport = field(init=False)
    told: list[Warned] = field(default_factory=list[Warned])

    def __post_init__(self) -> None:
        self.transport = self.made.peer()
        self.transport.guard(self.life.admits)
        serve_hello(self.transport, SPEC, lambda: 0, birth=lambda: self.life.birth)
        self.raw = MemoryDirectory(self.hub)
        self.directory = ScreenedDirectory(self.raw, Bans(), life=self.life)
        self.watch = LifeWatch(self.life, self.transport, self.raw, SPEC)
        self.watch.emit = self.told.append

        async def handle(_peer: object, _request: Nothing) -> Nothing:
            return NOTHING

        on(self.transport, WORK, handle)

    async def publish(self, state: PeerState = PeerState.TRAINING) -> None:
        """Its record, as it stands."""
        await self.directory.publish(record_of(self.transport.peer_id, 0, state), 60.0)

    async def look(self) -> set[str]:
        """The peers that it sees."""
        view = await self.directory.refresh()
        await self.watch.look()
        view = self.directory.view
        return {record.peer_id for record in view.live(0, self.raw.now())}


async def test_two_lives_of_a_run_have_nothing_to_do_with_each_other_and_say_so() -> None:
    """They meet in one directory. Each is told once, by which peer. A peer of an older release, which names no birth,
    is dealt with by both. A record without a process behind it is no news."""
    async with swarm() as made:
        hub = MemoryDirectoryHub(SPEC.stages, lambda: 1000.0)
        first, again, other = (Met(made, hub, OwnLife(birth)) for birth in (ELDER, ELDER, YOUNGER))
        old = record_of("an-older-release")
        ghost = old.model_copy(update={"peer_id": "a-ghost-of-nobody", "birth": YOUNGEST})
        for record in (old, ghost):
            await first.raw.publish(record, 60.0)
        nodes = (first, again, other)
        for node in nodes:
            await node.publish()
        seen = [await node.look() for node in nodes]
        assert seen == [await node.look() for node in nodes]
        ids = [str(node.transport.peer_id) for node in nodes]
        assert seen == [{ids[0], ids[1], old.peer_id}] * 2 + [{ids[2], old.peer_id}]
        assert [len(node.told) for node in nodes] == [1, 1, 1]
        assert other.told[0].what == "another_life"
        assert ids[2] in first.told[0].detail
        await call(first.transport, again.transport.peer_id, WORK, NOTHING, seconds=1.0)
        for asker, asked in ((first, other), (other, first)):
            with pytest.raises(Refused) as refused:
                await call(asker.transport, asked.transport.peer_id, WORK, NOTHING, seconds=1.0)
            assert refused.value.reason is Refusal.NOT_ADMITTED


async def test_nodes_that_begin_beside_each_other_come_to_one_life_before_they_work() -> None:
    """Each has drawn a birth, since the seed that they came in by serves any run. They see each other until then; a
    peer that is only a record, and does not answer, is not followed."""
    async with swarm() as made:
        hub = MemoryDirectoryHub(SPEC.stages, lambda: 1000.0)
        nodes = [Met(made, hub, OwnLife(birth, settled=False)) for birth in (YOUNGER, ELDER, YOUNGEST)]
        kept = list[str]()
        for node in nodes:
            node.life.changed = kept.append
            await node.publish()
        ghost = record_of("a-ghost-of-nobody", birth="0" * 24)
        await nodes[0].raw.publish(ghost, 60.0)
        for asker in nodes:
            for asked in nodes:
                if asker is not asked:
                    await call(asker.transport, asked.transport.peer_id, WORK, NOTHING, seconds=1.0)
        for node in nodes:
            node.watch.worked = lambda: True
            assert len(await node.look()) == 4, "until all say the same nobody is left out"
        assert [node.life.birth for node in nodes] == [ELDER] * 3
        assert not kept
        for node in nodes:
            await node.publish()
        for node in nodes:
            await node.look()
        assert kept == [ELDER] * 3
        assert [len(await node.look()) for node in nodes] == [3, 3, 3]
        assert not any(node.told for node in nodes)
