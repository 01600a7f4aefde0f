"""A real Prometheus and a real Alertmanager on loopback, with the files of deploy/, and questions to them."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from deploy.monitoring.files import DEPLOY
from tests.support import free_port

READY_SECONDS = 60.0
SEEDS = "seeds.json"
"""Where the seed of the proof is named."""
Points = dict[tuple[tuple[str, str], ...], list[tuple[float, float]]]
"""Series by labels: time and value of each sample."""


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=20) as answer:
        return json.load(answer)


@dataclass(frozen=True, slots=True)
class Watchers:
    """Both servers, as `host:port`."""

    prometheus: str
    alertmanager: str

    def range(self, expression: str, start: float, end: float) -> Points:
        """Its series from `start` to `end`, seconds since 1970, every 5 seconds."""
        query = urllib.parse.urlencode({"query": expression, "start": start, "end": end, "step": 5.0})
        found = _get(f"http://{self.prometheus}/api/v1/query_range?{query}")["data"]["result"]
        return {
            tuple(sorted(each["metric"].items())): [(float(at), float(value)) for at, value in each["values"]]
            for each in found
        }

    def firing(self) -> list[dict[str, str]]:
        """Labels of the alerts that fire in Prometheus."""
        found = _get(f"http://{self.prometheus}/api/v1/alerts")["data"]["alerts"]
        return [each["labels"] for each in found if each["state"] == "firing"]

    def received(self) -> list[dict[str, str]]:
        """Labels of the alerts that Alertmanager holds."""
        found = _get(f"http://{self.alertmanager}/api/v2/alerts?active=true")
        return [each["labels"] for each in found]

    def console(self, name: str) -> str:
        """A console, as a browser gets it."""
        with urllib.request.urlopen(f"http://{self.prometheus}/consoles/{name}", timeout=20) as answer:
            return answer.read().decode()


def _configured(folder: Path, targets: Path, alertmanager: str) -> Path:
    """deploy's configuration, with the places of this run."""
    config = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text(encoding="utf-8"))
    config["rule_files"] = [str(DEPLOY / "prometheus" / name) for name in config["rule_files"]]
    for job, place in zip(config["scrape_configs"], (targets, folder / SEEDS), strict=True):
        job["file_sd_configs"][0]["files"] = [str(place)]
    config["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"] = [alertmanager]
    place = folder / "prometheus.yml"
    place.write_text(yaml.safe_dump(config), encoding="utf-8")
    return place


def check_files() -> None:
    """Hold the files to the validators of those who read them. CalledProcessError where one refuses."""
    prometheus = DEPLOY / "prometheus"
    for command in (
        ["promtool", "check", "config", str(prometheus / "prometheus.yml")],
        ["promtool", "check", "rules", str(prometheus / "rules.yml")],
        ["amtool", "check-config", str(prometheus / "alertmanager.yml")],
    ):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        print("ok", " ".join(command[:3]), flush=True)


@contextlib.contextmanager
def watchers(folder: Path, targets: Path) -> Iterator[Watchers]:
    """Both run as long as the block lasts; what they say and keep is in `folder`."""
    made = Watchers(f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}")
    config = _configured(folder, targets, made.alertmanager)
    subprocess.run(["promtool", "check", "config", str(config)], check=True, stdout=subprocess.DEVNULL)
    commands = {
        "prometheus": [
            "prometheus",
            f"--config.file={config}",
            f"--storage.tsdb.path={folder / 'prometheus'}",
            f"--web.listen-address={made.prometheus}",
            f"--web.console.templates={DEPLOY / 'prometheus/consoles'}",
        ],
        "alertmanager": [
            "prometheus-alertmanager",
            f"--config.file={DEPLOY / 'prometheus/alertmanager.yml'}",
            f"--storage.path={folder / 'alertmanager'}",
            f"--web.listen-address={made.alertmanager}",
            "--cluster.listen-address=",
        ],
    }
    with contextlib.ExitStack() as stack:
        for name, command in commands.items():
            log = stack.enter_context((folder / f"{name}.log").open("wb"))
            process = subprocess.Popen(command, stdout=log, stderr=log)
            stack.callback(process.wait, 30)
            stack.callback(process.terminate)
        for address in (made.prometheus, made.alertmanager):
            _until_ready(f"http://{address}/-/ready")
        yield made


def _until_ready(url: str) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while True:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            urllib.request.urlopen(url, timeout=5).close()
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"{url} is not ready within {READY_SECONDS:g} s")
        time.sleep(0.2)
