"""One name for one thing: no two public types of the package share one, and tests keep to what has a public name."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.sources import tree_of

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "noloco_node"


def types_of(tree: ast.Module) -> Iterator[str]:
    """Names of classes, and of other types of the file: those that are written like classes. Parameters of types
    (`T`) are none."""
    yield from (node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    for node in tree.body:
        if isinstance(node, ast.Assign):
            yield from (each.id for each in node.targets if isinstance(each, ast.Name) and not each.id.isupper())


def shared(trees: dict[str, ast.Module]) -> dict[str, list[str]]:
    """Name -> files, of public types that more than one file has."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for path, tree in trees.items():
        for name in types_of(tree):
            if name[0].isupper():
                found[name].append(path)
    return {name: paths for name, paths in found.items() if len(paths) > 1}


def test_no_two_public_types_share_a_name() -> None:
    """A reader of one file need not ask which of them is meant."""
    assert shared({str(path): tree_of(path) for path in sorted(PACKAGE.rglob("*.py"))}) == {}


def test_the_law_sees_a_shared_name() -> None:
    """It may be of a class or of what stands for a type; not of a private one, which stays in its file, nor of a
    number."""
    one = ast.parse("class Course: ...\nclass _Row: ...\nTold = Callable[[int], None]\nMOST = 3\nT = TypeVar('T')")
    other = ast.parse("class Course: ...\nclass _Row: ...\nclass Told: ...\nMOST = 4\nT = TypeVar('T')")
    assert shared({"one": one, "other": other}) == {name: ["one", "other"] for name in ("Course", "Told")}


MOST_REACHED = 79
"""Places in the tests that reach for a private name of the package. It only falls: `tests/inside.py` is for those that
several need."""


PERHAPS = re.compile(r"[\w)\]]\._[a-z]|import.*\b_[a-z]|^ +_[a-z]\w*,", re.MULTILINE)
"""Some file with this may reach for one; none without it does."""


def is_private(name: str) -> bool:
    """Tell whether a name is private to its file or its object."""
    return name.startswith("_") and not name.endswith("__") and name != "_"


def is_own(node: ast.Attribute) -> bool:
    """Whether an object's method asks it of the object."""
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def private_names(trees: Iterable[ast.Module]) -> set[str]:
    """What the files define under such a name."""
    found: set[str] = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node):
                found.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
    return set(filter(is_private, found))


def reached(tree: ast.Module, names: set[str]) -> list[str]:
    """Those of `names` that a file imports, or asks of anything but its own object or one of its own classes."""
    own = private_names([tree])
    found: list[str] = []
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and node.attr in names - own
            and ast.unparse(node.value) not in ("self", "cls")
        ):
            found.append(ast.unparse(node))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("noloco_node"):
            found += [each.name for each in node.names if is_private(each.name)]
    return found


def test_tests_reach_for_ever_fewer_private_names() -> None:
    """They freeze what is nobody's promise: an added one takes another away, or gets a public name."""
    names = private_names(tree_of(path) for path in PACKAGE.rglob("*.py"))
    texts = {path: path.read_text(encoding="utf-8") for path in TESTS.rglob("*.py")}
    found = {path: reached(ast.parse(text), names) for path, text in texts.items() if PERHAPS.search(text)}
    assert sum(map(len, found.values())) <= MOST_REACHED, {path.name: each for path, each in found.items() if each}


def test_the_law_sees_a_private_name() -> None:
    """It does not see what belongs to the test's own classes."""
    text = (
        "from noloco_node.aio import _tool\nclass Own:\n    def __init__(self): self._own = 1\nOwn()._own\nx.y._rows\n"
    )
    assert reached(ast.parse(text), {"_rows", "_own", "_tool"}) == ["_tool", "x.y._rows"]
