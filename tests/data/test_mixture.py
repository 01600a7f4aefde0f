"""Mixtures: every thousand windows have each source's share, and each source is walked as if it were alone."""

from __future__ import annotations

import asyncio
from collections import Counter
from fractions import Fraction
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noloco_node.config.data_spec import DataSpec, apportioned
from noloco_node.config.load import load_config
from noloco_node.config.run_spec import RunSpec
from noloco_node.data.encoding import check_made_tokens
from noloco_node.data.mixture import MixedSampler
from noloco_node.data.prepared import check_text_here, fingerprint_of, prepare_run
from noloco_node.data.reading import Reader, open_samples
from noloco_node.data.sampler import SamplerPosition
from noloco_node.data.samples import Samples
from noloco_node.data.tokenizer_training import TextTaken
from noloco_node.data.tokenizers import ByteTokenizer, NoTokenizer
from noloco_node.data.windows import load_windows
from noloco_node.document_marks import inputs_and_labels
from noloco_node.errors import ExitCode, UserError
from noloco_node.exporting.card import model_card
from noloco_node.exporting.gathered import Gathered
from tests.data.made_files import write_table, write_texts

MICRO = Path(__file__).parent.parent / "configs" / "micro.yaml"
COUNTS, WEIGHTS = (7, 430, 2000), (0.25, 1.0, 0.75)
QUOTAS = (125, 500, 375)
ENDS = list(accumulate(COUNTS))
LETTERS = "abc"
SIZES = (40, 200, 1000)
"""Windows of 16 + 1 tokens that each letter's text has, a fifth of the documents held out."""


def source_of(window: int) -> int:
    """The source of a window's number."""
    return next(number for number, end in enumerate(ENDS) if window < end)


def walk(position: SamplerPosition | None = None, peer: str = "peer") -> MixedSampler:
    """Over three sources, the smallest of which is walked often."""
    return MixedSampler(COUNTS, WEIGHTS, 3, peer, position or SamplerPosition())


