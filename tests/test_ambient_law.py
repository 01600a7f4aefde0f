"""Time, chance and work elsewhere come from `noloco_node.ambient`, so that a node runs on a simulated loop as well."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

import pytest

from tests.sources import nodes_of
from tests.test_import_law import MODULES, module_of

MODULE_OF_ALL = "noloco_node.ambient"

FORBIDDEN: dict[str, frozenset[str] | None] = {
    "time": frozenset({"time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns"}),
    "asyncio": frozenset({"to_thread"}),
    "secrets": None,
    "uuid": None,
    "threading": frozenset({"Thread", "Timer"}),
    "concurrent.futures": frozenset({"ThreadPoolExecutor", "ProcessPoolExecutor"}),
    "os": frozenset({"urandom"}),
}
"""Names of a module that only `ambient` may use; None for all. Of `random` only seeded sources are allowed."""

NAMED: dict[str, str] = {
    "noloco_node.training.compute_thread": "the thread of the device; a simulation brings another `Compute`",
    "noloco_node.data.prefetch": "reads text ahead of a real node; a simulation draws its samples itself",
    "noloco_node.data.prepared": "a command that prepares text on all cores",
    "noloco_node.data.tokenizer_training": "a command; a library that does not hear Ctrl-C",
    "noloco_node.telemetry.web": "the pages have a thread with an event loop of its own",
    "noloco_node.workers": "processes for long work end with their parent",
    "noloco_node.cli.handlers": "a node ends with whoever holds its input",
    "noloco_node.node.interrupts": "signals are heard where the event loop hangs",
    "noloco_node.node.way_out": "ends the process where nothing else does; last words may be what hangs",
}
"""Modules that may have threads or processes of their own, and why. Clocks and chance are nobody's."""

THREADS = frozenset({"threading", "concurrent.futures"})


def dotted(node: ast.AST) -> str:
    """`name` or `name.of.names` as it is written; empty for anything else."""
    if isinstance(node, ast.Attribute):
        return f"{owner}.{node.attr}" if (owner := dotted(node.value)) else ""
    return node.id if isinstance(node, ast.Name) else ""


def uses_of(nodes: Sequence[ast.AST]) -> Iterator[tuple[str, str]]:
    """Module and name of everything that a file takes from a module, by `module.name` or `from module import name`."""
    names: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name) for alias in node.names)
    for node in nodes:
        if isinstance(node, ast.Attribute):
            if node.attr == "run_in_executor":
                yield "asyncio", "to_thread"
            if (owner := dotted(node.value)) in names:
                yield names[owner], node.attr


def unseeded(nodes: Sequence[ast.AST]) -> Iterator[tuple[str, str]]:
    """Chance that no seed decides: functions of `random` itself, and sources made without a seed."""
    seeded = {id(call.func) for call in nodes if isinstance(call, ast.Call) and call.args}
    called = {id(call.func) for call in nodes if isinstance(call, ast.Call)}
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "random":
            if node.attr != "Random" or (id(node) in called and id(node) not in seeded):
                yield "random", node.attr
        elif isinstance(node, ast.ImportFrom) and node.module == "random":
            yield "random", "import"


def breaches(module: str, nodes: Sequence[ast.AST]) -> list[str]:
    """What a file takes from the machine that it should take from `ambient`."""
    found = list(unseeded(nodes))
    for owner, name in uses_of(nodes):
        names = FORBIDDEN.get(owner, frozenset())
        if (names is None or name in names) and not (owner in THREADS and module in NAMED):
            found.append((owner, name))
    return [f"{module}: {owner}.{name}" for owner, name in found]


def test_clocks_chance_and_threads_are_taken_from_one_place() -> None:
    """By every file of the package but those that are named with their reason."""
    files = {module_of(path): nodes_of(path) for path in MODULES}
    found = {module: breaches(module, nodes) for module, nodes in files.items()}
    assert found.pop(MODULE_OF_ALL), "the law sees what it forbids"
    assert [each for breached in found.values() for each in breached] == []
    with_threads = {module for module, nodes in files.items() if not THREADS.isdisjoint(o for o, _ in uses_of(nodes))}
    assert set(NAMED) <= with_threads, "a name that is no longer needed"


@pytest.mark.parametrize(
    "text",
    [
        "import time\nnow = time.monotonic()",
        "import time as t\nclock = t.time",
        "from time import perf_counter",
        "import asyncio\nasync def f(): await asyncio.to_thread(print)",
        "async def f(loop): await loop.run_in_executor(None, print)",
        "import random\nrandom.shuffle([])",
        "import random\nrng = random.Random()",
        "from random import choice",
        "import secrets\nsecrets.token_hex(4)",
        "import threading\nthreading.Thread()",
        "from concurrent.futures import ThreadPoolExecutor",
    ],
)
def test_the_law_refuses_what_it_must(text: str) -> None:
    """Known breaches are seen as such."""
    assert breaches("noloco_node.pipeline.routing", list(ast.walk(ast.parse(text))))


def test_a_seeded_source_keeps_the_law() -> None:
    """The name of the type keeps it, too."""
    text = "import random\nimport time\ndef f(rng: random.Random): time.sleep(1)\nrandom.Random('seed')"
    assert breaches("noloco_node.pipeline.routing", list(ast.walk(ast.parse(text)))) == []
