"""Files as they are read: the configurations that come with the package, by name, YAML as settings are written in it,
and plain files of a folder from somewhere else: no links, no devices, no longer than they may be."""

from __future__ import annotations

import errno
import itertools
import os
import re
import stat
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import yaml
from yaml.constructor import ConstructorError

from noloco_node.errors import ExitCode, UserError, near_words, suggestion

_FOLDER = Path(str(files("noloco_node"))) / "configs"
SMALL_BYTES = 1 << 20
"""A settings file, a small file, and a line of any file are read up to so many bytes, or characters."""
MAX_VALUES = 20_000
"""At most so many values count after aliases have been replaced: a few lines of aliases can stand for millions."""

_EXPONENT_FLOAT = re.compile(r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$")


def shipped_configs() -> dict[str, Path]:
    """Files by name, in order: `tiny`, or `lab/first` where it lies in a folder."""
    found = {path.relative_to(_FOLDER).with_suffix("").as_posix(): path for path in _FOLDER.rglob("*.yaml")}
    return dict(sorted(found.items(), key=lambda item: ("/" in item[0], item[0])))


def first_sentence(path: Path) -> str:
    """What a configuration says of itself at its head, up to the first full stop."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
    return re.split(r"(?<=[.?])\s", " ".join(line.lstrip("# ") for line in lines), maxsplit=1)[0]


def find_config(path: Path) -> Path:
    """The file that CONFIG names: a file, or else what comes with the package under that name."""
    shipped = shipped_configs()
    return shipped[str(path)] if str(path) in shipped and not path.is_file() else path


def nearest_config(path: Path) -> str:
    """What to name instead of a configuration file that is not there."""
    names = list(shipped_configs())
    meant = suggestion(near_words(path.with_suffix("").as_posix().removeprefix("configs/"), names))
    return f"{meant + ' ' if meant else ''}name a YAML file, or one that comes with noloco-node: {', '.join(names)}"


def shipped_config(name: str) -> Path:
    """The file of that name. Raises UserError (CONFIG) with the nearest name where none comes with the package."""
    path = shipped_configs().get(name)
    if path is None:
        message = f"no configuration called {name} comes with noloco-node"
        raise UserError(ExitCode.CONFIG, message, nearest_config(Path(name)))
    return path


def read_config(path: Path) -> dict[str, Any]:
    """The settings in the file that CONFIG names, as they are written. Raises UserError (CONFIG)."""
    try:
        with find_config(path).open(encoding="utf-8") as file:
            text = file.read(SMALL_BYTES + 1)  # bounded: the path may be a device
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error), nearest_config(path)) from None
    except UnicodeDecodeError:
        why = "it is no text in UTF-8 (an editor may have saved it as UTF-16)"
        raise _unreadable(path, why, f"save it as UTF-8: iconv -f UTF-16 -t UTF-8 {path} > new.yaml") from None
    try:
        raw: object = parse_yaml(text)
    except yaml.YAMLError as error:
        raise _invalid_yaml(path, error) from None
    if not isinstance(raw, dict):
        found = "empty" if raw is None else f"a {type(raw).__name__}"
        raise UserError(
            ExitCode.CONFIG,
            f"{path} is {found}, not a set of settings",
            "it needs `run:`, and may have `node:`, `local_swarm:` and `lab:`; noloco-node config init writes one",
        )
    return cast("dict[str, Any]", raw)


def _unreadable(path: Path, why: str, remedy: str) -> UserError:
    return UserError(ExitCode.CONFIG, f"the configuration file {path} cannot be read: {why}", remedy)


def _invalid_yaml(path: Path, error: yaml.YAMLError) -> UserError:
    mark = getattr(error, "problem_mark", None)
    place = f", line {mark.line + 1}, column {mark.column + 1}" if isinstance(mark, yaml.Mark) else ""
    reason = getattr(error, "problem", None) or str(error)
    return UserError(
        ExitCode.CONFIG,
        f"{path}{place}: not valid YAML: {reason}",
        "correct that line: indentation in spaces, `name: value`, each name once",
    )


def parse_yaml(text: str) -> object:
    """The value that `text` stands for. Raises yaml.YAMLError for what is no YAML, is larger or deeper than any
    settings are, or sets a key twice. It does so too for a value that cannot be made (a date in month 13), and for a
    request for anything but plain values."""
    if len(text) > SMALL_BYTES:
        raise yaml.YAMLError(f"it has {len(text):,} characters, and {SMALL_BYTES:,} are allowed")
    try:
        value: object = yaml.load(text, _Loader)
    except RecursionError:
        raise yaml.YAMLError("its groups lie too deep within each other") from None
    _check_size(value)
    return value


class _Loader(yaml.SafeLoader):
    """Safe YAML in which 1e-3 is a number (YAML 1.1 reads a string) and a repeated key is an error."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Read a mapping as it is written, before others are merged into it; a repeated key raises ConstructorError."""
        node, seen = super().compose_mapping_node(anchor), set[str]()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise ConstructorError(None, None, f"'{key.value}' is set twice", key.start_mark)
                seen.add(key.value)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Build a value; raises ConstructorError where Python cannot make what it says."""
        try:
            return super().construct_object(node, deep)  # pyright: ignore
        except (ValueError, OverflowError) as error:
            raise ConstructorError(None, None, f"a value that cannot be: {error}", node.start_mark) from None


_Loader.add_implicit_resolver(  # pyright: ignore[reportUnknownMemberType]
    "tag:yaml.org,2002:float", _EXPONENT_FLOAT, list("-+.0123456789")
)


def _check_size(value: object) -> None:
    """Raise yaml.YAMLError for more values than any settings have; what an alias stands for counts each time."""
    waiting, count = [value], 0
    while waiting:
        each = waiting.pop()
        count += 1
        if count > MAX_VALUES:
            raise yaml.YAMLError(f"more than {MAX_VALUES:,} values, counting what aliases stand for")
        if isinstance(each, dict):
            waiting += cast("dict[object, object]", each).values()
        elif isinstance(each, list):
            waiting += cast("list[object]", each)


def home_place(name: str) -> Path:
    """The place of that name, with `~` for a home folder as in a shell. Where nobody knows that one it stays: pathlib's
    own `expanduser` raises RuntimeError."""
    return Path(os.path.expanduser(name))


def is_plain(path: Path) -> bool:
    """Whether an ordinary file lies there, and no link to one."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def check_plain(path: Path) -> None:
    """Raise OSError where something else than an ordinary file lies there, or nothing. Through a link a folder from
    somewhere else would have this node read, or write, what lies outside of it."""
    if not stat.S_ISREG(path.lstat().st_mode):
        raise OSError(errno.EINVAL, "it is a link or no ordinary file", str(path))


def read_small(path: Path) -> bytes:
    """An ordinary file's content. OSError where it is none, or longer than `SMALL_BYTES`."""
    check_plain(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        content = file.read(SMALL_BYTES + 1)
    if len(content) > SMALL_BYTES:
        raise OSError(errno.EFBIG, f"it is longer than {SMALL_BYTES:,} bytes", str(path))
    return content
