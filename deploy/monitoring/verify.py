"""A real local swarm of four, with a seed, under a real Prometheus and Alertmanager and the files of deploy/.

    apt-get install prometheus prometheus-alertmanager     (Debian; their services need not run)
    make dashboards, or: python -m deploy.monitoring.verify [FOLDER]

The validators pass; every expression of every rule, panel and console gives series, and those move; speed and replicas
are those of the nodes' event files within 5 %; when all nodes of a stage are killed an alert fires within two minutes,
reaches Alertmanager, and is resolved when one of them is back. About ten minutes. Exit code 0: all of that held.
FOLDER keeps run, logs, consoles and figures (default: a temporary one).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from deploy.monitoring.alerts import ALERTS
from deploy.monitoring.expressions import EXPRESSIONS, QUIET, RECORDED
from deploy.monitoring.files import DEPLOY
from deploy.monitoring.panels import DASHBOARDS
from deploy.monitoring.servers import SEEDS, Watchers, check_files, watchers
from deploy.monitoring.trials import try_rules
from noloco_node.config.load import load_config
from noloco_node.config.shipped import shipped_config
from noloco_node.launch.local_swarm import LocalSwarm, Observer, SwarmNode
from noloco_node.storage import atomic
from noloco_node.telemetry.events import CheckpointTaken, Evaluation, InnerStep, OuterStep
from noloco_node.telemetry.scrape_targets import TARGETS, scrape_targets
from tests.support import free_port

SMALL = (
    "run.name=dashboards",
    "run.model.config.hidden_size=32",
    "run.model.config.intermediate_size=64",
    "run.model.config.num_hidden_layers=2",
    "run.model.config.num_attention_heads=2",
    "run.model.config.num_key_value_heads=2",
    "run.data.sequence_length=32",
    "run.inner.global_batch_tokens=1024",
    "run.inner.target_tokens=50_000_000",
    "run.inner.warmup_tokens=50_000",
    "run.outer.inner_steps=6",
    "run.outer.max_lag_tokens=50_000_000",
    "run.evaluation.every_tokens=20_000",
    "run.evaluation.windows=16",
    "node.checkpoint_rounds=1",
    "node.checkpoint_seconds=10",
    "node.log_level=WARNING",
    "local_swarm.replicas=2",
)
"""`tiny`, so small that two busy cores train it; times and limits are the defaults."""

LOST_STAGE = 1
ALERT = "NolocoStageWithoutReplicas"
OF_THE_MACHINE = {"NolocoLoopLag", "NolocoMemoryShort", "NolocoDiskShort"}
"""Alerts that may fire in a healthy swarm: this machine may be busy with others."""
START_SECONDS, TRAINING_SECONDS, QUIET_SECONDS = 240.0, 240.0, 200.0
ALERT_SECONDS, RESOLVED_SECONDS = 120.0, 240.0
WINDOW_SECONDS, COMPARED_SECONDS = 120.0, 60.0
TOLERANCE = 0.05
POLL_SECONDS = 1.0
SCRAPE_SECONDS = 5.0
"""As deploy/prometheus/prometheus.yml says."""

STEADY: Mapping[str, str] = {
    "reachable": "the dead leave the list of targets only when one is back",
    "gone": "as above",
    "checkpoints_failed": "no disk is full",
    "clipped": "no difference is out of the ordinary",
    "moves": "stages are given",
    "skipped_share": "every gradient is finite",
    "p2pd_restarts": "no p2pd dies",
    "warnings": "nobody is warned",
    "banned": "nobody is hostile",
    "set_aside": "nobody is hostile",
    "bounded": "nobody is hostile",
    "no_room": "nobody floods the directory",
    "threads": "they do not leak",
    "held": "always as many as `node.in_flight`",
    "queue": "a look every two seconds may meet none",
    "data_wait_share": "the text lies in memory: nobody waits for it",
    "doing": "1 as long as it lasts",
    "seen_claimed": "who is killed is silent for a few seconds only before its record is gone",
    "seen_moves": "stages are given",
}
"""Expressions that need not move in this swarm, and why."""


def rate_of_events(nodes: Sequence[SwarmNode], end: float) -> float:
    """Tokens per second that these nodes wrote down in the window before `end`."""
    steps = (event for node in nodes for event in node.events if isinstance(event, InnerStep))
    return sum(step.tokens for step in steps if end - WINDOW_SECONDS < step.time <= end) / WINDOW_SECONDS


def verdict(name: str, moved: bool, shown: bool) -> str | None:
    """What is wrong with an expression, None where nothing is."""
    if not shown and name not in QUIET:
        return "gives nothing"
    if shown and not moved and name not in STEADY and name not in QUIET:
        return "does not move"
    return None


class Proof:
    """What was found."""

    def __init__(self, folder: Path, watched: Watchers, swarm: LocalSwarm) -> None:
        self.folder = folder
        self.watched = watched
        self.swarm = swarm
        self.nodes: list[SwarmNode] = list(swarm.nodes)
        self.began = time.time()
        self.figures: dict[str, object] = {}
        self.wrong: list[str] = []
        self._restarted = 0.0

    def say(self, what: str, value: object) -> None:
        """One figure, on the terminal and in the file."""
        self.figures[what] = value
        print(f"{time.time() - self.began:6.1f} s  {what}: {value}", flush=True)

    def hold(self, held: bool, what: str) -> None:
        """Note what did not hold."""
        if not held:
            self.wrong.append(what)
            print(f"        WRONG  {what}", flush=True)

    async def until(self, check: Callable[[], bool], within: float, what: str) -> float | None:
        """Seconds until `check` is true; None where it is not within so many, which is noted."""
        began = time.monotonic()
        while time.monotonic() - began < within:
            for node in self.nodes:
                node.read_events()
            if await asyncio.to_thread(check):
                return time.monotonic() - began
            await asyncio.sleep(POLL_SECONDS)
        self.hold(False, f"not within {within:g} s: {what}")
        return None

    async def follow(self, seconds: float) -> None:
        """Read what the nodes write for so long."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for node in self.nodes:
                node.read_events()
            await asyncio.sleep(POLL_SECONDS)

    def trains(self) -> bool:
        """Every node has taken inner and outer steps and a checkpoint, and the first stage has evaluated."""
        wanted = (InnerStep, OuterStep, CheckpointTaken)
        every = all(any(isinstance(e, kind) for e in node.events) for node in self.nodes for kind in wanted)
        return every and any(isinstance(event, Evaluation) for node in self.nodes for event in node.events)

    def agreement(self) -> None:
        """Speed and replicas as Prometheus has them, and as the event files have them."""
        end = time.time()
        start = end - COMPARED_SECONDS
        for stage in range(self.swarm.config.run.stages):
            chosen, nodes = f'{{stage="{stage}"}}', [node for node in self.nodes if node.serves == stage]
            (points,) = self.watched.range(f"noloco:stage_tokens:rate2m{chosen}", start, end).values()
            self.same_speed(f"stage {stage}", nodes, points)
            (points,) = self.watched.range(f"noloco:stage_replicas:count{chosen}", end, end).values()
            running = sum(node.running for node in nodes)
            self.say(f"stage {stage}, replicas: Prometheus, event files", (points[-1][1], running))
            self.hold(points[-1][1] == running, f"stage {stage}: replicas")
        for labels, points in self.watched.range(EXPRESSIONS["node_speed"], start, end).items():
            name = dict(labels)["node"]
            self.same_speed(name, [node for node in self.nodes if node.name == name], points)
        (points,) = self.watched.range("noloco:clock_tokens:rate2m", start, end).values()
        (seen,) = self.watched.range(EXPRESSIONS["seen_speed"], start, end).values()
        speeds = (round(fmean(value for _, value in each), 1) for each in (points, seen))
        self.say("swarm's clock, tokens/s: by its nodes, by the seed", tuple(speeds))
        counted = self.watched.range('sum(noloco_swarm_nodes{state="training"})', end, end)
        self.say("nodes that the seed sees train", [values[-1][1] for values in counted.values()])
        running = sum(node.running for node in self.nodes)
        self.hold([values[-1][1] for values in counted.values()] == [running], "the seed sees all nodes")

    def same_speed(self, whose: str, nodes: Sequence[SwarmNode], points: Sequence[tuple[float, float]]) -> None:
        """Prometheus' tokens per second against those of the event files, in the mean."""
        seen = fmean(value for _, value in points)
        written = fmean(rate_of_events(nodes, at) for at, _ in points)
        self.say(f"{whose}, tokens/s: Prometheus, event files", (round(seen, 1), round(written, 1)))
        self.hold(abs(seen - written) <= TOLERANCE * written, f"{whose}: {seen:.1f} against {written:.1f} tokens/s")

    def expressions(self) -> None:
        """Every one, from the beginning until now."""
        end, counts = time.time(), dict[str, int]()
        steady, silent = list[str](), list[str]()
        for name, expression in {**RECORDED, **EXPRESSIONS}.items():
            found = self.watched.range(expression, self.began, end)
            counts[name] = len(found)
            moved = any(len({value for _, value in points}) > 1 for points in found.values())
            if name in RECORDED:
                made = self.watched.range(name, self.began, end)
                self.hold(bool(made) or not found, f"{name} is not recorded")
                shown_by = next((key for key, text in EXPRESSIONS.items() if text == name), name)
            else:
                shown_by = name
            problem = verdict(shown_by, moved, bool(found))
            self.hold(problem is None, f"{name} {problem}: {expression}")
            if not found:
                silent.append(name)
            elif not moved:
                steady.append(name)
        self.say("expressions", len(counts))
        self.say("series", sum(counts.values()))
        self.say("steady", steady)
        self.say("nothing", silent)
        for alert in ALERTS:
            self.watched.range(alert.expression, self.began, end)
        self.say("alerts evaluated", len(ALERTS))

    def consoles(self) -> None:
        """Each shows a value for every panel that has one."""
        for dashboard in DASHBOARDS:
            page = self.watched.console(f"{dashboard.uid}.html")
            (self.folder / f"{dashboard.uid}.html").write_text(page, encoding="utf-8")
            rows = len(re.findall(r"<tr><td>[^<]*\S[^<]*<td>\S", page))
            self.say(f"console {dashboard.uid}, values", rows)
            self.hold(rows >= len(dashboard.panels) // 2, f"console {dashboard.uid} shows {rows} values")

    async def alert(self) -> None:
        """All nodes of a stage are killed, and one comes back."""
        lost = {"alertname": ALERT, "stage": str(LOST_STAGE)}

        def among(found: list[dict[str, str]]) -> bool:
            return any(lost.items() <= labels.items() for labels in found)

        false = {each["alertname"] for each in self.watched.firing()}
        self.say("alerts that fire while it trains", sorted(false))
        self.hold(false <= OF_THE_MACHINE, "an alert fires although all is well")
        for node in self.nodes:
            if node.serves == LOST_STAGE:
                self.swarm.kill(node)
        killed = time.monotonic()
        if await self.until(lambda: among(self.watched.firing()), ALERT_SECONDS, f"{ALERT} fires") is None:
            return
        self.say("killed until the alert fires, s", round(time.monotonic() - killed, 1))
        await self.until(lambda: among(self.watched.received()), ALERT_SECONDS, "Alertmanager holds it")
        self.say("killed until Alertmanager holds it, s", round(time.monotonic() - killed, 1))
        self.hold(time.monotonic() - killed <= ALERT_SECONDS, "more than two minutes")
        await self.follow(WINDOW_SECONDS / 4)
        node = await self.comes_back()
        back = time.monotonic()
        self.say(f"{node.name} started until it is up, s", round(back - self._restarted, 1))
        await self.until(lambda: not among(self.watched.firing()), RESOLVED_SECONDS, "resolved in Prometheus")
        self.say("up until Prometheus resolves, s", round(time.monotonic() - back, 1))
        await self.until(lambda: not among(self.watched.received()), RESOLVED_SECONDS, "resolved in Alertmanager")
        self.say("up until Alertmanager resolves, s", round(time.monotonic() - back, 1))
        steps = sum(isinstance(event, InnerStep) for event in node.events)
        await self.until(lambda: sum(isinstance(e, InnerStep) for e in node.events) > steps, 60.0, "it trains again")
        await self.follow(4 * SCRAPE_SECONDS)

    async def comes_back(self) -> SwarmNode:
        """The first node of the lost stage, started again where it was."""
        dead = next(node for node in self.nodes if node.serves == LOST_STAGE)
        node = SwarmNode(dead.name, dead.stage, dead.folder, Observer())
        node.recall()
        alive = next(each for each in self.nodes if each.running and each.started)
        assert alive.started is not None
        options = ["--stage", str(LOST_STAGE), "--run-folder", str(node.folder)]
        command = [sys.executable, "-m", "noloco_node", "run", str(self.swarm.run_folder / "config.yaml"), *options]
        self._restarted = time.monotonic()
        with node.log.open("ab") as log:
            node.process = await asyncio.create_subprocess_exec(
                *command, "--initial-peers", *alive.started.addresses, stdout=log, stderr=log
            )
        self.nodes = [each for each in self.nodes if each.serves != LOST_STAGE] + [node]
        await self.until(lambda: node.started is not None, START_SECONDS, f"{node.name} is up again")
        targets = scrape_targets({each.name: each.started for each in self.nodes if each.running and each.started})
        atomic.write_json(self.swarm.run_folder / TARGETS, targets)
        return node

    async def end(self) -> None:
        """End all nodes."""
        own = [node for node in self.nodes if node not in self.swarm.nodes and node.process is not None]
        for node in own:
            assert node.process is not None
            if node.process.returncode is None:
                node.process.terminate()
        await self.swarm.stop()
        for node in own:
            assert node.process is not None
            await node.process.wait()


@contextlib.asynccontextmanager
async def seed_of(swarm: LocalSwarm, folder: Path) -> AsyncGenerator[None]:
    """A seed that shows the swarm, scraped as long as the block lasts."""
    started, port = swarm.nodes[0].started, free_port()
    assert started is not None
    options = ["--run-folder", str(folder / "seed"), "--metrics-port", str(port)]
    with (folder / "seed.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "noloco_node", "seed", "--initial-peers", *started.addresses, *options),
            stdout=log,
            stderr=log,
        )
    target = {"targets": [f"127.0.0.1:{port}"], "labels": {"run": swarm.config.run.name}}
    atomic.write_json(folder / SEEDS, [target])
    try:
        yield
    finally:
        process.terminate()
        await process.wait()


async def prove(folder: Path) -> list[str]:
    """What did not hold."""
    check_files()
    try_rules(DEPLOY / "prometheus/rules.yml", folder)
    config = load_config(shipped_config("tiny"), SMALL)
    swarm = LocalSwarm(config, folder / "run")
    with watchers(folder, folder / "run" / TARGETS) as watched:
        proof = Proof(folder, watched, swarm)
        try:
            await swarm.start()
            proof.say("nodes up", len(swarm.nodes))
            async with seed_of(swarm, folder):
                took = await proof.until(proof.trains, TRAINING_SECONDS, "all train, average, evaluate and save")
                proof.say("up until all train, average, evaluate and save, s", took and round(took, 1))
                await proof.follow(QUIET_SECONDS)
                await asyncio.to_thread(proof.agreement)
                await asyncio.to_thread(proof.consoles)
                await proof.alert()
                await asyncio.to_thread(proof.expressions)
        finally:
            await proof.end()
            (folder / "figures.json").write_text(json.dumps(proof.figures, indent=1), encoding="utf-8")
    return proof.wrong


def main() -> int:
    """0 where all of it held."""
    missing = [name for name in ("prometheus", "promtool", "prometheus-alertmanager") if shutil.which(name) is None]
    if missing:
        print(f"{', '.join(missing)} not found: apt-get install prometheus prometheus-alertmanager", file=sys.stderr)
        return 2
    if len(sys.argv) > 1:
        folder = Path(sys.argv[1]).absolute()
        folder.mkdir(parents=True)
        wrong = asyncio.run(prove(folder))
    else:
        with tempfile.TemporaryDirectory(prefix="noloco-dashboards-") as made:
            wrong = asyncio.run(prove(Path(made)))
    print(*(f"WRONG  {each}" for each in wrong), "all held" if not wrong else f"{len(wrong)} did not hold", sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
