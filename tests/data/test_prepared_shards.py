"""A streamed text that was prepared: the same windows in the same order, whenever it was interrupted."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

from noloco_node.config.data_spec import DataSpec
from noloco_node.data import prepared_shards
from noloco_node.data.block_reader import StreamedBlocks
from noloco_node.data.documents import Document
from noloco_node.data.prepared import check_text_here, fingerprint_of, open_shards, prepare, prepare_streamed
from noloco_node.data.prepared_shards import PreparedSoFar
from noloco_node.data.reading import held_out_windows
from noloco_node.data.shards import TextShards
from noloco_node.data.shared_turns import Turn
from noloco_node.data.token_file import TokenFile
from noloco_node.data.tokenizers import ByteTokenizer, PretrainedTokenizer, Tokenizer, Tokens
from noloco_node.data.windows import load_windows
from noloco_node.errors import ExitCode, UserError
from tests.data.made_files import write_texts
from tests.data.test_prepared import same
from tests.data.test_sources import text_spec
from tests.data.test_streaming import SHARDS, STORIES, files_of, streamed, write_shards


class InTurn:
    """In place of processes, which take a second each to start: one shard after the other, here."""

    def __init__(self, *_: object) -> None:
        self.processes = 0

    def __enter__(self) -> InTurn:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def submit(self, work: object, *arguments: object) -> Future[object]:
        """Done at once."""
        future: Future[object] = Future()
        assert callable(work)
        try:
            future.set_result(work(*arguments))
        except UserError as error:
            future.set_exception(error)
        return future

    def shutdown(self, **_: object) -> None:
        """There is nobody to send home."""


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without other processes."""
    monkeypatch.setattr(prepared_shards, "ProcessPoolExecutor", InTurn)
    yield
    prepared_shards._opened.cache_clear()


@pytest.fixture
def spec(tmp_path: Path) -> DataSpec:
    """Six shards, two blocks in each."""
    return streamed(write_shards(tmp_path / "text"), parts_per_shard=2)


def bpe(folder: Path) -> PretrainedTokenizer:
    """A small tokenizer that learnt from the stories."""
    made = ByteLevelBPETokenizer()
    made.train_from_iterator(STORIES, vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False)
    PreTrainedTokenizerFast(tokenizer_object=made._tokenizer, eos_token="<|endoftext|>").save_pretrained(str(folder))
    return PretrainedTokenizer(str(folder))


def numbers_in(blocks: StreamedBlocks, block: int, start: int) -> list[list[int]]:
    """The windows of a block."""
    return [window.tolist() for window in blocks.read(Turn(0, block, 0, start))]


def assert_same(spec: DataSpec, folder: Path, tokenizer: Tokenizer) -> None:
    """Every window of every block, and those held out."""
    held = spec.model_copy(update={"prepared": str(folder), "path": "/gone"})
    check_text_here(held)
    length = spec.sequence_length + 1
    one = StreamedBlocks(TextShards(spec, tokenizer), spec.parts_per_shard, length)
    other = StreamedBlocks(open_shards(held, tokenizer.vocab_size), spec.parts_per_shard, length)
    assert one.count == other.count == SHARDS * spec.parts_per_shard
    assert [one.name(block) for block in range(one.count)] == [other.name(block) for block in range(one.count)]
    for block in range(one.count):
        whole = numbers_in(one, block, 0)
        assert numbers_in(other, block, 0) == whole
        assert numbers_in(one, block, 2) == numbers_in(other, block, 2) == whole[2:]
    rows = held_out_windows(spec, 1000, 100)
    assert len(rows) > 10
    assert np.array_equal(rows, held_out_windows(held, 1000, 100))


@pytest.mark.usefixtures("here")
def test_a_prepared_text_gives_the_windows_of_the_streamed_one(spec: DataSpec, tmp_path: Path) -> None:
    """With a tokenizer of one's own, and whatever the number of parts; the text is asked no more."""
    tokenizer = bpe(tmp_path / "bpe")
    spec = spec.model_copy(update={"tokenizer": str(tmp_path / "bpe")})
    heard: list[PreparedSoFar] = []
    done = prepare_streamed(spec, tokenizer, tmp_path / "tokens", heard.append)
    assert heard[-1] == PreparedSoFar(heard[0].all_bytes, heard[0].all_bytes, done.training + done.validation)
    assert (done.shards, done.documents, done.fingerprint) == (SHARDS, len(STORIES), fingerprint_of(spec))
    for parts in (1, 2, 5):
        assert_same(spec.model_copy(update={"parts_per_shard": parts}), tmp_path / "tokens", tokenizer)
    assert prepare_streamed(spec, tokenizer, tmp_path / "tokens") == done


def test_processes_prepare_shards_and_their_errors_come_back(tmp_path: Path) -> None:
    """Real ones, which share nothing but how far they have come."""
    spec = streamed(write_shards(tmp_path / "text", ".jsonl", shards=2))
    heard: list[PreparedSoFar] = []
    with files_of(spec)[1].open("a") as broken:
        broken.write("{")
    with pytest.raises(UserError, match=r"line 61 of '01.jsonl' is not JSON") as caught:
        prepare_streamed(spec, ByteTokenizer(), tmp_path / "tokens", heard.append)
    assert caught.value.exit_code is ExitCode.DATA
    assert not (tmp_path / "tokens" / "00001").exists()
    assert heard[0].all_bytes == sum(path.stat().st_size for path in files_of(spec))


