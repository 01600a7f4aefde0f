"""Streamed texts: block by block the text's own windows, resumable, bounded in memory, and a bad file ends no run."""

from __future__ import annotations

import asyncio
import random
import threading
import tracemalloc
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from noloco_node.config.data_spec import DataSpec
from noloco_node.config.load import load_config
from noloco_node.data import block_reader
from noloco_node.data.block_reader import BlockReader, Row, StreamedBlocks, cut_windows
from noloco_node.data.documents import data_error
from noloco_node.data.prefetch import Prefetch
from noloco_node.data.prepared import check_text_here, fingerprint_of
from noloco_node.data.reading import Reader, held_out_windows, open_samples
from noloco_node.data.sampler import BEGINNING, Permutation
from noloco_node.data.samples import Position, Samples
from noloco_node.data.shards import TextShards
from noloco_node.data.shared_turns import MOST_BEGUN, SharedPosition, SharedTurns, Turn
from noloco_node.data.tokenizers import ByteTokenizer, Tokens
from noloco_node.data.windows import load_windows
from noloco_node.errors import ExitCode, UserError
from noloco_node.sizing.preflight import note_on_blocks
from noloco_node.tallies import Doubling
from tests.data.made_files import lines, write_texts
from tests.data.splits import held_out_count
from tests.data.test_sources import text_spec
from tests.support import eventually

