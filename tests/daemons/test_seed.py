"""A seed holds a swarm together whose nodes know nothing but its address."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import shutil
import signal
import sys
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file

from noloco_node import __version__
from noloco_node.bootstrap.hello import ask_hello
from noloco_node.cli.small import ask_health
from noloco_node.config.load import load_config
from noloco_node.directory.records import PeerState
from noloco_node.errors import ExitCode
from noloco_node.identity.peer_id import PeerId
from noloco_node.storage.run_folder import MARK, RunFolder
from noloco_node.storage.weights import load_slow
from noloco_node.telemetry.events import Account, NodeStarted, NodeStopped, OuterStep, read_events
from tests.chaos.attacks import records
from tests.chaos.attacks.life import Tally, Victim, living
from tests.chaos.paced_node import OPERATION_SECONDS
from tests.chaos.swarm import program
from tests.support import eventually, free_port, printed_file

pytestmark = [pytest.mark.daemons, pytest.mark.timeout(900)]

MICRO = Path(__file__).parent.parent / "configs" / "micro.yaml"
PATIENT = "run.limits.grace_seconds=30"
"""A busy machine takes its time to collect the last weights."""
SHORT = "run.inner.target_tokens=24_576"
"""Four outer steps."""


@contextlib.asynccontextmanager
async def command(folder: Path, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """`noloco-node` with these arguments, its words in `folder`/printed; killed at the end if it still runs. A device
    of a set speed where OPERATION_SECONDS is in the environment."""
    with printed_file(folder) as printed:
        process = await asyncio.create_subprocess_exec(
            *(*program(), *arguments, "--run-folder", str(folder)), stdout=printed, stderr=printed
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), 180)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def address_of(folder: Path) -> str:
    """What the seed prints for others."""
    words = await eventually(lambda: (folder / "printed").read_text().partition(" is up\n")[2], 120, "the seed is up")
    return next(word for word in words.split() if "/p2p/" in word)


def state_at(port: int) -> dict[str, Any] | None:
    """What the pages there say; None where they say nothing."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/state", timeout=5) as answer:
            return json.load(answer)
    except OSError:
        return None


def interpolated(points: Sequence[tuple[float, float]], at: float) -> float:
    """The value at that time, on a line between the points beside it."""
    before = max((point for point in points if point[0] <= at), default=points[0])
    after = min((point for point in points if point[0] > at), default=before)
    share = (at - before[0]) / (after[0] - before[0]) if after[0] > before[0] else 0.0
    return before[1] + max(0.0, share) * (after[1] - before[1])


def trains(swarm: Mapping[str, Any]) -> list[int]:
    """Nodes of each stage that train, as an onlooker sees them."""
    return [stage["nodes"]["training"] for stage in swarm["stages"]]


TOLD_SECONDS = 4.0
"""How old what a node's page or the seed's says may be: records are read every two seconds, and pages made anew every
other one."""
SEEN_TRAINING = "0.05"
"""Seconds of an operation on the devices of the observed nodes: some looks of the seed fall into any run."""


