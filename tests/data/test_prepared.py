"""A prepared text: the tokens that reading gives, whenever its making was interrupted, and no other text's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

from noloco_node.bootstrap.spec_fetch import read_agreed, with_own_data
from noloco_node.config.data_spec import DataSpec
from noloco_node.config.load import OwnData, load_config
from noloco_node.data import prepared
from noloco_node.data.documents import Document
from noloco_node.data.prepared import PreparedSoFar, TextManifest, check_text_here, prepare, prepare_run, read_manifest
from noloco_node.data.sources import fingerprint_of_documents
from noloco_node.data.tokenizers import ByteTokenizer, Tokens, load_tokenizer
from noloco_node.data.windows import Windows, load_windows
from noloco_node.errors import ExitCode, UserError
from tests.config.test_tokenizer_files import made, with_tokenizer
from tests.data.made_files import write_texts
from tests.data.splits import held_out_count
from tests.data.test_sources import text_spec
from tests.data.test_streaming import write_shards

MICRO = Path(__file__).parent.parent / "configs" / "micro.yaml"
STORIES = [f"tale {number}: " + "and so on, " * (5 + number % 7) for number in range(60)]


@pytest.fixture(autouse=True)
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread takes one document at a time."""
    monkeypatch.setattr(prepared, "BATCH_LENGTH", 1)


@pytest.fixture
def spec(tmp_path: Path) -> DataSpec:
    """Rows in two shards."""
    for name, part in (("a.jsonl.gz", STORIES[:25]), ("b.jsonl.gz", STORIES[25:])):
        (tmp_path / "text").mkdir(exist_ok=True)
        write_texts(tmp_path / "text" / name, part)
    return text_spec(tmp_path / "text", holdout=0.2)


def everything(windows: Windows) -> list[torch.Tensor]:
    """All windows of both parts."""
    return [*windows.train(range(windows.train_count)), *windows.validation(range(held_out_count(windows)))]


def same(one: Windows, other: Windows) -> bool:
    """Whether not one token differs."""
    return all(torch.equal(*pair) for pair in zip(everything(one), everything(other), strict=True))


class Interrupted(Exception):
    """The person at the keyboard has had enough."""