MICRO = Path(__file__).parent.parent / "configs" / "micro.yaml"
STORIES = [f"tale {number}: " + "and so on, " * (5 + number % 7) for number in range(120)]
SHARDS = 6
LENGTH = 17


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that has no turn yet asks again at once."""
    monkeypatch.setattr(block_reader, "LOOK_SECONDS", 0.001)


def write_shards(folder: Path, suffix: str = ".jsonl.gz", shards: int = SHARDS) -> Path:
    """The stories, a few to a file."""
    folder.mkdir(exist_ok=True)
    for shard in range(shards):
        write_texts(folder / f"{shard:02}{suffix}", STORIES[shard::shards])
    return folder


def streamed(place: Path | str, **changes: object) -> DataSpec:
    """A streamed text; a fifth of it is held out."""
    return text_spec(place, streaming=True, holdout=0.2, **changes)


@pytest.fixture
def spec(tmp_path: Path) -> DataSpec:
    """Six shards, two blocks in each."""
    return streamed(write_shards(tmp_path / "text"), parts_per_shard=2)


@asynccontextmanager
async def opened(
    spec: DataSpec, position: Position = BEGINNING, size: int = 1, ahead: int = 1
) -> AsyncIterator[Samples]:
    """As the only replica of stage 0 opens it; one microbatch is read ahead."""
    samples = await asyncio.to_thread(open_samples, spec, 256, Reader("peer", size, 4, ahead), position)
    assert samples.shared is not None
    samples.shared.heard((), 1)
    try:
        yield samples
    finally:
        await asyncio.to_thread(samples.close)


async def drawn(samples: Samples, count: int) -> list[bytes]:
    """So many microbatches, to compare."""
    return [bytes((await samples.draw()).numpy().astype(np.uint8)) for _ in range(count)]


def files_of(spec: DataSpec) -> list[Path]:
    """Its shards."""
    return sorted(Path(spec.path or "").iterdir())


def blocks_of(spec: DataSpec) -> StreamedBlocks:
    """All blocks of a text of bytes."""
    return StreamedBlocks(TextShards(spec, ByteTokenizer()), spec.parts_per_shard, spec.sequence_length + 1)


def windows_in(blocks: StreamedBlocks, block: int) -> list[bytes]:
    """The windows of a block."""
    return [bytes(window) for window in blocks.read(Turn(0, block, 0, 0))]


def test_windows_are_the_documents_tokens_one_after_the_other() -> None:
    """From any of them on; the tail shorter than a window is left out."""
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 256, size).astype(np.uint8) for size in (0, 3, 40, 1, 16, 17, 18, 200, 5)]
    whole = np.concatenate(documents)
    rows = whole[: len(whole) // LENGTH * LENGTH].reshape(-1, LENGTH)
    for start in range(len(rows) + 2):
        found = list(cut_windows(documents, LENGTH, start))
        assert np.array_equal(np.array(found).reshape(-1, LENGTH), rows[start:])


def test_blocks_hold_each_training_document_once_and_none_that_is_held_out(tmp_path: Path) -> None:
    """The parts of a shard share out its documents; those held out are held out as where a text is read whole."""
    whole = streamed(write_shards(tmp_path / "text", ".jsonl"))
    reading = TextShards(whole, ByteTokenizer())
    for shard in range(SHARDS):
        every = [bytes(tokens) for tokens in reading.training(shard, 0, 1)]
        parts = [[bytes(tokens) for tokens in reading.training(shard, part, 3)] for part in range(3)]
        assert parts == [every[part::3] for part in range(3)]
        held_out = [bytes(tokens) for tokens in reading.held_out(shard)]
        assert Counter(every + held_out) == Counter(story.encode() + b"\n" for story in STORIES[shard::SHARDS])
    windows = load_windows(whole.model_copy(update={"streaming": False}), 256)
    inputs, labels = windows.validation(range(held_out_count(windows)))
    rows = torch.cat([inputs, labels[:, -1:]], dim=1).numpy().astype(np.uint8)
    held = held_out_windows(whole, 256, 1000).numpy().astype(np.uint8)
    assert np.array_equal(held, rows), "the same documents, in the same order"
    assert np.array_equal(held_out_windows(whole, 256, 3), held[:3])


async def test_each_pass_reads_every_block_once_in_an_order_of_its_own(spec: DataSpec) -> None:
    """The next pass follows."""
    blocks = blocks_of(spec)
    assert blocks.count == 12
    order = [[Permutation(12, f"blocks/0/{epoch}")[place] for place in range(12)] for epoch in range(2)]
    expected = [window for block in (*order[0], *order[1]) for window in windows_in(blocks, block)]
    async with opened(spec) as samples:
        assert await drawn(samples, len(expected)) == expected
    assert order[0] != order[1]


async def test_it_goes_on_where_it_was_left(spec: DataSpec) -> None:
    """At any point, also within a microbatch over two blocks; what was only read ahead is read again."""
    async with opened(spec, size=4, ahead=1 << 20) as samples:
        positions, batches = [samples.position()], list[bytes]()
        for _ in range(60):
            batches += await drawn(samples, 1)
            positions.append(samples.position())
    assert len({position.own for position in positions if isinstance(position, SharedPosition)}) > 5
    for begun in range(0, 60, 7):
        async with opened(spec, positions[begun], size=4) as samples:
            assert await drawn(samples, 60 - begun) == batches[begun:]


async def test_a_dataset_of_the_hub_is_streamed_by_its_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the library's own streaming; a folder stands for the hub."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("noloco_node.data.hub.check_not_here", lambda _name: None)
    monkeypatch.setattr("noloco_node.data.hub.check_files", lambda _name, _files: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner").mkdir()
    write_shards(tmp_path / "owner" / "name", ".jsonl", 3)
    hub = DataSpec(source="huggingface", path="owner/name", streaming=True, sequence_length=16, holdout=1e-9)
    blocks = blocks_of(hub)
    assert blocks.count == 3
    for shard in range(3):
        assert windows_in(blocks, shard) == [
            bytes(window)
            for window in cut_windows([np.frombuffer(s.encode() + b"\n", np.uint8) for s in STORIES[shard::3]], LENGTH)
        ]
    wrong = blocks_of(hub.model_copy(update={"text_field": "body"}))
    with pytest.raises(UserError, match="has the columns text, url"):
        windows_in(wrong, 0)
    assert not list((tmp_path / "cache").rglob("*.arrow")), "nothing of it is kept"


async def test_memory_is_flat_over_a_hundred_times_as_much_text(tmp_path: Path) -> None:
    """What is allocated at most while a whole pass is drawn does not grow with the text; 12 MB after 120 kB."""
    peaks: list[int] = []
    for shards in (1, 100):
        folder = tmp_path / str(shards)
        folder.mkdir()
        for shard in range(shards):
            write_texts(folder / f"{shard:03}.jsonl", ["words and so on, " * 350] * 20)
        spec = streamed(folder).model_copy(update={"sequence_length": 1023})
        tracemalloc.start()
        async with opened(spec, size=16, ahead=1 << 18) as samples:
            for _ in range(5 * shards):
                await samples.draw()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 500_000, peaks


class Watching(SharedTurns):
    """Turns of the only replica that remember what they were told; with `gaps` there is none every other time."""

    def __init__(self, count: int, gaps: bool = False) -> None:
        super().__init__(count, 0, "peer", random.Random(0))
        self.heard((), 1)
        self._gaps = gaps
        self.asked = 0
        self.taken: list[int] = []
        self.done: list[int] = []

    def take(self) -> Turn | None:
        """The next one, or none."""
        self.asked += 1
        if self._gaps and self.asked % 2:
            return None
        turn = super().take()
        if turn is not None:
            self.taken.append(turn.slot)
        return turn

    def finished(self, slot: int) -> None:
        """Is remembered."""
        self.done.append(slot)
        super().finished(slot)


@asynccontextmanager
async def reading(row: Row, size: int, ahead: int) -> AsyncIterator[tuple[BlockReader, Prefetch]]:
    """The reader of a row and what it reads ahead; both end in time, whatever the reader waits for."""
    reader = BlockReader([row], size)
    prefetch = Prefetch(reader.portions(), BEGINNING, ahead)
    try:
        async with asyncio.timeout(60):
            yield reader, prefetch
    finally:
        reader.close()
        prefetch.close()
    assert not prefetch.thread.is_alive()


async def test_a_replica_holds_three_blocks_at_most(spec: DataSpec) -> None:
    """However much may be read ahead: then the reader waits for what is drawn."""
    turns = Watching(12)
    async with reading(Row(blocks_of(spec), turns), 2, 1 << 20) as (reader, prefetch):
        for rounds in range(5):
            await eventually(lambda: bool(getattr(reader._changed, "_waiters")), what="the reader waits")  # noqa: B009
            assert len(turns.taken) - len(turns.done) == MOST_BEGUN
            while len(turns.done) <= rounds:
                await prefetch.draw()
        assert turns.done == list(range(len(turns.done)))


async def test_where_there_is_no_block_now_the_reader_asks_again(spec: DataSpec) -> None:
    """Until there is one; it can be closed meanwhile."""
    turns = Watching(12, gaps=True)
    async with reading(Row(blocks_of(spec), turns), 2, 1 << 20) as (_, prefetch):
        for _ in range(100):
            await prefetch.draw()
        assert turns.asked > len(turns.taken) > 1


class SmallBlocks:
    """So many windows in each block, block by block, again and again; below zero a block that cannot be read."""

    count = 12

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes

    def name(self, block: int) -> str:
        """Its number."""
        return str(block)

    def read(self, turn: Turn) -> Iterator[Tokens]:
        """Windows that hold the slot."""
        size = self._sizes[turn.slot % len(self._sizes)]
        if size < 0:
            raise data_error("damaged", "get it again")
        return (np.full(LENGTH, turn.slot % 256) for _ in range(turn.start, size))


@pytest.mark.parametrize(
    ("sizes", "rows"),
    [((1,), [[0, 1, 2], [3, 4, 5]]), ((0, 0, 0, 0, 9), [[4] * 8, [4, 9, 9, 9, 9, 9, 9, 9], [9, 9, *[14] * 6]])],
)
async def test_blocks_smaller_than_a_microbatch_do_not_end_the_reading(
    sizes: tuple[int, ...], rows: list[list[int]]
) -> None:
    """Where the replicas share the text, so few may be begun at a time that they may not fill a microbatch."""
    turns = SharedTurns(SmallBlocks.count, 0, "own", random.Random(0))
    turns.heard((), 1)
    async with reading(Row(SmallBlocks(sizes), turns), 8, 1) as (_, prefetch):
        assert [[int(row[0]) for row in await prefetch.draw()] for _ in rows] == rows


def test_one_damaged_block_that_comes_again_and_again_does_not_end_the_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the others hold the sound ones, a replica may be left with it for some passes."""
    monkeypatch.setattr(block_reader, "PAUSES", Doubling(0.0, 0.0))
    turns = Watching(12)
    take = turns.take
    turns.take = lambda: replace(take(), block=5)  # pyright: ignore
    portion = next(BlockReader([Row(SmallBlocks([-1] * 11 + [8] * 20), turns)], 8).portions())
    assert len(portion.windows) == 8