@pytest.fixture
def mixed(tmp_path: Path) -> DataSpec:
    """Three sources of different formats, in each of which all documents are of one letter."""
    for letter, size in zip(LETTERS, SIZES, strict=True):
        texts = [letter * 169] * (size // 10)
        if letter == "b":
            write_texts(tmp_path / "b.jsonl.gz", texts)
        else:
            (tmp_path / letter).mkdir()
            for number, text in enumerate(texts):
                (tmp_path / letter / f"{number:03}.txt").write_text(text)
    sources = [{"source": "text", "path": str(tmp_path / name)} for name in ("a", "b.jsonl.gz", "c")]
    parts = [{**source, "weight": weight} for source, weight in zip(sources, WEIGHTS, strict=True)]
    return DataSpec.model_validate({"mixture": parts, "sequence_length": 16, "holdout": 0.2})


def changed(spec: DataSpec, number: int, **changes: object) -> DataSpec:
    """With one of its sources changed."""
    parts = list(spec.mixture)
    parts[number] = parts[number].model_copy(update=changes)
    return spec.model_copy(update={"mixture": tuple(parts)})


def letters_of(rows: Any) -> Counter[str]:
    """How many windows are of each letter: that of their middle, the separator apart."""
    return Counter(max(LETTERS, key=bytes(row).decode().count) for row in rows.tolist())


@settings(max_examples=20)
@given(st.lists(st.floats(1e-300, 1e300), min_size=1, max_size=12), st.integers(0, 5000))
def test_things_are_divided_by_weight_exactly_and_none_is_left(weights: list[float], count: int) -> None:
    """Whatever the weights: as many as there are, each off by less than one."""
    quotas = apportioned(weights, count)
    whole = sum(map(Fraction, weights))
    assert sum(quotas) == count
    assert all(abs(quota - Fraction(weight) * count / whole) < 1 for quota, weight in zip(quotas, weights, strict=True))


def test_each_thousand_windows_have_each_sources_share_and_no_two_passes_the_same_order() -> None:
    """To the window; within a tenth of a pass as chance has it."""
    taken, orders = walk(), list[list[int]]()
    for _ in range(4):
        orders.append([source_of(window) for window in taken.take(1000)])
        assert tuple(orders[-1].count(number) for number in range(3)) == QUOTAS
        assert all(abs(orders[-1][at : at + 100].count(1) - 50) < 25 for at in range(0, 1000, 100))
    assert len({tuple(order) for order in orders}) == 4
    assert walk(peer="other").take(1000) != walk().take(1000)
    assert walk().position == SamplerPosition()
    assert taken.position == SamplerPosition(epoch=4)


def test_each_source_is_read_whole_before_any_window_of_it_comes_again() -> None:
    """As if it were alone, however small it is and however often it is walked; in another order each time."""
    windows = walk().take(7000)
    for number, count in enumerate(COUNTS):
        own = [window - ENDS[number] + count for window in windows if source_of(window) == number]
        passes = [own[start : start + count] for start in range(0, len(own) - count + 1, count)]
        assert passes
        assert all(sorted(each) == list(range(count)) for each in passes)
        assert len(passes) == 1 or passes[0] != passes[1]


@pytest.mark.parametrize("taken", [0, 1, 999, 1000, 1001, 2718, 6001])
def test_a_walk_goes_on_where_it_was(taken: int) -> None:
    """From its position alone, in any source's any pass."""
    first = walk()
    first.take(taken)
    second = walk(SamplerPosition.model_validate_json(first.position.model_dump_json()))
    assert second.position == first.position == SamplerPosition(epoch=taken // 1000, offset=taken % 1000)
    assert second.take(1500) == first.take(1500)


def test_a_place_beyond_a_pass_is_none() -> None:
    """It is that of another text."""
    with pytest.raises(ValueError, match="offset 1000"):
        walk(SamplerPosition(offset=1000))


def test_the_order_does_not_depend_on_the_machine() -> None:
    """The first windows, written down: a change that moves them makes a run's next life another run's."""
    assert walk().take(8) == [283, 1624, 168, 0, 295, 264, 263, 568]


async def opened(spec: DataSpec, position: SamplerPosition) -> Samples:
    """As a replica of stage 0 opens its text."""
    return await asyncio.to_thread(open_samples, spec, 256, Reader("peer", 50, 24, 1 << 16), position)


@pytest.mark.parametrize("attention", ["whole", "document"])
async def test_stage_0_draws_each_sources_share_and_its_next_life_goes_on(mixed: DataSpec, attention: str) -> None:
    """A thousand windows come in microbatches, the second half of them by a reader that knows only the position. Each
    source's share is held out of its own."""
    spec = mixed.model_copy(update={"attention": attention})
    drawn: Counter[str] = Counter()
    position = SamplerPosition()
    for _ in range(2):
        samples = await opened(spec, position)
        for _ in range(10):
            inputs, _ = inputs_and_labels(await samples.draw())
            drawn += letters_of(inputs)
        position = SamplerPosition.model_validate(samples.position().model_dump())
        samples.close()
        held_out = letters_of(inputs_and_labels(samples.held_out)[0])
    assert position == SamplerPosition(epoch=1)
    assert tuple(drawn[letter] for letter in LETTERS) == QUOTAS
    windows = load_windows(spec, 256)
    assert [held_out[letter] for letter in LETTERS] == [3, 12, 9]
    held = windows.validation_indices(10**6)
    assert sorted(held) == list(range(len(held)))
    assert letters_of(windows.validation(held)[0]).total() == len(held)
    rows, _ = windows.train([windows.train_count - 1, 0, windows.train_count - 1])
    assert [letters_of(rows[number : number + 1]).most_common(1)[0][0] for number in range(3)] == ["c", "a", "c"]


def test_the_fingerprint_is_of_all_sources_in_their_order(mixed: DataSpec, tmp_path: Path) -> None:
    """It is another one if a source changes, if two change places, or if a document goes from one to another. It is the
    same wherever each lies; a node with another text is told so."""
    found = fingerprint_of(mixed)
    (tmp_path / "a").rename(tmp_path / "moved")
    moved = changed(mixed, 0, path=str(tmp_path / "moved"))
    assert fingerprint_of(moved) == found
    turned = moved.model_copy(update={"mixture": moved.mixture[::-1]})
    named = moved.model_copy(update={"fingerprint": found})
    assert fingerprint_of(named) == found
    assert load_windows(named, 256).train_count
    (tmp_path / "moved" / "000.txt").rename(tmp_path / "c" / "000a.txt")
    assert len({found, fingerprint_of(moved), fingerprint_of(turned)}) == 3
    for read in (fingerprint_of, lambda spec: load_windows(spec, 256)):
        with pytest.raises(UserError, match=f"run.data.mixture is not the run's: .*{found}") as caught:
            read(named)
        assert caught.value.exit_code is ExitCode.DATA


def test_what_is_wrong_with_a_source_names_it(mixed: DataSpec, tmp_path: Path) -> None:
    """Missing, too short, ids beyond the vocabulary: before anything starts, and as it is read."""
    absent = changed(mixed, 1, path=str(tmp_path / "none"))
    for look in (check_text_here, fingerprint_of, lambda spec: load_windows(spec, 256)):
        with pytest.raises(UserError, match=r"run\.data\.mixture\[1\]: .*none', which does not exist") as caught:
            look(absent)
        assert caught.value.exit_code is ExitCode.DATA
    (tmp_path / "short").mkdir()
    for number in range(12):
        (tmp_path / "short" / f"{number}.txt").write_text("tale")
    with pytest.raises(UserError, match=r"run\.data\.mixture\[2\]: the training text has"):
        load_windows(changed(mixed, 2, path=str(tmp_path / "short")).model_copy(update={"sequence_length": 64}), 256)
    write_table(tmp_path / "ids.parquet", {"input_ids": [[1, 2, 900]] * 60})
    ids = {"path": str(tmp_path / "ids.parquet"), "text_field": "input_ids"}
    made = mixed.model_copy(update={"tokenizer": "none", "mixture": changed(mixed, 0, **ids).mixture[:1]})
    with pytest.raises(UserError, match=r"run\.data\.mixture\[0\]: .*token id 900"):
        check_made_tokens(made, NoTokenizer(256))


def run_of(parts: object, *more: str) -> RunSpec:
    """The micro run on these sources."""
    return load_config(MICRO, [f"run.data.mixture={parts}", *more]).run


HERE = "{source: text, path: /home/owner/secret.txt}"


@pytest.mark.parametrize(
    ("parts", "more", "words"),
    [
        (f"[{HERE}, {{source: stdlib}}]", "run.data.streaming=true", ["run.data.mixture[1].source", "leave it off"]),
        (f"[{', '.join([HERE] * 9)}]", "run.data.block_windows=8", ["9 sources", "run.data.block_windows", "8"]),
        (f"[{', '.join([HERE] * 9)}]", "run.data.streaming=true", ["9 sources", "run.data.streaming", "one folder"]),
        ("[{source: stdlib, name: a}, {source: stdlib, name: a}]", "", ["two sources have one name (a, a)"]),
        (f"[{HERE}]", "run.data.path=more.txt", ["run.data.path is of a single source"]),
        (f"[{HERE}]", "run.data.source=text", ["run.data.source is of a single source"]),
        ("[{source: text}]", "", ["run.data.mixture[0].path is not set"]),
        ("[{source: stdlib}, {source: stdlib, path: a}]", "", ["run.data.mixture[1].path is set"]),
        ("[{source: huggingface, path: ./a}]", "", ["run.data.mixture[0].path is './a', a place on this machine"]),
        ("[{source: huggingface, path: json}]", "", ["run.data.mixture[0].path is 'json'", "OWNER/NAME"]),
        ("[{source: text, path: a, subset: b}]", "", ["run.data.mixture[0].subset"]),
        ("[{source: stdlib}]", "run.data.tokenizer=none", ["run.data.mixture[0].source is 'stdlib'"]),
        ("[{source: stdlib, weight: 0}]", "", ["run.data.mixture[0].weight"]),
        (f"[{HERE}, {{source: stdlib, weight: 0.0001}}]", "", ["run.data.mixture[1].weight", "never be read"]),
        ("[{source: stdlib, wieght: 1}]", "", ["run.data.mixture[0].wieght", "did you mean"]),
    ],
)
def test_what_cannot_be_mixed_is_refused_with_its_name_and_what_to_do(parts: str, more: str, words: list[str]) -> None:
    """As the configuration is read."""
    with pytest.raises(UserError) as caught:
        run_of(parts, *([more] if more else []))
    assert caught.value.exit_code is ExitCode.CONFIG
    for word in words:
        assert word in caught.value.message


def test_the_run_id_holds_the_sources_and_their_weights_and_no_place_of_them() -> None:
    """In their order; a dataset's name is part of it."""
    run = run_of(f"[{HERE}, {{source: huggingface, path: a/b}}]")
    assert "secret" not in run.agreed_json
    assert run_of("[{source: text, path: b.txt}, {source: huggingface, path: a/b}]").run_id == run.run_id
    for other in (
        f"[{{source: huggingface, path: a/b}}, {HERE}]",
        f"[{HERE}, {{source: huggingface, path: a/c}}]",
        f"[{HERE}, {{source: huggingface, path: a/b, weight: 2}}]",
        f"[{HERE}]",
    ):
        assert run_of(other).run_id != run.run_id


def test_the_card_of_a_model_names_the_shares_and_no_place_of_who_exports_it() -> None:
    """The settings on it, for each source, hold neither a path nor where tokens were prepared."""
    mixed = run_of(f"[{HERE}, {{source: huggingface, path: a/b, weight: 2}}, {{source: stdlib, weight: 0.5}}]")
    card = model_card(Gathered(mixed, {}, None, "1.0"), {}, 1, "made")
    assert (
        "a text of the owner's (28.6 %); a/b (57.1 %); the source files of Python's standard library (14.3 %)" in card
    )
    assert "path: (the owner's)" in card
    prepared = load_config(MICRO, ["run.data.source=text", "run.data.path=/secret", "run.data.prepared=/secret/to"]).run
    assert "secret" not in card + model_card(Gathered(prepared, {}, None, "1.0"), {}, 1, "made")


@pytest.mark.parametrize("attention", ["whole", "document"])
def test_a_prepared_mixture_gives_the_same_windows_in_the_same_order(
    mixed: DataSpec, tmp_path: Path, attention: str
) -> None:
    """That holds for windows held out and to train on, with other weights as well. What was there already is not read
    again. The fingerprint is that of the text, and none of the text need be there."""
    spec = mixed.model_copy(update={"attention": attention})
    whole, there = load_windows(spec, 256), str(tmp_path / "tokens")
    done = prepare_run(spec, ByteTokenizer(), Path(there))
    assert len(done) == 3
    found = fingerprint_of(spec)
    for letter in ("a", "b.jsonl.gz", "c"):
        (tmp_path / letter).rename(tmp_path / f"away-{letter}")
    gone = tuple(part.model_copy(update={"path": None, "weight": part.weight * 2}) for part in spec.mixture)
    held = spec.model_copy(update={"prepared": there, "mixture": gone, "fingerprint": found})
    check_text_here(held)
    assert fingerprint_of(held) == found
    read = load_windows(held, 256)
    assert read.held_out(24).tolist() == whole.held_out(24).tolist()
    first, second = (each.walk(3, "peer").take(1500) for each in (whole, read))
    assert second == first
    assert read.rows(second[:300]).tolist() == whole.rows(first[:300]).tolist()


def test_of_a_prepared_mixture_each_source_is_held_to_what_it_should_be(mixed: DataSpec, tmp_path: Path) -> None:
    """One is missing, one is of another source, the whole of another run, one by its own fingerprint."""
    there = tmp_path / "tokens"
    done = prepare_run(mixed, ByteTokenizer(), there)
    held = mixed.model_copy(update={"prepared": str(there)})
    named = changed(held, 1, fingerprint=done[0].fingerprint)
    with pytest.raises(UserError, match=r"run\.data\.mixture\[1\]: .*is not the run's"):
        check_text_here(named)
    with pytest.raises(UserError, match=r"run\.data\.mixture is not the run's"):
        check_text_here(held.model_copy(update={"fingerprint": "text-" + "0" * 32}))
    (there / "source-02").rename(there / "source-05")
    with pytest.raises(UserError, match=r"run\.data\.mixture\[2\]: run\.data\.prepared.* no prepared text"):
        check_text_here(held)
    (there / "source-01").rename(there / "source-02")
    (there / "source-05").rename(there / "source-01")
    check_text_here(held)
    with pytest.raises(UserError, match=r"run\.data\.mixture is not the run's"):
        check_text_here(held.model_copy(update={"fingerprint": fingerprint_of(mixed)}))
    with pytest.raises(UserError, match=r"run\.data\.mixture\[1\]: .* another was prepared there"):
        prepare_run(mixed, ByteTokenizer(), there)


def test_a_tokenizer_learns_from_each_source_by_its_weight(mixed: DataSpec) -> None:
    """As far as each goes: of the first 20 documents, and when the small ones have come to their end."""
    for most_bytes in (20 * 169, 1 << 30):
        text = TextTaken(mixed, most_bytes)
        learnt = Counter(piece[0] for piece in text)
        read = learnt + Counter(tried[0] for tried in text.tried)
        assert learnt.total() == text.documents
        if most_bytes < 1 << 30:
            assert abs(read["b"] - read["c"] / 0.75) <= 2
        else:
            assert (read["b"], read["c"]) == (20, 100)
