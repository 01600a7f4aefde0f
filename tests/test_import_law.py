"""Imports run downwards only: each room may use itself and the rooms below it, for each kind of import."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.sources import nodes_of, tree_of

PACKAGE = Path(__file__).parent.parent / "noloco_node"
NAME = "noloco_node"

LAYERS: tuple[frozenset[str], ...] = tuple(
    frozenset(rooms.split())
    for rooms in (
        "ambient",
        "errors aio finite document_marks process_memory tallies",
        "workers",
        "outer",
        "config",
        "model data",
        "training",
        "storage telemetry",
        "sizing",
        "identity",
        "peers",
        "transport",
        "participant",
        "libp2p",
        "bootstrap",
        "directory",
        "trust",
        "placement state_transfer pipeline averaging",
        "accounting",
        "observer laboratory",
        "node",
        "diagnostics simulator",
        "exporting report",
        "launch",
        "cli",
        "__main__",
    )
)
"""Rooms from low to high; rooms of one layer know nothing of each other."""

TENSOR_ROOMS = ("outer", "model", "training", "data")
"""Rooms of pure computation: no swarm, no network."""

MODULES = sorted(PACKAGE.rglob("*.py"))


def room_of(module: str) -> str:
    """`noloco_node.transport.messages` -> `transport`; the package itself -> ``."""
    return module.removeprefix(NAME).strip(".").partition(".")[0]


def module_of(path: Path) -> str:
    """The dotted name of a file of the package."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Dotted names that a file imports anywhere in it, also inside functions and for types only."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide which room is meant"
            if node.module == NAME:
                yield from (f"{NAME}.{alias.name}" for alias in node.names)
            elif node.module:
                yield node.module


def internal_imports(path: Path, known: set[str]) -> set[str]:
    """Files of the package, of those that are `known`, that a file imports."""
    return known.intersection(imports_of(nodes_of(path)))


def layer_of(room: str) -> int:
    """Height of a room. KeyError for a room that the law does not know."""
    for height, rooms in enumerate(LAYERS):
        if room in rooms:
            return height
    raise KeyError(f"'{room}' is no room of the house: give it a layer in {Path(__file__).name}")


def breaches(module: str, imported: str) -> str | None:
    """Why this import is against the law; None where it is not."""
    own = room_of(module)
    if imported.partition(".")[0] == "hivemind" and own in TENSOR_ROOMS:
        return f"{module} imports {imported}: {own} knows no network"
    if imported.partition(".")[0] != NAME:
        return None
    other = room_of(imported)
    if other in ("", own, "__version__", "PROTOCOL_VERSION"):
        return None
    if layer_of(other) >= layer_of(own):
        return f"{module} imports {imported}: {own} lies below or beside {other}"
    return None


def test_a_file_imports_only_from_its_own_room_and_from_rooms_below() -> None:
    """Every import of every file, wherever it stands, keeps the law."""
    found = [breaches(module_of(path), name) for path in MODULES for name in imports_of(nodes_of(path))]
    assert [breach for breach in found if breach] == []


def test_the_law_sees_the_whole_package() -> None:
    """The walk found the rooms that exist, so that the law above was not kept by an empty list."""
    assert {room_of(module_of(path)) for path in MODULES} - {""} == {room for layer in LAYERS for room in layer}


def test_no_import_runs_in_a_circle() -> None:
    """Neither between rooms, which the law excludes, nor between the files of one room."""
    known = {module_of(path) for path in MODULES} - {NAME}
    edges = {module_of(path): internal_imports(path, known) for path in MODULES}
    order = graphlib.TopologicalSorter(edges)
    order.prepare()  # raises CycleError, which names the circle


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("noloco_node.outer.update", "noloco_node.transport.messages"),
        ("noloco_node.training.stage_worker", "hivemind.p2p"),
        ("noloco_node.model.cut", "noloco_node.data.windows"),
        ("noloco_node.pipeline.routing", "noloco_node.node.daemon"),
        ("noloco_node.config.load", "noloco_node.cli.main"),
        ("noloco_node.laboratory.experiment", "noloco_node.node.replica"),
        ("noloco_node.pipeline.routing", "noloco_node.laboratory.experiment"),
    ],
)
def test_the_law_refuses_what_it_must(module: str, imported: str) -> None:
    """Known breaches are seen as such."""
    assert breaches(module, imported)


def house() -> Iterator[str]:
    """The rooms from high to low, each with the first sentence of what it is for, its files and its lines."""
    for rooms in reversed(LAYERS):
        for room in sorted(rooms):
            files = [path for path in MODULES if room_of(module_of(path)) == room]
            said = ast.get_docstring(tree_of(files[0])) or ""
            lines = sum(path.read_text(encoding="utf-8").count("\n") for path in files)
            yield f"{room:15} {len(files):3} files {lines:6} lines  {said.splitlines()[0] if said else ''}"
        yield ""


if __name__ == "__main__":
    print("\n".join(house()).rstrip())
