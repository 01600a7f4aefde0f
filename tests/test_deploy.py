"""The examples under deploy/ name what exists: commands, settings, ports, files. Their form is held by deploy/check."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from noloco_node import __version__
from noloco_node.cli import main as cli
from noloco_node.config.environment import PREFIX, node_environment
from noloco_node.config.files import shipped_configs
from noloco_node.config.load import load_join
from noloco_node.config.node_settings import NodeSettings
from noloco_node.errors import ExitCode

DEPLOY = Path(__file__).parent.parent / "deploy"
DOCKERFILE = (DEPLOY.parent / "Dockerfile").read_text(encoding="utf-8")
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
FILES = [path for path in sorted(DEPLOY.rglob("*")) if path.suffix in {".yaml", ".service", ".env", ".sbatch"}]


def environment_of_the_image() -> dict[str, str]:
    """What the Dockerfile sets for every container."""
    last_stage = DOCKERFILE.rpartition("\nFROM ")[2].replace("\\\n", " ")
    lines = [line.removeprefix("ENV ") for line in last_stage.splitlines() if line.startswith("ENV ")]
    return dict(pair.split("=", 1) for line in lines for pair in shlex.split(line))


def documents() -> Iterator[dict[str, Any]]:
    """All Kubernetes objects."""
    for path in MANIFESTS:
        yield from yaml.safe_load_all(path.read_text(encoding="utf-8"))


def test_docker_run_join_is_whole() -> None:
    """The image's own variables are settings; with them a node listens where its port can be mapped, and is seen."""
    node = load_join([], environment_of_the_image()).node
    assert (node.host, node.port, node.device) == ("0.0.0.0", 31337, "auto")
    assert (node.metrics_host, node.metrics_port) == ("0.0.0.0", 9100)
    assert f"EXPOSE {node.port} {node.metrics_port}" in DOCKERFILE
    assert 'HEALTHCHECK --interval=30s --timeout=5s --start-period=120s --retries=3 CMD ["noloco-node", "health"]' in (
        DOCKERFILE
    )
    assert cli.parser().parse_args(["health"])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(DEPLOY).as_posix())
def test_every_variable_in_an_example_stands_for_a_setting(path: Path) -> None:
    """Whatever looks like one of ours."""
    named = set(re.findall(rf"{PREFIX}[A-Z_]+\b", path.read_text(encoding="utf-8")))
    assert node_environment(dict.fromkeys(named, "1")).mistakes == {}


def test_whoever_stops_a_volunteers_node_waits_for_its_last_checkpoint() -> None:
    """A node ends by itself within `node.leave_seconds`; an earlier kill takes its last checkpoint away."""
    service = (DEPLOY / "systemd" / "noloco-node.service").read_text(encoding="utf-8")
    compose = yaml.safe_load((DEPLOY / "compose.volunteer.yaml").read_text(encoding="utf-8"))
    pods = (DEPLOY / "kubernetes" / "volunteers.yaml").read_text(encoding="utf-8")
    minutes = [int(found) for found in re.findall(r"(?m)^TimeoutStopSec=(\d+)min$", service)]
    minutes += [int(node["stop_grace_period"].removesuffix("m")) for node in compose["services"].values()]
    seconds = [60 * count for count in minutes]
    seconds += [int(found) for found in re.findall(r"terminationGracePeriodSeconds: (\d+)", pods)]
    assert len(seconds) >= 3
    assert min(seconds) > NodeSettings().leave_seconds


