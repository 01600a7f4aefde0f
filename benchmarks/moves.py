"""Who moves in a crowd, and what for: stages that are even, one of which a share dies at once, and newcomers.

    python -m benchmarks.moves --nodes 1000 10000 --killed 0 0.25 --times 0

Nothing is trained: what decides is `Relocation` and `choose_stage`, on what the directory shows. The throughput of the
poorest stage is that of its nodes, those on their way to it included, as a share of what an even division would give.
"""

from __future__ import annotations

import time

from benchmarks.command import command, not_negative, parser_of, positive, whole
from noloco_node.config.crowd_spec import Arrivals, CrowdSettings, DeviceSettings, DirectorySettings
from noloco_node.simulator.crowd import Crowd

BEFALLS_AT = 600.0
LOOK = 60.0


def settings_of(nodes: int, view: str, stay: float, seconds: float, times: float, seed: int) -> CrowdSettings:
    """A crowd whose devices never come to the end of a microbatch."""
    return CrowdSettings(
        kind="crowd",
        seed=seed,
        nodes=(nodes,),
        seconds=seconds,
        min_stay_seconds=stay,
        devices=DeviceSettings(forward_seconds=1e6),
        directory=DirectorySettings(view="everybody" if view == "everybody" else "buckets"),
        arrivals=(Arrivals(at_seconds=BEFALLS_AT, within_seconds=300.0, times=times),) if times else (),
    )


def poorest(crowd: Crowd) -> float:
    """Share of an even division that the stage with the least has."""
    strengths = [0.0] * crowd.settings.work.stages
    for i in crowd.nodes.living():
        strengths[crowd.nodes.stage[i]] += crowd.nodes.speed[i]
    return min(strengths) * len(strengths) / sum(strengths)


def course(settings: CrowdSettings, killed: float) -> None:
    """Print what happens, a line a minute from the moment on at which anything befalls it."""
    began, many = time.process_time(), settings.nodes[0]
    crowd = Crowd(settings, many)
    crowd.agenda.run(BEFALLS_AT)
    rows = [f"before {poorest(crowd):.3f}, moves {crowd.moves}"]
    stage = [i for i in crowd.nodes.living() if crowd.nodes.stage[i] == 1]
    for i in stage[: round(killed * len(stage))]:
        crowd.kill(i)
    at = BEFALLS_AT
    while at < settings.seconds:
        rows.append(f"{at:5.0f} s: poorest {poorest(crowd):.3f}, moves {crowd.moves}")
        at += LOOK
        crowd.agenda.run(at)
    rows.append(f"{at:5.0f} s: poorest {poorest(crowd):.3f}, moves {crowd.moves}")
    view, stay = settings.directory.view, settings.min_stay_seconds
    took = time.process_time() - began
    what = f"{many} nodes, {view}, shortest stay {stay:g} s, {killed:.0%} of a stage killed, seed {settings.seed}"
    print(f"{what}: {took:.0f} s of CPU")
    print("\n".join(rows), flush=True)


def main() -> None:
    """Run all that are asked for."""
    parser = parser_of(__doc__, out=False)
    parser.add_argument("--nodes", type=whole, nargs="+", default=[1000])
    parser.add_argument("--view", nargs="+", default=["buckets"])
    parser.add_argument("--stay", type=positive, default=300.0)
    parser.add_argument("--seconds", type=positive, default=1300.0)
    parser.add_argument("--killed", type=float, nargs="+", default=[0.0, 0.25])
    parser.add_argument("--times", type=not_negative, default=0.0, help="newcomers, times the nodes")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for nodes in args.nodes:
        for view in args.view:
            for killed in args.killed:
                course(settings_of(nodes, view, args.stay, args.seconds, args.times, args.seed), killed)


if __name__ == "__main__":
    command(main)
