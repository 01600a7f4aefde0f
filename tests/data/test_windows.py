"""Windows: packed without overlap or loss, labels one ahead, validation the same everywhere."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from noloco_node.config.data_spec import DataSpec
from noloco_node.data.sampler import SamplerPosition
from noloco_node.data.tokenizers import ByteTokenizer, load_tokenizer
from noloco_node.data.windows import load_windows
from noloco_node.errors import ExitCode, UserError
from noloco_node.identity.peer_id import PeerId
from noloco_node.node import journey
from noloco_node.sizing.preflight import MANY_PASSES
from tests.data.splits import held_out_count, load_split
from tests.worlds import micro_spec


@pytest.fixture
def story(tmp_path: Path) -> DataSpec:
    """A folder of 60 numbered files."""
    folder = tmp_path / "story"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number:02}.txt").write_text(f"tale {number}: " + "and so on, " * (5 + number))
    return DataSpec(source="text", path=str(folder), sequence_length=16, holdout=0.2)


def test_windows_are_the_text_in_order_without_overlap_or_gap(story: DataSpec) -> None:
    """All windows laid end to end spell the documents of their part, up to an incomplete last window."""
    windows, split = load_windows(story, 256), load_split(story)
    for documents, count, get in (
        (split.training, windows.train_count, windows.train),
        (split.validation, held_out_count(windows), windows.validation),
    ):
        text = "".join(document.text + "\n" for document in documents)
        inputs, labels = get(range(count))
        laid = torch.cat([inputs, labels[:, -1:]], dim=1).flatten().tolist()
        assert count == len(text.encode()) // 17
        assert ByteTokenizer().decode(laid) == text[: count * 17]


def test_labels_are_the_inputs_moved_on_by_one_token(story: DataSpec) -> None:
    """int64 [B, T] each, in the order asked for."""
    windows = load_windows(story, 256)
    inputs, labels = windows.train([3, 0, 3])
    assert inputs.shape == labels.shape == (3, 16)
    assert inputs.dtype == labels.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], labels[:, :-1])
    assert torch.equal(inputs[0], inputs[2])
    assert not torch.equal(inputs[0], inputs[1])
    assert torch.equal(inputs[1:2], windows.train([0])[0])


def test_validation_windows_are_fixed_distinct_and_spread(story: DataSpec) -> None:
    """Two loads agree; more windows contain fewer; none repeats; another seed chooses others."""
    windows = load_windows(story, 256)
    chosen = windows.validation_indices(20)
    assert chosen == load_windows(story, 256).validation_indices(20)
    assert chosen[:5] == windows.validation_indices(5)
    assert len(set(chosen)) == 20
    assert max(chosen) > held_out_count(windows) * 2 // 3
    assert min(chosen) < held_out_count(windows) // 3
    assert chosen != load_windows(story.model_copy(update={"seed": 1}), 256).validation_indices(20)
    everything = windows.validation_indices(10**6)
    assert sorted(everything) == list(range(held_out_count(windows)))


def test_validation_windows_do_not_depend_on_the_machine(story: DataSpec) -> None:
    """The first choices, written down: a change of library or code that moves them splits a swarm's gauge."""
    windows = load_windows(story, 256)
    assert held_out_count(windows) == 218
    assert windows.validation_indices(6) == [11, 31, 20, 87, 136, 23]


@given(st.text())
def test_bytes_decode_to_the_text_they_came_from(text: str) -> None:
    """A token is a byte; everything that UTF-8 can hold comes back."""
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode(ids.tolist()) == text


def test_bytes_that_are_no_text_decode_to_the_replacement_character() -> None:
    """A model may say anything, and its vocabulary may be larger."""
    assert ByteTokenizer().decode([65, 255, 66]) == "A\ufffdB"
    assert ByteTokenizer().decode([72, 300, 105]) == "H\ufffdi"


def save_word_tokenizer(folder: Path, end: str | None) -> str:
    """A transformers tokenizer of a few words, saved to a folder."""
    words = ["[UNK]", "</s>", "tale", "and", "so", "on", ",", ":"]
    fast = FastTokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    fast.pre_tokenizer = Whitespace()
    special = {"unk_token": "[UNK]"} | ({"eos_token": end} if end else {})
    PreTrainedTokenizerFast(tokenizer_object=fast, **special).save_pretrained(folder)
    return str(folder)


def test_a_pretrained_tokenizer_separates_documents_by_its_end_token(story: DataSpec, tmp_path: Path) -> None:
    """The id of `eos_token` stands between documents, where there is one."""
    name = save_word_tokenizer(tmp_path / "with-end", "</s>")
    tokenizer = load_tokenizer(DataSpec(tokenizer=name))
    assert tokenizer.vocab_size == 8
    assert tokenizer.encode("tale 1: and so on,").tolist() == [2, 0, 7, 3, 4, 5, 6]
    assert tokenizer.separator.tolist() == [1]
    windows = load_windows(story.model_copy(update={"tokenizer": name}), 8)
    inputs, labels = windows.train(range(windows.train_count))
    ends = int((inputs == 1).sum()) + int((labels[:, -1] == 1).sum())
    assert ends in {len(load_split(story).training), len(load_split(story).training) - 1}
    unended = load_tokenizer(DataSpec(tokenizer=save_word_tokenizer(tmp_path / "without-end", None)))
    assert np.array_equal(unended.separator, unended.encode("\n"))


def test_a_vocabulary_larger_than_the_models_is_refused_naming_both(story: DataSpec) -> None:
    """Ids that the embedding lacks must not reach it."""
    with pytest.raises(
        UserError, match=r"data\.tokenizer 'bytes' has 256 .* run\.model\.config\.vocab_size \(255\)"
    ) as got:
        load_windows(story, 255)
    assert got.value.exit_code is ExitCode.DATA


def test_an_unknown_tokenizer_is_a_users_error(story: DataSpec, tmp_path: Path) -> None:
    """A folder without a tokenizer."""
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"data\.tokenizer is '.*empty'") as caught:
        load_windows(story.model_copy(update={"tokenizer": str(tmp_path / "empty")}), 256)
    assert caught.value.exit_code is ExitCode.DATA


@pytest.mark.parametrize(("sequence_length", "part"), [(50_000, "training"), (8_000, "validation")])
def test_a_text_too_short_for_one_window_is_refused(story: DataSpec, sequence_length: int, part: str) -> None:
    """The message says which part and how long a window is."""
    with pytest.raises(UserError, match=rf"the {part} text has .* \({sequence_length + 1}\)") as caught:
        load_windows(story.model_copy(update={"sequence_length": sequence_length}), 256)
    assert caught.value.exit_code is ExitCode.DATA


@pytest.mark.parametrize(("times", "said"), [(MANY_PASSES + 1, True), (MANY_PASSES, False)])
def test_that_a_text_is_far_too_short_for_its_run_is_said_as_the_training_begins(
    story: DataSpec, times: int, said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A first run of an own small text went from a validation loss of 4.4 to 7.5, and nothing said why."""
    once = load_windows(story, 256).train_count * story.sequence_length
    run = micro_spec(stages=1, inner={"target_tokens": times * once}).model_copy(update={"data": story})
    config = run.model.config | {"vocab_size": 256}
    run = run.model_copy(update={"model": run.model.model_copy(update={"config": config})})
    _, samples = journey._prepare(run, 0, PeerId("a"), SamplerPosition())
    assert samples is not None
    samples.close()
    assert (f"{times} times the text of {once:,} tokens" in caplog.text) is said
