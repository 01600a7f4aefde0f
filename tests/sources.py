"""The syntax of source files, read once a process: several laws look at every file of the package."""

from __future__ import annotations

import ast
import gc
from functools import cache
from pathlib import Path


@cache
def tree_of(path: Path) -> ast.Module:
    """The syntax of a file. A test leaves it as it is."""
    # A tree is hundreds of thousands of objects, none of them garbage: the collector would go through them again and
    # again while they are made, and in every test that follows.
    gc.disable()
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    finally:
        gc.enable()


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Every node of a file, as `ast.walk` finds them."""
    return tuple(ast.walk(tree_of(path)))
