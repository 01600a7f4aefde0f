"""What Prometheus and Grafana are given names metrics and labels that nodes have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.monitoring.trials import HEALTHY, TRIALS, Trial
from noloco_node.telemetry.metrics import SEED_TABLE, TABLE, Metric

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
PAGE = "docs/operations.md"
TARGET = frozenset({"job", "instance", "run", "node"})
"""Labels of every series that is scraped."""
PROCESS = (ROOT / "docs/metrics.md").read_text(encoding="utf-8").rpartition("## Of the process")[2]
RULES: dict[str, list[dict[str, Any]]] = {
    group["name"]: group["rules"]
    for group in yaml.safe_load((DEPLOY / "prometheus/rules.yml").read_text(encoding="utf-8"))["groups"]
}
RECORDED: dict[str, str] = {rule["record"]: rule["expr"] for rule in RULES["noloco"]}
ALERTS: dict[str, dict[str, Any]] = {rule["alert"]: rule for rule in RULES["noloco-alerts"]}
DASHBOARDS: dict[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_text(encoding="utf-8")) for path in (DEPLOY / "grafana/dashboards").iterdir()
}
LINES: dict[str, tuple[str, str]] = {
    f"{name}, {panel['id']} {panel['title']}, {target['refId']}": (target["expr"], target["legendFormat"])
    for name, dashboard in DASHBOARDS.items()
    for panel in dashboard["panels"]
    for target in panel.get("targets", ())
}
"""Every line of a panel: its expression and its legend."""
EXPRESSIONS = {
    **RECORDED,
    **{name: rule["expr"] for name, rule in ALERTS.items()},
    **{name: expression for name, (expression, _) in LINES.items()},
}
_METRIC = re.compile(r"(?<![\w:\"])((?:noloco|process)[_:][\w:]*|up)\b(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"')
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")


def selectors(expression: str) -> list[tuple[str, frozenset[str]]]:
    """Every metric that an expression names, with the labels that it is chosen by."""
    return [(each[1], frozenset(_MATCHER.findall(each[2] or ""))) for each in _METRIC.finditer(expression)]


def listed(labels: str) -> set[str]:
    """`run, stage` -> both."""
    return {label.strip() for label in labels.split(",") if label.strip()}


def series() -> Iterator[tuple[str, frozenset[str]]]:
    """Every series that can be asked for, with its labels."""
    for metric in (*TABLE.values(), *SEED_TABLE.values()):
        yield from ((name, labels | TARGET) for name, labels in scraped(metric))
    for name in re.findall(r"process_\w+", PROCESS):
        yield name, TARGET
    yield "up", TARGET
    for name, expression in RECORDED.items():
        by = re.match(r"\w+ by \(([^)]*)\)", expression)
        assert by, f"{name} is no aggregation with `by` at the front"
        yield name, frozenset(listed(by[1]))


def scraped(metric: Metric) -> Iterator[tuple[str, frozenset[str]]]:
    """The series of one metric."""
    labels = frozenset(metric.labels)
    if metric.kind == "histogram":
        yield metric.name + "_bucket", labels | {"le"}
        yield metric.name + "_sum", labels
        yield metric.name + "_count", labels
    else:
        yield metric.name, labels


SERIES = dict(series())


def faults(expression: str) -> list[str]:
    """What an expression names that no node has."""
    found = selectors(expression)
    unknown = [name for name, _ in found if name not in SERIES]
    wrong = [f"{name} has no {label}" for name, matched in found for label in matched - SERIES.get(name, set())]
    known = frozenset[str]().union(*(SERIES.get(name, frozenset()) for name, _ in found))
    grouped = {label for labels in _GROUPING.findall(expression) for label in listed(labels)}
    return unknown + wrong + sorted(grouped - known) + ([] if found else ["no metric"])


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_every_expression_names_metrics_and_labels_of_nodes(name: str) -> None:
    """In what it selects, and in what it groups and joins by."""
    assert faults(EXPRESSIONS[name]) == []


@pytest.mark.parametrize(
    "expression",
    [
        "rate(noloco_tokens[2m])",
        'noloco_refusals_total{stage="1"}',
        "sum by (reason) (noloco_tokens_total)",
        "noloco_hop_duration_seconds",
        "noloco:no_such:record",
        'noloco:replica_divergence:avg{instance="here"}',
        "process_start_time",
        "1 + 1",
    ],
)
def test_what_no_node_has_is_found(expression: str) -> None:
    """A misspelt metric, a label of another, a histogram without its ending, a record that nothing makes."""
    assert faults(expression)


def test_every_record_is_named_by_an_expression() -> None:
    """Else Prometheus computes it for nobody."""
    assert RECORDED.keys() <= {name for expression in EXPRESSIONS.values() for name, _ in selectors(expression)}


def test_legends_name_labels_that_the_series_have() -> None:
    """An aggregation keeps no others."""
    wrong: list[str] = []
    for line, (expression, legend) in LINES.items():
        known = frozenset[str]().union(*(SERIES[name] for name, _ in selectors(expression)))
        by = re.match(r"(?:\w+\([\d.]+, )?\w+ by \(([^)]*)\)", expression)
        left = listed(by[1]) if by else known
        wrong += [f"{line}: {label}" for label in set(re.findall(r"{{(\w+)}}", legend)) - left]
    assert wrong == []


def test_a_dashboard_narrows_every_metric_down() -> None:
    """A record is of a run; each other metric is narrowed by all that a viewer chooses."""
    for name, dashboard in DASHBOARDS.items():
        chosen = {choice["name"] for choice in dashboard["templating"]["list"]}
        for line, (expression, _) in LINES.items():
            if line.startswith(name):
                for metric, matched in selectors(expression):
                    assert matched >= ({"run"} if metric in RECORDED else chosen), line


def test_panels_lie_beside_each_other() -> None:
    """None over another, none outside the grid; ids are their own."""
    for dashboard in DASHBOARDS.values():
        places = [panel["gridPos"] for panel in dashboard["panels"]]
        cells = [
            (x, y)
            for place in places
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        ]
        assert len(cells) == len({*cells})
        assert max(x for x, _ in cells) < 24
        assert len({panel["id"] for panel in dashboard["panels"]}) == len(places)


def test_prometheus_reads_what_a_local_swarm_writes() -> None:
    """Compose's run folder, files of other nodes and of seeds, and the rules; file discovery takes no asterisk in a
    folder's name."""
    config = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text(encoding="utf-8"))
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))["services"]["swarm"]["command"]
    jobs = {job["job_name"]: job["file_sd_configs"][0]["files"] for job in config["scrape_configs"]}
    assert jobs.keys() == {"noloco", "noloco-seeds"}
    places = jobs["noloco"]
    assert not {*places} & {*jobs["noloco-seeds"]}, "a seed is no node"
    assert places[0] == f"{compose[compose.index('--run-folder') + 1]}/targets.json"
    assert [place for place in (*places, *jobs["noloco-seeds"]) if "*" in place.rpartition("/")[0]] == []
    assert [(DEPLOY / "prometheus" / name).exists() for name in config["rule_files"]] == [True]