@pytest.mark.usefixtures("here")
def test_an_interrupted_preparation_goes_on_shard_by_shard(
    spec: DataSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is there is kept, what was only begun is made again, and nothing counts before all of it is there."""
    folder, encoded, real = tmp_path / "tokens", list[str](), prepared_shards.encode

    def encode(document: Document, tokenizer: Tokenizer, spec: DataSpec) -> Tokens:
        if len(encoded) == 50:
            raise KeyboardInterrupt
        encoded.append(document.key)
        return real(document, tokenizer, spec)

    with monkeypatch.context() as patched:
        patched.setattr(prepared_shards, "encode", encode)
        with pytest.raises(KeyboardInterrupt):
            prepare_streamed(spec, ByteTokenizer(), folder)
    assert sorted(path.name for path in folder.iterdir()) == ["00000", "00001", "unfinished.json"]
    with pytest.raises(UserError, match="holds an unfinished preparation"):
        check_text_here(spec.model_copy(update={"prepared": str(folder)}))
    again: list[str] = []
    monkeypatch.setattr(prepared_shards, "encode", lambda *args: again.append(args[0].key) or real(*args))
    prepare_streamed(spec, ByteTokenizer(), folder)
    assert len(again) == len(STORIES) * 4 // SHARDS, "the shards that were there are not made again"
    assert_same(spec, folder, ByteTokenizer())


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("method", ["flush", "sync"])
def test_a_full_disk_leaves_nothing_under_the_final_name(
    method: str, spec: DataSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says which folder; with room the same command goes on."""
    folder, real, count = tmp_path / "tokens", getattr(TokenFile, method), 0

    def full(self: TokenFile) -> None:
        nonlocal count
        count += 1
        if count == 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(self)

    with monkeypatch.context() as patched:
        patched.setattr(TokenFile, method, full)
        with pytest.raises(UserError, match="No space left on device") as caught:
            prepare_streamed(spec, ByteTokenizer(), folder)
    assert caught.value.exit_code is ExitCode.DATA
    assert not list(folder.glob(".*"))
    assert not (folder / "manifest.json").exists()
    prepare_streamed(spec, ByteTokenizer(), folder)
    assert_same(spec, folder, ByteTokenizer())


@pytest.mark.usefixtures("here")
def test_what_is_not_whole_or_of_another_text_is_refused(spec: DataSpec, tmp_path: Path) -> None:
    """By shard, by settings, by fingerprint."""
    folder, text = tmp_path / "tokens", Path(spec.path or "")
    prepare_streamed(spec, ByteTokenizer(), folder)
    held = spec.model_copy(update={"prepared": str(folder)})

    def refused(changes: dict[str, object], words: str) -> None:
        with pytest.raises(UserError, match=words) as caught:
            held_out_windows(held.model_copy(update=changes), 256, 1)
        assert caught.value.exit_code is ExitCode.DATA

    refused({"holdout": 0.1}, r"another text: made with run\.data\.holdout 0\.2")
    refused({"fingerprint": "shards-" + "0" * 32}, "is not the run's: its fingerprint is shards-")
    with pytest.raises(UserError, match="another text: made with"):
        load_windows(held.model_copy(update={"streaming": False}), 256)
    write_texts(text / "02.jsonl.gz", ["changed", *STORIES])
    with pytest.raises(UserError, match="has changed since its preparation"):
        prepare_streamed(spec, ByteTokenizer(), folder)
    manifest = (folder / "manifest.json").read_text()
    (folder / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"'02.jsonl.gz' has changed since its preparation"):
        prepare_streamed(spec, ByteTokenizer(), folder)
    (folder / "manifest.json").write_text(manifest)
    os.truncate(folder / "00003" / "training.tokens", 7)
    refused({}, "is not whole: it has 7 bytes")
    (folder / "00004" / "shard.json").unlink()
    (folder / "00003" / "shard.json").unlink()
    refused({}, "'.*00003' is not whole: No such file")


def test_all_cores_give_the_tokens_of_one(tmp_path: Path) -> None:
    """A text that is not streamed is tokenised by threads: documents of every length, in their order."""
    write_shards(tmp_path / "text")
    tokenizer = bpe(tmp_path / "bpe")
    spec = text_spec(tmp_path / "text", tokenizer=str(tmp_path / "bpe"), holdout=0.2)
    heard: list[PreparedSoFar] = []
    prepare(spec, tokenizer, tmp_path / "tokens", heard.append)
    assert same(
        load_windows(spec.model_copy(update={"prepared": str(tmp_path / "tokens")}), 300), load_windows(spec, 300)
    )
    assert (
        0 < heard[-1].done_bytes <= heard[-1].all_bytes == sum(f.stat().st_size for f in (tmp_path / "text").iterdir())
    )
