"""How large the house is: lines, files, module-level numbers, pages, and the files that a microbatch, an outer step and
a joiner visit. `python -m tests.house` prints the table.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import sys
import threading
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from types import FrameType

from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import LimitsSpec, OuterSpec
from noloco_node.directory.records import PeerState
from noloco_node.node.first_state import obtain_state
from noloco_node.node.stage_lifecycle import StageLifecycle
from noloco_node.sizing.footprint import footprint_of
from noloco_node.storage.checkpoint import CheckpointFolder
from tests.memory_directory import MemoryDirectory
from tests.sources import tree_of
from tests.support import eventually
from tests.worlds import NAMED, micro_spec, peer_name, run_ahead, world

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "noloco_node"
SMALL = 60
"""A file of fewer lines often holds a fragment of a thought."""

Figures = Mapping[str, int]


def _files(folder: str, pattern: str = "*.py") -> list[Path]:
    return [path for path in sorted((ROOT / folder).rglob(pattern)) if "__pycache__" not in path.parts]


def _lines(*folders: str) -> int:
    return sum(path.read_text(encoding="utf-8").count("\n") for folder in folders for path in _files(folder))


def _bytes(paths: list[Path]) -> int:
    return sum(path.stat().st_size for path in paths if path.is_file())


def _is_number(value: ast.expr | None) -> bool:
    """Whether an expression is made of number literals alone."""
    match value:
        case ast.Constant():
            return isinstance(value.value, (int, float)) and not isinstance(value.value, bool)
        case ast.UnaryOp():
            return _is_number(value.operand)
        case ast.BinOp():
            return _is_number(value.left) and _is_number(value.right)
        case _:
            return False


def _numbers(path: Path) -> int:
    """Module-level names that a file gives a number."""
    assignments = (ast.Assign, ast.AnnAssign)
    return sum(isinstance(each, assignments) and _is_number(each.value) for each in tree_of(path).body)


def sizes() -> Figures:
    """Figures that come of reading the files alone."""
    package = _files("noloco_node")
    return {
        "lines of the package": _lines("noloco_node"),
        "lines of the tests": _lines("tests"),
        "lines of benchmarks and deploy": _lines("benchmarks", "deploy"),
        "module-level numbers": sum(map(_numbers, package)),
        "files of the package": len(package),
        f"files of the package below {SMALL} lines": sum(len(p.read_bytes().splitlines()) < SMALL for p in package),
        "kB of Markdown": _bytes([*_files("docs", "*.md"), *ROOT.glob("*.md")]) // 1000,
        "kB of results in docs": _bytes(_files("docs/results", "*")) // 1000,
        "decision records": sum(
            line.startswith("## ") and line[3].isdigit()
            for path in _files("docs/decisions", "*.md")
            for line in path.read_text(encoding="utf-8").splitlines()
        ),
    }


class _Visited:
    """Files of the package of which a function ran while this records."""

    def __init__(self) -> None:
        self.files = set[str]()
        self._records = False

    def look(self, frame: FrameType, event: str, _argument: object) -> None:
        """For `sys.setprofile`."""
        if self._records and event == "call":
            self.files.add(frame.f_code.co_filename)

    @contextlib.contextmanager
    def recording(self) -> Generator[None]:
        """Record within the block."""
        self.files.clear()
        self._records = True
        try:
            yield
        finally:
            self._records = False

    def of_package(self) -> Iterator[str]:
        """Paths within the package, in order."""
        return iter(sorted(str(Path(f).relative_to(PACKAGE)) for f in self.files if f.startswith(str(PACKAGE))))


@contextlib.contextmanager
def _watched() -> Generator[_Visited]:
    """Watch this thread, and each thread that begins within the block."""
    visited = _Visited()
    threading.setprofile(visited.look)
    sys.setprofile(visited.look)
    try:
        yield visited
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # pyright: ignore[reportArgumentType]


async def _microbatch() -> list[str]:
    """The files that one microbatch visits at both stages of a swarm of two nodes."""
    with _watched() as visited:
        async with world(micro_spec()) as made:
            for replica in made.replicas:
                replica.pipeline.open()
                await replica.membership.announce(PeerState.TRAINING)
            await made.replicas[0].membership.refresh()
            origin = made.of_stage(0)[0].pipeline.origin
            assert origin is not None
            assert await origin.train_one()
            with visited.recording():
                assert await origin.train_one()
            return list(visited.of_package())


async def _outer_step() -> list[str]:
    """The files that one exchange between two replicas visits, from the dialling to both commits."""
    rule = OuterSpec(inner_steps=2, min_inner_steps=1, codec="int4")
    spec = micro_spec(stages=1, outer=rule, limits=LimitsSpec(record_seconds=3, grace_seconds=1))
    with _watched() as visited:
        async with world(spec, replicas=2) as made, asyncio.TaskGroup() as group:
            running = [group.create_task(replica.averaging.run()) for replica in made.replicas]
            for replica in made.replicas:
                replica.averaging.open()
                assert replica.pipeline.origin is not None
                for _ in range(4):
                    await replica.pipeline.origin.train_one()
            with visited.recording():
                assert await made.replicas[0].averaging.dial(peer_name(0, 1))
                await eventually(lambda: not any(r.averaging.under_way for r in made.replicas))
            for task in running:
                task.cancel()
            return list(visited.of_package())


async def _joiner() -> list[str]:
    """The files that a joiner visits from the choice of its stage to its first sample, beside a replica that trains.

    What comes before, its network, is not in memory.
    """
    settings, spec = NodeSettings(in_flight=1, initial_peers=(NAMED,)), micro_spec(stages=1)
    with _watched() as visited:
        async with world(spec, replicas=2, settings=settings) as made:
            joiner, veteran = made.replicas
            transport, directory = joiner.context.transport, MemoryDirectory(made.hub)
            await run_ahead(veteran, 1e6)
            veteran.donor.open()
            await veteran.membership.announce(PeerState.TRAINING)
            stays = StageLifecycle(spec, settings, footprint_of(spec), transport, directory)
            with visited.recording():
                await stays.look_around()
                async with stays.arriving(await stays.first_stage(None)):
                    assert await obtain_state(joiner, stays, None, CheckpointFolder(Path("nowhere"), 1)) == "peer"
                await joiner.membership.announce(PeerState.TRAINING)
                assert joiner.pipeline.origin is not None
                assert await joiner.pipeline.origin.train_one()
            return list(visited.of_package())


def journeys() -> Mapping[str, list[str]]:
    """The files of the package on the way of a microbatch, of an outer step and of a joiner, from a trace."""
    ways = {"a microbatch": _microbatch, "an outer step": _outer_step, "a joiner": _joiner}
    return {name: asyncio.run(way()) for name, way in ways.items()}


def main() -> None:
    """Print all figures, and the files of all journeys."""
    ways = journeys()
    for name, figure in {**sizes(), **{f"files on the way of {name}": len(f) for name, f in ways.items()}}.items():
        print(f"{figure:>8,}  {name}")
    for name, files in ways.items():
        print(f"\nThe way of {name}:\n  " + "\n  ".join(files))


if __name__ == "__main__":
    main()
