"""The moving picture of README: a real swarm of eight daemons on this machine, three of which are killed.

    python -m benchmarks.picture                 # train, kill, write benchmarks/results/picture.json and docs/swarm.svg
    python -m benchmarks.picture --draw          # draw docs/swarm.svg anew from the recorded figures
    python -m benchmarks.picture --still 7.5 --out frame.svg   # one moment of it, for a look

The recording holds what the nodes wrote: training losses, outer steps with partners, deaths, the merged model's loss
and the beginning of its sample of text. The picture shows nothing else; it plays the run in a few seconds.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.command import command, not_negative, parser_of, results_file
from benchmarks.moving import still, svg
from noloco_node import ambient
from noloco_node.config.load import load_config
from noloco_node.exporting.write import merge_run
from noloco_node.launch.local_swarm import LocalSwarm, Observer, SwarmNode
from noloco_node.telemetry.events import AnyEvent, InnerStep, OuterStep

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "benchmarks/picture.yaml"
RECORD = ROOT / "benchmarks/results/picture.json"
PICTURE = ROOT / "docs/swarm.svg"

DEATHS = {"s1-r3": 0.3, "s0-r2": 0.45, "s1-r0": 0.6}
"""The nodes that are killed, each with the share of the run's tokens at which it is."""
POINTS = 120
"""Moments of the loss curve that are kept."""


@dataclass
class Recording:
    """What of a run the picture shows; times are seconds since the first inner step."""

    target: int = 0
    nodes: dict[str, int] = field(default_factory=dict[str, int])
    """The stage of each node."""
    loss: list[tuple[float, float, float]] = field(default_factory=list[tuple[float, float, float]])
    """Time, clock in tokens, and mean training loss of the last steps, nats per token."""
    pairs: list[tuple[float, str, str]] = field(default_factory=list[tuple[float, str, str]])
    """Time of an outer step, and the two nodes that averaged."""
    deaths: list[tuple[float, str]] = field(default_factory=list[tuple[float, str]])
    merged_loss: float = 0.0
    prompt: str = ""
    text: str = ""
    """How the merged model goes on with the prompt, which is held out."""


class Killer(Observer):
    """Takes down what happens, and kills each of `DEATHS` as the clock reaches its share of the run."""

    def __init__(self, target: int) -> None:
        self.swarm: LocalSwarm | None = None
        self.steps: list[InnerStep] = []
        self.outer: list[tuple[str, OuterStep]] = []
        self.deaths: list[tuple[float, str]] = []
        self._target = target
        self._clock = 0.0

    def on_event(self, node: SwarmNode, event: AnyEvent) -> None:
        """Keep losses and averagings."""
        if isinstance(event, InnerStep):
            self.steps.append(event)
            self._clock = max(self._clock, event.clock)
        elif isinstance(event, OuterStep) and event.kind == "paired" and event.role == "dialler":
            self.outer.append((node.name, event))

    def on_poll(self) -> None:
        """Kill the nodes that are due."""
        for name, share in DEATHS.items():
            if self.swarm and self._clock >= share * self._target and name not in {dead for _, dead in self.deaths}:
                self.swarm.kill(self.swarm.node(name))
                self.deaths.append((ambient.wall(), name))
                print(f"killed {name} at {self._clock:,.0f} of {self._target:,} tokens", flush=True)


def smoothed(steps: list[InnerStep], start: float) -> list[tuple[float, float, float]]:
    """`POINTS` moments of the loss, each the mean over the steps since the moment before."""
    ordered = sorted(steps, key=lambda step: step.time)
    size = max(1, len(ordered) // POINTS)
    groups = [ordered[at : at + size] for at in range(0, len(ordered), size)]
    return [
        (
            round(group[-1].time - start, 2),
            round(max(step.clock for step in group)),
            round(statistics.fmean(step.loss for step in group), 4),
        )
        for group in groups
    ]


def tokenizer(folder: Path, size: int) -> Path:
    """One learnt from the run's own text."""
    place = folder / "tokenizer"
    line = [sys.executable, "-m", "noloco_node", "tokenizer", "train", str(CONFIG)]
    subprocess.run([*line, "--vocab-size", str(size), "--out", str(place)], check=True)
    return place


async def train(swarm: LocalSwarm) -> None:
    """To the end of the run."""
    try:
        await swarm.start()
        await swarm.wait()
    finally:
        await swarm.stop()


def record(folder: Path) -> Recording:
    """Train, kill and merge in `folder`. Raises UserError as `LocalSwarm.start` and `merge_run` do."""
    size = load_config(CONFIG).run.model.config["vocab_size"]
    assert isinstance(size, int)
    config = load_config(CONFIG, [f"run.data.tokenizer={tokenizer(folder, size)}"])
    killer = Killer(config.run.inner.target_tokens)
    swarm = killer.swarm = LocalSwarm(config, folder / "run", observer=killer)
    asyncio.run(train(swarm))
    ended = [(node, node.stopped.final_weights) for node in swarm.nodes if node.stopped]
    saved = [node.folder / weights for node, weights in ended if weights]
    merged = merge_run(config.run, saved, swarm.run_folder, print)
    start = min(step.time for step in killer.steps)
    names = {node.started.peer_id: node.name for node in swarm.nodes if node.started}
    sample = merged.sample.read_text(encoding="utf-8")
    prompt, _, text = sample.partition("\n--- continued by the model ---\n")
    return Recording(
        target=config.run.inner.target_tokens,
        nodes={node.name: node.stage for node in swarm.nodes},
        loss=smoothed(killer.steps, start),
        pairs=[(round(event.time - start, 2), name, names[event.partner or ""]) for name, event in killer.outer],
        deaths=[(round(time - start, 2), name) for time, name in killer.deaths],
        merged_loss=round(merged.loss, 4),
        prompt=prompt.partition("\n")[2],
        text=text.partition("\n--- held-out")[0],
    )


def load(path: Path) -> dict[str, Any]:
    """A recording as it was written."""
    return json.loads(path.read_text(encoding="utf-8"))


def main() -> None:
    """Record where nothing else is asked for, then draw."""
    parser = parser_of(__doc__, out=False)
    parser.add_argument("--draw", action="store_true", help="from the recorded figures, without a run")
    parser.add_argument("--still", type=not_negative, metavar="SECONDS", help="one moment, without a run")
    parser.add_argument("--folder", type=Path, help="where the run stays; it is removed where none is named")
    parser.add_argument("--record", type=results_file, default=RECORD)
    parser.add_argument("--out", type=results_file, default=PICTURE)
    options = parser.parse_args()
    if not options.draw and options.still is None:
        with tempfile.TemporaryDirectory() as folder:
            found = record(options.folder or Path(folder))
        options.record.write_text(json.dumps(asdict(found), ensure_ascii=False) + "\n", encoding="utf-8")
    made = load(options.record)
    options.out.write_text(svg(made) if options.still is None else still(made, options.still), encoding="utf-8")
    print(options.out)


if __name__ == "__main__":
    command(main)