def commands() -> Iterator[tuple[str, list[str], Mapping[str, str]]]:
    """Every command of noloco-node in the examples, with what its environment would be."""
    for name in ("compose.yaml", "compose.volunteer.yaml"):
        for service in yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))["services"].values():
            if service["image"] == "noloco-node":
                texts: dict[str, str] = service.get("environment", {})
                given = {key: re.sub(r"\$\{\w+:.*", "", text) for key, text in texts.items()}
                yield name, service["command"], given
    for each in documents():
        if each["kind"] in ("Deployment", "StatefulSet"):
            (container,) = each["spec"]["template"]["spec"]["containers"]
            plain = {row["name"]: row.get("value", "") for row in container.get("env", ())}
            yield each["metadata"]["name"], container["args"], plain
    unit = (DEPLOY / "systemd/noloco-node.service").read_text(encoding="utf-8")
    settings = (DEPLOY / "systemd/noloco-node.env").read_text(encoding="utf-8")
    pairs = [line.split("=", 1) for line in settings.splitlines() if line and not line.startswith("#")]
    (start,) = re.findall(r"^ExecStart=\S*noloco-node (.*)$", unit, flags=re.MULTILINE)
    yield "systemd", start.split(), {key: text for key, text in pairs}
    slurm = (DEPLOY / "slurm/volunteer.sbatch").read_text(encoding="utf-8")
    (start,) = re.findall(r"^noloco-node (\w+)", slurm, flags=re.MULTILINE)
    yield "slurm", [start, "--devices", "all"], {}


@pytest.mark.parametrize(("where", "words", "environ"), [*commands()])
def test_every_command_in_an_example_is_understood(where: str, words: list[str], environ: Mapping[str, str]) -> None:
    """Its options exist, its configuration comes along, its settings hold."""
    options = cli.parser().parse_args(words)
    if words[0] == "swarm":
        assert str(options.config) in shipped_configs()
    load_join([], {**environment_of_the_image(), **environ})


def test_what_an_example_mounts_from_here_exists() -> None:
    """A folder that is missing would be made by the engine, empty."""
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))["services"].values()
    mounted = [volume.split(":")[0] for service in services for volume in service.get("volumes", ())]
    assert [place for place in mounted if place.startswith(".") and not (DEPLOY / place).exists()] == []


def test_manifests_agree_with_the_image_and_with_each_other() -> None:
    """Version, user, ports by name, and the service that each monitor and set refers to."""
    known = list(documents())
    services = {each["metadata"]["name"]: each for each in known if each["kind"] == "Service"}
    workloads = [each for each in known if each["kind"] in ("Deployment", "StatefulSet")]
    assert len(workloads) == 2
    for each in workloads:
        pod = each["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        assert container["image"] == f"noloco-node:{__version__}"
        assert f"USER {pod['securityContext']['runAsUser']}:{pod['securityContext']['runAsGroup']}" in DOCKERFILE
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports == {"p2p": 31337, "pages": 9100}
        assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "pages"}
        assert each["spec"]["selector"]["matchLabels"].items() <= each["spec"]["template"]["metadata"]["labels"].items()
        assert each.get("serviceName") in (None, *services)
    monitors = [each for each in known if each["kind"] == "ServiceMonitor"]
    for monitor in monitors:
        labels = monitor["spec"]["selector"]["matchLabels"]
        (chosen,) = (each for each in services.values() if labels == each["metadata"]["labels"])
        assert [port["name"] for port in chosen["spec"]["ports"]] == [e["port"] for e in monitor["spec"]["endpoints"]]
        pods = [each for each in workloads if each["spec"]["selector"]["matchLabels"] == chosen["spec"]["selector"]]
        assert [each["metadata"]["name"] for each in pods] == [monitor["metadata"]["name"]]
    assert len(monitors) == len(workloads)


def test_the_service_is_not_started_again_where_that_would_not_help() -> None:
    """By exit codes that exist; the ones that another try may mend are not among them."""
    unit = (DEPLOY / "systemd/noloco-node.service").read_text(encoding="utf-8")
    (codes,) = re.findall(r"^RestartPreventExitStatus=(.*)$", unit, flags=re.MULTILINE)
    hopeless = {ExitCode(int(code)) for code in codes.split()}
    assert {ExitCode.USAGE, ExitCode.CONFIG, ExitCode.WRONG_RUN, ExitCode.NOT_ADMITTED} <= hopeless
    assert not hopeless & {
        ExitCode.PEERS_UNREACHABLE,
        ExitCode.NO_STATE_SOURCE,
        ExitCode.P2P_DAEMON,
        ExitCode.NODE_DIED,
    }
    assert f"SuccessExitStatus={ExitCode.INTERRUPTED}" in unit
