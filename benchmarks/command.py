"""How every benchmark is called: what its caller can change is refused in one line, before anything is measured."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from noloco_node.errors import UserError
from noloco_node.training.compute_device import check_device


def command(main: Callable[[], object]) -> NoReturn:
    """Run a benchmark's `main` and end the process: by what it returns, or by a line that names setting, value and
    remedy, and that error's exit code."""
    try:
        ended = main()
    except UserError as error:
        named = Path(sys.argv[0]).stem
        print(f"benchmarks.{named}: {error.message}; {error.remedy}".replace("\n", " "), file=sys.stderr)
        sys.exit(int(error.exit_code))
    sys.exit(ended if isinstance(ended, int) else 0)


def parser_of(doc: str | None, *, out: bool = True) -> argparse.ArgumentParser:
    """A benchmark's parser: its help is the module's docstring, and `--out` names the file of its figures."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, allow_abbrev=False, formatter_class=layout)
    if out:
        parser.add_argument("--out", type=results_file)
    return parser


def save(out: Path | None, figures: object) -> None:
    """Write the figures where `--out` says."""
    if out is not None:
        out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def whole(text: str) -> int:
    """A whole number, 1 or more."""
    number = int(text) if text.strip().isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not one: name a whole number, 1 or more")
    return number


def positive(text: str) -> float:
    """A finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number <= 0.0:
        raise argparse.ArgumentTypeError(f"{text!r} is no finite number above 0: name one")
    return number


def results_file(text: str) -> Path:
    """Where figures can be written: hours of measuring are not lost to a folder that is missing."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder: name a file in it")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: there is no folder {str(path.parent)!r}: make it")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: name another place")
    return path


def folder_with(*files: str) -> Callable[[str], Path]:
    """A type of argument: a folder that holds at least one of these, which are paths in it."""

    def folder(text: str) -> Path:
        path = Path(text)
        if not path.is_dir():
            raise argparse.ArgumentTypeError(f"there is no folder {text!r}: name one that holds {' or '.join(files)}")
        if not any((path / file).is_file() for file in files):
            raise argparse.ArgumentTypeError(f"{text!r} does not hold {' or '.join(files)}: name a folder that does")
        return path

    return folder


def device(text: str) -> str:
    """A device of this machine."""
    try:
        check_device(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(f"{error.message}; {error.remedy}") from None
    return text
