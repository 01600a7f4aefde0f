"""A folder that holds a tokenizer, as far as its files tell: one short name for what they say, wherever it lies.

Loads nothing heavy, and runs nothing of what it reads. A pointer stands for a large file that nobody has fetched.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from noloco_node.config.data_spec import BYTES, FOLDER, NO_TOKENIZER, NOT_READ, DataSpec
from noloco_node.config.files import home_place
from noloco_node.config.settings import canonical_json
from noloco_node.errors import ExitCode, UserError

_BEGINNINGS = (
    b"version https://git-lfs.github.com/spec/",
    b"version https://hawser.github.com/spec/",
    b"/annex/objects/",
)
POINTER = "it is a pointer of Git LFS (or of git-annex) and not the file itself"
FETCH = "fetch the file with `git lfs pull` (or `git annex get`) in its repository, or download it"


def is_pointer(content: bytes) -> bool:
    """Whether the first bytes of a file, all where it is that small, are such a pointer."""
    # Git LFS itself bounds a pointer so.
    return len(content) <= 1024 and content.startswith(_BEGINNINGS)


_WHOLE = "tokenizer.json"
"""This file holds all of a tokenizer; beside it the files of older forms are not read."""
_CONFIG = "tokenizer_config.json"
_FORMS: Mapping[str, frozenset[str]] = {
    _WHOLE: frozenset({"version", "truncation", "padding"}),
    _CONFIG: frozenset(
        {
            "auto_map",
            "backend",
            "chat_template",
            "clean_up_tokenization_spaces",
            "is_local",
            "local_files_only",
            "max_length",
            "model_input_names",
            "model_max_length",
            "name_or_path",
            "pad_to_multiple_of",
            "padding_side",
            "processor_class",
            "special_tokens_map_file",
            "stride",
            "tokenizer_file",
            "transformers_version",
            "truncation_side",
            "truncation_strategy",
        }
    ),
    "special_tokens_map.json": frozenset(),
    "added_tokens.json": frozenset(),
}
"""Files of JSON, each with its keys that say nothing of which tokens a text has. They say where the files lay, what
saved them, how a chat is written, and how long texts are cut."""
_OLDER = ("vocab.json", "merges.txt", "vocab.txt", "*.model", "*.tiktoken", "tekken.json")
_OF_CHATS = ("chat_template.jinja", "chat_template.json")
_MOST_BYTES = 512 << 20
"""A file has at most so many bytes; the largest that are known have a tenth."""
_AGAIN = "copy it again from its maker, or make one with noloco-node tokenizer train"


def fingerprint_of_tokenizer(folder: Path) -> str:
    """`tokenizer-` and 32 hex digits, of the files that say which tokens a text has, and of nothing else in the folder.
    It is the same wherever the folder lies, and after transformers has loaded and saved it. Raises UserError (DATA) for
    a folder without a tokenizer, and for damaged files."""
    found = hashlib.blake2b(digest_size=16)
    for name, said in sorted(_said(folder)):
        for part in (name.encode(), said):
            found.update(len(part).to_bytes(8, "little"))
            found.update(part)
    return FOLDER + found.hexdigest()


def with_tokenizer(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration as written, with the fingerprint of the folder that `run.data.tokenizer` names. Other names are
    left for the hub. Raises UserError (DATA) if a place of this machine is missing without a fingerprint that says what
    is meant. It does so too if it holds no tokenizer, or if the given fingerprint is another's."""
    run = raw.get("run")
    data = cast("dict[str, Any]", run).get("data") if isinstance(run, dict) else None
    settled = cast("dict[str, Any]", data) if isinstance(data, dict) else {}
    name, given = settled.get("tokenizer"), settled.get("tokenizer_fingerprint")
    if not isinstance(name, str) or name in (BYTES, NO_TOKENIZER):
        return dict(raw)
    folder = home_place(name)
    if not folder.is_dir():
        if name.startswith(("/", ".", "~")) and given is None:
            raise _unusable(name, "it does not exist", "name the folder of a tokenizer, or a name of the hub")
        return dict(raw)
    found = fingerprint_of_tokenizer(folder)
    if given not in (None, found):
        raise _another(name, found, str(given))
    return {**raw, "run": {**cast("dict[str, Any]", run), "data": {**settled, "tokenizer_fingerprint": found}}}