def test_a_text_that_is_away_for_long_ends_no_node_that_has_read_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some minutes of trouble at a hub ended every origin of a run."""
    monkeypatch.setattr(block_reader, "PAUSES", Doubling(0.0, 0.0))
    away = 3 * block_reader.MOST_FAILED
    portions = BlockReader([Row(SmallBlocks([8] + [-1] * away + [8] * 20), Watching(12))], 8).portions()
    assert [int(next(portions).windows[0, 0]) for _ in range(3)] == [0, away + 1, away + 2]


def test_that_blocks_are_read_to_their_end_is_no_word_about_the_text() -> None:
    """A liar gives back slots as if it had drawn all of them: a replica that takes them up goes on with others."""
    turns, given_back = Watching(12), 3 * SmallBlocks.count
    take = turns.take
    turns.take = lambda: replace(take(), start=9 if turns.asked <= given_back else 0)  # pyright: ignore
    portion = next(BlockReader([Row(SmallBlocks([8]), turns)], 8).portions())
    assert len(portion.windows) == 8
    assert turns.asked == given_back + 1


def cut_off(path: Path) -> None:
    """A copy that broke off."""
    path.write_bytes(path.read_bytes()[:-30])


def no_rows(path: Path) -> None:
    """Nothing was copied."""
    path.write_bytes(b"")


def another_column(path: Path) -> None:
    """Somebody put another text in its place."""
    path.write_bytes(lines(["a"]).replace(b"text", b"body"))


@pytest.mark.parametrize(
    ("harm", "words"),
    [(cut_off, "cut off or damaged"), (Path.unlink, "damaged"), (no_rows, "rows"), (another_column, "columns body")],
)
async def test_a_shard_that_goes_bad_under_way_is_passed_over_and_named_once(
    harm: Callable[[Path], None], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What can be read of it is trained on, and the rest of the text goes on, pass after pass."""
    monkeypatch.setattr(block_reader, "PAUSES", Doubling(0.001, 60.0))
    spec = streamed(write_shards(tmp_path / "text", ".jsonl"), parts_per_shard=1)
    if harm is cut_off:
        spec = streamed(write_shards(tmp_path / "gz"), parts_per_shard=1)
    blocks = blocks_of(spec)
    bad = files_of(spec)[4]
    sound = sum(len(windows_in(blocks, block)) for block in range(SHARDS) if block != 4)
    async with opened(spec) as samples:
        harm(bad)
        await drawn(samples, 2 * sound)
        [told] = samples.passed_over()
        await drawn(samples, sound)
        assert not samples.passed_over()
    assert words in told
    assert "'04.jsonl" in told


