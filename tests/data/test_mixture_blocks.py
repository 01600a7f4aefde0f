"""Mixtures whose sources are read in blocks: streamed or numbered, and shared out between replicas."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path

import numpy as np
import pytest
from pydantic import TypeAdapter

from noloco_node.cli.printing import print_fingerprint
from noloco_node.config.data_spec import DataSpec
from noloco_node.config.load import load_config
from noloco_node.data import block_reader, prepared
from noloco_node.data.block_reader import StreamedBlocks
from noloco_node.data.mixture import MixedPosition
from noloco_node.data.prepared import check_text_here, fingerprint_of
from noloco_node.data.reading import Reader, held_out_by_source, open_samples
from noloco_node.data.sampler import Permutation, SamplerPosition
from noloco_node.data.samples import Position, Samples, SharedRows
from noloco_node.data.shards import TextShards
from noloco_node.data.shared_turns import Said, SharedTurns, Turn
from noloco_node.data.tokenizers import ByteTokenizer
from noloco_node.data.windows import load_windows
from noloco_node.errors import ExitCode, UserError
from noloco_node.sizing.preflight import note_on_blocks
from noloco_node.tallies import Doubling
from tests.data.made_files import write_texts

MICRO = Path(__file__).parent.parent / "configs" / "micro.yaml"
LETTERS = "abc"
WEIGHTS, QUOTAS = (1, 5, 2), (125, 625, 250)
LENGTH = 17
SIZE = 40
"""Windows of a microbatch."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three sources in shards; no document comes twice, and each says whose it is."""
    root = tmp_path_factory.mktemp("sources")
    rng = random.Random(0)
    for letter, shards, documents in zip(LETTERS, (2, 6, 3), (16, 40, 40), strict=True):
        (root / letter).mkdir()
        for shard in range(shards):
            texts = [f"{letter}{rng.randrange(10**9):09}" * rng.randrange(2, 9) for _ in range(documents)]
            write_texts(root / letter / f"{shard}.jsonl.gz", texts)
    return root