@dataclass
class Watched:
    """A seed's page, its nodes' own, and a `watch` in another process, while they train."""

    folder: Path
    seed: int = field(default_factory=free_port)
    """Port of the seed's pages."""
    nodes: list[int] = field(default_factory=lambda: [free_port() for _ in range(3)])
    told: list[tuple[dict[str, Any], list[dict[str, Any]]]] = field(default_factory=list[Any])
    """The seed's state and the nodes', as often as all of them answered."""

    @property
    def lines(self) -> list[str]:
        """What `watch` has printed."""
        printed = self.folder / "printed"
        return printed.read_text().splitlines() if printed.exists() else []

    async def look(self, address: str, stop: asyncio.Event) -> None:
        """Until `stop`."""
        with printed_file(self.folder) as printed:
            line = (sys.executable, "-m", "noloco_node", "watch", address, "--json", "--follow")
            watcher = await asyncio.create_subprocess_exec(*line, stdout=printed)
        try:
            while not stop.is_set():
                states = await asyncio.to_thread(lambda: [state_at(port) for port in (self.seed, *self.nodes)])
                seed, *nodes = [state for state in states if state is not None]
                if len(nodes) == len(self.nodes) and "stages" in seed:
                    self.told.append((seed, nodes))
                await asyncio.sleep(0.5)
        finally:
            watcher.send_signal(signal.SIGINT)
            code = await asyncio.wait_for(watcher.wait(), 180)
        assert code == ExitCode.OK

    async def compare(self) -> None:
        """The seed's numbers are the nodes' own, and so are those of `watch`."""
        whole = [(seed, nodes) for seed, nodes in self.told if trains(seed) == [2, 1]]
        clocks = [
            (
                self._clock_at(seed["time"] - TOLD_SECONDS),
                seed["trained_tokens"],
                self._clock_at(seed["time"] + TOLD_SECONDS),
            )
            for seed, _ in whole
        ]
        assert whole, "the seed has seen it train"
        slack = 0.05 * whole[0][0]["target"]
        assert [c for before, c, after in clocks if c > 2 * slack and before - slack < c < after + slack], clocks
        assert all(seed["versions"][__version__] == seed["nodes_answering"] for seed, _ in whole)
        last = await eventually(self._over, 120, "the seed has seen all of them leave")
        assert (last["joins"], last["departures"], last["missing_stages"]) == (3, {"left": 3, "lost": 0}, [])
        assert last["trained_tokens"] > 0.8 * last["target"]
        seen = [swarm for swarm in map(json.loads, self.lines) if trains(swarm) == [2, 1]]
        assert seen, "watch has seen it train"
        peers = {node["peer_id"] for _, nodes in self.told for node in nodes} - {None}
        assert len(peers) == 3
        assert {node["peer_id"] for node in seen[-1]["nodes"]} == peers, "neither seed nor watcher is a node"
        assert seen[-1]["run"] == last["run"]

    def _clock_at(self, time: float) -> float:
        """Median of the nodes' clocks at that wall time, by what they said just before and just after."""
        nodes = zip(*(nodes for _, nodes in self.told), strict=True)
        return median(interpolated([(n["time"], n["trained_tokens"] or 0.0) for n in states], time) for states in nodes)

    def _over(self) -> dict[str, Any] | None:
        seed = state_at(self.seed)
        return seed if seed and seed["over"] and not seed["nodes_answering"] else None


def is_up(folder: Path) -> bool:
    """Whether the node of this folder says that it has begun."""
    file = RunFolder(folder).events
    return file.exists() and any(isinstance(event, NodeStarted) for event in read_events(file))


def has_last_weights(seed: Path, folders: Sequence[Path]) -> bool:
    """Whether the seed's model is made of the last weights of all nodes, of which none was asked for its folder."""
    try:
        model = load_file(seed / "model" / "model.safetensors")
    except FileNotFoundError:  # another one takes its place
        return False
    nodes = [load_slow(folder / "final") for folder in folders]
    whole = nodes[1] | {name: (weight + nodes[2][name]) / 2 for name, weight in nodes[0].items()}
    assert model.keys() == whole.keys()
    return all(float((model[name] - weight).abs().max()) < 1e-6 for name, weight in whole.items())


