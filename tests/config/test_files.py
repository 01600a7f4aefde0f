"""Hostile and broken YAML is refused fast, with one message; sound YAML is read as ever."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import yaml

from noloco_node.config.files import MAX_VALUES, SMALL_BYTES, parse_yaml
from noloco_node.config.load import load_config
from noloco_node.errors import ExitCode, UserError

BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n + 1}: &a{n + 1} [*a{n}, *a{n}]\n" for n in range(40))
BOMB += "run: {model: {config: {model_type: llama, bomb: *a40}}}\n"
MODEL = "run: {name: r, model: {stages: 1, config: {model_type: llama, %s}}}\n"

REFUSED = {
    "aliases that double": (BOMB, "values"),
    "brackets": ("[" * 500, "too deep"),
    "braces": ("a: " + "{b: " * 500, "too deep"),
    "indented": ("".join(f"{' ' * n}k:\n" for n in range(900)), "too deep"),
    "closed brackets": ("[" * 500 + "]" * 500, "too deep"),
    "a list of many": ("a: [" + "1," * (MAX_VALUES + 1) + "]", "values"),
    "a group in itself": ("a: &a [*a]", "values"),
    "many characters": ("#" + "x" * (SMALL_BYTES + 1), "characters"),
    "a date in month 13": ("a: 2024-13-45", "cannot be"),
    "a number of 5,000 digits": ("a: " + "9" * 5000, "cannot be"),
    "a call": ("a: !!python/object/apply:os.system [true]", "constructor"),
    "a class": ("a: !!python/name:os.system", "constructor"),
    "a control character": ("a: \x00", "special characters"),
    "a tab": ("a:\n\t- 1", "token"),
    "an alias of nothing": ("a: *b", "undefined alias"),
    "bad base64": ("a: !!binary ü", "convert"),
    "a list as a name": ("? [1, 2]\n: 3", "unhashable"),
}


@pytest.mark.parametrize(("text", "words"), REFUSED.values(), ids=list(REFUSED))
def test_what_is_no_settings_file_is_refused_at_once_in_one_message(text: str, words: str, tmp_path: Path) -> None:
    """Within two seconds on a busy machine (a bomb took minutes), on one screen."""
    path = tmp_path / "c.yaml"
    path.write_text(text, encoding="utf-8")
    began = time.process_time()
    with pytest.raises(UserError) as caught:
        load_config(path)
    assert time.process_time() - began < 4.0
    assert caught.value.exit_code is ExitCode.CONFIG
    assert words in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_sound_yaml_with_aliases_is_read() -> None:
    """Numbers with an exponent are read too."""
    assert parse_yaml("a: &x {b: 1e-3}\nc: *x\nd: {<<: *x, e: 2}") == {
        "a": {"b": 1e-3},
        "c": {"b": 1e-3},
        "d": {"b": 1e-3, "e": 2},
    }
    assert parse_yaml("") is None


def test_a_key_may_replace_a_merged_one_in_a_group_that_is_merged_again() -> None:
    """It was refused as set twice."""
    raw = parse_yaml("x: &x {k: 1}\nrun: {inner: &a {<<: *x, k: 2}}\nlab: {<<: *a}")
    assert raw == {"x": {"k": 1}, "run": {"inner": {"k": 2}}, "lab": {"k": 2}}


def test_a_key_that_is_set_twice_is_an_error() -> None:
    """The same holds in a group within."""
    with pytest.raises(yaml.YAMLError, match="set twice"):
        parse_yaml("a: {b: 1, b: 2}")


@pytest.mark.parametrize("name", ["num_hidden_layers", "num_experts", "num_labels", "n_routed_experts"])
def test_a_model_of_a_million_parts_is_refused_before_it_is_laid_out(name: str, tmp_path: Path) -> None:
    """It took more than a minute, at a gigabyte."""
    path = tmp_path / "c.yaml"
    path.write_text(MODEL % f"{name}: 1000000", encoding="utf-8")
    with pytest.raises(UserError, match=rf"model\.config\.{name} is 1000000") as caught:
        load_config(path)
    assert caught.value.exit_code is ExitCode.CONFIG


def test_a_device_is_no_settings_file() -> None:
    """It has no end."""
    with pytest.raises(UserError):
        load_config(Path("/dev/zero"))
