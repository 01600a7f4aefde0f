"""Token ids whose tokenizer nobody here has: they are trained on all the same, and text is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest

from noloco_node.cli.main import main
from noloco_node.config.load import load_config, validate
from noloco_node.data.encoding import check_made_tokens, fitting_tokenizer
from noloco_node.data.windows import load_windows
from noloco_node.errors import ExitCode, UserError
from noloco_node.exporting.write import merge_run
from tests.data.made_files import write_table
from tests.data.test_made_tokens import laid_out, tokens_spec
from tests.data.test_sources import text_spec
from tests.made_runs import MICRO, finished

ROWS = [[1 + number % 90, 7, 200 + number % 50, 3, 250] * 5 for number in range(60)]
IDS = ("run.data.source=text", "run.data.holdout=0.3", "run.data.text_field=input_ids", "run.data.tokenizer=none")


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Token ids of a vocabulary of 256, without an end between documents."""
    write_table(tmp_path / "rows.parquet", {"input_ids": pa.array(ROWS, pa.list_(pa.int32()))})
    return tmp_path / "rows.parquet"


def test_ids_are_packed_as_they_are(rows: Path) -> None:
    """Nothing is put between documents, since nobody knows what their end would be."""
    training, held = laid_out(load_windows(tokens_spec(rows, tokenizer="none"), 256))
    for part in (training, held):
        assert part[:25] in ROWS
        assert part[25:50] in ROWS


def test_an_id_beyond_the_models_vocabulary_is_refused_before_anything_starts(rows: Path) -> None:
    """The model's is the only one that there is."""
    spec = tokens_spec(rows, tokenizer="none")
    check_made_tokens(spec, fitting_tokenizer(spec, 251))
    with pytest.raises(UserError, match=r"token id 250 in .*run\.model\.config\.vocab_size is 250") as caught:
        check_made_tokens(spec, fitting_tokenizer(spec, 250))
    assert caught.value.exit_code is ExitCode.DATA
    with pytest.raises(UserError, match="outside the model's vocabulary"):
        load_windows(spec, 250)


def test_text_without_a_tokenizer_is_refused_before_anything_starts(tmp_path: Path) -> None:
    """In a column of rows, in plain files, and in the standard library."""
    write_table(tmp_path / "rows.parquet", {"text": ["tale and so on"] * 50})
    (tmp_path / "book.txt").write_text("tale and so on " * 200)
    for place in (tmp_path / "rows.parquet", tmp_path / "book.txt"):
        spec = text_spec(place, tokenizer="none")
        with pytest.raises(UserError, match=r"tokenizer is 'none', and .* holds text in '.*'") as caught:
            check_made_tokens(spec, fitting_tokenizer(spec, 256))
        assert caught.value.exit_code is ExitCode.DATA
        with pytest.raises(UserError, match="there is no tokenizer for text such as 'tale"):
            load_windows(spec, 256)
    raw = load_config(MICRO).model_dump(mode="json")
    raw["run"]["data"]["tokenizer"] = "none"
    with pytest.raises(UserError, match=r"data\.source is 'stdlib', which is text"):
        validate(raw, "a file")


def test_a_model_of_ids_is_exported_and_what_it_cannot_do_is_said(
    rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Loss and perplexity as ever; no bits a byte, no text, and a sample of ids."""
    run = load_config(MICRO, (*IDS, f"run.data.path={rows}")).run
    folders = [finished(tmp_path / f"node-{stage}", stage, run=run) for stage in (0, 1)]
    out = tmp_path / "out"
    assert main(["export", *map(str, folders), "--out", str(out)]) == ExitCode.OK
    assert not [path.name for path in out.iterdir() if "token" in path.name]
    assert "import AutoModelForCausalLM\n" in (out / "README.md").read_text()
    assert "eos_token_id" in json.loads((out / "config.json").read_text())
    capsys.readouterr()
    assert main(["eval", str(out), "--set", f"run.data.path={rows}"]) == ExitCode.OK
    told = capsys.readouterr().out
    assert "bits a byte are not known" in told
    merged = merge_run(run, [folder / "final" for folder in folders], tmp_path / "merged", lambda _: None)
    assert f"{merged.loss:.4f}" in told
    assert [int(word) for word in merged.sample.read_text().splitlines()[1].split()]
    assert main(["generate", str(out), "--prompt", "def"]) == ExitCode.RUN_FOLDER
    assert "has no tokenizer" in capsys.readouterr().err
