"""What the nodes of a run lose of their pace while somebody exports it, again and again.

    python -m benchmarks.exported --out benchmarks/results/exported.json

Two stages × two replicas of real daemons on devices of a set speed, which take no processor. This process fetches their
slow weights as `noloco-node export ADDRESS` does, both replicas of both stages, without a pause, in one of two spans of
equal length, by turns; in the first round donors find their rate, and it is shown but not counted. With --uplink all
that a node sends goes through one line of its own. With --operation 0 the processor is the device: then who fetches
takes part of the donors' device, as no other machine would; the CPU time of a token says what is the donors' own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from benchmarks.command import command, positive, results_file, whole
from benchmarks.shaped_links import Uplink, doors, owner_of
from noloco_node.config.node_settings import NodeSettings
from noloco_node.directory.first_look import FIRST_LOOK_SECONDS, look_for_others
from noloco_node.exporting.gathered import Shapes
from noloco_node.exporting.live import Gatherer
from noloco_node.node.observing import Outside, looking_on
from noloco_node.telemetry.events import InnerStep
from noloco_node.trust.admission import Access
from noloco_node.trust.filtered_directory import ScreenedDirectory
from tests.chaos.swarm import HERE, Node, Swarm, behind
from tests.support import free_port

LAYOUT = [0, 1, 0, 1]
SETTINGS = (
    "run.model.config.hidden_size=256",
    "run.model.config.intermediate_size=688",
    "run.model.config.num_hidden_layers=4",
    "run.model.config.num_attention_heads=8",
    "run.model.config.num_key_value_heads=8",
    "run.model.config.max_position_embeddings=128",
    "run.data.sequence_length=128",
    "run.inner.global_batch_tokens=1024",
    "run.inner.target_tokens=1_000_000_000",
    "run.inner.warmup_tokens=0",
    "run.outer.inner_steps=8",
    "run.pipeline.budget_seconds=60",
    "run.pipeline.progress_seconds=20",
    "run.limits.exchange_progress_seconds=20",
    "node.in_flight=2",
    "node.torch_threads=1",
    "local_swarm.replicas=2",
)
"""A stage of 1.6 million parameters: 6.6 MB in full precision."""
MARGIN_SECONDS = 60.0


@dataclass(frozen=True)
class Span:
    """Some time of the run, all nodes together."""

    tokens_a_second: float
    """Of all nodes: each token counts once in each stage."""
    cpu_microseconds: float
    """Of daemons and their p2pd, for each such token."""


@dataclass(frozen=True)
class Round:
    """A silent span, and one with an export under way."""

    silent: Span
    fetched: Span
    megabytes_a_second: float
    """Of all donors together."""
    copies: int
    """Whole ones, four to an export."""
    load: float

    @property
    def ratio(self) -> float:
        """What is left of the pace."""
        return self.fetched.tokens_a_second / self.silent.tokens_a_second


class Exporter:
    """Fetches the whole model, again and again."""

    def __init__(self, outside: Outside, shapes: Shapes) -> None:
        self._outside, self._shapes = outside, shapes
        self._directory = ScreenedDirectory(outside.directory, Access(outside.spec))
        self.bytes = self.copies = 0
        self.wanted = False

    async def look(self) -> None:
        """See who is there."""
        await look_for_others(self._directory, self._outside.door.identity.peer_id, FIRST_LOOK_SECONDS)

    async def fetch(self) -> None:
        """As long as it is wanted, and to the end of what is under way then. UserError where a stage gives nothing."""
        while self.wanted:
            before = self.bytes

            def told(came: int, _wanted: int, before: int = before) -> None:
                self.bytes = before + came

            with tempfile.TemporaryDirectory() as spool:
                transport = self._outside.door.transport
                gatherer = Gatherer(
                    self._outside.spec, self._shapes, transport, self._directory, Path(spool), told, pause=1.0
                )
                gathered = await gatherer.gather()
            self.copies += sum(map(len, gathered.replicas.values()))


def cpu_seconds(node: Node) -> float:
    """Of a daemon and its p2pd so far."""
    processes = [psutil.Process(node.pid), node.p2pd()]
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


def pace(node: Node, start: float, end: float) -> float:
    """Tokens a second between two inner steps near these moments; of one that hardly takes any, in all of the time."""
    steps = [event for event in node.events if isinstance(event, InnerStep) and start <= event.time <= end]
    if len(steps) < 3:
        return sum(step.tokens for step in steps) / (end - start)
    return sum(step.tokens for step in steps[1:]) / (steps[-1].time - steps[0].time)


async def span(swarm: Swarm, seconds: float) -> Span:
    """What all nodes do in the next seconds."""
    began, before = time.time(), sum(map(cpu_seconds, swarm.nodes))
    await swarm.rest(seconds, MARGIN_SECONDS)
    ended, cpu = time.time(), sum(map(cpu_seconds, swarm.nodes)) - before
    tokens = sum(pace(node, began, ended) for node in swarm.nodes)
    return Span(tokens, 1e6 * cpu / (ended - began) / tokens)


async def one_round(swarm: Swarm, exporter: Exporter, seconds: float) -> Round:
    """Silence, then an export without a pause."""
    silent = await span(swarm, seconds)
    given, copies, began = exporter.bytes, exporter.copies, time.monotonic()
    exporter.wanted = True
    async with asyncio.TaskGroup() as group:
        group.create_task(exporter.fetch())
        fetched = await span(swarm, seconds)
        exporter.wanted = False
    rate = (exporter.bytes - given) / (time.monotonic() - began) / 1e6
    return Round(silent, fetched, rate, exporter.copies - copies, os.getloadavg()[0])


@contextlib.asynccontextmanager
async def trained(folder: Path, operation: float, mbit: float | None) -> AsyncIterator[Swarm]:
    """Daemons that train, each behind its own uplink where that is given."""
    swarm = Swarm(folder, SETTINGS, operation)
    ports = [free_port() for _ in LAYOUT]
    uplinks = [Uplink((mbit or 1e6) * 125e3, 0.02 if mbit else 0.0) for _ in LAYOUT]
    daemons: dict[int, Uplink] = {}
    others = Uplink(1e12, 0.02 if mbit else 0.0)

    def caller(port: int) -> Uplink:
        daemons.update({node.pid: uplink for node, uplink in zip(swarm.nodes, uplinks, strict=False)})
        return owner_of(port, daemons, others)

    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(swarm.stop)
        if mbit is None:
            await swarm.start(LAYOUT, lambda _: HERE)
        else:
            made = await stack.enter_async_context(doors(ports, uplinks, caller))
            await swarm.start(LAYOUT, lambda number: behind(ports[number], made[number].port))
        await swarm.until_training(steps=2)
        yield swarm


async def measure(options: argparse.Namespace) -> list[Round]:
    """All rounds, the first among them."""
    rounds: list[Round] = []
    print("| round | tokens/s, silent | tokens/s, fetched | ratio | MB/s given | copies | CPU µs a token | load |")
    print("| --- " * 8 + "|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        async with trained(Path(folder), options.operation, options.uplink) as swarm:
            os.nice(5)  # who fetches is another machine: the donors go first on this one
            assert swarm.nodes[0].started
            settings = NodeSettings(initial_peers=(swarm.nodes[0].started.addresses[0],))
            async with looking_on(settings, as_guest=True) as outside:
                exporter = Exporter(outside, await asyncio.to_thread(Shapes, outside.spec))
                await exporter.look()
                for number in range(1 + options.rounds):
                    found = await one_round(swarm, exporter, options.seconds)
                    rounds.append(found)
                    silent, fetched = found.silent, found.fetched
                    print(
                        f"| {number or 'first'} | {silent.tokens_a_second:.0f} | {fetched.tokens_a_second:.0f} | "
                        f"{found.ratio:.3f} | {found.megabytes_a_second:.2f} | {found.copies} | "
                        f"{silent.cpu_microseconds:.0f}, {fetched.cpu_microseconds:.0f} | {found.load:.1f} |",
                        flush=True,
                    )
    return rounds


def main() -> None:
    """Print a row for each round, and what was left on average."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=whole, default=6)
    parser.add_argument("--seconds", type=positive, default=40.0, help="of silence, and of fetching, in each round")
    parser.add_argument("--operation", type=positive, default=0.3, help="seconds of a forward, and of a backward")
    parser.add_argument("--uplink", type=positive, help="Mbit/s of each node, with a round trip of 80 ms")
    parser.add_argument("--out", type=results_file)
    options = parser.parse_args()
    rounds = asyncio.run(measure(options))
    ratios = [each.ratio for each in rounds[1:]]
    spread = statistics.stdev(ratios) if len(ratios) > 1 else 0.0
    print(f"\nfetched over silent: {statistics.mean(ratios):.3f} ± {spread:.3f} over {len(ratios)} rounds")
    if options.out:
        named = {"operation": options.operation, "uplink_mbit": options.uplink, "seconds": options.seconds}
        rows = [asdict(each) | {"ratio": each.ratio} for each in rounds]
        options.out.write_text(json.dumps(named | {"rounds": rows}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    command(main)
