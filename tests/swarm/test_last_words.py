"""The end of a run as a seed knows it: origins that it has seen at work say so, and nothing takes it back."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import base58

from noloco_node.aio import cancel_and_wait
from noloco_node.bootstrap.hello import serve_hello
from noloco_node.config.load import load_config
from noloco_node.config.run_spec import AccessSpec, RunSpec
from noloco_node.directory.records import PeerRecord, PeerState
from noloco_node.directory.signed_end import SignedEnd
from noloco_node.identity.keys import load_or_create_identity
from noloco_node.identity.peer_id import PeerId
from noloco_node.node.seed import LOOKS_A_LIFE, LastWords, last_words
from noloco_node.storage.run_folder import MARK, RunFolder
from noloco_node.transport.memory import MemoryNetwork, MemoryTransport
from noloco_node.trust.admission import Access
from noloco_node.trust.lives import OwnLife
from noloco_node.trust.screened_directory import ScreenedDirectory
from tests.memory_directory import MemoryDirectory, MemoryDirectoryHub
from tests.support import eventually
from tests.worlds import record_of

SPEC = load_config(Path(__file__).parent.parent / "configs" / "micro.yaml").run
LIFE = 60.0
TARGET = float(SPEC.inner.target_tokens)
GONE, TRAINING, JOINING, FINISHING = PeerState.GONE, PeerState.TRAINING, PeerState.JOINING, PeerState.FINISHING


def name_of(number: int) -> PeerId:
    """A well-formed peer id."""
    return PeerId(base58.b58encode(b"\x00\x24" + bytes([number] * 36)).decode())


def record(number: int, state: PeerState, *, stage: int = 0, finished: bool = False, clock: float = 1.0) -> PeerRecord:
    """The record of a made-up peer."""
    return record_of(name_of(number), stage, state, finished=finished, clock=clock)


@dataclass
class Seed:
    """A seed in memory, its folder, and the nodes that it can meet. Time stands still but for `pass_`."""

    folder: RunFolder
    spec: RunSpec = SPEC
    now: float = 1000.0
    network: MemoryNetwork = field(default_factory=MemoryNetwork)
    hub: MemoryDirectoryHub = field(init=False)
    transport: MemoryTransport = field(init=False)
    last: LastWords = field(init=False)
    end: SignedEnd = field(init=False)
    nodes: dict[int, MemoryTransport] = field(default_factory=dict[int, MemoryTransport])

    def __post_init__(self) -> None:
        self.hub = MemoryDirectoryHub(SPEC.stages, lambda: self.now)
        self.nodes_directory = MemoryDirectory(self.hub)
        self.transport = MemoryTransport(self.network, name_of(250))
        self.last = self.again()

    def again(self) -> LastWords:
        """Another process of the same seed."""
        directory = ScreenedDirectory(MemoryDirectory(self.hub), Access(self.spec), life=OwnLife("b" * 24))
        self.end = SignedEnd(self.transport, directory, self.spec)
        return last_words(self.transport, directory, self.folder, self.spec, self.end)

    def process(self, number: int, stage: int = 0) -> None:
        """A node that answers."""
        self.nodes[number] = MemoryTransport(self.network, name_of(number))
        serve_hello(self.nodes[number], self.spec, lambda: stage)

    async def says(self, number: int, state: PeerState, *, finished: bool = False, clock: float = 1.0) -> None:
        """A node's record at stage 0."""
        await self.nodes_directory.publish(record(number, state, finished=finished, clock=clock), LIFE)

    async def look(self) -> None:
        """Read all records, and ask those that they introduce."""
        await self.last.look()
        await self.last.checks.sweep(1.0)
        await self.last.look()

    async def works_to_its_end(self, *numbers: int) -> None:
        """These come, are seen at work, end, and leave."""
        for number in numbers:
            self.process(number)
            await self.says(number, TRAINING)
        await self.look()
        for number in numbers:
            await self.says(number, GONE, finished=True, clock=TARGET)
            await self.nodes[number].close()


@contextlib.asynccontextmanager
async def seed(folder: Path, spec: RunSpec = SPEC) -> AsyncIterator[Seed]:
    """In this folder."""
    made = Seed(RunFolder.create(folder), spec)
    try:
        yield made
    finally:
        for transport in (made.transport, *made.nodes.values()):
            await transport.close()


