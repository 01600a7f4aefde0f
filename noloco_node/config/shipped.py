"""Configurations that come with the package: each has a name, and lies where the package was installed."""

from __future__ import annotations

import itertools
import re
from importlib.resources import files
from pathlib import Path

from noloco_node.errors import ExitCode, UserError, near_words, suggestion

_FOLDER = Path(str(files("noloco_node"))) / "configs"


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
