"""The simulator's two models against each other: whole nodes in virtual time, and the same crowd by events.

    python -m benchmarks.two_models --nodes 64 --seconds 900 --warm-up 200 --seeds 3 \
        --out docs/results/calibration/models-64.json

Both have the same nodes: stage, speed, links and region of each are drawn by the event model, for each seed others, and
given to the whole nodes. Figures are of the time after a warm-up. `--again` takes whole nodes' figures from the file,
as far as it has them, and runs the event model alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from benchmarks.command import command, not_negative, parser_of, positive, whole
from noloco_node.config.crowd_spec import CrowdSettings
from noloco_node.config.load import Config, load_config
from noloco_node.config.shipped import shipped_config
from noloco_node.simulator.course import exchange_arithmetic
from noloco_node.simulator.crowd import Crowd
from noloco_node.simulator.links import Attachment, Links, SharedWay
from noloco_node.simulator.loop import in_virtual_time
from noloco_node.simulator.node import Node, peer_of
from noloco_node.simulator.quadratic import Quadratic, weigh_as
from noloco_node.simulator.world import World
from noloco_node.sizing.footprint import footprint_of
from noloco_node.sizing.traffic import traffic_of
from noloco_node.telemetry.events import Account, AnyEvent, InnerStep, OuterStep
from noloco_node.training.compute_thread import Priority

MICROBATCHES_A_STEP = 2
INNER_STEPS, MIN_INNER_STEPS = 4, 2
IN_FLIGHT, MAX_PENDING = 8, 16
FORWARD_SECONDS = 2.0
STEP_SECONDS = 0.001
RECORD_SECONDS = 20.0


def configuration(nodes: int, stages: int) -> Config:
    """Of the whole nodes."""
    tokens = 512
    return load_config(
        shipped_config("sim/swarm"),
        [
            f"run.model.stages={stages}",
            f"run.inner.global_batch_tokens={nodes // stages * MICROBATCHES_A_STEP * tokens}",
            f"run.outer.inner_steps={INNER_STEPS}",
            f"run.outer.min_inner_steps={MIN_INNER_STEPS}",
            f"run.limits.record_seconds={RECORD_SECONDS}",
            "run.limits.exchange_progress_seconds=60",
            f"node.in_flight={IN_FLIGHT}",
            f"node.max_pending={MAX_PENDING}",
        ],
    )


def crowd_settings(config: Config, nodes: int, warm_up: float, seconds: float, fastest: float) -> CrowdSettings:
    """The same for the event model."""
    footprint = footprint_of(config.run)
    traffic = traffic_of(config.run, footprint)
    return CrowdSettings.model_validate(
        {
            "kind": "crowd",
            "nodes": [nodes],
            "seconds": warm_up + seconds,
            "warm_up_seconds": warm_up,
            "min_stay_seconds": 1e9,
            "work": {
                "stages": config.run.stages,
                "microbatch_bytes": round(traffic[0].forward),
                "state_bytes": round(fmean(footprint.state_bytes)),
                "exchange_seconds": config.sim.exchange_seconds * fmean(footprint.parameters) / 1e6,
                "exchange_bytes": round(fmean(each.outer_step for each in traffic)),
                "microbatches_a_step": MICROBATCHES_A_STEP,
                "inner_steps": INNER_STEPS,
                "min_inner_steps": MIN_INNER_STEPS,
                "in_flight": IN_FLIGHT,
                "max_pending": MAX_PENDING,
            },
            "devices": {"fastest": fastest, "forward_seconds": FORWARD_SECONDS},
            "links": {"up_mbit": 50.0, "down_mbit": 200.0, "sigma": 0.5},
            "directory": {"record_seconds": RECORD_SECONDS},
        }
    )


def by_events(crowd: Crowd, settings: CrowdSettings) -> dict[str, float]:
    """Run a crowd, and what it came to."""
    warm_up, seconds, nodes = settings.warm_up_seconds, settings.seconds - settings.warm_up_seconds, len(crowd.nodes)
    pipeline, averaging = crowd.pipeline, crowd.averaging

    def inner_steps() -> int:
        return sum(each.steps for each in averaging.progress)

    crowd.agenda.run(warm_up)
    crowd.nodes.sent.clear()
    before, busy, finished, stepped = crowd.moment(), sum(pipeline.busy), pipeline.finished, inner_steps()
    away, hops, refused = pipeline.away, pipeline.hops, pipeline.refused
    exchanging = averaging.exchange_seconds
    crowd.agenda.run(settings.seconds)
    after = crowd.moment()
    paired, alone = after.paired - before.paired, after.alone - before.alone
    sent, finished = crowd.nodes.sent, pipeline.finished - finished
    return {
        "microbatches/s": finished * settings.parcel / seconds,
        "devices work, %": 100.0 * (sum(pipeline.busy) - busy) / seconds / nodes,
        "inner steps a node and minute": (inner_steps() - stepped) / nodes / seconds * 60.0,
        "outer steps a node and minute": (paired + alone) / nodes / seconds * 60.0,
        "of those alone, %": 100.0 * alone / max(1, alone + paired),
        "seconds of a hop": (pipeline.away - away) / max(1, finished) / (settings.work.stages - 1),
        "seconds of an exchange": 2.0 * (averaging.exchange_seconds - exchanging) / max(1, paired),
        "asked again, of a hundred": 100.0 * (pipeline.refused - refused) / max(1, pipeline.hops - hops),
        "caught up": float(averaging.kinds["caught_up"]),
        "replicas of a stage, as seen": fmean(crowd.directory.replicas(i) for i in range(nodes)),
        "microbatches, kB/s a node": sent.get("microbatches", 0.0) / seconds / nodes / 1e3,
        "exchanges, kB/s a node": sent.get("exchanges", 0.0) / seconds / nodes / 1e3,
        "directory, kB/s a node": sum(v for k, v in sent.items() if k.startswith("directory")) / seconds / nodes / 1e3,
    }


class Told:
    """What whole nodes tell after a moment, and counts of it alone are kept."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._began = asyncio.get_running_loop().time()
        self._first: dict[int, Account] = {}
        self._last: dict[int, Account] = {}
        self._kinds: Counter[str] = Counter()
        self._seen: Counter[int] = Counter()
        self._exchanged = 0.0
        world.on_event = self._take

    def _take(self, node: Node, event: AnyEvent) -> None:
        self._world.events[node.number].clear()
        if isinstance(event, OuterStep):
            self._kinds[event.kind] += 1
            self._exchanged += event.seconds if event.kind == "paired" else 0.0
        elif isinstance(event, InnerStep):
            self._seen[event.live_replicas] += 1
        elif isinstance(event, Account):
            self._first.setdefault(node.number, event)
            self._last[node.number] = event

    def figures(self, sent: Mapping[str, int]) -> dict[str, float]:
        """Of the time so far."""
        world, nodes = self._world, len(self._world.nodes)
        seconds = asyncio.get_running_loop().time() - self._began
        committed, inner = self._kinds["paired"] + self._kinds["alone"], self._seen.total()
        pairs = [(self._first[node.number], self._last[node.number], node.stage) for node in world.nodes]

        def rate(of: Callable[[Account], float], *, origins: bool = False) -> float:
            """A second, over all nodes; each from its own first account to its last."""
            found = [
                (of(last) - of(first)) / (last.time - first.time) for first, last, s in pairs if not (origins and s)
            ]
            return sum(found)

        answered = rate(lambda each: sum(each.hop_seconds.counts) if each.hop_seconds else 0)
        again = rate(lambda each: each.retried)
        return {
            "microbatches/s": rate(lambda each: each.trained, origins=True),
            "devices work, %": 100.0 * rate(lambda each: each.busy_seconds) / nodes,
            "inner steps a node and minute": inner / nodes / seconds * 60.0,
            "outer steps a node and minute": committed / nodes / seconds * 60.0,
            "of those alone, %": 100.0 * self._kinds["alone"] / max(1, committed),
            "seconds of a hop": rate(lambda each: each.hop_seconds.sum if each.hop_seconds else 0.0) / answered,
            "seconds of an exchange": self._exchanged / max(1, self._kinds["paired"]),
            "asked again, of a hundred": 100.0 * again / (answered + again),
            "replicas of a stage, as seen": sum(seen * times for seen, times in self._seen.items()) / max(1, inner),
            **{
                f"{kind}, kB/s a node": sent[kind] / seconds / nodes / 1e3
                for kind in ("microbatches", "exchanges", "directory", "health checks")
            },
            "answered by the last stage/s": rate(lambda each: each.served),
            "sent again or lost/s": rate(lambda each: each.repeated),
            "caught up": float(self._kinds["caught_up"]),
            "exchanges aborted": float(self._kinds["aborted"]),
        }


