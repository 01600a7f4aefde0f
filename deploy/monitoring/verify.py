"""A real local swarm of four, with a seed, under a real Prometheus and Alertmanager and the files of deploy/.

    apt-get install prometheus prometheus-alertmanager     (Debian; their services need not run)
    make dashboards, or: python -m deploy.monitoring.verify [FOLDER]

Every alert fires on its made-up fault. Every expression of a panel gives series. Speed and replicas are those of the
nodes' event files. When all nodes of a stage are killed, an alert reaches Alertmanager within two minutes; it is
resolved when one node is back. Ten minutes; exit code 0: all of that held.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from deploy.monitoring.trials import DEPLOY, try_rules
from noloco_node.config.files import shipped_config
from noloco_node.config.load import load_config
from noloco_node.launch.local_swarm import LocalSwarm, Observer, SwarmNode
from noloco_node.storage import atomic
from noloco_node.telemetry.events import CheckpointTaken, Evaluation, InnerStep, OuterStep
from noloco_node.telemetry.web import TARGETS, scrape_targets
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
    "node.checkpoint_outer_steps=1",
    "node.checkpoint_seconds=10",
    "node.log_level=WARNING",
    "local_swarm.replicas=2",
)
"""`tiny`, so small that two busy cores train it; times and limits are the defaults."""

SEEDS = "seeds.json"
LOST_STAGE = 1
ALERT = "NolocoStageWithoutReplicas"
OF_THE_MACHINE = {"NolocoLoopLag", "NolocoMemoryShort", "NolocoDiskShort"}
"""Alerts that may fire in a healthy swarm: this machine may be busy with others."""
QUIET = {
    *("Outer steps: aborted: {{reason}} {{run}}", "Refusals", "Refusals out of the ordinary", "Refusals given"),
    *("Offences and bans of 15 minutes", "Offences and bounds of 15 minutes", "Audits of 15 minutes"),
    "Time back to 90 % of the speed after a loss, 90th percentile",
    *("Of a stage peer's state", "Model FLOP/s over the peak", "Memory of the GPU"),
}
"""Panels, or lines of one, that may be empty while a swarm trains: no fault, no joiner, no GPU."""
READY_SECONDS, START_SECONDS, TRAINING_SECONDS, QUIET_SECONDS = 60.0, 240.0, 240.0, 200.0
ALERT_SECONDS, RESOLVED_SECONDS = 120.0, 240.0
WINDOW_SECONDS, COMPARED_SECONDS = 120.0, 60.0
TOLERANCE = 0.05


class Watchers:
    """A Prometheus and an Alertmanager on loopback, and questions to them."""

    def __init__(self) -> None:
        self.prometheus = f"127.0.0.1:{free_port()}"
        self.alertmanager = f"127.0.0.1:{free_port()}"

    @staticmethod
    def get(url: str) -> bytes:
        """What a server answers."""
        with urllib.request.urlopen(f"http://{url}", timeout=20) as answer:
            return answer.read()

    def values(self, expression: str, start: float, end: float) -> list[list[tuple[float, float]]]:
        """Times and values of each series from `start` to `end`, seconds since 1970, every 5 seconds."""
        query = urllib.parse.urlencode({"query": expression, "start": start, "end": end, "step": 5.0})
        found = json.loads(self.get(f"{self.prometheus}/api/v1/query_range?{query}"))["data"]["result"]
        return [[(float(at), float(value)) for at, value in each["values"]] for each in found]

    def firing(self) -> list[dict[str, str]]:
        """Labels of the alerts that fire in Prometheus."""
        found = json.loads(self.get(f"{self.prometheus}/api/v1/alerts"))["data"]["alerts"]
        return [each["labels"] for each in found if each["state"] == "firing"]

    def received(self) -> list[dict[str, str]]:
        """Labels of the alerts that Alertmanager holds."""
        found = json.loads(self.get(f"{self.alertmanager}/api/v2/alerts?active=true"))
        return [each["labels"] for each in found]

    @contextlib.contextmanager
    def running(self, folder: Path, targets: Path) -> Iterator[None]:
        """Both run as long as the block lasts; their logs and data are in `folder`."""
        config = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text(encoding="utf-8"))
        config["rule_files"] = [str(DEPLOY / "prometheus" / name) for name in config["rule_files"]]
        for job, place in zip(config["scrape_configs"], (targets, folder / SEEDS), strict=True):
            job["file_sd_configs"][0]["files"] = [str(place)]
        config["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"] = [self.alertmanager]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
        subprocess.run(["promtool", "check", "config", str(folder / "prometheus.yml")], check=True)
        commands = {
            "prometheus": [
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'prometheus'}",
                f"--web.listen-address={self.prometheus}",
            ],
            "prometheus-alertmanager": [
                f"--config.file={DEPLOY / 'prometheus/alertmanager.yml'}",
                f"--storage.path={folder / 'alertmanager'}",
                f"--web.listen-address={self.alertmanager}",
                "--cluster.listen-address=",
            ],
        }
        with contextlib.ExitStack() as stack:
            for program, options in commands.items():
                log = stack.enter_context((folder / f"{program}.log").open("wb"))
                process = subprocess.Popen([program, *options], stdout=log, stderr=log)
                stack.callback(process.wait, 30)
                stack.callback(process.terminate)
            for address in (self.prometheus, self.alertmanager):
                self._until_ready(f"{address}/-/ready")
            yield

    def _until_ready(self, url: str) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while True:
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                self.get(url)
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"{url} is not ready within {READY_SECONDS:g} s")
            time.sleep(0.2)


class Proof:
    """A swarm that is watched, and what did not hold."""

    def __init__(self, watched: Watchers, swarm: LocalSwarm) -> None:
        self.watched = watched
        self.swarm = swarm
        self.nodes: list[SwarmNode] = list(swarm.nodes)
        self.began = time.time()
        self.wrong: list[str] = []

    def hold(self, held: bool, what: str) -> None:
        """Say what was looked at, and note it where it did not hold."""
        print(f"{time.time() - self.began:6.1f} s  {'ok   ' if held else 'WRONG'} {what}", flush=True)
        if not held:
            self.wrong.append(what)

    async def until(self, check: Callable[[], Any], within: float, what: str) -> None:
        """Wait until `check` is true, at most `within` seconds; a time-out is noted."""
        began = time.monotonic()
        held = False
        while not held and time.monotonic() - began < within:
            for node in self.nodes:
                node.read_events()
            held = bool(await asyncio.to_thread(check))
            await asyncio.sleep(0.0 if held else 1.0)
        self.hold(held, f"{what}: {time.monotonic() - began:.1f} of {within:g} s")

    def trains(self) -> bool:
        """Every node has taken inner and outer steps and a checkpoint, and the first stage has evaluated."""
        wanted = (InnerStep, OuterStep, CheckpointTaken)
        every = all(any(isinstance(e, kind) for e in node.events) for node in self.nodes for kind in wanted)
        return every and any(isinstance(event, Evaluation) for node in self.nodes for event in node.events)

    def agreement(self) -> None:
        """Speed and replicas as Prometheus and the seed have them, and as the event files have them."""
        end = time.time()
        for stage in range(self.swarm.config.run.stages):
            nodes = [node for node in self.nodes if node.serves == stage]
            chosen = f'{{stage="{stage}"}}'
            ((_, replicas),) = self.watched.values(f"noloco:stage_replicas:count{chosen}", end, end)[0]
            self.hold(replicas == len(nodes), f"stage {stage}: {replicas:g} replicas")
            (points,) = self.watched.values(f"noloco:stage_tokens:rate2m{chosen}", end - COMPARED_SECONDS, end)
            steps = [event for node in nodes for event in node.events if isinstance(event, InnerStep)]
            written = fmean(
                sum(step.tokens for step in steps if at - WINDOW_SECONDS < step.time <= at) / WINDOW_SECONDS
                for at, _ in points
            )
            seen = fmean(value for _, value in points)
            close = abs(seen - written) <= TOLERANCE * written
            self.hold(close, f"stage {stage}: {seen:.1f} tokens/s; by the event files {written:.1f}")
        ((_, trains),) = self.watched.values('sum(noloco_swarm_nodes{state="training"})', end, end)[0]
        self.hold(trains == len(self.nodes), f"the seed sees {trains:g} nodes train")

    def panels(self) -> None:
        """Each shows something from the beginning until now."""
        end = time.time()
        for path in sorted((DEPLOY / "grafana/dashboards").iterdir()):
            panels = json.loads(path.read_text(encoding="utf-8"))["panels"]
            lines = [(panel["title"], target) for panel in panels for target in panel.get("targets", ())]
            empty: list[str] = []
            for title, target in lines:
                expression = re.sub(r'=~"\$\w+"', '=~".*"', target["expr"])
                names = {title, f"{title}: {target['legendFormat']}"}
                if not self.watched.values(expression, self.began, end) and not names & QUIET:
                    empty.append(f"{title}: {expression}")
            self.hold(not empty, f"{path.stem}, {len(lines)} expressions without series: {empty}")

    async def alert(self) -> None:
        """All nodes of a stage are killed, and one comes back."""
        lost = {"alertname": ALERT, "stage": str(LOST_STAGE)}

        def among(found: list[dict[str, str]]) -> bool:
            return any(lost.items() <= labels.items() for labels in found)

        false = {each["alertname"] for each in self.watched.firing()}
        self.hold(false <= OF_THE_MACHINE, f"alerts while it trains: {sorted(false)}")
        for node in self.nodes:
            if node.serves == LOST_STAGE:
                self.swarm.kill(node)
        await self.until(lambda: among(self.watched.received()), ALERT_SECONDS, "Alertmanager holds the alert")
        node = await self.comes_back()
        await self.until(
            lambda: not among([*self.watched.firing(), *self.watched.received()]), RESOLVED_SECONDS, "it is resolved"
        )
        steps = sum(isinstance(event, InnerStep) for event in node.events)
        await self.until(lambda: sum(isinstance(e, InnerStep) for e in node.events) > steps, 60.0, "it trains again")

    async def comes_back(self) -> SwarmNode:
        """The first node of the lost stage, started again where it was."""
        dead = next(node for node in self.nodes if node.serves == LOST_STAGE)
        node = SwarmNode(dead.name, dead.stage, dead.folder, Observer())
        node.recall()
        alive = next(each for each in self.nodes if each.running and each.started)
        assert alive.started is not None
        options = ["--stage", str(LOST_STAGE), "--run-folder", str(node.folder)]
        command = [sys.executable, "-m", "noloco_node", "run", str(self.swarm.run_folder / "config.yaml"), *options]
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
        await self.swarm.stop()
        for node in self.nodes:
            if node not in self.swarm.nodes and node.process is not None:
                if node.process.returncode is None:
                    node.process.terminate()
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
    """What did not hold; run, logs and data stay in `folder`."""
    try_rules(folder)
    swarm = LocalSwarm(load_config(shipped_config("tiny"), SMALL), folder / "run")
    watched = Watchers()
    with watched.running(folder, folder / "run" / TARGETS):
        proof = Proof(watched, swarm)
        try:
            await swarm.start()
            async with seed_of(swarm, folder):
                await proof.until(proof.trains, TRAINING_SECONDS, "all train, average, evaluate and save")
                settled = time.monotonic() + QUIET_SECONDS
                await proof.until(lambda: time.monotonic() > settled, QUIET_SECONDS + 5.0, "a while of training")
                await asyncio.to_thread(proof.agreement)
                await proof.alert()
                await asyncio.to_thread(proof.panels)
        finally:
            await proof.end()
    return proof.wrong


def main() -> int:
    """0 where all of it held."""
    missing = [name for name in ("prometheus", "promtool", "prometheus-alertmanager") if shutil.which(name) is None]
    if missing:
        print(f"{', '.join(missing)} not found: apt-get install prometheus prometheus-alertmanager", file=sys.stderr)
        return 2
    with contextlib.ExitStack() as stack:
        if len(sys.argv) > 1:
            folder = Path(sys.argv[1]).absolute()
            folder.mkdir(parents=True)
        else:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="noloco-dashboards-")))
        wrong = asyncio.run(prove(folder))
    print("all held" if not wrong else f"{len(wrong)} did not hold")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
