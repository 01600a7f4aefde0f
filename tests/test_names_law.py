"""One name for one thing: no two public classes of the package share one, and tests keep to what has a public name."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "noloco_node"


def shared(trees: dict[str, ast.Module]) -> dict[str, list[str]]:
    """Name -> files, of public classes that more than one file has."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(path)
    return {name: paths for name, paths in found.items() if len(paths) > 1}


def test_no_two_public_classes_share_a_name() -> None:
    """Who reads it in one file need not ask which of them is meant."""
    files = sorted(PACKAGE.rglob("*.py"))
    assert shared({str(path): ast.parse(path.read_text(encoding="utf-8")) for path in files}) == {}


def test_the_law_sees_a_shared_name() -> None:
    """But not that of a private class, which stays in its file."""
    one, other = ast.parse("class Course: ...\nclass _Row: ..."), ast.parse("class Course: ...\nclass _Row: ...")
    assert shared({"one": one, "other": other}) == {"Course": ["one", "other"]}
