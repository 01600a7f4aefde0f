"""How many statements the package has, docstrings aside: a revision's whole, room by room, and what another added.

python -m benchmarks.statements REVISION [REVISION]

A statement is what Python's grammar calls one, those within functions, classes and branches included; a string that
stands alone (a docstring, and the words beneath a setting) is none. So it counts neither lines nor characters.
"""

from __future__ import annotations

import ast
import io
import subprocess
import tarfile
from collections import Counter
from pathlib import PurePosixPath

from benchmarks.command import command, parser_of

PACKAGE = "noloco_node"


def statements(source: str) -> int:
    """Of one file. SyntaxError where it is none of this Python's."""
    return sum(isinstance(node, ast.stmt) and not _is_text(node) for node in ast.walk(ast.parse(source)))


def by_room(revision: str) -> Counter[str]:
    """Statements of each room of the package as git has it at a revision. CalledProcessError where it has none."""
    archive = subprocess.run(["git", "archive", revision, PACKAGE], check=True, stdout=subprocess.PIPE).stdout
    counts: Counter[str] = Counter()
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        for member in files:
            path = PurePosixPath(member.name)
            content = files.extractfile(member) if path.suffix == ".py" else None
            if content is not None:
                counts[path.parts[1].removesuffix(".py")] += statements(content.read().decode())
    return counts


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def main() -> None:
    """Count and print."""
    parser = parser_of(__doc__, out=False)
    parser.add_argument("revisions", nargs="+", metavar="REVISION", help="one or two, the earlier one first")
    counted = [by_room(revision) for revision in parser.parse_args().revisions[:2]]
    for room in sorted(set().union(*counted)):
        _row(room, [count[room] for count in counted])
    _row("all", [count.total() for count in counted])


def _row(name: str, counts: list[int]) -> None:
    moved = f"{counts[1] - counts[0]:+7,}" if len(counts) > 1 else ""
    print(f"{name:16}", *(f"{count:7,}" for count in counts), moved)


if __name__ == "__main__":
    command(main)