async def test_no_record_and_no_node_takes_the_end_back(tmp_path: Path) -> None:
    """One record of a free key with no process behind it had the seed write down that the run goes on, for good, a
    second later. Neither does it here, nor a key that answers and says that it trains: now, when all records are gone,
    and in the seed's next life."""
    async with seed(tmp_path) as made:
        await made.works_to_its_end(1, 2)
        await made.look()
        assert made.last.over
        written = (tmp_path / MARK).read_bytes()
        mark = json.loads(written)
        assert mark["ended"]
        assert {word["peer"] for word in mark["end"]} == {name_of(1), name_of(2)}
        await made.says(3, TRAINING, clock=1e17)
        await made.look()
        made.process(4)
        await made.says(4, TRAINING)
        await made.look()
        assert made.last.over
        made.now += 3 * LIFE
        await made.look()
        made.last = made.again()
        assert made.last.over
        await made.says(4, TRAINING)
        await made.look()
        assert made.last.over
        assert (tmp_path / MARK).read_bytes() == written


async def test_records_without_a_process_end_no_run(tmp_path: Path) -> None:
    """They are ghosts that have finished, however many. Nor does one that answers beside two origins that were seen at
    work and train on, nor a node of a later stage."""
    async with seed(tmp_path) as made:
        for number in range(10, 30):
            await made.says(number, GONE, finished=True, clock=TARGET)
        await made.look()
        assert made.last.over is None
        for number in (1, 2, 3):
            made.process(number)
            await made.says(number, TRAINING)
        made.process(4, stage=1)
        await made.says(4, TRAINING)
        await made.look()
        assert made.last.over is False
        for number in (3, 4):
            await made.says(number, FINISHING, finished=True, clock=TARGET)
        await made.look()
        assert not made.last.over
        assert not made.folder.ended


async def test_a_seed_that_looks_now_and_then_misses_no_end(tmp_path: Path) -> None:
    """One of two at the first stage is told to leave just before the end, and the other's last word stands two seconds
    later. The seed looks thrice in a record's life. A node that joins has no say, nor one that was sent away."""
    async with seed(tmp_path) as made:
        for number in (1, 2):
            made.process(number)
            await made.says(number, TRAINING)
        await made.look()
        await made.says(1, GONE, clock=0.99 * TARGET)
        made.now += 2.0
        await made.says(2, GONE, finished=True, clock=TARGET)
        await made.says(5, JOINING, clock=0.0)
        await made.says(6, GONE, clock=0.0)
        made.now += LIFE / LOOKS_A_LIFE
        await made.look()
        assert made.last.over


async def test_of_an_owned_run_the_owner_ends_it_alone_and_strangers_never(tmp_path: Path) -> None:
    """Any key made the seed tell every newcomer that it is over."""
    owner = load_or_create_identity(tmp_path / "owner.key")
    spec = SPEC.model_copy(update={"access": AccessSpec(mode="invited", owner=owner.peer_id)})
    async with seed(tmp_path / "seed", spec) as made:
        made.process(1)
        await made.says(1, TRAINING)
        await made.look()
        await made.says(1, GONE, finished=True, clock=TARGET)
        await made.look()
        assert not made.last.over
        said = record(2, GONE, finished=True).model_copy(update={"peer_id": owner.peer_id})
        await made.nodes_directory.publish(said, LIFE)
        await made.look()
        assert made.last.over


async def test_what_is_of_another_life_of_the_run_ends_nothing(tmp_path: Path) -> None:
    """Its nodes may well have come to their end."""
    async with seed(tmp_path) as made:
        made.process(1)
        for state in (TRAINING, GONE):
            said = record(1, state, finished=state is GONE, clock=TARGET)
            await made.nodes_directory.publish(said.model_copy(update={"birth": "a" * 24}), LIFE)
            await made.look()
        assert not made.last.over


async def test_a_seed_asks_by_itself_whom_it_has_not_met(tmp_path: Path) -> None:
    """No node needs to call it: the checks is called while it runs."""
    async with seed(tmp_path) as made:
        made.process(1)
        await made.says(1, TRAINING)
        running = asyncio.create_task(made.last.run())
        await eventually(lambda: made.last.over is False, 10, "it has seen the origin at work")
        await cancel_and_wait((running,))


async def test_a_folder_of_another_run_says_nothing(tmp_path: Path) -> None:
    """The seed was started for another one there before."""
    (tmp_path / MARK).write_text(json.dumps({"run_id": "another", "run_name": "x", "ended": True}), encoding="utf-8")
    async with seed(tmp_path) as made:
        assert not made.last.over