async def by_nodes(config: Config, crowd: Crowd, warm_up: float, seconds: float, seed: int) -> dict[str, float]:
    """The same nodes, whole."""
    run = config.run
    drawn, regions = crowd.nodes, crowd.settings.links.regions
    near, far = crowd.settings.links.near_seconds, crowd.settings.links.far_seconds
    trips = [[near if one == other else far for other in range(regions)] for one in range(regions)]
    way = SharedWay(trips, random.Random(seed))
    links = Links(way, weigh_as(footprint_of(run), run.outer.codec))

    def device(number: int) -> Callable[[Priority], float]:
        forward = FORWARD_SECONDS / drawn.speed[number]
        last = drawn.stage[number] == run.stages - 1
        times = {
            Priority.STEP: STEP_SECONDS,
            Priority.BACKWARD: 2.0 * forward,
            Priority.FORWARD: 3.0 * forward if last else forward,
            Priority.DRAW: forward,
        }
        return times.__getitem__

    settings = config.node.model_copy(update={"seed": seed})
    async with World(run, settings, learning=Quadratic(seed), device=device, links=links, seed=seed) as world:
        for number in range(len(drawn)):
            way.attach(peer_of(number), Attachment(drawn.region[number], drawn.up[number], drawn.down[number]))
            world.start(drawn.stage[number])
        await asyncio.sleep(warm_up)
        told, before = Told(world), _sent(links)
        await asyncio.sleep(seconds)
        sent = _sent(links)
        sent.subtract(before)
        return told.figures(sent)