@pytest.fixture
def streamed(folder: Path) -> DataSpec:
    """All of them, a fifth of each held out."""
    parts = [
        {"source": "text", "path": str(folder / letter), "weight": weight}
        for letter, weight in zip(LETTERS, WEIGHTS, strict=True)
    ]
    values = {"mixture": parts, "streaming": True, "parts_per_shard": 2, "sequence_length": LENGTH - 1, "holdout": 0.2}
    return DataSpec.model_validate(values)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that has no turn yet asks again at once."""
    monkeypatch.setattr(block_reader, "LOOK_SECONDS", 0.001)


async def opened(spec: DataSpec, position: Position | None = None, size: int = SIZE) -> Samples:
    """As the only replica of stage 0 opens it; little is read ahead."""
    reader = Reader("peer", size, 24, 4 * SIZE * LENGTH)
    samples = await asyncio.to_thread(open_samples, spec, 256, reader, position or SamplerPosition())
    if samples.shared is not None:
        samples.shared.heard((), 1)
    return samples


async def drawn(spec: DataSpec, count: int, size: int = SIZE) -> list[bytes]:
    """So many windows from the beginning on."""
    samples, found = await opened(spec, size=size), list[bytes]()
    async with asyncio.timeout(20):
        while len(found) < count:
            found += [bytes(row) for row in (await samples.draw()).numpy().astype(np.uint8)]
    samples.close()
    return found[:count]


def source_of(window: bytes) -> int:
    """Every window of these texts holds a letter."""
    return next(LETTERS.index(chr(byte)) for byte in window if chr(byte) in LETTERS)


def alone(spec: DataSpec, number: int, count: int) -> list[bytes]:
    """The first windows of one source, as a replica reads it that reads nothing else."""
    part = spec.parts[number]
    blocks = StreamedBlocks(TextShards(part, ByteTokenizer()), part.parts_per_shard, LENGTH)
    epochs = ((epoch, Permutation(blocks.count, f"blocks/{spec.seed}/{epoch}")) for epoch in range(99))
    turns = (Turn(0, order[place], epoch) for epoch, order in epochs for place in range(blocks.count))
    return [bytes(each) for each in islice(chain.from_iterable(map(blocks.read, turns)), count)]


async def test_streamed_sources_keep_their_shares_and_each_is_read_as_if_it_were_alone(streamed: DataSpec) -> None:
    """To the window in each thousand; a small source is read again where a large one is not through yet. Numbered
    windows of the same sources come in the same order of sources."""
    found = await drawn(streamed, 2000)
    for start in (0, 1000):
        assert tuple(Counter(map(source_of, found[start : start + 1000]))[n] for n in range(3)) == QUOTAS
    for number, quota in enumerate(QUOTAS):
        own = [window for window in found if source_of(window) == number]
        assert own == alone(streamed, number, 2 * quota)
    numbered = await drawn(streamed.model_copy(update={"streaming": False}), 1000)
    assert list(map(source_of, numbered)) == list(map(source_of, found[:1000]))


@pytest.mark.parametrize("batches", [1, 26])
async def test_a_next_life_goes_on_in_every_source(streamed: DataSpec, batches: int) -> None:
    """From what a checkpoint holds, with the very next window, whatever was read ahead."""
    whole = await drawn(streamed, (batches + 10) * SIZE)
    first = await opened(streamed)
    for _ in range(batches):
        await first.draw()
    kept = TypeAdapter[Position](Position).dump_json(first.position())
    first.close()
    position = TypeAdapter[Position](Position).validate_json(kept)
    assert isinstance(position, MixedPosition)
    assert position.order == SamplerPosition(epoch=batches * SIZE // 1000, offset=batches * SIZE % 1000)
    second = await opened(streamed, position)
    later = [bytes(row) for _ in range(10) for row in (await second.draw()).numpy().astype(np.uint8)]
    second.close()
    assert later == whole[batches * SIZE :]


def test_a_streamed_mixture_has_a_fingerprint_and_each_source_its_share_of_what_is_held_out(streamed: DataSpec) -> None:
    """The first windows of each source, in the order of the sources."""
    found = fingerprint_of(streamed)
    assert found.startswith("shards-")
    check_text_here(streamed.model_copy(update={"fingerprint": found}))
    rows, of = held_out_by_source(streamed, 256, 24)
    assert of == (("text [0]", 3), ("text [1]", 15), ("text [2]", 6))
    assert [source_of(bytes(row)) for row in rows.numpy().astype(np.uint8)] == [0] * 3 + [1] * 15 + [2] * 6
    with pytest.raises(UserError, match=r"run\.data\.mixture is not the run's"):
        check_text_here(streamed.model_copy(update={"fingerprint": "shards-" + "0" * 32}))


async def test_blocks_of_numbered_windows_keep_the_shares_and_read_each_source_whole(streamed: DataSpec) -> None:
    """A pass of a source has each of its windows once."""
    spec = streamed.model_copy(update={"streaming": False, "block_windows": 16})
    found = await drawn(spec, 2000)
    for start in (0, 1000):
        assert tuple(Counter(map(source_of, found[start : start + 1000]))[n] for n in range(3)) == QUOTAS
    for number, windows in enumerate(load_windows(spec, 256).by_source()):
        every = [bytes(row) for row in windows.rows(range(windows.train_count)).numpy().astype(np.uint8)]
        own = [window for window in found if source_of(window) == number][: len(every)]
        assert Counter(own) == Counter(every[: len(own)] if len(own) < len(every) else every)


async def test_blocks_smaller_than_a_microbatch_do_not_end_the_reading_of_a_mixture(streamed: DataSpec) -> None:
    """The microbatch is shorter then; the shares stay."""
    spec = streamed.model_copy(update={"streaming": False, "block_windows": 3})
    assert await drawn(spec, 1000, size=200) == await drawn(spec, 1000)


async def draw_all(samples: Samples) -> None:
    """Many windows, for as long as there are any."""
    async with asyncio.timeout(20):
        for _ in range(200):
            await samples.draw()


async def test_what_is_wrong_with_a_block_names_its_source(
    streamed: DataSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source that cannot be read at all ends the reading, however well the others are."""
    monkeypatch.setattr(block_reader, "PAUSES", Doubling(0.001, 60.0))
    (tmp_path / "bad").mkdir()
    write_texts(tmp_path / "bad" / "0.jsonl", [f"b{number:09}" * 4 for number in range(40)])
    parts = list(streamed.mixture)
    parts[1] = parts[1].model_copy(update={"path": str(tmp_path / "bad")})
    samples = await opened(streamed.model_copy(update={"mixture": tuple(parts)}))
    (tmp_path / "other").write_bytes(b'{"body": "none"}\n')
    (tmp_path / "other").replace(tmp_path / "bad" / "0.jsonl")  # a reader may look while a file is written
    with pytest.raises(UserError, match=r"run\.data\.mixture\[1\]: .*text_field") as caught:
        await draw_all(samples)
    [told] = samples.passed_over()
    assert told.startswith("the rest of '0.jsonl' of run.data.mixture[1] is passed over (1 so far)")
    samples.close()
    assert caught.value.exit_code is ExitCode.DATA