@pytest.mark.parametrize("knows_the_run", [True, pytest.param(False, marks=pytest.mark.long)])
async def test_a_swarm_that_knows_only_its_seed_trains_to_its_end(
    tmp_path: Path, temporary: Path, knows_the_run: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No node of two stages was told of another; the seed serves no stage, and is still there at the end.

    A seed that was given the run hands it to strangers, which join with its address alone, and says when it is over.
    What it shows of the swarm is what the nodes say of themselves, and what `watch` shows. A node without its final
    weights that comes back then saves them.
    """
    folders, watched = [tmp_path / f"node{number}" for number in range(3)], Watched(tmp_path / "watch")
    given = [str(MICRO), "--metrics-port", str(watched.seed)] if knows_the_run else []
    given += [word for setting in (PATIENT, SHORT) if knows_the_run for word in ("--set", setting)]
    if knows_the_run:
        monkeypatch.setenv(OPERATION_SECONDS, SEEN_TRAINING)
    async with command(tmp_path / "seed", "seed", *given) as seed, contextlib.AsyncExitStack() as stack:
        address = await address_of(tmp_path / "seed")
        entering = ["join", address] if knows_the_run else ["run", str(MICRO), "--initial-peers", address]
        stop = asyncio.Event()
        looking = asyncio.create_task(watched.look(address, stop)) if knows_the_run else None
        nodes: list[asyncio.subprocess.Process] = []
        for number in (0, 2, 1):  # it does not train before there is somebody to see it
            if looking is not None and number == 1:
                await eventually(lambda: watched.lines, 120, "watch is up")
                # A node that the seed has not asked before does not wait for it at the run's end.
                for folder in (folders[0], folders[2]):
                    await eventually(partial(is_up, folder), 120, "both replicas of the first stage are up")
            line = (*entering, "--stage", str(number % 2), "--metrics-port", str(watched.nodes[number]))
            nodes.append(await stack.enter_async_context(command(folders[number], *line)))
        assert [await asyncio.wait_for(node.wait(), 300) for node in nodes] == [ExitCode.OK] * 3
        assert seed.returncode is None
        if looking is not None:
            stop.set()
            await looking
            await watched.compare()
            await eventually(lambda: RunFolder(tmp_path / "seed").ended, 60, "the seed has seen the end")
            await eventually(partial(has_last_weights, tmp_path / "seed", folders), 60, "a model of the last weights")
            await _a_ghost_says_that_it_trains(tmp_path, address, watched.seed)
            assert all(json.loads((folder / MARK).read_text())["end"] for folder in folders), "each has kept the words"
            shutil.rmtree(folders[0] / "final")  # as where the disk was full at the end
            mark = json.loads((folders[0] / MARK).read_text())  # as where it was away at the end
            (folders[0] / MARK).write_text(json.dumps(mark | {"ended": False, "end": []}))
            back = await stack.enter_async_context(command(folders[0], *entering, "--stage", "0"))
            assert await asyncio.wait_for(back.wait(), 120) == ExitCode.NO_STATE_SOURCE
            assert "most of the origins signed" in (folders[0] / "printed").read_text()
            assert (folders[0] / "final" / "manifest.json").is_file()
            assert RunFolder(tmp_path / "seed").ended, "no record of a key takes the end back"
        seed.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(seed.wait(), 180) == ExitCode.INTERRUPTED
    events = [read_events(folder / "events.jsonl") for folder in folders]
    started = [next(e for e in each if isinstance(e, NodeStarted)) for each in events]
    assert [e.stage for e in started] == [0, 1, 0]
    for each in events:
        assert next(e for e in each if isinstance(e, NodeStopped)).reason == "target_reached"
        assert max(e.nodes_per_stage for e in each if isinstance(e, Account)) == [2, 1], "the seed is no replica"
    paired = {e.partner for each in events for e in each if isinstance(e, OuterStep) and e.partner}
    assert paired == {started[0].peer_id, started[2].peer_id}
    seen = json.loads((folders[0] / "peers.json").read_text())["peers"]
    assert set(seen) >= {address.rpartition("/")[2], started[1].peer_id}


async def _a_ghost_says_that_it_trains(folder: Path, address: str, pages: int) -> None:
    """One record of a free key with no process behind it: a second later the seed had forgotten the end, for good."""
    victim = Victim(PeerId(address.rpartition("/")[2]), 0, address)
    stranger = living(
        load_config(MICRO, [PATIENT, SHORT]).run, [victim], folder, tally := Tally(), random.Random(1), trains=False
    )
    async with stranger as life:
        await records.told_once(life, "ghost", state=PeerState.TRAINING)
        assert (await ask_hello(life.transport, victim.peer)).over, "newcomers are told that they are too late"
    assert tally.counts["ghost"]["stored"] == 1, dict(tally.counts["ghost"])

    def claimed() -> bool:
        state = state_at(pages)
        return state is not None and any(stage["unreachable"] for stage in state["stages"])

    await eventually(claimed, 60, "the seed has read it")


async def test_a_seed_in_the_folder_of_an_ended_run_begins_no_swarm(tmp_path: Path) -> None:
    """It said that it does, after it had told its log that the run is over."""
    run = load_config(MICRO).run
    RunFolder.create(tmp_path / "seed").mark_ended(run.run_id, run.name)
    async with command(tmp_path / "seed", "seed", str(MICRO), "--no-model"):
        await address_of(tmp_path / "seed")
        words = (tmp_path / "seed" / "printed").read_text()
    assert "THE RUN HAS COME TO ITS END" in words
    assert "BEGINS A NEW SWARM" not in words


@pytest.mark.spawned
async def test_a_seed_is_light_and_says_when_it_knows_no_run(tmp_path: Path, temporary: Path) -> None:
    """It loads no model library, and says that it is alive; a node that asks it for a run is told what to do."""
    port = free_port()
    async with command(tmp_path / "seed", "seed", "--metrics-port", str(port)) as seed:
        address = await address_of(tmp_path / "seed")
        shown = await asyncio.to_thread(state_at, port)
        assert shown is not None
        assert (shown["state"], "knows of none" in shown["seed"]["detail"]) == ("no_swarm", True)
        assert await asyncio.to_thread(ask_health, "127.0.0.1", port) == (True, "ok")
        loaded = {Path(row.path).parent.name for row in psutil.Process(seed.pid).memory_maps()}
        assert not loaded & {"tokenizers", "pyarrow", "safetensors"}
        async with command(tmp_path / "stranger", "join", address) as stranger:
            assert await asyncio.wait_for(stranger.wait(), 120) == ExitCode.PEERS_UNREACHABLE
        assert "a seed that knows of no run" in (tmp_path / "stranger" / "printed").read_text()