def _sent(links: Links) -> Counter[str]:
    """Bytes by kind."""
    families = {"microbatch": "microbatches", "outer": "exchanges", "dht": "directory", "records": "health checks"}
    found: Counter[str] = Counter()
    for counts in links.sent.values():
        for method, octets in counts.items():
            found[families.get(method.partition(".")[0], method)] += octets
    return found


def table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Means over the seeds, their ratio, and the least and the largest ratio of a seed."""
    lines = ["| figure | whole nodes | by events | ratio | of single seeds |", "|---|---|---|---|---|"]
    sides = ("whole nodes", "by events")
    for name in runs[0]["by events"] | runs[0]["whole nodes"]:
        found = [[run[side][name] for run in runs if name in run[side]] for side in sides]
        means = " | ".join(f"{fmean(each):.4g}" if each else "-" for each in found)
        ratios = [made / other for other, made in zip(*found, strict=False) if other]
        ratio = (
            f"{fmean(found[1]) / fmean(found[0]):.2f} | {min(ratios):.2f} to {max(ratios):.2f}" if ratios else "- | -"
        )
        lines.append(f"| {name} | {means} | {ratio} |")
    spent = [fmean(run["cpu_seconds"][side] for run in runs) for side in sides]
    lines.append(f"| seconds of processor time | {spent[0]:.0f} | {spent[1]:.1f} | | |")
    return "\n".join(lines)


def both(seed: int, options: argparse.Namespace, known: Mapping[str, Any] | None) -> dict[str, Any]:
    """One seed's figures of either model; of whole nodes those that are `known`."""
    config = configuration(options.nodes, options.stages)
    settings = crowd_settings(config, options.nodes, options.warm_up, options.seconds, options.fastest)
    settings = settings.model_copy(update={"seed": seed})
    crowd = Crowd(settings, options.nodes)
    crowd.nodes.chunk_octets = math.inf  # the quadratic's weights are a single chunk, whatever they stand for
    began = time.process_time()
    events = by_events(crowd, settings)
    spent = {"by events": time.process_time() - began}
    if known is not None:
        nodes, spent["whole nodes"] = known["whole nodes"], known["cpu_seconds"]["whole nodes"]
    else:
        began = time.process_time()
        work = by_nodes(config, crowd, options.warm_up, options.seconds, seed)
        arithmetic = exchange_arithmetic(config.run, footprint_of(config.run), config.sim.exchange_seconds)
        nodes = in_virtual_time(lambda: work, seed=seed, elsewhere_seconds=arithmetic)
        spent["whole nodes"] = time.process_time() - began
    return {"seed": seed, "whole nodes": nodes, "by events": events, "cpu_seconds": spent}


def main() -> None:
    """Run both for each seed, print the table and write what was found."""
    parser = parser_of(__doc__)
    parser.add_argument("--nodes", type=whole, default=64)
    parser.add_argument("--stages", type=whole, default=2)
    parser.add_argument("--seconds", type=positive, default=240.0)
    parser.add_argument("--warm-up", type=not_negative, default=60.0)
    parser.add_argument("--fastest", type=positive, default=16.0, help="speed of the fastest, in times the slowest")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--again", action="store_true", help="take what --out has of whole nodes")
    options = parser.parse_args()
    about = {name: getattr(options, name) for name in ("nodes", "stages", "seconds", "warm_up", "fastest")}
    known: dict[int, dict[str, Any]] = {}
    if options.again:
        before = json.loads(options.out.read_text(encoding="utf-8"))
        if {name: before[name] for name in about} != about:
            parser.error(f"{options.out} is of {', '.join(f'{name} {before[name]}' for name in about)}")
        known = {run["seed"]: run for run in before["runs"]}
    runs: list[dict[str, Any]] = []
    for seed in range(options.seeds):
        runs.append(both(seed, options, known.get(seed)))
        print(json.dumps(runs[-1]), flush=True)
        if options.out:
            kept = [*runs, *(run for other, run in known.items() if other > seed)]
            options.out.write_text(json.dumps(about | {"runs": kept}, indent=1) + "\n", encoding="utf-8")
    print(table(runs))


if __name__ == "__main__":
    command(main)
