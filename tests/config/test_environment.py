"""Settings of a node from the environment: above the file, below the command line, and no typo goes unsaid."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from noloco_node.config.environment import variable_of, without_settings
from noloco_node.config.load import load_config, load_join
from noloco_node.config.node_settings import NodeSettings
from noloco_node.errors import ExitCode, UserError

MICRO = Path(__file__).parent.parent / "configs" / "micro.yaml"


def node(environ: Mapping[str, str], *overrides: str) -> NodeSettings:
    """The settings of a joiner in that environment."""
    return load_join(overrides, environ).node


def test_the_file_gives_way_to_the_environment_and_that_to_the_command_line(tmp_path: Path) -> None:
    """Three sources, one order, whatever the command."""
    file = tmp_path / "run.yaml"
    file.write_text(MICRO.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    in_file = load_config(file, ["node.in_flight=2", "node.port=4000"]).node
    assert (in_file.in_flight, in_file.port) == (2, 4000)
    environ = {"NOLOCO_NODE_IN_FLIGHT": "5", "NOLOCO_NODE_PORT": "5000"}
    loaded = load_config(file, ["node.port=6000"], environ).node
    assert (loaded.in_flight, loaded.port) == (5, 6000)
    assert load_config(file, [], environ).run == load_config(file).run


def test_every_setting_of_a_node_has_a_variable() -> None:
    """Each value that a setting can have as YAML can be given as text."""
    given = {
        "device": ("cuda:1", "cuda:1"),
        "port": ("31337", 31337),
        "metrics_port": ("null", None),
        "stage": ("2", 2),
        "relay": ("always", "always"),
        "drain_seconds": ("2.5", 2.5),
        "checkpoint_seconds": ("1e2", 100.0),
        "run_folder": ("/data/1", Path("/data/1")),
        "invitation": ("{a: b", "{a: b"),
        "announce": ("203.0.113.7:4000 gpu.example.org", ("203.0.113.7:4000", "gpu.example.org")),
        "initial_peers": ("/ip4/1.2.3.4/tcp/1/p2p/Qm,/ip4/1.2.3.5/tcp/1/p2p/Qm", 2),
        "log_level": ("DEBUG", "DEBUG"),
        "seed": (" 7 ", 7),
    }
    loaded = node({variable_of(name): text for name, (text, _) in given.items()})
    for name, (_, expected) in given.items():
        found = getattr(loaded, name)
        assert (len(found) if name == "initial_peers" else found) == expected
    for name in NodeSettings.model_fields:
        with_default = node({variable_of(name): ""})
        assert with_default == NodeSettings(), "an empty variable counts as not set"


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"NOLOCO_NODE_DEVIC": "cpu"}, ["NOLOCO_NODE_DEVIC", "did you mean NOLOCO_NODE_DEVICE?"]),
        ({"NOLOCO_DEVICE": "cpu"}, ["NOLOCO_DEVICE", "did you mean NOLOCO_NODE_DEVICE"]),
        ({"noloco_node_port": "1"}, ["noloco_node_port", "did you mean NOLOCO_NODE_PORT"]),
        ({"NOLOCO_NODE_METRIC_PORT": "1"}, ["did you mean NOLOCO_NODE_METRICS_PORT"]),
        ({"NOLOCO_RUN_INNER_LEARNING_RATE": "1"}, ["no variable stands for a setting of run:"]),
        ({"NOLOCO_XYZZY": "1"}, ["NOLOCO_XYZZY", "leave it out"]),
        ({"NOLOCO_NODE_PORT": "http"}, ["NOLOCO_NODE_PORT", "'http'", "must be a whole number"]),
        ({"NOLOCO_NODE_PORT": "70000"}, ["NOLOCO_NODE_PORT", "70000", "65535"]),
        ({"NOLOCO_NODE_PORT": "yes"}, ["NOLOCO_NODE_PORT", "boolean"]),
        ({"NOLOCO_NODE_PORT": "[1"}, ["NOLOCO_NODE_PORT", "'[1'"]),
        ({"NOLOCO_NODE_LOG_LEVEL": "LOUD"}, ["NOLOCO_NODE_LOG_LEVEL", "'LOUD'", "'DEBUG'"]),
        ({"NOLOCO_NODE_RELAY": "perhaps"}, ["NOLOCO_NODE_RELAY", "'perhaps'"]),
        (
            {"NOLOCO_NODE_SEED": "x", "NOLOCO_NOD_SEED": "1"},
            ["2 settings are wrong", "NOLOCO_NODE_SEED", "NOLOCO_NOD_"],
        ),
    ],
)
def test_a_variable_with_a_typo_or_a_bad_value_is_named(environ: Mapping[str, str], named: list[str]) -> None:
    """By the variable's own name, with its nearest neighbour or what is allowed."""
    with pytest.raises(UserError) as caught:
        load_config(MICRO, [], environ)
    assert caught.value.exit_code is ExitCode.CONFIG
    for words in ("the environment", *named):
        assert words in str(caught.value)
    with pytest.raises(UserError):
        node(environ)


@pytest.mark.parametrize(
    ("environ", "overrides"),
    [
        ({"NOLOCO_NODE_METRICS_HOST": "0.0.0.0"}, ["node.metrics_port=9100"]),
        ({"NOLOCO_NODE_DRAIN_SECONDS": "700"}, ["node.leave_seconds=900"]),
    ],
)
def test_settings_are_judged_together_when_the_commands_options_are_among_them(
    environ: Mapping[str, str], overrides: list[str]
) -> None:
    """A variable may need what only the command line says. Without that it is refused."""
    node(environ, *overrides)
    load_config(MICRO, overrides, environ)
    for load in (lambda: node(environ), lambda: load_config(MICRO, [], environ)):
        with pytest.raises(UserError, match=r"node\.(metrics_port is not set|leave_seconds)"):
            load()


def test_variables_of_others_are_left_alone() -> None:
    """Those of the tests, of other programs, and those by which Kubernetes names a service called like this one."""
    environ = {
        "NOLOCO_CHAOS_SOAK_MINUTES": "3",
        "PATH": "/bin",
        "NOLOCO_NODE_SERVICE_HOST": "10.0.0.1",
        "NOLOCO_NODE_SERVICE_PORT_P2P": "31337",
        "NOLOCO_NODE_PORT": "tcp://10.0.0.1:31337",
        "NOLOCO_NODE_PORT_31337_TCP_ADDR": "10.0.0.1",
        "NOLOCO_SEED_PORT": "tcp://10.0.0.1:31337",
    }
    assert node(environ) == NodeSettings()


def test_daemons_of_a_launcher_do_not_read_the_variables_again() -> None:
    """A local swarm has read them into the file that all its daemons get; their ports must differ."""
    assert without_settings({"NOLOCO_NODE_PORT": "1", "PATH": "/bin", "NOLOCO_CHAOS_X": "1"}) == {
        "PATH": "/bin",
        "NOLOCO_CHAOS_X": "1",
    }
