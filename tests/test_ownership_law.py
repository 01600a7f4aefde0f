"""An object's state is written where its class is: a protocol that sets a field of another's object shares an owner."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sources import tree_of

PACKAGE = Path(__file__).parent.parent / "noloco_node"
ROOMS = ("averaging", "state_transfer", "placement")
"""Those that keep the law. What others still write from outside has one writer each."""

FILES = [path for room in ROOMS for path in sorted((PACKAGE / room).rglob("*.py"))]


def written(node: ast.AST) -> Iterator[ast.Attribute]:
    """The attributes that a statement assigns."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        targets = [node.target]
    for target in targets:
        for each in target.elts if isinstance(target, ast.Tuple | ast.List) else [target]:
            if isinstance(each, ast.Attribute):
                yield each


def is_own(attribute: ast.Attribute) -> bool:
    """Whether it is the object's own."""
    return isinstance(attribute.value, ast.Name) and attribute.value.id in ("self", "cls")


def foreign(tree: ast.Module) -> list[str]:
    """Assignments to an attribute of another object that no class of this file has."""
    every = [attribute for node in ast.walk(tree) for attribute in written(node)]
    declared = {
        node.target.id
        for made in ast.walk(tree)
        if isinstance(made, ast.ClassDef)
        for node in made.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    known = declared | {attribute.attr for attribute in every if is_own(attribute)}
    return [ast.unparse(each) for each in every if not is_own(each) and each.attr not in known]


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_no_file_of_these_rooms_writes_what_is_anothers(path: Path) -> None:
    """It calls a method of the owner instead."""
    assert foreign(tree_of(path)) == []


def test_the_law_sees_what_it_looks_for() -> None:
    """It lets a file write the fields of its own classes."""
    own = "class Row:\n    size: int\n"
    text = f"{own}def grow(row: Row, other: object) -> None:\n    row.size += 1\n    other.open = True\n"
    assert foreign(ast.parse(text)) == ["other.open"]
    assert len(FILES) > 12
