"""A tokenizer learnt from a run's text: every text comes back from it, and nothing that is held out goes into it."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest
from transformers import AutoTokenizer

from noloco_node.cli.main import main
from noloco_node.config.data_spec import DataSpec
from noloco_node.data.tokenizer_training import END, TextTaken, train_tokenizer
from noloco_node.data.tokenizers import load_tokenizer
from noloco_node.data.windows import load_windows
from noloco_node.errors import ExitCode, UserError
from tests.data.made_files import write_table, write_texts
from tests.data.splits import load_split
from tests.data.test_sources import text_spec

MICRO = Path(__file__).parent.parent / "configs" / "micro.yaml"
STORIES = [f"tale {number}: " + "and so on, " * (5 + number % 7) for number in range(200)]
STRANGE = "Grüße  世界\r\n\t x=12345 e\u0301 \x00 \u200b\u2028 😀 \n\n  "


@pytest.fixture
def stories(tmp_path: Path) -> Path:
    """Rows of text."""
    write_texts(tmp_path / "rows.jsonl.gz", STORIES)
    return tmp_path / "rows.jsonl.gz"


def learn(place: Path, out: Path, size: int = 300) -> int:
    """Its tokens."""
    spec = text_spec(place, holdout=0.2)
    return train_tokenizer(spec, out, size, most_bytes=1 << 30).tokens


def test_every_text_comes_back_byte_for_byte(stories: Path, tmp_path: Path) -> None:
    """Texts that have nothing in common with what it learnt from, too; what UTF-8 cannot hold is a question mark."""
    assert learn(stories, tmp_path / "made") == 300
    tokenizer = load_tokenizer(DataSpec(tokenizer=str(tmp_path / "made")))
    every_character = "".join(chr(code) for code in range(0x3000) if not 0xD800 <= code < 0xE000)
    for text in (STORIES[0], STRANGE, END, every_character):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids.tolist()) == text
        assert int(ids.max()) < tokenizer.vocab_size == 300
    assert len(tokenizer.encode("tale 7: and so on,")) < 12
    assert tokenizer.decode(tokenizer.encode("a\ud800b").tolist()) == "a?b"
    assert tokenizer.separator.tolist() == AutoTokenizer.from_pretrained(tmp_path / "made").encode(END)


def test_a_run_trains_with_it(stories: Path, tmp_path: Path) -> None:
    """Windows hold its ids; a model with fewer is refused, with what to set."""
    learn(stories, tmp_path / "made")
    spec = text_spec(stories, holdout=0.2, tokenizer=str(tmp_path / "made"))
    windows = load_windows(spec, 300)
    assert int(windows.train(range(windows.train_count))[0].max()) > 256
    with pytest.raises(UserError, match=r"has ids up to 299, .* run\.model\.config\.vocab_size is 299") as caught:
        load_windows(spec, 299)
    assert caught.value.exit_code is ExitCode.DATA
    assert "vocab_size to 300" in caught.value.remedy


def test_held_out_documents_are_not_learnt_from(stories: Path) -> None:
    """The limit bounds what is learnt from, too."""
    spec = text_spec(stories, holdout=0.2)
    split = load_split(spec)
    taken = TextTaken(spec, 1 << 30)
    assert list(taken) == [document.text for document in split.training]
    assert taken.tried == [document.text for document in split.validation]
    assert len("".join(TextTaken(spec, 100))) < 200


def test_nothing_half_made_is_left(stories: Path, tmp_path: Path) -> None:
    """Where the text turns out to be unreadable, where it is token ids, and where the folder is there already."""
    broken = tmp_path / "broken" / "rows.jsonl.gz"
    broken.parent.mkdir()
    broken.write_bytes(stories.read_bytes()[:-200])
    with pytest.raises(UserError, match="cut off or damaged") as caught:
        learn(broken, tmp_path / "made")
    assert caught.value.exit_code is ExitCode.DATA
    write_table(tmp_path / "ids.parquet", {"text": pa.array([[1, 2, 3]] * 50)})
    with pytest.raises(UserError, match="holds token ids, not text"):
        learn(tmp_path / "ids.parquet", tmp_path / "made")
    with pytest.raises(UserError, match="--vocab-size is 256") as caught:
        learn(stories, tmp_path / "made", size=256)
    assert caught.value.exit_code is ExitCode.USAGE
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "ids.parquet", "rows.jsonl.gz"]
    (tmp_path / "made").mkdir()
    with pytest.raises(UserError, match="exists already") as caught:
        learn(stories, tmp_path / "made")
    assert caught.value.exit_code is ExitCode.RUN_FOLDER


def test_the_command_says_what_to_set(stories: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It also says how many tokens there are, if the text gives fewer than were asked for."""
    out = tmp_path / "made"
    text = ("--set", "run.data.source=text", "--set", f"run.data.path={stories}", "--set", "run.data.text_field=text")
    command = ["tokenizer", "train", str(MICRO), *text, "--vocab-size", "5000", "--out", str(out)]
    assert main(command) == ExitCode.OK
    told = capsys.readouterr().out
    size = len(json.loads((out / "tokenizer.json").read_text())["model"]["vocab"])
    assert f"{size:,} of 5,000: the text gives no more" in told
    assert "bytes a token" in told
    assert f"--set run.data.tokenizer={out} --set run.model.config.vocab_size={size}\n" in told
    assert main(command) == ExitCode.RUN_FOLDER


def test_a_file_may_name_the_tokenizer_that_is_to_be_learnt(stories: Path, tmp_path: Path) -> None:
    """A user that writes the file first has no folder yet, and perhaps the fingerprint of an earlier one."""
    text = ("--set", "run.data.source=text", "--set", f"run.data.path={stories}", "--set", "run.data.text_field=text")
    earlier = ("--set", "run.data.tokenizer_fingerprint=tokenizer-" + "0" * 32)
    for out, more in ((tmp_path / "made", ()), (tmp_path / "again", earlier)):
        named = (*text, "--set", f"run.data.tokenizer={out}", *more)
        command = ["tokenizer", "train", str(MICRO), *named, "--vocab-size", "300", "--out", str(out)]
        assert main(command) == ExitCode.OK
        assert (out / "tokenizer.json").is_file()
