"""Tokenizers that others name: they run no program."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from noloco_node.config.data_spec import DataSpec
from noloco_node.data.tokenizers import load_tokenizer
from noloco_node.errors import ExitCode, UserError
from noloco_node.exporting.evaluation import Wish, continued
from tests.config.test_tokenizer_files import made


def test_a_tokenizer_runs_no_program_and_nobody_is_asked_whether_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run from a stranger names it; the library would ask the user at the keyboard."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    ran, folder = tmp_path / "ran", tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "theirs.py").write_text(f"open({str(ran)!r}, 'w')\n")
    told = {"tokenizer_class": "Theirs", "auto_map": {"AutoTokenizer": ["theirs.Theirs", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    with pytest.raises(UserError) as caught:
        load_tokenizer(DataSpec(tokenizer=str(folder)))
    assert caught.value.exit_code is ExitCode.DATA
    assert not ran.exists()


@pytest.mark.parametrize("model", [{}, {"type": "Newer"}])
def test_a_tokenizer_of_a_newer_library_is_named_and_no_defect(model: dict[str, str], tmp_path: Path) -> None:
    """The library says so by a bare Exception: it was a traceback, with `generate` as well."""
    file = made(tmp_path) / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_bytes()), "model": model}))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="which transformers cannot load: data did not match"):
        load_tokenizer(DataSpec(tokenizer=str(tmp_path)))
    with pytest.raises(UserError, match="cannot be used: data did not match"):
        continued(tmp_path, Wish("once", 1, 0.0, 0), lambda _: None)