def check_tokenizer(spec: DataSpec) -> None:
    """Raise UserError (DATA) where the run's tokenizer is a folder of each volunteer's own, and what is named here is
    none, or holds another."""
    if not spec.own_tokenizer:
        return
    remedy = (
        "get its folder from the run's owner, or out of a model that it exported, and say where it lies with "
        "--set run.data.tokenizer=DIR"
    )
    if spec.tokenizer == NOT_READ:
        what = f"run.data.tokenizer is not set, and the run's is {spec.tokenizer_fingerprint}"
        raise UserError(ExitCode.DATA, f"{what}, of which each node that needs it has a copy", remedy)
    folder = home_place(spec.tokenizer)
    if not folder.is_dir():
        why = f"it is no folder here, and the run's tokenizer is {spec.tokenizer_fingerprint}"
        raise _unusable(spec.tokenizer, why, remedy)
    found = fingerprint_of_tokenizer(folder)
    if found != spec.tokenizer_fingerprint:
        raise _another(spec.tokenizer, found, spec.tokenizer_fingerprint or "")


def files_to_copy(folder: Path) -> list[Path]:
    """All files of a tokenizer in its folder, to be put beside a model of whatever kind. There are none if that is no
    folder, or if the model that lies beside it says how it is to be read."""
    if not (folder / _CONFIG).is_file() or "tokenizer_class" not in _json(folder / _CONFIG):
        return []
    patterns = (*_FORMS, *_OLDER, *_OF_CHATS)
    return sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})


def _said(folder: Path) -> Iterator[tuple[str, bytes]]:
    """What each file says of which tokens a text has, by its name."""
    try:
        files = {path.name for path in folder.iterdir()}
    except OSError as error:
        raise _unusable(str(folder), f"it cannot be read: {error.strerror or error}", _AGAIN) from None
    for name, silent in _FORMS.items():
        if name not in files:
            continue
        said = {key: value for key, value in _json(folder / name).items() if key not in silent and value is not None}
        if name == _CONFIG and "tokenizer_class" not in said and "config.json" in files:
            said["model_type"] = _json(folder / "config.json").get("model_type")  # the library goes by it then
        if said:
            yield name, canonical_json(said).encode()
    if _WHOLE in files:
        return
    older = sorted({path.name for pattern in _OLDER for path in folder.glob(pattern)})
    if not older:
        wanted = f"{_WHOLE}, {', '.join(_OLDER)}"
        raise _unusable(str(folder), f"it holds no tokenizer (none of {wanted})", "name the folder that holds one")
    for name in older:
        yield name, _bytes(folder / name)


def _json(path: Path) -> dict[str, Any]:
    try:
        parsed: object = json.loads(_bytes(path), parse_constant=_no_number)
    except (ValueError, RecursionError):
        raise _unusable(str(path), "it is no JSON, or it is damaged", _AGAIN) from None
    if not isinstance(parsed, dict):
        raise _unusable(str(path), "it is no JSON object", _AGAIN)
    return cast("dict[str, Any]", parsed)


def _no_number(name: str) -> None:
    raise ValueError(name)


def _bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            read = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise _unusable(str(path), f"it cannot be read: {error.strerror or error}", _AGAIN) from None
    if is_pointer(read):
        raise _unusable(str(path), POINTER, FETCH)
    if len(read) > _MOST_BYTES:
        raise _unusable(str(path), f"it is larger than {_MOST_BYTES >> 20} MiB", "name the folder of a tokenizer")
    return read


def _another(name: str, found: str, wanted: str) -> UserError:
    return UserError(
        ExitCode.DATA,
        f"the tokenizer of run.data.tokenizer ('{name}') is not the run's: its fingerprint is {found}, and "
        f"run.data.tokenizer_fingerprint is {wanted}",
        "get the folder that the run's owner has; an owner that means this tokenizer sets "
        "run.data.tokenizer_fingerprint to its own, or leaves it out, which makes another run",
    )


def _unusable(name: str, why: str, remedy: str) -> UserError:
    return UserError(ExitCode.DATA, f"run.data.tokenizer is '{name}': {why}", remedy)
