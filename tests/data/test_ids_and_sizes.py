"""Tokenizers as they are found: with gaps in their ids, larger than the model, with marks that texts contain."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import ByteLevel as OfBytes
from tokenizers.models import BPE, Unigram, WordLevel
from tokenizers.pre_tokenizers import ByteLevel, Metaspace, WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from noloco_node.config.data_spec import DataSpec
from noloco_node.data.encoding import check_made_tokens, fitting_tokenizer
from noloco_node.data.sources import check_source
from noloco_node.data.token_file import TokenFile
from noloco_node.data.windows import load_windows
from noloco_node.document_marks import BEGINS
from noloco_node.errors import ExitCode, UserError
from tests.data.made_files import write_table
from tests.data.splits import load_split
from tests.data.test_made_tokens import laid_out, tokens_spec
from tests.data.test_sources import text_spec

END = "<|end|>"


def saved(folder: Path, vocabulary: Mapping[str, int], end: str | None = END) -> str:
    """A tokenizer of bytes, and of the words of `vocabulary`, which no text holds."""
    letters = {letter: number for number, letter in enumerate(sorted(ByteLevel.alphabet()))}
    fast = FastTokenizer(BPE(vocab=letters | dict(vocabulary), merges=[]))
    fast.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = OfBytes()
    PreTrainedTokenizerFast(tokenizer_object=fast, **({"eos_token": end} if end else {})).save_pretrained(folder)
    return str(folder)


def write_stories(folder: Path, texts: Sequence[str]) -> Path:
    """A file of rows."""
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder / "rows.jsonl"


@pytest.fixture
def stories(tmp_path: Path) -> Path:
    """300 of them."""
    return write_stories(tmp_path, [f"tale {number}: " + "and so on, " * (number % 7) for number in range(300)])


@pytest.mark.parametrize("end", [300, 70_000])
def test_a_gap_in_the_ids_changes_no_token_and_marks_no_beginning(end: int, stories: Path, tmp_path: Path) -> None:
    """The end of a text is larger than the number of tokens, or than what so few tokens were written with."""
    name = saved(tmp_path / "gaps", {END: end})
    spec = text_spec(stories, tokenizer=name, attention="document", holdout=0.2)
    windows = load_windows(spec, 80_000)
    rows = windows.rows(range(windows.train_count)).numpy()
    documents = len(load_split(spec).training)
    assert int((rows & BEGINS != 0).sum()) in {documents, documents - 1}
    assert int((rows & (BEGINS - 1) == end).sum()) in {documents, documents - 1}
    assert set(np.unique(rows & (BEGINS - 1))) <= {*range(256), end}


def test_nothing_is_written_as_another_id_than_it_is() -> None:
    """Two bytes hold 70,000 as 4,464."""
    for marked in (False, True):
        tokens = TokenFile.nameless(257, marked=marked)
        for bad in (257, 70_000, -1):
            with pytest.raises(ValueError, match="outside a vocabulary of 257"):
                tokens.append(np.array([1, bad, 2]))
        assert tokens.count == 0


def test_a_tokenizer_may_have_tokens_that_the_model_lacks_and_no_text_holds(stories: Path, tmp_path: Path) -> None:
    """As padded ones of checkpoints do; what is larger than the model in texts is refused, before anything starts."""
    name = saved(tmp_path / "padded", {END: 256, "<pad-1>": 257, "<pad-2>": 300})
    spec = text_spec(stories, tokenizer=name)
    fitting = fitting_tokenizer(spec, 257)
    check_made_tokens(spec, fitting)
    assert fitting.vocab_size == 257
    assert laid_out(load_windows(spec, 257)) == laid_out(load_windows(spec, 1000))
    with pytest.raises(UserError, match=r"that it puts between documents is 256 \('<\|end\|>'\)") as caught:
        fitting_tokenizer(spec, 256)
    assert "vocab_size to 301 or more" in caught.value.remedy
    unended = text_spec(stories, tokenizer=saved(tmp_path / "unended", {}, None))
    for look in (
        lambda: check_made_tokens(unended, fitting_tokenizer(unended, 215)),
        lambda: load_windows(unended, 215),
    ):
        with pytest.raises(UserError, match=r"of '.*:1' is \d+ .* outside the model's vocabulary") as caught:
            look()
        assert caught.value.exit_code is ExitCode.DATA


def held_as_words(folder: Path, kind: str) -> str:
    """A tokenizer whose model has the mark as an ordinary word, so that it finds it in texts by itself."""
    if kind == "pieces":
        pieces = [(letter, -5.0) for letter in "abcdef <>/s▁"]
        fast = FastTokenizer(Unigram([("<unk>", 0.0), ("</s>", 0.0), *pieces], unk_id=0))
        fast.pre_tokenizer = Metaspace()
    else:
        fast = FastTokenizer(WordLevel({"<unk>": 0, "</s>": 1, "a": 2, "b": 3}, unk_token="<unk>"))
        fast.pre_tokenizer = WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="</s>", unk_token="<unk>")
    made.save_pretrained(folder)
    return str(folder)


def test_marks_that_a_text_contains_are_text(tmp_path: Path) -> None:
    """A document is over where its row is, not where it writes about an end."""
    texts = [f"tale {number} {END} of {END}" for number in range(300)]
    name = saved(tmp_path / "bpe", {END: 256})
    spec = text_spec(write_stories(tmp_path, texts), tokenizer=name, holdout=0.2)
    tokenizer = fitting_tokenizer(spec, 257)
    training, held = laid_out(load_windows(spec, 257))
    split = load_split(spec)
    assert 0 <= len(split.training) + len(split.validation) - training.count(256) - held.count(256) <= 2
    assert tokenizer.decode(tokenizer.encode(texts[0]).tolist()) == texts[0]
    for kind in ("pieces", "words"):
        spec = DataSpec(tokenizer=held_as_words(tmp_path / kind, kind))
        found = fitting_tokenizer(spec, 100).encode("a </s> b</s>c</s>")
        assert 1 not in found
        assert len(found) > 3


@pytest.mark.parametrize("name", ["rows.parquet", "stream.arrow", "rows.jsonl"])
@pytest.mark.parametrize("large", [(1 << 63) + 5, (1 << 64) - 1, 1 << 70])
def test_ids_that_no_machine_word_holds_are_refused_like_others(name: str, large: int, tmp_path: Path) -> None:
    """They become no negative ones, and no traceback."""
    if name.endswith(".jsonl"):
        (tmp_path / name).write_text((json.dumps({"input_ids": [1, large]}) + "\n") * 30)
    elif large >= 1 << 64:
        return
    else:
        write_table(tmp_path / name, {"input_ids": pa.array([[1, large]] * 30, pa.list_(pa.uint64()))})
    spec = tokens_spec(tmp_path / name)
    check_source(spec)
    with pytest.raises(UserError, match=r"token id \d+ in '.*, outside the 256 tokens"):
        load_windows(spec, 256)