def interrupting(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """From now on an encoding after so many documents ends the preparation."""
    count, real = 0, prepared.encode

    def encode(document: Document, tokenizer: ByteTokenizer, spec: DataSpec) -> Tokens:
        nonlocal count
        count += 1
        if count > after:
            raise Interrupted
        return real(document, tokenizer, spec)

    monkeypatch.setattr(prepared, "encode", encode)


def test_a_prepared_text_gives_the_windows_of_the_text(spec: DataSpec, tmp_path: Path) -> None:
    """It gives the text's fingerprint, too, and the text itself is asked for no more."""
    direct, fingerprint = load_windows(spec, 256), fingerprint_of_documents(spec)
    done = prepare(spec, ByteTokenizer(), tmp_path / "tokens")
    assert (done.fingerprint, done.documents) == (fingerprint, 60)
    held = spec.model_copy(update={"prepared": str(tmp_path / "tokens"), "path": "/gone", "fingerprint": fingerprint})
    check_text_here(held)
    assert same(load_windows(held, 256), direct)
    assert prepare(spec, ByteTokenizer(), tmp_path / "tokens") == done


@pytest.mark.parametrize("save_seconds", [0.0, 3600.0])
def test_an_interrupted_preparation_goes_on(
    save_seconds: float, spec: DataSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Again and again, with what was written down and what was not; it tokenises nothing twice that was saved."""
    monkeypatch.setattr(prepared, "SAVE_SECONDS", save_seconds)
    direct, folder, rounds = load_windows(spec, 256), tmp_path / "tokens", 0
    for allowed in (7, 20, 100):
        with monkeypatch.context() as patched:
            interrupting(patched, allowed)
            try:
                prepare(spec, ByteTokenizer(), folder)
            except Interrupted:
                rounds += 1
                with pytest.raises(UserError, match=r"holds (an unfinished preparation|no prepared text)"):
                    check_text_here(spec.model_copy(update={"prepared": str(folder)}))
    assert rounds == 2
    assert same(load_windows(spec.model_copy(update={"prepared": str(folder)}), 256), direct)


def test_what_is_no_longer_as_long_as_it_was_is_not_gone_on_with(
    spec: DataSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A half of a copied folder: to go on was a traceback, and a finished one was said to be made. A file in place of
    the folder is no prepared text."""
    monkeypatch.setattr(prepared, "SAVE_SECONDS", 0.0)
    folder = tmp_path / "tokens"
    with monkeypatch.context() as patched:
        interrupting(patched, 20)
        with pytest.raises(Interrupted):
            prepare(spec, ByteTokenizer(), folder)
    whole = (folder / "training.tokens").read_bytes()
    for state in ("unfinished", "finished"):
        (folder / "training.tokens").write_bytes(whole[:100])
        with pytest.raises(UserError, match=r"has 100 bytes, and its manifest says"):
            prepare(spec, ByteTokenizer(), folder)
        (folder / "training.tokens").write_bytes(whole)
        assert prepare(spec, ByteTokenizer(), folder).fingerprint, state
        whole = (folder / "training.tokens").read_bytes()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="holds no prepared text"):
        load_windows(spec.model_copy(update={"prepared": str(tmp_path / "file")}), 256)


def test_a_second_preparation_beside_the_first_is_refused_and_harms_it_not(
    spec: DataSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cut off what the first had written since it last wrote down how far it was. If it was ended then, zeros stood
    there for tokens."""
    folder, direct, real = tmp_path / "tokens", load_windows(spec, 256), prepared.encode
    beside: list[DataSpec] = [spec]

    def encode(document: Document, tokenizer: ByteTokenizer, its: DataSpec) -> Tokens:
        if beside:
            with pytest.raises(UserError, match="another process prepares a text in") as refused:
                prepare(beside.pop(), ByteTokenizer(), folder)
            assert refused.value.exit_code is ExitCode.RUN_FOLDER
        return real(document, tokenizer, its)

    monkeypatch.setattr(prepared, "encode", encode)
    monkeypatch.setattr(prepared, "cores", lambda: 1)
    prepare(spec, ByteTokenizer(), folder)
    assert same(load_windows(spec.model_copy(update={"prepared": str(folder)}), 256), direct)


def test_a_text_that_changed_meanwhile_is_not_gone_on_with(
    spec: DataSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of it would be another's."""
    monkeypatch.setattr(prepared, "SAVE_SECONDS", 0.0)
    with monkeypatch.context() as patched:
        interrupting(patched, 40)
        with pytest.raises(Interrupted):
            prepare(spec, ByteTokenizer(), tmp_path / "tokens")
    write_texts(tmp_path / "text" / "a.jsonl.gz", ["changed", *STORIES[1:25]])
    with pytest.raises(UserError, match="has changed since its preparation"):
        prepare(spec, ByteTokenizer(), tmp_path / "tokens")


def test_a_text_that_cannot_be_read_leaves_nothing_behind(tmp_path: Path) -> None:
    """Neither files without a manifest nor the folder, unless that was there; and the next text goes there."""
    write_texts(tmp_path / "whole.jsonl.gz", STORIES)
    whole = (tmp_path / "whole.jsonl.gz").read_bytes()
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "there").mkdir()
    for folder in (tmp_path / "tokens", tmp_path / "there"):
        with pytest.raises(UserError, match="cut off or damaged"):
            prepare(text_spec(tmp_path / "cut.jsonl.gz"), ByteTokenizer(), folder)
    assert not (tmp_path / "tokens").exists()
    assert not list((tmp_path / "there").iterdir())
    assert prepare(text_spec(tmp_path / "whole.jsonl.gz"), ByteTokenizer(), tmp_path / "there").fingerprint


def test_the_tokens_of_another_text_are_refused(spec: DataSpec, tmp_path: Path) -> None:
    """By their settings, their vocabulary, their fingerprint, their size."""
    folder = tmp_path / "tokens"
    prepare(spec, ByteTokenizer(), folder)
    held = spec.model_copy(update={"prepared": str(folder)})

    def refused(changes: dict[str, object], words: str) -> None:
        with pytest.raises(UserError, match=words) as caught:
            load_windows(held.model_copy(update=changes), 256)
        assert caught.value.exit_code is ExitCode.DATA

    refused({"holdout": 0.1}, r"another text: made with run\.data\.holdout 0\.2")
    refused(
        {"text_field": "body", "sequence_length": 8}, r"run\.data\.text_field 'text', run\.data\.sequence_length 16"
    )
    refused({"fingerprint": "text-" + "0" * 32}, "is not the run's: its fingerprint is text-")
    refused({"prepared": str(tmp_path)}, "holds no prepared text")
    with (folder / "training.tokens").open("r+b") as file:
        file.truncate(100)
    refused({}, "has 100 bytes, and its manifest says")
    (folder / "manifest.json").write_text("{")
    refused({}, "is no manifest")


def test_where_a_volunteer_keeps_it_is_no_part_of_the_run_and_no_strangers_choice(tmp_path: Path) -> None:
    """Neither told nor taken; it stands for the path of the text."""
    settings = ["run.data.source=text", "run.data.path=/a"]
    plain = load_config(MICRO, settings).run
    mine = load_config(MICRO, [*settings, f"run.data.prepared={tmp_path}"]).run
    assert mine.run_id == plain.run_id
    assert str(tmp_path) not in mine.agreed_json
    forged = mine.agreed_json.replace('"data":{', '"data":{"prepared":"/etc",')
    assert read_agreed(forged.encode()).data.prepared is None
    joined = with_own_data(read_agreed(mine.agreed_json.encode()), OwnData(prepared="/b"), reads_text=True)
    assert (joined.data.prepared, joined.run_id) == ("/b", plain.run_id)


def test_a_prepared_text_may_lie_beside_another_copy_of_the_tokenizer(tmp_path: Path) -> None:
    """Tokens depend on what the tokenizer is, and not on where it lies; with another it is refused."""
    (tmp_path / "text").write_text("a tale and so on. " * 400)
    spec = with_tokenizer(made(tmp_path / "one"), "run.data.source=text", f"run.data.path={tmp_path / 'text'}").run.data
    done = prepare(spec, load_tokenizer(spec), tmp_path / "tokens")
    plainly = spec.model_copy(update={"tokenizer": "bytes", "tokenizer_fingerprint": None})
    prepare(plainly, ByteTokenizer(), tmp_path / "bytes")
    with pytest.raises(UserError, match=r"another text: made with run\.data\.tokenizer 'bytes'\n"):
        prepare(spec, load_tokenizer(spec), tmp_path / "bytes")
    (tmp_path / "one").rename(tmp_path / "two")
    held = {"prepared": str(tmp_path / "tokens"), "tokenizer": str(tmp_path / "two")}
    assert read_manifest(spec.model_copy(update=held)) == done
    with pytest.raises(UserError, match=r"made with .*tokenizer_fingerprint"):
        read_manifest(spec.model_copy(update=held | {"tokenizer_fingerprint": "tokenizer-" + "0" * 32}))


def test_a_manifest_is_read_as_it_was_written(spec: DataSpec, tmp_path: Path) -> None:
    """By whatever release of the same version."""
    done = prepare(spec, ByteTokenizer(), tmp_path / "tokens")
    assert TextManifest.model_validate_json((tmp_path / "tokens" / "manifest.json").read_text()) == done
    assert sorted(path.name for path in (tmp_path / "tokens").iterdir()) == [
        "manifest.json",
        "training.tokens",
        "validation.tokens",
    ]


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_folder_that_cannot_be_made_is_named_with_a_remedy(place: str, spec: DataSpec, tmp_path: Path) -> None:
    """A file is in the way. It was a traceback."""
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    with pytest.raises(UserError, match=rf"'{tmp_path / place}', which cannot be written: .*\n.*--to DIR") as refused:
        prepare_run(spec, ByteTokenizer(), tmp_path / place)
    assert refused.value.exit_code is ExitCode.RUN_FOLDER
    assert (tmp_path / "file").read_text(encoding="utf-8") == "mine"


def test_a_folder_that_this_user_may_not_write_is_named_with_a_remedy(
    spec: DataSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder may be another user's, or refuse only its first file, as a network's disk does."""
    folder = tmp_path / "another's"
    folder.mkdir()
    with monkeypatch.context() as patched:
        patched.setattr("os.access", lambda *_: False)
        with pytest.raises(UserError, match=r"cannot be written: Permission denied"):
            prepare(spec, ByteTokenizer(), folder)
    (folder / "training.tokens").mkdir()
    with pytest.raises(UserError, match=r"cannot be written: Is a directory") as refused:
        prepare(spec, ByteTokenizer(), folder)
    assert refused.value.exit_code is ExitCode.RUN_FOLDER


def test_all_cores_give_the_tokens_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents of every length, in their order."""
    monkeypatch.setattr(prepared, "BATCH_LENGTH", 1 << 10)
    write_shards(tmp_path / "text")
    made = ByteLevelBPETokenizer()
    made.train_from_iterator(STORIES, vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False)
    PreTrainedTokenizerFast(tokenizer_object=made._tokenizer, eos_token="<|endoftext|>").save_pretrained(
        str(tmp_path / "bpe")
    )
    spec = text_spec(tmp_path / "text", tokenizer=str(tmp_path / "bpe"), holdout=0.2)
    heard: list[PreparedSoFar] = []
    prepare(spec, load_tokenizer(spec), tmp_path / "tokens", heard.append)
    assert same(
        load_windows(spec.model_copy(update={"prepared": str(tmp_path / "tokens")}), 300), load_windows(spec, 300)
    )
    size = sum(f.stat().st_size for f in (tmp_path / "text").iterdir())
    assert 0 < heard[-1].done_bytes <= heard[-1].all_bytes == size


def test_a_streamed_text_is_not_prepared(spec: DataSpec, tmp_path: Path) -> None:
    """Neither written, nor read in place of the text: not by the file's author, nor by a volunteer."""
    streamed = spec.model_copy(update={"streaming": True})
    with pytest.raises(UserError, match=r"run\.data\.block_windows shares") as refused:
        prepare_run(streamed, ByteTokenizer(), tmp_path / "tokens")
    assert refused.value.exit_code is ExitCode.CONFIG
    settings = ["run.data.source=text", "run.data.path=/a", "run.data.streaming=true"]
    with pytest.raises(UserError, match=r"run\.data\.prepared is set but run\.data\.streaming is on"):
        load_config(MICRO, [*settings, "run.data.prepared=/b"])
    run = load_config(MICRO, settings).run
    with pytest.raises(UserError, match="leave it out, and say where the text lies") as refused:
        with_own_data(run, OwnData(path="/a", prepared="/b"), reads_text=True)
    assert refused.value.exit_code is ExitCode.CONFIG
