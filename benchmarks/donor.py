"""How much a training node is slowed by giving its state to a joiner, again and again.

    python -m benchmarks.donor configs/tiny.yaml

One real daemon trains the whole model; this process copies its state as a late joiner does, without a pause, in one of
two spans of equal length, by turns. Both sides share the machine's cores, which no two nodes on the internet do.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.command import command, positive, whole
from noloco_node.config.load import Config, load_config
from noloco_node.config.node_settings import NodeSettings
from noloco_node.identity.keys import load_or_create_identity
from noloco_node.identity.peer_id import PeerId
from noloco_node.libp2p.start import running_p2p
from noloco_node.model.stage import build_stage
from noloco_node.state_transfer.fetch import fetch_state, new_download
from noloco_node.telemetry.events import EventReader, InnerStep, NodeStarted
from noloco_node.training.compute_thread import ComputeThread
from noloco_node.training.outer_state import outer_of
from noloco_node.training.stage_trainer import StageTrainer
from noloco_node.training.stage_worker import StageWorker
from noloco_node.transport.errors import Refused, TransportError
from noloco_node.transport.libp2p import Libp2pTransport

SETTINGS = (
    "run.model.stages=1",
    "run.inner.target_tokens=1_000_000_000",
    "run.evaluation.every_tokens=1_000_000_000",
    "node.torch_threads=1",
    "node.in_flight=1",
)
START_SECONDS = 120.0
STEPS_BEFORE = 20
STREAMS = 4
PAUSE_SECONDS = 0.2


class Reader:
    """Copies the donor's state again and again while `reading` is set."""

    def __init__(self, config: Config, transport: Libp2pTransport, donor: PeerId) -> None:
        run = config.run
        trainer = StageTrainer(build_stage(run.model, 0), run.inner, device="cpu", wire_dtype=torch.float32)
        self._worker = StageWorker(run, trainer, outer_of(run, trainer), ComputeThread(), lambda _: None)
        self._run, self._transport, self._donor = run, transport, donor
        self.reading = asyncio.Event()
        self.bytes = 0
        self.copies = 0

    async def read(self) -> None:
        """Until it is cancelled."""
        while True:
            await self.reading.wait()
            here, download = 0, new_download(self._run, self._worker)

            def note(length: int) -> None:
                nonlocal here
                self.bytes += length - here
                here = length

            try:
                stage, own, donor = 0, self._worker, self._donor
                await fetch_state(
                    self._run, stage, self._transport, own, donor, download, streams=STREAMS, on_progress=note
                )
                self.copies += 1
            except (Refused, TransportError):
                await asyncio.sleep(PAUSE_SECONDS)  # it holds no snapshot yet: a joiner asks again, too


class Donor:
    """What a daemon's events tell of its pace."""

    def __init__(self, folder: Path) -> None:
        self._reader = EventReader(folder / "events.jsonl")
        self.started: NodeStarted | None = None
        self.steps: list[InnerStep] = []

    async def trains(self) -> None:
        """Until it has trained some steps. Raises AssertionError where it does not come up."""
        limit = time.monotonic() + START_SECONDS
        while len(self.steps) < STEPS_BEFORE:
            assert time.monotonic() < limit, f"the donor took {len(self.steps)} steps in {START_SECONDS:g} s"
            await asyncio.sleep(PAUSE_SECONDS)
            self._take_in_events()

    async def follow(self, seconds: float) -> None:
        """Take in what happens in the next seconds."""
        await asyncio.sleep(seconds)
        self._take_in_events()

    def _take_in_events(self) -> None:
        for event in self._reader.new_events():
            if isinstance(event, NodeStarted):
                self.started = event
            elif isinstance(event, InnerStep):
                self.steps.append(event)

    def pace(self, start: float, end: float) -> float:
        """Tokens a second between two steps near these moments."""
        steps = [step for step in self.steps if start <= step.time <= end]
        assert len(steps) > 1, f"{len(steps)} inner steps in {end - start:.0f} s: give it more --seconds"
        return sum(step.tokens for step in steps[1:]) / (steps[-1].time - steps[0].time)


async def measure(config: Config, folder: Path, rounds: int, seconds: float) -> list[float]:
    """Giving over silent pace, by round."""
    donor = Donor(folder)
    await donor.trains()
    assert donor.started is not None
    address = donor.started.addresses[0]
    identity = load_or_create_identity(folder / "reader.key")
    ratios: list[float] = []
    async with running_p2p(NodeSettings(initial_peers=(address,)), identity) as daemon:
        transport = Libp2pTransport(daemon, identity=identity)
        await transport.start()
        reader = Reader(config, transport, PeerId(donor.started.peer_id))
        reading = asyncio.create_task(reader.read())
        for number in range(-1, rounds):  # the first round only lets the donor find its rate
            silent = time.time()
            await donor.follow(seconds)
            giving, before, copies = time.time(), reader.bytes, reader.copies
            reader.reading.set()
            await donor.follow(seconds)
            reader.reading.clear()
            over = time.time()
            paces = donor.pace(silent, giving), donor.pace(giving, over)
            given = (reader.bytes - before) / (over - giving) / 1e6
            name = str(number + 1) if number >= 0 else "to find its rate"
            print(
                f"| {name} | {paces[0]:.0f} | {paces[1]:.0f} | {paces[1] / paces[0]:.3f} | {given:.2f} | "
                f"{reader.copies - copies} |",
                flush=True,
            )
            if number >= 0:
                ratios.append(paces[1] / paces[0])
        reading.cancel()
        await asyncio.wait((reading,))
        await transport.close()
    return ratios


def main() -> None:
    """Print a row for each round, and what was left on average."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--rounds", type=whole, default=5)
    parser.add_argument("--seconds", type=positive, default=30.0, help="of silence, and of giving, in each round")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    config = load_config(arguments.config, SETTINGS)
    settings = [part for setting in SETTINGS for part in ("--set", setting)]
    command = [sys.executable, "-m", "noloco_node", "run", str(arguments.config), *settings]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "donor"
        donor = subprocess.Popen(
            [*command, "--run-folder", str(folder)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            print("| round | tokens/s, silent | tokens/s, giving | ratio | MB/s given | whole copies |")
            print("| --- " * 6 + "|", flush=True)
            ratios = asyncio.run(measure(config, folder, arguments.rounds, arguments.seconds))
        finally:
            donor.terminate()
            donor.wait(60)
    spread = statistics.stdev(ratios) if len(ratios) > 1 else 0.0
    print(f"\ngiving over silent: {statistics.mean(ratios):.3f} ± {spread:.3f} over {len(ratios)} rounds")


if __name__ == "__main__":
    command(main)
