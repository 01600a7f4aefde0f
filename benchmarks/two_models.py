"""The simulator's two models against each other: whole nodes in virtual time, and the same crowd by events.

    python -m benchmarks.two_models --nodes 16 --out docs/results/calibration/models-16.json

Both have the same nodes: stage, speed, links and region of each are drawn by the event model and given to the whole
nodes. Figures are of the time after a warm-up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

from noloco_node.config.crowd_spec import CrowdSettings
from noloco_node.config.load import Config, load_config
from noloco_node.config.shipped import shipped_config
from noloco_node.simulator.crowd import Crowd
from noloco_node.simulator.links import Attachment, Links, SharedWay
from noloco_node.simulator.loop import WALL, in_virtual_time
from noloco_node.simulator.node import peer_of
from noloco_node.simulator.quadratic import Quadratic, weigh_as
from noloco_node.simulator.world import World
from noloco_node.sizing.footprint import footprint_of
from noloco_node.sizing.traffic import traffic_of
from noloco_node.telemetry.events import Account, InnerStep, OuterStep
from noloco_node.training.compute_thread import Priority

MICROBATCHES_A_STEP = 2
INNER_STEPS, MIN_INNER_STEPS = 4, 2
IN_FLIGHT, MAX_PENDING = 8, 16
FORWARD_SECONDS = 2.0
STEP_SECONDS = 0.001
RECORD_SECONDS = 20.0


def configuration(nodes: int) -> Config:
    """Of the whole nodes."""
    stages = 2
    tokens = 512
    return load_config(
        shipped_config("sim/swarm"),
        [
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
    traffic = traffic_of(config.run, footprint_of(config.run))
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
                "exchange_bytes": round(traffic[0].outer_step),
                "microbatches_a_step": MICROBATCHES_A_STEP,
                "inner_steps": INNER_STEPS,
                "min_inner_steps": MIN_INNER_STEPS,
                "in_flight": IN_FLIGHT,
                "max_pending": MAX_PENDING,
            },
            "devices": {"fastest": fastest, "forward_seconds": FORWARD_SECONDS},
            "links": {"up_mbit": 50.0, "down_mbit": 200.0, "sigma": 0.5},
            "directory": {"view": "everybody", "record_seconds": RECORD_SECONDS},
        }
    )


def by_events(crowd: Crowd, settings: CrowdSettings) -> dict[str, float]:
    """Run a crowd, and what it came to."""
    warm_up, seconds, nodes = settings.warm_up_seconds, settings.seconds - settings.warm_up_seconds, len(crowd.nodes)
    crowd.agenda.run(warm_up)
    crowd.nodes.sent.clear()
    before, busy, finished = crowd.moment(), sum(crowd.pipeline.busy), crowd.pipeline.finished
    crowd.agenda.run(settings.seconds)
    after = crowd.moment()
    paired, alone = after.paired - before.paired, after.alone - before.alone
    sent = crowd.nodes.sent
    return {
        "microbatches/s": (crowd.pipeline.finished - finished) * settings.parcel / seconds,
        "devices work, %": 100.0 * (sum(crowd.pipeline.busy) - busy) / seconds / nodes,
        "outer steps a node and minute": (paired + alone) / nodes / seconds * 60.0,
        "of those alone, %": 100.0 * alone / max(1, alone + paired),
        "replicas of a stage, as seen": fmean(crowd.directory.replicas(i) for i in range(nodes)),
        "microbatches, kB/s a node": sent.get("microbatches", 0.0) / seconds / nodes / 1e3,
        "exchanges, kB/s a node": sent.get("exchanges", 0.0) / seconds / nodes / 1e3,
        "directory, kB/s a node": sum(v for k, v in sent.items() if k.startswith("directory")) / seconds / nodes / 1e3,
    }


async def by_nodes(config: Config, crowd: Crowd, warm_up: float, seconds: float, seed: int) -> dict[str, float]:
    """The same nodes, whole."""
    run, loop = config.run, asyncio.get_running_loop()
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
        began, before = loop.time(), _sent(links)
        await asyncio.sleep(seconds)
        sent = _sent(links)
        sent.subtract(before)
        return _told(world, WALL + began, WALL + loop.time(), sent)


def _sent(links: Links) -> Counter[str]:
    """Bytes by kind."""
    found: Counter[str] = Counter()
    for counts in links.sent.values():
        for method, octets in counts.items():
            family = method.partition(".")[0]
            found[{"microbatch": "microbatches", "outer": "exchanges", "dht": "directory"}.get(family, method)] += (
                octets
            )
    return found


def _told(world: World, begin: float, end: float, sent: Counter[str]) -> dict[str, float]:
    seconds, nodes = end - begin, len(world.nodes)
    served, busy, seen = 0.0, list[float](), list[int]()
    kinds: Counter[str] = Counter()
    for node in world.nodes:
        inside = [event for event in world.events[node.number] if begin <= event.time <= end]
        kinds.update(event.kind for event in inside if isinstance(event, OuterStep))
        seen += [event.live_replicas for event in inside if isinstance(event, InnerStep)]
        accounts = [event for event in inside if isinstance(event, Account)]
        passed = accounts[-1].time - accounts[0].time
        busy.append((accounts[-1].busy_seconds - accounts[0].busy_seconds) / passed)
        if node.stage == world.spec.stages - 1:
            served += (accounts[-1].served - accounts[0].served) / passed
    committed = kinds["paired"] + kinds["alone"]
    return {
        "microbatches/s": served,
        "devices work, %": 100.0 * fmean(busy),
        "outer steps a node and minute": committed / nodes / seconds * 60.0,
        "of those alone, %": 100.0 * kinds["alone"] / max(1, committed),
        "replicas of a stage, as seen": fmean(seen),
        **{
            f"{kind}, kB/s a node": sent[kind] / seconds / nodes / 1e3
            for kind in ("microbatches", "exchanges", "directory")
        },
    }


def main() -> None:
    """Run both, print the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--warm-up", type=float, default=60.0)
    parser.add_argument("--fastest", type=float, default=16.0, help="speed of the fastest, in times the slowest")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    config = configuration(options.nodes)
    settings = crowd_settings(config, options.nodes, options.warm_up, options.seconds, options.fastest)
    settings = settings.model_copy(update={"seed": options.seed})
    crowd = Crowd(settings, options.nodes)
    began = time.process_time()
    events = by_events(crowd, settings)
    spent = [time.process_time() - began]
    print(json.dumps(events), spent, flush=True)
    work = by_nodes(config, crowd, options.warm_up, options.seconds, options.seed)
    nodes = in_virtual_time(lambda: work, seed=options.seed)
    spent.append(time.process_time() - began - spent[0])
    print("| figure | whole nodes | by events | ratio |\n|---|---|---|---|")
    for name, made in events.items():
        whole = nodes[name]
        print(f"| {name} | {whole:.4g} | {made:.4g} | {f'{made / whole:.2f}' if whole else '-'} |")
    print(f"| seconds of processor time | {spent[1]:.0f} | {spent[0]:.0f} | |")
    if options.out:
        found: dict[str, Any] = {"nodes": options.nodes, "seconds": options.seconds, "fastest": options.fastest}
        found |= {"whole nodes": nodes, "by events": events, "cpu_seconds": spent}
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