def test_alertmanager_silences_only_alerts_that_exist() -> None:
    """Names in the example route."""
    text = (DEPLOY / "prometheus/alertmanager.yml").read_text(encoding="utf-8")
    assert set(re.findall(r"Noloco\w+", text)) <= ALERTS.keys()
    assert set(re.findall(r'severity="(\w+)"', text)) <= {rule["labels"]["severity"] for rule in ALERTS.values()}


def test_each_alert_has_its_section() -> None:
    """At the place that the alert's own description names, and none of an alert that is gone."""
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    assert re.findall(r"^### (\w+)$", page, flags=re.MULTILINE) == [*ALERTS]
    assert all(rule["annotations"]["description"] == f"{PAGE}#{name.lower()}" for name, rule in ALERTS.items())
    links = set(re.findall(r"\(#(\w+)\)", page))
    assert links <= {name.lower() for name in ALERTS}


def test_each_alert_is_tried_on_series_that_nodes_have() -> None:
    """`make dashboards` has promtool run the trials; one of them has no fault at all."""
    assert {name for trial in TRIALS for name in trial.fires} == ALERTS.keys()
    assert TRIALS[0] == Trial({})
    for trial in TRIALS:
        assert trial.other.keys() <= HEALTHY.keys()
    assert [name for name in HEALTHY if faults(name)] == []