COUNTS = (24, 8, 16)
"""Blocks of three sources."""


class StagePeers:
    """Replicas that hear of each other every five seconds, each in one list of claims."""

    def __init__(self, names: Sequence[str], counts: Sequence[int]) -> None:
        self.turns = {name: [SharedTurns(count, 0, name, random.Random(name)) for count in counts] for name in names}
        self.rows = {name: SharedRows(turns) for name, turns in self.turns.items()}

    def look(self) -> None:
        """All of them hear and say."""
        said = [Said(name, rows.claims) for name, rows in self.rows.items()]
        for rows in self.rows.values():
            rows.heard(said, len(self.rows))

    def take(self) -> Iterator[tuple[int, Turn]]:
        """A turn of each row for each, where there is one; it is read to its end by the next time."""
        for turns in self.turns.values():
            for number, row in enumerate(turns):
                for claim in row.claims:
                    if claim.begun:
                        row.finished(claim.slot)
                if (turn := row.take()) is not None:
                    yield number, turn


def test_replicas_share_out_each_source_by_one_list_of_claims() -> None:
    """No block of any source is read by two in a pass, and none is left out."""
    stage_peers, read = StagePeers(("one", "two", "three"), COUNTS), [Counter[int]() for _ in COUNTS]
    for _ in range(60):
        stage_peers.look()
        stage_peers.look()  # what was drawn in a look is known by the next one
        for number, turn in stage_peers.take():
            read[number][turn.slot] += 1
    for slots, count in zip(read, COUNTS, strict=True):
        assert set(range(2 * count)) <= set(slots)
        assert max(slots.values()) == 1


def test_one_row_is_told_as_it_is() -> None:
    """As before there were several."""
    stage_peers = StagePeers(["one"], [16])
    rows, [turns] = stage_peers.rows["one"], stage_peers.turns["one"]
    rows.heard([], 1)
    turn = turns.take()
    assert turn is not None
    assert rows.claims == turns.claims
    [(number, event)] = rows.events()
    assert (number, event.slot, event.what) == (None, turn.slot, "begun")
    assert rows.counts == turns.counts.by_name


def test_a_streamed_mixture_with_a_hubs_text_is_pinned_source_by_source(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fingerprint of the whole could not be checked without asking the hub for each; and what has too few blocks is
    told of."""
    hub = f"run.data.mixture=[{{source: text, path: {folder / 'a'}}}, {{source: huggingface, path: a/b}}]"
    monkeypatch.setattr(prepared, "revision_of", lambda _: "revision-" + "1" * 40)  # no hub is reachable
    print_fingerprint(load_config(MICRO, [hub, "run.data.streaming=true"]).run)
    shown = capsys.readouterr().out
    assert "set run.data.mixture[0].fingerprint to the first below" in shown
    assert "set run.data.fingerprint" not in shown
    pinned = "run.data.fingerprint=revision-" + "0" * 40
    with pytest.raises(UserError, match=r"run\.data\.mixture\[1\]\.fingerprint in its place"):
        load_config(MICRO, [hub, "run.data.streaming=true", pinned])
    parts = ", ".join(f"{{source: text, path: {folder / letter}}}" for letter in LETTERS)
    config = load_config(MICRO, [f"run.data.mixture=[{parts}]", "run.data.streaming=true", "local_swarm.replicas=3"])
    note = note_on_blocks(config)
    assert note is not None
    assert "run.data.mixture[0] has 2 shards and 2 blocks" in note