async def test_a_text_that_is_gone_ends_the_reading(spec: DataSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is after as many tries as there are blocks, ten at most; the drawing code gets the error."""
    monkeypatch.setattr(block_reader, "PAUSES", Doubling(0.001, 60.0))
    gone, read = threading.Event(), StreamedBlocks.read

    def once_it_is_gone(blocks: StreamedBlocks, turn: Turn) -> Iterator[Tokens]:
        assert gone.wait(60.0)
        return read(blocks, turn)

    # One window that is read before would say that the text is sound, and its reader would try for ever.
    monkeypatch.setattr(StreamedBlocks, "read", once_it_is_gone)
    async with opened(spec) as samples:
        for path in files_of(spec):
            path.unlink()
        gone.set()
        with pytest.raises(UserError, match="damaged") as caught:
            await drawn(samples, 10_000)
        assert caught.value.exit_code is ExitCode.DATA


async def test_blocks_without_one_window_are_said(tmp_path: Path) -> None:
    """A whole pass of them: it would look for text for ever."""
    spec = streamed(write_shards(tmp_path / "text"), parts_per_shard=32)
    async with opened(spec.model_copy(update={"sequence_length": 200})) as samples:
        with pytest.raises(UserError, match="no block of the text has as many tokens as one window"):
            await samples.draw()
    with pytest.raises(UserError, match="held out of the streamed text have fewer tokens"):
        held_out_windows(spec.model_copy(update={"holdout": 1e-9}), 256, 4)


def test_a_fingerprint_reads_beginnings_and_ends(spec: DataSpec, tmp_path: Path) -> None:
    """Names, sizes and what lies there; another text is told before anything is trained."""
    found = fingerprint_of(spec)
    assert found.startswith("shards-")
    check_text_here(spec.model_copy(update={"fingerprint": found}))
    moved = (tmp_path / "text").rename(tmp_path / "elsewhere")
    assert fingerprint_of(spec.model_copy(update={"path": str(moved)})) == found
    seen = {found}

    def changed(change: Callable[[], object]) -> None:
        change()
        seen.add(fingerprint_of(streamed(moved)))
        with pytest.raises(UserError, match=r"is not the run's: its fingerprint is shards-"):
            check_text_here(streamed(moved, fingerprint=found))

    changed(lambda: (moved / "00.jsonl.gz").rename(moved / "99.jsonl.gz"))
    changed(lambda: write_texts(moved / "99.jsonl.gz", ["other", *STORIES[1::SHARDS]]))
    changed((moved / "03.jsonl.gz").unlink)
    assert len(seen) == 4


@pytest.mark.parametrize(("parts", "noted"), [(1, True), (2, False)])
def test_fewer_blocks_than_replicas_are_noted_with_the_remedy(parts: int, noted: bool, tmp_path: Path) -> None:
    """Before anything starts, where the text lies here."""
    place = write_shards(tmp_path / "text", shards=3)
    settings = ("source=text", f"path={place}", "streaming=true", f"parts_per_shard={parts}")
    note = note_on_blocks(load_config(MICRO, ["local_swarm.replicas=4", *(f"run.data.{each}" for each in settings)]))
    assert (note is not None) is noted
    if note is not None:
        assert "3 shards and 3 blocks" in note
        assert "set run.data.parts_per_shard to 6 or more" in note


def test_what_walks_through_numbered_windows_does_not_take_a_streamed_text(spec: DataSpec) -> None:
    """The laboratory; and there is no streaming of the standard library."""
    with pytest.raises(UserError, match=r"run\.data\.streaming is on") as caught:
        load_windows(spec, 256)
    assert caught.value.exit_code is ExitCode.CONFIG
    with pytest.raises(ValueError, match=r"run\.data\.source is 'stdlib'"):
        DataSpec(streaming=True)


def test_nothing_is_kept_of_a_shard_that_broke_off_but_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error was kept to the node's end, and with it what the shard was read with: 33 MB of a large text file."""
    monkeypatch.setattr(block_reader, "PAUSES", Doubling(0.0, 0.0))
    held = list[weakref.ref[Tokens]]()

    class Breaking(SmallBlocks):
        def read(self, turn: Turn) -> Iterator[Tokens]:
            """As any, with something in hand."""
            piece = np.zeros(LENGTH)
            held.append(weakref.ref(piece))
            return super().read(turn)

    reader = BlockReader([Row(Breaking([8, -1, 8]), Watching(12))], 8)
    portions = reader.portions()
    assert [int(next(portions).windows[0, 0]) for _ in range(2)] == [0, 2]
    assert [piece() for piece in held] == [None] * len(held)
    [told] = reader.passed_over()
    assert told.endswith("training goes on with other text: damaged; get it again")
