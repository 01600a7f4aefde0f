"""An object's state is written where its class is: a protocol that sets a field of another's object shares an owner. So
is a transport called where its answers are judged."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sources import nodes_of, tree_of

PACKAGE = Path(__file__).parent.parent / "noloco_node"
ROOMS = ("averaging", "state_transfer", "placement")
"""Those that keep the law. What others still write from outside has one writer each."""

RAW_CALL = {"transport/interface", "transport/calls"}
MAY_VIOLATE = {"transport/libp2p", "transport/memory", "transport/calls"}

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


def _uses(path: Path) -> tuple[bool, bool]:
    """Whether a file calls a transport by itself, and whether it makes ProtocolViolations."""
    raw = violates = False
    for node in nodes_of(path):
        if isinstance(node, ast.Attribute) and node.attr == "call":
            raw = raw or ast.unparse(node.value).endswith("transport")
        if isinstance(node, ast.Call):
            raw = raw or any(keyword.arg == "max_answer_bytes" for keyword in node.keywords)
            violates = violates or ast.unparse(node.func).endswith("ProtocolViolation")
    return raw, violates


def test_nobody_else_calls_a_transport_or_says_what_breaks_the_protocol() -> None:
    """So no caller can forget to judge: what it finds wrong itself is a `BadAnswer`, which fails loudly unbooked."""
    uses = {path.relative_to(PACKAGE).with_suffix("").as_posix(): _uses(path) for path in PACKAGE.rglob("*.py")}
    assert {name for name, (raw, _) in uses.items() if raw} <= RAW_CALL
    assert {name for name, (_, violates) in uses.items() if violates} <= MAY_VIOLATE
    assert uses["transport/calls"] == (True, True), "the law sees what it looks for"
